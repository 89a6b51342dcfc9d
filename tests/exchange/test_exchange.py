"""The exchange gives every rank the bytes of the reference, whatever the size, world or order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from exchange_helpers import (
    check_pairs,
    decode,
    digest,
    exchange,
    reference_digest,
    split,
    sync,
    values,
)
from workers import Pool

from diloco_comm import DiLoCo, Nesterov
from diloco_comm.exchange.round import Header
from diloco_comm.ops.wire import ELEMENT_WIRES, WireFormat
from diloco_comm.replica.workers import WorkerMessages

Workers = Callable[[int], Pool]
SIZES = [1, 7, 255, 257, 4096, 100_003]
# (wire, stochastic, seed, weights by rank)
WEIGHTS = [1.0, 3.0, 0.0, 0.5, 2.0, 1.0, 0.25, 7.0]


def _exchange_sizes(
    rank: int, world: int, wire: str, sizes: list[int], stochastic: bool, lanes: int, delay: float
) -> list[tuple[str, str]]:
    results = []
    with exchange(rank, world, lanes=lanes, window=3) as ex:
        if delay:
            ex.inject_fault(max_delay_us=delay, seed=17 * rank + world)
        for round, n in enumerate(sizes):
            buffers = ex.buffers(n, WireFormat(wire, 64))
            params = [split(values(round, replica, n)) for replica in range(world)]
            outcome = sync(
                ex, buffers, params[rank], weight=WEIGHTS[rank], round=round, stochastic=stochastic,
                seed=5,
            )  # fmt: skip
            buffers.commit()
            expected = reference_digest(
                params, buffers.layout, WEIGHTS[:world], stochastic=stochastic, seed=5, round=round
            )
            results.append((digest(outcome), expected))
    return results


@pytest.mark.nightly(
    "up to 11 s each; they differ in the number of replicas", but=["1", "2", "3", "4"]
)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_worlds_agree_with_the_reference(workers: Workers, world: int) -> None:
    check_pairs(workers(world).run(_exchange_sizes, "int8", SIZES, False, 1, 0.0))


@pytest.mark.each_value("1 s each; they differ in wire and number of replicas")
@pytest.mark.parametrize("wire", ELEMENT_WIRES)
@pytest.mark.parametrize("world", [2, 4])
def test_wires_agree_with_the_reference(workers: Workers, wire: str, world: int) -> None:
    check_pairs(workers(world).run(_exchange_sizes, wire, [1, 257, 30_011], False, 1, 0.0))


@pytest.mark.parametrize("wire", ["int8", "int4", "fp8_e4m3", "bf16"])
def test_stochastic_rounding_agrees_with_the_reference(workers: Workers, wire: str) -> None:
    check_pairs(workers(3).run(_exchange_sizes, wire, [257, 30_011], True, 1, 0.0))


@pytest.mark.nightly("5 s; they differ in the number of replicas", but=["2-3"])
@pytest.mark.parametrize(("world", "lanes"), [(2, 3), (4, 2)])
def test_random_delays_do_not_mix_messages(workers: Workers, world: int, lanes: int) -> None:
    check_pairs(workers(world).run(_exchange_sizes, "int8", [100_003] * 3, False, lanes, 300.0))


def _fp32_sum(rank: int, world: int) -> bool:
    n = 10_007
    with exchange(rank, world) as ex:
        buffers = ex.buffers(n, WireFormat("fp32"))
        inputs = [values(1, replica, n) for replica in range(world)]
        got = decode(sync(ex, buffers, [inputs[rank]]))
        share = torch.tensor(1.0 / world, dtype=torch.float64).float()
        expected = share * inputs[0]
        for x in inputs[1:]:
            expected = expected + share * x
        return torch.equal(got, expected)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_fp32_wire_is_the_rank_order_sum(workers: Workers, world: int) -> None:
    assert all(workers(world).run(_fp32_sum))


def _error_feedback(rank: int, world: int, dtype: torch.dtype) -> list[float]:
    n = 5_003
    errors = []
    with exchange(rank, world) as ex:
        buffers = ex.buffers(n, WireFormat("int4", 64), error_feedback=True, residual_dtype=dtype)
        inputs = [values(3, replica, n) for replica in range(world)]
        mean = torch.stack(inputs).double().mean(0)
        total = torch.zeros(n, dtype=torch.float64)
        for round in range(40):
            total += decode(sync(ex, buffers, [inputs[rank]], round=round)).double()
            buffers.commit()
            errors.append(float((total / (round + 1) - mean).norm() / mean.norm()))
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3])
def test_error_feedback_removes_the_bias(workers: Workers, world: int, dtype: torch.dtype) -> None:
    for errors in workers(world).run(_error_feedback, dtype):
        assert errors[0] > 0.05
        # The error of the sum stays that of one round, so that of the mean falls as 1/rounds.
        assert errors[-1] < errors[0] / 20


def _several_slots(rank: int, world: int) -> list[tuple[str, str]]:
    """Exchanges of different fragments, all started before the first is waited for."""
    results = []
    with exchange(rank, world) as ex:
        ex.inject_fault(max_delay_us=200.0, seed=rank)
        sizes = [3_001, 50_021, 900, 12_345]
        all_buffers = [ex.buffers(n, WireFormat("int8")) for n in sizes]
        for round in range(3):
            works, params = [], []
            for fragment, (buffers, n) in enumerate(zip(all_buffers, sizes, strict=True)):
                params.append([[values(7 + fragment, replica, n)] for replica in range(world)])
                header = Header("sync", fragment=fragment, round=round, num_fragments=4)
                works.append(ex.start(buffers, outer=None, params=params[-1][rank], header=header))
            for buffers, work, inputs in zip(all_buffers, works, params, strict=True):
                outcome = work.wait(40)
                buffers.commit()
                weights = [1.0] * world
                results.append((digest(outcome), reference_digest(inputs, buffers.layout, weights)))
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_several_fragments_in_flight(workers: Workers, world: int) -> None:
    check_pairs(workers(world).run(_several_slots))


def _overlapping_rounds(rank: int, world: int) -> tuple[int, int]:
    """Round r+1 starts before round r is committed; the own payload of r stays as it was."""
    n = 20_000
    with exchange(rank, world) as ex:
        buffers = ex.buffers(n, WireFormat("int8"))
        previous = None
        for round in range(5):
            inputs = [[values(round, replica, n)] for replica in range(world)]
            header = Header("sync", round=round)
            work = ex.start(buffers, outer=None, params=inputs[rank], header=header)
            if previous is not None:
                old, copy, old_inputs = previous
                expected = reference_digest(old_inputs, buffers.layout, [1.0] * world)
                assert digest(old.wait(40)) == expected
                assert torch.equal(old.own.tensor, copy)
                buffers.commit()
            previous = (work, work.own.tensor.clone(), inputs)
        return len(buffers._owns), len(buffers._results)


@pytest.mark.parametrize("world", [2, 4])
def test_a_round_may_start_before_the_last_is_applied(workers: Workers, world: int) -> None:
    for num_owns, num_results in workers(world).run(_overlapping_rounds):
        assert num_owns == num_results == 2


def _larger_while_one_waits(rank: int, world: int) -> list[tuple[str, str]]:
    """Rank 1 comes only when rank 0 has started a second exchange, larger than any before."""
    works = []
    with exchange(rank, world) as ex:
        go = torch.zeros(1)
        if rank == 1:
            dist.recv(go, 0)
        for round, n in enumerate((1000, 200_003)):
            inputs = [[values(round, replica, n)] for replica in range(world)]
            buffers = ex.buffers(n, WireFormat("int8"))
            header = Header("sync", round=round)
            work = ex.start(buffers, outer=None, params=inputs[rank], header=header)
            works.append((work, reference_digest(inputs, buffers.layout, [1.0] * world)))
        if rank == 0:
            dist.send(go, 1)
        return [(digest(work.wait(40)), expected) for work, expected in works]


def test_a_larger_exchange_starts_while_one_waits(workers: Workers) -> None:
    check_pairs(workers(3).run(_larger_while_one_waits))


def _headers_early(rank: int, world: int) -> set[tuple[float, ...]]:
    """What rank 0 sees of the headers' weights from its start to its end; rank 1 comes late."""
    go, seen = torch.zeros(1), set()
    with exchange(rank, world) as ex:
        buffers = ex.buffers(1000, WireFormat("int8"))
        if rank == 1:
            dist.recv(go, 0)
        header = Header("sync", weight=1.0 + rank)
        work = ex.start(buffers, outer=None, params=[torch.ones(1000)], header=header)
        for count in itertools.count():
            is_done = work.done()
            seen.add(tuple(header.weight for header in work.headers))
            if is_done:
                return seen
            if rank == 0 and count == 1000:
                dist.send(go, 1)


