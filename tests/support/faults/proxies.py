"""Ways between processes: a forwarder, and a proxy for HTTP CONNECT and SOCKS5.

Both record what passes or is asked, and may misbehave.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from urllib.parse import quote

_PATIENCE_S = 20.0


class Forwarder:
    """Pass connections on to a port of this host, as a router does, in threads.

    Args:
        target: The port.
        delay_s: Seconds before a connection is passed on.
        look: Takes the bytes of a direction, and whether they are an answer; returns the bytes that
            go on, or None to end the connection.

    Attributes:
        port, address: Where this listens; the address is host:port.
        streams: The bytes of each direction of each connection.
    """

    def __init__(
        self,
        target: int,
        *,
        delay_s: float = 0.0,
        look: Callable[[bytes, bool], bytes | None] = lambda data, is_answer: data,
    ) -> None:
        self.target, self._delay_s, self._look = target, delay_s, look
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.streams: list[bytearray] = []
        self._open: list[socket.socket] = []
        self._forgotten: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def forget(self) -> None:
        """Swallow all that the present connections bring, and end none of them."""
        self._forgotten.update(self._open)

    def close(self) -> None:
        """End this and all connections."""
        # A blocked accept() would keep the socket.
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(here,), daemon=True).start()

    def _serve(self, here: socket.socket) -> None:
        time.sleep(self._delay_s)
        try:
            there = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            return here.close()
        self._open += here, there
        back = threading.Thread(target=self._copy, args=(there, here, True), daemon=True)
        back.start()
        self._copy(here, there, False)

    def _copy(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        self.streams.append(stream := bytearray())
        with suppress(OSError):
            while data := source.recv(1 << 16):
                stream += data
                if source in self._forgotten:
                    continue
                if (passed := self._look(data, is_answer)) is None:
                    source.shutdown(socket.SHUT_RDWR)
                    break
                target.sendall(passed)
        if source not in self._forgotten:
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)


class Proxy:
    """A proxy in threads of this process. A context manager.

    Args:
        kind: "http" or "socks5".
        user, password: That the proxy asks for; None: it lets everybody in.
        hosts: Addresses of hosts that the proxy alone knows, by name or number.
        forbids: Targets that the proxy does not allow, as host:port.
        delay_s: Seconds before the proxy dials a target.
        answer: Bytes that the proxy sends in place of its first answer; then it closes.
        stalls: The proxy takes connections, and never answers.

    Attributes:
        place: host:port.
        url: As ``Link(proxy=)``.
        asked: The targets that clients have asked for, as host:port.
        num_refused: How often a user or password was wrong.
    """

    def __init__(
        self,
        kind: str,
        user: str | None = None,
        password: str = "",
        *,
        hosts: Mapping[str, str] | None = None,
        forbids: Collection[str] = (),
        delay_s: float = 0.0,
        answer: bytes | None = None,
        stalls: bool = False,
    ) -> None:
        self.kind, self._user, self._password = kind, user, password
        self._hosts, self._forbids, self._delay_s = hosts or {}, forbids, delay_s
        self._answer, self._stalls = answer, stalls
        self.asked: list[str] = []
        self.num_passed = self.num_refused = 0
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        who = "" if user is None else f"{quote(user, '')}:{quote(password, '')}@"
        self.url = f"{kind}://{who}{self.place}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        # A blocked accept() would keep the socket.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections that the proxy has made."""
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._open.add(client)
        with suppress(OSError), client:
            client.settimeout(_PATIENCE_S)
            if self._stalls or self._answer is not None:
                client.recv(1 << 16)
                client.sendall(self._answer or b"")
                if self._stalls:
                    client.recv(1)
                return
            (self._serve_http if self.kind == "http" else self._serve_socks)(client)
        self._open.discard(client)

    # ------------------------------------------------------------------------------------ HTTP

    def _serve_http(self, client: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += _read(client, 1)
        line, *fields = head.decode().strip().split("\r\n")
        method, target, version = line.split(" ")
        assert (method, version, fields[0]) == ("CONNECT", "HTTP/1.1", f"Host: {target}")
        if self._user is not None:
            words = base64.b64encode(f"{self._user}:{self._password}".encode()).decode()
            if f"Proxy-Authorization: Basic {words}" not in fields:
                text = (
                    b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 5\r\n\r\nsorry"
                )
                self.num_refused += 1
                return client.sendall(text)
        if target in self._forbids:
            self.asked.append(target)
            return client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        host, _, port = target.rpartition(":")
        server = self._reach(host.strip("[]"), int(port))
        if server is None:
            return client.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
        self._join(client, server, b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n")

    # ----------------------------------------------------------------------------------- SOCKS5

    def _serve_socks(self, client: socket.socket) -> None:
        version, count = _read(client, 2)
        methods = _read(client, count)
        wanted = 0 if self._user is None else 2
        assert version == 5
        if wanted not in methods:
            return client.sendall(b"\5\xff")
        client.sendall(bytes([5, wanted]))
        if wanted == 2:
            assert _read(client, 1) == b"\1"
            words = [_read(client, _read(client, 1)[0]).decode() for _ in range(2)]
            if words != [self._user, self._password]:
                self.num_refused += 1
                return client.sendall(b"\1\1")
            client.sendall(b"\1\0")
        assert _read(client, 3) == b"\5\1\0"
        form = _read(client, 1)[0]
        size = {1: 4, 4: 16}.get(form) or _read(client, 1)[0]
        raw = _read(client, size)
        host = raw.decode() if form == 3 else str(ipaddress.ip_address(raw))
        server = self._reach(host, struct.unpack("!H", _read(client, 2))[0])
        if server is None:
            return client.sendall(b"\5\5\0\1" + bytes(6))
        # A name as the bound address has a length that the client must look at.
        self._join(client, server, b"\5\0\0\3\4test\1\2")

    # ------------------------------------------------------------------------------------ both

    def _reach(self, host: str, port: int) -> socket.socket | None:
        self.asked.append(f"{host}:{port}")
        time.sleep(self._delay_s)
        try:
            return socket.create_connection((self._hosts.get(host, host), port), _PATIENCE_S)
        except OSError:
            return None

    def _join(self, client: socket.socket, server: socket.socket, answer: bytes) -> None:
        self._open.add(server)
        with server:
            for one in (client, server):
                one.settimeout(None)
            client.sendall(answer)
            back = threading.Thread(target=self._copy, args=(server, client), daemon=True)
            back.start()
            self._copy(client, server)
            back.join()
        self._open.discard(server)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.num_passed += len(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionError("the client has closed the connection")
        data += more
    return data
