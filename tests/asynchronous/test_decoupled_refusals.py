"""What a syncer refuses: other models, other settings, garbage; and what the command line says."""

from __future__ import annotations

import copy
import os
import pickle
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from async_helpers import Flat, Peer, tcp
from async_helpers import attach as attach_async
from async_helpers import serving as serving_async
from cli_helpers import check_misuse, run_cli
from decoupled_processes import SIZE, attach, make_server

from diloco_comm import Link
from diloco_comm.asynchronous import DecoupledServer
from diloco_comm.asynchronous.decoupled.settings import DecoupledSettings
from diloco_comm.asynchronous.link import ServerLost, ServerRefused
from diloco_comm.asynchronous.messages import HEADER, MAGIC, PROTOCOL, Kind, Message

JOIN = {
    "worker": "peer", "layout": 5, "total": 2, "sizes": [SIZE - 1, 1], "pieces": [1, 1],
    "alone": [0, 0], "settings": 0,
}  # fmt: skip


def join_of(server: DecoupledServer) -> dict[str, Any]:
    settings = server.state.settings.of_learners
    return {**JOIN, "layout": server.state.layout, "settings": settings}


def sentence(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_other_models_and_settings_get_one_sentence() -> None:
    with make_server() as server:
        _, first = attach(server.address, "a")
        with pytest.raises(ServerRefused) as refused:
            attach(server.address, "b", size=SIZE + 1)
        assert f"has {SIZE + 1} parameters" in sentence(refused)
        with pytest.raises(ServerRefused) as refused:
            model = Flat(SIZE)
            model.a = torch.nn.Parameter(torch.ones(SIZE - 1).reshape(2, -1))
            from diloco_comm.asynchronous import DecoupledDiLoCo

            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            DecoupledDiLoCo(
                model, optimizer, server=server.address, name="c", link=Link(timeout=20.0)
            )
        assert "other names, shapes or dtypes" in sentence(refused)
        with pytest.raises(ValueError, match="wire='fp32', this learner was given wire='int4'"):
            attach(server.address, "d", wire="int4")
        with pytest.raises(ServerRefused) as refused:
            attach(server.address, "a", timeout=3.0, size=SIZE + 1)
        with pytest.raises(ServerRefused) as refused:
            attach_async(server.address, "e")
        assert "hosts decoupled training: attach with DecoupledDiLoCo" in sentence(refused)
        with pytest.raises(ValueError, match="must be the shards 0/2, 1/2, got the shards 0/1"):
            attach([server.address, server.address], "f")
        first.close()
    with serving_async() as other, pytest.raises(ServerRefused) as refused:
        attach(other.address, "g")
    assert "hosts asynchronous training: attach with AsyncDiLoCo" in sentence(refused)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_what_is_copied_names_what_to_save(copied: Callable[[Any], Any]) -> None:
    with make_server() as server, serving_async() as async_server:
        _, learner = attach(server.address, "a")
        _, worker = attach_async(async_server.address, "a")
        for one in (learner, worker):
            sentence = f"an? {type(one).__name__} holds connections.* under the same name"
            with pytest.raises(TypeError, match=sentence):
                copied(one)
            one.close()


def test_garbage_does_not_hurt_a_syncer() -> None:
    """Random bytes, random fields of every kind before and after JOIN; then training goes on."""
    draw = random.Random(7)
    with make_server({"receipt": "carry", "wire": "int8", "wire_down": "int4"}) as server:
        model, learner = attach(server.address, "a")
        for _ in range(20):
            with tcp(server.address) as wire:
                wire.sendall(os.urandom(draw.randrange(1, 300)))
        with Peer(server.address) as peer:
            for is_joined in (False, True):
                if is_joined:
                    peer.say(Message(Kind.JOIN, 9, meta=join_of(server)))
                for kind in [*Kind] * 20:
                    numbers = [draw.choice([0, 1, 2, 5, draw.randrange(1 << 16)]) for _ in range(5)]
                    header = HEADER.pack(MAGIC, PROTOCOL, kind, *numbers)
                    body = draw.choice(
                        [
                            b"", b"{}", b"[1]", b'{"steps":1,"tokens":1}',
                            b'{"steps":0,"tokens":0}', os.urandom(64), bytes(2048),
                            b'{"worker":"x","layout":1,"total":9,"sizes":[1],"pieces":[4],"alone":[]}',
                        ]
                    )  # fmt: skip
                    peer.say_raw(*([header] if draw.random() < 0.3 else [header, body]))
            answers = set()
            while (message := peer.hear(1.0)) is not None:
                answers.add(message.kind)
        assert {Kind.REFUSED, Kind.SET, Kind.REPORT} <= answers
        for _ in range(12):
            model.descend(torch.ones(SIZE))
            learner.step()
            learner.flush(0.2, remainder=False)
        assert learner.flush(20.0) and learner.metrics.merged >= 2
        assert server.report()["refused"]["garbage"] > 20
        learner.close()


def test_a_report_of_garbage_is_refused_and_the_learner_keeps_its_progress() -> None:
    with make_server({"receipt": "carry"}) as server:
        model, learner = attach(server.address, "a")
        encode = learner._learner.reports

        def spoiled():
            made = encode()
            for _, _, payloads in made:
                payloads[0][:4] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)
            return made

        learner._learner.reports = spoiled  # type: ignore[method-assign]
        for _ in range(4):
            model.descend(torch.ones(SIZE))
            learner.step()
            assert learner.flush(20.0, remainder=False)
        assert learner.metrics.refused >= 2 and learner.metrics.merged == 0
        learner._learner.reports = encode  # type: ignore[method-assign]
        for _ in range(4):
            model.descend(torch.ones(SIZE))
            learner.step()
            assert learner.flush(20.0)
        assert learner.metrics.merged >= 2 and learner.metrics.step_ledgers[0].lost == 0
        with learner.outer_parameters():
            assert model.values()[0] == -float(learner.metrics.step_ledgers[0].applied) <= -6.0
        learner.close()


