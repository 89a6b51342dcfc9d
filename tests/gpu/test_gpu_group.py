"""The group and the streams that an exchange on a device has for itself."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import devices
import pytest
import torch
import torch.distributed as dist
from device_training import METHODS, Replica, train
from devices import DEVICES
from problems import equal
from test_gpu_streams import on_streams, use_streams
from workers import Pool

from diloco_comm import _C, ops
from diloco_comm.base.errors import SyncError
from diloco_comm.base.memory import GIVEN_UP, Ballot, current
from diloco_comm.exchange.nccl import group as nccl_group
from diloco_comm.exchange.nccl import streams
from diloco_comm.exchange.nccl.streams import StreamDriver

# Of torch's pool; a device has as many of them.
POOL_SIZE = 32
VARIABLES = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


def read_in_c(name: str) -> str | None:
    """Read an environment variable as torch's C++ does."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value = getenv(name.encode())
    return None if value is None else value.decode()


class RecordingNCCL:
    """Stands in for ``ProcessGroupNCCL``, which a torch for CPUs lacks; notes what it is given."""

    class Options:
        def __init__(self) -> None:
            self.config = type("Config", (), {})()

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.seen: dict[str, str | None] = {}
        self.options: Any = None

    def __call__(self, store: dist.Store, rank: int, size: int, options: Any) -> Any:
        self.seen, self.options = {name: read_in_c(name) for name in VARIABLES}, options
        if self.fails:
            raise RuntimeError("no device")
        return dist.ProcessGroupGloo(store, rank, size, options._timeout)


@pytest.mark.parametrize("before", [None, "3"])
@pytest.mark.parametrize("fails", [False, True])
def test_torch_is_told_to_end_no_process(
    fails: bool, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the group is constructed, and at no other time."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
    nccl = RecordingNCCL(fails)
    nccl_type = type("NCCL", (), {"Options": nccl.Options, "__new__": lambda _, *args: nccl(*args)})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl_type, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    arguments = dist.HashStore(), 0, 1, torch.device("cpu", 0), 30.0
    if fails:
        with pytest.raises(RuntimeError, match="no device"):
            nccl_group.make_group(*arguments)
    else:
        assert nccl_group.make_group(*arguments).size() == 1
    assert nccl.seen == {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert nccl.options._timeout.total_seconds() > 2 * 30.0
    assert [read_in_c(name) for name in VARIABLES] == [before, before]
    assert [os.environ.get(name) for name in VARIABLES] == [before, before]


def connected(rank: int, world: int, library: str) -> tuple[list[str], list[str]]:
    """The collectives that attach makes, and those of the first round."""
    here = use_streams(rank, "lagging", library)
    replica = Replica(rank, here, **on_streams(METHODS["diloco"]))
    calls = replica.diloco.exchange._driver.group.calls
    at_attach = list(calls)
    replica.steps(0, 5)
    replica.diloco.close()
    return at_attach, calls[len(at_attach) :]


@pytest.mark.parametrize("world", [2, 3])
def test_attach_makes_every_kind_of_collective(world: int, replicas, stand_in) -> None:
    """A kind that the first round makes, and attach has not, would connect in the round."""
    for at_attach, in_round in replicas(world).run(connected, stand_in):
        assert set(in_round) == set(at_attach) == {"alltoall", "allgather"}
        # Chunks and votes are gathered, which are of different sizes; with two only votes are.
        assert at_attach.count("allgather") == (2 if world > 2 else 1)


def alone_in_connecting(rank: int, world: int, library: str) -> str:
    """Rank 0 connects, and rank 1 does not."""
    from lagging_group import LaggingGroup

    here = use_streams(rank, "lagging", library)
    store = dist.PrefixStore("alone", dist.group.WORLD.get_group_store())
    group: Any = LaggingGroup(store, rank, world, here, 60.0)
    driver = StreamDriver(here, group, rank, world, 60.0, "", _C.Engine(60.0))
    message = ""
    if rank == 0:
        with pytest.raises(SyncError) as info:
            driver.connect(1.0)
        message = f"{info.value.stage}: {info.value}"
        assert driver.failure and group.is_aborted
    dist.barrier()
    driver.close()
    return message


def test_connecting_ends_in_time(replicas, stand_in) -> None:
    message = replicas(2).run(alone_in_connecting, stand_in)[0]
    assert message == "connect: the replicas' devices did not connect within 1 s"


def limits_of_connecting(rank: int, world: int, library: str, join: float) -> list[float]:
    """The seconds that NCCL has in a first group, and after a change of the group."""
    here = use_streams(rank, "lagging", library)
    limits: list[float] = []
    connect = StreamDriver.connect

    def recorded(driver: StreamDriver, timeout: float) -> None:
        limits.append(timeout)
        connect(driver, timeout)

    StreamDriver.connect = recorded  # type: ignore[method-assign]
    try:
        store = dist.PrefixStore(f"limits {join:g}", dist.group.WORLD.get_group_store())
        members = {"store": store, "replica": rank, "num_replicas": world}
        times = {"timeout": 90.0, "join_timeout": join}
        replica = Replica(rank, here, **members, **times, **on_streams(METHODS["diloco"]))
        replica.diloco.change_group(list(range(world)))
        replica.diloco.close()
    finally:
        StreamDriver.connect = connect  # type: ignore[method-assign]
    return limits


@pytest.mark.parametrize(("join", "later"), [(5.0, 30.0), (45.0, 45.0), (300.0, 90.0)])
def test_a_first_group_has_the_timeout_to_connect(
    join: float, later: float, replicas, stand_in
) -> None:
    """NCCL may start cold in a first group; a change of the group holds up survivors."""
    limits = replicas(2).run(limits_of_connecting, stand_in, join)
    assert limits == [[90.0, later]] * 2


def beside(rank: int, world: int, device: str, library: str, backend: str) -> list[Any]:
    """Train a model on the second device, with the first one being the current one."""
    use_streams(rank, device, library)
    there = torch.device(device, 1)
    results = []
    for name in ("diloco", "eager"):
        arguments = {**METHODS[name], "lanes": 1}
        expected = train(rank, torch.device("cpu"), 13, **arguments)
        own = on_streams(arguments) if backend == "nccl" else arguments
        given = train(rank, there, 13, **own)
        results.append(equal(expected, given))
        replica = Replica(rank, there, **own)
        indices = []
        for step in range(9):
            replica.steps(step, step + 1)
            indices.append(torch.accelerator.current_device_index())
        replica.diloco.close()
        results.append(indices)
    return results


TWO_GPUS = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    ],
)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("device", ["lagging", TWO_GPUS])
def test_the_current_device_stays(device: str, backend: str, replicas, stand_in) -> None:
    world = 1 if device == "cuda" else 2
    results = replicas(world).run(beside, device, stand_in, backend)
    assert results == [[True, [0] * 9] * 2] * world


