"""Peers that die, hang or leave: clear errors, and a way on without a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exchange_helpers import N, connect_replica, gives_reference_bytes, sync, values
from workers import Pool

from diloco_comm.base.errors import PeerLeft, SyncError
from diloco_comm.exchange.round import Header
from diloco_comm.ops.wire import WireFormat

Fresh = Callable[..., Pool]
Address = tuple[str, int]


def _survive(
    rank: int,
    world: int,
    address: Address,
    victim: int,
    fault: dict[str, Any],
    collectives: str = "gloo",
) -> Any:
    """Two good rounds, one in which the victim dies, and one among the survivors."""
    everybody = list(range(world))
    ex = connect_replica(address, rank, everybody, collectives=collectives)
    buffers = ex.buffers(N, WireFormat("int8"))
    assert all([gives_reference_bytes(ex, buffers, round, everybody) for round in range(2)])
    if rank == victim:
        ex.inject_fault(action="kill", **fault)
    params = values(2, rank, N)
    before = params.clone()
    error, last, terms = None, 1, []
    try:
        terms = sync(ex, buffers, [params], round=2).terms
        buffers.commit()
        last = 2
    except SyncError as caught:
        error = caught
    assert torch.equal(params, before)
    if error is not None:
        with pytest.raises(RuntimeError, match="is dead"):
            sync(ex, buffers, [params], round=3)
    survivors = [replica for replica in everybody if replica != victim]
    ex.change_group(survivors, last_rounds={0: last})
    repairs = ex.take_repairs()
    repaired = [(r.fragment, r.round, [c for _, c in r.terms]) for r in repairs]
    terms = repairs[0].terms if repairs else terms
    hashes = ex.exchange_objects(b"".join(p.numpy().tobytes() for p, _ in terms)[:4096])
    going_on = gives_reference_bytes(ex, buffers, 7, survivors)
    ex.close()
    return error, last, repaired, len(set(hashes)), going_on


FAULTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"stage": "header"}),
    (3, {"stage": "header", "num_peers": 1}),
    (2, {"stage": "post_exchange", "chunk": 5}),
    (3, {"stage": "post_exchange", "chunk": 5}),
    (3, {"stage": "wait_exchange", "chunk": 0}),
    (3, {"stage": "wait_publish", "chunk": 1}),
    (2, {"stage": "vote"}),
    (3, {"stage": "vote"}),
]


@pytest.mark.nightly(
    "3 s each; the first tier has a death before the exchange and one at the vote",
    but=["2-header-first-gloo", "3-vote-last-gloo", "3-post_exchange-last-tcp"],
)
@pytest.mark.parametrize("collectives", ["gloo", "tcp"])
@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize(
    ("world", "fault"), FAULTS, ids=lambda f: str(f) if isinstance(f, int) else f["stage"]
)
def test_sigkill_of_a_peer(
    fresh_workers: Fresh, world: int, which: str, fault: dict[str, Any], collectives: str
) -> None:
    victim = 0 if which == "first" else world - 1
    pool = fresh_workers(world, init_group=False)
    results = pool.run(_survive, pool.store, victim, fault, collectives, expect_exit={victim})
    survivors = [result for rank, result in enumerate(results) if rank != victim]
    # Once all survivors have voted the round counts. Of two, one may hear of the death before.
    counted = [[(0, 2)]] if world == 2 else [[(0, 2)], []]
    expected = counted if fault["stage"] == "vote" else [[]]
    assert all(result[2:4] == survivors[0][2:4] for result in survivors)
    for error, last, repaired, num_hashes, going_on in survivors:
        assert isinstance(error, SyncError) and last == 1
        assert [(fragment, number) for fragment, number, _ in repaired] in expected
        assert num_hashes == 1
        assert error.missing == (victim,), str(error)
        assert error.fragment == 0 and error.round == 2 and error.stage
        assert f"replica {victim} has ended" in str(error)
        assert "gloo" not in str(error) and "the connection was closed" in str(error)
        assert going_on


@pytest.mark.nightly("3 s each; they differ in the survivor", but=["0"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_survivor_that_missed_the_vote_gets_the_round(fresh_workers: Fresh, victim: int) -> None:
    """The victim votes to one peer and dies: one survivor applies the round, the other must."""
    pool = fresh_workers(3, init_group=False)
    fault = {"stage": "vote", "num_peers": 1}
    results = pool.run(_survive, pool.store, victim, fault, expect_exit={victim})
    survivors = [result for result in results if result is not None]
    lasts = sorted(last for _, last, *_ in survivors)
    assert lasts == [1, 2]
    for error, last, repaired, num_hashes, going_on in survivors:
        assert (error is None) == (last == 2)
        assert repaired == ([] if last == 2 else [(0, 2, [1.0])])
        assert num_hashes == 1 and going_on


def _leave_early(rank: int, world: int, address: Address) -> Any:
    ex = connect_replica(address, rank, list(range(world)))
    buffers = ex.buffers(N, WireFormat("int8"))
    ex.start(buffers, outer=None, params=[values(0, rank, N)], header=Header(inner_step=70)).wait(
        20
    )
    buffers.commit()
    if rank == 1:
        ex.close()
        return None
    if rank == 2:
        ex.store.wait(["failed/0"])  # rank 0 waits for a header that is not there yet
    with pytest.raises(PeerLeft) as caught:
        gives_reference_bytes(ex, buffers, 1, list(range(world)))
    ex.store.set(f"failed/{rank}", "")
    ex.close()
    return caught.value


def test_a_replica_that_closes_early(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    results = pool.run(_leave_early, pool.store)
    for rank in (0, 2):
        error = results[rank]
        assert 1 in error.replicas and error.inner_steps[error.replicas.index(1)] == 70
        assert "closed " in str(error) and " left, at inner step" in str(error)


def _join(rank: int, world: int, address: Address, collectives: str) -> Any:
    """Replicas 0 and 1 train; replica 2 comes, gets the state from 0, and takes part."""
    if rank == 2:
        ex = connect_replica(address, 2, [0, 1, 2], join=True, collectives=collectives)
    else:
        ex = connect_replica(address, rank, [0, 1], collectives=collectives)
        buffers = ex.buffers(N, WireFormat("int8"))
        assert all([gives_reference_bytes(ex, buffers, round, [0, 1]) for round in range(3)])
        ex.change_group([0, 1, 2], last_rounds={0: 2})
        assert ex.take_repairs() == []
    state = torch.full((100,), 7.0 if rank < 2 else 0.0)
    ex.broadcast([state], min(r for r in ex.members if r not in ex.joined))
    if rank == 2:
        buffers = ex.buffers(N, WireFormat("int8"))
    fine = gives_reference_bytes(ex, buffers, 3, [0, 1, 2])
    result = ex.joined, state.unique().tolist(), fine, ex.epoch
    ex.close()
    return result


@pytest.mark.parametrize("collectives", ["gloo", "tcp"])
def test_a_joiner(fresh_workers: Fresh, collectives: str) -> None:
    pool = fresh_workers(3, init_group=False)
    results = pool.run(_join, pool.store, collectives)
    assert all(result == results[0] for result in results)
    joined, state, fine, _ = results[0]
    assert joined == (2,) and state == [7.0] and fine


def _retry(rank: int, world: int, address: Address) -> bool:
    """The first attempt to regroup fails, because a member is dead; the second one succeeds."""
    ex = connect_replica(address, rank, [0, 1, 2])
    buffers = ex.buffers(N, WireFormat("int8"))
    assert gives_reference_bytes(ex, buffers, 0, [0, 1, 2])
    if rank == 2:
        ex.inject_fault(action="kill", stage="header")
    with pytest.raises(SyncError):
        gives_reference_bytes(ex, buffers, 1, [0, 1, 2])
    ex.timeout = 2.0 + rank
    with pytest.raises(SyncError, match=r"\[2\] did not come|differs"):
        ex.change_group([0, 1, 2], last_rounds={0: 0})
    ex.timeout = 20.0
    ex.change_group([0, 1], last_rounds={0: 0})
    fine = gives_reference_bytes(ex, buffers, 1, [0, 1])
    ex.close()
    return fine


def test_change_group_survives_a_failed_attempt(fresh_workers: Fresh) -> None:
    pool = fresh_workers(3, init_group=False)
    assert pool.run(_retry, pool.store, expect_exit={2})[:2] == [True, True]
