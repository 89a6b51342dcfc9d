"""The server of the page against real sockets: hosts, methods, floods, slow peers, passwords."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.support.simulated_host import SimulatedHost, key_of
from diloco_comm.monitor import http_server
from diloco_comm.monitor.http_server import MAX_CONNECTIONS, Content, HttpServer, Monitor, Place

PATHS = ["/", "/page.css", "/page.js", "/status.json", "/metrics"]
TOKEN = "0123456789abcdef"
HERE = Place("127.0.0.1", 0, b"")
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Client:
    """Raw connections to a server."""

    def __init__(self, server: HttpServer) -> None:
        host, _, port = server.address.removeprefix("http://").rstrip("/").rpartition(":")
        self.place = (host.strip("[]"), int(port))

    def connect(self) -> socket.socket:
        return socket.create_connection(self.place, timeout=60)

    def send(self, request: bytes) -> bytes:
        """Send bytes, and return all that comes until the server ends the connection."""
        with self.connect() as connection:
            connection.sendall(request)
            return read_all(connection)

    def settles(self) -> bool:
        """Whether the page is answered, once the server has noticed that others have gone."""
        answers = (self.get()[0] for _ in range(600) if time.sleep(0.05) is None)
        return 200 in answers

    def get(self, path: str = "/", *headers: str, method: str = "GET") -> tuple[int, str, bytes]:
        """Return the status, the headers and the body."""
        lines = [f"{method} {path} HTTP/1.1", *(headers or ["Host: localhost"]), "", ""]
        return parsed(self.send("\r\n".join(lines).encode("latin-1")))


def read_all(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            found += more
    return found


def parsed(answer: bytes) -> tuple[int, str, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head[9:12]), head.decode("latin-1"), body


def simulated() -> SimulatedHost:
    host = SimulatedHost()
    host.post("llama", key_of(0))
    return host


@contextlib.contextmanager
def serving(monitor: object = None, place: Place = HERE) -> Iterator[Client]:
    if monitor is None:
        monitor = Monitor(simulated().snapshot)
    server = HttpServer(place, monitor)  # type: ignore[arg-type]
    with server.running():
        yield Client(server)


@pytest.fixture
def client() -> Iterator[Client]:
    with serving() as found:
        yield found


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline of one second, for tests that wait for the deadline."""
    monkeypatch.setattr(http_server, "DEADLINE_S", 1.0)


@pytest.mark.parametrize("path", PATHS)
def test_each_path_has_its_content_and_the_headers_of_a_closed_page(
    client: Client, path: str
) -> None:
    status, head, body = client.get(path + "?q=%2e%2e")
    assert status == 200 and len(body) > 100
    for words in (
        "default-src 'none'", "frame-ancestors 'none'", "X-Content-Type-Options: nosniff",
        "Referrer-Policy: no-referrer", "Cache-Control: no-store", "Connection: close",
    ):  # fmt: skip
        assert words in head
    assert f"Content-Length: {len(body)}\r\n" in head + "\r\n"
    status, of_head, nothing = client.get(path, method="HEAD")
    assert (status, nothing) == (200, b"") and "Content-Length" in of_head


def test_the_status_names_the_run(client: Client) -> None:
    report = json.loads(client.get("/status.json")[2])
    assert [run["run"] for run in report["runs"]] == ["llama"]
    assert b'diloco_rounds_total{run="llama",replica="0"} 0\n' in client.get("/metrics")[2]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "PATCH"])
def test_other_methods_are_refused(client: Client, method: str) -> None:
    status, head, body = client.get("/status.json", method=method)
    assert status == 405 and "\r\nAllow: GET, HEAD\r\n" in head and len(body) < 40


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LocalHost:9", 200), ("127.0.0.1:8080", 200), ("127.9.9.9", 200),
        ("[::1]:8080", 200), ("evil.example", 421), ("localhost.evil.example", 421), ("", 421),
        ("127.0.0.1.evil.example", 421), ("192.0.2.1", 421), ("0.0.0.0", 421), ("[::]", 421),
        ("localhost:x", 421), ("a@localhost", 421), ("localhost:1:2", 421),
    ],
)  # fmt: skip
def test_only_the_loopback_may_be_named(client: Client, host: str, status: int) -> None:
    assert client.get("/metrics", f"Host: {host}")[0] == status
    # A proxy names the host in the target, and what the header says does not count.
    other = "Host: evil.example" if status == 200 else "Host: localhost"
    for target in ("", "/", "/metrics?a=b"):
        assert client.get(f"http://{host}{target}", other)[0] == (status if host else 400)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 421),
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /../page.css HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET //page.css HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /%70age.css HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /http_server.py HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET http://localhost/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET https://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\xa5\r\n\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"get / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: \x1b[2J\r\n\r\n", 400),
        (b"GET /" + b"a" * 300 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nX: " + b" " * 100_000 + b"x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n", 431),
    ],
)
def test_bad_requests_get_a_few_bytes(
    client: Client, request_: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    found, _, body = parsed(client.send(request_))
    assert found == status and len(body) < 60
    assert client.settles()
    # Strangers write no lines of the log.
    assert not caplog.records


def test_one_connection_has_one_answer(client: Client) -> None:
    assert client.send(GET * 50).count(b"HTTP/1.1 200") == 1


def test_more_connections_than_the_most_are_closed_at_once(client: Client) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(client.connect()) for _ in range(MAX_CONNECTIONS)]
        for connection in held:
            connection.sendall(GET[:9])
        # The server has seen all of those when a further one is refused.
        assert client.send(GET)[:12] in (b"", b"HTTP/1.1 503")
        for connection in held:
            connection.sendall(GET[9:])
            assert read_all(connection).startswith(b"HTTP/1.1 200")
    assert client.settles()