def test_headers_are_all_there_or_none(workers: Workers) -> None:
    first, second = workers(2).run(_headers_early)
    assert first == {(), (1.0, 2.0)}
    assert second <= first


def _other_default_device(rank: int, world: int) -> tuple[str, str]:
    n = 1000
    inputs = [values(0, replica, n) for replica in range(world)]
    with torch.device("meta"), exchange(rank, world) as ex:
        outcome = sync(ex, ex.buffers(n, WireFormat("int8")), [inputs[rank]])
        assert ex.exchange_objects(b"x" * rank) == [b"", b"x"]
        control = WorkerMessages(dist.group.WORLD, 30.0)
        assert control.gather(rank) == [0, 1] and control.broadcast("x" * rank, 1) == "x"
    return digest(outcome), reference_digest([[x] for x in inputs], outcome.layout, [1.0] * world)


def test_a_default_device_is_not_where_messages_are(workers: Workers) -> None:
    check_pairs([[result] for result in workers(2).run(_other_default_device)])


def _diloco_on_another_default_device(rank: int, world: int) -> list[float]:
    model = torch.nn.Linear(30, 30, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.full((30, 30), float(rank))
    settings = {"sync_every": 1, "outer": Nesterov(1.0, 0.0), "wire": "fp32"}
    with (
        torch.device("meta"),
        DiLoCo(model, optimizer, **grouped({"timeout": timedelta.max, **settings})),
    ):
        optimizer.step()
    return model.weight.unique().tolist()


def test_a_round_of_diloco_on_another_default_device(workers: Workers) -> None:
    assert workers(2).run(_diloco_on_another_default_device) == [[0.5]] * 2


def _long_timeout(rank: int, world: int, timeout: float | timedelta) -> list[float]:
    with exchange(rank, world, timeout=timeout) as ex:
        buffers = ex.buffers(1000, WireFormat("fp32"))
        return decode(sync(ex, buffers, [torch.full((1000,), float(rank))])).unique().tolist()


@pytest.mark.parametrize("timeout", [1e10, 1e300, timedelta.max])
def test_a_timeout_longer_than_a_clock_counts(workers: Workers, timeout: float | timedelta) -> None:
    assert workers(2).run(_long_timeout, timeout) == [[0.5]] * 2


def _objects_and_broadcast(rank: int, world: int) -> bool:
    with exchange(rank, world) as ex:
        blobs = ex.exchange_objects(b"x" * (1000 * rank))
        objects = blobs == [b"x" * (1000 * r) for r in range(world)]
        generator = torch.Generator().manual_seed(rank)
        tensors = [
            torch.randn(300, 5, generator=generator),
            torch.randn(40, 30, generator=generator).t(),
            torch.randint(0, 9, (7,), generator=generator),
            torch.rand(11, generator=generator) > 0.5,
            torch.randn(9, generator=generator).bfloat16(),
            torch.zeros(0),
            torch.tensor(float(rank)),
        ]
        ex.broadcast(tensors, world - 1)
        digest = torch.cat([t.double().reshape(-1) for t in tensors])
        copies = ex.exchange_objects(digest.numpy().tobytes())
        return objects and len(set(copies)) == 1 and tensors[-1].item() == world - 1


@pytest.mark.parametrize("world", [1, 2, 4])
def test_objects_and_broadcast(workers: Workers, world: int) -> None:
    assert all(workers(world).run(_objects_and_broadcast))
