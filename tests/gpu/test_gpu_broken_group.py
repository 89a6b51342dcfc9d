"""A group on a device whose calls block or raise: connecting, closing and exit end in time."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import run_python
from device_training import METHODS, Replica
from support_paths import FOLDERS
from test_gpu_streams import on_streams, use_streams

from diloco_comm import _C
from diloco_comm.base.errors import SyncError
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.nccl import group as nccl_group
from diloco_comm.exchange.nccl.streams import StreamDriver

# A timeout that no test lives to see: a wait for it fails the test.
HALF_AN_HOUR = 1800.0


class BrokenGroup:
    """Its calls block for good, or raise, as those of NCCL may; notes the calls that have begun."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.begun: list[str] = []
        self.is_released = threading.Event()

    def call(self, name: str) -> Any:
        self.begun.append(name)
        if self.error:
            raise RuntimeError(self.error)
        self.is_released.wait()

    def alltoall_base(self, *_: Any) -> Any:
        return self.call("alltoall")

    def abort(self) -> None:
        self.call("abort")

    def shutdown(self) -> None:
        self.call("shutdown")


def driver_of(group: Any, here: torch.device) -> StreamDriver:
    return StreamDriver(here, group, 0, 2, 60.0, "", _C.Engine(60.0))


def in_the_first_collective(rank: int, world: int, library: str, error: str) -> list[Any]:
    here = use_streams(rank, "lagging", library)
    group = BrokenGroup(error)
    driver = driver_of(group, here)
    with pytest.raises(SyncError) as info:
        driver.connect(0.5)
    # Close returns while the call blocks: the group is released below.
    driver.close(HALF_AN_HOUR)
    assert info.value.stage == "connect" and str(info.value) == driver.failure
    calls = list(group.begun)
    group.error = "late"
    group.is_released.set()
    deadline = time.monotonic() + 60.0
    while "abort" not in group.begun and time.monotonic() < deadline:
        time.sleep(0.01)
    return [str(info.value), calls, group.begun[-1]]


def test_a_first_collective_that_blocks_is_left_behind(replicas, stand_in) -> None:
    """NCCL meets the other replicas in it, and waits for them for ever; the thread ends it."""
    (result,) = replicas(1).run(in_the_first_collective, stand_in, "", timeout=30)
    message = "the replicas' devices did not connect within 0.5 s"
    assert result == [message, ["alltoall"], "abort"]


def test_a_first_collective_that_raises_is_a_sync_error(replicas, stand_in) -> None:
    error = "NCCL error in: x.cpp:7\nremote process exited"
    (result,) = replicas(1).run(in_the_first_collective, stand_in, error, timeout=30)
    message = "the replicas' devices did not connect: NCCL error in: x.cpp:7 remote process exited"
    assert result == [message, ["alltoall", "abort"], "abort"]


class Busy(StreamDriver):
    """Has an exchange under way that never ends, as with a peer that is dead."""

    def _is_settled(self) -> bool:
        return False


def exchange_of(group: Any, driver_type: type[StreamDriver], here: torch.device) -> Exchange:
    """Make an exchange with this group; closing takes two seconds at most."""
    exchange = Exchange(dist.HashStore(), 0, [0], timeout=2.0, device=here, collectives="nccl")
    exchange._driver = driver_type(here, group, 0, 2, 60.0, "", exchange.engine)
    return exchange


def closed_with_a_broken_group(rank: int, world: int, library: str, name: str) -> list[Any]:
    here = use_streams(rank, "lagging", library)
    group = BrokenGroup()
    exchange = exchange_of(group, Busy if name == "abort" else StreamDriver, here)
    begin = time.monotonic()
    exchange.close()
    elapsed = time.monotonic() - begin
    # Close has returned while the call blocks, and not before its two seconds.
    group.is_released.set()
    return [group.begun, elapsed > 1.9]


@pytest.mark.parametrize("name", ["shutdown", "abort"])
def test_closing_has_one_limit_for_all(name: str, replicas, stand_in) -> None:
    """What is under way, the end of the group, and the engine share the seconds of ``close``."""
    result = replicas(1).run(closed_with_a_broken_group, stand_in, name, timeout=30)
    assert result == [[[name], True]]