def grids(rank: int, world: int, library: str) -> dict[str, set[int]]:
    """The bounds on the grids of all operators in two rounds, by operator."""
    here = use_streams(rank, "lagging", library)
    streams.side_blocks = lambda device: 7
    replica = Replica(rank, here, **on_streams(METHODS["diloco"]))
    bounds: dict[str, set[int]] = {}

    def recorded(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            bounds.setdefault(name, set()).add(kwargs.get("max_blocks", 0))
            call(*args, **kwargs)

        return run

    for name in ("encode", "reduce", "digest", "outer_step"):
        setattr(ops, name, recorded(name, getattr(ops, name)))
    replica.steps(0, 9)
    replica.diloco.close()
    return bounds


def in_steady_state(
    rank: int, world: int, library: str, name: str, more: dict[str, Any]
) -> tuple[dict[str, set[int]], list[int], list[int]]:
    """Look at exchanges after their first rounds.

    Returns:
        The bounds on the grids of operators, the allocations, and the events that are made anew.
    """
    here = use_streams(rank, "lagging", library)
    streams.side_blocks = lambda device: 7
    replica = Replica(rank, here, **on_streams(METHODS[name]), **more)
    bounds: dict[str, set[int]] = {}
    allocated: list[int] = []
    made: list[int] = []
    is_posting = False

    def recorded(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            if is_posting:
                bounds.setdefault(name, set()).add(kwargs.get("max_blocks", 0))
            call(*args, **kwargs)

        return run

    post, take_event = StreamDriver.post, StreamDriver.take_event

    def counted_post(*args: Any) -> Any:
        nonlocal is_posting
        before, is_posting = torch.ops.lagging.num_allocations(), True
        events = post(*args)
        allocated.append(torch.ops.lagging.num_allocations() - before)
        is_posting = False
        return events

    def counted_event(driver: StreamDriver) -> torch.Event:
        made.append(not driver._free_events)
        return take_event(driver)

    for operator in ("encode", "decode", "reduce", "digest"):
        setattr(ops, operator, recorded(operator, getattr(ops, operator)))
    replica.steps(0, 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamDriver, "post", counted_post)
        patch.setattr(StreamDriver, "take_event", counted_event)
        bounds.clear()
        replica.steps(9, 20)
    replica.diloco.close()
    return bounds, allocated, made


OWNED = {"decode": {7}, "encode": {7}, "digest": {7}}


@pytest.mark.parametrize(
    ("name", "world", "more", "bounds"),
    [
        ("diloco", 3, {"on_nonfinite": "reset"}, {"reduce": {7}, "digest": {7}}),
        ("owned", 5, {}, OWNED),
    ],
)
def test_an_exchange_allocates_nothing_and_keeps_its_bound(
    name: str,
    world: int,
    more: dict[str, Any],
    bounds: dict[str, set[int]],
    fresh_workers: Callable[..., Pool],
    stand_in: str,
) -> None:
    """Five replicas have a mean on another wire than their payloads."""
    results = fresh_workers(world).run(in_steady_state, stand_in, name, more)
    for given, allocated, made in results:
        assert given == bounds
        assert len(allocated) >= 2 and not any(allocated), allocated
        assert len(made) >= 4 * len(allocated) and not any(made), made


def test_the_side_stream_leaves_room(fresh_workers, stand_in) -> None:
    """Reduce and digest, which run beside the training; not what runs on the training's stream.

    The comparison of the replicas' data takes digests on the training's stream.
    """
    pool = fresh_workers(3)
    expected = {"encode": {0}, "reduce": {7}, "digest": {0, 7}, "outer_step": {0}}
    assert pool.run(grids, stand_in) == [expected] * 3


@pytest.mark.parametrize(("multiprocessors", "blocks"), [(132, 99), (108, 81), (1, 1)])
def test_a_quarter_of_the_device(
    multiprocessors: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert streams.side_blocks(torch.device("cuda", 0)) == blocks
    assert streams.side_blocks(torch.device("cpu")) == 0


def own_streams(rank: int, world: int, device: str, library: str) -> list[bool]:
    here = devices.use(device, library)
    pool = [torch.Stream(here) for _ in range(POOL_SIZE)]
    owned = [_C.OwnStream(here) for _ in range(3)]
    ids = [own.stream.stream_id for own in owned]
    checks = [
        len({*ids, *(stream.stream_id for stream in pool)}) == POOL_SIZE + 3,
        all(own.stream.device == here for own in owned),
    ]
    # Work on one of them is done on it, and memory that it used comes back.
    ones = torch.ones(1000, device=here)
    torch.accelerator.synchronize()
    with current(owned[0].stream):
        ones.mul_(2.0)
    checks.append(ones.device == here)
    torch.accelerator.current_stream(here).wait_stream(owned[0].stream)
    checks.append(float(ones.cpu().sum()) == 2000.0)
    del owned
    again = [_C.OwnStream(here) for _ in range(3)]
    checks.append(sorted(own.stream.stream_id for own in again) == sorted(ids))
    return checks


@pytest.mark.parametrize("device", DEVICES)
def test_streams_of_our_own(device: str, replicas, stand_in) -> None:
    """They are none of torch's pool, are not shared, and are used again."""
    assert replicas(1).run(own_streams, device, stand_in) == [[True] * 5]


def flag_behind_a_vote(rank: int, world: int, device: str, library: str) -> list[int]:
    """Set the flag on the host while a vote is enqueued and the device is busy before the vote."""
    here = devices.use(device, library)
    driver = StreamDriver(here, None, 0, 1, 60.0, "", _C.Engine(60.0))
    ballot, late = Ballot.make(1, here), torch.Event(here)
    with current(driver.side):
        # The first vote loads the kernels, which may wait for the device.
        driver._vote(ballot)
        torch.accelerator.synchronize()
        before = int(ballot.host_given_up)
        if device == "cuda":
            torch.cuda._sleep(1 << 31)
        else:
            from lagging_group import LaggingStream

            LaggingStream(here).enqueue("nothing", lambda: time.sleep(1.0)).synchronize()
        late.record(driver.side)
        driver._vote(ballot)
    driver._given_up.fill_(GIVEN_UP)
    was_busy = not late.query()
    torch.accelerator.synchronize()
    return [before, int(was_busy), int(ballot.host_given_up), int(int(ballot.host_verdict) != 0)]


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("lagging", marks=devices.synchronizes_stand_in),
        devices.GPU,
    ],
)
def test_a_vote_reads_the_flag_when_the_vote_runs(device: str, replicas, stand_in) -> None:
    """Not when the vote is enqueued: a group is given up while votes wait for the device."""
    assert replicas(1).run(flag_behind_a_vote, device, stand_in) == [[0, 1, GIVEN_UP, 1]]
