"""The results of a chaos demo: what each event cost, the claims, and the JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .... import __version__
from ..report.results import Claim
from .messages import DONE, LEFT_BEHIND
from .record import Happened, Record, Track, View
from .settings import KILLED, NEWCOMER, STOPPED, ChaosSettings

# The losses at the begin and the end are means over so many seconds.
_SPAN_S = 2.0
# One step of so many is written to the file.
_KEPT_STEPS = 5


@dataclass(frozen=True)
class Row:
    """An event, and the view that came of it; None where no view did."""

    event: Happened
    view: View | None


@dataclass
class Results:
    """What a run of the script has shown."""

    settings: ChaosSettings
    record: Record
    source: str
    unigram_entropy: float
    total_seconds: float

    def rows(self) -> list[Row]:
        """Return the events, each with the first view after it that shows its effect."""
        return [Row(event, self._effect_of(event)) for event in self.record.events]

    def _effect_of(self, event: Happened) -> View | None:
        replica = event.replica
        wanted: dict[str, Callable[[View], bool]] = {
            "kill": lambda view: replica in view.left,
            "stop": lambda view: replica in view.left,
            "join": lambda view: replica in view.joined,
            "resume": lambda view: replica in view.joined,
        }
        is_effect = wanted.get(event.kind)
        if is_effect is None:
            return None
        views = [self.record.views[number] for number in sorted(self.record.views)]
        return next((view for view in views if view.at > event.at and is_effect(view)), None)

    def event(self, kind: str) -> Happened:
        return next(event for event in self.record.events if event.kind == kind)

    def claims(self) -> list[Claim]:
        """Return what elastic membership promises, and whether this run confirms it."""
        record = self.record
        effects = {row.event.kind: row.view for row in self.rows()}
        last = [track for track in record.tracks if track.how == DONE]
        hashes = {track.outer_hash for track in last}
        down, up = self.event("registry down").at, self.event("registry up").at
        away_steps = record.num_steps_between(down, up)
        beside = [effects["join"], effects["resume"]]
        copied = sum(view.copied_bytes for view in beside if view is not None)
        first, final = self.losses()
        is_back = any(track.how == LEFT_BEHIND for track in record.tracks_of(STOPPED))
        return [
            Claim(
                f"the others went on without replica {KILLED}, which was killed, and without "
                f"replica {STOPPED}, which was stopped",
                effects["kill"] is not None and effects["stop"] is not None,
            ),
            Claim(
                f"replica {STOPPED} was left behind when it woke up, and came again",
                is_back and effects["resume"] is not None,
            ),
            Claim(
                f"replicas {NEWCOMER} and {STOPPED} joined, and the others waited for {copied} "
                "bytes of state (0)",
                None not in beside and copied == 0,
            ),
            Claim(
                f"the replicas took {away_steps} inner steps while the registry was away "
                f"(more than {self.settings.sync_every})",
                away_steps > self.settings.sync_every,
            ),
            Claim(
                f"replicas {sorted(track.number for track in last)} end at one inner step, "
                "bit-identical",
                len(hashes) == 1 and len({track.inner_step for track in last}) == 1,
            ),
            Claim(
                f"the loss fell from {first:.2f} to {final:.2f} nats a byte, below the unigram "
                f"entropy of the text, {self.unigram_entropy:.2f}",
                final < self.unigram_entropy < first,
            ),
        ]

    def losses(self) -> tuple[float, float]:
        """Return the mean training loss in the first and in the last two seconds."""
        points = self.record.mean_loss(_SPAN_S, _SPAN_S)
        if not points:
            return float("nan"), float("nan")
        return points[0][1], points[-1][1]

    def as_json(self) -> str:
        """Return settings, machine, events, views, the life of each process, and claims."""
        return json.dumps(self._as_dict(), indent=1, default=str)

    def _as_dict(self) -> dict[str, Any]:
        record = self.record
        events = [
            {**dataclasses.asdict(row.event), "view": row.view and row.view.number}
            for row in self.rows()
        ]
        return {
            "schema": 1,
            "diloco_comm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "settings": dataclasses.asdict(self.settings),
            "text": self.source,
            "unigram_entropy_nats": self.unigram_entropy,
            "num_parameters": record.num_parameters,
            "total_seconds": self.total_seconds,
            "events": events,
            "views": [dataclasses.asdict(record.views[number]) for number in sorted(record.views)],
            "processes": [self._track_as_dict(track) for track in record.tracks],
            "loss": record.mean_loss(_SPAN_S, 0.5),
            "tokens_per_second": record.rate(self.settings.tokens_per_step, 1.0),
            "claims": [dataclasses.asdict(claim) for claim in self.claims()],
        }

    def _track_as_dict(self, track: Track) -> dict[str, Any]:
        values = dataclasses.asdict(track)
        values["steps"] = values["steps"][::_KEPT_STEPS]
        values["copied"] = {"received_bytes": track.copied[0], "total_bytes": track.copied[1]}
        bands = [dataclasses.asdict(band) for band in self.record.bands(track)]
        return {**values, "bands": bands}
