"""Parameters in bf16 and fp16: progress starts from the outer value as the parameter holds it."""

from __future__ import annotations

from typing import Any

import device_training
import numpy as np
import pytest
import torch
from choice_groups import grouped
from device_training import Replica
from oracle import BF16, FP16, Grid, Method, OuterOptimizer, simulate
from peak_memory import peak_bytes
from problems import equal
from torch import Tensor, nn

from diloco_comm import (
    CO2,
    SGD,
    Adam,
    Blocking,
    Delayed,
    DiLoCo,
    Eager,
    HeavyBall,
    Nesterov,
    Streaming,
)

SIZE = 192
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Halves(nn.Module):
    """Two parameters with the given dtypes, which start with random values."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        values = random_values(0, 0, 0.1).chunk(len(dtypes))
        pairs = zip(values, dtypes, strict=True)
        self.tensors = nn.ParameterList(nn.Parameter(value.to(dtype)) for value, dtype in pairs)

    def values(self) -> Tensor:
        return torch.cat([tensor.detach().float() for tensor in self.tensors])


def random_values(rank: int, step: int, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(SIZE, generator=generator) * size


def change(rank: int, step: int) -> Tensor:
    """Return what an inner step adds, exact in bf16: a part is the same on all replicas."""
    return (random_values(9, 0, 2e-4) + random_values(rank + 1, step, 1e-3)).bfloat16().float()


def take_step(optimizer: torch.optim.Optimizer, model: Halves, added: Tensor) -> None:
    """Take one SGD step at rate 1, which rounds once."""
    gradients = added.neg().split([tensor.numel() for tensor in model.tensors])
    for tensor, gradient in zip(model.tensors, gradients, strict=True):
        tensor.grad = gradient.to(tensor.dtype)
    optimizer.step()


def outer_of(diloco: DiLoCo) -> Tensor:
    return torch.cat([part.outer for part in diloco.parts])


# ------------------------------------------------------------------------- against the oracle


# Arguments of DiLoCo, and the same method for the oracle.
METHODS: dict[str, tuple[dict[str, Any], Method]] = {
    "blocking": ({"overlap": Blocking()}, Method()),
    "delayed-2": ({"overlap": Delayed(2)}, Method("delayed", rounds=2)),
    "eager-1": ({"overlap": Eager(1)}, Method("eager")),
    "eager-2-skip": ({"overlap": Eager(2, "skip")}, Method("eager", rounds=2, first="skip")),
    "eager-1-sync": ({"overlap": Eager(1, "sync")}, Method("eager", first="sync")),
    "CO2": ({"overlap": CO2(0.01, 2.0)}, Method("delayed", gap=2.0, clip=0.01)),
    "streaming-0": ({"overlap": Streaming(1, 0.0)}, Method("streaming", (1, 1))),
    "streaming-25": ({"overlap": Streaming(2, 0.25)}, Method("streaming", (2, 2), 0.25)),
    "streaming-50": ({"overlap": Streaming(0, 0.5)}, Method("streaming", (0, 0), 0.5)),
    "streaming-90": ({"overlap": Streaming(1, 0.9)}, Method("streaming", (1, 1), 0.9)),
}
NUM_STEPS, H = 26, 3


def trained(rank: int, world: int, dtype: str) -> list[list[tuple[Tensor, Tensor]]]:
    """Return for each method the local and the outer values after every inner step."""
    traces = []
    for arguments, method in METHODS.values():
        model = Halves(DTYPES[dtype])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = (HeavyBall if method.clip < 1 else Nesterov)(0.5, 0.75)
        given = {"sync_every": H, "wire": "fp32", "outer": outer, **arguments}
        trace = []
        with DiLoCo(model, optimizer, **grouped(given)) as diloco:
            for step in range(1, NUM_STEPS + 1):
                take_step(optimizer, model, change(rank, step))
                trace.append((model.values(), outer_of(diloco)))
        traces.append(trace)
    return traces


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_policy_against_the_oracle(dtype: str, workers) -> None:
    grid: Grid = {"bf16": BF16, "fp16": FP16}[dtype]

    def inner(rank: int, step: int, x: np.ndarray) -> np.ndarray:
        return grid.nearest(x + change(rank, step).double().numpy())

    results = workers(2).run(trained, dtype)
    start = Halves(DTYPES[dtype]).values().double().numpy()
    for index, (name, (_, method)) in enumerate(METHODS.items()):
        kind = "heavy_ball" if method.clip < 1 else "nesterov"
        method.grid = grid
        run = simulate(
            start, NUM_STEPS, H, method, lambda kind=kind: OuterOptimizer(kind, 0.5, 0.75), inner
        )
        differ = np.zeros(SIZE, dtype=bool)
        for rank, traces in enumerate(results):
            for step, (local, outer) in enumerate(traces[index], start=1):
                differ |= local.numpy() != run.local[step][rank]
                differ |= np.abs(outer.numpy() - run.outer[step][rank]) > 1e-6
        # fp32 errors take a value across the middle of two numbers now and then.
        assert differ.mean() < 0.03, name


# ------------------------------------------------------------------------ nothing moves by itself


POLICIES: dict[str, Any] = {
    "blocking": Blocking(),
    "delayed-1": Delayed(1),
    "delayed-2": Delayed(2),
    "eager-1": Eager(1),
    "eager-2": Eager(2, "skip"),
    "CO2": CO2(gap="gap-aware"),
    "streaming-0": Streaming(1, 0.0),
    "streaming-25": Streaming(1, 0.25),
    "streaming-50": Streaming(1, 0.5),
    "streaming-90": Streaming(1, 0.9),
}
FEEDBACK = {"wire": "int4", "block_size": 64, "error_feedback": True}
WIRES: dict[str, dict[str, Any]] = {
    "fp32": {"wire": "fp32"},
    "int4": FEEDBACK,
    "int4-random": {**FEEDBACK, "rounding": "stochastic", "seed": 3},
}
OUTERS = {
    "nesterov": Nesterov(0.7, 0.9),
    "heavy-ball": HeavyBall(0.4, 0.9),
    "sgd": SGD(0.7),
    "adam": Adam(0.01, eps=1e-3),
}
# Rounds with gradients, rounds in which the momentum runs out, rounds that move nothing.
TRAINED, SETTLED, WATCHED = 30, 250, 50


def moves(rank: int, world: int, policy: str, wire: str, outer: str) -> list[float]:
    """Return the largest moves of local and outer values in the rounds that are watched."""
    model = Halves(torch.bfloat16, torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"sync_every": 2, "overlap": POLICIES[policy], "outer": OUTERS[outer]}
    step = 0
    with DiLoCo(model, optimizer, **grouped({**given, **WIRES[wire]})) as diloco:

        def train(num_rounds: int, rate: float) -> tuple[Tensor, Tensor]:
            nonlocal step
            for _ in range(2 * num_rounds):
                step += 1
                take_step(optimizer, model, change(rank, step) * rate)
            return model.values(), outer_of(diloco)

        start, _ = train(0, 1.0)
        end, _ = train(TRAINED, 1.0)
        before, after = train(SETTLED, 0.0), train(WATCHED, 0.0)
    assert (start != end).float().mean() > 0.9
    return [(a - b).abs().max().item() for a, b in zip(before, after, strict=True)]


@pytest.mark.each_value("120 combinations of policies, wires and outer optimizers, 1 s each")
@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("policy", POLICIES)
def test_without_gradient_nothing_moves(policy: str, wire: str, outer: str, workers) -> None:
    for local, shared in workers(2).run(moves, policy, wire, outer):
        assert local == 0
        # The outer values may come to rest for ever: by less than a unit of the parameter.
        assert shared < 1e-6


# ------------------------------------------------------------------------------ small progress


def creep(rank: int, world: int, overlap: Any) -> list[tuple[float, float]]:
    """One of two replicas moves by one unit a round: return local and outer values of 2 from 1.5.

    The mean is half a unit, and the outer learning rate makes an eighth of it.
    """
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    given = {"sync_every": 1, "wire": "fp32", "outer": SGD(0.25), "overlap": overlap}
    with DiLoCo(model, optimizer, **grouped(given)) as diloco:
        for _ in range(33):
            model.weight.grad = torch.full_like(model.weight, rank * 2.0**-7)
            optimizer.step()
            seen.append((model.weight.item(), outer_of(diloco).item()))
    return seen


@pytest.mark.parametrize("overlap", [Blocking(), Delayed(), Streaming(0, 0.5)], ids=repr)
def test_progress_below_one_unit_is_collected(overlap: Any, workers) -> None:
    unit, late = 2.0**-7, int(isinstance(overlap, Delayed))
    for seen in workers(2).run(creep, overlap):
        outer = [1.5 - unit / 8 * max(step - late, 0) for step in range(1, 34)]
        assert [value for _, value in seen] == outer
        if not isinstance(overlap, Streaming):
            assert [local for local, _ in seen] == [BF16.nearest(np.array(v)) for v in outer]


def owed_progress(rank: int, world: int) -> list[float]:
    """Return the largest value that is owed when a round fails and nothing was trained since."""
    model = Halves(torch.bfloat16, torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"sync_every": 1, "wire": "fp32", "outer": Nesterov(0.7, 0.9), "overlap": Delayed()}
    owed = []
    with DiLoCo(model, optimizer, **grouped(given)) as diloco:
        for step in range(1, 6):
            take_step(optimizer, model, change(rank, step))
            (part,) = diloco.parts
            owed.append(part.progress().abs().max().item())
    return owed


def test_what_was_sent_leaves_no_progress(workers) -> None:
    """The rounding of the local parameters, which were just written, is no progress."""
    assert workers(2).run(owed_progress) == [[0.0] * 5] * 2


def test_progress_has_one_fp32_copy() -> None:
    model = nn.ParameterList(nn.Parameter(torch.ones(1 << 14).bfloat16()) for _ in range(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"sync_every": 1, "overlap": Delayed(), "num_replicas": 1}
    with DiLoCo(model, optimizer, **grouped(given)) as diloco:
        (part,) = diloco.parts
        # One tensor more in bf16, or in fp32, is small beside the whole part.
        assert peak_bytes(part.progress) < 1.3 * 4 * part.num_elements


def lost_and_resumed(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Train with a default dtype of torch, and with a round that is voted down."""
    arguments = {**device_training.METHODS[name], "lanes": 1}
    replica = Replica(0, torch.device("cpu"), on_nonfinite="skip", num_steps=24, **arguments)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        replica.steps(0, 5)
        spoilt = replica.model.tensors[3]
        kept = spoilt.detach().clone()
        with torch.no_grad():
            spoilt.view(-1)[77].fill_(torch.nan)
        replica.steps(5, 8)
        with torch.no_grad():
            spoilt.copy_(kept)
        replica.steps(8, 20)
        replica.diloco.load_state_dict(replica.diloco.state_dict())
        replica.steps(20, 24)
        replica.diloco.flush()
    finally:
        torch.set_default_dtype(before)
        replica.diloco.close()
    assert replica.diloco.totals().num_skipped
    return replica.all()


@pytest.mark.parametrize("name", ["delayed", "eager"])
def test_values_between_rounds_are_fp32_by_any_default_of_torch(name: str) -> None:
    expected = lost_and_resumed(name, torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        assert equal(expected, lost_and_resumed(name, dtype)), dtype
