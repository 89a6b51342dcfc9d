"""The status that a syncer reports."""

from __future__ import annotations

import json
import time
from typing import Any

from ...protocol.messages import MAX_JSON
from ...server.status import MAX_WORKERS
from .state import SyncerState

MAX_SHOWN = 64
# Bytes of the message that are left for its envelope.
_MARGIN = 256


def report_of(state: SyncerState) -> dict[str, Any]:
    """Return the status as JSON types, small enough for one message.

    Names are left out where all of them would be too many: first those that have reported on a
    fragment, then those of learners. The numbers stay.
    """
    num_learners = num_reported = MAX_WORKERS
    while True:
        report = _report_of(state, num_learners, num_reported)
        is_fit = len(json.dumps(report, separators=(",", ":"))) <= MAX_JSON - _MARGIN
        if is_fit or not num_learners:
            return report
        if num_reported:
            num_reported //= 2
        else:
            num_learners //= 2


def _report_of(state: SyncerState, num_learners: int, num_reported: int) -> dict[str, Any]:
    status, model = state.status, state.model
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
        rounds, learners = model.syncer.rounds, model.syncer.learners
        report["parameters"], report["commits"] = model.num_elements, model.num_commits
        report["num_fragments"], report["num_learners"] = len(rounds), len(learners)
        report["fragments"] = [
            {
                "version": published.version,
                "phase": here.phase.value,
                "num_reported": len(here.reported),
                "reported": sorted(here.reported)[:num_reported],
            }
            for published, here in list(zip(model.published, rounds, strict=True))[:MAX_SHOWN]
        ]
        report["learners"] = {
            name: {
                "steps": model.syncer.steps_of(name),
                "step_s": model.syncer.step_s_of(name),
                "merged": state.merged[name],
            }
            for name in sorted(learners)[:num_learners]
        }
    if state.storage is not None:
        report["storage"] = state.storage.keeper.report(0 if model is None else model.num_commits)
    return report
