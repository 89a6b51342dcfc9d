"""Names of workers: after host and rank, and never shared by two live workers."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from async_helpers import Flat, Relay, attach, serving, status, wait_until
from async_processes import Scene
from cli_helpers import run_cli

from diloco_comm import Link
from diloco_comm.asynchronous.coordinator import Outcome
from diloco_comm.asynchronous.link import ServerRefused, default_name
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.sessions import Session
from diloco_comm.asynchronous.worker import AsyncDiLoCo

HOST = socket.gethostname().split(".")[0]
SIZE = 7


def nameless(address: str, timeout: float = 20.0, **options: object) -> tuple[Flat, AsyncDiLoCo]:
    model = Flat(SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"wire": "fp32", "link": Link(timeout=timeout), "attach": False, **options}
    return model, AsyncDiLoCo(model, optimizer, server=address, **options)


@pytest.fixture
def rank_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 3 of a launch."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")


def update(model: Flat, worker: AsyncDiLoCo) -> None:
    model.descend(torch.ones(SIZE))
    worker.step()


def test_a_name_is_that_of_host_and_rank_or_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert default_name() == f"{HOST}-pid{os.getpid()}"
    for names, rank in ((("RANK", "WORLD_SIZE"), 5), (("SLURM_PROCID", "SLURM_NTASKS"), 6)):
        with monkeypatch.context() as patched:
            patched.setenv(names[0], str(rank))
            patched.setenv(names[1], "9")
            patched.setenv("SLURM_STEP_ID", "0")
            patched.setenv("SLURM_STEP_NODELIST", "node1")
            assert default_name() == f"{HOST}-rank{rank}"
    monkeypatch.setattr(socket, "gethostname", lambda: "x" * 200 + "\n.example.org")
    assert default_name() == f"{'x' * 40}-pid{os.getpid()}"


@pytest.mark.usefixtures("rank_3")
def test_live_workers_of_one_name_get_numbers_and_places_that_are_free() -> None:
    with serving() as server:
        workers = [nameless(server.address)[1] for _ in range(3)]
        names = [worker.name for worker in workers]
        assert names == [f"{HOST}-rank3", f"{HOST}-rank3-2", f"{HOST}-rank3-3"]
        for worker in workers:
            worker.step()
        workers[1].close()
        wait_until(lambda: not status(server)["workers"][names[1]]["connected"])
        # The next worker takes the free place, and continues the count of that place.
        successor = nameless(server.address)[1]
        assert (successor.name, successor.seq) == (names[1], 1)
        report = status(server)
        assert list(report["workers"]) == names and report["refused"] == {}
        shown = run_cli("serve", "status", server.address).out
        assert all(name in shown for name in names)
        for worker in (workers[0], successor, workers[2]):
            worker.close()


@pytest.mark.nightly("15 s; the first tier has a name that is kept and one that is waited for")
def test_a_killed_worker_that_is_started_again_takes_its_old_place(tmp_path: Path) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1"}
    with Scene(tmp_path, SIZE) as scene:
        for round_of_it in range(3):
            worker = scene.worker(0, 1_000_000, name=None, environ=environ)
            told = 3 * (round_of_it + 1)
            wait_until(lambda told=told: scene.told(0) >= told, 60)
            worker.kill()
            worker.wait()
        report = status(scene.address)
        assert list(report["workers"]) == [f"{HOST}-rank0"]
        assert report["workers"][f"{HOST}-rank0"]["applied"] == report["updates"] >= 9


def test_two_live_workers_of_one_given_name_do_not_collide(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(lost_after=2.0) as server:
        one, first = attach(server.address, "a")
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(ServerRefused, match="another worker of the name a is connected"),
        ):
            attach(server.address, "a")
        assert "waits until it knows whether that lives" in caplog.text
        update(one, first)
        assert torch.equal(one.values(), torch.zeros(SIZE))
        assert status(server)["refused"] == {"name": 1} and status(server)["lost"] == 0
        first.close()


def test_a_worker_waits_for_its_name_until_its_predecessor_is_known_to_be_dead() -> None:
    """The predecessor's host lost power, so no goodbye and no closing came."""
    with serving(lost_after=1.0) as server, Relay(server.address) as relay:
        one, first = attach(relay.address, "a")
        update(one, first)
        relay.cut()
        two, second = attach(server.address, "a")
        assert second.seq == 1
        update(two, second)
        assert status(server)["workers"]["a"]["applied"] == 2
        second.close()
        first._link.close()


@pytest.fixture
def away(rank_3: None) -> Iterator[tuple[AsyncServer, Flat, AsyncDiLoCo]]:
    """A server, and a worker that is cut off from the server, so that its name is free."""
    with serving(lost_after=1.0) as server, Relay(server.address) as relay:
        model, worker = nameless(relay.address, timeout=6.0)
        update(model, worker)
        relay.cut()
        wait_until(lambda: not status(server)["workers"][f"{HOST}-rank3"]["connected"])
        yield server, model, worker
        worker.close()


