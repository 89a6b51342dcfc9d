"""A relay: processes that nobody can dial meet there, and the relay copies bytes between them.

A process waits at the relay by a connection, its *seat*, under the nonce of its link. Another
process dials the relay and names the nonce. The relay tells the seat the number of the call, the
process dials the relay once more with this number, and then the relay copies bytes between the two
connections, as they come. With keys the bytes are encrypted from process to process: the relay
holds no key, and sees sizes and times alone.

Each side begins with one record. The relay answers with records on a seat alone, and with one to a
peer of another version. A *stranger* is a connection whose first record has not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import itertools
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ... import _C
from ..background import batch_threads
from ..checks import logger_of
from .addresses import Proxy, name_of_place, parse_address, tcp_address

_log = logger_of(__name__)

# Magic, version, kind, and the nonce or the number of a call; little endian.
RECORD = struct.Struct("<8sII16s")
MAGIC, VERSION = b"DILORELY", 1
# Seconds between two records on a seat, so that no router forgets the connection.
PING_S = 10.0
# Seconds for the first record, for the answer to a call, and for the second half of a pair after
# the first half has ended.
_RECORD_S, _CALL_S, _HALF_S = 5.0, 10.0, 30.0
# Seconds to wait where no descriptor is left, and no stranger has one; and between two refills of
# the reserve: descriptors that are kept back to accept connections when no other is left.
_ACCEPT_PAUSE_S, _RESERVE_S = 0.1, 1.0
# Error numbers where this process, or this machine, has no descriptor or no memory left.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Seconds between two looks at whether the dialler of a call still waits.
_LOOK_S = 1.0
# The most connections that wait in the kernel until this process accepts them.
_BACKLOG = 4096
# The most bytes of a pair that the relay holds, in each direction.
_BUFFER_BYTES = 128 * 1024
# The most calls that a seat has not been told of, and that a process answers at a time.
_MOST_CALLS, _MOST_ANSWERS = 1024, 64
# Seconds for a process to connect to the relay; of silence after which the relay counts as lost;
# and between two attempts to get a seat again, at first and at most.
_CONNECT_S, _SILENCE_S, _PAUSE_S = 10.0, 3 * PING_S, 1.0
_LONGEST_PAUSE_S = 16.0


class OtherVersion(ConnectionError):
    """The peer speaks another version of the relay's protocol."""


class _Closed(ConnectionError):
    """The relay has closed the connection in place of an answer."""


class Kind(enum.IntEnum):
    """The kinds of records."""

    SEAT = 1  # the sender waits under this nonce
    DIAL = 2  # the sender wants the process of this nonce
    ACCEPT = 3  # the sender answers the call of this number
    SEATED = 4  # the relay: the seat is taken
    CALL = 5  # the relay: a call of this number has come
    PING = 6  # the relay is there


def record(kind: Kind, number: bytes = bytes(16)) -> bytes:
    """Return the bytes of a record."""
    return RECORD.pack(MAGIC, VERSION, kind, number)


def parse_record(data: bytes) -> tuple[int, bytes]:
    """Return the kind of a record, and its nonce or number.

    Raises:
        OtherVersion: If the record is of another version.
        ConnectionError: If the bytes are no record.
    """
    magic, version, kind, number = RECORD.unpack(data)
    if magic != MAGIC:
        raise ConnectionError("another program answers there")
    if version != VERSION:
        raise OtherVersion(
            f"version {version} of the relay's protocol is spoken there, and here version {VERSION}"
        )
    return kind, number


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel end a connection whose peer has vanished, or has not read for two minutes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 30)
    # Milliseconds; for data that are not acknowledged, and for a window that stays closed.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000)


@dataclass(eq=False)
class _Seat:
    connection: socket.socket
    calls: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(_MOST_CALLS))


@dataclass(frozen=True)
class _Stranger:
    connection: socket.socket
    task: asyncio.Task[None]


