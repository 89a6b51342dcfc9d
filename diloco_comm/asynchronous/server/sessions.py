"""Who is connected to a server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ...ops.wire import Layout, WireFormat
from ..model.shared import SharedModel, layout_of
from ..protocol.messages import MAX_UPDATES, Kind
from .decisions.coordinator import Coordinator

MAX_SESSIONS = 20_000
NOTHING = -1


@dataclass
class Session:
    """One connection of one worker.

    Attributes:
        peer: ZeroMQ's name of the connection.
        connection: Its number, see ``Connections``.
        instance: A random number of the worker's own; 0 if it says none.
        contested: By which instance its name is wanted as well, and since when.
        follows: Version that it holds all of and follows by updates; ``NOTHING`` if it wants to;
            None if it wants parameters.
        token: Number of its question, which the answer repeats.
        held: Version that is kept for it to go on from, since ``held_at``.
        answer: How it gets there: READY, STATE or UPDATES; the last since version ``base``.
        is_reading: It has been told so, and fetches.
        steps: Inner steps of its next round.
        evictions: How often a slow download was cut off.
    """

    peer: bytes
    connection: int
    worker: str
    sizes: list[int] = field(repr=False)
    layout: int
    seen_at: float
    instance: int = 0
    contested: tuple[int, float] | None = None
    follows: int | None = None
    token: int = 0
    held: int | None = None
    answer: Kind = Kind.READY
    base: int = 0
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
        """Keep the present version for this worker, or the updates that lead there."""
        self.release(coordinator)
        model = coordinator.model
        self.answer = how_to_follow(model, self.follows)
        if self.answer == Kind.UPDATES:
            assert self.follows is not None
            self.base, self.held = self.follows, model.version
            model.pin(self.base)
        else:
            self.held = model.hold()
        self.held_at, self.steps = time.monotonic(), steps

    def release(self, coordinator: Coordinator | None) -> None:
        """Keep nothing for it any more; idempotent."""
        held, self.held, self.is_reading = self.held, None, False
        if held is None or coordinator is None:
            return
        if self.answer == Kind.UPDATES:
            coordinator.model.unpin(self.base)
        else:
            coordinator.model.release(held)


def how_to_follow(model: SharedModel, follows: int | None) -> Kind:
    """Say how a worker gets to the newest version: by parameters, all buffers, or updates."""
    if follows is None or not model.can_be_followed:
        return Kind.READY
    if follows == NOTHING:
        return Kind.STATE
    updates = model.updates_since(follows)
    if updates is None or len(updates) > MAX_UPDATES:
        return Kind.READY
    # One of them is likely to be the worker's own, which it has.
    is_less = sum(update.num_bytes for update in updates[1:]) <= 4 * model.num_elements
    return Kind.UPDATES if is_less else Kind.READY


class Sessions:
    """All sessions, by connection and by worker."""

    def __init__(self) -> None:
        self._by_peer: dict[bytes, Session] = {}
        self._by_worker: dict[str, Session] = {}
        self._by_connection: dict[int, Session] = {}

    def all(self) -> list[Session]:
        return list(self._by_peer.values())

    def get(self, peer: bytes) -> Session | None:
        return self._by_peer.get(peer)

    def of(self, worker: str) -> Session | None:
        return self._by_worker.get(worker)

    def on(self, connection: int) -> Session | None:
        """Return the newest session of a connection."""
        return self._by_connection.get(connection)

    def add(self, session: Session) -> None:
        """Add a session; an older one of the same connection and worker stays in place."""
        old = self._by_peer.get(session.peer)
        if old is not None and old.worker == session.worker:
            old.seen_at, old.connection = session.seen_at, session.connection
            session = old
        self._by_peer[session.peer] = session
        self._by_worker[session.worker] = session
        self._by_connection[session.connection] = session

    def superfluous(self) -> Session | None:
        """Return the oldest session that holds nothing if there are ``MAX_SESSIONS``."""
        if len(self._by_peer) < MAX_SESSIONS:
            return None
        return next((session for session in self.all() if session.held is None), None)

    def drop(self, peer: bytes) -> Session | None:
        """Forget a connection; its worker may have another one."""
        session = self._by_peer.pop(peer, None)
        if session is None:
            return None
        if self._by_worker.get(session.worker) is session:
            del self._by_worker[session.worker]
        if self._by_connection.get(session.connection) is session:
            del self._by_connection[session.connection]
        return session

    def release_all(self, coordinator: Coordinator | None) -> None:
        for session in self.all():
            session.release(coordinator)
