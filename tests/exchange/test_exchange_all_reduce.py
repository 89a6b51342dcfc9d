"""The public all_reduce: any dtype and shape, in place or not, several under way, errors."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exchange_helpers import values
from workers import Pool

from diloco_comm.base.errors import NonFiniteError, ReplicaMismatch, SyncError
from diloco_comm.exchange import collective
from diloco_comm.exchange.collective import all_reduce, shutdown
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.round import Header
from diloco_comm.ops import reference
from diloco_comm.ops.wire import Layout, WireFormat

Workers = Callable[[int], Pool]


def _expected(tensors: list[torch.Tensor], weights: list[float], wire: WireFormat) -> torch.Tensor:
    (by_lanes,) = collective._engines.values()
    exchange = by_lanes[1].exchange
    buffers = exchange.buffers(tensors[0].numel(), wire)
    terms = reference.all_reduce([[t] for t in tensors], buffers.layout, weights)
    out = tensors[0].clone()
    reference.decode(*zip(*terms, strict=True), [out], 0, out.numel(), *_form(buffers.layout))
    return out


def _form(layout: Layout) -> tuple[int, str, int]:
    return layout.run_elements, layout.wire.name, layout.wire.block_size


def _reduce(rank: int, world: int, dtype: torch.dtype) -> None:
    wire = WireFormat("int8", 64)
    weights = [1.0, 0.0, 3.0, 0.5][:world]
    for seed, shape in enumerate([(1,), (3, 5, 7), (), (301, 17), (0, 4)]):
        count = torch.Size(shape).numel()
        tensors = [values(seed, r, count).to(dtype).view(shape) for r in range(world)]
        mine = tensors[rank].clone()
        result = all_reduce(mine, wire=wire, weight=weights[rank])
        assert result is mine
        into = tensors[rank].clone()
        out = torch.full(shape, 7.0, dtype=dtype)
        for target in (out, into):
            source = into.clone() if target is out else into
            result = all_reduce(source, wire=wire, weight=weights[rank], out=target)
            assert result is target
            assert target is into or torch.equal(source, tensors[rank])
        if count:
            expected = _expected(tensors, weights, wire)
            assert all(torch.equal(mean, expected) for mean in (mine, out, into))
    shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_reduce_is_the_weighted_mean(workers: Workers, world: int, dtype: torch.dtype) -> None:
    workers(world).run(_reduce, dtype)


def _non_contiguous(rank: int, world: int) -> None:
    base = values(1, rank, 600).view(20, 30)
    flat = base.t().contiguous()
    strided = base.clone().t()
    all_reduce(strided, wire="int8")
    all_reduce(flat, wire="int8")
    assert not strided.is_contiguous() and torch.equal(strided, flat)
    shutdown()


def test_all_reduce_of_a_strided_tensor(workers: Workers) -> None:
    workers(2).run(_non_contiguous)


def _part_by_part(rank: int, world: int, lanes: int) -> None:
    num_chunks, weights = 24, [1.0, 3.0, 0.5][:world]
    count = 6400 * world * num_chunks - 17
    tensors = [values(3, r, count) for r in range(world)]
    options: dict[str, Any] = {"name": f"{lanes} lanes", "lanes": lanes, "window": lanes}
    with Exchange.from_group(None, chunk_bytes=6600 * world, **options) as exchange:
        buffers = exchange.buffers(count, WireFormat("int8", 64))
        assert buffers.num_chunks == num_chunks
        terms = reference.all_reduce([[t] for t in tensors], buffers.layout, weights)
        expected = torch.empty(count)
        reference.decode(*zip(*terms, strict=True), [expected], 0, count, *_form(buffers.layout))
        # A chunk takes a tenth of a second or more.
        exchange.emulate_link(6400 * 8 / 1e8)
        header = Header("all_reduce", layout_hash=count, weight=weights[rank])
        work = exchange.start(buffers, outer=None, params=[tensors[rank]], header=header)
        out = torch.full((count,), 7.0)
        while not work.done() and out[0] == 7.0:
            with contextlib.suppress(TimeoutError):
                work.collect(out, timeout=0.02)
        arrived = int((out != 7.0).nonzero().max()) + 1
        assert not work.done() and arrived < count
        assert torch.equal(out[:arrived], expected[:arrived])
        with pytest.raises(TimeoutError, match=r"not done after 0\.001 s"):
            work.collect(out, timeout=0.001)
        outcome = work.collect(out, timeout=60.0)
        assert torch.equal(out, expected)
        outcome.decode([out.zero_()])
        assert torch.equal(out, expected)


@pytest.mark.nightly(
    "up to 11 s each on a slow link; they differ in replicas and lanes", but=["2-1"]
)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_a_mean_is_decoded_while_the_rest_arrives(workers: Workers, world: int, lanes: int) -> None:
    workers(world).run(_part_by_part, lanes)


def _concurrent(rank: int, world: int) -> None:
    sizes = [1000, 50_001, 1000, 7, 20_000]
    for _ in range(3):
        tensors = [values(i, rank, n) for i, n in enumerate(sizes)]
        works = [all_reduce(t, wire="fp32", async_op=True) for t in tensors]
        means = [torch.empty_like(t) for t in tensors]
        pairs = zip(tensors, means, strict=True)
        into = [all_reduce(t, wire="fp32", async_op=True, out=out) for t, out in pairs]
        # Waiting in another order than starting is fine.
        for work in (*reversed(into), *reversed(works)):
            with contextlib.suppress(TimeoutError):
                work.wait(0.0)
            work.wait(30)
            assert work.is_completed()
        assert all(torch.equal(t, mean) for t, mean in zip(tensors, means, strict=True))
        for i, (n, tensor) in enumerate(zip(sizes, tensors, strict=True)):
            mean = torch.stack([values(i, r, n) for r in range(world)]).double().mean(0)
            assert torch.allclose(tensor.double(), mean, rtol=1e-6, atol=1e-6)
    shutdown()


@pytest.mark.parametrize("world", [2, 3])
def test_several_under_way(workers: Workers, world: int) -> None:
    workers(world).run(_concurrent)


def _errors(rank: int, world: int) -> None:
    before = values(1, rank, 100 + rank)
    tensor = before.clone()
    with pytest.raises(ReplicaMismatch, match=r"num_elements differs.*100 on replica 0; 101 on"):
        all_reduce(tensor)
    assert torch.equal(tensor, before)
    with pytest.raises(ReplicaMismatch, match="wire differs"):
        all_reduce(torch.ones(64), wire="int8" if rank else "int4")
    with pytest.raises(ReplicaMismatch, match=r"num_elements differs|layout_hash differs"):
        all_reduce(torch.ones(rank))
    with pytest.raises(NonFiniteError, match="replica 1"):
        all_reduce(torch.tensor([1.0, float("nan") if rank else 2.0]))
    with pytest.raises(NonFiniteError, match="replica 1"):
        source = torch.tensor([float("nan") if rank else 1.0, 3.0])
        all_reduce(source, out=torch.ones(2))
    assert source[1] == 3.0
    assert all_reduce(torch.ones(3), wire="fp32").tolist() == [1.0, 1.0, 1.0]
    shutdown()


def test_errors_leave_the_engine_usable(workers: Workers) -> None:
    workers(2).run(_errors)


# What to pass in place of a tensor of ones, or beside it; the error; a part of its sentence.
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([1.0], {}, TypeError, "takes a tensor, got a list"),
    (torch.ones(3, dtype=torch.int64), {}, TypeError, "int64"),
    (torch.ones(3, device="meta"), {}, TypeError, r"is on meta: only .* CPU memory are taken"),
    (torch.ones(3).to_sparse(), {}, TypeError, "takes strided tensors, got .*sparse_coo"),
    (torch.ones(1).expand(3), {}, ValueError, r"not share memory, got shape \(3,\) with .*\(0,\)"),
    (None, {"out": torch.ones(3).double()}, TypeError, "out must be fp32, bf16 or fp16"),
    (None, {"out": torch.ones(4)}, ValueError, r"the shape and device .* got \(4,"),
    (None, {"out": torch.ones(6)[::2]}, ValueError, r"contiguous, got strides \(2,\)"),
    (None, {"wire": "int7"}, ValueError, "unknown wire 'int7'"),
    (None, {"rounding": "down"}, ValueError, "rounding must be .* got 'down'"),
    (None, {"weight": "abc"}, TypeError, "weight must be a number, got 'abc'"),
    (None, {"weight": -1.0}, ValueError, "weight must be finite and not negative, got -1.0"),
    (None, {"weight": float("nan")}, ValueError, "weight must be finite .* got nan"),
    (None, {"seed": "x", "rounding": "stochastic"}, ValueError, "seed must be an integer, got 'x'"),
    (None, {"lanes": 1.5}, ValueError, "lanes must be an integer of at least 1, got 1.5"),
    (None, {"group": "int8"}, TypeError, "group must be a process group of .* got 'int8'"),
]


def _refused(rank: int, world: int) -> None:
    """Refuse on one rank alone: the other must not notice."""
    if rank == 0:
        all_reduce(torch.ones(3))
        for tensor, options, error, sentence in REFUSED:
            with pytest.raises(error, match=sentence):
                all_reduce(torch.ones(3) if tensor is None else tensor, **options)
        with pytest.raises(TypeError, match=r"group must be a process group of .* got 3"):
            shutdown(3)  # type: ignore[arg-type]
    else:
        all_reduce(torch.ones(3))
    assert all_reduce(torch.ones(3), wire="fp32").tolist() == [1.0, 1.0, 1.0]
    options = {"rounding": "stochastic", "seed": np.int64(3), "weight": np.float32(2)}
    assert (
        all_reduce(torch.ones(3), wire="bf16", lanes=np.int64(1), **options).tolist() == [1.0] * 3
    )
    # The source of a mean that goes elsewhere may be expanded.
    mean = all_reduce(torch.ones(1).expand(3), out=torch.zeros(3), wire="fp32")
    assert mean.tolist() == [1.0, 1.0, 1.0]
    shutdown()


def test_what_is_refused_is_not_counted(workers: Workers) -> None:
    workers(2).run(_refused)


def _after_wait(rank: int, world: int) -> None:
    work = all_reduce(torch.ones(3), async_op=True)
    sent = work.sent(torch.empty(3))
    assert work.wait(timedelta(seconds=30)).allclose(sent)
    with pytest.raises(RuntimeError, match=r"sent\(\) must be called before wait\(\)"):
        work.sent(sent)
    shutdown()


def test_sent_is_of_this_call_or_refused(workers: Workers) -> None:
    workers(2).run(_after_wait)


def _crosswise(rank: int, world: int) -> list[float]:
    """First calls of two groups: rank 0 begins with one, rank 1 ends with it."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    means = [torch.full((3,), float(rank)) for _ in groups]

    def first_call(k: int) -> None:
        all_reduce(means[k], groups[k], "fp32", timeout=30.0)

    early = threading.Thread(target=first_call, args=(0,))
    if rank == 0:
        early.start()
        while groups[0] not in collective._engines:
            time.sleep(0.01)
        time.sleep(0.2)
    first_call(1)
    if rank == 1:
        early.start()
    early.join()
    shutdown()
    return [mean[0].item() for mean in means]


