"""Sessions of the workers at a server: how workers attach, leave or are lost; their connections.

ZeroMQ's own thread sends and answers heartbeats, which show which connections are alive. So a
worker whose training thread is busy for hours counts as alive. A worker that was killed or
suspended, or that lost power or network, does not.
"""

from __future__ import annotations

import secrets
import struct
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import zmq
from torch import Tensor

from ..base.checks import logger_of, number
from ..base.service.sockets import NOBLOCK
from ..ops.wire import Layout, WireFormat
from .coordinator import Coordinator
from .keeper import Keeper
from .messages import MAX_NUMBER, MAX_UPDATES, Kind, Message, ProtocolError
from .model import SharedModel, layout_of
from .payloads import PayloadMemory
from .snapshots import restoring

_MIN_S, _MAX_S = 0.1, 86400
_PLACE = "inproc://connections"
_EVENT = struct.Struct("=HI")
_ACCEPTED, _ENDED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)
MAX_WORKERS = 200  # that a status names
MAX_SESSIONS = 20_000
Send = Callable[[bytes, Message], bool]
# ``Session.follows`` of a worker that wants to follow the versions, but holds none yet.
NOTHING = -1
# Seconds within which a worker must begin to fetch a kept version that is no longer the newest, at
# first; see ``Session.patience_s``.
BEGIN_S = 2.0


def check_lost_after(value: float) -> float:
    """Return the seconds of silence after which a peer counts as gone.

    Raises:
        ValueError: If the value is too small for heartbeats, or too large.
        TypeError: If the value is not a number.
    """
    seconds = number("lost_after", value)
    if not _MIN_S <= seconds <= _MAX_S:
        raise ValueError(f"lost_after must be {_MIN_S} to {_MAX_S} seconds, got {value!r}")
    return seconds


class Connections:
    """Watch the connections of a socket that will listen.

    The number of a connection is its file descriptor, so a later connection may reuse the number.
    """

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        socket.monitor(_PLACE, _ACCEPTED | _ENDED)
        self._events = socket.context.socket(zmq.PAIR)
        self._events.linger = 0
        # No limit: if this queue were full, ZeroMQ's thread would wait and serve no connection.
        self._events.rcvhwm = 0
        self._events.connect(_PLACE)
        self._alive: set[int] = set()

    def ended(self) -> Iterator[int]:
        """Yield each connection that ended since the last call.

        The end of a connection is reported before the first message of a later connection of the
        same number, so a number never stands for two connections at a time.
        """
        while (event := self._next()) is not None:
            kind, number = event
            if kind == _ACCEPTED:
                self._alive.add(number)
            else:
                self._alive.discard(number)
                yield number

    def _next(self) -> tuple[int, int] | None:
        try:
            event, _ = self._events.recv_multipart(NOBLOCK)
        except zmq.Again:
            return None
        kind, number = _EVENT.unpack(event)
        return kind, number

    def is_alive(self, number: int) -> bool:
        """Whether the connection had not ended when ``ended`` was last called."""
        return number in self._alive

    def close(self) -> None:
        self._socket.disable_monitor()
        self._events.close()


def connection_of(frame: zmq.Frame) -> int:
    """Return the number of a frame's connection; -1 if the connection has already ended."""
    try:
        return int(frame.get(int(zmq.SRCFD)))
    except zmq.ZMQError:
        return -1


@dataclass
class Session:
    """One connection of one worker.

    Attributes:
        peer: ZeroMQ's name of the connection.
        connection: Number of the connection, see ``Connections``.
        instance: Random number of the worker's process; 0 if the worker sent none.
        unexchanged: Digests of the worker's frozen parameters and persistent buffers, or None.
        memory: Names of the shared memory in which the worker's parameters lie.
        contested: Instance of another worker that wants the same name, and since when; or None.
        follows: Version whose buffers the worker holds and keeps up to date by updates. ``NOTHING``
            if the worker wants to hold one; None if it fetches parameters.
        token: Number of the worker's last question, which the answer repeats.
        held: Version that is kept for the worker's next round, since ``held_at``; None for none.
        answer: How the worker gets version ``held``: READY (parameters), STATE (all buffers) or
            UPDATES (the updates since version ``base``).
        is_reading: The worker has been told of the version, and fetches it.
        read_at: When the worker began to fetch, or asked for a place beyond ``furthest``.
        furthest: Last place (number, fragment, run) of the version that the worker has asked for.
        barred_until: Until then the worker gets no version and its updates wait, as it kept others
            waiting: it did not fetch a version, or did not send the runs of an update.
        patience_s: Seconds for which an older version is kept before the worker begins to fetch it.
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
    # Count one update less: one of them is likely to be the worker's own, which it has.
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


logger = logger_of(__name__)


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
        """Count a refused message or upload by its kind, such as "garbage" or "stalled"."""
        self.refused[kind] += 1

    def report(self, sessions: Sessions, memory: PayloadMemory) -> dict[str, Any]:
        """Return the fields that every server's status has, as JSON types; from any thread."""
        return {
            "schema": 1,
            "uptime_s": round(time.monotonic() - self.started_at, 3),
            "connections": len(sessions.all()),
            "lost": self.lost,
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "payload_bytes": memory.used_bytes,
            "apply_s": round(self.apply_s, 6),
            "refused": dict(self.refused),
            "parameters": 0,
        }


