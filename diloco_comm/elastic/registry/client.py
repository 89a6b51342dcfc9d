"""A client of the registry's own server: one DEALER socket, one request at a time."""

from __future__ import annotations

import itertools
import math
import secrets
import threading
import time
import weakref
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...base.service.addresses import parse_address, tcp_address
from ...base.service.keys import REVOKED, WORKER, protect_worker
from ...base.service.sockets import NOBLOCK, POLLIN, POLLOUT, receive
from .messages import MAX_FRAME, NO_ID, Kind, Message, ProtocolError, pack, parse
from .protocol import (
    KeyRefused,
    RegistryMismatch,
    RegistryUnavailable,
    check_beat,
    check_run,
    check_swap,
)

# Reads and beats are sent again when the server is silent: it may have been restarted.
_REPEAT_S = 0.5
_SECRET = ".key_secret"
# The answer to a connection with a key that is not allowed.
_NOT_ALLOWED = 400


class RegistryClient:
    """The registry of one run at the server of ``diloco-comm registry``.

    Any thread may call the methods. Calls of several threads are made one after another, and the
    time in which a call waits for others counts as its own.

    Args:
        address: ``tcp://host:port``.
        run: Name of the run.
        timeout_s: Seconds after which a call without an answer fails.
        key: Folder of CURVE keys, for the pair ``worker``; or one file ``NAME.key_secret`` in it.
        registry_id: The registry that must answer; "" for the one that answers first.

    Attributes:
        server_nonce: Random name of the server's process; "" before the first answer. Another
            nonce means that the server was restarted, and that it knows only the beats since.

    Raises:
        ValueError: If the address or a name is not of its form, or a key is missing or invalid.
    """

    def __init__(
        self,
        address: str,
        run: str,
        timeout_s: float,
        key: str | Path | None = None,
        registry_id: str = "",
    ) -> None:
        self.address = tcp_address(*parse_address("registry", address))
        self.run, self.timeout_s = check_run(run), timeout_s
        self.server_nonce = ""
        self._run = self.run.encode()
        self._key = None if key is None else Path(key)
        self._id = bytes.fromhex(registry_id) if registry_id else NO_ID
        self._is_durable: bool | None = None
        self._numbers = itertools.count(secrets.randbits(32))
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket: zmq.Socket | None = None
        # Without this the garbage collector would wait for an open socket for ever.
        self._end = weakref.finalize(self, self._context.destroy, 0)
        self._end.atexit = False
        try:
            self._socket = self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> zmq.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.maxmsgsize = MAX_FRAME
        # Queue no message without a connection: a restarted server would get old messages.
        socket.immediate = True
        socket.ipv6 = "[" in self.address
        socket.reconnect_ivl, socket.reconnect_ivl_max = 20, 500
        try:
            if self._key is not None:
                folder, name = self._key, WORKER
                if folder.name.endswith(_SECRET):
                    folder, name = folder.parent, folder.name.removesuffix(_SECRET)
                protect_worker(socket, folder, name)
                socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            socket.connect(self.address)
        except BaseException:
            socket.close()
            raise
        return socket

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._socket = None
        self._end()

    # ----------------------------------------------------------------------------------- registry

    @property
    def registry_id(self) -> str:
        """The registry's random name in hexadecimal digits; "" before the first answer."""
        return "" if self._id == NO_ID else self._id.hex()

    @property
    def is_durable(self) -> bool:
        """Whether the server has a journal; asks the server if it has not answered yet.

        Raises:
            RegistryUnavailable: If the server does not answer.
        """
        if self._is_durable is None:
            self.read()
        return bool(self._is_durable)

    def read(self) -> bytes:
        """Return the record, b"" if there is none; see ``Registry.read``."""
        return self._call(Kind.READ, (self._run,), Kind.RECORD)[0]

    def swap(self, old: bytes, new: bytes) -> bool:
        """Replace the record by ``new`` if it equals ``old``; see ``Registry.swap``."""
        check_swap(old, new)
        return self._call(Kind.SWAP, (self._run, old, new), Kind.SWAPPED) == (b"\1",)

    def beat(self, member: str, text: bytes) -> dict[str, bytes]:
        """Publish a member's beat, and return all last beats; see ``Registry.beat``."""
        check_beat(member, text)
        parts = self._call(Kind.BEAT, (self._run, member.encode(), text), Kind.BEATS)
        return {name.decode(): last for name, last in zip(parts[::2], parts[1::2], strict=True)}

    # ----------------------------------------------------------------------------------- messages

    def _call(self, kind: Kind, parts: tuple[bytes, ...], expected: Kind) -> tuple[bytes, ...]:
        deadline = time.monotonic() + self.timeout_s
        if not self._lock.acquire(timeout=self.timeout_s):
            raise RegistryUnavailable(
                f"another thread has asked the registry {self.address} for {self.timeout_s:g} s"
            )
        try:
            if kind == Kind.SWAP and self._id == NO_ID:
                self._ask(Kind.READ, (self._run,), Kind.RECORD, deadline)
            return self._ask(kind, parts, expected, deadline).parts
        finally:
            self._lock.release()

    def _ask(
        self, kind: Kind, parts: tuple[bytes, ...], expected: Kind, deadline: float
    ) -> Message:
        """Send a request, and return its answer."""
        socket = self._socket = self._socket or self._open()
        request = Message(kind, next(self._numbers), self._id, parts=parts)
        # A swap is sent once: the second of two equal swaps would fail.
        repeat_s = math.inf if kind == Kind.SWAP else _REPEAT_S
        send_at = time.monotonic()
        while True:
            if time.monotonic() >= send_at and _send(socket, pack(request), deadline):
                send_at = time.monotonic() + repeat_s
            answer = self._next(socket, min(deadline, send_at))
            if answer is not None and answer.number == request.number:
                return self._check(answer, expected)
            if answer is None and time.monotonic() >= deadline:
                is_refused = self._key is not None and _is_refused(socket)
                # A new socket has nothing of this request, and finds a server that has moved.
                self._socket = None
                socket.close()
                if is_refused:
                    raise KeyRefused(
                        f"the registry {self.address} refuses the key {self._key}: copy its public "
                        "part, NAME.key, into the folder allowed of the registry's keys"
                    )
                raise RegistryUnavailable(self._silence())

    def _next(self, socket: zmq.Socket, until: float) -> Message | None:
        """Return the next message; None if none comes in time, or for bytes that are no message."""
        frames = receive(socket, _milliseconds(until))
        if frames is None:
            return None
        try:
            return parse([frame.buffer for frame in frames])
        except ProtocolError as error:
            if error.protocol is not None:
                raise RegistryMismatch(f"the registry {self.address}: {error}") from None
            return None

    def _check(self, answer: Message, expected: Kind) -> Message:
        """Return an answer of the expected kind from the expected registry, or raise."""
        if self._id == NO_ID:
            self._id = answer.registry
        if answer.kind == Kind.STRANGER or answer.registry != self._id:
            raise RegistryMismatch(
                f"the registry at {self.address} is {answer.registry.hex()}, and the run "
                f"{self.run!r} belongs to the registry {self.registry_id}: was the server started "
                "with another journal folder?"
            )
        self.server_nonce, self._is_durable = answer.nonce.hex(), answer.is_durable
        if answer.kind != expected:
            kind = KeyRefused if answer.sentence == REVOKED else RegistryUnavailable
            raise kind(f"the registry {self.address} refuses: {answer.sentence}")
        return answer

    def _silence(self) -> str:
        asked = "and does it want keys?" if self._key is None else "and does it know the key?"
        return (
            f"the registry {self.address} has not answered for {self.timeout_s:g} s: "
            f"is it running, {asked}"
        )


def _is_refused(socket: zmq.Socket) -> bool:
    """Whether the server has refused the key of a socket; ends the watch over the socket."""
    monitor, is_refused = socket.get_monitor_socket(), False
    while monitor.poll(0):
        is_refused |= int(recv_monitor_message(monitor)["value"]) == _NOT_ALLOWED
    socket.disable_monitor()
    return is_refused


def _send(socket: zmq.Socket, frames: list[bytes], deadline: float) -> bool:
    """Send a message when there is a connection; False if there is none, or an answer waits."""
    zmq.zmq_poll([(socket, POLLIN | POLLOUT)], _milliseconds(deadline))
    try:
        socket.send_multipart(frames, NOBLOCK)
        return True
    except zmq.Again:
        return False


def _milliseconds(until: float) -> int:
    return max(0, math.ceil(1000 * (until - time.monotonic())))
