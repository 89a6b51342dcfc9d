"""Two links in this process: routers that forget connections, and peers that attack."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from proxies import Forwarder

from diloco_comm import _C

ANY_PORT = "127.0.0.1:0"
LIMIT_S = 20.0
GREETING = b"DILOLINK" + struct.pack("<I", 3)
JOIN, GRANT, DATA, BEAT = 1, 2, 4, 14
FRAME = "<BBHIQIIQQ"  # magic, kind, number, length, token, tag, ticket, offset, total


def frame(kind: int, *, length: int = 0, token: int = 0, tag: int = 0, ticket: int = 0,
          offset: int = 0, total: int = 0) -> bytes:  # fmt: skip
    return struct.pack(FRAME, 0xD7, kind, 0, length, token, tag, ticket, offset, total)


def read(stream: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = stream.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts


def meet(links: list[_C.Link], token: str, lanes: int = 1) -> list[list[Any]]:
    """Return the groups of both links."""
    peers = [(link.nonce, link.address, link.public_key.hex()) for link in links]
    other: list[Any] = []
    end = threading.Thread(
        target=lambda: other.extend(links[1].groups(token, 1, peers, lanes, LIMIT_S))
    )
    end.start()
    own = links[0].groups(token, 0, peers, lanes, LIMIT_S)
    end.join()
    return [own, other]


def carry(groups: list[list[Any]], sender: int, size: int = 5000) -> None:
    """Send a message from one end to the other over the group of that direction."""
    sent, got = torch.full((size,), 7, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    recv = groups[1 - sender][sender].recv([got], sender, 3)
    send = groups[sender][sender].send([sent], 1 - sender, 3)
    assert send.wait() and recv.wait() and torch.equal(sent, got)


@pytest.fixture
def links() -> Iterator[Callable[..., _C.Link]]:
    made: list[_C.Link] = []

    def make(listen: str = ANY_PORT, advertise: str = ANY_PORT, seed: bytes = b"") -> _C.Link:
        made.append(_C.Link(listen, advertise, seed))
        return made[-1]

    yield make
    for link in made:
        link.close()


@pytest.mark.parametrize("is_hidden", [False, True], ids=["both dial", "one dials"])
def test_a_connection_that_a_router_has_forgotten_is_made_anew(
    is_hidden: bool, links: Callable[..., _C.Link]
) -> None:
    here = links() if not is_hidden else links("", "")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    router = Forwarder(port)
    there = links(f"127.0.0.1:{port}", router.address)
    groups = meet([here, there], "before")
    carry(groups, 0)
    carry(groups, 1)
    router.forget()
    groups = meet([here, there], "after")
    carry(groups, 0)
    carry(groups, 1)


def test_what_a_closing_process_has_sent_arrives(links: Callable[..., _C.Link]) -> None:
    num_lanes, size = 4, 3 << 20
    for _ in range(3):
        own, other = meet([links(), links()], "closing", num_lanes)
        got = [torch.zeros(size, dtype=torch.uint8) for _ in range(num_lanes)]
        recvs = [other[2 * lane].recv([got[lane]], 0, 7) for lane in range(num_lanes)]
        ones = torch.ones(size, dtype=torch.uint8)
        sends = [own[2 * lane].send([ones], 1, 7) for lane in range(num_lanes)]
        assert all(send.wait() for send in sends)
        del sends
        own.clear()
        assert all(recv.wait() for recv in recvs)
        assert all(torch.equal(one, ones) for one in got)


def test_a_stranger_does_not_hear_the_nonce(links: Callable[..., _C.Link]) -> None:
    host, port = links().address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(GREETING + struct.pack("<I", 0) + os.urandom(16) + bytes(16))
        assert read(stranger, 32)[16:] == bytes(16)


@pytest.mark.parametrize("is_keyed", [False, True], ids=["plain", "keyed"])
def test_silent_connections_of_one_host_keep_no_link_out(
    is_keyed: bool, links: Callable[..., _C.Link]
) -> None:
    seeds = [os.urandom(32) if is_keyed else b"" for _ in range(2)]
    # Nobody can dial the second link, which so depends on its own dial.
    pair = [links(seed=seeds[0]), links("", "", seeds[1])]
    if is_keyed:
        for link in pair:
            link.allow([one.public_key for one in pair])
    host, port = pair[0].address.split(":")
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.socket()) for _ in range(2000)]
        for one in silent:
            one.bind(("127.0.0.9", 0))
            one.connect((host, int(port)))
        carry(meet(pair, "beside"), 1)
        # The oldest connection had to go, and the link still holds the newest one.
        assert silent[0].recv(1) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


def test_two_fragments_at_once_do_not_write_past_the_end(links: Callable[..., _C.Link]) -> None:
    link, fake = links(), os.urandom(16)
    host, port = link.address.split(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peers = [
            (link.nonce, link.address),
            (fake.hex(), f"127.0.0.1:{listener.getsockname()[1]}"),
        ]
        groups: list[Any] = []
        end = threading.Thread(target=lambda: groups.extend(link.groups("t", 0, peers, 1, LIMIT_S)))
        end.start()
        first, _ = listener.accept()
    with first, socket.create_connection((host, int(port))) as second:
        read(first, 48)
        first.sendall(GREETING + struct.pack("<I", 1) + fake)
        second.sendall(GREETING + struct.pack("<I", 0) + fake + bytes.fromhex(link.nonce))
        read(second, 32)
        kind = BEAT
        while kind == BEAT:
            _, kind, _, _, token, *_ = struct.unpack(FRAME, read(first, 40))
        first.sendall(frame(JOIN, token=token, total=1))
        end.join()
        memory = torch.zeros(16384, dtype=torch.uint8)
        recv = groups[0].recv([memory[:4096]], 1, 9)
        kind = JOIN
        # The link says again that it has come where the answer is late.
        while kind != GRANT:
            _, kind, *_, ticket, _, _ = struct.unpack(FRAME, read(first, 40))
        head = frame(DATA, length=4096, token=token, tag=9, ticket=ticket, total=4096)
        # Only the header; then the whole fragment over the other connection.
        num_bytes = link.counters()["received_bytes"]
        first.sendall(head)
        while link.counters()["received_bytes"] < num_bytes + len(head):
            time.sleep(0.001)
        second.sendall(head + b"\x07" * 4096)
        with pytest.raises(RuntimeError, match="two fragments of a message at the same time"):
            recv.wait()
        with suppress(ConnectionError):
            first.sendall(b"\x66" * 8192)
    assert not memory[4096:].any()


def test_a_lane_that_cannot_be_ends_the_connection(links: Callable[..., _C.Link]) -> None:
    link = links()
    host, port = link.address.split(":")
    with socket.create_connection((host, int(port))) as peer:
        nonce = bytes.fromhex(link.nonce)
        peer.sendall(GREETING + struct.pack("<I", 0) + os.urandom(16) + nonce)
        read(peer, 32)
        peer.sendall(frame(JOIN, token=1, tag=256, total=1))
        assert peer.recv(1) == b""
