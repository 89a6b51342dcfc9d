"""A worker's connection to its server: one DEALER socket, requests repeated until answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq
from torch import Tensor

from ..errors import SyncError
from ..wire import Layout
from . import keys as curve
from .downloads import Download
from .messages import MAX_BODY, MAX_JSON, Kind, Message, ProtocolError, pack, parse
from .window import bodies, is_within

RETRY_S, BLOCKED_S = 1.0, 0.02
# As plain integers: flags of the enum's type cost more than a small message.
NOBLOCK, POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)


def receive(socket: zmq.Socket, wait_ms: int = 0) -> list[zmq.Frame] | None:
    """Return the frames of the next message, or None if none comes in time."""
    if wait_ms and not zmq.zmq_poll([(socket, POLLIN)], wait_ms):
        return None
    try:
        return socket.recv_multipart(NOBLOCK, copy=False)
    except zmq.Again:
        return None


class ServerLost(SyncError):
    """The server did not answer in time; the worker's parameters are as training left them."""


class ServerRefused(SyncError):
    """The server refused a worker, in one sentence."""


class Link:
    """Talk to one server; blocking, for one thread.

    Args:
        address: ``tcp://host:port``.
        worker: The worker's name.
        sizes, layout: Elements of the fragments and hash of the model.
        timeout: Seconds without any answer after which ``ServerLost`` is raised.
        keys, key_name: Folder of CURVE keys and name of the worker's pair in it.

    Attributes:
        sent_bytes, received_bytes: Of payloads and headers, repeated ones included.
        last_seq: The worker's newest update that the server knows of.
        needs_start: The server has no parameters yet.
    """

    def __init__(
        self,
        address: str,
        worker: str,
        sizes: list[int],
        layout: int,
        *,
        timeout: float,
        keys: str | Path | None = None,
        key_name: str = curve.WORKER,
    ) -> None:
        curve.is_loopback(address)
        self.address, self.worker, self.timeout = address, worker, timeout
        self._hello = Message(Kind.HELLO, meta={"worker": worker, "sizes": sizes, "layout": layout})
        self._sizes = sizes
        self.sent_bytes = self.received_bytes = 0
        self.last_seq = 0
        self.needs_start = False
        self._is_blocked = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 300
        self._socket.maxmsgsize = max(MAX_BODY, MAX_JSON)
        # Only to a server that is there: what is sent to none would be sent to its successor.
        self._socket.immediate = True
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = 5_000, 30_000
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 50, 1_000
        try:
            if keys is not None:
                curve.protect_worker(self._socket, Path(keys), key_name)
            self._socket.connect(address)
        except (ValueError, zmq.ZMQError):
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, without a word; idempotent."""
        if not self._context.closed:
            self._socket.close()
            self._context.term()

    # --------------------------------------------------------------------------------- messages

    def send(self, message: Message) -> bool:
        """Send if the server is there and reads; whoever asks repeats itself."""
        frames = pack(message)
        try:
            self._socket.send_multipart(frames, NOBLOCK, copy=len(frames) < 2)
        except zmq.Again:
            self._is_blocked = True
            return False
        self._is_blocked = False
        self.sent_bytes += sum(len(frame) for frame in frames)
        return True

    def _next(self, seconds: float) -> Message | None:
        """Return the next message, or None if none comes within so many seconds."""
        frames = receive(self._socket, max(0, int(1000 * seconds)))
        if frames is None:
            return None
        self.received_bytes += sum(len(frame) for frame in frames)
        try:
            return parse([frame.buffer for frame in frames])
        except ProtocolError:
            return None

    def _converse(self, ask: Callable[[], None], what: str) -> Iterator[Message]:
        """Yield what the server says; ask again whenever it is silent for a while.

        Raises:
            ServerLost: If it is silent for ``timeout``.
            ServerRefused: If it refuses this worker.
        """
        began = heard_at = time.monotonic()
        ask()
        asked_at = began
        while True:
            wait_s, before = BLOCKED_S if self._is_blocked else RETRY_S, time.monotonic()
            message = self._next(wait_s)
            now = time.monotonic()
            # A process that was stopped does not take its own absence for the server's.
            absence_s = now - before - wait_s
            if absence_s > RETRY_S:
                heard_at += absence_s
            if message is not None:
                heard_at = now
                if message.kind == Kind.REFUSED:
                    raise ServerRefused(
                        f"the server {self.address} refused worker {self.worker}: "
                        f"{message.meta['reason']}",
                        stage=what,
                        seconds=now - began,
                    )
                if message.kind == Kind.UNKNOWN:
                    self.send(self._hello)
                elif message.kind == Kind.WELCOME:
                    self._welcomed(message, what)
                    if what != "hello":
                        ask()
                        asked_at = now
                    yield message
                else:
                    yield message
                # An answer that leads on has been acted upon.
                if message.kind in (Kind.DATA, Kind.WANT):
                    asked_at = now
            if now - asked_at < RETRY_S and not self._is_blocked:
                continue
            if now - heard_at > self.timeout:
                raise ServerLost(
                    f"the server {self.address} has not answered for {now - heard_at:.1f} s "
                    f"({what}); the parameters are as training left them",
                    stage=what,
                    seconds=now - began,
                )
            ask()
            asked_at = now

    def _welcomed(self, message: Message, what: str) -> None:
        last = message.number
        if last < self.last_seq and what != "hello":
            raise ServerLost(
                f"the server {self.address} knows {last} updates of worker {self.worker}, which "
                f"was told of {self.last_seq}: it was restarted without its snapshot",
                stage=what,
            )
        self.last_seq = max(self.last_seq, last)
        self.needs_start = message.meta["needs_start"]

    # ------------------------------------------------------------------------------ conversations

    def hello(self) -> Message:
        """Introduce this worker and return the server's WELCOME."""
        for message in self._converse(lambda: self._ask(self._hello), "hello"):
            if message.kind == Kind.WELCOME:
                return message
        raise AssertionError

    def _ask(self, message: Message) -> None:
        self.send(message)

    def push(
        self,
        seq: int,
        version: int,
        payloads: list[Tensor],
        layouts: list[Layout],
        *,
        steps: int,
        seconds: float,
        is_start: bool = False,
        follows: bool = False,
    ) -> Message:
        """Send an update, or the parameters to start from, and return the server's OUTCOME."""
        wire = layouts[0].wire
        meta: dict[str, Any] = {
            "wire": wire.name,
            "block_size": wire.block_size,
            "steps": steps,
            "seconds": seconds,
            "is_start": is_start,
        }
        push = Message(Kind.PUSH, seq, version, int(follows), meta=meta)
        for message in self._converse(lambda: self._ask(push), "push"):
            if message.kind == Kind.OUTCOME and message.number == seq:
                if not is_start:
                    self.last_seq = seq
                return message
            if message.kind == Kind.WANT and message.number == seq:
                self._send_runs(message, payloads, layouts)
        raise AssertionError

    def _send_runs(self, want: Message, payloads: list[Tensor], layouts: list[Layout]) -> None:
        place, run, count = want.fragment, want.run, want.count
        if place >= len(layouts) or not is_within(layouts[place], run, count):
            return
        size = layouts[place].run_bytes
        view = payloads[place].numpy().data
        for first, number in bodies(layouts[place], run, count):
            body = view[first * size : (first + number) * size]
            self.send(Message(Kind.RUN, want.number, 0, place, first, body=body))

    def pull(self, outer: list[Tensor]) -> tuple[int, int]:
        """Fetch the newest parameters into ``outer``, fp32 [num_elements] for each fragment.

        Returns:
            Their version, and the inner steps of the round to train from them.
        """
        return self.fetch(Download(self.send, outer))

    def fetch(self, download: Download) -> tuple[int, int]:
        """Go on until a download is complete and return its version and the inner steps."""
        for message in self._converse(download.ask, "pull"):
            download.receive(message)
            if download.is_complete:
                assert download.version is not None
                return download.version, download.steps
        raise AssertionError

    def leave(self) -> None:
        """Tell the server not to wait for this worker."""
        self.send(Message(Kind.LEAVE))


def read_status(
    address: str, *, timeout: float = 5.0, keys: str | Path | None = None, key_name: str = "worker"
) -> dict[str, Any]:
    """Return the status of a server.

    Raises:
        ServerLost: If it does not answer in time.
    """
    link = Link(address, "status", [1], 0, timeout=timeout, keys=keys, key_name=key_name)
    try:
        status = Message(Kind.STATUS)
        for message in link._converse(lambda: link._ask(status), "status"):
            if message.kind == Kind.REPORT:
                return message.meta["status"]
        raise AssertionError
    finally:
        link.close()
