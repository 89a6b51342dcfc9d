"""``AsyncServer``, and ``Service``, the base of all servers with a ROUTER socket.

A server has one thread that reads messages, one socket, and one shared model.

The receiver asks for large data run by run, so nobody has to hold bytes that it did not ask for. A
request is repeated until it is answered, and a second answer changes nothing, so lost connections
and restarts need no special case.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from torch import Tensor

from .. import _C
from ..base.checks import logger_of
from ..base.extension import RefusedVersions
from ..base.service.addresses import address_to_bind
from ..base.service.keys import REVOKED, Guard, protect_server
from ..base.service.sockets import beat, receive, send_to_peer
from ..replica.fragments import same_memory
from .messages import (
    MAX_BODY,
    MAX_JSON,
    NAME_TAKEN,
    PROTOCOL,
    Kind,
    Message,
    ProtocolError,
    pack,
    parse,
)
from .rules import ServerRule
from .sessions import Connections, Host, Session, check_lost_after, connection_of
from .state import ServerState
from .transfer import Receiver, Sender
from .window import WINDOW_BYTES, WINDOW_FRAGMENTS

logger = logger_of(__name__)

_POLL_MS = 100


class Listener:
    """A ROUTER socket that listens.

    Args:
        address: ``tcp://host:port``; port 0 picks a free one.
        keys: Folder of CURVE keys, or None to accept any worker.
        lost_after: Seconds of a peer's silence after which its connection ends.

    Attributes:
        guard: Checks the keys; None without keys.

    Raises:
        OSError: If the socket cannot listen on the address.
        ValueError: If a key is missing or invalid.
    """

    def __init__(self, address: str, keys: str | Path | None, lost_after: float) -> None:
        _C.raise_descriptors()
        self._context = zmq.Context()
        self.guard: Guard | None = None
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.router_mandatory = True
        self.socket.maxmsgsize = max(MAX_BODY, MAX_JSON)
        # A window has a message for each of its fragments, and a few more for large ones. The limit
        # is higher, as ZeroMQ makes room for new messages only after half a limit of them was sent.
        # But with a much higher limit, a peer that does not read would take more memory here.
        self.socket.sndhwm = 4 * WINDOW_FRAGMENTS
        self.socket.rcvhwm = 4 * WINDOW_BYTES // MAX_BODY
        beat(self.socket, lost_after)
        self.socket.handshake_ivl = 5_000
        self.socket.setsockopt(zmq.BACKLOG, 1024)
        self.connections = Connections(self.socket)
        try:
            if keys is not None:
                self.guard = protect_server(self._context, self.socket, Path(keys))
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot listen on {address}: {error}") from None
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        """Close the socket and all connections."""
        self.connections.close()
        self.socket.close(0)
        if self.guard is not None:
            self.guard.stop()
        self._context.term()


class Service(ABC):
    """The base of a server of workers: its socket, its thread, and the dispatch of messages.

    A derived class sets ``_handlers`` before it serves.

    Args:
        host: The server's state: it admits workers, and keeps the model and its files.
        listen: ``host:port``; port 0 picks a free one, see ``address`` afterwards.
        keys: Folder of CURVE keys, or None.
        insecure: Allow an address that other machines reach, without keys.
        lost_after: Seconds of a peer's silence after which its connection ends.
        max_parameters: Larger models are refused.
        begin: Called once the socket listens, before the first message is read: a server whose
            address is taken changes nothing on the disk.

    Raises:
        ValueError: If an argument is invalid, or the address is open without keys.
        OSError: If the socket cannot listen on the address.
    """

    # The kind of a worker's first message to this server, and the answer to workers of other kinds.
    greeting: Kind
    wrong_greeting: str

    def __init__(
        self,
        host: Host,
        listen: str,
        keys: str | Path | None,
        *,
        insecure: bool,
        lost_after: float,
        max_parameters: int,
        begin: Callable[[], None],
    ) -> None:
        address = address_to_bind(listen, keys, insecure, maker="diloco-comm serve keygen")
        lost_after = check_lost_after(lost_after)
        self._host = host
        self._refused = RefusedVersions(logger, "a worker")
        self._listener = Listener(address, keys, lost_after)
        # Without this the garbage collector would wait for an open socket for ever.
        self._close_listener = weakref.finalize(self, self._listener.close)
        self._close_listener.atexit = False
        try:
            begin()
        except BaseException:
            self._close_listener()
            raise
        self._socket, self._guard = self._listener.socket, self._listener.guard
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._max_parameters, self._lost_after = max_parameters, lost_after
        self._ended: list[bytes] = []
        self._handlers: dict[Kind, Callable[[Session, Message], None]]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._has_served = False

    # ---------------------------------------------------------------- what a derived class does

    def report(self) -> dict[str, Any]:
        """Return the status as JSON types."""
        return self._host.report()

    @abstractmethod
    def _forget(self, worker: str) -> None:
        """Drop the uploads that a worker has begun."""

    def _status(self) -> dict[str, Any]:
        """Return the status for a peer, which needs no session to ask."""
        return self.report()

    def _answer_stranger(self, message: Message) -> Message | None:
        """Return the answer to a message that needs no session, or None for other messages."""
        return None

    def _due_at(self) -> float | None:
        """When ``_after_messages`` has something to do, on the monotonic clock; None if unknown."""
        return None

    @abstractmethod
    def _after_messages(self) -> None:
        """Called after the messages that have arrived, and at the time of ``_due_at``."""

    @abstractmethod
    def _housekeeping(self) -> None:
        """Called several times a second."""

    # ---------------------------------------------------------------------------------- running

    @property
    def is_running(self) -> bool:
        """Whether the thread of ``start`` is serving."""
        return self._thread is not None and self._thread.is_alive()

    def start(self):  # type: ignore[no-untyped-def]
        """Serve in a new thread."""
        self._thread = threading.Thread(target=self._run, name="diloco-server", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self.serve()
        except BaseException as error:
            self._error = error
            raise

    def serve(self, on_idle: Callable[[], None] = lambda: None) -> None:
        """Serve in this thread until ``stop``, then write a snapshot and close the socket.

        Args:
            on_idle: Called several times a second.
        """
        self._has_served = True
        try:
            idle_at = 0.0
            while not self._stop.is_set():
                self._turn()
                if time.monotonic() >= idle_at:
                    self._drop_ended()
                    self._housekeeping()
                    on_idle()
                    idle_at = time.monotonic() + _POLL_MS / 1000
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._host.end()
        finally:
            self._close_listener()

    def stop_soon(self) -> None:
        """Make ``serve`` return; may be called from a signal handler."""
        self._stop.set()

    def stop(self) -> None:
        """End ``serve``, and wait for the server's own thread if ``start`` made one.

        Raises:
            BaseException: The error that ended the server's thread, if there was one.
        """
        self._stop.set()
        if self._thread is None and not self._has_served:
            self._has_served = True
            self._close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def __enter__(self):  # type: ignore[no-untyped-def]
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # ---------------------------------------------------------------------------------- coming

    def _greet(self, peer: bytes, connection: int, message: Message) -> None:
        """Admit a worker that said HELLO or JOIN, if its model fits and its name is free."""
        self._collect_ended()
        if not self._listener.connections.is_alive(connection):
            return
        worker, sizes, layout = (message.meta[name] for name in ("worker", "sizes", "layout"))
        if sum(sizes) > self._max_parameters:
            raise ProtocolError(
                f"the model has {sum(sizes)} parameters, this server takes {self._max_parameters}"
            )
        self._host.check_model(message.meta)
        memory = frozenset(message.meta.get("memory", ()))
        self._refuse_same_memory(peer, worker, memory)
        warning = self._compare_unexchanged(message.meta)
        if not self._may_have(peer, message):
            return
        self._make_way(peer, connection, worker)
        if self._host.sessions.get(peer) is None:
            logger.info("worker %s is here", worker)
        now = time.monotonic()
        session = Session(peer, connection, worker, sizes, layout, now, message.number)
        session.unexchanged, session.memory = message.meta.get("unexchanged"), memory
        self._host.sessions.add(session)
        welcome = self._host.welcome(session, message)
        if warning:
            welcome.meta["warning"] = warning
        self._send(peer, welcome)

    def _refuse_same_memory(self, peer: bytes, worker: str, memory: frozenset[str]) -> None:
        """Raise if another worker's parameters lie in the same shared memory."""
        if not memory:
            return
        for other in self._host.sessions.all():
            is_live = other.peer != peer and other.peer not in self._ended
            if is_live and other.worker != worker and memory & other.memory:
                self._host.status.count_refusal("memory")
                raise ProtocolError(same_memory(f"workers {other.worker} and {worker}"))

    def _compare_unexchanged(self, meta: dict[str, Any]) -> str:
        """Return a warning to a worker whose frozen parameters or buffers differ, or "".

        Raises:
            ProtocolError: If frozen parameters differ, and the worker wants no warning but a
                refusal. Buffers may be each worker's own, and change while it trains.
        """
        first, given = self._host.unexchanged, meta.get("unexchanged")
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
        self._host.status.count_refusal("unexchanged")
        raise ProtocolError(sentence)

    def _may_have(self, peer: bytes, message: Message) -> bool:
        """Return whether a worker may use its name; send an answer if not."""
        worker, instance = message.meta["worker"], message.number
        older = self._host.sessions.of(worker)
        if older is None or older.peer == peer or older.peer in self._ended:
            return True
        if not instance or not older.instance or instance == older.instance:
            return True
        if older.contested is None or older.contested[0] != instance:
            older.contested = (instance, time.monotonic())
        # A worker whose host lost power may come back with its name still in use here, until its
        # old connection times out: let it wait for that.
        patience_s = 0.0 if message.fragment else self._lost_after + 1
        if time.monotonic() - older.contested[1] < patience_s:
            self._send(peer, Message(Kind.WAIT))
            return False
        if patience_s:
            self._host.status.count_refusal("name")
        reason = f"another worker of the name {worker} is connected: give each one its own name="
        place = (NAME_TAKEN, 0, 0, message.run)
        self._send(peer, Message(Kind.REFUSED, *place, meta={"reason": reason}))
        return False

    def _make_way(self, peer: bytes, connection: int, worker: str) -> None:
        """Drop the sessions that a new session replaces."""
        sessions = self._host.sessions
        same = sessions.get(peer)
        if same is not None and (same.worker, same.connection) == (worker, connection):
            return
        # The peer had another worker before, the connection's number had an older connection, or
        # there are too many sessions.
        for old in (same, sessions.on(connection), sessions.superfluous()):
            if old is not None:
                self._lose(old.peer)
        older = sessions.of(worker)
        if older is not None and older.peer in self._ended:
            self._lose(older.peer)
        elif older is not None:
            # The same worker on a new connection; the end of the old one is not known yet.
            sessions.drop(older.peer)
            self._host.release(older)
        # A new worker of this name may send other bytes for the same update: drop old uploads.
        self._forget(worker)

    # ----------------------------------------------------------------------------------- going

    def _leave(self, session: Session, message: Message) -> None:
        """Drop a worker that said LEAVE."""
        logger.info("worker %s has left", session.worker)
        self._drop(session.peer)

    def _lose(self, peer: bytes) -> None:
        """Drop a worker whose connection ended without a LEAVE."""
        session = self._drop(peer)
        if session is not None:
            self._host.status.lost += 1
            logger.warning(
                "worker %s is lost: its connection ended without a goodbye", session.worker
            )

    def _drop(self, peer: bytes) -> Session | None:
        """Drop a session, and its worker if the worker has no other session."""
        session = self._host.sessions.drop(peer)
        if session is None:
            return None
        self._host.release(session)
        if self._host.sessions.of(session.worker) is None:
            self._forget(session.worker)
            self._host.leave(session.worker)
        return session

    def _drop_ended(self) -> None:
        """Drop the workers of ended connections; called several times a second.

        A connection that ended since the last call is dropped by the next call, so that the
        connection's last messages are read first.
        """
        ended, self._ended = self._ended, []
        for peer in ended:
            self._lose(peer)
        self._collect_ended()

    def _collect_ended(self) -> None:
        for connection in self._listener.connections.ended():
            session = self._host.sessions.on(connection)
            if session is not None:
                self._ended.append(session.peer)

    # --------------------------------------------------------------------------------- messages

    def _turn(self) -> None:
        """Handle up to 65 messages, then do what is due."""
        timeout, due_at = _POLL_MS, self._due_at()
        if due_at is not None:
            timeout = min(timeout, max(0, int(1000 * (due_at - time.monotonic())) + 1))
        for _ in range(65):
            frames = receive(self._socket, timeout)
            if frames is None:
                break
            self._receive(frames)
            timeout = 0
        self._after_messages()

    def _receive(self, frames: list[zmq.Frame]) -> None:
        peer = frames[0].bytes
        self._host.status.received_bytes += sum(len(frame) for frame in frames[1:])
        try:
            message = parse([frame.buffer for frame in frames[1:]])
            if self._guard is not None and not self._guard.admits(frames[-1]):
                self._lose(peer)
                self._send(peer, Message(Kind.REFUSED, meta={"reason": REVOKED}))
                return
            session = self._host.sessions.get(peer)
            answer = self._answer_stranger(message)
            if answer is not None:
                self._send(peer, answer)
            elif message.kind == Kind.STATUS:
                self._send(peer, Message(Kind.REPORT, meta={"status": self._status()}))
            elif message.kind == self.greeting:
                self._greet(peer, connection_of(frames[1]), message)
            elif message.kind in (Kind.HELLO, Kind.JOIN, Kind.SETTINGS):
                self._send(peer, Message(Kind.REFUSED, meta={"reason": self.wrong_greeting}))
            elif session is None:
                self._send(peer, Message(Kind.UNKNOWN))
            else:
                session.seen_at = time.monotonic()
                self._serve(session, message)
        except ProtocolError as error:
            self._host.status.count_refusal("garbage")
            refusal = Message(Kind.REFUSED, meta={"reason": str(error)})
            if error.protocol is not None:
                self._refused.log(error.protocol, error)
            # A worker of another version reads the sentence in its own protocol.
            self._send(peer, refusal, error.protocol or PROTOCOL)

    def _send(self, peer: bytes, message: Message, protocol: int = PROTOCOL) -> bool:
        frames = pack(message, protocol)
        try:
            send_to_peer(self._socket, [peer, *frames], copy=len(frames) < 2)
        except zmq.ZMQError as error:
            # The peer is gone or does not read. A peer that comes back asks again.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if error.errno == zmq.EHOSTUNREACH:
                self._lose(peer)
            return False
        self._host.status.sent_bytes += sum(len(frame) for frame in frames)
        return True

    def _serve(self, session: Session, message: Message) -> None:
        handle = self._handlers.get(message.kind)
        if handle is None:
            raise ProtocolError(f"{message.kind.name} is not for a server")
        handle(session, message)


