"""What DiLoCo computes, on real processes."""

from __future__ import annotations

import copy
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from problems import Regression, attach, batch, equal, parameters_of, train_step, ulps
from torch import Tensor, nn

from diloco_comm import SGD, DiLoCo, Link, Nesterov, ReplicaMismatch, StorePeers, Streaming, Wire
from diloco_comm.replica.fragments import Schedule

# ------------------------------------------------------------------------ limits of the method


def against_data_parallel(rank: int, world: int) -> float:
    """H=1, outer SGD(1), inner SGD: each step against averaged gradients from the same state."""
    model = Regression()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    worst = 0.0
    with DiLoCo(model, optimizer, sync_every=1, outer=SGD(1.0), wire="fp32", fragments=3):
        for step in range(20):
            before = parameters_of(model)
            for mine, theirs in zip(other.parameters(), before, strict=True):
                mine.data.copy_(theirs)
            train_step(model, optimizer, rank, step)
            x, y = batch(rank, step)
            nn.functional.mse_loss(other(x), y).backward()
            for old, new, param in zip(before, model.parameters(), other.parameters(), strict=True):
                # Each replica rounds its own local value, which may be the largest one.
                largest = (old - 0.05 * param.grad).abs()
                dist.all_reduce(largest, dist.ReduceOp.MAX)
                mean = param.grad.double()
                dist.all_reduce(mean)
                param.grad = None
                expected = old.double() - 0.05 * (mean / world)
                worst = max(worst, ulps(new.detach().double(), expected, old, largest))
    return worst


@pytest.mark.nightly("4 s each; weights that differ are the general case", but=["3-3.75"])
@pytest.mark.parametrize(("world", "limit"), [(2, 2.0), (4, 2.0), (3, 3.75)])
def test_h_1_and_outer_sgd_is_data_parallel_sgd(world: int, limit: float, workers) -> None:
    """Within 2 ulp of the largest magnitude a step where the weights 1/W are exact in fp32.

    Half an ulp each: the local values (their mean counts), the differences to the outer value
    (likewise), their sum and the last subtraction. With W=3 there are also a second sum (1/2),
    three products of a third of that magnitude (1/4 each) and the error of 1/3 in fp32 (1e-8 of
    each difference, together 1/2): 3.75 ulp.
    """
    assert max(workers(world).run(against_data_parallel)) <= limit


def test_one_replica_keeps_its_own_trajectory() -> None:
    """lr 1 and no momentum: outer - (outer - local) is local, to 1 ulp a sync."""
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    diloco = DiLoCo(model, optimizer, sync_every=3, outer=SGD(1.0), wire="fp32", attach=False)
    with diloco:
        for step in range(30):
            before = [part.outer.clone() for part in diloco.parts]
            train_step(model, optimizer, 0, step)
            local = parameters_of(model)
            diloco.step()
            flat = before[0].split([p.numel() for p in local])
            for new, old, outer in zip(model.parameters(), local, flat, strict=True):
                assert ulps(new.detach(), old, outer.view(old.shape)) <= 1