def test_a_first_call_of_a_group_does_not_wait_for_that_of_another(fresh_workers) -> None:
    assert fresh_workers(2).run(_crosswise, timeout=30) == [[0.5, 0.5]] * 2


def _closed_while_connecting(rank: int, world: int) -> str:
    store = dist.distributed_c10d._get_default_store()
    errors: list[Exception] = []

    def first_call() -> None:
        try:
            all_reduce(torch.ones(3), timeout=30.0)
        except (RuntimeError, SyncError) as error:
            errors.append(error)

    thread = threading.Thread(target=first_call)
    if rank == 0:
        thread.start()
        while not collective._engines:
            time.sleep(0.01)
        time.sleep(0.2)
        shutdown()
        store.set("closed", "")
    else:
        store.wait(["closed"])
        thread.start()
    thread.join()
    shutdown()
    return str(errors[0])


def test_shutdown_does_not_wait_for_a_first_call(fresh_workers) -> None:
    closed, left = fresh_workers(2).run(_closed_while_connecting, timeout=40)
    assert closed == "all_reduce: shutdown() closed the engine of this group meanwhile"
    assert "replica 0" in left


def _subgroup(rank: int, world: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1])]
    if rank in (0, 2):
        tensor = torch.full((10,), float(rank))
        assert all_reduce(tensor, pairs[0], "fp32").tolist() == [1.0] * 10
    else:
        with pytest.raises(ValueError, match="not a member"):
            all_reduce(torch.ones(1), pairs[0])
        assert all_reduce(torch.full((2,), 5.0), pairs[1], "fp32").tolist() == [5.0, 5.0]
    shutdown()
    dist.barrier()


def test_groups(workers: Workers) -> None:
    workers(3).run(_subgroup)
