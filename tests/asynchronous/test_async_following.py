"""Workers that follow the server by updates hold the same bytes as those that fetch parameters."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from async_helpers import PLAIN, Flat, Peer, attach, serving, start_by_hand, status

from diloco_comm import Adam, HeavyBall, Link, Nesterov
from diloco_comm.asynchronous import downloads
from diloco_comm.asynchronous.link import ServerLost
from diloco_comm.asynchronous.messages import Kind, Message
from diloco_comm.asynchronous.model import RUN_ELEMENTS
from diloco_comm.asynchronous.rules import Buffered, DelayedNesterov, Immediate, ServerRule
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.worker import AsyncDiLoCo

RULES = {
    "sgd": Immediate(outer=PLAIN.outer, discount=0.5),
    "nesterov": Immediate(outer=Nesterov(lambda step: 0.7 / (1 + step), 0.9)),
    "buffer": Buffered(period=2, outer=HeavyBall(0.3, 0.9)),
    "delayed": DelayedNesterov(lr=lambda step: 0.5 / (1 + step), period=3, activation=0.2),
    "delayed, N=1": DelayedNesterov(period=1),
}
SIZE = 2 * RUN_ELEMENTS - 1001


def noise(index: int, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(index))


def shared(server: AsyncServer) -> torch.Tensor:
    """Return the server's parameters, as a worker that fetches them sees them."""
    size = status(server)["parameters"]
    model, worker = attach(server.address, "reader", size=size)
    worker.close()
    return model.values()


@pytest.mark.nightly("1 s each; rules have tests of their own", but=["nesterov", "delayed"])
@pytest.mark.parametrize("name", RULES)
def test_followers_hold_the_servers_bytes(name: str) -> None:
    """Two followers of different wires and one that fetches parameters, in changing order."""
    with serving(RULES[name], parameters=[noise(0)]) as server:
        pairs = [
            attach(server.address, "a", size=SIZE, wire="int8", fetch="updates"),
            attach(server.address, "b", size=SIZE, wire="int4", fetch="updates"),
            attach(server.address, "c", size=SIZE, wire="int8"),
        ]
        rounds: dict[str, list] = {"a": [], "b": []}
        for worker_name, (_, worker) in zip("ab", pairs, strict=False):
            worker.on_round = rounds[worker_name].append
        for index, who in enumerate((0, 1, 0, 0, 1, 2, 0, 1, 1)):
            model, worker = pairs[who]
            model.descend(0.1 * noise(index + 1))
            worker.step()
            assert torch.equal(model.values(), shared(server))
        # Between two rounds of b there are at most two int8 updates of other workers.
        assert all(metrics.received_bytes < 3 * SIZE for metrics in rounds["b"][1:])
        # a's third round needed only its own update.
        assert rounds["a"][2].received_bytes < 1000
        for _, worker in pairs:
            worker.close()
    assert torch.equal(server.parameters()[0], pairs[1][0].values())


def test_fragments_and_a_restart_of_the_server(tmp_path) -> None:
    """The restarted server has none of the updates that led to its snapshot."""
    rule, options = DelayedNesterov(lr=0.5, period=3), {"snapshot": tmp_path / "s"}
    model = Flat(701)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with serving(rule, **options) as server:
        worker = AsyncDiLoCo(
            model, optimizer, server=server.address, fetch="updates", fragments=["a", "b"],
            link=Link(timeout=20.0), attach=False,
        )  # fmt: skip
        for index in range(4):
            model.descend(noise(index, 701))
            worker.step()
        assert worker._follower.version == 4
    with serving(rule, listen=server.address, **options) as server:
        for index in range(4, 9):
            model.descend(noise(index, 701))
            worker.step()
            # A worker that holds the version before its own update fetches nothing.
            assert worker._follower.version == index + 1
        worker.close()
    truth = torch.cat(server.parameters())
    assert torch.equal(torch.cat([model.a.detach(), model.b.detach()]), truth)


def test_who_falls_behind_fetches_parameters_and_later_all_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(downloads, "REST_ROUNDS", 2)
    with serving(RULES["delayed"], parameters=[noise(0)]) as server:
        slow, behind = attach(server.address, "slow", size=SIZE, wire="int8", fetch="updates")
        fast, ahead = attach(server.address, "fast", size=SIZE, wire="fp32")
        # Nine updates of others are more than a model.
        for index in range(9):
            fast.descend(0.1 * noise(index))
            ahead.step()
        versions = []
        for index in range(4):
            slow.descend(0.1 * noise(index))
            behind.step()
            assert torch.equal(slow.values(), shared(server))
            versions.append(behind._follower.version)
        # The worker fetches parameters twice more, then all buffers, and then follows again.
        assert versions == [None, None, None, 13]
        slow.descend(noise(5))
        behind.step()
        assert behind._follower.version == 14
        assert torch.equal(slow.values(), shared(server))
        ahead.close()
        behind.close()


