"""What on a device waits for what: chunks overlap where they may, and never where they must not.

The stand-in writes down what was enqueued on which stream, and which events a stream waited for.
From that follows, whatever the speeds, what comes before what.
"""

from __future__ import annotations

import time
from typing import Any

import devices
import pytest
import torch
from device_training import METHODS, Replica
from problems import equal
from test_gpu_streams import on_streams, use_streams
from torch import Tensor

import diloco_comm
from diloco_comm import _C, SGD
from diloco_comm.base.futures import Finisher, for_native
from diloco_comm.base.memory import current, page_locked
from diloco_comm.exchange.round import Sending
from diloco_comm.methods.outer import OuterState
from diloco_comm.ops import offload
from diloco_comm.ops.wire import Layout, WireFormat

CHUNK_ELEMENTS = 4096


class Order:
    """The tasks of all streams in the order in which the host enqueued them."""

    def __init__(self, tasks: list[str]) -> None:
        self.streams, self.names = zip(*(task.split(" ", 1) for task in tasks), strict=True)
        self.causes: list[list[int]] = []
        last: dict[str, int] = {}
        records: dict[str, int] = {}
        for i, (stream, name) in enumerate(zip(self.streams, self.names, strict=True)):
            kind, _, event = name.partition(" ")
            waits_for = [records[event]] if kind == "wait" and event in records else []
            self.causes.append(waits_for + ([last[stream]] if stream in last else []))
            last[stream] = i
            if kind == "record":
                records[event] = i

    def find(self, name: str, begin: int = 0) -> list[int]:
        return [i for i, own in enumerate(self.names) if own == name and i >= begin]

    def comes_after(self, later: int, earlier: int) -> bool:
        """Whether a task cannot begin before another one has ended."""
        seen, todo = set(), [later]
        while todo:
            todo = [cause for i in todo for cause in self.causes[i] if cause not in seen]
            seen.update(todo)
        return earlier in seen


def tasks_of(replica: Replica) -> list[str]:
    """What a round enqueues, with nothing under way before."""
    torch.accelerator.synchronize()
    torch.ops.lagging.tasks()
    replica.steps(5, 8)
    torch.accelerator.synchronize()
    return torch.ops.lagging.tasks()


def on_a_side_stream(rank: int, world: int, library: str) -> tuple[list[str], list[str]]:
    here = use_streams(rank, "lagging", library)
    replica = Replica(rank, here, **on_streams(METHODS["diloco"]))
    replica.steps(0, 5)
    calls = replica.diloco.exchange._driver.group.calls
    calls.clear()
    tasks = tasks_of(replica)
    replica.diloco.close()
    return tasks, list(calls)


def test_chunks_are_reduced_while_the_next_ones_travel(replicas, stand_in) -> None:
    tasks, calls = replicas(3).run(on_a_side_stream, stand_in)[0]
    order = Order(tasks)
    collectives = dict(zip(order.find("host function"), calls, strict=True))
    exchanges = [i for i, call in collectives.items() if call == "alltoall"]
    *gathers, vote = [i for i, call in collectives.items() if call == "allgather"]
    encodes, reduces = (order.find(f"diloco_comm::{name}") for name in ("encode", "reduce"))
    (step,) = order.find("diloco_comm::outer_step")
    after = order.comes_after
    assert len(exchanges) == len(gathers) == len(encodes) == len(reduces) > 5
    for k, reduce in enumerate(reduces):
        assert after(exchanges[k], encodes[k]) and after(reduce, exchanges[k])
        assert after(gathers[k], reduce) and after(step, gathers[k]) and after(vote, reduce)
    (verdict,) = order.find("sum")
    assert after(verdict, vote) and after(step, verdict)
    for k in range(len(reduces) - 1):
        assert not after(exchanges[k], encodes[k + 1])  # leaves before all is encoded
        assert not after(exchanges[k + 1], reduces[k])
    for k in range(len(reduces) - 2):
        assert after(exchanges[k + 2], reduces[k])  # into the same buffer


def in_pieces(rank: int, world: int, library: str) -> list[str]:
    here = devices.use("lagging", library)
    # Pieces are of 32 million elements, which are four chunks.
    tensor = torch.ones(40 << 20, dtype=torch.bfloat16, device=here)
    torch.accelerator.synchronize()
    torch.ops.lagging.tasks()
    diloco_comm.all_reduce(tensor, wire="int8")
    torch.accelerator.synchronize()
    tasks = torch.ops.lagging.tasks()
    diloco_comm.shutdown()
    return tasks


