"""Workers that attach to a server, leave it, or are lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from ...base.checks import logger_of
from ...replica.fragments import same_memory
from ..protocol.connections import Connections
from ..protocol.messages import NAME_TAKEN, Kind, Message, ProtocolError
from .sessions import Session, Sessions
from .status import Status
from .transfer.receiving import Send

logger = logger_of(__name__)


class Host(Protocol):
    """What a server does with workers that come and go.

    Attributes:
        unexchanged: Digests of frozen parameters and of persistent buffers, which the first worker
            of the run has; None if no worker has said so.
    """

    sessions: Sessions
    status: Status
    unexchanged: list[int] | None

    def check_model(self, meta: dict[str, Any]) -> None:
        """Raise ProtocolError if a worker's first message describes another model."""

    def welcome(self, session: Session, message: Message) -> Message:
        """Take a worker in, and return the answer to the worker's first message."""
        ...

    def release(self, session: Session) -> None:
        """Keep nothing for a connection any more."""

    def leave(self, worker: str) -> None:
        """Stop waiting for a worker that has no connection."""


class Attendance:
    """Admit workers, and drop those that left or are lost.

    Args:
        host: Takes the workers in.
        connections: Connections of the server's socket.
        send: Sends a message to a connection; returns False if that fails.
        forget_update: Drops the update that a worker has begun to send.
        max_parameters: Larger models are refused.
        lost_after: Seconds within which a connection ends whose peer is gone.
    """

    def __init__(
        self,
        host: Host,
        connections: Connections,
        send: Send,
        forget_update: Callable[[str], None],
        *,
        max_parameters: int,
        lost_after: float,
    ) -> None:
        self.host, self._connections, self._send = host, connections, send
        self._forget_update, self._max_parameters = forget_update, max_parameters
        self._lost_after = lost_after
        self._ended: list[bytes] = []

    # ---------------------------------------------------------------------------------- coming

    def greet(self, peer: bytes, connection: int, message: Message) -> None:
        """Admit a worker that said HELLO or JOIN, if its model fits and its name is free."""
        self._collect_ended()
        if not self._connections.is_alive(connection):
            return
        worker, sizes, layout = (message.meta[name] for name in ("worker", "sizes", "layout"))
        if sum(sizes) > self._max_parameters:
            raise ProtocolError(
                f"the model has {sum(sizes)} parameters, this server takes {self._max_parameters}"
            )
        self.host.check_model(message.meta)
        memory = frozenset(message.meta.get("memory", ()))
        self._refuse_same_memory(peer, worker, memory)
        warning = self._compare_unexchanged(message.meta)
        if not self._may_have(peer, message):
            return
        self._make_way(peer, connection, worker)
        if self.host.sessions.get(peer) is None:
            logger.info("worker %s is here", worker)
        now = time.monotonic()
        session = Session(peer, connection, worker, sizes, layout, now, message.number)
        session.unexchanged, session.memory = message.meta.get("unexchanged"), memory
        self.host.sessions.add(session)
        welcome = self.host.welcome(session, message)
        if warning:
            welcome.meta["warning"] = warning
        self._send(peer, welcome)

    def _refuse_same_memory(self, peer: bytes, worker: str, memory: frozenset[str]) -> None:
        """Raise if another worker has the same tensors: a write of one changes both."""
        if not memory:
            return
        for other in self.host.sessions.all():
            is_live = other.peer != peer and other.peer not in self._ended
            if is_live and other.worker != worker and memory & other.memory:
                self.host.status.count_refusal("memory")
                raise ProtocolError(same_memory(f"workers {other.worker} and {worker}"))

    def _compare_unexchanged(self, meta: dict[str, Any]) -> str:
        """Return a warning to a worker whose frozen parameters or buffers differ, or "".

        Raises:
            ProtocolError: If frozen parameters differ, and the worker wants no warning but a
                refusal. Buffers may be each worker's own, and change while it trains.
        """
        first, given = self.host.unexchanged, meta.get("unexchanged")
        if first is None or given is None or first == given:
            return ""
        names = ("frozen parameters", "persistent buffers")
        pairs = zip(names, first, given, strict=True)
        what = " and ".join(name for name, mine, theirs in pairs if mine != theirs)
        sentence = (
            f"the {what} of this worker differ from the first worker's, and no exchange makes them "
            "alike: load the same weights on all workers before they attach"
        )
        if meta.get("warns", False) or first[0] == given[0]:
            return sentence
        self.host.status.count_refusal("unexchanged")
        raise ProtocolError(sentence)

    def _may_have(self, peer: bytes, message: Message) -> bool:
        """Return whether a worker may use its name; send an answer if not."""
        worker, instance = message.meta["worker"], message.number
        older = self.host.sessions.of(worker)
        if older is None or older.peer == peer or older.peer in self._ended:
            return True
        if not instance or not older.instance or instance == older.instance:
            return True
        if older.contested is None or older.contested[0] != instance:
            older.contested = (instance, time.monotonic())
        # A worker whose host lost power may come back: its old connection ends after a while.
        patience_s = 0.0 if message.fragment else self._lost_after + 1
        if time.monotonic() - older.contested[1] < patience_s:
            self._send(peer, Message(Kind.WAIT))
            return False
        if patience_s:
            self.host.status.count_refusal("name")
        reason = f"another worker of the name {worker} is connected: give each one its own name="
        place = (NAME_TAKEN, 0, 0, message.run)
        self._send(peer, Message(Kind.REFUSED, *place, meta={"reason": reason}))
        return False

    def _make_way(self, peer: bytes, connection: int, worker: str) -> None:
        """Drop the sessions that a new session replaces."""
        sessions = self.host.sessions
        same = sessions.get(peer)
        if same is not None and (same.worker, same.connection) == (worker, connection):
            return
        # The peer had another worker before, or the connection's number had an older connection.
        for old in (same, sessions.on(connection), sessions.superfluous()):
            if old is not None:
                self.lose(old.peer)
        older = sessions.of(worker)
        if older is not None and older.peer in self._ended:
            self.lose(older.peer)
        elif older is not None:
            # The same worker on a new connection; the end of the old one is not known yet.
            sessions.drop(older.peer)
            self.host.release(older)
        # A successor of the same name may send other bytes under the same number.
        self._forget_update(worker)

    # ----------------------------------------------------------------------------------- going

    def leave(self, session: Session, message: Message) -> None:
        """Drop a worker that said LEAVE."""
        logger.info("worker %s has left", session.worker)
        self._end(session.peer)

    def lose(self, peer: bytes) -> None:
        """Drop a worker whose connection ended without a LEAVE."""
        session = self._end(peer)
        if session is not None:
            self.host.status.lost += 1
            logger.warning(
                "worker %s is lost: its connection ended without a goodbye", session.worker
            )

    def _end(self, peer: bytes) -> Session | None:
        """Drop a session, and its worker if the worker has no other session."""
        session = self.host.sessions.drop(peer)
        if session is None:
            return None
        self.host.release(session)
        if self.host.sessions.of(session.worker) is None:
            self._forget_update(session.worker)
            self.host.leave(session.worker)
        return session

    def drop_ended(self) -> None:
        """Drop the workers of ended connections; called several times a second.

        A connection that ended since the last call is dropped by the next call, so that the
        connection's last messages are read first.
        """
        ended, self._ended = self._ended, []
        for peer in ended:
            self.lose(peer)
        self._collect_ended()

    def _collect_ended(self) -> None:
        for connection in self._connections.ended():
            session = self.host.sessions.on(connection)
            if session is not None:
                self._ended.append(session.peer)
