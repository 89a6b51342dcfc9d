"""The monitor's page, its status in JSON and the metrics over HTTP: read-only, GET and HEAD.

All connections are served by one thread of their own. Each carries one request, and is closed after
``DEADLINE_S`` seconds at the latest. A server without a token answers only if the request's
``Host`` is a name of the loopback: a page of another site, whose name was made to resolve to the
loopback (DNS rebinding), reads nothing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import http
import json
import math
import re
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple, TypeVar

from .. import __version__
from ..base.checks import logger_of
from ..base.service.addresses import is_loopback, name_of_place, parse_address
from ..base.service.keys import check_secret
from ..base.store_host import listen_at
from . import openmetrics
from .report import status
from .status import MAX_PROCESSES, SILENT_S, Snapshot, State, advance, printable

T = TypeVar("T")

_log = logger_of(__name__)

MAX_CONNECTIONS = 16
DEADLINE_S = 5.0
# The host is read at most once in ``FRESH_S`` seconds, and about once in ``LOOK_S`` without a
# request. The next read waits for ``SHARE`` times the processor time that the last one, and the
# contents made of it, have cost.
FRESH_S, LOOK_S, SHARE = 1.0, 5.0, 5
# The least bytes that a member takes in the record of a run.
_MEMBER_BYTES = 24
# Bytes of a request with its headers, and of its path.
MAX_HEAD_BYTES, MAX_PATH_BYTES = 8192, 256
MIN_TOKEN = 16
_MAX_TOKEN = 1024
# After an answer the server reads on for this long, and at most this many bytes, until the peer
# closes. A socket that is closed with bytes unread resets the connection, and the peer loses the
# answer.
_LINGER_S, _LINGER_BYTES = 1.0, 1 << 18
# The most connections that wait in the kernel until the server's thread accepts them.
_BACKLOG = 256
_END = b"\r\n\r\n"
# The target may begin with "http://host:port", as a proxy sends it. No byte can match two of the
# groups, so that a target of any length is matched without backtracking.
_REQUEST = re.compile(
    rb"([A-Z]{1,16}) (?:(?i:http)://([!-.0->@-~]+)|(?=/))((?:[/?][\x21-\x7e]*)?) HTTP/1\.[01]"
)
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\x20-\x7e\x80-\xff\t]*)")
# Headers that decide whether a request is answered, so that it may have each only once.
_SINGLE = (b"host", b"authorization")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    "Cache-Control: no-store\r\nConnection: close\r\nReferrer-Policy: no-referrer\r\n"
    f"Content-Security-Policy: {_POLICY}\r\nX-Content-Type-Options: nosniff\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
)
_TEXT = "text/plain; charset=utf-8"
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}


class Content(NamedTuple):
    """The answer to a request for a path.

    Attributes:
        kind: The content type.
    """

    kind: str
    body: bytes


class _Refused(Exception):
    """A request is answered with an HTTP error status, and one line that names it."""

    def __init__(self, status: int, *headers: str) -> None:
        self.status, self.headers = status, headers


class Place(NamedTuple):
    """Where the page is served, as the options of a command say.

    Attributes:
        token: The password of all paths; b"" for none.
    """

    host: str
    port: int
    token: bytes

    @classmethod
    def of(cls, address: str, token: Path | None) -> Place:
        """Check ``--http`` and ``--http-token``.

        Args:
            address: ``port``, for the loopback, or ``host:port``; port 0 picks a free one.
            token: A file of one line.

        Raises:
            ValueError: If the address is of another form, or other machines reach it and there is
                no token; if the file holds no token, or others may use the file.
        """
        full = f"127.0.0.1:{address}" if address.isdecimal() else address
        try:
            host, port = parse_address("http", full, listens=True)
        except ValueError:
            raise ValueError(
                f"http must be a port from 0 to 65535, or host:port, got {address!r}"
            ) from None
        if token is None and not is_loopback(host):
            raise ValueError(
                f"{address} can be reached from other machines: give http_token=, a file with a "
                "password of the page, or let the page listen on 127.0.0.1"
            )
        return cls(host, port, b"" if token is None else _read_token(token))


def _read_token(path: Path) -> bytes:
    check_secret(path)
    with path.open("rb") as file:
        line = file.read(_MAX_TOKEN + 3).removesuffix(b"\n").removesuffix(b"\r")
    if not re.fullmatch(rb"[\x21-\x7e]{%d,%d}" % (MIN_TOKEN, _MAX_TOKEN), line):
        raise ValueError(
            f"{path} must hold one line of {MIN_TOKEN} to {_MAX_TOKEN} printable ASCII characters "
            "without spaces, such as `openssl rand -hex 32` prints, and holds something else"
        )
    return line


class Monitor:
    """The contents of all paths, each made at most once from one state of the host's runs.

    Args:
        read: Returns the last messages and numbers of the host; called by one thread.
    """

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read
        folder = Path(__file__).parent
        self._files = {
            path: Content(kind, (folder / name).read_bytes())
            for path, (name, kind) in _FILES.items()
        }
        self._began, self._steady, self._looked = time.time(), time.monotonic(), -math.inf
        self._state = State(self._began, self._began)
        # The contents made from the state, and the processor seconds that state and contents cost.
        self._made, self._cost_s = dict[str, Content](), 0.0

    def look(self) -> None:
        """Go to the next state, unless the last one is fresh."""
        steady, began = time.monotonic(), time.thread_time()
        if steady - self._looked >= max(FRESH_S, SHARE * self._cost_s):
            # A jump of the system's clock would look like a change of speed or a silent process.
            now = self._began + steady - self._steady
            snapshot = newest(self._read(), self._state.runs)
            self._state = advance(self._state, snapshot, now)
            self._looked, self._cost_s = steady, time.thread_time() - began
            self._made.clear()

    def content(self, path: str) -> Content | None:
        """Return the content of a path; None if there is no such path."""
        make = {"/status.json": self._json, "/metrics": self._metrics}.get(path)
        if make is None:
            return self._files.get(path)
        self.look()
        if path not in self._made:
            began = time.thread_time()
            self._made[path] = make()
            self._cost_s += time.thread_time() - began
        return self._made[path]

    def _json(self) -> Content:
        text = json.dumps(status(self._state, __version__), allow_nan=False)
        return Content("application/json", text.encode())

    def _metrics(self) -> Content:
        text = openmetrics.render(self._state, __version__)
        return Content(openmetrics.CONTENT_TYPE, text.encode("utf-8", "replace"))


def newest(snapshot: Snapshot, shown: Container[str]) -> Snapshot:
    """Return the messages of whole runs that together have at most ``MAX_PROCESSES`` processes.

    Runs with a message in the last ``SILENT_S`` seconds are kept first, then runs that were shown
    before; the first run is kept even if it has more processes. The counts of what was left out are
    added to the facts.

    Args:
        shown: Names of the runs in the last state.
    """
    processes: dict[str, set[str]] = {run: set() for run in snapshot.records}
    ages: dict[str, float] = {}
    for run, member, _, age_s in (*snapshot.posted, *snapshot.beats):
        processes.setdefault(run, set()).add(member)
        ages[run] = min(age_s, ages.get(run, age_s))
    num_processes, kept = 0, set[str]()
    order = {
        run: (
            ages.get(run, math.inf) > SILENT_S,
            printable(run) not in shown,
            ages.get(run, math.inf),
            run,
        )
        for run in processes
    }
    for run in sorted(processes, key=order.__getitem__):
        record = snapshot.records.get(run, b"")
        of_run = max(len(processes[run]), len(record) // _MEMBER_BYTES)
        if not kept or num_processes + of_run <= MAX_PROCESSES:
            num_processes += of_run
            kept.add(run)
    left_out = [len(members) for run, members in processes.items() if run not in kept]
    if not left_out:
        return snapshot
    counts = {"unshown_runs": len(left_out), "unshown_processes": sum(left_out)}
    return snapshot._replace(
        posted=[text for text in snapshot.posted if text[0] in kept],
        beats=[text for text in snapshot.beats if text[0] in kept],
        records={run: record for run, record in snapshot.records.items() if run in kept},
        facts={**snapshot.facts, **counts},
    )


class HttpServer:
    """A server that listens from construction on, and answers, in a thread, within ``running``.

    Args:
        monitor: Makes the contents in the server's thread. An error is logged once, answered with
            status 500, and ends nothing.

    Attributes:
        address: ``http://host:port/``.

    Raises:
        OSError: If the server cannot listen at this place.
    """

    def __init__(self, place: Place, monitor: Monitor) -> None:
        self._token, self._monitor = place.token, monitor
        self._listener = listen_at(place.host, place.port)
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = f"http://{name_of_place(place.host, port)}/"
        self._num_open, self._failed = 0, set[tuple[type, str, int]]()
        # One thread makes the contents, one at a time; the server's thread goes on meanwhile.
        self._maker = ThreadPoolExecutor(1, "http maker")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Answer while the block runs."""
        loop, stop = asyncio.new_event_loop(), asyncio.Event()
        # A client that goes away, for example, logs nothing: strangers could fill the log.
        loop.set_exception_handler(lambda loop, context: None)

        def run() -> None:
            try:
                loop.run_until_complete(self._serve(stop))
            except Exception:
                _log.exception("the page at %s is not served any more", self.address)
            finally:
                self._listener.close()
                loop.close()
                self._maker.shutdown(cancel_futures=True)

        thread = threading.Thread(target=run, name="http", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # has ended already
                loop.call_soon_threadsafe(stop.set)
            thread.join()

    async def _serve(self, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(
            self._attend, sock=self._listener, limit=MAX_HEAD_BYTES, backlog=_BACKLOG
        )
        while not stop.is_set():
            # Needed without requests too: the page's events are differences between two looks.
            await self._make(self._monitor.look, or_else=None)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S)
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _make(self, make: Callable[..., T], *arguments: str, or_else: T) -> T:
        """Return the result of a call in the maker's thread, or ``or_else`` if it raises.

        An error is logged once for each line of code that raises it.
        """
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._maker, make, *arguments)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            sign = type(error), place.filename, place.lineno or 0
            if sign not in self._failed:
                self._failed.add(sign)
                _log.exception("the page at %s cannot be made", self.address)
        return or_else

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        if self._num_open >= MAX_CONNECTIONS:
            writer.write(_answer(503, b""))
            transport.abort()
            return
        self._num_open += 1
        try:
            # With a limit of 0, drain() waits until the kernel has all bytes.
            transport.set_write_buffer_limits(0)
            await asyncio.wait_for(self._converse(reader, writer), DEADLINE_S)
        except (OSError, EOFError, asyncio.TimeoutError):
            pass
        finally:
            self._num_open -= 1
            transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, content = await self._content_of(*_parse(await _read_head(reader)))
            answer = _answer(200, content.body, content.kind, has_body=method == b"GET")
        except _Refused as refused:
            line = http.HTTPStatus(refused.status).phrase.encode() + b"\n"
            answer = _answer(refused.status, line, _TEXT, refused.headers)
        writer.write(answer)
        await writer.drain()
        writer.write_eof()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_discard(reader), _LINGER_S)

    async def _content_of(
        self, method: bytes, path: str, headers: Mapping[bytes, bytes]
    ) -> tuple[bytes, Content]:
        """Return the method and the content of a request.

        Raises:
            _Refused: If there is none for this request.
        """
        if self._token:
            if not hmac.compare_digest(_password(headers), self._token):
                raise _Refused(401, 'WWW-Authenticate: Basic realm="diloco_comm"')
        elif not _names_loopback(headers.get(b"host", b"").decode("latin-1")):
            raise _Refused(421)
        if method not in (b"GET", b"HEAD"):
            raise _Refused(405, "Allow: GET, HEAD")
        failed: Content | None = Content("", b"")
        content = await self._make(self._monitor.content, path, or_else=failed)
        if content is None:
            raise _Refused(404)
        if not content.kind:
            raise _Refused(500)
        return method, content


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.readuntil(_END)).removesuffix(_END)
    except asyncio.LimitOverrunError:
        # If not even the first line has ended, it is the path that is too long.
        raise _Refused(431 if b"\n" in await reader.read(MAX_HEAD_BYTES) else 414) from None


