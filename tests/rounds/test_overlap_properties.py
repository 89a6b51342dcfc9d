"""What must hold exactly under the overlap policies, with real processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate, cycle
from typing import Any

import numpy as np
import pytest
import torch
from choice_groups import grouped
from oracle import Method, OuterOptimizer, simulate
from problems import MATRICES, START, TARGETS, Regression, equal, parameters_of, train_step
from torch import Tensor, nn

from diloco_comm import (
    CO2,
    SGD,
    Adam,
    Blocking,
    Delayed,
    DiLoCo,
    Eager,
    FromTorch,
    HeavyBall,
    Nesterov,
    NonFiniteError,
    Streaming,
)
from diloco_comm.ops.wire import ELEMENT_WIRES

WIDTH = 8


def attach(**arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
    model = Regression(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    settings = {"sync_every": 3, "fragments": 2, "wire": "int8", "block_size": 32}
    return model, optimizer, DiLoCo(model, optimizer, **grouped({**settings, **arguments}))


def values_of(model: nn.Module, diloco: DiLoCo) -> list[Tensor]:
    tensors = parameters_of(model)
    for part in diloco.parts:
        tensors += [part.outer.clone(), *(t.clone() for t in part.state.tensors().values())]
    return tensors


def train(
    rank: int, num_steps: int, arguments: dict[str, Any], *, flush: bool = False
) -> tuple[list[list[Tensor]], str]:
    """Return all values after each step, and the outer hash at the end."""
    model, optimizer, diloco = attach(**arguments)
    with diloco:
        seen = []
        for step in range(num_steps):
            train_step(model, optimizer, rank, step, WIDTH)
            seen.append(values_of(model, diloco))
        if flush:
            diloco.flush()
            seen.append(values_of(model, diloco))
        return seen, diloco.outer_hash()


def same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))


# --------------------------------------------------------------------------- equal by definition


PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"overlap": Streaming(0, 0.0), "wire": "int4", "error_feedback": True},
        {"overlap": Blocking(), "wire": "int4", "error_feedback": True},
    ),
    (
        {"overlap": CO2(), "outer": HeavyBall(0.7, 0.5)},
        {"overlap": Delayed(), "outer": HeavyBall(0.7, 0.5)},
    ),
    (
        {"overlap": CO2(rounds=2), "outer": Nesterov(0.7, 0.5), "error_feedback": True},
        {"overlap": Delayed(2), "outer": Nesterov(0.7, 0.5), "error_feedback": True},
    ),
]


def pairs_are_equal(rank: int, world: int) -> list[bool]:
    matches = []
    for first, second in PAIRS:
        a = train(rank, 10, first, flush=True)[0]
        matches.append(same(a, train(rank, 10, second, flush=True)[0]))
    return matches


@pytest.mark.parametrize("world", [2, 3])
def test_policies_that_are_the_same_method(world: int, workers) -> None:
    """Streaming(0, 0) is DiLoCo, CO2 with its defaults is Delayed: bit by bit."""
    assert workers(world).run(pairs_are_equal) == [[True] * len(PAIRS)] * world


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("outer", [Nesterov(0.7, 0.9), SGD(1.0), Adam(0.1)], ids=repr)
def test_eager_alone_is_synchronous(rounds: int, outer: Any) -> None:
    a = train(0, 8, {"overlap": Eager(rounds), "outer": outer}, flush=True)
    assert same(a[0], train(0, 8, {"outer": outer}, flush=True)[0])


# --------------------------------------------------------------------- what replicas have in common


def hashes_of_delayed(rank: int, world: int) -> list[list[str]]:
    results = []
    for wire in ELEMENT_WIRES:
        for overlap in (Delayed(), CO2(0.05, "gap-aware", rounds=2), Streaming(2, 0.5)):
            model, optimizer, diloco = attach(wire=wire, overlap=overlap, error_feedback=True)
            with diloco:
                hashes = []
                for step in range(11):
                    train_step(model, optimizer, rank, step, WIDTH)
                    hashes.append(diloco.outer_hash())
            results.append(hashes)
    return results


def test_outer_parameters_stay_bit_identical(workers) -> None:
    first, second = workers(2).run(hashes_of_delayed)
    assert first == second
    assert all(len(set(hashes)) > 2 for hashes in first)


FLUSHED: list[dict[str, Any]] = [
    {"overlap": Streaming(2, 0.5)},
    {"overlap": Delayed(2), "wire": "int4", "error_feedback": True},
    {"overlap": Eager(), "outer": SGD(0.7)},
    {"overlap": Eager(2, "skip"), "outer": Adam(0.1)},
    {"overlap": Eager(1, "sync"), "outer": FromTorch(lambda p: torch.optim.Adam(p, lr=0.01))},
    {"overlap": CO2(0.1)},
    {"overlap": Streaming(0, 0.5)},
    {"overlap": Streaming(0, 1.0), "wire": "fp32"},
]


def is_outer(model: nn.Module, diloco: DiLoCo) -> bool:
    """Whether the local parameters are the outer ones."""
    local = torch.cat([p.detach().flatten() for p in model.parameters()])
    return torch.equal(local, torch.cat([part.outer for part in diloco.parts]))


def flush_at_every_step(rank: int, world: int) -> list[tuple[str, bool]]:
    results = []
    for arguments in FLUSHED:
        for num_steps in (2, 3, 4, 6, 8):
            model, optimizer, diloco = attach(**arguments)
            with diloco:
                for step in range(num_steps):
                    train_step(model, optimizer, rank, step, WIDTH)
                diloco.flush()
                buffers = [b for part in diloco.parts for b in part.state.tensors().values()]
                is_done = not any(part.in_flight for part in diloco.parts)
                digest = f"{diloco.outer_hash()} {[b.sum().item() for b in buffers]}"
                results.append((digest, is_done and is_outer(model, diloco)))
                # Nothing is left to share, and training goes on.
                diloco.flush()
                assert digest.startswith(diloco.outer_hash())
                train_step(model, optimizer, rank, num_steps, WIDTH)
    return results


@pytest.mark.nightly("8 s; they differ in the number of replicas", but=["2"])
@pytest.mark.parametrize("world", [2, 3])
def test_flush_makes_replicas_identical(world: int, workers) -> None:
    results = workers(world).run(flush_at_every_step)
    assert all(result == results[0] for result in results)
    assert all(is_equal for _, is_equal in results[0])


# The weights of both replicas at their sends, in turn, and again from the beginning.
WEIGHTS = {
    "never": ([1.0], [0.0]),
    "twice": ([1.0, 1.0, 1.0, 2.0], [1.0, 0.0, 0.0, 1.0]),
    "in turns": ([1.0, 0.0], [0.0, 1.0]),
}
WEIGHTED = [Eager(), Eager(2), Eager(first="sync"), Eager(first="skip"), Delayed(), Blocking()]


def flush_with_weights(rank: int, world: int, name: str) -> list[tuple[str, bool]]:
    results = []
    for overlap in WEIGHTED:
        for num_steps in (8, 9):
            weights = cycle(WEIGHTS[name][rank])
            model, optimizer, diloco = attach(overlap=overlap, weight=partial(next, weights))
            with diloco:
                for step in range(num_steps):
                    train_step(model, optimizer, rank, step, WIDTH)
                diloco.flush()
                results.append((diloco.outer_hash(), is_outer(model, diloco)))
    return results


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_replica_whose_weight_is_zero_takes_every_outer_step(name: str, workers) -> None:
    first, second = workers(2).run(flush_with_weights, name)
    assert first == second
    assert all(is_equal for _, is_equal in first)


def step_by_ones(rank: int, world: int) -> list[float]:
    """Replica 0, which alone has a weight, learns one each step; return the outer values."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = SGD(lambda round: 0.5**round)
    values = []
    with DiLoCo(
        model,
        optimizer,
        sync_every=1,
        overlap=Eager(),
        outer=outer,
        wire="fp32",
        weight=1.0 - rank,
    ) as diloco:
        for _ in range(5):
            model.weight.grad = torch.full((1, 1), rank - 1.0)
            optimizer.step()
            values.append(diloco.parts[0].outer.item())
        diloco.flush()
    return values


