"""The server: one thread, one ROUTER socket, one shared model.

The receiving side asks for large data run by run, so no peer can make the other hold bytes that the
other did not ask for. A request is repeated until it is answered, and a second answer changes
nothing, so lost connections and restarts need no special case.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from torch import Tensor

from ...base.service.addresses import require_keys
from ...base.service.sockets import NOBLOCK, receive
from ..model.rules import ServerRule
from ..protocol.connections import check_lost_after, connection_of
from ..protocol.messages import Kind, Message, ProtocolError, pack, parse
from .attendance import Attendance
from .listener import Listener
from .sessions import Session
from .state import ServerState
from .transfer.receiving import Receiver
from .transfer.sending import Sender

_POLL_MS = 100


class AsyncServer:
    """Own the outer parameters; workers attach with ``AsyncDiLoCo``.

    Args:
        rule: How an arriving update changes the model.
        address: ``tcp://host:port``; port 0 picks a free one, see ``address`` afterwards.
        sync_every, dylu, min_steps, grace: See ``Coordinator``.
        parameters: Initial parameters, fp32 [num_elements] for each fragment. Without parameters
            and without a snapshot, the first worker sends its own.
        snapshot: Folder of the snapshot and the journal; None keeps nothing on disk.
        snapshot_every: Updates between two snapshots.
        keys: Folder of CURVE keys (``diloco-comm serve keygen``).
        insecure: Allow an address that other machines reach, without keys.
        model_sizes: Memory of the server in fp32 models, for the rule's buffers and for updates on
            their way. One update always fits.
        lost_after: Seconds of silence after which a worker that was stopped, or lost power or
            network, counts as lost. A worker that was killed counts as lost at once, and a worker
            that trains never does.
        max_parameters: Larger models are refused.
        impl: Force an implementation of the operators.

    Raises:
        ValueError: For invalid arguments, and for an address that is open to the network without
            keys.
        OSError: If the socket cannot listen on the address, or the snapshot folder cannot be
            written or belongs to another server. If the folder cannot be written later, the server
            goes on and its status says so.
    """

    def __init__(
        self,
        rule: ServerRule,
        *,
        address: str = "tcp://127.0.0.1:0",
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
        require_keys(address, keys, insecure, maker="diloco-comm serve keygen")
        lost_after = check_lost_after(lost_after)
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
        # Listen first: a server whose address is taken changes nothing on the disk.
        listener = Listener(address, keys, lost_after)
        # Without this the garbage collector would wait for an open socket for ever.
        self._close_listener = weakref.finalize(self, listener.close)
        self._close_listener.atexit = False
        try:
            self.state.begin(parameters)
        except BaseException:
            self._close_listener()
            raise
        self._socket = listener.socket
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._connect_parts(listener, max_parameters, lost_after)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._has_served = False

    def _connect_parts(self, listener: Listener, max_parameters: int, lost_after: float) -> None:
        """Make the parts that handle messages, and say which part handles which kind."""
        self._receiver = Receiver(self.state, self._send)
        self._attendance = Attendance(
            self.state,
            listener.connections,
            self._send,
            self._receiver.forget,
            max_parameters=max_parameters,
            lost_after=lost_after,
        )
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
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("the server runs: stop() it first, or attach a worker")
        if self.state.coordinator is None:
            raise RuntimeError("the server has no parameters yet: no worker has attached")
        return self.state.coordinator.model.read_all()

    # ---------------------------------------------------------------------------------- running

    def start(self) -> AsyncServer:
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
                    self._housekeeping()
                    on_idle()
                    idle_at = time.monotonic() + _POLL_MS / 1000
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self.state.end()
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

    def __enter__(self) -> AsyncServer:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _turn(self) -> None:
        """Handle up to 65 messages, then start the workers whose grace period has ended."""
        timeout, coordinator = _POLL_MS, self.state.coordinator
        closes_at = None if coordinator is None else coordinator.grace.closes_at
        if closes_at is not None:
            timeout = min(timeout, max(0, int(1000 * (closes_at - time.monotonic())) + 1))
        for _ in range(65):
            frames = receive(self._socket, timeout)
            if frames is None:
                break
            self._receive(frames)
            timeout = 0
        self._sender.start_released()

    def _receive(self, frames: list[zmq.Frame]) -> None:
        peer = frames[0].bytes
        self.state.status.received_bytes += sum(len(frame) for frame in frames[1:])
        try:
            message = parse([frame.buffer for frame in frames[1:]])
            session = self.state.sessions.get(peer)
            if message.kind == Kind.STATUS:
                self._send(peer, Message(Kind.REPORT, meta={"status": self.state.report()}))
            elif message.kind == Kind.HELLO:
                self._attendance.greet(peer, connection_of(frames[1]), message)
            elif session is None:
                self._send(peer, Message(Kind.UNKNOWN))
            else:
                session.seen_at = time.monotonic()
                self._serve(session, message)
        except ProtocolError as error:
            self.state.status.count_refusal("garbage")
            self._send(peer, Message(Kind.REFUSED, meta={"reason": str(error)}))

    def _send(self, peer: bytes, message: Message) -> bool:
        frames = pack(message)
        try:
            self._socket.send_multipart([peer, *frames], NOBLOCK, copy=len(frames) < 2)
        except zmq.ZMQError as error:
            # The peer is gone or does not read. A peer that comes back asks again.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if error.errno == zmq.EHOSTUNREACH:
                self._attendance.lose(peer)
            return False
        self.state.status.sent_bytes += sum(len(frame) for frame in frames)
        return True

    def _serve(self, session: Session, message: Message) -> None:
        handle = self._handlers.get(message.kind)
        if handle is None:
            raise ProtocolError(f"{message.kind.name} is not for a server")
        handle(session, message)

    def _leave(self, session: Session, message: Message) -> None:
        self._attendance.leave(session, message)
        self._sender.after_reading()

    def _housekeeping(self) -> None:
        now = time.monotonic()
        self._attendance.drop_ended()
        self._receiver.drop_stalled(now)
        self._sender.evict(now, is_memory_short=self._receiver.is_anyone_waiting)
        self.state.keep_for_followers()
        self._sender.after_reading()
        self.state.save_if_due()
