"""Rounds that were broken off: who holds one that counts applies it, residuals included."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchange_helpers import CHUNK_BYTES, decode, sync, values
from torch import Tensor
from workers import Pool

from diloco_comm.base.errors import NonFiniteError, SyncError
from diloco_comm.exchange.buffers import ExchangeBuffers
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.round import Header, Mean
from diloco_comm.ops.wire import WireFormat

N = 60_000
WIRE = WireFormat("int4")


def _connect(
    address: tuple[str, int], replica: int, world: int
) -> tuple[Exchange, ExchangeBuffers]:
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=30))
    ex = Exchange(
        store, replica, range(world), chunk_bytes=CHUNK_BYTES, timeout=20.0, report_patience=2.0
    )
    return ex, ex.buffers(N, WIRE, error_feedback=True)


def _sent(payload: Tensor, layout: Any) -> Tensor:
    return decode(Mean([(payload, 1.0)], layout, [], [], {}, 0, 0))


def _miss_the_vote(rank: int, world: int, address: tuple[str, int]) -> Any:
    ex, buffers = _connect(address, rank, world)
    sync(ex, buffers, [values(0, rank, N)], round=0)
    buffers.commit()
    assert buffers.residual is not None
    owed, params = buffers.residual.clone(), values(1, rank, N)
    if rank == world - 1:
        ex.inject_fault(action="kill", stage="vote", num_peers=1)
    work = ex.start(buffers, outer=None, params=[params], header=Header("sync", round=1))
    expected = params + owed - _sent(work.own.tensor, work.layout)
    last = 0
    try:
        terms = work.wait(20).terms
        buffers.commit()
        last = 1
    except SyncError:
        assert torch.equal(buffers.residual, owed)
        with pytest.raises(RuntimeError, match="is dead"):
            sync(ex, buffers, [torch.zeros(N)], round=1)
    ex.change_group(range(world - 1), last_rounds={0: last})
    repairs = ex.take_repairs()
    assert len(repairs) == 1 - last
    if repairs:
        terms = repairs[0].terms
    blobs = ex.exchange_objects(b"".join(p.numpy().tobytes() for p, _ in terms))
    torch.testing.assert_close(buffers.residual, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(buffers.residual, owed, atol=1e-3)
    sync(ex, buffers, [values(2, rank, N)], round=2)
    buffers.commit()
    sizes = len(buffers._owns), len(buffers._results), ex.size
    ex.close()
    return last, len(set(blobs)), sizes


@pytest.mark.nightly("3 s each", but=["3"])
@pytest.mark.parametrize("world", [3, 4])
def test_a_repaired_round_owes_what_its_encoding_lost(
    fresh_workers: Callable[..., Pool], world: int
) -> None:
    pool = fresh_workers(world, init_group=False)
    results = pool.run(_miss_the_vote, pool.store, expect_exit={world - 1})
    assert sorted(last for last, *_ in results[:-1]) == [0] * (world - 2) + [1]
    for _, num_hashes, sizes in results[:-1]:
        assert num_hashes == 1 and sizes == (1, 1, world - 1)


def _miss_the_vote_on_sub2(
    rank: int, world: int, address: tuple[str, int], n: int
) -> tuple[int, list[float]]:
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=30))
    ex = Exchange(store, rank, range(world), timeout=20.0, report_patience=2.0)
    buffers = ex.buffers(n, WireFormat("sub2"))
    if rank == world - 1:
        ex.inject_fault(action="kill", stage="vote", num_peers=1)
    work = ex.start(buffers, outer=None, params=[values(1, rank, n)], header=Header("sync"))
    last = 0
    try:
        mean = work.wait(20)
        layout, terms = mean.layout, mean.terms
        buffers.commit()
    except SyncError:
        last = -1
    ex.change_group(range(world - 1), last_rounds={0: last})
    repairs = ex.take_repairs()
    if repairs:
        layout, terms = repairs[0].layout, repairs[0].terms
    decoded = decode(Mean(terms, layout, [], [], {}, 0, 0))
    ex.close()
    return last, decoded.tolist()


# With 9,000 elements the runs of the mean have a multiple of the bytes of the payloads' runs.
@pytest.mark.nightly("3 s each", but=["5-9000"])
@pytest.mark.parametrize(("world", "n"), [(5, 20_000), (5, 9_000), (6, 9_000)])
def test_a_repaired_mean_is_on_the_wire_of_its_owners(
    fresh_workers: Callable[..., Pool], world: int, n: int
) -> None:
    pool = fresh_workers(world, init_group=False)
    results = pool.run(_miss_the_vote_on_sub2, pool.store, n, expect_exit={world - 1})[:-1]
    assert sorted(last for last, _ in results) == [-1] * (world - 2) + [0]
    assert all(mean == results[0][1] for _, mean in results)
    exact = torch.stack([values(1, rank, n) for rank in range(world)]).mean(0)
    found = torch.tensor(results[0][1])
    assert float(found @ exact / (exact @ exact)) == pytest.approx(1, abs=0.2)


def _residuals(buffers: ExchangeBuffers) -> list[Tensor]:
    return [r.clone() for r in (buffers.residual, *buffers.residuals.reductions()) if r is not None]


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _regroup(rank: int, world: int, address: tuple[str, int]) -> Any:
    """Rejected and abandoned rounds leave no trace; the same group keeps both residuals."""
    ex, buffers = _connect(address, rank, world)
    sync(ex, buffers, [values(0, rank, N)], round=0)
    buffers.commit()
    owed = _residuals(buffers)
    assert all(r.abs().sum() > 0 for r in owed)
    with pytest.raises(NonFiniteError):
        sync(ex, buffers, [torch.full((N,), float("nan") if rank == 0 else 1.0)], round=1)
    assert _equal(_residuals(buffers), owed)
    outcome = sync(ex, buffers, [values(1, rank, N)], round=1)
    agreed = _residuals(buffers)
    # All have agreed on that round and nobody has applied it: it counts.
    ex.change_group(range(world), last_rounds={0: 0})
    repairs = ex.take_repairs()
    counts = [(r.fragment, r.round) for r in repairs] == [(0, 1)]
    counts = counts and _equal([p for p, _ in repairs[0].terms], [p for p, _ in outcome.terms])
    kept = _equal(_residuals(buffers), agreed)
    if rank == 0:
        ex.inject_fault(action="fail", stage="vote")
    with pytest.raises(SyncError):
        sync(ex, buffers, [values(2, rank, N)], round=2)
    # Replica 0 has no vote in this one.
    ex.change_group(range(world), last_rounds={0: 1})
    assert ex.take_repairs() == []
    kept = kept and _equal(_residuals(buffers), agreed)
    sizes = len(buffers._owns), len(buffers._results)
    # A member that closes at once breaks off the others, which may still begin the epoch.
    ex.store.set(f"began/{rank}", "")
    ex.store.wait([f"began/{one}" for one in range(world)])
    ex.close()
    return counts, kept, len(owed), sizes


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rounds_that_nobody_applied(fresh_workers: Callable[..., Pool], world: int) -> None:
    pool = fresh_workers(world, init_group=False)
    for counts, kept, num_residuals, sizes in pool.run(_regroup, pool.store):
        assert counts and kept and num_residuals == (2 if world > 2 else 1)
        assert sizes == (1, int(world > 1))