@pytest.mark.parametrize(
    ("overlap", "looked_at"), [(None, [1, 6, 12]), (Streaming(2), [1, 6, 8, 12])]
)
def test_a_step_that_sends_and_applies_nothing_is_only_counted(
    overlap: Any, looked_at: list[int]
) -> None:
    """The first step of all looks when something is due."""
    model = Regression(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with DiLoCo(model, optimizer, sync_every=6, peers="alone", overlap=overlap) as diloco:
        exchange, steps = diloco._rounds.exchange_parts, list[int]()

        def look(parts: Any, inner_step: int, *others: Any) -> None:
            steps.append(inner_step)
            exchange(parts, inner_step, *others)

        diloco._rounds.exchange_parts = look  # type: ignore[method-assign]
        for step in range(12):
            train_step(model, optimizer, 0, step, 4)
        assert diloco.inner_step == 12 and steps == looked_at
        with diloco.outer_parameters(), pytest.raises(RuntimeError, match="leave outer_param"):
            train_step(model, optimizer, 0, 12, 4)
        diloco.flush()


def simulate(
    rank: int, one: int, world: int, fragments: int, offsets: list[int], num_steps: int
) -> list[Tensor]:
    """Train the replicas one after the other, with outer parameters kept by hand."""
    models = [Regression() for _ in range(world)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    names = [name for name, _ in models[0].named_parameters()]
    probe = DiLoCo(models[0], optimizers[0], sync_every=6, fragments=fragments, attach=False)
    parts = [part.fragment.names for part in probe.parts]
    probe.close()
    assert sorted(name for part in parts for name in part) == sorted(names)
    outer = {n: p.detach().clone() for n, p in models[0].named_parameters()}
    momentum = {n: torch.zeros_like(p) for n, p in outer.items()}
    for step in range(1, num_steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, rank, step)
        for part, offset in zip(parts, offsets, strict=True):
            if step < offset or (step - offset) % 6:
                continue
            for name in part:
                local = [m.get_parameter(name).data for m in models]
                g = (outer[name] - local[0]) * (1 / world)
                for value in local[1:]:
                    g = g + (outer[name] - value) * (1 / world)
                momentum[name] = 0.9 * momentum[name] + g
                outer[name] = outer[name] - 0.4 * (g + 0.9 * momentum[name])
                for value in local:
                    value.copy_(outer[name])
    return [*outer.values(), *parameters_of(models[0]), *parameters_of(models[-1])]


def train_fragments(
    rank: int, world: int, fragments: Any, offsets: Any, num_steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    arguments = {"fragments": fragments, "offsets": offsets, "outer": Nesterov(0.4, 0.9)}
    made = DiLoCo(model, optimizer, sync_every=6, **grouped({"wire": "fp32", **arguments}))
    with closing(made) as diloco:
        for step in range(1, num_steps + 1):
            train_step(model, optimizer, rank, step)
        state = diloco.state_dict()["outer"]
        outer = [state[name].clone() for name, _ in model.named_parameters()]
    return outer, parameters_of(model)


@pytest.mark.parametrize("offsets", [None, [6, 1, 4]])
def test_fragments_equal_a_simulation_by_hand(offsets: list[int] | None, workers) -> None:
    """Bit by bit: the order of operations is that of plain torch."""
    num_steps = 20
    due = offsets or list(Schedule.plan(6, 3).offsets)
    expected = workers(1).run(simulate, 2, 3, due, num_steps)[0]
    count = len(expected) // 3
    results = workers(2).run(train_fragments, 3, offsets, num_steps)
    for rank, (outer, local) in enumerate(results):
        assert equal(outer, expected[:count])
        assert equal(local, expected[count * (1 + rank) : count * (2 + rank)])


def test_one_replica_takes_the_steps_of_snoo() -> None:
    """Progress s of one replica: m = mu*m + s; w -= lr*(s + mu*m) (arXiv 2510.15830)."""
    due = list(Schedule.plan(6, 3).offsets)
    expected = simulate(0, 1, 1, 3, due, num_steps=20)
    outer, local = train_fragments(0, 1, 3, None, num_steps=20)
    assert equal(outer, expected[: len(outer)])
    assert equal(local, expected[len(outer) : 2 * len(outer)])


FRAGMENTS = [1, 5, "layers:1", "sequential:2", [["layers.0.*", "head.*"], "rest", "norm.*"]]


def hashes_with_fragments(rank: int, world: int) -> list[tuple[str, int]]:
    results = []
    for fragments in FRAGMENTS:
        model = Regression(seed=rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with DiLoCo(model, optimizer, sync_every=4, fragments=fragments) as diloco:
            for step in range(9):
                train_step(model, optimizer, rank, step)
            diloco.flush()
            assert {m.fragment for m in diloco.metrics()} == set(range(len(diloco.parts)))
            results.append((diloco.outer_hash(), len(diloco.parts)))
    return results


def test_every_scheme_of_fragments_keeps_replicas_identical(workers) -> None:
    first, second = workers(2).run(hashes_with_fragments)
    assert first == second
    assert [num for _, num in first] == [1, 5, 5, 3, 3]


# -------------------------------------------------------------------------------- every wire


def distance_with_wire(rank: int, world: int, wire: str) -> list[float]:
    """Least squares whose replicas disagree about the target; distance to the joint optimum."""
    torch.manual_seed(0)
    joint = torch.randn(32, 32)
    model = nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    target = joint + (0.5 if rank == 0 else -0.5)
    distances = []
    with DiLoCo(model, optimizer, sync_every=5, wire=Wire(wire, block_size=32)) as diloco:
        for step in range(200):
            if step % 40 == 0:
                distances.append((model.weight.detach() - joint).norm().item())
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2 * step + rank))
            (x @ (model.weight - target).T).pow(2).sum(1).mean().mul(0.5).backward()
            optimizer.step()
            optimizer.zero_grad()
        with diloco.outer_parameters():
            distances.append((model.weight.detach() - joint).norm().item())
    return distances


def test_quantised_training_finds_the_joint_optimum(workers) -> None:
    first = {wire: workers(2).run(distance_with_wire, wire)[0] for wire in ("fp32", "int8", "int4")}
    start, final = first["fp32"][0], first["fp32"][-1]
    assert final < 0.1 * start
    assert abs(first["int8"][-1] - final) < 0.01 * start
    assert abs(first["int4"][-1] - final) < 0.03 * start


# ---------------------- Replicas that leave and replicas that join, without a restart of the others


# ----------------------------------------------------------------------- replicas that go away


def nesterov_of_torch(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9, nesterov=True)


def join_later(
    rank: int, world: int, address: tuple[str, int], outer: Any
) -> tuple[str, int, bool]:
    """Replica 2 comes when the others have trained two rounds."""
    store = dist.TCPStore(*address, is_master=False)
    arguments = {"store": store, "replica": rank, "timeout": 60, "error_feedback": True}
    if rank == 2:
        torch.manual_seed(99)
        arguments |= {"members": [0, 1, 2], "init": "join", "model_seed": 5}
    else:
        arguments |= {"num_replicas": 2}
    model, optimizer, diloco = attach(fragments=2, outer=outer, wire="int8", **arguments)
    with diloco:
        for step in range(diloco.inner_step, 4):
            train_step(model, optimizer, rank, step)
        if rank != 2:
            diloco.change_group([0, 1, 2])
        joined = diloco.outer_hash()
        assert diloco.inner_step == 4 and diloco.exchange.members == (0, 1, 2)
        momenta = [t.norm().item() for part in diloco.parts for t in part.state.tensors().values()]
        assert all(norm > 0 for norm in momenta)
        for step in range(4, 8):
            train_step(model, optimizer, rank, step)
        local = [p.detach() for p in model.parameters()]
        outer = list(diloco.state_dict()["outer"].values())
        at_last = diloco.parts[-1].fragment.names
        names = [name for name, _ in model.named_parameters()]
        matches = all(
            torch.equal(local[i], outer[i]) for i, name in enumerate(names) if name in at_last
        )
        return f"{joined} {diloco.outer_hash()}", diloco.parts[0].round, matches


@pytest.mark.parametrize("outer", [Nesterov(0.5), nesterov_of_torch], ids=["fused", "torch"])
def test_a_newcomer_is_identical_from_its_first_sync(outer: Any, fresh_workers) -> None:
    pool = fresh_workers(3, init_group=False)
    results = pool.run(join_later, pool.store, outer)
    assert results[0] == results[1] == results[2]
    assert results[0][1:] == (4, True)


def join_with_statistics(rank: int, world: int, address: tuple[str, int]) -> tuple[Tensor, Tensor]:
    """Return the running mean before and after replica 2 joined."""
    store = dist.TCPStore(*address, is_master=False)
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    joins = {"members": [0, 1, 2], "init": "join"} if rank == 2 else {"num_replicas": 2}
    arguments = {"store": store, "replica": rank, "timeout": 60, "average_buffers": True, **joins}
    before = model.running_mean.clone()
    with DiLoCo(model, optimizer, sync_every=9, **grouped(arguments)) as diloco:
        if rank != 2:
            model.running_mean.fill_(10 + rank)
            before = model.running_mean.clone()
            diloco.change_group([0, 1, 2])
        return before, model.running_mean.clone()


def test_a_newcomer_takes_the_statistics_and_the_others_keep_theirs(fresh_workers) -> None:
    pool = fresh_workers(3, init_group=False)
    first, second, third = pool.run(join_with_statistics, pool.store)
    assert torch.equal(*first) and torch.equal(*second)
    assert torch.equal(third[1], first[1]) and not torch.equal(second[1], first[1])


def join_with_another_model(rank: int, world: int, address: tuple[str, int]) -> tuple[str, str]:
    store = dist.TCPStore(*address, is_master=False)
    if rank == 2:
        model = Regression(width=12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with pytest.raises(ReplicaMismatch) as info:
            DiLoCo(
                model,
                optimizer,
                sync_every=2,
                wire="fp32",
                peers=StorePeers(store, replica=2, members=[0, 1, 2]),
                init="join",
                link=Link(timeout=60),
            )
        return str(info.value), ""
    model, optimizer, diloco = attach(store=store, replica=rank, num_replicas=2, timeout=60)
    with diloco:
        train_step(model, optimizer, rank, 0)
        with pytest.raises(ReplicaMismatch) as info:
            diloco.change_group([0, 1, 2])
        diloco.change_group([0, 1])
        train_step(model, optimizer, rank, 1)
        return str(info.value), diloco.outer_hash()


def test_a_newcomer_with_another_model_is_refused_and_the_rest_goes_on(fresh_workers) -> None:
    pool = fresh_workers(3, init_group=False)
    results = pool.run(join_with_another_model, pool.store)
    assert all("the model differs between replicas" in message for message, _ in results)
    assert results[0][1] == results[1][1] != ""
