"""The workers that are connected to a server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ...ops.wire import Layout, WireFormat
from ..model.shared import SharedModel, layout_of
from ..protocol.messages import MAX_UPDATES, Kind
from .decisions.coordinator import Coordinator

MAX_SESSIONS = 20_000
# ``Session.follows`` of a worker that wants to follow and holds no version yet.
NOTHING = -1
# Seconds that a worker may take to ask for a version first.
BEGIN_S = 2.0


@dataclass
class Session:
    """One connection of one worker.

    Attributes:
        peer: ZeroMQ's name of the connection.
        connection: Number of the connection, see ``Connections``.
        instance: Random number of the worker's process; 0 if the worker sent none.
        unexchanged: Digests of the worker's frozen parameters and persistent buffers, or None.
        memory: Where in shared memory the worker's parameters lie.
        contested: Instance of another worker that wants the same name, and since when.
        follows: Version whose buffers the worker holds and keeps up to date by updates. ``NOTHING``
            if the worker wants to hold one; None if it fetches parameters.
        token: Number of the worker's last question, which the answer repeats.
        held: Version that is kept for the worker's next round, since ``held_at``.
        answer: How the worker gets version ``held``: READY (parameters), STATE (all buffers) or
            UPDATES (the updates since version ``base``).
        is_reading: The worker has the answer and fetches the version.
        read_at: When the worker began to fetch, or asked for a place beyond ``furthest``.
        furthest: Last place (number, fragment, run) of the version that the worker has asked for.
        patience_s: How long the worker may keep an older version before it asks for any of it.
        barred_until: The worker waits until then: it kept others waiting, and asked for nothing.
        steps: Inner steps of the worker's next round.
        evictions: How often a slow download of the worker was ended.
    """

    peer: bytes
    connection: int
    worker: str
    sizes: list[int] = field(repr=False)
    layout: int
    seen_at: float
    instance: int = 0
    unexchanged: list[int] | None = None
    memory: frozenset[str] = frozenset()
    contested: tuple[int, float] | None = None
    follows: int | None = None
    token: int = 0
    held: int | None = None
    answer: Kind = Kind.READY
    base: int = 0
    held_at: float = 0.0
    is_reading: bool = False
    read_at: float = 0.0
    furthest: tuple[int, int, int] | None = None
    barred_until: float = 0.0
    patience_s: float = BEGIN_S
    steps: int = 0
    evictions: int = 0
    _layouts: dict[WireFormat, list[Layout]] = field(default_factory=dict, repr=False)

    def layouts(self, wire: WireFormat) -> list[Layout]:
        """Return the layouts of the worker's fragments on a wire."""
        if wire not in self._layouts:
            self._layouts[wire] = [layout_of(size, wire) for size in self.sizes]
        return self._layouts[wire]

    def hold(self, coordinator: Coordinator, steps: int) -> None:
        """Keep the newest version for this worker, or the updates that lead to that version."""
        self.release(coordinator)
        model = coordinator.model
        self.answer = how_to_follow(model, self.follows)
        if self.answer == Kind.UPDATES:
            assert self.follows is not None
            self.base, self.held = self.follows, model.version
            model.pin(self.base)
        else:
            self.held = model.hold()
        self.held_at, self.steps, self.furthest = time.monotonic(), steps, None

    def release(self, coordinator: Coordinator | None) -> None:
        """Keep no version for this worker any more; idempotent."""
        held, self.held, self.is_reading = self.held, None, False
        if held is None or coordinator is None:
            return
        if self.answer == Kind.UPDATES:
            coordinator.model.unpin(self.base)
        else:
            coordinator.model.release(held)


def how_to_follow(model: SharedModel, follows: int | None) -> Kind:
    """Return how a worker gets the newest version: READY, STATE or UPDATES, see ``Session``."""
    if follows is None or not model.can_be_followed:
        return Kind.READY
    if follows == NOTHING:
        return Kind.STATE
    updates = model.updates_since(follows)
    if updates is None or len(updates) > MAX_UPDATES:
        return Kind.READY
    # Without the first: one of the updates is likely to be the worker's own.
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
        """Return the oldest session without a held version, if there are ``MAX_SESSIONS``."""
        if len(self._by_peer) < MAX_SESSIONS:
            return None
        return next((session for session in self.all() if session.held is None), None)

    def drop(self, peer: bytes) -> Session | None:
        """Forget the session of a connection; its worker may have another session."""
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
