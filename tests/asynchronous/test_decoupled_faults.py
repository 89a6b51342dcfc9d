"""Learners and syncers that die or stop: the others go on, and nothing committed is lost."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from async_disk import Disk
from async_helpers import wait_until
from cli_helpers import run_cli
from decoupled_processes import SIZE, Play, attach, hash_of, make_server

from diloco_comm.asynchronous.decoupled.tape import replay
from diloco_comm.asynchronous.decoupled.transfer import ReportReceiver
from diloco_comm.asynchronous.link import ServerLost, read_status
from diloco_comm.asynchronous.messages import Kind, Message
from diloco_comm.asynchronous.model import layout_of
from diloco_comm.asynchronous.payloads import PayloadMemory
from diloco_comm.ops.residuals import Residuals
from diloco_comm.ops.wire import WireFormat

CARRY = {"receipt": "carry"}


@pytest.fixture
def play_with(tmp_path: Path) -> Iterator[Callable[..., Play]]:
    """``play_with({"quorum": 2}, lost_after=3.0)``: a play with these settings."""
    plays: list[Play] = []

    def make(settings: dict | None = None, **server: object) -> Play:
        plays.append(Play(tmp_path, settings, **server))
        return plays[-1]

    yield make
    for play in plays:
        play.__exit__()


def test_a_killed_and_a_stopped_learner_hold_nobody_up(play_with: Callable[..., Play]) -> None:
    """A quorum of all: merges wait until the lost learner is known to be lost; steps never do."""
    play = play_with({"quorum": 3, **CARRY}, lost_after=3.0)
    victim, sleeper, _ = (play.learner(index) for index in range(3))
    for index in range(3):
        play.wait_for(index, merged=3)
    victim.kill()
    play.wait_for(1, merged=3)
    play.wait_for(2, merged=3)
    assert set(play.status()["learners"]) == {"w1", "w2"}
    sleeper.send_signal(signal.SIGSTOP)
    before, merged = play.steps(2), play.merged(2)
    # The steps go on while the syncer still waits for the stopped learner.
    wait_until(lambda: play.steps(2) > before + 50, 60)
    play.wait_for(2, merged=3)
    assert play.merged(2) >= merged + 3 and set(play.status()["learners"]) == {"w2"}
    sleeper.send_signal(signal.SIGCONT)
    play.wait_for(1, merged=3)
    # A learner of the same name takes the shared parameters.
    play.learner(0, pause=0.05)
    wait_until(lambda: play.steps(0) < 50 and play.merged(0) > 3, 60)
    play.end()
    play.versions(0, 1, 2)
    play.check_books(1, 2)


@pytest.mark.nightly("6 s each; the coded wire is the general case", but=["int4"])
@pytest.mark.parametrize("wire_down", ["fp32", "int4"])
def test_a_killed_syncer_comes_back_with_every_commit(
    play_with: Callable[..., Play], wire_down: str
) -> None:
    """No learner ever sees two contents of one version; the tape has the bits that all saw."""
    play = play_with({"quorum": 2, "wire": "int8", "wire_down": wire_down, **CARRY})
    for index in range(2):
        play.learner(index)
    for _ in range(2):
        play.wait_for(0, merged=8)
        play.wait_for(1, merged=8)
        play.syncer.kill()
        play.syncer.wait(60)
        before = max(play.steps(index) for index in range(2))
        # Learners train on without a syncer.
        wait_until(lambda before=before: play.steps(0) > before + 30, 60)
        play.start_syncer()
    play.wait_for(0, merged=8)
    play.wait_for(1, merged=8)
    play.end()
    seen = play.versions(0, 1)
    play.check_books(0, 1)
    assert all(not row[3][0]["lost"] for row in play.rows(0))
    published: dict[tuple[int, int], int] = {}

    def note(record: dict, model) -> None:
        p = record["fragment"]
        published[p, record["version"]] = hash_of(model.published[p].values)

    done = replay(play.state, note)
    assert done.is_compared and done.first == 0 and done.last == len(published) >= 40
    assert done.learners == ("w0", "w1")
    taken = {key: number for key, number in seen.items() if key[1] > 0}
    assert len(taken) > 20 and taken.items() <= published.items()


@pytest.mark.nightly("7 s; the first tier has a killed syncer")
def test_a_killed_shard_holds_up_its_own_fragments_alone(play_with: Callable[..., Play]) -> None:
    """Learners and the other syncer's fragments go on; then those of the shard do, without loss."""
    play = play_with({"quorum": 2, "wire": "int8", **CARRY}, shards=2)
    for index in range(2):
        play.learner(index)
    for index in range(2):
        play.wait_for(index, merged=6)
    play.syncers[1].kill()
    play.syncers[1].wait(60)
    before, steps = play.newest(0), play.steps(0)
    wait_until(lambda: play.newest(0)[0] >= before[0] + 5 and play.steps(0) >= steps + 16, 60)
    # A commit that was on its way may have arrived.
    assert play.newest(0)[1] <= before[1] + 1
    play.start_syncer(1)
    wait_until(lambda: min(play.newest(i)[1] for i in range(2)) >= before[1] + 4, 60)
    play.end()
    merged = play.check_tapes(0, 1)
    play.check_books(0, 1)
    for index in range(2):
        for p, book in enumerate(play.rows(index)[-1][3]):
            # A merge whose commit a killed learner did not see is on the tape alone.
            assert book["lost"] == 0 and book["applied"] <= merged[index, p]
            # The step in which a learner was killed is in no row, and may have been reported.
            assert merged[index, p] <= book["learned"] + 1


