"""The status that a syncer reports."""

from __future__ import annotations

import time
from typing import Any

from ...server.status import MAX_WORKERS
from .state import SyncerState

MAX_SHOWN = 64


def report_of(state: SyncerState) -> dict[str, Any]:
    """Return the status as JSON types, small enough for one message."""
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
        "fragments": [],
        "learners": {},
        "storage": None,
    }
    if model is not None:
        rounds = model.syncer.rounds
        report["parameters"], report["commits"] = model.num_elements, model.num_commits
        report["fragments"] = [
            {
                "version": published.version,
                "phase": here.phase.value,
                "reported": sorted(here.reported)[:MAX_SHOWN],
            }
            for published, here in list(zip(model.published, rounds, strict=True))[:MAX_SHOWN]
        ]
        names = sorted(model.syncer.learners)[:MAX_WORKERS]
        report["learners"] = {
            name: {
                "steps": model.syncer.steps_of(name),
                "step_s": model.syncer.step_s_of(name),
                "merged": state.merged[name],
            }
            for name in names
        }
    if state.storage is not None:
        report["storage"] = state.storage.keeper.report(0 if model is None else model.num_commits)
    return report
