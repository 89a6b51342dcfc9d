"""Messages to the peers of one socket, and the descriptors of a process that listens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from commands import run_python

from diloco_comm.base.service.sockets import receive, send_to_peer


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context
        context.destroy(0)


def connected(context: zmq.Context, limit: int) -> tuple[zmq.Socket, zmq.Socket]:
    """Return a ROUTER socket that holds few messages for a peer, and the peer."""
    server, peer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    server.sndhwm = peer.rcvhwm = limit
    server.sndbuf = peer.rcvbuf = 1 << 16
    peer.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
    return server, peer


def received(socket: zmq.Socket) -> list[bytes]:
    frames = receive(socket, 30_000)
    assert frames is not None, "nothing came"
    return [frame.bytes for frame in frames]


@pytest.mark.parametrize("limit", [1, 2, 8])
def test_a_peer_that_reads_its_answers_gets_all(context: zmq.Context, limit: int) -> None:
    """All requests come first, so that no look for the next one brings ZeroMQ's notes in."""
    server, peer = connected(context, limit)
    num_requests = 10 * limit
    for _ in range(num_requests):
        peer.send(b"request")
    names = [received(server)[0] for _ in range(num_requests)]
    for first in range(0, num_requests, limit):
        for i in range(first, first + limit):
            send_to_peer(server, [names[i], b"%d" % i])
        for i in range(first, first + limit):
            assert received(peer) == [b"%d" % i]


def test_messages_for_a_peer_that_does_not_read_are_dropped(context: zmq.Context) -> None:
    server, peer = connected(context, 2)
    peer.send(b"request")
    name = received(server)[0]
    for i in range(500):
        send_to_peer(server, [name, b"%d" % i, bytes(100_000)], copy=False)
    received(peer)
    num_received = 1
    while receive(peer, 200) is not None:
        num_received += 1
    assert num_received < 100


LISTENERS = {
    "link": "from diloco_comm._C import Link; Link('127.0.0.1:0', '127.0.0.1:0').close()",
    "relay": "from diloco_comm.base.service.relay import Relay; Relay('127.0.0.1', 0)",
    "store": (
        "from diloco_comm.base.store_host import open_store\n"
        "open_store('127.0.0.1', 0).store.close()"
    ),
    "server": (
        "from diloco_comm.asynchronous.server import Listener\n"
        "Listener('tcp://127.0.0.1:0', None, 10.0).close()"
    ),
}


@pytest.mark.fresh_interpreter
@pytest.mark.parametrize("kind", LISTENERS)
def test_who_listens_may_have_as_many_descriptors_as_allowed(kind: str) -> None:
    """Strangers take descriptors, too."""
    code = f"""
import resource

import torch

resource.setrlimit(resource.RLIMIT_NOFILE, (300, 2000))
{LISTENERS[kind]}
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    ended = run_python("-c", code)
    assert ended.stdout.split() == ["2000", "2000"], ended.stderr