def test_a_forked_process_calls_nothing() -> None:
    """The helper thread and the communicator are those of the parent process."""
    thread = nccl_group.HelperThread(torch.device("cpu", 0))
    assert thread.begin(lambda: 7).join(10.0)
    child = os.fork()
    if child == 0:
        call = thread.begin(lambda: 7)
        os._exit(0 if call.join(0.0) and call.error is not None else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_helper_thread_ends_with_its_owner() -> None:
    owner = nccl_group.HelperThread(torch.device("cpu", 0))
    thread = owner._thread
    del owner
    thread.join(10.0)
    assert not thread.is_alive()


AT_EXIT = """
import atexit, sys, threading

# Functions for the exit run in reverse order: this one after those of the package.
atexit.register(lambda: print(*group.begun, flush=True))

import test_gpu_broken_group
from diloco_comm.exchange.nccl.streams import StreamDriver

here = test_gpu_broken_group.use_streams(0, "lagging", sys.argv[1])
group = test_gpu_broken_group.BrokenGroup()
kind = test_gpu_broken_group.Busy if sys.argv[2] == "abort" else StreamDriver
exchange = test_gpu_broken_group.exchange_of(group, kind, here)


def refuse(*arguments, **named):
    raise RuntimeError("can't create new thread at interpreter shutdown")


@atexit.register
def begin():
    # What Python 3.12 does once the interpreter ends.
    for name in ("_start_new_thread", "_start_joinable_thread"):
        setattr(threading, name, refuse)
"""


@pytest.mark.nightly("7 s each; the first tier has the limit of closing")
@pytest.mark.parametrize("name", ["shutdown", "abort"])
def test_a_process_ends_although_its_group_does_not(name: str, stand_in: str) -> None:
    """NCCL waits for the device, which may never do what it was given."""
    paths = [*FOLDERS, str(Path(__file__).parent)]
    done = run_python(
        "-c",
        AT_EXIT,
        stand_in,
        name,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr


def with_an_abort(rank: int, world: int, library: str, error: str) -> list[Any]:
    """One of two replicas stops, and the abort of the other one blocks, or raises."""
    from lagging_group import LaggingGroup

    broken = BrokenGroup(error)
    here = use_streams(rank, "lagging", library)
    store = dist.PrefixStore(f"broken abort {bool(error)}", dist.group.WORLD.get_group_store())
    members = {"store": store, "replica": rank, "num_replicas": world, "timeout": HALF_AN_HOUR}
    replica = Replica(rank, here, **members, **on_streams(METHODS["diloco"]))
    replica.steps(0, 7)
    before = replica.diloco.outer_hash()
    driver: Any = replica.diloco.exchange._driver
    if rank == 1:
        driver.group.enqueue("nothing", lambda: time.sleep(10))
        replica.steps(7, 8)
        dist.barrier()
        # Ends what the stand-in has under way.
        LaggingGroup.abort(driver.group)
        return []
    real = driver.group.abort

    def abort() -> None:
        real()
        broken.abort()

    driver.group.abort, driver.timeout = abort, 1.0
    failures = []
    replica.steps(7, 8)
    for call in (lambda: replica.diloco._rounds.settle_verdicts(8), replica.diloco.step):
        try:
            call()
        except SyncError as error:
            failures.append(str(error))
    dist.barrier()
    is_kept = replica.diloco.outer_hash() == before
    replica.diloco.close()
    assert broken.begun == ["abort"]
    return [is_kept, *failures]


@pytest.mark.nightly("6 s each; the error is the more difficult case", but=["NCCL error: timeout"])
@pytest.mark.parametrize("error", ["", "NCCL error: timeout"])
def test_an_abort_that_does_not_end_well(error: str, replicas, stand_in) -> None:
    """The host waits for it for some seconds, and the round has failed all the same."""
    result = replicas(2).run(with_an_abort, stand_in, error)[0]
    assert result[0] is True and "not done after 1 s" in result[1], result


def closed_early(rank: int, world: int, library: str) -> list[Any]:
    """Rank 0 closes while the device of rank 1 is not yet there."""
    here = use_streams(rank, "lagging", library)
    store = dist.PrefixStore("closed early", dist.group.WORLD.get_group_store())
    members = {"store": store, "replica": rank, "num_replicas": world, "timeout": HALF_AN_HOUR}
    replica = Replica(rank, here, **members, **on_streams(METHODS["diloco"]))
    replica.steps(0, 7)
    replica.diloco.outer_hash()
    if rank == 1:
        replica.diloco.exchange._driver.group.enqueue("nothing", lambda: time.sleep(2))
    replica.steps(7, 8)
    if rank == 0:
        replica.diloco.close()
        return ["closed"]
    replica.diloco._rounds.settle_verdicts(8)
    applied = [m.is_applied for m in replica.diloco.metrics()]
    replica.diloco.close()
    return applied


@pytest.mark.nightly("11 s of waiting; the first tier has the limit of closing")
def test_close_finishes_what_is_under_way(replicas, stand_in) -> None:
    assert replicas(2).run(closed_early, stand_in) == [["closed"], [True, True]]