def test_settings_out_of_their_range() -> None:
    for given, words in (
        ({"merge": "median"}, "merge must be one of mean, rda"),
        ({"quorum": 0}, "quorum must be an integer of at least 1"),
        ({"quorum": 1025}, "quorum must be at most 1024, the reports that one merge takes, got"),
        ({"gamma": 2.0}, "gamma must lie in [0, 1]"),
        ({"shard": "2/2"}, "shard must be i/S"),
        ({"wire_down": "sub4"}, "wire_down must be a wire that keeps its rounding errors"),
        ({"wire": "topk64"}, "needs error_feedback=True"),
        ({"receipt": "drop"}, "receipt must be one of"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            DecoupledSettings(**given)


def test_options_of_the_command_line() -> None:
    for arguments, words in (
        (("--quorum", "2"), "No such option: --quorum"),
        (("decoupled", "--dylu"), "No such option: --dylu"),
        (("decoupled", "--shard", "3"), "--shard must be i/S"),
        (("decoupled", "--rule", "delayed"), "--rule must be one of nesterov, heavy-ball, sgd"),
        (("decoupled", "--keep-tape"), "keep_tape needs a snapshot folder"),
        (("--drop-tape",), "No such option: --drop-tape"),
        (("decoupled", "--wire-down", "sub4"), "--wire-down must be a wire that keeps"),
        (("decoupled", "--model-sizes", "3"), "--model-sizes must be at least 5, got 3"),
    ):
        ended = run_cli("serve", *arguments)
        check_misuse(ended, words.replace("keep_tape", "--keep-tape"))


@pytest.mark.nightly("5 s; they differ in the learner that is first", but=["1"])
@pytest.mark.parametrize("kept", [0, 1])
def test_two_servers_begin_with_the_parameters_of_one_learner(kept: int) -> None:
    """One of the servers comes back without its snapshot: no learner mixes two models."""
    servers = [make_server({"shard": f"{i}/2"}) for i in range(2)]
    for server in servers:
        server.start()
    _, first = attach([server.address for server in servers], "a")
    first.close()
    servers[1 - kept].stop()
    servers[1 - kept] = make_server({"shard": f"{1 - kept}/2"})
    servers[1 - kept].start()
    with pytest.raises(ServerLost) as lost:
        attach([server.address for server in servers], "b", timeout=3.0)
    assert "start all servers with their snapshots, or all without" in sentence(lost)
    for server in servers:
        server.stop()


def test_a_learner_of_a_server_with_other_settings_is_refused() -> None:
    with make_server() as server, Peer(server.address) as peer:
        _, learner = attach(server.address, "a")
        meta = {**join_of(server), "settings": DecoupledSettings(wire="int4").of_learners}
        peer.say(Message(Kind.JOIN, 9, meta=meta))
        answer = peer.hear(10.0)
        assert answer is not None and answer.kind == Kind.REFUSED
        assert "started again with other settings" in answer.meta["reason"]
        learner.close()


def test_a_learner_that_joins_with_two_models_does_not_end_the_server() -> None:
    with make_server() as server:
        with Peer(server.address) as peer:
            for more in ({"sizes": [1], "pieces": [1], "alone": [0], "total": 1}, {}):
                peer.say(Message(Kind.JOIN, 9, meta={**join_of(server), **more}))
            peer.say(Message(Kind.START))
            while (message := peer.hear(3.0)) is not None and message.kind != Kind.WANT:
                pass
            assert message is not None
            place = (message.number, message.version, message.fragment, message.run)
            peer.say(Message(Kind.RUN, *place, body=memoryview(bytes(4))))
            while (message := peer.hear(3.0)) is not None and message.kind != Kind.REFUSED:
                pass
            assert message is not None
        _, learner = attach(server.address, "a")
        learner.close()


def test_one_bad_fragment_leaves_the_report_of_the_other_for_later() -> None:
    """Also: the number of tokens is checked."""
    with make_server({"fragments": ["a", "b"], "sync_every": 2}) as server:
        model, learner = attach(server.address, "a")
        inner = learner._learner
        for index in range(2):
            inner.stepped(1)
            inner.call(index, 0)
        with torch.no_grad():
            model.b.fill_(float("inf"))
        with pytest.raises(ValueError, match="fragment 1"):
            inner.reports()
        assert [part.is_called for part in inner.fragments] == [True, True]
        with torch.no_grad():
            model.b.fill_(0.0)
        assert [index for index, _, _ in inner.reports()] == [0, 1]
        learner._tokens = lambda: 0.5
        with pytest.raises((TypeError, ValueError), match="tokens"):
            learner.step()
        learner.close()
