"""Who is connected to a server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..wire import Layout, WireFormat
from .coordinator import Coordinator
from .model import layout_of

# A worker that trains a long round is silent; when it speaks again it is asked who it is.
SILENT_S = 600.0
MAX_SESSIONS = 20_000


@dataclass
class Session:
    """One connection of one worker.

    Attributes:
        peer: ZeroMQ's name of the connection.
        held: Version that is kept readable for it, since ``held_at``.
        is_reading: It has been told so, and fetches.
        steps: Inner steps of its next round.
        evictions: How often a slow download was cut off.
    """

    peer: bytes
    worker: str
    sizes: list[int] = field(repr=False)
    layout: int
    seen_at: float
    held: int | None = None
    held_at: float = 0.0
    is_reading: bool = False
    steps: int = 0
    evictions: int = 0
    _layouts: dict[WireFormat, list[Layout]] = field(default_factory=dict, repr=False)

    def layouts(self, wire: WireFormat) -> list[Layout]:
        """Return how its fragments are laid out on a wire."""
        if wire not in self._layouts:
            self._layouts[wire] = [layout_of(size, wire) for size in self.sizes]
        return self._layouts[wire]

    def hold(self, coordinator: Coordinator, steps: int) -> None:
        """Keep the present version readable for this worker."""
        self.let_go(coordinator)
        self.held, self.held_at, self.steps = coordinator.model.hold(), time.monotonic(), steps

    def let_go(self, coordinator: Coordinator | None) -> None:
        """Keep nothing for it any more; idempotent."""
        held, self.held, self.is_reading = self.held, None, False
        if held is not None and coordinator is not None:
            coordinator.model.let_go(held)


class Sessions:
    """All sessions, by connection and by worker."""

    def __init__(self) -> None:
        self._by_peer: dict[bytes, Session] = {}
        self._by_worker: dict[str, Session] = {}

    def all(self) -> list[Session]:
        return list(self._by_peer.values())

    def get(self, peer: bytes) -> Session | None:
        return self._by_peer.get(peer)

    def of(self, worker: str) -> Session | None:
        return self._by_worker.get(worker)

    def add(self, session: Session) -> None:
        """Add a session; beyond ``MAX_SESSIONS`` the oldest that holds nothing makes room."""
        old = self._by_peer.get(session.peer)
        if old is not None and old.worker == session.worker:
            old.seen_at = session.seen_at
            return
        if len(self._by_peer) >= MAX_SESSIONS:
            idle = next((s for s in self.all() if s.held is None), None)
            if idle is not None:
                self.drop(idle.peer)
        self._by_peer[session.peer] = session
        self._by_worker[session.worker] = session

    def drop(self, peer: bytes) -> Session | None:
        """Forget a connection; its worker may have another one."""
        session = self._by_peer.pop(peer, None)
        if session is not None and self._by_worker.get(session.worker) is session:
            del self._by_worker[session.worker]
        return session

    def forget_silent(self, now: float) -> None:
        for session in self.all():
            if session.held is None and now - session.seen_at > SILENT_S:
                self.drop(session.peer)

    def let_go_all(self, coordinator: Coordinator | None) -> None:
        for session in self.all():
            session.let_go(coordinator)
