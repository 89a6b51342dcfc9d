"""A donor: serves this replica's outer state and its latest rounds to replicas that join.

One thread with one socket. The training thread never waits for a newcomer: at most it waits until
4 MiB of a logged round are copied.
"""

from __future__ import annotations

import logging
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from typing import Any

import zmq
from torch import Tensor

from ... import _C
from ...base.service.sockets import beat, receive, send_to_peer
from ...ops.digests import digest_of
from ...rounds.part import SyncedFragment
from ...rounds.round_log import RoundLog, state_tensors
from .keys import KeyPair, Place
from .messages import MAX_REQUEST, PIECE_BYTES, REQUESTS, Kind, Message, ProtocolError, pack, parse

logger = logging.getLogger(__name__)

_POLL_MS = 100
# Seconds of silence after which a newcomer's connection ends.
_LOST_AFTER_S = 10.0
# Answers that wait for one newcomer; more are dropped. A newcomer has fewer requests open.
_MAX_WAITING = 8
# Seconds for which a newcomer that has asked counts as one.
_RECENT_S = 3.0


class Donor:
    """Serve the outer state of fragments.

    Args:
        host: Address or name of the interface at which other replicas reach this process.
        keys: Of this process.
        allowed: Returns the public keys that may connect; called on another thread.
        parts: All fragments, by index.
        log: The rounds that this replica has applied.

    Attributes:
        place: Where this process serves.
        has_state: The parts hold the state of the group; without it every request is refused.
        served_bytes: Bytes of state and payloads that were sent.

    Raises:
        OSError: If the socket cannot listen on the interface.
    """

    def __init__(
        self,
        host: str,
        keys: KeyPair,
        allowed: Callable[[], Iterable[str]],
        parts: Sequence[SyncedFragment],
        log: RoundLog,
    ) -> None:
        self._parts, self._log = list(parts), log
        self.has_state = False
        self.served_bytes = 0
        self._seen: dict[bytes, float] = {}
        self._stop = threading.Event()
        _C.raise_descriptors()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._guard = keys.protect_server(self._context, self._socket, allowed)
        try:
            port = self._listen(host)
        except BaseException:
            self._end()
            raise
        shown = f"[{host}]" if ":" in host else host
        self.place = Place(f"tcp://{shown}:{port}", keys.text)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="diloco_comm donor")
        self._thread.start()

    def _listen(self, host: str) -> int:
        socket = self._socket
        socket.linger = 0
        socket.maxmsgsize = MAX_REQUEST
        socket.sndhwm = socket.rcvhwm = _MAX_WAITING
        socket.handshake_ivl = 5_000
        beat(socket, _LOST_AFTER_S)
        family, _, _, _, (ip, *_) = sockets.getaddrinfo(host, 0, type=sockets.SOCK_STREAM)[0]
        socket.ipv6 = family == sockets.AF_INET6
        try:
            socket.bind(f"tcp://[{ip}]:0" if socket.ipv6 else f"tcp://{ip}:0")
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)
            raise OSError(error.errno, f"cannot listen on {host}: {reason}") from None
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def close(self) -> None:
        """End the thread, and all connections; idempotent."""
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                frames = receive(self._socket, _POLL_MS)
                if frames is not None:
                    self._receive(frames)
        except Exception:
            logger.exception("replicas that join get nothing more from this replica")
        finally:
            self._end()

    def _end(self) -> None:
        self._socket.close()
        self._guard.stop()
        self._context.term()

    # ----------------------------------------------------------------------------------- messages

    def _receive(self, frames: list[zmq.Frame]) -> None:
        peer = frames[0].bytes
        try:
            request = parse([frame.buffer for frame in frames[1:]])
        except ProtocolError as error:
            logger.debug("a message was ignored: %s", error)
            return
        self._seen[peer] = time.monotonic()
        try:
            answer = self._answer(request)
        except ValueError as error:
            answer = Message(Kind.REFUSED, request.number, {"sentence": str(error)})
        # ZeroMQ drops an answer to a newcomer that is gone or does not read.
        send_to_peer(self._socket, [peer, *pack(answer)], copy=False)
        self.served_bytes += len(answer.body)

    def _answer(self, request: Message) -> Message:
        if request.kind not in REQUESTS:
            raise ValueError(f"{request.kind.name} is not for a donor")
        if not self.has_state:
            raise ValueError("this replica does not hold the state of the group")
        if request.kind == Kind.STATUS:
            return self._status(request)
        part = self._part(request)
        if request.kind == Kind.ROUND:
            return self._round(request, part)
        return self._state(request, part)

    def _status(self, request: Message) -> Message:
        standings = []
        for part in self._parts:
            standing = self._log.standing(part)
            if standing is None:
                return Message(Kind.LATER, request.number)
            standings.append(astuple(standing))
        now = time.monotonic()
        self._seen = {peer: at for peer, at in self._seen.items() if at > now - _RECENT_S}
        numbers = {
            "fragments": standings,
            "log": [astuple(entry) for entry in self._log.rounds()],
            "num_newcomers": len(self._seen),
        }
        return Message(Kind.IS_AT, request.number, numbers)

    def _part(self, request: Message) -> SyncedFragment:
        index = request.numbers["fragment"]
        if not 0 <= index < len(self._parts):
            raise ValueError(f"there are {len(self._parts)} fragments, and no {index}")
        return self._parts[index]

    def _state(self, request: Message, part: SyncedFragment) -> Message:
        begin, end = request.numbers["begin"], request.numbers["end"]
        most = piece_elements(part)
        if not (0 <= begin < end <= part.num_elements and end - begin <= most):
            raise ValueError(
                f"fragment {part.index} has {part.num_elements} elements, of which a message has "
                f"{most}, got [{begin}, {end})"
            )
        found = self._log.read_state(part, begin, end)
        if found is None:
            return Message(Kind.LATER, request.number)
        standing, values = found
        numbers: dict[str, Any] = {
            "round": standing.round,
            "history": standing.history,
            "num_steps": standing.num_steps,
            "digest": digest_of([values]),
        }
        if request.kind == Kind.DIGEST:
            return Message(Kind.HASHED, request.number, numbers)
        return Message(Kind.ELEMENTS, request.number, numbers, _bytes_of(values))

    def _round(self, request: Message, part: SyncedFragment) -> Message:
        number, begin, end = (request.numbers[name] for name in ("number", "begin", "end"))
        if end - begin > PIECE_BYTES:
            raise ValueError(f"a message has at most {PIECE_BYTES} bytes, got {end - begin}")
        values = self._log.read(part.index, number, begin, end)
        if values is None:
            return Message(Kind.GONE, request.number)
        numbers = {"digest": digest_of([values])}
        return Message(Kind.PAYLOADS, request.number, numbers, _bytes_of(values))


def piece_elements(part: SyncedFragment) -> int:
    """Return how many elements of a fragment travel in one message, with all buffers."""
    return max(1, PIECE_BYTES // (4 * len(state_tensors(part))))


def _bytes_of(values: Tensor) -> memoryview:
    return values.numpy().reshape(-1).data.cast("B")