@dataclass(frozen=True)
class _Call:
    dialler: socket.socket
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class Relay:
    """A relay that listens at once; ``serve`` runs it.

    Args:
        host, port: Where the relay listens; port 0 is any free port.
        most: Seats and dialled connections at a time; more are closed at once. Each dialled
            connection is answered by another one.

    Attributes:
        address: ``tcp://host:port``.
        num_pairs: Pairs of connections that the relay copies bytes between.
        num_copied_bytes: In both directions, of all pairs that the relay has had.

    Raises:
        OSError: If the relay cannot listen there.
    """

    def __init__(self, host: str, port: int, *, most: int = 1024) -> None:
        # The most strangers at a time.
        self._most_strangers = _C.most_strangers()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address = tcp_address(host, self._listener.getsockname()[1])
        self.num_pairs = self.num_copied_bytes = 0
        self._most, self._num_held, self._is_full = most, 0, False
        self._seats: dict[bytes, _Seat] = {}
        self._calls: dict[bytes, _Call] = {}
        # The strangers, numbered by age, and the choice of the stranger that is closed first.
        self._strangers: dict[int, _Stranger] = {}
        self._choice, self._numbers = _C.Strangers(), itertools.count(1)
        self._reserve = _C.Reserve()
        self._reserve.fill()
        self._loop = asyncio.new_event_loop()
        self._is_stopped = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Processes that wait at the relay."""
        return len(self._seats)

    def serve(self) -> None:
        """Join and copy until ``stop_soon``; then close all connections."""
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._listener.close()
            self._loop.close()

    def stop_soon(self) -> None:
        """Let ``serve`` return; from any thread or signal handler, also before ``serve``."""
        with contextlib.suppress(RuntimeError):  # has returned already
            self._loop.call_soon_threadsafe(self._is_stopped.set)

    async def _serve(self) -> None:
        tasks = [self._loop.create_task(body) for body in (self._accept(), self._keep_reserve())]
        await self._is_stopped.wait()
        await _end(*tasks)

    async def _keep_reserve(self) -> None:
        while True:
            await asyncio.sleep(_RESERVE_S)
            self._reserve.fill()

    async def _accept(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                try:
                    connection, (host, *_) = await self._loop.sock_accept(self._listener)
                except OSError as error:
                    if error.errno not in _EXHAUSTED:  # the connection has ended
                        await asyncio.sleep(_ACCEPT_PAUSE_S)
                    elif not self._reserve.release():
                        self._tell_full(str(error))
                        await self._end_a_stranger()
                    continue
                if len(self._strangers) >= self._most_strangers:
                    self._tell_full(f"{self._most_strangers} connections that say nothing")
                    await self._end_a_stranger()
                stranger = next(self._numbers)
                task = self._loop.create_task(self._attend(connection, stranger))
                self._strangers[stranger] = _Stranger(connection, task)
                self._choice.add(stranger, host)
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                # If the next connection is there already, nothing above lets other tasks run.
                await asyncio.sleep(0)
        finally:
            await _end(*tasks)

    async def _attend(self, connection: socket.socket, stranger: int) -> None:
        """Do what the first record of a connection asks for, and close the connection."""
        with connection, contextlib.suppress(OSError, asyncio.TimeoutError):
            connection.setblocking(False)
            keep_alive(connection)
            try:
                first = await asyncio.wait_for(self._first(connection, stranger), _RECORD_S)
            finally:
                del self._strangers[stranger]
                self._choice.remove(stranger)
            try:
                kind, number = parse_record(first)
            except OtherVersion:
                await self._loop.sock_sendall(connection, record(Kind.PING))
                return
            if kind == Kind.ACCEPT:
                return await self._join(connection, number)
            if kind not in (Kind.SEAT, Kind.DIAL):
                return
            if self._num_held >= self._most:
                return self._tell_full(f"{self._most} connections")
            self._num_held += 1
            try:
                await (self._keep_seat if kind == Kind.SEAT else self._call)(connection, number)
            finally:
                self._num_held -= 1

    async def _end_a_stranger(self) -> None:
        """Close a stranger to make room for a new connection; wait a moment if there is none."""
        while stranger := self._choice.choose():
            chosen = self._strangers[stranger]
            # The first byte may have come just now.
            if not (_next_byte(chosen.connection) and self._choice.hear(stranger)):
                return await _end(chosen.task)
        await asyncio.sleep(_ACCEPT_PAUSE_S)

    def _tell_full(self, reason: str) -> None:
        if not self._is_full:
            self._is_full = True
            _log.warning("the relay at %s is full (%s): it closes others", self.address, reason)

    async def _first(self, connection: socket.socket, stranger: int) -> bytes:
        """Read the first record, and nothing after the record."""
        data = b""
        while len(data) < RECORD.size:
            more = await self._loop.sock_recv(connection, RECORD.size - len(data))
            if not more:
                raise ConnectionError("the connection has ended")
            self._choice.hear(stranger)
            data += more
        return data

    async def _keep_seat(self, connection: socket.socket, nonce: bytes) -> None:
        """Tell a process of its calls; of several seats under one nonce the newest one counts."""
        former = self._seats.get(nonce)
        seat = _Seat(connection) if former is None else _Seat(connection, former.calls)
        self._seats[nonce] = seat
        if former is not None:
            with contextlib.suppress(OSError):
                former.connection.shutdown(socket.SHUT_RDWR)
        try:
            await self._loop.sock_sendall(connection, record(Kind.SEATED, nonce))
            # The process sends nothing: the first byte, or the end, ends the seat.
            await self._first_of(self._tell(seat), self._loop.sock_recv(connection, 1))
        finally:
            if self._seats.get(nonce) is seat:
                del self._seats[nonce]

    async def _tell(self, seat: _Seat) -> None:
        while True:
            try:
                news = record(Kind.CALL, await asyncio.wait_for(seat.calls.get(), PING_S))
            except asyncio.TimeoutError:
                news = record(Kind.PING)
            await self._loop.sock_sendall(seat.connection, news)

    async def _call(self, dialler: socket.socket, nonce: bytes) -> None:
        """Call the process of a nonce, and keep the dialler's connection until the pair ends."""
        seat = self._seats.get(nonce)
        if seat is None or seat.calls.full():
            return
        number, call = secrets.token_bytes(16), _Call(dialler)
        self._calls[number] = call
        seat.calls.put_nowait(number)
        end = self._loop.time() + _CALL_S
        try:
            while number in self._calls:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(call.is_over.wait(), _LOOK_S)
                is_late = self._loop.time() > end
                if number in self._calls and (is_late or _next_byte(dialler) == b""):
                    return
            await call.is_over.wait()
        finally:
            self._calls.pop(number, None)

    async def _join(self, connection: socket.socket, number: bytes) -> None:
        """Copy between the connections of a call and of its answer, both ways, until both end."""
        call = self._calls.pop(number, None)
        if call is None:
            return
        self.num_pairs += 1
        try:
            there = self._loop.create_task(self._copy(call.dialler, connection))
            back = self._loop.create_task(self._copy(connection, call.dialler))
            try:
                await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
                if not _has_failed(there, back):
                    await asyncio.wait((there, back), timeout=_HALF_S)
            finally:
                await _end(there, back)
        finally:
            self.num_pairs -= 1
            call.is_over.set()

    async def _copy(self, source: socket.socket, target: socket.socket) -> None:
        """Copy until the source ends; a target that is full holds up the source."""
        buffer = bytearray(_BUFFER_BYTES)
        view = memoryview(buffer)
        while num_bytes := await self._loop.sock_recv_into(source, buffer):
            await self._loop.sock_sendall(target, view[:num_bytes])
            self.num_copied_bytes += num_bytes
            # If bytes and room are always there, nothing above lets other pairs' tasks run.
            await asyncio.sleep(0)
        target.shutdown(socket.SHUT_WR)

    async def _first_of(self, *bodies: Coroutine[Any, Any, Any]) -> None:
        """Run until one of several has ended, and end the others."""
        tasks = [self._loop.create_task(body) for body in bodies]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(*tasks)


