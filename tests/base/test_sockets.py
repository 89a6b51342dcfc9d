"""Messages to the peers of one socket."""

from __future__ import annotations

import pytest
import zmq

from diloco_comm.base.service.sockets import receive, send_to_peer


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 8])
def test_a_peer_that_reads_each_answer_at_once_gets_all(limit: int, copy: bool) -> None:
    """All requests come first, so that no look for the next one brings ZeroMQ's notes in."""
    num_requests = 40
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.sndhwm = limit
        with context.socket(zmq.DEALER) as peer:
            peer.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
            for _ in range(num_requests):
                peer.send(b"request")
            names = [receive(server, 5000)[0].bytes for _ in range(num_requests)]
            for i, name in enumerate(names):
                send_to_peer(server, [name, b"%d" % i], copy=copy)
                answer = receive(peer, 2000)
                assert answer is not None, f"answer {i} was dropped"
                assert answer[0].bytes == b"%d" % i


def test_a_peer_that_does_not_read_gets_no_more_than_the_limit() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.sndhwm, server.sndbuf = 2, 4096
        with context.socket(zmq.DEALER) as peer:
            peer.rcvhwm, peer.rcvbuf = 2, 4096
            peer.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
            peer.send(b"request")
            name = receive(server, 5000)[0].bytes
            for _ in range(200):
                send_to_peer(server, [name, bytes(100_000)])
            num_received = 0
            while receive(peer, 200) is not None:
                num_received += 1
    assert 0 < num_received < 100