def test_a_replica_of_weight_zero_has_the_outer_rate_of_the_round_that_it_sends(workers) -> None:
    # Eager takes lr(t) * (mean(t-1) + own(t) - own(t-1)). The mean is 1, and so is replica 0's own
    # share; but before the first mean tells the weights, each share counts as a half.
    rates = [0.5**round for round in range(5)]
    first = [rates[0] * 0.5, rates[1] * 1.5, *rates[2:]]
    second = [0.0, *rates[1:]]
    expected = [list(accumulate(steps)) for steps in (first, second)]
    assert workers(2).run(step_by_ones) == expected


def flush_sums(rank: int, world: int) -> list[float]:
    """Outer SGD: after a flush all methods have applied the same total, to rounding."""
    model, optimizer, diloco = attach(wire="fp32", overlap=Eager(), outer=SGD(0.5))
    totals = torch.zeros(sum(part.num_elements for part in diloco.parts), dtype=torch.float64)
    send = diloco._rounds.send

    def count(part: Any, *arguments: Any) -> Any:
        mean = part.progress().double()
        torch.distributed.all_reduce(mean)
        begin = sum(p.num_elements for p in diloco.parts[: part.index])
        totals[begin : begin + part.num_elements] += mean / world
        return send(part, *arguments)

    diloco._rounds.send = count  # type: ignore[method-assign]
    start = torch.cat([part.outer.clone() for part in diloco.parts]).double()
    with diloco:
        for step in range(8):
            train_step(model, optimizer, rank, step, WIDTH)
        diloco.flush()
        end = torch.cat([part.outer for part in diloco.parts]).double()
    return [(end - (start - 0.5 * totals)).abs().max().item(), totals.abs().max().item()]