def test_pieces_leave_the_device_while_others_are_encoded(replicas, stand_in) -> None:
    order = Order(replicas(2).run(in_pieces, stand_in)[0])
    encodes = order.find("diloco_comm::encode")
    copies = order.find("copy out")[: len(encodes)]
    assert len(encodes) == 2
    for k, copy in enumerate(copies):
        assert order.comes_after(copy, encodes[k])
        assert all(not order.comes_after(copy, later) for later in encodes[k + 1 :])
        assert all(copy < later for later in encodes[k + 1 :])


def encoded_ranges(rank: int, world: int, library: str) -> list[Any]:
    """The ranges of outer parameters that an exchange over NCCL brings to the device."""
    here = use_streams(rank, "lagging", library)
    given, ranges = [], []
    load = Sending.outer_of

    def outer_of(sending: Sending, begin: int, end: int) -> Any:
        ranges.append((begin, end, sending.loader is not None))
        return load(sending, begin, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sending, "outer_of", outer_of)
        patch.setattr(offload.chunks_of, "__defaults__", (CHUNK_ELEMENTS,))
        for place in (None, "cpu"):
            options = {**METHODS["diloco"], "chunk_bytes": 12 << 10, "offload": place}
            replica = Replica(rank, here, **on_streams(options))
            replica.steps(0, 9)
            (part,) = replica.diloco.parts
            given.append([replica.all(), part.buffers.layout.run_elements])
            replica.diloco.close()
    (on_device, run_elements), (from_host, _) = given
    return [equal(on_device, from_host), run_elements, ranges]


def test_few_offloaded_elements_are_loaded_at_a_time(replicas, stand_in) -> None:
    """At most so many that are whole runs, however large a chunk is; and all of them once."""
    for is_equal, run_elements, ranges in replicas(3).run(encoded_ranges, stand_in):
        assert is_equal
        chunks = [end - begin for begin, end, is_loaded in ranges if not is_loaded]
        pieces = [end - begin for begin, end, is_loaded in ranges if is_loaded]
        assert run_elements <= CHUNK_ELEMENTS < 2 * run_elements < max(chunks)
        assert max(pieces) == run_elements and sum(pieces) == sum(chunks)


def from_host_memory(rank: int, world: int, library: str) -> list[str]:
    here = devices.use("lagging", library)
    before = offload.chunks_of.__defaults__
    offload.chunks_of.__defaults__ = (CHUNK_ELEMENTS,)  # type: ignore[attr-defined]
    replica = Replica(rank, here, offload="cpu", **METHODS["diloco"])
    replica.steps(0, 5)
    tasks = tasks_of(replica)
    replica.diloco.close()
    offload.chunks_of.__defaults__ = before  # type: ignore[attr-defined]
    return tasks


def test_offloaded_chunks_come_and_go_behind_the_steps(replicas, stand_in) -> None:
    """Two buffers: a chunk comes while the step works on the one before, which then leaves."""
    order = Order(replicas(2).run(from_host_memory, stand_in)[0])
    steps = order.find("diloco_comm::outer_step")
    copies = order.find("copy out", steps[0])
    stream = order.streams[copies[0]]
    stores = [i for i in copies if order.streams[i] == stream][1::2]  # outer and momentum each
    loads = [i for i in order.find("copy in", order.find("diloco_comm::encode")[-1])
             if order.streams[i] != stream][-2 * len(steps) :][1::2]  # fmt: skip
    after = order.comes_after
    assert len(steps) == len(stores) == len(loads) > 3
    for k, step in enumerate(steps):
        assert after(step, loads[k]) and after(stores[k], step)
    for k in range(len(steps) - 1):
        assert not after(loads[k + 1], steps[k]) and not after(loads[k + 1], stores[k])
        assert not after(steps[k + 1], stores[k])
    for k in range(len(steps) - 2):
        assert after(loads[k + 2], stores[k])


class Failed(Exception):
    """Raised by a block, as a test wants it."""


