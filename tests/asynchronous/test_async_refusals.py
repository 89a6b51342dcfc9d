"""Refusals of a server: invalid messages to its port change nothing."""

from __future__ import annotations

import json
import logging
import math
import threading

import numpy as np
import pytest
import torch
import zmq
from async_helpers import (
    HELLO,
    PLAIN,
    PUSH,
    Flat,
    Peer,
    attach,
    payload,
    push_by_hand,
    serving,
    start_by_hand,
    status,
    tcp,
    wait_until,
)

from diloco_comm import Link, NonFiniteError, Wire, __version__
from diloco_comm.asynchronous import DecoupledDiLoCo
from diloco_comm.asynchronous.link import ServerRefused
from diloco_comm.asynchronous.messages import HEADER, PROTOCOL, Kind, Message, pack
from diloco_comm.asynchronous.rules import Immediate
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.worker import AsyncDiLoCo


def test_stale_updates_are_refused_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rule = Immediate(outer=PLAIN.outer, max_staleness=1)
    with serving(rule) as server, caplog.at_level(logging.WARNING):
        (one, a), (two, b) = attach(server.address, "a"), attach(server.address, "b")
        for _ in range(2):
            one.descend(torch.ones(7))
            a.step()
        two.descend(torch.ones(7))
        b.step()
        assert "its staleness is 2, and at most 1 is allowed" in caplog.text
        assert torch.equal(two.values(), torch.full((7,), -1.0)) and b.seq == 1
        report = status(server)
        assert report["refused"] == {"stale": 1} and report["updates"] == 2
        two.descend(torch.ones(7))
        b.step()
        assert status(server)["updates"] == 3
        a.close()
        b.close()


def test_values_that_are_not_finite_are_never_sent() -> None:
    with serving() as server:
        model, worker = attach(server.address, "a")
        model.descend(torch.full((7,), float("nan")))
        with pytest.raises(NonFiniteError, match="not finite"):
            worker.step()
        worker.on_nonfinite = "skip"
        worker.step()
        assert torch.equal(model.values(), torch.ones(7)) and worker.seq == 0
        worker.close()
        bad = Flat()
        bad.descend(torch.full((7,), float("inf")))
    with serving() as server, pytest.raises(ServerRefused, match="parameters are not finite"):
        AsyncDiLoCo(
            bad,
            torch.optim.SGD(bad.parameters(), lr=1.0),
            server=server.address,
            link=Link(timeout=20.0),
        )


def test_parameters_that_were_laid_out_anew_are_never_sent() -> None:
    with serving() as server:
        model, worker = attach(server.address, "a")
        param = next(model.parameters())
        param.data = param.data.reshape(1, -1)
        with pytest.raises(ValueError, match=r"^parameter .* when the model was attached and is"):
            worker.step()
        worker.close()


def test_hostile_updates_are_refused_in_a_sentence() -> None:
    with serving(parameters=[torch.ones(7)]) as server, Peer(server.address) as peer:
        start_by_hand(peer)
        nan = push_by_hand(peer, payload([float("nan")]))
        assert nan.meta["refusal"] == "non-finite" and "not finite" in nan.meta["reason"]
        again = push_by_hand(peer, b"")
        assert again.meta == nan.meta
        future = push_by_hand(peer, b"", seq=2, version=50)
        assert future.meta["refusal"] == "from the future"
        order = push_by_hand(peer, b"", seq=9)
        assert order.meta["refusal"] == "out of order"
        assert "where 2 was expected" in order.meta["reason"]
        short = push_by_hand(peer, b"123", seq=2)
        assert short.kind == Kind.REFUSED and "has 4096 bytes, got 3" in short.meta["reason"]
        # The update is still wanted, and the right bytes complete it.
        peer.say(Message(Kind.RUN, 2, 0, 0, 0, body=payload([0.5])))
        good = peer.hear(skip=(Kind.READY,))
        assert good.kind == Kind.OUTCOME and good.meta["refusal"] == "" and good.version == 1
        report = status(server)
        assert report["refused"] == {
            "non-finite": 1, "from the future": 1, "out of order": 1, "size": 1,
        }  # fmt: skip
        assert report["updates"] == 1 and report["payload_bytes"] == 0
    assert server.parameters()[0].tolist() == [0.5, *[1.0] * 6]