def test_eager_applies_every_pseudo_gradient_once(workers) -> None:
    for error, scale in workers(2).run(flush_sums):
        assert error < 1e-6 and scale > 0.05


# ------------------------------------------------------------------------------ the replica gap


def replica_gaps(rank: int, world: int, wire: str, rounds: int) -> list[tuple[float, float, int]]:
    """(gap minus prediction, largest outer parameter, outer steps) after each send."""
    lr, results = 0.7, []
    model, optimizer, diloco = attach(
        wire=wire, fragments=1, overlap=Eager(rounds), outer=SGD(lr), sync_every=2
    )
    (part,) = diloco.parts
    with diloco:
        for step in range(16):
            train_step(model, optimizer, rank, step, WIDTH)
            if (step + 1) % 2:
                continue
            work = list(part.in_flight)
            own = sum(part.decode(f.own, f.layout, "").double() / world for f in work)
            mine = torch.stack([part.outer.double(), own])
            theirs = [torch.empty_like(mine) for _ in range(world)]
            torch.distributed.all_gather(theirs, mine)
            for other in theirs:
                gap, expected = mine[0] - other[0], -lr * (mine[1] - other[1])
                error = (gap - expected).abs().max().item()
                results.append((error, mine[0].abs().max().item(), part.state.num_steps))
    return results


@pytest.mark.parametrize(("wire", "rounds"), [("fp32", 1), ("int8", 1), ("int4", 2)])
def test_replica_gap_is_that_of_the_rounds_under_way(wire: str, rounds: int, workers) -> None:
    """-(lr/M)(d_m - d_j): the sum of own terms telescopes, also when they are quantised."""
    for results in workers(2).run(replica_gaps, wire, rounds):
        for error, largest, num_steps in results:
            ulp = 2.0 ** (math.frexp(largest)[1] - 24)
            assert error <= 4 * ulp * math.sqrt(num_steps)


def test_replica_gap_in_float64() -> None:
    def inner(rank: int, t: int, x: np.ndarray) -> np.ndarray:
        return x - 0.1 * np.array(MATRICES[rank]) @ (x - np.array(TARGETS[rank]))

    run = simulate(
        np.array(START), 40, 2, Method("eager"), lambda: OuterOptimizer("sgd", 0.7), inner
    )
    for t in range(2, 41, 2):
        before = [run.outer[t - 2][m] for m in (0, 1)]
        local = [inner(m, 0, inner(m, 0, run.local[t - 2][m])) for m in (0, 1)]
        expected = -0.35 * ((before[0] - local[0]) - (before[1] - local[1]))
        assert np.abs(run.outer[t][0] - run.outer[t][1] - expected).max() < 1e-14


# ------------------------------------------------------------------------------------ consensus


def consensus_of(rank: int, world: int) -> tuple[bool, bool, list[Tensor], list[Tensor]]:
    model, optimizer, diloco = attach(overlap=Eager(), fragments=3)
    with diloco:
        for step in range(7):
            train_step(model, optimizer, rank, step, WIDTH)
        before = values_of(model, diloco)
        mean = diloco.consensus()
        names = [name for name, _ in model.named_parameters()]
        with diloco.outer_parameters(consensus=True):
            shown = parameters_of(model)
        is_shown = equal(shown, [mean["outer"][name] for name in names])
        own = diloco.state_dict()[f"replica_{rank}"]
        sums = [own["outer"][name].double() for name in names]
        sums += [own["buffers"]["momentum"][name].double() for name in names]
        flat = [mean["outer"][n] for n in names] + [mean["buffers"]["momentum"][n] for n in names]
        for value in sums:
            value.data = value.clone()
            torch.distributed.all_reduce(value)
        return equal(before, values_of(model, diloco)), is_shown, flat, [s / world for s in sums]


