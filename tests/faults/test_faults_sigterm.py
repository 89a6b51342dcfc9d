"""SIGTERM for a replica of an elastic run: the first one lets it leave, the second one ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import serving_command
from elastic_replicas import attach
from elastic_replicas import registry as registry
from fault_replicas import (
    connect,
    take_inner_step,
    wait_for,
)
from registries import Host
from support_paths import FOLDERS
from workers import Pool

from diloco_comm import SyncError

WAITS = {"suspect_after": 6.0, "founding_wait": 2.0}


def forked_children_end() -> set[int]:
    """Return how children such as a DataLoader's end, which get SIGTERM as soon as they exist."""

    def fork() -> int:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        return child

    with ThreadPoolExecutor(1) as thread:
        children = [child for _ in range(5) for child in (fork(), thread.submit(fork).result())]
    return {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}


def live(
    rank: int, world: int, store: tuple[str, int], registry: str
) -> tuple[int, tuple[int, ...], set[int]]:
    signs = connect(store)
    diloco, model, optimizer = attach(registry, rank, min_replicas=2 - rank, **WAITS)
    children = forked_children_end()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signs.set(f"begun {rank}", "now")
    while not diloco.is_done and diloco.members != (1,):
        take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
        time.sleep(0.01)
    end = diloco.inner_step, diloco.members, children
    diloco.close()
    # Nothing of this package is in the way any more.
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN
    return end


def test_the_first_signal_is_a_leave_at_the_next_boundary(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(2, init_group=False)
    pool.submit(live, pool.store, registry.address)
    wait_for(pool, ["begun 0", "begun 1"])
    pool.kill(0, signal.SIGTERM)
    (step, _, children), (_, members, _) = pool.collect(timeout=60)
    assert step % 4 == 0 and members == (1,) and children == {-signal.SIGTERM}


LOADER = f"""
import sys, time
sys.path[:0] = {FOLDERS!r}
from torch.utils.data import DataLoader
from elastic_replicas import attach
from fault_replicas import take_inner_step

class Samples:
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        if index > 0 and sys.argv[2] == "late":
            time.sleep(60)
        return index

def break_off(*error):
    raise RuntimeError("the hook has failed")

if sys.argv[2] == "with a hook that fails":
    sys.excepthook = break_off
diloco, model, optimizer = attach(sys.argv[1], 0, {{"sync_every": 10**6}})
for step, _ in enumerate(DataLoader(Samples(), num_workers=1), 1):
    take_inner_step(model, optimizer, 0, step)
    if step == 1:
        print("begun", flush=True)
"""


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("samples", ["late", "with a hook that fails"])
def test_the_death_of_a_worker_of_a_data_loader_is_named(registry: Host, samples: str) -> None:
    """As from systemd, which signals all processes of a service by default.

    If the worker dies while it passes a sample on, the program's error is an error of their
    connection, and torch's handler may raise its own error later, in ``sys.excepthook``.
    """
    command = [sys.executable, "-c", LOADER, registry.address, samples]
    with serving_command(command, stderr=subprocess.PIPE) as (program, line):
        assert line == "begun"
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        for pid in (program.pid, *map(int, children)):
            os.kill(pid, signal.SIGTERM)
        _, errors = program.communicate(timeout=60)
    assert program.returncode == 1, errors
    assert samples != "late" or "DataLoader worker" in errors, errors
    advice = "let SIGTERM reach the launcher alone (systemd: KillMode=mixed)"
    assert errors.count(advice) == 1, errors


def hold_out(rank: int, world: int, store: tuple[str, int], registry: str) -> None:
    """Train without a boundary; a wish to leave waits for one."""
    signs = connect(store)
    diloco, model, optimizer = attach(registry, rank, {"sync_every": 10**6})
    signs.set("begun", "now")
    while not diloco.is_done:
        take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
        time.sleep(0.01)
        if diloco._elastic is not None and diloco._elastic.group._driver.state.is_leaving:
            signs.set("leaving", "now")


def test_the_second_signal_ends_the_process(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(1, init_group=False)
    pool.submit(hold_out, pool.store, registry.address)
    wait_for(pool, ["begun"])
    pool.kill(0, signal.SIGTERM)
    wait_for(pool, ["leaving"])
    pool.kill(0, signal.SIGTERM)
    pool.collect(timeout=60, expect_exit={0})


def wait_for_others(rank: int, world: int, store: tuple[str, int], registry: str) -> str:
    signs = connect(store)
    signs.set("waits", "now")
    try:
        attach(registry, rank, min_replicas=2, quorum_wait=60.0)
    except SyncError as error:
        return f"{error.stage}: {error}"
    return ""


@pytest.mark.nightly("2 s; it differs from a replica that trains in that it has not begun")
def test_a_replica_that_waits_for_others_ends_at_once(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(1, init_group=False)
    pool.submit(wait_for_others, pool.store, registry.address)
    wait_for(pool, ["waits"])
    time.sleep(2.0)
    pool.kill(0, signal.SIGTERM)
    (text,) = pool.collect(timeout=30)
    assert text == "left: this replica was asked to leave before it had joined its group"
