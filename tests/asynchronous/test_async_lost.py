"""Workers that go without a word: the server notices, waits no more, and takes them back."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq
from async_helpers import (
    HELLO,
    PUSH,
    Peer,
    Relay,
    attach,
    serving,
    start_by_hand,
    status,
    tcp,
    wait_until,
)
from async_processes import Child, Scene, read_log

from diloco_comm.asynchronous.messages import Kind, Message
from diloco_comm.asynchronous.model import RUN_ELEMENTS
from diloco_comm.asynchronous.server import AsyncServer

SIZE = 1001
MANY = 1_000_000


@pytest.fixture
def scene_with(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    """``scene_with(dylu=True, ...)``: a scene whose server has these arguments."""
    scenes: list[Scene] = []

    def make(**server: object) -> Scene:
        scenes.append(Scene(tmp_path, SIZE, **server))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.__exit__()


def steps_of_last_round(scene: Scene, index: int) -> int:
    rows = read_log(scene.logs[index])
    return rows[-1][3] if rows else 0


@pytest.mark.nightly("5 s; the first tier has a killed worker and a grace period")
def test_the_slow_worker_gets_whole_rounds_when_the_fast_one_is_killed(
    scene_with: Callable[..., Scene],
) -> None:
    scene = scene_with(dylu=True, sync_every=20)
    fast, slow = scene.worker(0, MANY, pause=0.001), scene.worker(1, MANY, pause=0.04)
    wait_until(lambda: scene.told(0) > 5 and 0 < steps_of_last_round(scene, 1) < 10, 60)
    fast.kill()
    wait_until(lambda: steps_of_last_round(scene, 1) == 20, 60)
    report = status(scene.address)["workers"]
    assert report["w0"]["speed"] is None and report["w0"]["applied"] >= 5
    slow.kill()
    slow.wait()
    scene.finish()


def test_a_killed_worker_is_waited_for_no_more_in_a_grace_period(
    scene_with: Callable[..., Scene],
) -> None:
    """The window of an hour closes only because no other worker trains."""
    scene = scene_with(grace=3600.0)
    victim, survivor = scene.worker(0, MANY, pause=0.02), scene.worker(1, MANY, pause=0.02)
    wait_until(lambda: scene.told(0) > 3 and scene.told(1) > 3, 60)
    victim.kill()
    before = scene.told(1)
    wait_until(lambda: scene.told(1) > before + 10, 60)
    survivor.kill()
    survivor.wait()
    scene.finish()


def worker_row(where: Scene | AsyncServer, name: str) -> dict:
    return status(where.address)["workers"][name]


def test_a_stopped_worker_is_lost_in_time_and_welcome_when_it_wakes(
    scene_with: Callable[..., Scene],
) -> None:
    scene = scene_with(lost_after=3.0, dylu=True)
    sleeper, steady = scene.worker(0, MANY, pause=0.01), scene.worker(1, MANY, pause=0.05)
    wait_until(lambda: scene.told(0) > 3 and scene.told(1) > 3, 60)
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: not worker_row(scene, "w0")["connected"], 60)
    row = worker_row(scene, "w0")
    assert row["speed"] is None and row["applied"] >= 4
    assert status(scene.address)["lost"] == 1 and worker_row(scene, "w1")["connected"]
    before = scene.told(0)
    sleeper.send_signal(signal.SIGCONT)
    # The woken worker continues its count. finish() checks that no update was applied twice.
    wait_until(lambda: scene.told(0) > before + 3, 60)
    assert worker_row(scene, "w0")["connected"]
    for process in (sleeper, steady):
        process.kill()
        process.wait()
    scene.finish()


@pytest.mark.nightly("5 s; the first tier has a worker that is stopped while it trains")
def test_a_worker_that_is_stopped_while_it_fetches_is_lost_in_time(tmp_path: Path) -> None:
    """Heartbeats wait behind the parameters that are being sent."""
    with Scene(tmp_path, 8_000_001, lost_after=2.0, grace=3600.0) as scene:
        worker = scene.worker(0, MANY)
        wait_until(lambda: status(scene.address)["sent_bytes"] > 10 << 20, 60)
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: status(scene.address)["lost"] == 1, 60)
        worker.send_signal(signal.SIGCONT)
        wait_until(lambda: scene.told(0) > 1, 100)


@pytest.mark.nightly("11 s of waiting; the first tier has workers that are lost")
def test_a_worker_whose_training_thread_is_busy_is_not_lost(
    scene_with: Callable[..., Scene],
) -> None:
    """The thread holds Python's interpreter three times as long as ``lost_after``."""
    scene = scene_with(lost_after=3.0)
    worker = scene.worker(0, 5, busy_at=2, busy=9.0)
    assert worker.wait(100) == 0
    assert scene.told(0) == 5 and status(scene.address)["lost"] == 0
    scene.finish()