def test_kept_updates_make_room_and_go_with_their_followers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diloco_comm.asynchronous.state.SMALL_BYTES", 2 * SIZE)
    with serving(PLAIN, parameters=[noise(0)]) as server:
        slow, behind = attach(server.address, "slow", size=SIZE, wire="int8", fetch="updates")
        fast, ahead = attach(server.address, "fast", size=SIZE, wire="int8")
        budget = server.state.memory.budget_bytes
        for index in range(5):
            fast.descend(noise(index))
            ahead.step()
            kept = status(server)["payload_bytes"]
            assert kept <= budget and (kept > 0) == (index >= 0)
        slow.descend(noise(9))
        behind.step()
        assert behind._follower.version is None
        assert torch.equal(slow.values(), shared(server))
        behind.close()
        fast.descend(noise(10))
        ahead.step()
        assert status(server)["payload_bytes"] == 0
        ahead.close()


def test_a_question_during_a_grace_period_is_not_forgotten() -> None:
    options = {"size": SIZE, "wire": "int8", "fetch": "updates"}
    with serving(RULES["delayed"], grace=30.0) as server:
        (one, a), (two, b) = (attach(server.address, name, **options) for name in "ab")
        for index in range(3):
            threads = [threading.Thread(target=worker.step) for worker in (a, b)]
            one.descend(noise(index))
            two.descend(noise(index + 9))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert a._follower.version == b._follower.version == 2 * index + 2
            assert torch.equal(one.values(), two.values())
        a._follower.version = None
        one.descend(noise(5))
        server.state.coordinator.grace.seconds = 0.3
        a.step()
        assert a._follower.version == 7 and not a._follower.is_refused
        a.close()
        b.close()


def test_rules_that_cannot_be_followed_are_fetched_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rule: ServerRule = Immediate(outer=Adam(0.1))
    with serving(rule) as server, caplog.at_level(logging.WARNING):
        model, worker = attach(server.address, "a", fetch="updates")
        for index in range(3):
            model.descend(noise(index, 7))
            worker.step()
            assert torch.equal(model.values(), shared(server))
        assert caplog.text.count("does not allow fetch='updates'") == 1
        worker.close()


def test_a_follower_whose_server_dies_goes_on_with_its_successor(tmp_path) -> None:
    options = {"snapshot": tmp_path, "snapshot_every": 2}
    with serving(RULES["delayed"], **options) as server:
        model, worker = attach(server.address, "a", fetch="updates", timeout=1.0)
    model.descend(noise(1, 7))
    with pytest.raises(ServerLost):
        worker.step()
    with serving(RULES["delayed"], listen=server.address, **options) as server:
        worker.step()
        assert torch.equal(model.values(), shared(server)) and worker._follower.version == 1
        worker.close()


def test_questions_of_a_follower_by_hand() -> None:
    with (
        serving(RULES["delayed"], parameters=[torch.ones(7)]) as server,
        Peer(server.address) as peer,
    ):
        start_by_hand(peer)
        peer.say(Message(Kind.FOLLOW, run=5))
        answer = peer.hear()
        assert (answer.kind, answer.run, answer.meta["rule"]["period"]) == (Kind.STATE, 5, 3)
        for number in (1, 2, 3):
            peer.say(Message(Kind.GET, number))
            heard = peer.hear()
            assert (heard.kind, heard.number, len(heard.body)) == (Kind.DATA, number, 28)
        peer.say(Message(Kind.GET, 4))
        assert "there is no buffer 4" in peer.hear().meta["reason"]
        peer.say(Message(Kind.GET_UPDATE, 1))
        assert peer.hear().kind == Kind.GONE
        # Versions that never were: parameters.
        peer.say(Message(Kind.FOLLOW, 1, 77))
        assert peer.hear().kind == Kind.READY
        peer.say(Message(Kind.FOLLOW, 1, 0))
        assert peer.hear().meta["updates"] == []
        for number in (0, 1, 1 << 40):
            peer.say(Message(Kind.GET_UPDATE, number))
            assert "does not lead to version 0" in peer.hear().meta["reason"]
        peer.say(Message(Kind.GET))
        assert peer.hear().kind == Kind.GONE