def test_consensus_is_the_mean_and_changes_nothing(workers) -> None:
    results = workers(3).run(consensus_of)
    for is_kept, is_shown, mean, expected in results:
        assert is_kept and is_shown
        assert equal(mean, results[0][2])
        for value, target in zip(mean, expected, strict=True):
            assert torch.allclose(value.double(), target, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------ slow peers


def with_and_without_a_slow_link(rank: int, world: int) -> list[bool]:
    matches = []
    for overlap in (Streaming(2, 0.5), Delayed(), Eager()):
        runs = []
        for rtt_ms in (0.0, 40.0):
            model, optimizer, diloco = attach(overlap=overlap)
            with diloco:
                if rank == 0 and rtt_ms:
                    diloco.emulate_link(1.0, rtt_ms)
                for step in range(6):
                    train_step(model, optimizer, rank, step, WIDTH)
                runs.append(values_of(model, diloco))
                late = [m for m in diloco.metrics() if m.exchange_s > 0.02]
                assert not rtt_ms or late
                for metrics in diloco.metrics():
                    assert 0 <= metrics.overlap_fraction <= 1
        matches.append(equal(*runs))
    return matches


def test_a_slow_peer_changes_no_number(workers) -> None:
    assert workers(2).run(with_and_without_a_slow_link) == [[True] * 3] * 2


# ------------------------------------------------------------------- values that no wire carries


def spoil(rank: int, world: int, arguments: dict[str, Any]) -> tuple[list[str], list[int], bool]:
    """Replica 1 spoils its parameters before the second send; the round is skipped."""
    model, optimizer, diloco = attach(on_nonfinite="skip", **arguments)
    with diloco:
        hashes = []
        for step in range(16):
            if rank == 1 and step == 5:
                next(model.parameters()).data[0, :3] = math.nan
            train_step(model, optimizer, rank, step, WIDTH)
            hashes.append(diloco.outer_hash())
        # The fragments are sent at different steps, so one always spoils the other again.
        with pytest.raises(NonFiniteError, match="could not share all"):
            diloco.flush()
        diloco.flush()
        skipped = [m.round for m in diloco.metrics() if not m.is_applied]
        is_finite = all(bool(p.isfinite().all()) for p in model.parameters())
        return [*hashes[-1:], diloco.outer_hash()], skipped, is_finite


@pytest.mark.parametrize(
    "arguments",
    [
        {"overlap": Delayed(), "error_feedback": True, "wire": "int4"},
        {"overlap": Delayed(2), "error_feedback": True, "wire": "fp16"},
        {"overlap": Eager(2), "wire": "int8"},
    ],
    ids=lambda value: repr(value["overlap"]),
)
def test_a_spoilt_round_is_skipped_and_training_recovers(
    arguments: dict[str, Any], workers: Callable[..., Any]
) -> None:
    first, second = workers(2).run(spoil, arguments)
    assert first[0][1] == second[0][1]
    assert first[1] == second[1] and first[1]
    assert first[2] and second[2]


# ---------------------------------------------------------------------- arguments that cannot be


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Streaming(-1), "delay must be an integer of at least 0, got -1"),
        (lambda: Streaming(1, 1.5), "alpha must be between 0 and 1, got 1.5"),
        (lambda: attach(overlap=Streaming(3)), "delay must be below sync_every=3"),
        (lambda: Delayed(3), "rounds must be 1 or 2, got 3"),
        (lambda: Eager(first="last"), "first must be one of zero, skip, sync, got 'last'"),
        (lambda: CO2(clip=0.0), "clip must be positive or None, got 0.0"),
        (lambda: CO2(gap=0), "gap must be positive and finite, got 0"),
        (lambda: CO2(gap="wide"), "gap must be a number, 'gap-aware' or a function"),
        (lambda: attach(overlap=CO2(1.0), outer=Adam()), "must be HeavyBall or Nesterov, got Adam"),
        (
            lambda: attach(config={"overlap": CO2(gap=lambda n, c: 1.0).config()}),
            "names a function as gap",
        ),
    ],
)
def test_arguments_that_cannot_be(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_configurations_can_be_restored() -> None:
    for overlap in (Streaming(2, 0.25), Delayed(2), Eager(2, "skip"), CO2(0.5, "gap-aware")):
        diloco = attach(overlap=overlap)[2]
        with diloco:
            config = diloco.config()
        restored = attach(config=config)[2]
        with restored:
            assert restored.settings.overlap == overlap
