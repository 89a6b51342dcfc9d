"""Bad values while replicas join, leave, or have several workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import test_fsdp
import test_shard_group
import torch
import torch.distributed as dist
from choice_groups import grouped
from fault_replicas import Failure, Replica, Result, Setup, check_agreement
from problems import equal
from torch import Tensor, nn
from workers import Pool

from diloco_comm import CO2, Blocking, Delayed, DiLoCo, Eager, HeavyBall, Streaming, SyncError

H, VICTIM = 4, 1


@torch.no_grad()
def spoil(model: nn.Module) -> None:
    next(model.parameters())[0, 0] = math.nan


def forgetful(
    address: tuple[str, int], number: int, members: Any, setup: Setup, **options: Any
) -> Replica:
    """Make a replica that clears its moments when it is reset."""
    made: list[Replica] = []

    def forget(params: list[nn.Parameter]) -> None:
        for param in params:
            made[0].optimizer.state.pop(param, None)

    made.append(Replica(address, number, members, setup, on_reset=forget, **options))
    return made[0]


# --------------------------------------------------------------------------------------- joining


def skip_and_join(
    rank: int, world: int, address: tuple[str, int], setup: Setup
) -> tuple[Failure, list[bool]]:
    """Two of two rounds are skipped, then a replica joins, and the sick one stays sick."""
    if rank == 2:
        replica = Replica(address, rank, range(3), setup, init="join")
    else:
        replica = Replica(address, rank, range(2), setup)
        replica.train_to(H + 2)
        if rank == VICTIM:
            spoil(replica.model)
        replica.train_to(4 * H - 1)
        replica.diloco.change_group(range(3))
    failure = replica.train_until_failure(6 * H)
    applied = [metrics.is_applied for metrics in replica.diloco.metrics()]
    replica.diloco.close()
    return failure, applied


@pytest.mark.parametrize("overlap", [Blocking(), Streaming(2)], ids=["blocking", "streaming"])
def test_a_newcomer_counts_as_the_others_do(workers: Callable[[int], Pool], overlap: Any) -> None:
    setup = Setup("int8", 1, H, options={"on_nonfinite": "skip", "overlap": overlap})
    pool = workers(3)
    results = pool.run(skip_and_join, pool.store, setup, timeout=60)
    for rank, (failure, applied) in enumerate(results):
        assert failure.kind == "NonFiniteError", failure
        assert failure.details["replicas"] == (VICTIM,)
        # All count from when the group was formed: three may be skipped, the fourth raises.
        assert failure.inner_step == 7 * H + overlap.steps()
        assert failure.message == results[0][0].message
        assert "3 rounds in a row" in failure.message
        before = [True, False, False] if rank < 2 else []
        assert applied == before + [False] * 4


def reset_and_join(rank: int, world: int, address: tuple[str, int], setup: Setup) -> Result:
    """A replica is reset before a newcomer comes, and again after that."""
    if rank == 2:
        replica = forgetful(address, rank, range(3), setup, init="join")
    else:
        replica = forgetful(address, rank, range(2), setup)
        replica.train_to(H + 2)
        if rank == VICTIM:
            spoil(replica.model)
        replica.train_to(3 * H + 1)
        replica.diloco.change_group(range(3))
    if rank == VICTIM:
        spoil(replica.model)
    replica.train_to(6 * H)
    # A round that is under way when the group changes is lost, and not counted.
    is_late = setup.options["overlap"].rounds > 0
    assert replica.diloco.totals().num_reset == (2 - is_late if rank == VICTIM else 0)
    replica.diloco.flush()
    result = replica.result()
    replica.diloco.close()
    return result


@pytest.mark.parametrize(
    "overlap", [Blocking(), Delayed(2), Eager(2, "skip")], ids=lambda overlap: repr(overlap)
)
def test_a_newcomer_among_resets(workers: Callable[[int], Pool], overlap: Any) -> None:
    setup = Setup("int4", 2, H, options={"on_nonfinite": "reset", "overlap": overlap})
    pool = workers(3)
    results = pool.run(reset_and_join, pool.store, setup, timeout=60)
    check_agreement(results)
    assert len({result.local for result in results}) == 1


# --------------------------------------------------------------------------------------- leaving


def reset_and_leave(
    rank: int, world: int, address: tuple[str, int], setup: Setup, dies: bool
) -> tuple[Result, bool] | None:
    """The last replica is gone in the round in which another one is reset."""
    replica = forgetful(address, rank, range(3), setup)
    replica.train_to(2 * H - 1)
    replica.diloco.state_dict()  # waits for the first round, which is not the one that fails
    replica.store.set(f"ready/{rank}", "")
    replica.store.wait([f"ready/{number}" for number in range(3)])
    if rank == VICTIM:
        spoil(replica.model)
    if rank == 2:
        if dies:
            replica.fault("kill", "header")
            replica.train_to(3 * H)
        replica.diloco.close()
        return None
    failure = replica.train_until_failure(2 * H)
    # Whatever became of the round, the replica was reset.
    is_finite = all(bool(param.isfinite().all()) for param in replica.model.parameters())
    replica.diloco.change_group(range(2))
    replica.train_to(6 * H)
    assert replica.diloco.totals().num_reset <= 1
    replica.diloco.flush()
    result = replica.result([failure])
    replica.diloco.close()
    return result, is_finite


@pytest.mark.nightly(
    "up to 6 s each; they differ in policy and failure",
    but=["Streaming(delay=1, alpha=0.5)--dies", "Eager(rounds=2, first='sync')--leaves"],
)
@pytest.mark.parametrize("dies", [False, True], ids=["leaves", "dies"])
@pytest.mark.parametrize(
    ("overlap", "more"),
    [
        (Blocking(), {}),
        (Streaming(1), {"error_feedback": True}),
        (Delayed(), {"error_feedback": True}),
        (Eager(2, "sync"), {}),
        (CO2(), {"outer": HeavyBall(0.5, 0.5)}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else repr(value),
)
def test_a_group_that_fails_in_the_round_of_a_reset(
    fresh_workers: Callable[..., Pool], overlap: Any, more: dict[str, Any], dies: bool
) -> None:
    options = {"on_nonfinite": "reset", "overlap": overlap, **more}
    setup = Setup("int8", 1, H, options=options)
    pool = fresh_workers(3, init_group=False)
    ends = {2} if dies else set()
    results: list[Any] = pool.run(
        reset_and_leave, pool.store, setup, dies, expect_exit=ends, timeout=60
    )
    survivors = [result for result, _ in results[:2]]
    assert all(is_finite for _, is_finite in results[:2])
    assert {result.failures[0].kind for result in survivors} <= {"PeerLeft", "SyncError"}
    check_agreement(survivors)
    assert survivors[0].local == survivors[1].local


def owe_and_reset(rank: int, world: int, address: tuple[str, int], setup: Setup) -> list[Any]:
    """What a replica owes from a lost round stays owed when it is reset, and flush sends it."""
    replica = forgetful(address, rank, range(3), setup)
    replica.train_to(2 * H - 1)
    if rank == 2:
        replica.diloco.close()
        return []
    replica.train_until_failure(4 * H)
    replica.diloco.change_group(range(2))
    part = replica.diloco.parts[0]
    owed = part.buffers.residuals.added.clone()
    replica.train_to(replica.diloco.inner_step // H * H + H - 1)
    if rank == VICTIM:
        spoil(replica.model)
    replica.step()
    after_reset = part.owed.is_lost, part.buffers.residuals.added
    replica.diloco.flush()
    rest = part.buffers.residuals.added
    is_paid = not part.owed.is_lost and (rest is None or not bool(rest.any()))
    result = replica.result()
    assert [m.reset_replicas for m in replica.diloco.metrics()].count((VICTIM,)) == 1
    replica.diloco.close()
    is_owed = after_reset[0] and equal([after_reset[1]], [owed])
    return [bool(owed.any()), is_owed == (rank == VICTIM), is_paid, result]


@pytest.mark.parametrize("overlap", [Delayed(), Eager(2)], ids=lambda overlap: repr(overlap))
def test_what_is_owed_outlives_a_reset(workers: Callable[[int], Pool], overlap: Any) -> None:
    setup = Setup("fp32", 1, H, options={"on_nonfinite": "reset", "overlap": overlap})
    pool = workers(3)
    results = pool.run(owe_and_reset, pool.store, setup, timeout=60)[:2]
    assert [result[:3] for result in results] == [[True] * 3] * 2
    check_agreement([result for *_, result in results])


# ------------------------------------------------------------------------ replicas of two workers

Sharded = tuple[list[Tensor], list[Tensor], list[Any], int, int]


def finish(
    model: nn.Module, optimizer: Any, diloco: DiLoCo, everything: Callable[..., list[Tensor]]
) -> Sharded:
    verdicts = [(m.is_applied, m.reset_replicas) for m in diloco.metrics()]
    num_reset = diloco.totals().num_reset
    moments = [
        value.to_local() if hasattr(value, "to_local") else value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    diloco.flush()
    return everything(model, diloco), moments, verdicts, num_reset, diloco.inner_step


def one_shard(rank: int, world: int, policy: dict[str, Any]) -> Sharded:
    """Worker 1 of replica 0 has a NaN in its shard of one fragment, once."""
    mesh = test_fsdp.make_mesh(world)
    model = test_fsdp.make_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def forget(params: list[nn.Parameter]) -> None:
        for param in params:
            optimizer.state.pop(param, None)

    settings = {"sync_every": 2, "fragments": test_fsdp.FRAGMENTS, "wire": "int8", **policy}
    diloco = DiLoCo(
        model,
        optimizer,
        **grouped(
            {"mesh": mesh["replica"], "on_nonfinite": "reset", "on_reset": forget, **settings}
        ),
    )
    with diloco:
        test_fsdp.train(model, optimizer, mesh, range(5))
        if rank == 1:
            next(model.parameters()).to_local().data.view(-1)[0] = torch.nan
        test_fsdp.train(model, optimizer, mesh, range(5, 12))
        return finish(model, optimizer, diloco, test_fsdp.everything)


def one_range(rank: int, world: int, policy: dict[str, Any]) -> Sharded:
    """Worker 1 of replica 0 has a NaN in its range alone, and the parameters are the same."""
    mesh = test_shard_group.make_mesh(world)
    made: list[Any] = []

    def forget(params: list[nn.Parameter]) -> None:
        for param in params:
            made[0].state.pop(param, None)

    arguments = {"on_nonfinite": "reset", "on_reset": forget, "wire": "int8", **policy}
    model, optimizer, diloco = test_shard_group.attach(mesh, is_shared=True, **arguments)
    made.append(optimizer)
    with diloco:
        test_shard_group.train(model, optimizer, mesh, range(5))
        if rank < 2:
            list(model.parameters())[-1].data.fill_(torch.nan)
        test_shard_group.train(model, optimizer, mesh, range(5, 12))
        return finish(model, optimizer, diloco, test_shard_group.everything)


@pytest.mark.nightly(
    "up to 4 s each; they differ in policy and in what is inside a replica",
    but=["Streaming-fsdp", "Blocking-shard_group"],
)
@pytest.mark.parametrize("body", [one_shard, one_range], ids=["fsdp", "shard_group"])
@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"overlap": Streaming(1), "norms": True},
        {"overlap": Delayed(2), "norms": True},
        {"overlap": Eager(), "fragments": 1},
        {"overlap": CO2(0.5, "gap-aware"), "outer": HeavyBall(0.5, 0.5)},
    ],
    ids=lambda policy: type(policy.get("overlap", Blocking())).__name__,
)
def test_workers_of_a_replica_are_reset_together(
    workers: Callable[[int], Pool],
    body: Callable[..., Sharded],
    policy: dict[str, Any],
) -> None:
    results = workers(4).run(body, policy)
    for rank, (tensors, moments, verdicts, num_reset, inner_step) in enumerate(results):
        assert inner_step == 12
        assert equal(tensors, results[0][0])
        assert all(tensor.isfinite().all() for tensor in (*tensors, *moments))
        assert all(is_applied for is_applied, _ in verdicts)
        # Both workers of replica 0 were reset, and their peers know it.
        assert num_reset == (1 if rank < 2 else 0), results
        assert sorted(reset for _, reset in verdicts if reset) == [(0,)]
    for one, other in ((0, 1), (2, 3)):
        assert body is one_shard or equal(results[one][1], results[other][1])


def too_often(rank: int, world: int, mode: str) -> tuple[str, int]:
    """A shard that stays bad ends the run on all workers of all replicas, at the same step."""
    mesh = test_fsdp.make_mesh(world)
    model = test_fsdp.make_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"sync_every": 2, "fragments": 1, "on_nonfinite": mode, "max_skipped": 2}
    with DiLoCo(model, optimizer, **grouped({"mesh": mesh["replica"], **settings})) as diloco:
        for step in range(20):
            try:
                test_fsdp.train(model, optimizer, mesh, range(step, step + 1))
            except SyncError as error:
                dist.barrier()
                return f"{type(error).__name__} {error}", diloco.inner_step
            if step == 2 and rank == 1:
                next(model.parameters()).to_local().data.view(-1)[0] = torch.nan
    return "", 0


@pytest.mark.parametrize("mode", ["skip", "reset"])
def test_a_shard_that_stays_bad_ends_the_run(workers: Callable[[int], Pool], mode: str) -> None:
    results = workers(4).run(too_often, mode)
    assert {inner_step for _, inner_step in results} == {8}
    assert all(text.startswith("NonFiniteError") for text, _ in results)
    assert all("2 rounds in a row" in text and "replica 0" in text for text, _ in results)