def test_an_update_is_applied_once_whatever_is_repeated() -> None:
    with serving(parameters=[torch.ones(7)]) as server, Peer(server.address) as peer:
        start_by_hand(peer)
        first = push_by_hand(peer, payload([1.0]))
        for _ in range(3):
            again = push_by_hand(peer, payload([1.0]))
            assert (again.number, again.version, again.meta) == (1, 1, first.meta)
        peer.say(Message(Kind.RUN, 1, 0, 0, 0, body=payload([1.0])))
        assert push_by_hand(peer, payload([1.0]), seq=2).version == 2
        report = status(server)
        assert report["updates"] == 2 and report["duplicates"] == 3
    assert server.parameters()[0][0].item() == -1.0


@pytest.mark.parametrize(
    ("meta", "sentence"),
    [
        ({"sizes": [8]}, "8 parameters in fragments of \\[8\\], the server's has 7"),
        ({"sizes": [3, 4]}, "fragments of \\[3, 4\\]"),
        ({"layout": 6}, "other names, shapes or dtypes"),
        ({"sizes": [1 << 60]}, "this server takes"),
    ],
)
def test_other_models_are_refused(meta: dict, sentence: str) -> None:
    with serving(parameters=[torch.ones(7)]) as server, Peer(server.address) as peer:
        start_by_hand(peer)
        peer.say(Message(Kind.HELLO, meta={**HELLO, "worker": "other", **meta}))
        answer = peer.hear()
        assert answer.kind == Kind.REFUSED
        assert __import__("re").search(sentence, answer.meta["reason"])


@pytest.mark.parametrize("change", [{"sizes": [7, 5]}, {"layout": 6}])
def test_of_two_first_workers_one_with_another_model_is_refused(change: dict) -> None:
    """Both workers say HELLO before the server has a model to compare their models with."""
    start = Message(Kind.PUSH, 1, meta={**PUSH, "is_start": True})
    with serving() as server, Peer(server.address) as one, Peer(server.address) as two:
        others = {**HELLO, "worker": "two", **change}
        for peer, meta in ((one, HELLO), (two, others)):
            peer.say(Message(Kind.HELLO, meta=meta))
            assert peer.hear().meta["needs_start"]
        one.say(start)
        assert one.hear().kind == Kind.WANT
        one.say(Message(Kind.RUN, 1, body=payload([1.0] * 7)))
        assert one.hear().kind == Kind.OUTCOME
        for question in (start, Message(Kind.PULL), Message(Kind.GET, fragment=1)):
            two.say(question)
            assert two.hear().kind == Kind.UNKNOWN
        two.say(Message(Kind.HELLO, meta=others))
        answer = two.hear()
        assert answer.kind == Kind.REFUSED and "the model has" in answer.meta["reason"]
        assert push_by_hand(one, payload([1.0])).kind == Kind.OUTCOME
        report = status(server)
        assert report["updates"] == 1 and report["refused"] == {"layout": 1, "garbage": 1}


def test_questions_before_hello_and_about_nothing() -> None:
    with serving(parameters=[torch.ones(7)]) as server, Peer(server.address) as peer:
        for kind in (Kind.PULL, Kind.GET, Kind.DONE):
            peer.say(Message(kind))
            assert peer.hear().kind == Kind.UNKNOWN
        start_by_hand(peer)
        peer.say(Message(Kind.GET, 0, 99))
        assert peer.hear().kind == Kind.GONE
        peer.say(Message(Kind.PULL))
        assert peer.hear().kind == Kind.READY
        peer.say(Message(Kind.GET, 0, 0, 5, 0))
        assert "there is no fragment 5" in peer.hear().meta["reason"]
        for run, count in ((1 << 31, 1), (1, 1), (0, 2), (0, 0), (0, (1 << 16) - 1)):
            peer.say(Message(Kind.GET, 0, 0, 0, run, count=count))
            assert f"no {count} runs from run {run} of fragment 0" in peer.hear().meta["reason"]
        peer.say(Message(Kind.READY, meta={"steps": 1}))
        assert "not for a server" in peer.hear().meta["reason"]
        peer.say(Message(Kind.GET, 0, 0))
        assert np.frombuffer(peer.hear().body, np.float32).tolist() == [1.0] * 7
        # The version is kept until the worker has all of it.
        for kind in (Kind.KEPT, Kind.GONE):
            peer.say(Message(Kind.DONE))
            assert peer.hear().kind == kind