def _parse(head: bytes) -> tuple[bytes, str, dict[bytes, bytes]]:
    """Return the method, the path without its query, and the headers of a request."""
    first, *lines = head.split(b"\r\n")
    request = _REQUEST.fullmatch(first)
    if request is None:
        raise _Refused(400)
    if len(request[3]) > MAX_PATH_BYTES:
        raise _Refused(414)
    headers: dict[bytes, bytes] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        name = b"" if header is None else header[1].lower()
        if header is None or (name in headers and name in _SINGLE):
            raise _Refused(400)
        headers[name] = header[2].strip(b" \t")
    if request[2]:  # A host in the target replaces the header's one: RFC 9112, section 3.2.2.
        headers[b"host"] = request[2]
    return request[1], request[3].decode("ascii").partition("?")[0] or "/", headers


async def _discard(reader: asyncio.StreamReader) -> None:
    left = _LINGER_BYTES
    while left > 0 and (found := await reader.read(MAX_HEAD_BYTES)):
        left -= len(found)


def _names_loopback(host: str) -> bool:
    """Whether the ``Host`` of a request names the loopback, with any port or none."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:]+))(?::[0-9]{1,5})?", host)
    return found is not None and is_loopback((found[1] or found[2]).lower())


def _password(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the token of a request, as a bearer's or as the password of any user; b"" for none."""
    scheme, _, text = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return text.strip()
    if scheme.lower() == b"basic":
        with contextlib.suppress(binascii.Error):
            return base64.b64decode(text.strip(), validate=True).partition(b":")[2]
    return b""


def _answer(
    status: int,
    body: bytes,
    kind: str = _TEXT,
    headers: tuple[str, ...] = (),
    *,
    has_body: bool = True,
) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
        f"Date: {formatdate(usegmt=True)}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    head = "\r\n".join(lines) + "\r\n" + _HEADERS + "\r\n"
    return head.encode("ascii") + body * has_body
