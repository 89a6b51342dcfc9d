"""The registry's own server: one thread, one ROUTER socket, one journal.

The thread handles all messages that wait, and answers reads and beats at once. Then it writes the
swaps among them, with one fsync for all, and answers them. So a slow disk delays a beat by one
fsync at most.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from ...base.checks import number
from ...base.extension import RefusedVersions
from ...base.service.addresses import address_to_bind
from ...base.service.keys import REVOKED, Guard, protect_server
from ...base.service.sockets import beat, receive, send_to_peer
from .journal import Journal
from .messages import ID_BYTES, MAX_FRAME, NO_ID, Kind, Message, ProtocolError, pack, parse
from .protocol import DROP_AFTER_S, check_beat, check_run, check_swap
from .state import Beats, Outcome, Records

_log = logging.getLogger(__name__)

_POLL_MS = 100
_MAX_BATCH = 256
_DROP_EVERY_S = 60.0
# Seconds of silence after which a client's connection ends.
_LOST_AFTER_S = 30.0
# Answers that wait for one client; the next ones are dropped. A client asks one question at a time.
_MAX_WAITING = 8
_MIN_DROP_S, _MAX_DROP_S = 1.0, 30 * 86400.0


class RegistryServer:
    """Serve the records and beats of many runs.

    Args:
        listen: ``host:port``; port 0 picks a free one, see ``address`` afterwards.
        journal: Folder of the journal; None keeps all in memory, and a restart forgets all.
        keys: Folder of CURVE keys (``diloco-comm registry keygen``).
        insecure: Allow an address that other machines reach, without keys.
        drop_after: Seconds, as this process counts them, after which a member's beat is dropped.

    Attributes:
        address: The ``tcp://host:port`` at which the server listens.
        registry_id: The registry's random name in hexadecimal digits, kept in the journal.

    Raises:
        ValueError: For invalid arguments, and for an address that is open to the network without
            keys.
        DamagedLog: If the journal is damaged.
        OSError: If the socket cannot listen on the address, or the folder cannot be written or
            belongs to another server.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        journal: str | Path | None = None,
        keys: str | Path | None = None,
        insecure: bool = False,
        drop_after: float = DROP_AFTER_S,
    ) -> None:
        address = address_to_bind(listen, keys, insecure, maker="diloco-comm registry keygen")
        self._beats = Beats(_check_drop_after(drop_after))
        self._context = zmq.Context()
        self._guard: Guard | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._stop = threading.Event()
        self._records: Records | None = None
        try:
            # Listen first: a server whose address is taken changes nothing on the disk.
            self._listen(address, keys)
            self._records = Records(None if journal is None else Journal(Path(journal)))
        except BaseException:
            self.close()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.registry_id = self._records.registry_id.hex()
        self._nonce = secrets.token_bytes(ID_BYTES)
        self._drop_at = 0.0
        self._refused = RefusedVersions(_log, "a client")
        self._handlers: dict[Kind, Callable[[bytes, Message], None]] = {
            Kind.READ: self._read,
            Kind.SWAP: self._swap,
            Kind.BEAT: self._beat,
        }

    def _listen(self, address: str, keys: str | Path | None) -> None:
        socket = self._socket
        socket.linger = 300
        socket.maxmsgsize = MAX_FRAME
        socket.sndhwm = socket.rcvhwm = _MAX_WAITING
        socket.handshake_ivl = 5_000
        socket.setsockopt(zmq.BACKLOG, 1024)
        socket.ipv6 = "[" in address
        beat(socket, _LOST_AFTER_S)
        if keys is not None:
            self._guard = protect_server(self._context, socket, Path(keys))
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)
            raise OSError(error.errno, f"cannot listen on {address}: {reason}") from None

    # ------------------------------------------------------------------------------------ running

    def serve(self) -> None:
        """Serve in this thread until ``stop_soon``, then close the socket and the journal."""
        try:
            while not self._stop.is_set():
                self.turn(_POLL_MS)
        finally:
            self.close()

    def stop_soon(self) -> None:
        """Make ``serve`` return; may be called from a signal handler or another thread."""
        self._stop.set()

    def turn(self, wait_ms: int) -> None:
        """Handle the messages that wait, and commit the swaps among them."""
        for _ in range(_MAX_BATCH):
            frames = receive(self._socket, wait_ms)
            if frames is None:
                break
            wait_ms = 0
            self._receive(frames)
        assert self._records is not None
        self._records.commit()
        now = time.monotonic()
        self._beats.pass_time(now)
        if now >= self._drop_at:
            self._beats.drop_all()
            self._drop_at = now + _DROP_EVERY_S

    def close(self) -> None:
        """Close the socket and the journal; idempotent."""
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        self._context.term()
        if self._records is not None:
            self._records.close()

    # ----------------------------------------------------------------------------------- messages

    def _receive(self, frames: list[zmq.Frame]) -> None:
        peer = frames[0].bytes
        try:
            request = parse([frame.buffer for frame in frames[1:]])
        except ProtocolError as error:
            if error.protocol is not None:
                self._refused.log(error.protocol, error)
            if error.number is not None:
                self._answer(peer, error.number, Kind.REFUSED, [str(error).encode()])
            return
        if self._guard is not None and not self._guard.admits(frames[-1]):
            self._answer(peer, request.number, Kind.REFUSED, [REVOKED.encode()])
            return
        try:
            self._handle(peer, request)
        except ValueError as error:
            self._answer(peer, request.number, Kind.REFUSED, [str(error).encode()])

    def _handle(self, peer: bytes, request: Message) -> None:
        assert self._records is not None
        handle = self._handlers.get(request.kind)
        if handle is None:
            raise ValueError(f"{request.kind.name} is not for a server")
        if request.registry not in (NO_ID, self._records.registry_id):
            sentence = f"this is the registry {self.registry_id}, not {request.registry.hex()}"
            self._answer(peer, request.number, Kind.STRANGER, [sentence.encode()])
            return
        handle(peer, request)

    def _read(self, peer: bytes, request: Message) -> None:
        assert self._records is not None
        run = check_run(request.parts[0].decode())
        self._answer(peer, request.number, Kind.RECORD, [self._records.read(run)])

    def _swap(self, peer: bytes, request: Message) -> None:
        assert self._records is not None
        run = check_run(request.parts[0].decode())
        old, new = request.parts[1:]
        check_swap(old, new)
        if request.registry == NO_ID:
            raise ValueError("a swap names the registry that it is for")
        if self._records.is_full:
            self._records.commit()
        self._records.swap(run, old, new, partial(self._answer_swap, peer, request.number))

    def _answer_swap(self, peer: bytes, number: int, outcome: Outcome) -> None:
        self._answer(peer, number, outcome.kind, [outcome.part])

    def _beat(self, peer: bytes, request: Message) -> None:
        run, member, text = request.parts
        name = member.decode()
        check_beat(name, text)
        parts: list[bytes] = []
        for other, last in self._beats.beat(check_run(run.decode()), name, text).items():
            parts += (other.encode(), last)
        self._answer(peer, request.number, Kind.BEATS, parts)

    def _answer(self, peer: bytes, number: int, kind: Kind, parts: Sequence[bytes]) -> None:
        """Send an answer; ZeroMQ drops an answer to a client that is gone or does not read."""
        assert self._records is not None
        message = Message(
            kind,
            number,
            self._records.registry_id,
            self._nonce,
            self._records.is_durable,
            tuple(parts),
        )
        send_to_peer(self._socket, [peer, *pack(message)])


def _check_drop_after(value: Any) -> float:
    seconds = number("drop_after", value)
    if not _MIN_DROP_S <= seconds <= _MAX_DROP_S:
        raise ValueError(
            f"drop_after must be {_MIN_DROP_S:.0f} to {_MAX_DROP_S:.0f} seconds, got {value!r}"
        )
    return seconds