def test_garbage_on_the_port_changes_nothing() -> None:
    with serving(parameters=[torch.ones(7)]) as server:
        model, worker = attach(server.address, "a")
        rng = np.random.default_rng(0)
        sockets = []
        for index in range(120):
            connection = tcp(server.address)
            # Random bytes; the beginning of ZeroMQ's own greeting; nothing at all.
            greeting = bytes.fromhex("ff00000000000000017f0300")[: index % 13]
            connection.sendall(greeting if index % 3 else rng.bytes(index))
            sockets.append(connection)
            if index % 2:
                connection.close()
        with Peer(server.address) as peer:
            for index in range(100):
                peer.say_raw(*[rng.bytes(int(rng.integers(0, 80))) for _ in range(index % 5 + 1)])
            peer.say_raw(b"x" * (2 << 20))
            model.descend(torch.ones(7))
            worker.step()
            # Messages that a peer has not sent when it closes are lost.
            wait_until(lambda: status(server)["refused"].get("garbage", 0) >= 100)
        for connection in sockets:
            connection.close()
        assert torch.equal(model.values(), torch.zeros(7))
        worker.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"listen": "nonsense"}, "listen must be host:port with a port from 0 to 65535"),
        ({"listen": "127.0.0.1:99999"}, "listen must be host:port with a port from 0 to 65535"),
        ({"sync_every": 0}, "sync_every must be"),
        ({"sync_every": 2**31}, "sync_every must be at most 2147483647"),
        ({"grace": -1.0}, "grace must be"),
        ({"min_steps": 0}, "min_steps must be"),
        ({"snapshot_every": 0}, "snapshot_every must be"),
        ({"lost_after": 0.0}, "lost_after must be 0.1 to 86400 seconds, got 0"),
        ({"lost_after": math.inf}, "lost_after must be"),
    ],
)
def test_bad_server_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncServer(PLAIN, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link": Link(timeout=0.0)}, "timeout must be"),
        ({"name": "x" * 65}, "name must have"),
        ({"wire": Wire(rounding="up")}, "rounding must be"),
        ({"wire": "int9"}, "unknown wire"),
        ({"server": "tcp://nowhere"}, "server must be tcp://host:port with"),
    ],
)
def test_bad_worker_arguments(options: dict, message: str) -> None:
    model = Flat()
    options = {"server": "tcp://127.0.0.1:1", **options}
    with pytest.raises(ValueError, match=message):
        AsyncDiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_worker_of_another_version_reads_why_it_is_refused(
    protocol: int, caplog: pytest.LogCaptureFixture
) -> None:
    sentence = (
        f"protocol version {protocol} was given, {PROTOCOL} is spoken here, by diloco_comm "
        f"{__version__}: install the same version of diloco_comm on both sides"
    )
    with serving() as server, Peer(server.address) as peer:
        for _ in range(2):
            peer.say_raw(*pack(Message(Kind.HELLO, meta=HELLO), protocol))
            assert peer.socket.poll(20_000)
            header, text = peer.socket.recv_multipart()
            assert HEADER.unpack(header)[1:3] == (protocol, Kind.REFUSED)
            assert json.loads(text)["reason"] == sentence
    assert caplog.messages.count(f"a worker was refused: {sentence}") == 1


@pytest.mark.parametrize("of_kind", [AsyncDiLoCo, DecoupledDiLoCo])
def test_a_server_of_another_version_is_named_at_once(of_kind: type) -> None:
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    address = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"

    def serve() -> None:
        peer = server.recv_multipart()[0]
        refusal = Message(Kind.REFUSED, meta={"reason": "as an older server says it"})
        server.send_multipart([peer, *pack(refusal, PROTOCOL - 1)])

    serving = threading.Thread(target=serve)
    serving.start()
    model = Flat()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sentence = f"protocol version {PROTOCOL - 1} was given, {PROTOCOL} is spoken here, by diloco"
    with pytest.raises(ServerRefused, match=sentence):
        of_kind(model, optimizer, server=address, link=Link(timeout=100.0))
    serving.join()
    server.close(0)
    context.term()