class Host(ABC):
    """The base of a server's state: its sessions, its model, and its files.

    Args:
        memory: Room for payloads on their way.
        open_files: Locks the snapshot folder and returns its files; None keeps nothing on disk.

    Attributes:
        layout: Hash of the workers' model; None before the first worker.
        unexchanged: The first worker's digests of frozen parameters and of persistent buffers; None
            before a worker has sent them.
        history: A random number of this process, by which workers notice a restart.
        keeper: Writes snapshots and the journal; None before ``begin``, and without a snapshot
            folder.
    """

    def __init__(self, memory: PayloadMemory, open_files: Callable[[], Keeper] | None) -> None:
        self.sessions, self.status, self.memory = Sessions(), Status(), memory
        self.layout: int | None = None
        self.unexchanged: list[int] | None = None
        self.history = secrets.randbelow(MAX_NUMBER)
        self.keeper: Keeper | None = None
        self._open_files = open_files

    @property
    @abstractmethod
    def version(self) -> int:
        """Updates or merges so far."""

    @abstractmethod
    def check_model(self, meta: dict[str, Any]) -> None:
        """Raise ProtocolError if a worker's first message describes another model."""

    @abstractmethod
    def welcome(self, session: Session, message: Message) -> Message:
        """Take a worker in, and return the answer to the worker's first message."""

    @abstractmethod
    def release(self, session: Session) -> None:
        """Stop keeping a version for a connection."""

    @abstractmethod
    def leave(self, worker: str) -> None:
        """Stop waiting for a worker that has no connection."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Return the status as JSON types, small enough for one message; any thread may ask."""

    @abstractmethod
    def save(self) -> None:
        """Write a snapshot, unless the buffers are older or newer than what workers are told."""

    @abstractmethod
    def end(self) -> None:
        """Write the last snapshot.

        Raises:
            OSError: If the disk has only an older version, and somebody knows of the newer one.
        """

    @abstractmethod
    def _restore(self, keeper: Keeper) -> None:
        """Take over the model of the snapshot and the journal."""

    def _begin_with(self, parameters: Sequence[Tensor]) -> None:
        """Begin a new model with parameters, fp32 [num_elements] for each fragment."""
        raise NotImplementedError

    def begin(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Restore the model if there is one on the disk, else take the parameters if given.

        Raises:
            OSError: If another server has the snapshot folder, or the folder cannot be written.
            ValueError: If the folder's model does not fit this server, or a file is no snapshot.
            DamagedLog: If a file is damaged.
        """
        if self._open_files is not None:
            self.keeper = self._open_files()
        try:
            if self.keeper is not None and self.keeper.storage.exists:
                with restoring(self.keeper.folder):
                    self._restore(self.keeper)
            elif parameters is not None:
                self._begin_with(parameters)
        except BaseException:
            if self.keeper is not None:
                self.keeper.release()
            raise

    def save_if_due(self) -> None:
        """Write a snapshot if one is due."""
        if self.keeper is not None and self.keeper.is_due(self.version):
            self.save()

    def refuse_layout(self, reason: str) -> NoReturn:
        """Refuse a worker whose model is another one."""
        self.status.count_refusal("layout")
        raise ProtocolError(reason)

    def check_layout(self, layout: int) -> None:
        """Raise ProtocolError if a worker's model has another hash than the first worker's."""
        if layout != self.layout:
            self.refuse_layout(
                "the model has as many parameters as the server's, but other names, shapes or "
                "dtypes"
            )