def test_a_flood_ends_with_its_deadline(client: Client, hurried: None) -> None:
    assert client.get("/status.json")[0] == 200
    num_threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(client.connect()) for _ in range(400)]
        assert threading.active_count() == num_threads
        for connection in held:
            read_all(connection)
        assert client.settles()


def test_a_request_that_never_ends_has_a_deadline(client: Client, hurried: None) -> None:
    with client.connect() as connection, pytest.raises(OSError):
        connection.sendall(GET[:-2])
        for _ in range(600):
            connection.sendall(b"X: y\r\n")
            time.sleep(0.05)


class Large:
    """A monitor whose content is larger than what a kernel holds for a connection."""

    def look(self) -> None:
        pass

    def content(self, path: str) -> Content | None:
        return Content("text/plain", bytes(16 << 20 if path == "/large" else 1))


def test_peers_that_do_not_read_have_a_deadline(hurried: None) -> None:
    with serving(Large()) as client, contextlib.ExitStack() as stack:
        held = [stack.enter_context(client.connect()) for _ in range(MAX_CONNECTIONS)]
        for connection in held:
            connection.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while client.send(GET)[:12] not in (b"", b"HTTP/1.1 503"):
            time.sleep(0.05)
        # Nobody has read: the deadline alone makes room.
        assert client.settles()


def test_all_requests_share_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "FRESH_S", 3600.0)
    reads: list[int] = []

    def read() -> http_server.Snapshot:
        reads.append(1)
        return simulated().snapshot()

    with serving(Monitor(read)) as client:
        bodies = {client.get(path)[2] for path in ["/status.json"] * 20 + ["/metrics"] * 20}
    assert len(reads) == 1 and len(bodies) == 2


def test_an_error_of_the_host_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "FRESH_S", 0.0)
    monkeypatch.setattr(http_server, "SHARE", 0)
    has_trouble = True

    def read() -> http_server.Snapshot:
        if has_trouble:
            raise RuntimeError("the table is away")
        return simulated().snapshot()

    with serving(Monitor(read)) as client, caplog.at_level(logging.WARNING):
        assert [client.get("/status.json")[0] for _ in range(3)] == [500] * 3
        assert client.get("/")[0] == 200
        has_trouble = False
        assert client.get("/status.json")[0] == 200
        assert len(caplog.records) == 1 and "the table is away" in caplog.text
        # An error of another kind, or at another place, is said, too.
        monkeypatch.setattr(http_server, "advance", None)
        assert [client.get("/status.json")[0] for _ in range(3)] == [500] * 3
    assert len(caplog.records) == 2 and "TypeError" in caplog.text


