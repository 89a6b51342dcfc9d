"""The status that a server reports."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..model.rules import ServerRule
from .decisions.coordinator import Coordinator
from .sessions import Sessions
from .uploads import PayloadMemory

MAX_WORKERS = 200
MAX_STALENESS = 64


@dataclass
class Status:
    """Counters of one server process."""

    started_at: float = field(default_factory=time.monotonic)
    received_bytes: int = 0
    sent_bytes: int = 0
    apply_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    lost: int = 0

    def count_refusal(self, kind: str) -> None:
        """Count a message or upload that never became an update, such as "garbage" or "stalled"."""
        self.refused[kind] += 1

    def report(
        self,
        coordinator: Coordinator | None,
        sessions: Sessions,
        memory: PayloadMemory,
        rule: ServerRule,
    ) -> dict[str, Any]:
        """Return the status as JSON types, small enough for one message; any thread may ask."""
        report: dict[str, Any] = {
            "schema": 1,
            "uptime_s": round(time.monotonic() - self.started_at, 3),
            "rule": rule.config(),
            "connections": len(sessions.all()),
            "lost": self.lost,
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "payload_bytes": memory.used_bytes,
            "apply_s": round(self.apply_s, 6),
            "updates": 0,
            "parameters": 0,
            "refused": dict(self.refused),
            "duplicates": 0,
            "staleness": {},
            "workers": {},
        }
        if coordinator is not None:
            report |= self._of(coordinator, sessions)
        return report

    def _of(self, coordinator: Coordinator, sessions: Sessions) -> dict[str, Any]:
        counts, model = coordinator.counts, coordinator.model
        staleness: Counter[str] = Counter()
        # Copies: a worker may come, or send an update, while another thread asks.
        for value, number in list(counts.staleness.items()):
            staleness[str(value) if value < MAX_STALENESS else f"{MAX_STALENESS}+"] += number
        # All connected workers, and the newest of the workers that are not connected.
        order = sorted(coordinator.members, key=lambda name: sessions.of(name) is not None)
        shown = set(order[-MAX_WORKERS:])
        workers = {
            name: {
                "applied": member.num_applied,
                "seq": member.last.seq,
                "speed": coordinator.speeds.by_worker.get(name),
                "connected": sessions.of(name) is not None,
            }
            for name, member in list(coordinator.members.items())
            if name in shown
        }
        return {
            "updates": model.version,
            "parameters": model.num_elements,
            "buffer_bytes": model.buffer_bytes,
            "refused": dict(self.refused.copy() + counts.refused.copy()),
            "duplicates": counts.duplicates,
            "staleness": dict(staleness),
            "workers": workers,
        }
