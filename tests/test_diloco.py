"""DiLoCo on real processes: what it computes, and what it leaves alone."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problems import Regression, batch, train_step, ulps
from torch import Tensor, nn

from diloco_comm import SGD, Adam, Blocking, DiLoCo, HeavyBall, Nesterov, fedavg, local_sgd
from diloco_comm.fragments import Schedule
from diloco_comm.wire import WIRES


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


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


@pytest.mark.parametrize("world", [2, 3])
def test_h_1_and_outer_sgd_is_data_parallel_sgd(world: int, workers) -> None:
    assert max(workers(world).run(against_data_parallel)) <= world


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
    with DiLoCo(model, optimizer, sync_every=6, wire="fp32", **arguments) as diloco:
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


def hashes_of_wires(rank: int, world: int, arguments: dict[str, Any]) -> list[str]:
    hashes = []
    for wire in WIRES:
        model = Regression(seed=rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with DiLoCo(model, optimizer, sync_every=2, wire=wire, block_size=64, **arguments) as d:
            for step in range(6):
                train_step(model, optimizer, rank, step)
            d.flush()
            hashes.append(d.outer_hash())
            outer = d.state_dict()["outer"]
            for name, param in model.named_parameters():
                assert torch.equal(param.detach(), outer[name])
    return hashes


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"rounding": "stochastic", "seed": 7, "fragments": 2},
        {"error_feedback": True, "chunk_bytes": 1000},
        {"outer": Adam(), "lanes": 2, "chunk_bytes": 500},
    ],
    ids=["nearest", "stochastic", "error_feedback", "adam_lanes"],
)
def test_every_wire_keeps_replicas_identical(
    world: int, arguments: dict[str, Any], workers
) -> None:
    results = workers(world).run(hashes_of_wires, arguments)
    assert all(hashes == results[0] for hashes in results)
    assert len(set(results[0])) == len(WIRES)


def distance_with_wire(rank: int, world: int, wire: str) -> list[float]:
    """Least squares whose replicas disagree about the target; distance to the joint optimum."""
    torch.manual_seed(0)
    joint = torch.randn(32, 32)
    model = nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    target = joint + (0.5 if rank == 0 else -0.5)
    distances = []
    with DiLoCo(model, optimizer, sync_every=5, wire=wire, block_size=32) as diloco:
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


# ----------------------------------------------------------------------- kinds of parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(x)))) + self.empty.sum()


def train_tied(rank: int, world: int) -> tuple[str, int, list[Tensor]]:
    torch.manual_seed(rank)
    model = Tied()
    addresses = [param.data_ptr() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    arguments = {"fragments": ["embedding.*", "rest"], "offsets": [2, 2]}
    with DiLoCo(model, optimizer, sync_every=2, **arguments) as diloco:
        for step in range(6):
            tokens = torch.randint(0, 13, (32,), generator=torch.Generator().manual_seed(step))
            nn.functional.cross_entropy(model(tokens), (tokens + rank) % 13).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.head.weight is model.embedding.weight
        assert [param.data_ptr() for param in model.parameters()] == addresses
        elements = sum(part.num_elements for part in diloco.parts)
        return diloco.outer_hash(), elements, parameters_of(model)


def test_tied_and_zero_sized_parameters_are_written_in_place(workers) -> None:
    first, second = workers(2).run(train_tied)
    assert first[:2] == second[:2] and equal(first[2], second[2])
    assert first[1] == 13 * 8 + 8 * 8 + 8


def train_lora(rank: int, world: int) -> tuple[list[Tensor], int]:
    """Low-rank adapters train; the base is frozen and even differs between replicas."""
    model = Regression(seed=rank)
    model.requires_grad_(False)
    torch.manual_seed(5)
    for layer in model.layers:
        layer.register_parameter("a", nn.Parameter(torch.randn(2, 24) / 5))
        layer.register_parameter("b", nn.Parameter(torch.zeros(24, 2)))
        layer.register_forward_hook(lambda m, args, out: out + args[0] @ m.a.T @ m.b.T)
    base = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=2, fragments="layers:2", offsets=[2, 2]) as diloco:
        for step in range(4):
            train_step(model, optimizer, rank, step)
        elements = sum(part.num_elements for part in diloco.parts)
    after = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    assert equal(base, after)
    return [p.detach().clone() for p in model.parameters() if p.requires_grad], elements


def test_frozen_parameters_stay_and_adapters_travel(workers) -> None:
    first, second = workers(2).run(train_lora)
    assert equal(first[0], second[0]) and first[1] == second[1] == 4 * 2 * 2 * 24
    assert any(tensor.abs().max() > 0 for tensor in first[0][1::2])


def train_low_precision(rank: int, world: int, dtype: torch.dtype) -> tuple[str, float]:
    """Updates below half a unit of the parameter vanish locally, not in the outer parameters."""
    model = Regression(seed=rank).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with DiLoCo(model, optimizer, sync_every=1, outer=SGD(0.05), wire="fp32") as diloco:
        start = diloco.parts[0].outer.clone()
        for step in range(8):
            train_step(model, optimizer, rank, step)
        outer = diloco.state_dict()["outer"]
        for name, param in model.named_parameters():
            assert outer[name].dtype == torch.float32
            assert torch.equal(param.detach(), outer[name].to(dtype))
        moved = (diloco.parts[0].outer != start).float().mean().item()
        between = (diloco.parts[0].outer != diloco.parts[0].outer.to(dtype).float()).any().item()
        assert between
        return diloco.outer_hash(), moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_fp32_outer_ones(dtype: torch.dtype, workers) -> None:
    first, second = workers(2).run(train_low_precision, dtype)
    assert first == second and first[1] > 0.1


def train_mixed(rank: int, world: int) -> str:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(3, 8, 3).bfloat16(), nn.Conv2d(8, 4, 3).half())
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=1) as diloco:
        for step in range(3):
            torch.manual_seed(10 * rank + step)
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optimizer.step()
            outer = diloco.state_dict()["outer"]
            for name, param in model.named_parameters():
                assert torch.equal(param.detach(), outer[name].to(param.dtype))
        return diloco.outer_hash()


def test_mixed_dtypes_and_memory_formats_in_one_fragment(workers) -> None:
    first, second = workers(2).run(train_mixed)
    assert first == second


# ------------------------------------------------------------------------------------ buffers


def train_batch_norm(rank: int, world: int, average: bool) -> tuple[Tensor, Tensor, int]:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weight = 1.0 + 2.0 * rank
    seen = []
    arguments = {"average_buffers": average, "weight": weight, "wire": "int4", "attach": False}
    with DiLoCo(model, optimizer, sync_every=2, **arguments) as diloco:
        for step in range(4):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(10 * rank + step))
            model(x + 3 * rank).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(model[1].running_mean.clone())
            diloco.step()
        assert all(math.isfinite(m.exposed_s) for m in diloco.metrics())
    return seen[-1], model[1].running_mean.clone(), int(model[1].num_batches_tracked)


def test_buffers_are_averaged_by_weight_and_exactly(workers) -> None:
    (before_0, after_0, count_0), (before_1, after_1, count_1) = workers(2).run(
        train_batch_norm, True
    )
    assert torch.equal(after_0, after_1) and count_0 == count_1 == 4
    assert torch.equal(after_0, before_0 * 0.25 + before_1 * 0.75)


def test_buffers_stay_local_by_default(workers) -> None:
    (before, after, _), (_, other, _) = workers(2).run(train_batch_norm, False)
    assert torch.equal(before, after) and not torch.equal(after, other)


# ------------------------------------------------------------------------- kinds of optimizers


def train_with(rank: int, world: int, kind: str) -> tuple[int, list[Tensor]]:
    model = Regression()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:4], "lr": 0.02}, {"params": parameters[4:]}]
    optimizers = {
        "plain": lambda: torch.optim.AdamW(parameters, lr=0.01, foreach=False, fused=False),
        "foreach": lambda: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        "fused": lambda: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        "groups": lambda: torch.optim.AdamW(groups, lr=0.01),
        "sgd_momentum": lambda: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    }
    optimizer = optimizers[kind]()
    with DiLoCo(model, optimizer, sync_every=3, fragments=2) as diloco:
        for step in range(9):
            train_step(model, optimizer, rank, step)
        assert diloco.inner_step == 9
        return len(diloco.metrics()), parameters_of(model)[2:]


@pytest.mark.parametrize("kind", ["plain", "foreach", "fused", "groups", "sgd_momentum"])
def test_kinds_of_inner_optimizers(kind: str, workers) -> None:
    (num_syncs, first), (_, second) = workers(2).run(train_with, kind)
    assert num_syncs == 6
    # The last fragment was sent at step 9, with H=3 and offsets (1, 3).
    assert equal(first[-4:], second[-4:])


def train_several_optimizers(rank: int, world: int) -> tuple[int, int, str]:
    model = Regression()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizers = [
        torch.optim.SGD(matrices, lr=0.01, momentum=0.9),
        torch.optim.AdamW(vectors, lr=0.01),
    ]
    with DiLoCo(model, optimizers, sync_every=2) as diloco:
        for step in range(6):
            x, y = batch(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            # The order of the calls does not matter.
            for optimizer in optimizers[:: 1 if step % 2 else -1]:
                optimizer.step()
                optimizer.zero_grad()
        assert equal(parameters_of(model), [p.detach() for p in model.parameters()])
        return diloco.inner_step, len(diloco.metrics()), diloco.outer_hash()


def test_several_optimizers_are_one_logical_step(workers) -> None:
    first, second = workers(2).run(train_several_optimizers)
    assert first == second and first[:2] == (6, 3)


def train_accumulating(rank: int, world: int) -> tuple[int, str]:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=2) as diloco:
        for micro_step in range(12):
            x, y = batch(rank, micro_step)
            nn.functional.mse_loss(model(x), y).backward()
            if micro_step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        assert diloco.inner_step == 4
        return len(diloco.metrics()), diloco.outer_hash()


def test_gradient_accumulation_counts_optimizer_steps(workers) -> None:
    first, second = workers(2).run(train_accumulating)
    assert first == second and first[0] == 2


def train_compiled(rank: int, world: int, backend: str) -> tuple[int, list[Tensor]]:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    compiled = torch.compile(model, backend=backend)
    step_compiled = torch.compile(optimizer.step, backend=backend)
    with DiLoCo(compiled, optimizer, sync_every=2, wire="fp32", outer=SGD(1.0)) as diloco:
        for step in range(4):
            x, y = batch(rank, step)
            nn.functional.mse_loss(compiled(x), y).backward()
            step_compiled()
            optimizer.zero_grad()
        assert "norm.weight" in diloco.state_dict()["outer"]
        return diloco.inner_step, parameters_of(model)


def train_eagerly(rank: int, world: int) -> tuple[int, list[Tensor]]:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=2, wire="fp32", outer=SGD(1.0)) as diloco:
        for step in range(4):
            train_step(model, optimizer, rank, step)
        return diloco.inner_step, parameters_of(model)


def test_compiled_model_and_compiled_step(workers) -> None:
    """The compiled forward must see what the outer step wrote."""
    steps, expected = workers(2).run(train_eagerly)[0]
    for compiled_steps, values in workers(2).run(train_compiled, "aot_eager", timeout=110):
        assert compiled_steps == steps == 4
        for value, other in zip(values, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_inductor(workers) -> None:
    _, expected = workers(1).run(train_eagerly)[0]
    ((steps, values),) = workers(1).run(train_compiled, "inductor", timeout=110)
    assert steps == 4
    for value, other in zip(values, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------- the surface


def weighted(rank: int, world: int, is_callable: bool) -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = 1.0 + 2.0 * rank
    with fedavg(
        model, optimizer, sync_every=1, weight=(lambda: weight) if is_callable else weight
    ) as diloco:
        model.weight.data.fill_(10.0)
        diloco.parts[0].read_local()
        model.weight.grad = torch.full((1, 1), float(rank))
        optimizer.step()
        assert [m.weight for m in diloco.metrics()] == [weight]
    return [model.weight.item()]


@pytest.mark.parametrize("is_callable", [True, False])
def test_mean_is_weighted(is_callable: bool, workers) -> None:
    # Replica 0 stays at 10, replica 1 goes to 9; weights 1 and 3.
    assert workers(2).run(weighted, is_callable) == [[9.25], [9.25]]


def flush_twice(rank: int, world: int) -> tuple[list[int], str, bool]:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with local_sgd(model, optimizer, sync_every=4, fragments=2) as diloco:
        for step in range(4):
            train_step(model, optimizer, rank, step)
        synced = diloco.outer_hash()
        # Fragment 0 was sent at step 2 and has trained since; fragment 1 has not.
        diloco.flush()
        counts = [len(diloco.metrics())]
        assert [m.fragment for m in diloco.metrics()][-1] == 0
        diloco.flush()
        counts.append(len(diloco.metrics()))
        train_step(model, optimizer, rank, 5)
        diloco.flush()
        counts.append(len(diloco.metrics()))
        outer = diloco.state_dict()["outer"]
        same = all(torch.equal(p.detach(), outer[n]) for n, p in model.named_parameters())
        assert synced != diloco.outer_hash()
        return counts, diloco.outer_hash(), same


def test_flush_sends_what_was_trained_and_nothing_else(workers) -> None:
    first, second = workers(2).run(flush_twice)
    assert first == second == ([3, 3, 5], first[1], True)


def use_outer_parameters(rank: int, world: int) -> bool:
    model = Regression().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=3) as diloco:
        for step in range(5):
            train_step(model, optimizer, rank, step)
        local = parameters_of(model)
        addresses = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(KeyError, match="inside"), diloco.outer_parameters():
            outer = diloco.state_dict()["outer"]
            for name, param in model.named_parameters():
                assert torch.equal(param.detach(), outer[name].bfloat16())
            with pytest.raises(RuntimeError, match="leave outer_parameters"):
                optimizer.step()
            raise KeyError("inside")
        assert [p.data_ptr() for p in model.parameters()] == addresses
        return equal(parameters_of(model), local)


def test_outer_parameters_come_and_go_exactly(workers) -> None:
    assert workers(2).run(use_outer_parameters) == [True, True]


def measure(rank: int, world: int) -> list[dict[str, Any]]:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    arguments = {"fragments": 2, "wire": "int8", "norms": True}
    with DiLoCo(model, optimizer, sync_every=2, **arguments) as diloco:
        diloco.on_sync(seen.append)
        for step in range(4):
            train_step(model, optimizer, rank, step)
        assert diloco.metrics() == seen
        totals = diloco.totals()
        assert totals.num_syncs == 4 and totals.num_skipped == 0
        assert totals.sent_bytes == sum(m.sent_bytes for m in seen)
        assert totals.exposed_s == pytest.approx(sum(m.exposed_s for m in seen))
        payloads = {part.index: part.slot.layout.payload_bytes for part in diloco.parts}
    for metrics in seen:
        # One phase for two replicas: the payload, and two messages of control.
        assert 0 < metrics.sent_bytes - payloads[metrics.fragment] < 512
        assert metrics.encode_s > 0 and metrics.outer_step_s > 0 and metrics.exposed_s > 0
        assert 0 <= metrics.overlap_fraction <= 1
        assert 0 < metrics.pseudo_gradient_norm < 10
    return [(m.fragment, m.round, m.inner_step, m.is_applied) for m in seen]


def test_metrics(workers) -> None:
    expected = [(0, 0, 1, True), (1, 0, 2, True), (0, 1, 3, True), (1, 1, 4, True)]
    assert workers(2).run(measure) == [expected] * 2


def step_by_hand(rank: int, world: int) -> tuple[int, int]:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, attach=False) as diloco:
        for step in range(4):
            train_step(model, optimizer, rank, step)
        before = len(diloco.metrics())
        diloco.step()
        diloco.step()
        return before, len(diloco.metrics())


def test_without_hooks_the_user_steps(workers) -> None:
    assert workers(2).run(step_by_hand) == [(0, 1), (0, 1)]


def with_config(rank: int, world: int, config: dict[str, Any] | None) -> dict[str, Any]:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if config is not None:
        with DiLoCo(model, optimizer, config=config, block_size=32) as diloco:
            return diloco.config()
    arguments = {"fragments": ["layers.*", "rest"], "outer": HeavyBall(0.2), "wire": "e3m0"}
    with DiLoCo(model, optimizer, sync_every=7, overlap=Blocking(), **arguments) as diloco:
        return diloco.config()


def test_configuration_can_be_saved_and_used_again(workers) -> None:
    saved = workers(1).run(with_config, None)[0]
    again = workers(1).run(with_config, json.loads(json.dumps(saved)))[0]
    assert saved["sync_every"] == 7 and saved["wire"] == "e3m0"
    assert again == {**saved, "block_size": 32}


def over_mesh_and_subgroup(rank: int, world: int) -> list[str]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    hashes = []
    for arguments in ({"mesh": mesh["replica"]}, {"group": mesh["replica"].get_group()}):
        model = Regression(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, sync_every=1, **arguments) as diloco:
            train_step(model, optimizer, rank, 0)
            assert diloco.exchange.size == 2
            hashes.append(diloco.outer_hash())
    return hashes


def test_replicas_along_one_dimension_of_a_mesh(workers) -> None:
    results = workers(4).run(over_mesh_and_subgroup)
    assert results[0] == results[2] and results[1] == results[3] and results[0] != results[1]


def over_store(rank: int, world: int, address: tuple[str, int]) -> str:
    assert not dist.is_initialized()
    store = dist.TCPStore(*address, is_master=False)
    model = Regression(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {"replica": 5 + rank, "members": [5, 6]} if world == 2 else {}
    with DiLoCo(model, optimizer, sync_every=1, store=store, **arguments) as diloco:
        for step in range(3):
            train_step(model, optimizer, rank, step)
        assert diloco.exchange.members == (5, 6)
        return diloco.outer_hash()


def test_separate_jobs_meet_at_a_store(fresh_workers) -> None:
    pool = fresh_workers(2, init_group=False)
    first, second = pool.run(over_store, pool.store)
    assert first == second


def two_on_one_group(rank: int, world: int) -> tuple[str, str]:
    """Two attachments whose steps alternate in a different order on each replica would mix."""
    models = [Regression(seed=rank), Regression(width=12, seed=rank)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    pairs = zip(models, optimizers, strict=True)
    attached = [DiLoCo(m, o, sync_every=2) for m, o in pairs]
    for step in range(4):
        for model, optimizer, width in zip(models, optimizers, (24, 12), strict=True):
            train_step(model, optimizer, rank, step, width)
    hashes = tuple(diloco.outer_hash() for diloco in attached)
    for diloco in attached:
        diloco.close()
        diloco.close()
    return hashes


def test_two_attachments_in_one_process(workers) -> None:
    first, second = workers(2).run(two_on_one_group)
    assert first == second and first[0] != first[1]


def closed_hooks(rank: int, world: int) -> int:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=1) as diloco:
        train_step(model, optimizer, rank, 0)
    train_step(model, optimizer, rank, 1)
    return diloco.inner_step


def test_close_takes_the_hooks_off(workers) -> None:
    assert workers(2).run(closed_hooks) == [1, 1]
