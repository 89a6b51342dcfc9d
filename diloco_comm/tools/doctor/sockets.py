"""Plain connections between the doctors of two replicas: who dials whom, and how fast they are."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...base.service.addresses import Proxy, parse_address, tcp_address
from ...base.service.relay import Kind, RelaySeat, connected_socket, record

# A packet that is dropped is sent again after 1 s and after 3 s: two lost ones are no closed port.
DIAL_S = 5.0
# How long a peer may take for a word; 2 s of queue in each direction fit several times.
WORD_S = 20.0
PINGS, PING_S = 20, 3.0
# Seconds in which bytes are counted, after a start of ten round trips within these bounds.
RATE_S, LEAST_START_S, MOST_START_S = 2.0, 0.5, 2.0
# The port is open to all: a stranger is not listened to for longer, and not to many at a time.
_HELLO_S, _MOST_STRANGERS = 5.0, 64
_SEND_BYTES = 256 * 1024
# How long a thread waits for a full or an empty connection before it looks whether time is up.
_LOOK_S = 0.2
# The token of the pair and the direction, and the number of the connection.
_HELLO = struct.Struct("<32sI")
# linux/tcp.h, struct tcp_info: tcpi_total_retrans and tcpi_data_segs_out.
_RETRANSMITTED_AT, _SEGMENTS_AT = 100, 156


def _answer_to(hello: bytes) -> bytes:
    return hashlib.sha256(b"doctor" + hello).digest()


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data


def reason_of(error: OSError) -> str:
    """Return why a connection failed, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror or str(error)).lower()


class Door:
    """Takes connections that the doctors of other replicas have dialled.

    Args:
        listen: "host:port", or "" for none.
        relay: ``tcp://host:port`` of the relay where this process waits, or None.
        nonce: The number of this process at the relay, 16 bytes as hexadecimal digits.
        proxy: Makes the connections to the relay.

    Attributes:
        port: The port that listens; 0 without one.
        tokens: The tokens of connections that are let in.

    Raises:
        OSError: If this process cannot listen there.
        RuntimeError: If the relay cannot be reached.
    """

    def __init__(
        self, listen: str, relay: str | None, nonce: str, proxy: Proxy | None = None
    ) -> None:
        self.tokens: frozenset[bytes] = frozenset()
        self.port = 0
        self._taken: dict[tuple[bytes, int], socket.socket] = {}
        self._changed = threading.Condition()
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        self._listener: socket.socket | None = None
        self._seat = RelaySeat(relay, nonce, self._adopt, proxy) if relay is not None else None
        if listen:
            host, port = parse_address("listen", listen, listens=True)
            family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(place[:2], family=family)
            self.port = self._listener.getsockname()[1]
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def take(self, token: bytes, number: int) -> socket.socket:
        """Return a connection that a peer has dialled.

        Raises:
            TimeoutError: If the connection has not come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: (token, number) in self._taken, DIAL_S):
                raise TimeoutError
            return self._taken.pop((token, number))

    def close(self) -> None:
        if self._seat is not None:
            self._seat.close()
        if self._listener is not None:
            # Ends the thread's accept(), which close() alone would not.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for connection in self._taken.values():
            connection.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._adopt(connection.detach())

    def _adopt(self, descriptor: int) -> None:
        connection = socket.socket(fileno=descriptor)
        if not self._strangers.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HELLO_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = _read(connection, _HELLO.size)
            token, number = _HELLO.unpack(hello)
            if token not in self.tokens:
                connection.close()
                return
            # The dialler goes on when it has the answer: the connection must be there then.
            with self._changed:
                self._taken[token, number] = connection
            connection.sendall(_answer_to(hello))
            with self._changed:
                self._changed.notify_all()
        except OSError:
            connection.close()
        finally:
            self._strangers.release()


def dial(
    place: str, token: bytes, number: int, seat: str = "", proxy: Proxy | None = None
) -> socket.socket:
    """Connect to the doctor of another replica.

    Args:
        place: The ``tcp://host:port`` of the peer, or of a relay.
        seat: The number of the peer at the relay.
        proxy: Makes the connection.

    Raises:
        OSError: If there is no connection, or another program answers.
    """
    connection = connected_socket(parse_address("address", place), DIAL_S, proxy)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if seat:
            connection.sendall(record(Kind.DIAL, bytes.fromhex(seat)))
        hello = _HELLO.pack(token, number)
        connection.sendall(hello)
        if _read(connection, hashlib.sha256().digest_size) != _answer_to(hello):
            raise ConnectionError("another program answers there")
    except ConnectionError:
        connection.close()
        raise ConnectionError("another program answers there, or the relay knows no way") from None
    except BaseException:
        connection.close()
        raise
    return connection


def place_behind(listen: str, advertise: str, port: int) -> str:
    """Return where the others find a door; port 0 of ``advertise`` is ``port``."""
    if not listen or not advertise:
        return ""
    host, advertised = parse_address("advertise", advertise, listens=True)
    return tcp_address(host, advertised or port)


# -------------------------------------------------------------------------------- measurements


@dataclass
class Rate:
    """One side of a measurement over several connections.

    Attributes:
        gbps: Received, all connections together.
        retransmitted: Share of the segments sent that were sent again; None if none was sent.
    """

    lanes: int
    gbps: float
    retransmitted: float | None


def congestion_of(connection: socket.socket) -> str:
    """Return the name of a connection's congestion control."""
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode()


