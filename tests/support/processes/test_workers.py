"""The pool itself: results, errors, deaths, hangs, reuse, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from workers import WorkerError


def total_of_ranks(rank: int, world: int, scale: float) -> tuple[float, int, int]:
    value = torch.tensor([rank * scale])
    dist.all_reduce(value)
    return value.item(), os.getpid(), torch.get_num_threads()


def fail_on(rank: int, world: int, bad: int) -> int:
    if rank == bad:
        raise KeyError("lost")
    return rank


def die_on(rank: int, world: int, bad: int) -> int:
    # The others may still be making connections, and need this one for it.
    store = dist.PrefixStore("die_on", dist.distributed_c10d._get_default_store())
    store.set(str(rank), "")
    if rank == bad:
        store.wait([str(peer) for peer in range(world)])
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def hang(rank: int, world: int) -> None:
    if rank == 0:
        time.sleep(600)


def tensor_of(rank: int, world: int) -> torch.Tensor:
    return torch.full((3,), float(rank))


def set_variable(rank: int, world: int) -> str | None:
    before = os.environ.get("DILOCO_COMM_REPORT_S")
    os.environ["DILOCO_COMM_REPORT_S"] = "2"
    return before


@pytest.mark.parametrize("turn", [1, 2])
def test_a_variable_ends_with_its_test(workers, turn: int) -> None:
    assert workers(2).run(set_variable) == [None, None]
    assert workers(2).run(set_variable) == ["2", "2"]


def test_pool_sizes_share_processes(workers) -> None:
    first = workers(2).run(total_of_ranks, 10.0)
    assert [value for value, _, _ in first] == [10.0, 10.0]
    assert all(threads == 1 for _, _, threads in first)
    three = workers(3).run(total_of_ranks, 1.0)
    assert [value for value, _, _ in three] == [3.0] * 3
    assert [pid for _, pid, _ in three[:2]] == [pid for _, pid, _ in first]
    assert workers(2).run(total_of_ranks, 5.0)[0][0] == 5.0


def test_worlds_can_be_entered_again(workers) -> None:
    for _ in range(3):
        for world in (2, 1, 3):
            values = workers(world).run(total_of_ranks, 1.0, timeout=30)
            assert [value for value, _, _ in values] == [sum(range(world))] * world


def test_tensors_come_back_by_value(workers) -> None:
    assert torch.equal(workers(2).run(tensor_of)[1], torch.ones(3))


def test_exception_keeps_type_and_process(workers) -> None:
    pids = [pid for _, pid, _ in workers(2).run(total_of_ranks, 1.0)]
    with pytest.raises(KeyError, match="lost") as info:
        workers(2).run(fail_on, 1)
    assert "fail_on" in str(info.value.__cause__)
    assert [pid for _, pid, _ in workers(2).run(total_of_ranks, 1.0)] == pids


@pytest.mark.nightly("7 s of waiting; the first tier has workers that die")
def test_hang_shows_stack_and_pool_recovers(workers) -> None:
    with pytest.raises(WorkerError, match="in hang"):
        workers(2).run(hang, timeout=2)
    assert workers(2).run(total_of_ranks, 1.0)[0][0] == 1.0


def test_fresh_workers_may_die(fresh_workers) -> None:
    assert fresh_workers(3).run(die_on, 2, expect_exit={2}) == [0, 1, None]
    with pytest.raises(WorkerError, match="died with -9"):
        fresh_workers(2).run(die_on, 0)


def test_killed_from_outside(fresh_workers) -> None:
    pool = fresh_workers(2, init_group=False)
    pool.submit(hang)
    time.sleep(0.2)
    pool.kill(0)
    assert pool.collect(expect_exit={0}) == [None, None]


@pytest.mark.nightly("8 s; about the processes of the tests")
def test_no_process_outlives_the_test_process(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from workers import Crew
            from zygote import Zygote
            crew = Crew(Zygote())
            print(*[w.pid for w in crew.first(2)], crew.zygote.process.pid, flush=True)
            time.sleep(600)
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_is_running, pids))


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