@pytest.mark.nightly("2 s; the first tier has a stopped worker that comes back")
@pytest.mark.parametrize("grace", [0.0, 3600.0])
def test_a_worker_without_a_network_is_lost_and_comes_back(grace: float) -> None:
    """Both ends get no packets, as when a host loses power or a router loses its table."""
    with serving(lost_after=2.0, grace=grace) as server, Relay(server.address) as relay:
        one, far = attach(relay.address, "far", timeout=6.0)
        two, near = attach(server.address, "near")
        one.descend(torch.ones(7))
        relay.cut()
        wait_until(lambda: not worker_row(server, "far")["connected"])
        two.descend(torch.ones(7))
        # The server does not wait for the lost worker.
        near.step()
        near.close()
        far.step()
        assert worker_row(server, "far") == {
            "applied": 1, "seq": 1, "connected": True, "speed": worker_row(server, "far")["speed"],
        }  # fmt: skip
        assert status(server)["lost"] == 1
        far.close()
    assert torch.equal(server.parameters()[0], torch.full((7,), -1.0))


def test_a_worker_that_closes_is_gone_at_once_and_not_lost() -> None:
    with serving(lost_after=3600.0, grace=3600.0) as server:
        (_, one), (model, other) = attach(server.address, "one"), attach(server.address, "other")
        one.close()
        wait_until(lambda: not worker_row(server, "one")["connected"])
        model.descend(torch.ones(7))
        other.step()
        assert status(server)["lost"] == 0
        other.close()


def count_leaves(server: AsyncServer) -> list[str]:
    """Return the names of the workers that the coordinator lets go from now on."""
    coordinator, names = server.state.coordinator, []
    leave = coordinator.leave
    coordinator.leave = lambda worker: names.append(worker) or leave(worker)
    return names


def test_every_end_of_a_worker_is_one_leave() -> None:
    with serving(parameters=[torch.ones(7)], lost_after=1.0) as server:
        names = count_leaves(server)
        with Peer(server.address) as peer:
            start_by_hand(peer, "closed")
            peer.say(Message(Kind.LEAVE))
            wait_until(lambda: names == ["closed"])
        wait_until(lambda: names == ["closed"])
        with Peer(server.address) as peer:
            start_by_hand(peer, "silent")
        wait_until(lambda: names == ["closed", "silent"])
        with Relay(server.address) as relay, Peer(relay.address) as peer:
            start_by_hand(peer, "cut")
            relay.cut()
            wait_until(lambda: names == ["closed", "silent", "cut"])
        # Several rounds of housekeeping later nothing has been added.
        begin = status(server)["uptime_s"]
        wait_until(lambda: status(server)["uptime_s"] > begin + 1)
        report = status(server)
        assert names == ["closed", "silent", "cut"] and report["lost"] == 2
        assert report["connections"] == 0