class AsyncServer(Service):
    """Own the outer parameters; workers attach with ``AsyncDiLoCo``.

    Args:
        rule: How an arriving update changes the model.
        listen: ``host:port``; port 0 picks a free one, see ``address`` afterwards.
        sync_every, dylu, min_steps, grace: See ``Coordinator``.
        parameters: Initial parameters, fp32 [num_elements] for each fragment. Without parameters
            and without a snapshot, the first worker sends its own.
        snapshot: Folder of the snapshot and the journal; None keeps nothing on disk.
        snapshot_every: Updates between two snapshots.
        keys: Folder of CURVE keys (``diloco-comm serve keygen``).
        insecure: Allow an address that other machines reach, without keys.
        model_sizes: Memory of the server in fp32 models, for the rule's buffers and for updates on
            their way. An update that is larger than the room goes to a file.
        lost_after: Seconds of silence after which a worker that was suspended, or lost power or
            network, counts as lost. A worker that was killed counts as lost at once, and a worker
            that trains never does.
        max_parameters: Larger models are refused.
        impl: Force an implementation of the operators.

    Raises:
        ValueError: For invalid arguments, and for an address that is open to the network without
            keys.
        DamagedLog: If a file in the snapshot folder is damaged.
        OSError: If the socket cannot listen on the address, or the snapshot folder cannot be
            written or belongs to another server. If the folder cannot be written later, the server
            goes on and its status says so.
    """

    greeting = Kind.HELLO
    wrong_greeting = (
        "this server hosts asynchronous training: attach with AsyncDiLoCo, or host it with "
        "`diloco-comm serve decoupled`"
    )

    def __init__(
        self,
        rule: ServerRule,
        *,
        listen: str = "127.0.0.1:0",
        sync_every: int = 50,
        dylu: bool = False,
        min_steps: int = 1,
        grace: float = 0.0,
        parameters: Sequence[Tensor] | None = None,
        snapshot: str | Path | None = None,
        snapshot_every: int = 100,
        keys: str | Path | None = None,
        insecure: bool = False,
        model_sizes: float = 4.0,
        lost_after: float = 30.0,
        max_parameters: int = 4_000_000_000,
        impl: str = "",
    ) -> None:
        numbers = {
            "sync_every": sync_every,
            "dylu": dylu,
            "min_steps": min_steps,
            "grace": grace,
        }
        self.state = ServerState(
            rule,
            numbers,
            snapshot=snapshot,
            snapshot_every=snapshot_every,
            model_sizes=model_sizes,
            impl=impl,
        )
        super().__init__(
            self.state,
            listen,
            keys,
            insecure=insecure,
            lost_after=lost_after,
            max_parameters=max_parameters,
            begin=lambda: self.state.begin(parameters),
        )
        self._receiver = Receiver(self.state, self._send)
        self._sender = Sender(self.state, self._send, self._receiver.admit_waiting)
        self._handlers = {
            Kind.PUSH: self._receiver.push,
            Kind.RUN: self._receiver.receive_run,
            Kind.PULL: self._sender.pull,
            Kind.FOLLOW: self._sender.pull,
            Kind.GET: self._sender.get,
            Kind.GET_UPDATE: self._sender.get,
            Kind.DONE: self._sender.done,
            Kind.LEAVE: self._leave,
        }

    def parameters(self) -> list[Tensor]:
        """Return copies of the shared parameters; the server must not be running."""
        if self.is_running:
            raise RuntimeError("the server runs: stop() it first, or attach a worker")
        if self.state.coordinator is None:
            raise RuntimeError("the server has no parameters yet: no worker has attached")
        return self.state.coordinator.model.read_all()

    def _forget(self, worker: str) -> None:
        self._receiver.forget(worker)

    def _due_at(self) -> float | None:
        coordinator = self.state.coordinator
        return None if coordinator is None else coordinator.grace.closes_at

    def _after_messages(self) -> None:
        """Start the workers whose grace period has ended."""
        self._sender.start_released()

    def _leave(self, session: Session, message: Message) -> None:
        super()._leave(session, message)
        self._sender.after_reading()

    def _housekeeping(self) -> None:
        now = time.monotonic()
        self._receiver.drop_stalled(now)
        self._sender.evict(now, is_memory_short=self._receiver.is_anyone_waiting)
        self.state.keep_for_followers()
        self._sender.after_reading()
        self.state.save_if_due()