@pytest.mark.nightly("4 s; test_async_disk has a server on a full disk")
def test_a_syncer_on_a_full_disk_sends_no_commit_until_there_is_room(
    disk: Disk, tmp_path: Path
) -> None:
    folder = disk.root / "state"
    # Snapshots of 16 kB, and 8 kB for each merge in the journal.
    with make_server(CARRY, snapshot=folder, snapshot_every=1000) as server:
        model, learner = attach(server.address, "a")

        def train(steps: int) -> None:
            for _ in range(steps):
                model.descend(torch.ones(SIZE))
                learner.step()
                learner.flush(0.05, remainder=False)

        train(12)
        before = learner.metrics
        assert min(before.versions) >= 2
        disk.fill()
        train(12)
        during = learner.metrics
        assert during.steps == 24 and during.versions == before.versions
        said = read_status(server.address)["storage"]
        assert (
            "No space left on device; merges wait until the journal takes them" in said["problem"]
        )
        assert str(folder) in said["problem"]
        shown = run_cli("serve", "status", server.address).out
        assert "No space left on device" in " ".join(shown.split())
        # A newcomer takes what the others have.
        _, other = attach(server.address, "b")
        assert other.metrics.versions == before.versions
        other.close()
        shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("lock"))
        disk.empty()
        wait_until(lambda: not read_status(server.address)["storage"]["problem"], 60)
        train(8)
        assert min(learner.metrics.versions) > max(before.versions)
        books = learner.metrics.step_ledgers
        assert all(book.lost == 0 and book.learned == 32 for book in books)
        learner.close()
    done = replay(tmp_path / "copy")
    assert done.versions == before.versions
    assert replay(folder).last == sum(learner.metrics.versions)


