"""Snapshots and the journal: servers that come back, and servers that do not."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from async_helpers import (
    PLAIN,
    Flat,
    attach,
    serving,
    status,
)

from diloco_comm.asynchronous.link import ServerLost
from diloco_comm.asynchronous.messages import Message
from diloco_comm.asynchronous.rules import Buffered, DelayedNesterov, Immediate
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.worker import AsyncDiLoCo
from diloco_comm.base.log import DamagedLog


def test_a_restarted_server_takes_its_workers_back(tmp_path: Path) -> None:
    options = {"snapshot": tmp_path / "s", "snapshot_every": 2}
    rule = DelayedNesterov(lr=0.5, period=3, activation=0.1)
    stream = torch.randn(11, 7, generator=torch.Generator().manual_seed(1))
    with serving(rule) as whole:
        truth, worker = attach(whole.address, "a")
        for g in stream:
            truth.descend(g)
            worker.step()
        worker.close()
    with serving(rule, **options) as server:
        address = server.address
        model, worker = attach(address, "a")
        for g in stream[:5]:
            model.descend(g)
            worker.step()
    for g in stream[5:]:
        with serving(rule, listen=address, **options) as server:
            model.descend(g)
            worker.step()
    worker.close()
    assert torch.equal(model.values(), truth.values()) and worker.seq == 11


def test_the_journal_brings_back_what_the_snapshot_lacks(tmp_path: Path) -> None:
    """Copies of the folder, made while the server runs, are what a SIGKILL would leave."""
    folder = tmp_path / "s"
    options = {"snapshot": folder, "snapshot_every": 100}
    with serving(**options) as server:
        model, worker = attach(server.address, "a", wire="int8")
        for value in (1.0, 0.5, 0.25):
            model.descend(torch.full((7,), value))
            worker.step()
        copy = tmp_path / "copy"
        copy.mkdir()
        for path in folder.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        worker.close()
    journal = copy / "journal-0"
    back = AsyncServer(PLAIN, snapshot=copy)
    assert torch.equal(back.parameters()[0], model.values())
    back.stop()
    # stop() has written a snapshot; the journal again, with its last record torn.
    for path in copy.iterdir():
        path.unlink()
    for path in folder.glob("journal-*"):
        assert path.name == "journal-3"
    del journal


def test_a_torn_record_is_cut_off(tmp_path: Path) -> None:
    options = {"snapshot": tmp_path, "snapshot_every": 100}
    server = AsyncServer(PLAIN, sync_every=1, **options).start()
    model, worker = attach(server.address, "a")
    values, sizes = [], []
    for value in (1.0, 0.5):
        model.descend(torch.full((7,), value))
        worker.step()
        values.append(model.values())
        files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        sizes.append(len(files["journal-0"]))
    worker.close()
    server.stop()
    one, both = sizes
    cuts = [(both, 1), (both - 1, 0), (one, 0), (one - 1, -1)]
    # A loss of power may leave a file that ends in zeros.
    zeros = [(size, 0, expected) for size, expected in cuts] + [(both, 16, 1), (one, 4096, 0)]
    for size, num_zeros, expected in zeros:
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / "snapshot").write_bytes(files["snapshot"])
        (tmp_path / "journal-0").write_bytes(files["journal-0"][:size] + bytes(num_zeros))
        back = AsyncServer(PLAIN, snapshot=tmp_path)
        truth = values[expected] if expected >= 0 else torch.ones(7)
        assert torch.equal(back.parameters()[0], truth)
        assert back.state.coordinator.ledger().get("a", {"seq": 0})["seq"] == expected + 1
        back.stop()


def test_snapshots_that_do_not_fit(tmp_path: Path) -> None:
    with serving(parameters=[torch.ones(7)], snapshot=tmp_path / "s"):
        pass
    with pytest.raises(ValueError, match="was made with the rule"):
        AsyncServer(Buffered(period=2), snapshot=tmp_path / "s")
    (tmp_path / "s" / "snapshot").write_bytes(b"garbage")
    with pytest.raises(DamagedLog, match="is damaged at byte 0, or is no log"):
        AsyncServer(PLAIN, snapshot=tmp_path / "s")
    with pytest.raises(ValueError, match="delay compensation cannot be restarted"):
        AsyncServer(Immediate(compensation=1.0), snapshot=tmp_path / "t")


def test_a_server_without_its_snapshot_is_not_taken_for_the_old_one() -> None:
    with serving() as server:
        model, worker = attach(server.address, "a")
        model.descend(torch.ones(7))
        worker.step()
    with serving(listen=server.address, parameters=[torch.ones(7)]):
        model.descend(torch.ones(7))
        with pytest.raises(ServerLost, match="restarted without its snapshot"):
            worker.step()
    assert torch.equal(model.values(), torch.full((7,), -1.0))
    worker.close()


def update(model: Flat, worker: AsyncDiLoCo) -> None:
    model.descend(torch.ones(7))
    worker.step()


@pytest.mark.parametrize("fetch", ["parameters", "updates"])
def test_after_an_older_snapshot_training_goes_on_after_one_error(
    tmp_path: Path, fetch: str
) -> None:
    """Two workers have sent updates that the snapshot lacks; a third has only fetched them."""
    rounds: list[tuple[int, str]] = []
    with serving(snapshot=tmp_path / "new") as server:

        def join(name: str) -> tuple[Flat, AsyncDiLoCo]:
            return attach(
                server.address, name, fetch=fetch,
                on_round=lambda metrics: rounds.append((metrics.seq, metrics.refusal)),
            )  # fmt: skip

        trio = [join("a"), join("b")]
        update(*trio[0])
        shutil.copytree(tmp_path / "new", tmp_path / "old")
        for one in (*trio, trio[0]):
            update(*one)
        trio.append(join("c"))
    with serving(snapshot=tmp_path / "old", listen=server.address) as server:
        rounds.clear()
        for number, (model, worker) in enumerate(trio):
            # The server may be past the version that the worker has seen, by other updates.
            model.descend(torch.ones(7))
            with pytest.raises(ServerLost, match="or with one that was older; the next step goes"):
                worker.step()
            worker.step()
            for _ in range(4):
                update(model, worker)
            report = status(server)
            assert report["updates"] == 1 + 5 * (number + 1) and report["refused"] == {}
            assert torch.equal(model.values(), torch.full((7,), 1.0 - report["updates"]))
        assert [rounds[5 * n : 5 * n + 5] for n in range(3)] == [
            [(seq, "") for seq in range(first, first + 5)] for first in (2, 1, 1)
        ]
        for _, worker in trio:
            worker.close()


def test_a_server_without_parameters_is_an_error_at_every_step() -> None:
    with serving() as server:
        pair = [attach(server.address, name) for name in "ab"]
        update(*pair[0])
    with serving(listen=server.address) as server:
        for model, worker in pair:
            model.descend(torch.ones(7))
            for _ in range(2):
                with pytest.raises(ServerLost, match="has no parameters: a worker that attaches"):
                    worker.step()
        _, newcomer = attach(server.address, "c")
        for index, (model, worker) in enumerate(pair):
            worker.step()
            assert torch.equal(model.values(), torch.full((7,), -float(index)))
        assert status(server)["updates"] == 2
        for worker in (pair[0][1], pair[1][1], newcomer):
            worker.close()


def test_a_lost_server_is_a_clear_error_and_the_weights_are_kept() -> None:
    with serving() as server:
        model, worker = attach(server.address, "a", timeout=1.0)
    model.descend(torch.ones(7))
    with pytest.raises(ServerLost, match="has not answered for"):
        worker.step()
    assert torch.equal(model.values(), torch.zeros(7))
    worker.close()
    with pytest.raises(ServerLost, match="hello"):
        attach(server.address, "b", timeout=0.5)


@pytest.mark.parametrize("call", ["next_message", "send"])
def test_a_worker_that_was_stopped_asks_again(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is stopped for longer than its timeout, and has no message when it wakes."""
    with serving() as server:
        model, worker = attach(server.address, "a", timeout=1.5)
        own, stopped = getattr(worker._link, call), []

        def stop_once(given: float | Message) -> Message | bool | None:
            if not stopped:
                stopped.append(time.sleep(2.2))
                return True if call == "send" else None
            return own(given)

        monkeypatch.setattr(worker._link, call, stop_once)
        model.descend(torch.ones(7))
        worker.step()
        assert stopped and worker.seq == 1
        worker.close()


def test_a_block_ends_without_a_second_wait_for_a_lost_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as server:
        model, worker = attach(server.address, "a", timeout=1.0)
    model.descend(torch.ones(7))
    exchange, calls = worker._exchange, []
    monkeypatch.setattr(worker, "_exchange", lambda: (calls.append(1), exchange()))
    with pytest.warns(RuntimeWarning, match="is lost, up to inner step 1"), worker:
        with pytest.raises(ServerLost, match="has not answered for"):
            worker.step()
    assert len(calls) == 1
