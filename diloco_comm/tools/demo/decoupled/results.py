"""What the learners of the demo said, the claims about it, and the JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from .... import __version__
from ..report.results import Claim
from .learner import Ended, Ready, Stepped
from .settings import DecoupledDemo

# A step may last so much longer after the kill: other programs share the processor.
_MARGIN = 1.1


@dataclass
class Track:
    """What one learner said."""

    ready: Ready | None = None
    steps: list[Stepped] = field(default_factory=list)
    ended: Ended | None = None

    def pace_s(self, begin: float, end: float) -> float:
        """Return the median seconds from the end of a step to the end of the next one.

        Args:
            begin, end: Steps between these times count; at least two are needed.
        """
        times = [step.at for step in self.steps if begin <= step.at <= end]
        if len(times) < 2:
            return float("nan")
        return median(after - before for before, after in pairwise(times))


@dataclass
class Results:
    """All of one demo; times are those of the monotonic clock."""

    demo: DecoupledDemo
    tracks: list[Track]
    began: float = 0.0
    killed_at: float = 0.0
    ended_at: float = 0.0
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def others(self) -> list[int]:
        """The learners that were not killed."""
        return [i for i in range(len(self.tracks)) if i != self.demo.killed]

    def pace_s(self, learner: int) -> tuple[float, float]:
        """Return the seconds a step of a learner before and after the kill."""
        track = self.tracks[learner]
        before = track.pace_s(self.began, self.killed_at)
        return before, track.pace_s(self.killed_at, self.ended_at)

    def versions(self, learner: int) -> tuple[int, int]:
        """Return how many commits a learner had taken at the kill, and at the end."""
        steps = self.tracks[learner].steps
        before = [step.version for step in steps if step.at <= self.killed_at]
        return before[-1] if before else 0, steps[-1].version if steps else 0

    def losses(self) -> tuple[float, float]:
        """Return the held-out loss of the shared model at the begin and at the end."""
        first, last = self.tracks[0].ready, self.tracks[0].ended
        assert first is not None and last is not None
        return first.loss, last.loss

    def claims(self) -> list[Claim]:
        """Return what decoupled training promises, and whether this run confirms it."""
        fast = [i for i in self.others if i != self.demo.slow]
        pace = {i: self.pace_s(i) for i in self.others}
        longest = max(pace[i][1] / pace[i][0] for i in self.others)
        apart = pace[self.demo.slow][0] / max(pace[i][0] for i in fast)
        before, after = self.versions(0)
        first, last = self.losses()
        return [
            Claim(
                f"the steps of the others last at most {longest:.2f} times as long after learner "
                f"{self.demo.killed} was killed ({_MARGIN:g})",
                longest <= _MARGIN,
            ),
            Claim(
                f"the steps of learner {self.demo.slow} last {apart:.1f} times as long as those of "
                f"the fast learners ({self.demo.slow_factor:g}): nobody waits for it",
                apart >= 0.75 * self.demo.slow_factor,
            ),
            Claim(
                f"learner 0 took {before} commits before the kill and {after - before} after it",
                0 < before < after,
            ),
            Claim(
                f"the held-out loss of the shared model fell from {first:.2f} to {last:.2f} nats a "
                "byte",
                last < first,
            ),
        ]

    def as_json(self) -> str:
        """Return the content of ``decoupled.json``."""
        settings = dataclasses.asdict(self.demo)
        settings["data"] = None if self.demo.data is None else str(self.demo.data)
        content = {
            "schema": 1,
            "diloco_comm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "settings": settings,
            "run": self.demo.run.to_json(),
            "killed_at": self.killed_at - self.began,
            "seconds": self.ended_at - self.began,
            "losses": self.losses(),
            "learners": [self._learner(i) for i in range(len(self.tracks))],
            "claims": [dataclasses.asdict(claim) for claim in self.claims()],
        }
        return json.dumps(content, indent=1)

    def _learner(self, index: int) -> dict[str, Any]:
        track = self.tracks[index]
        before, after = self.pace_s(index)
        return {
            "number": index,
            "step_s_before": before if math.isfinite(before) else None,
            "step_s_after": after if math.isfinite(after) else None,
            "end": None if track.ended is None else dataclasses.asdict(track.ended),
            "steps": [
                [round(step.at - self.began, 4), round(step.loss, 4), step.version]
                for step in track.steps
            ],
        }