def test_a_ctrl_c_in_the_hook_waits_for_the_end_of_the_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The difference to the version before is added once, so learners have the same values."""
    turn, num_turns = Residuals.turn, 0

    def interrupted(residuals: Residuals, *arguments: Any) -> None:
        nonlocal num_turns
        num_turns += 1
        if num_turns == 3:
            os.kill(os.getpid(), signal.SIGINT)
        turn(residuals, *arguments)

    with make_server({**CARRY, "wire_down": "int8"}) as server:
        model, learner = attach(server.address, "a")
        monkeypatch.setattr(Residuals, "turn", interrupted)
        num_interrupts = 0
        for number in range(8):
            model.descend(torch.linspace(1.0, 2.0 + number, SIZE))
            try:
                learner.step()
                assert learner.flush(20.0, remainder=False)
            except KeyboardInterrupt:
                num_interrupts += 1
        assert num_interrupts == 1 and learner.flush(20.0)
        other, second = attach(server.address, "b")
        with learner.outer_parameters():
            assert torch.equal(model.values(), other.values())
        for each in (learner, second):
            each.close()


@pytest.mark.parametrize("call", ["wait", "send"])
def test_a_learner_that_was_stopped_has_not_lost_its_syncer(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The courier is stopped for longer than its timeout, while it waits or while it sends."""
    with make_server() as server:
        model, learner = attach(server.address, "a", timeout=1.5)
        (shard,) = learner._shards
        own, stopped = getattr(shard.link, call), []

        def stop_once(*given: Any) -> bool | None:
            if not stopped:
                stopped.append(time.sleep(2.2))
                return True if call == "send" else None
            return own(*given)

        monkeypatch.setattr(shard.link, call, stop_once)
        for _ in range(30):
            model.descend(torch.ones(SIZE))
            learner.step()
            time.sleep(0.1)
        assert stopped
        learner.close()


def test_a_syncer_without_its_folder_is_another_run() -> None:
    """Its learners say so, and a learner that attaches anew starts it."""
    with make_server(CARRY) as server:
        address = server.address
        model, learner = attach(address, "a")
        model.descend(torch.ones(SIZE))
        learner.step()
        assert learner.flush(20.0)
    with make_server(CARRY, listen=address) as server:
        with pytest.raises(ServerLost, match="was restarted without its snapshot"):
            learner.flush(20.0)
        other, second = attach(address, "b")
        assert second.metrics.versions == (0, 0)
        assert torch.equal(other.values(), torch.zeros(SIZE))

        def is_back() -> bool:
            with suppress(ServerLost):
                learner.poll()
            return torch.equal(model.values(), torch.zeros(SIZE))

        wait_until(is_back)
        for _ in range(4):
            model.descend(torch.ones(SIZE))
            learner.step()
            assert learner.flush(20.0)
        assert min(learner.metrics.versions) >= 1
        for each in (learner, second):
            each.close()


def test_a_dropped_learner_leaves_the_syncer() -> None:
    with make_server() as server:
        _, learner = attach(server.address, "a")
        wait_until(lambda: list(server.report()["learners"]) == ["a"])
        courier = learner._shards[0].carrier
        del learner
        gc.collect()
        wait_until(lambda: not server.report()["learners"])
        assert not courier._thread.is_alive() and server.report()["lost"] == 0


def test_a_connection_may_end_while_its_second_report_is_answered() -> None:
    """The upload is forgotten by the failed answer; the syncer serves the others on."""
    layout = layout_of(4096, WireFormat("int8"))
    rounds = [SimpleNamespace(reported=set(), refusal=lambda report: "")]
    model = SimpleNamespace(
        reports=lambda p: [layout],
        first=[0],
        pieces=[[1]],
        places=[(0, 0)],
        published=[SimpleNamespace(merged={})],
        syncer=SimpleNamespace(rounds=rounds, rule=SimpleNamespace(quorum=1)),
    )
    status = SimpleNamespace(refused=Counter())
    memory = PayloadMemory(1 << 24)
    state = SimpleNamespace(model=model, memory=memory, seqs={}, held={}, status=status)
    lives = [True]

    def send(peer: bytes, message: Message) -> bool:
        if not lives[0]:
            receiver.forget("a")
        return lives[0]

    receiver = ReportReceiver(state, send)  # type: ignore[arg-type]
    session, meta = SimpleNamespace(worker="a", peer=b"1"), {"steps": 1, "tokens": 1}
    receiver.offer(session, Message(Kind.OFFER, 1, 0, 0, meta=meta))  # type: ignore[arg-type]
    lives[0] = False
    receiver.offer(session, Message(Kind.OFFER, 2, 0, 0, meta=meta))  # type: ignore[arg-type]
    assert not receiver._uploads