@pytest.mark.nightly("3 s; the first tier has two live workers of one name")
def test_a_worker_that_was_away_gets_another_name_if_its_own_is_taken(
    away: tuple[AsyncServer, Flat, AsyncDiLoCo],
) -> None:
    server, model, worker = away
    other, usurper = nameless(server.address)
    assert usurper.name == worker.name == f"{HOST}-rank3"
    update(other, usurper)
    update(model, worker)
    assert worker.name == f"{HOST}-rank3-2" and worker.seq == 1
    rows = status(server)["workers"]
    assert [row["applied"] for row in rows.values()] == [2, 1]
    assert torch.equal(model.values(), torch.full((SIZE,), -2.0))
    usurper.close()


@pytest.mark.nightly("3 s; the first tier has updates that are not sent again")
def test_updates_that_another_worker_of_the_name_sent_are_not_taken_for_its_own(
    away: tuple[AsyncServer, Flat, AsyncDiLoCo],
) -> None:
    """The other worker has left again: the name is free, and its count has gone on."""
    server, model, worker = away
    other, usurper = nameless(server.address)
    for _ in range(3):
        update(other, usurper)
    usurper.close()
    wait_until(lambda: not status(server)["workers"][worker.name]["connected"])
    update(model, worker)
    assert worker.name == f"{HOST}-rank3" and worker.seq == 5
    report = status(server)
    assert report["workers"][worker.name]["applied"] == report["updates"] == 5
    assert report["duplicates"] == 0
    assert torch.equal(model.values(), torch.full((SIZE,), -4.0))


def test_an_update_in_doubt_is_given_up_and_said(
    away: tuple[AsyncServer, Flat, AsyncDiLoCo], caplog: pytest.LogCaptureFixture
) -> None:
    """A part of the update was sent before the connection ended and another took the name."""
    server, model, worker = away
    other, usurper = nameless(server.address)
    update(other, usurper)
    worker._link.identity.begin()
    rounds: list[str] = []
    worker.on_round = lambda metrics: rounds.append(metrics.refusal)
    with caplog.at_level(logging.WARNING):
        update(model, worker)
    assert rounds == ["in doubt"] and "it is not sent again, since it may have been" in caplog.text
    assert status(server)["updates"] == 2
    assert torch.equal(model.values(), torch.full((SIZE,), -1.0))
    update(model, worker)
    assert rounds == ["in doubt", ""] and status(server)["updates"] == 3
    usurper.close()


@pytest.mark.usefixtures("rank_3")
def test_an_update_that_was_applied_is_not_sent_again_under_another_name() -> None:
    """The outcome is lost with the connection, and the update's number fits the new name."""
    with serving(lost_after=1.0) as server, Relay(server.address) as relay:
        rounds: list[tuple[int, str]] = []
        model, worker = nameless(
            relay.address,
            timeout=15.0,
            on_round=lambda metrics: rounds.append((metrics.staleness, metrics.refusal)),
        )
        tell, lost = server._receiver._send_outcome, []

        def tell_the_second_time(session: Session, outcome: Outcome) -> None:
            if lost:
                tell(session, outcome)
            else:
                lost.append(outcome)
                relay.cut(shut=True)

        server._receiver._send_outcome = tell_the_second_time
        model.descend(torch.ones(SIZE))
        thread = threading.Thread(target=worker.step)
        thread.start()
        wait_until(lambda: lost and not status(server)["workers"][worker.name]["connected"], 60)
        other, usurper = nameless(server.address)
        assert usurper.name == f"{HOST}-rank3"
        update(other, usurper)
        relay.open()
        thread.join()
        assert worker.name == f"{HOST}-rank3-2" and rounds == [(-1, "in doubt")]
        assert status(server)["updates"] == 2
        # Nothing of the update in doubt is on the server: the next one is an ordinary update.
        update(model, worker)
        assert rounds[1:] == [(0, "")] and worker.seq == 1
        assert torch.equal(model.values(), torch.full((SIZE,), -2.0))
        worker.close()
        usurper.close()


def test_a_name_is_kept_by_a_new_connection_of_the_same_worker() -> None:
    """The new connection comes before the server knows that the old connection has ended."""
    with serving(lost_after=60.0) as server, Relay(server.address) as relay:
        model, worker = attach(relay.address, "a", timeout=3.0)
        update(model, worker)
        relay.cut()
        update(model, worker)
        assert worker.seq == 2 and status(server)["updates"] == 2
        worker.close()


def test_the_status_shows_those_who_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_comm.asynchronous.state.MAX_WORKERS", 3)
    with serving() as server:
        _, first = attach(server.address, "first")
        for name in "abcd":
            attach(server.address, name)[1].close()
        wait_until(lambda: status(server)["connections"] == 1)
        assert list(status(server)["workers"]) == ["first", "c", "d"]
        first.close()