def round_trip(control: socket.socket, *, asks: bool) -> float:
    """Return the median of some round trips in seconds; the side that ``asks`` measures them."""
    control.settimeout(WORD_S)
    if not asks:
        while _read(control, 1) == b"p":
            control.sendall(b"p")
        (seconds,) = struct.unpack("<d", _read(control, 8))
        return float(seconds)
    taken: list[float] = []
    end = time.perf_counter() + PING_S
    while len(taken) < PINGS and (not taken or time.perf_counter() < end):
        start = time.perf_counter()
        control.sendall(b"p")
        _read(control, 1)
        taken.append(time.perf_counter() - start)
    seconds = statistics.median(taken)
    control.sendall(b"e" + struct.pack("<d", seconds))
    return seconds


def measure_rate(control: socket.socket, lanes: Sequence[socket.socket], trip_s: float) -> Rate:
    """Send and receive over all lanes for some seconds, as the peer does at the same time."""
    start_s = min(max(LEAST_START_S, 10 * trip_s), MOST_START_S)
    received = [0] * len(lanes)
    stop = threading.Event()
    _meet(control)
    with _running(lanes, received, stop):
        time.sleep(start_s)
        before, began, sent = sum(received), time.perf_counter(), _segments(lanes)
        time.sleep(RATE_S)
        num_bytes, seconds = sum(received) - before, time.perf_counter() - began
        again, segments = (now - then for now, then in zip(_segments(lanes), sent, strict=True))
        # The peer may have begun later.
        time.sleep(min(2 * trip_s, 1.0))
    _meet(control)
    share = again / segments if segments else None
    return Rate(len(lanes), num_bytes * 8 / seconds / 1e9, share)


def _meet(control: socket.socket) -> None:
    control.sendall(b"m")
    if _read(control, 1) != b"m":
        raise ConnectionError("the peer is elsewhere in the measurement")


@contextlib.contextmanager
def _running(
    lanes: Sequence[socket.socket], received: list[int], stop: threading.Event
) -> Iterator[None]:
    """Let two threads a lane send and receive."""
    work: list[tuple[Any, tuple[Any, ...]]] = []
    for i, lane in enumerate(lanes):
        lane.settimeout(_LOOK_S)
        work += [(_send, (lane, stop)), (_receive, (lane, stop, received, i))]
    threads = [threading.Thread(target=run, args=args, daemon=True) for run, args in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _send(lane: socket.socket, stop: threading.Event) -> None:
    data = bytes(_SEND_BYTES)
    while not stop.is_set():
        try:
            lane.send(data)
        except TimeoutError:
            continue
        except OSError:
            return


def _receive(lane: socket.socket, stop: threading.Event, received: list[int], i: int) -> None:
    buffer = bytearray(_SEND_BYTES)
    while not stop.is_set():
        try:
            num_bytes = lane.recv_into(buffer)
        except TimeoutError:
            continue
        except OSError:
            return
        if not num_bytes:
            return
        received[i] += num_bytes


def _segments(lanes: Sequence[socket.socket]) -> tuple[int, int]:
    """Return how many segments were sent again, and how many were sent, on all lanes."""
    again = sent = 0
    for lane in lanes:
        info = lane.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SEGMENTS_AT + 4)
        if len(info) == _SEGMENTS_AT + 4:
            again += struct.unpack_from("=I", info, _RETRANSMITTED_AT)[0]
            sent += struct.unpack_from("=I", info, _SEGMENTS_AT)[0]
    return again, sent


def drop(connection: socket.socket) -> None:
    """Close a connection at once, with all that has not arrived yet."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