def chunks_after_failures(rank: int, world: int, library: str) -> dict[str, list[list[float]]]:
    """Load chunk after chunk, each in a block that uses the chunk, later, and fails at once.

    Returns:
        By the kind of block: the values that were used, and those in host memory at the end.
    """
    from lagging_group import LaggingStream

    here = devices.use("lagging", library)
    stream, loader = LaggingStream(here), _C.ChunkLoader(here)
    size, number = 1024, 3
    layout = Layout.plan(size * number, number, 1, WireFormat("fp32", 32))
    used = torch.zeros(number, size, device=here)

    def fail(k: int, tensor: Tensor) -> None:
        stream.enqueue("nothing", lambda: time.sleep(0.1)).synchronize()
        used[k].copy_(tensor)
        tensor.mul_(10.0)
        raise Failed

    def whole(state: OuterState, k: int) -> None:
        ((_, _, pieces),) = [one for one in state.ranges(layout) if one[0] == k * size]
        with pieces as (tensor, *_):
            fail(k, tensor)

    def read(state: OuterState, k: int) -> None:
        assert state.offloaded is not None
        with state.offloaded.chunk(k * size, (k + 1) * size, is_written=False) as (tensor, *_):
            fail(k, tensor)

    def sent(state: OuterState, k: int) -> None:
        sending = Sending(state.outer, [], [1.0], False, 0, 0, loader)
        with sending.outer_of(k * size, (k + 1) * size) as (tensor, begin):
            assert tensor is not None and begin == k * size
            fail(k, tensor)

    found, errors = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.chunks_of, "__defaults__", (size,))
        for block in (whole, read, sent):
            outer = page_locked(size * number)
            outer.copy_(torch.arange(number).repeat_interleave(size))
            state = SGD(1.0).make_state(outer)
            state.offload(loader)
            used.zero_()
            for k in range(number):
                try:
                    block(state, k)
                except Failed as error:
                    errors.append(error)  # with its frames
            torch.accelerator.synchronize()
            loader.finish()
            found[block.__name__] = [used.cpu().mean(1).tolist(), outer[::size].tolist()]
    return found


def test_a_chunk_whose_block_fails_stays_until_it_was_used(replicas, stand_in) -> None:
    """The next chunk comes into the other buffer, and what a block has written comes back."""
    (found,) = replicas(1).run(chunks_after_failures, stand_in)
    assert found == {
        "whole": [[0.0, 1.0, 2.0], [0.0, 10.0, 20.0]],
        "read": [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]],
        "sent": [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]],
    }


def encodings_that_fail(rank: int, world: int, library: str) -> list[float]:
    """Two encodings in the engine that use what was loaded, later, and fail at once.

    Returns:
        The first outer parameter as the first encoding saw it, and in host memory before and after.
    """
    from lagging_group import LaggingStream

    here = devices.use("lagging", library)
    stream, seen = LaggingStream(here), []
    replica = Replica(rank, here, offload="cpu", **METHODS["diloco"])
    outer = replica.diloco.parts[0].outer

    def encode(loaded: Tensor, *arguments: Any) -> None:
        stream.enqueue("nothing", lambda: time.sleep(0.1)).synchronize()
        seen.append(torch.empty_like(loaded).copy_(loaded))
        raise Failed

    operators = torch.library.Library("diloco_comm", "IMPL")
    operators.impl("encode", encode, "PrivateUse1", allow_override=True)
    values = [float(outer[0])]
    for step in (0, 4):
        with pytest.raises(Failed):
            replica.steps(step, step + 4)
        time.sleep(0.02)  # the load is over, and the encoding is not
        outer.fill_(5.0)
    torch.accelerator.synchronize()
    return [float(seen[0].cpu()[0]), *values, float(outer[0])]


def test_a_chunk_that_the_engine_cannot_encode_stays_until_it_was_used(
    fresh_workers, stand_in
) -> None:
    ((seen, before, after),) = fresh_workers(1).run(encodings_that_fail, stand_in)
    assert seen == before != after == 5.0


def finished_on_a_side_stream(rank: int, world: int, name: str, library: str) -> list[Any]:
    """Write a tensor before, in and after a function that a thread calls; one value, one device."""
    here = devices.use(name, library, 1 if name == "lagging" else 0)
    tensor = torch.zeros(1 << 22, device=here)
    finisher, side = Finisher(), torch.Stream(here)
    torch.accelerator.synchronize()
    found = []

    def end() -> torch.Tensor:
        found.append(torch.accelerator.current_device_index())
        return tensor.mul_(3.0)

    torch.accelerator.set_device_index(here.index)
    for _ in range(20):
        tensor.zero_()
        side.wait_stream(torch.accelerator.current_stream(here))
        with current(side):
            tensor.add_(1.0)
            future = for_native(finisher.finish(end, here))
        future.wait()
        tensor.add_(1.0)
        found.append(tensor.unique().tolist())
    finisher.close()
    return [here.index, found]


@pytest.mark.parametrize("name", devices.DEVICES)
def test_the_end_of_an_exchange_runs_on_the_stream_of_its_begin(
    name: str, replicas, stand_in
) -> None:
    ((index, found),) = replicas(1).run(finished_on_a_side_stream, name, stand_in)
    assert found == [index, [4.0]] * 20