def _next_byte(connection: socket.socket) -> bytes | None:
    """Return what the peer has sent and nobody has read; empty where the peer has closed."""
    try:
        return connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _has_failed(*tasks: asyncio.Task[None]) -> bool:
    return any(task.done() and task.exception() is not None for task in tasks)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    pending = set(tasks)
    while pending:
        # Before Python 3.12 ``wait_for`` may swallow a cancellation.
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.1)
    for task in tasks:
        if not task.cancelled():
            task.exception()


# ------------------------------------------------------------------- the process that waits


# A forked child would keep the seat of a parent that has died.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for one in list(_sockets):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


class RelaySeat:
    """Waits at a relay, and hands over the connections that peers have dialled there.

    The constructor returns when the relay has given the seat. When the relay is lost, this process
    tries to get a seat again, after pauses of at most 16 seconds.

    Args:
        relay: ``tcp://host:port``.
        nonce: The link's, as hexadecimal digits.
        adopt: Takes the descriptor of a connection; called from threads of the seat.
        proxy: Makes the connections to the relay.

    Raises:
        RuntimeError: If the relay cannot be reached, or another program answers there.
    """

    def __init__(
        self, relay: str, nonce: str, adopt: Callable[[int], None], proxy: Proxy | None = None
    ) -> None:
        self._place = parse_address("relay", relay)
        # The relay's address as peers get it, without a scheme.
        self.relay, self._proxy = name_of_place(*self._place), proxy
        self._nonce = bytes.fromhex(nonce)
        self._adopt = adopt
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._answers = threading.BoundedSemaphore(_MOST_ANSWERS)
        try:
            self._connection = self._sit_down()
        except OSError as error:
            advice = "start the relay with `diloco-comm relay`, and open its port"
            if proxy is not None:
                advice += ", also at the proxy"
            if isinstance(error, _Closed):
                advice = "the relay may have too many connections, see its option --connections"
            elif isinstance(error, OtherVersion):
                advice = "give all machines one version of diloco_comm"
            raise RuntimeError(
                f"this process cannot wait at the relay at tcp://{self.relay}: {error}: {advice}"
            ) from error
        with batch_threads():
            name = "diloco_comm relay"
            threading.Thread(target=self._watch, daemon=True, name=name).start()

    def close(self) -> None:
        """Give the seat back; idempotent. A forked child has no seat."""
        if os.getpid() != self._pid:
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _dial(self, kind: Kind, number: bytes) -> socket.socket:
        connection = connected_socket(self._place, _CONNECT_S, self._proxy)
        _sockets.add(connection)
        try:
            keep_alive(connection)
            connection.sendall(record(kind, number))
        except OSError:
            connection.close()
            raise
        return connection

    def _sit_down(self) -> socket.socket:
        connection = self._dial(Kind.SEAT, self._nonce)
        try:
            if _next(connection) != (Kind.SEATED, self._nonce):
                raise ConnectionError("the relay does not give a seat")
            connection.settimeout(_SILENCE_S)
        except OSError:
            connection.close()
            raise
        return connection

    def _watch(self) -> None:
        pause = _PAUSE_S
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                with self._connection as connection:
                    self._listen(connection)
            except OSError as error:
                if self._ended.is_set():
                    return
                _log.warning(
                    "the relay at tcp://%s is lost (%s): dialling again", self.relay, error
                )
            # A relay that takes each seat away at once is not asked every second.
            is_steady = time.monotonic() - began > PING_S
            pause = _PAUSE_S if is_steady else min(2 * pause, _LONGEST_PAUSE_S)
            while not self._ended.wait(pause):
                with contextlib.suppress(OSError):
                    self._connection = self._sit_down()
                    _log.warning("the relay at tcp://%s is back", self.relay)
                    break
        self._connection.close()

    def _listen(self, connection: socket.socket) -> None:
        while True:
            kind, number = _next(connection)
            # The dialler dials again if there is no answer.
            if kind == Kind.CALL and self._answers.acquire(blocking=False):
                name = "diloco_comm relay call"
                answer = threading.Thread(target=self._answer, args=(number,), name=name)
                answer.daemon = True
                try:
                    answer.start()
                except RuntimeError as error:
                    self._answers.release()
                    _log.warning("a call at the relay is not answered: %s", error)

    def _answer(self, number: bytes) -> None:
        """Answer a call by a connection; if that fails, the dialler dials again."""
        try:
            with contextlib.suppress(OSError, RuntimeError):
                connection = self._dial(Kind.ACCEPT, number)
                connection.setblocking(False)
                self._adopt(connection.detach())
        finally:
            self._answers.release()


def connected_socket(
    place: tuple[str, int], timeout: float, proxy: Proxy | None = None
) -> socket.socket:
    """Return a connection to a host and port, made by the proxy if there is one.

    Raises:
        OSError: If there is no connection in time; a ConnectionError says what the proxy answered.
    """
    if proxy is None:
        return socket.create_connection(place, timeout=timeout)
    connection = socket.socket(fileno=_C.dial_through(proxy, *place, timeout))
    connection.settimeout(timeout)
    return connection


def _next(connection: socket.socket) -> tuple[int, bytes]:
    """Wait for the next record of the relay."""
    data = b""
    while len(data) < RECORD.size:
        more = connection.recv(RECORD.size - len(data))
        if not more:
            raise _Closed("the relay has closed the connection")
        data += more
    return parse_record(data)
