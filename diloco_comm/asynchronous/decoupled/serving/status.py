"""The status that a syncer reports."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

from ...protocol.messages import MAX_JSON
from ...server.status import MAX_WORKERS
from .model import ServedModel
from .state import SyncerState

MAX_SHOWN = 64
# Bytes of the message that are left for its envelope.
_MARGIN = 256
# A status is given out again for so many times the seconds that the making took, at most a second.
_KEPT_FOR, _MOST_KEPT_S = 20, 1.0


class KeptStatus:
    """The status for peers: many requests take at most a twentieth of the merging thread's time.

    Args:
        state: The syncer's state.
    """

    def __init__(self, state: SyncerState) -> None:
        self._state = state
        self._status: dict[str, Any] = {}
        self._until = -1.0

    def get(self) -> dict[str, Any]:
        """Return the status, made now or at most a second ago."""
        begin = time.monotonic()
        if begin >= self._until:
            self._status = report_of(self._state)
            end = time.monotonic()
            self._until = end + min(_KEPT_FOR * (end - begin), _MOST_KEPT_S)
        return self._status


def report_of(state: SyncerState) -> dict[str, Any]:
    """Return the status as JSON types, small enough for one message; any thread may ask.

    Names are left out where all of them would be too many: first those that have reported on a
    fragment, then those of learners. The numbers stay.
    """
    model = state.model
    report = _without_names(state, model)
    if model is None:
        return report
    # One copy: a learner may leave while another thread asks.
    steps = model.syncer.steps()
    report["num_learners"] = len(steps)
    room = MAX_JSON - _MARGIN - _size(report)
    for name in sorted(steps)[:MAX_WORKERS]:
        row = {
            "steps": steps[name],
            "step_s": model.syncer.step_s_of(name),
            "merged": state.merged[name],
        }
        room -= _size({name: row})
        if room < 0:
            break
        report["learners"][name] = row
    rows = report["fragments"]
    for row, here in zip(rows, model.syncer.rounds[:MAX_SHOWN], strict=True):
        row["reported"] = _that_fit(sorted(here.reported)[:MAX_WORKERS], room // len(rows))
    return report


def _size(value: Any) -> int:
    """Return the bytes of a value as JSON."""
    return len(json.dumps(value, separators=(",", ":")))


def _that_fit(names: Iterable[str], room: int) -> list[str]:
    """Return the first names, as many as fit into so many bytes of JSON."""
    found = []
    for name in names:
        room -= _size(name) + 1
        if room < 0:
            break
        found.append(name)
    return found


def _without_names(state: SyncerState, model: ServedModel | None) -> dict[str, Any]:
    """Return the status without the names of learners."""
    status = state.status
    report: dict[str, Any] = {
        "schema": 1,
        "mode": "decoupled",
        "uptime_s": round(time.monotonic() - status.started_at, 3),
        "settings": state.settings.to_json(),
        "outer": state.outer.config(),
        "connections": len(state.sessions.all()),
        "lost": status.lost,
        "received_bytes": status.received_bytes,
        "sent_bytes": status.sent_bytes,
        "payload_bytes": state.memory.used_bytes,
        "apply_s": round(status.apply_s, 6),
        "refused": dict(status.refused),
        "parameters": 0,
        "commits": 0,
        "num_fragments": 0,
        "fragments": [],
        "num_learners": 0,
        "learners": {},
        "storage": None,
    }
    if model is not None:
        report["parameters"], report["commits"] = model.num_elements, model.num_commits
        report["num_fragments"] = len(model.published)
        pairs = zip(model.published, model.syncer.rounds, strict=True)
        report["fragments"] = [
            {
                "version": published.version,
                "phase": here.phase.value,
                "num_reported": len(here.reported),
                "reported": [],
            }
            for published, here in islice(pairs, MAX_SHOWN)
        ]
    if state.storage is not None:
        report["storage"] = state.storage.keeper.report(0 if model is None else model.num_commits)
    return report