def test_half_an_update_is_discarded_with_its_worker_at_once() -> None:
    size = 3 * RUN_ELEMENTS
    with serving(parameters=[torch.ones(size)]) as server, Peer(server.address) as peer:
        peer.say(Message(Kind.HELLO, meta={**HELLO, "sizes": [size]}))
        assert peer.hear().kind == Kind.WELCOME
        peer.say(Message(Kind.PUSH, 1, 0, meta=PUSH))
        assert peer.hear().kind == Kind.WANT
        peer.say(Message(Kind.RUN, 1, 0, 0, 0, body=b"\0" * (4 * RUN_ELEMENTS)))
        assert status(server)["payload_bytes"] == 4 * size
        peer.socket.close()
        wait_until(lambda: status(server)["payload_bytes"] == 0)
        report = status(server)
        assert report["updates"] == 0 and report["refused"] == {} and report["lost"] == 1


def wait_until_unreachable(server: AsyncServer) -> None:
    """Wait, in the server's thread, until the server can send no more to its only peer."""
    (session,) = server.state.sessions.all()

    def is_gone() -> bool:
        try:
            server._socket.send_multipart([session.peer, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno == zmq.EHOSTUNREACH
        return False

    wait_until(is_gone, 60)


@pytest.mark.parametrize("answer", [Kind.READY, Kind.UPDATES])
def test_a_worker_that_is_killed_while_several_runs_are_read_for_it_ends_nobody_else(
    answer: Kind,
) -> None:
    size, runs = 3 * RUN_ELEMENTS, 3
    hello = {**HELLO, "sizes": [size]}
    with serving(parameters=[torch.ones(size)]) as server, Peer(server.address) as peer:
        peer.say(Message(Kind.HELLO, meta=hello))
        assert peer.hear().kind == Kind.WELCOME
        question, get = Message(Kind.PULL), Message(Kind.GET, 0, 0, 0, 0, count=runs)
        if answer == Kind.UPDATES:
            # The worker holds all of version 0, and its own update made version 1.
            question = Message(Kind.FOLLOW, 1, 0)
            get = Message(Kind.GET_UPDATE, 1, 1, 0, 0, count=runs)
            peer.say(Message(Kind.PUSH, 1, 0, 1, meta=PUSH))
            for run in range(runs):
                assert peer.hear(skip=(Kind.OUTCOME,)).kind == Kind.WANT
                body = b"\0" * (4 * RUN_ELEMENTS)
                peer.say(Message(Kind.RUN, 1, 0, 0, run, body=body))
        peer.say(question)
        assert peer.hear(skip=(Kind.WAIT, Kind.WANT, Kind.OUTCOME)).kind == answer
        read, reads = server._sender._read, []

        def read_and_lose(*arguments: object) -> torch.Tensor:
            reads.append(arguments)
            if len(reads) == 1:
                peer.close()
                wait_until_unreachable(server)
            return read(*arguments)

        server._sender._read = read_and_lose
        peer.say(get)
        wait_until(lambda: status(server)["lost"] == 1, 60)
        assert len(reads) == 1 and status(server)["connections"] == 0


def test_connections_that_end_by_the_thousand_hold_nobody_up() -> None:
    with serving() as server:
        model, worker = attach(server.address, "a")
        for _ in range(30):
            crowd = [tcp(server.address) for _ in range(100)]
            for connection in crowd:
                connection.close()
        model.descend(torch.ones(7))
        worker.step()
        assert torch.equal(model.values(), torch.zeros(7))
        report = status(server)
        assert report["lost"] == 0 and report["workers"]["a"]["connected"]
        worker.close()


def test_what_is_garbage_closes_its_connections(scene_with: Callable[..., Scene]) -> None:
    """In another process, since a collector that waits for ever cannot be interrupted."""
    scene = scene_with()
    dropper = Child("dropper", address=scene.address, size=SIZE)
    scene.processes.append(dropper)
    assert dropper.wait(60) == 0
    wait_until(lambda: not worker_row(scene, "dropped")["connected"])