class Waiting(Monitor):
    """A monitor that makes the status until the test goes on."""

    def __init__(self) -> None:
        super().__init__(simulated().snapshot)
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.threads: set[str] = set()

    def look(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        self.may_go_on.wait(60)
        super().look()


def test_making_contents_does_not_hold_the_connections() -> None:
    monitor = Waiting()
    with serving(monitor) as client, client.connect() as connection:
        connection.sendall(GET.replace(b"/ ", b"/status.json ", 1))
        assert monitor.begun.wait(60)
        # The thread of the connections answers meanwhile.
        assert client.get("/", "Host: evil.example")[0] == 421
        assert client.get("/", method="POST")[0] == 405
        monitor.may_go_on.set()
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    assert len(monitor.threads) == 1


def test_a_costly_state_is_fresh_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, costs = 0.0, 0.0
    clocks = {"time": time.time, "monotonic": lambda: now, "thread_time": lambda: costs}
    monkeypatch.setattr(http_server, "time", SimpleNamespace(**clocks))
    reads: list[int] = []

    def read() -> http_server.Snapshot:
        nonlocal costs
        costs += 2.0
        reads.append(1)
        return http_server.Snapshot()

    monitor = Monitor(read)
    for seconds in (0.0, 2.0, 9.0, 10.5, 12.0, 21.0):
        now = seconds
        monitor.content("/status.json")
    assert len(reads) == 3


def test_the_page_has_bounds_and_counts_the_runs_that_are_left_out() -> None:
    now = 0.0
    host = SimulatedHost(lambda: now)
    monitor = Monitor(host.snapshot)
    for number in range(1000):
        host.post("old", key_of(number))
    now = 20.0
    # The state has the names as the page shows them.
    for run in ("b", "c\u2066", "d"):
        for number in range(900):
            host.post(run, key_of(number))
    host.post("small", key_of(1))
    monitor.look()
    assert set(monitor._state.runs) == {"b", r"c\u2066", "small"}
    assert monitor._state.facts["unshown_runs"] == 2
    metrics = monitor.content("/metrics")
    assert metrics is not None and b"\ndiloco_unshown_processes 1900\n" in metrics.body
    # A run that is shown stays, though another one has spoken since.
    now = 25.0
    for number in range(900):
        host.post("d", key_of(number))
    kept = http_server.newest(host.snapshot(), monitor._state.runs)
    assert {run for run, *_ in kept.posted} == {"b", "c\u2066", "small"}
    # Members in a record count, too; one run is always shown.
    large = http_server.Snapshot(records={"b": bytes(50_000), "a": bytes(61_440)})
    kept = http_server.newest(large, ())
    assert set(kept.records) == {"a"} and kept.facts == {"unshown_runs": 1, "unshown_processes": 0}


def test_the_server_ends_while_connections_are_open() -> None:
    with serving() as client:
        connection = client.connect()
        connection.sendall(GET[:5])
    assert read_all(connection) == b""
    connection.close()
    with pytest.raises(OSError):
        client.connect()


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with serving(place=Place.of("[::1]:0", None)) as client:
        assert client.get("/", f"Host: [::1]:{client.place[1]}")[0] == 200


# ---------------------------------------------------------------------------------- passwords


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def basic(text: str) -> str:
    return f"Authorization: Basic {base64.b64encode(text.encode()).decode()}"


def test_with_a_token_every_path_wants_the_token(
    token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(place=Place.of("127.0.0.1:0", token)) as client:
        for path in [*PATHS, "/nothing"]:
            status, head, body = client.get(path, "Host: page.example")
            assert status == 401 and 'WWW-Authenticate: Basic realm="diloco_comm"' in head
            assert TOKEN.encode() not in body and TOKEN not in head
        wrong = [
            f"Authorization: Bearer {TOKEN}x", f"Authorization: Bearer {TOKEN[:-1]}",
            f"Authorization: Digest {TOKEN}", "Authorization: Bearer", "Authorization: Basic =",
            basic("user"), basic(f"{TOKEN}:"), basic("user:other"), "Authorization: Basic \xff",
        ]  # fmt: skip
        assert {client.get("/", line)[0] for line in wrong} == {401}
        assert client.get("/", wrong[0], f"Authorization: Bearer {TOKEN}")[0] == 400
        right = [f"Authorization: bearer {TOKEN}", basic(f":{TOKEN}"), basic(f"anna:{TOKEN}")]
        # The password says enough: behind a proxy the page has any name.
        assert {client.get("/", line, "Host: page.example")[0] for line in right} == {200}
        assert client.get("/nothing", right[0])[0] == 404
        assert client.get("/", right[0], method="POST")[0] == 405
    assert not caplog.records


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("0.0.0.0:0", "0.0.0.0:0 can be reached from other machines: give http_token="),
        ("page.example:80", "can be reached from other machines"),
        ("[::]:0", "can be reached from other machines"),
        ("70000", "http must be a port from 0 to 65535, or host:port, got '70000'$"),
        ("localhost", "http must be a port from 0"),
        ("http://localhost:1", "http must be a port from 0"),
        ("", "http must be a port from 0"),
    ],
)
def test_a_wrong_place_is_refused_in_a_sentence(address: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("[", r"\[")):
        Place.of(address, None)


@pytest.mark.parametrize(
    "content",
    [b"", b"short\n", b"with a space in it\n", TOKEN.encode() + b"\n\n", b"\xc3\xa9" * 16],
)
def test_a_file_without_a_token_is_refused(token: Path, content: bytes) -> None:
    token.write_bytes(content)
    with pytest.raises(ValueError, match="must hold one line of 16 to 1024 printable") as caught:
        Place.of("0", token)
    assert content == b"" or content.decode().strip() not in str(caught.value)


def test_a_token_that_others_may_read_is_refused(token: Path) -> None:
    token.chmod(0o640)
    with pytest.raises(ValueError, match="others than the owner may use"):
        Place.of("0", token)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        Place.of("0", token.with_name("other"))


def test_a_target_is_read_in_one_pass() -> None:
    """Parts that could take the same bytes would cost the square of the length: half an hour."""
    assert http_server._REQUEST.fullmatch(b"GET http://" + b"a" * 500_000 + b" ") is None
