"""Worked examples of the overlap methods, and other settings against ``oracle``.

Real processes, the public API, fp32 wire; the same quadratic problem throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracle import Method, OuterOptimizer, Run, simulate
from problems import INNER_LR, MATRICES, START, TARGETS, Quadratic

from diloco_comm import CO2, SGD, Blocking, Delayed, DiLoCo, Eager, HeavyBall, Nesterov, Streaming

TOLERANCE = 1e-6
Trace = list[tuple[list[float], list[float]]]


def trace(rank: int, cases: list[dict[str, Any]]) -> list[Trace]:
    """Run each case; returns local and outer values after every inner step."""
    return [run_case(rank, **case) for case in cases]


def run_case(rank: int, num_steps: int, arguments: dict[str, Any]) -> Trace:
    model = Quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=INNER_LR)
    own = {k: v[rank] for k, v in arguments.items() if k in ("overlaps", "weights")}
    arguments = {k: v for k, v in arguments.items() if k not in ("overlaps", "weights")}
    if "overlaps" in own:
        arguments["overlap"] = own["overlaps"]
    if "weights" in own:
        arguments["weight"] = own["weights"]
    decays = arguments.pop("decays", False)
    if decays:
        arguments["overlap"] = CO2(
            **arguments["overlap"], inner_lr=lambda: optimizer.param_groups[0]["lr"]
        )
    values: Trace = []
    with DiLoCo(model, optimizer, wire="fp32", **arguments) as diloco:
        for step in range(num_steps):
            optimizer.param_groups[0]["lr"] = inner_lr_at(step + 1, decays)
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            outer = [part.outer.tolist() for part in diloco.parts]
            values.append((model.values(), [v for part in outer for v in part]))
    return values


def inner_lr_at(step: int, decays: bool) -> float:
    return INNER_LR * 0.9 ** (step // 2) if decays else INNER_LR


def run_cases(rank: int, world: int, cases: list[dict[str, Any]]) -> list[Trace]:
    return trace(rank, cases)


def case(num_steps: int, sync_every: int, outer: Any, **arguments: Any) -> dict[str, Any]:
    return {
        "num_steps": num_steps,
        "arguments": {"sync_every": sync_every, "outer": outer, **arguments},
    }


def close(actual: Any, expected: Any) -> bool:
    return bool(np.allclose(actual, expected, rtol=0, atol=TOLERANCE))


# ----------------------------------------------------------------------------- worked examples


STREAMING = case(
    13,
    4,
    Nesterov(0.4, 0.9),
    overlap=Streaming(1, 0.5),
    fragments=[["coordinates.0"], ["coordinates.1"]],
    offsets=[4, 6],
)
# After step: coordinate, outer value, merged values of both replicas.
STREAMING_EVENTS = {
    5: (0, 0.3259469152, 0.311148186, 0.5351707723),
    7: (1, 0.6435689327, 0.3938467446, 0.9524547479),
    9: (0, 0.732146355, 0.5955112793, 0.8869125296),
    13: (0, 1.1190074477, 0.8802830936, 1.2187975558),
}
EAGER_ROUNDS = [
    ((0.050958, 0.458713), (0.122208, 0.607787)),
    ((0.2427572732, 0.5084186382), (0.3428177945, 0.7118472225)),
    ((0.4857167948, 0.5756566031), (0.6179355207, 0.8295008213)),
]
DELAYED_ROUNDS = [(0, 0.5), (0.173166, 0.5665), (0.4201554, 0.66135)]
BLOCKING_ROUNDS = [
    (0.173166, 0.5665),
    (0.3995511618, 0.6519608001),
    (0.6566674757, 0.7468400719),
]
CO2_ROUNDS = [(0, 0.5), (0.22785, 0.5875), (0.569625, 0.71875), (0.9326903425, 0.85561946)]


def test_worked_examples(workers) -> None:
    nesterov = Nesterov(0.4, 0.9)
    cases = [
        STREAMING,
        case(6, 2, nesterov, overlap=Blocking()),
        case(6, 2, nesterov, overlap=Delayed()),
        case(6, 2, nesterov, overlap=Eager()),
        case(8, 2, HeavyBall(1.0, 0.5), overlap=CO2()),
    ]
    results = workers(2).run(run_cases, cases)
    for rank, (streaming, blocking, delayed, eager, co2) in enumerate(results):
        for step, (index, outer, *merged) in STREAMING_EVENTS.items():
            local, outers = streaming[step - 1]
            assert close(outers[index], outer)
            assert close(local[index], merged[rank])
        for rounds, expected in ((blocking, BLOCKING_ROUNDS), (delayed, DELAYED_ROUNDS)):
            assert close([local for local, _ in rounds[1::2]], expected)
        assert close([local for local, _ in eager[1::2]], [pair[rank] for pair in EAGER_ROUNDS])
        assert close([local for local, _ in co2[1::2]], CO2_ROUNDS)


# ------------------------------------------------------------------------- against the oracle


OUTERS = {
    "sgd": (SGD(0.7), lambda: OuterOptimizer("sgd", 0.7)),
    "heavy_ball": (HeavyBall(0.3, 0.8), lambda: OuterOptimizer("heavy_ball", 0.3, 0.8)),
    "nesterov": (Nesterov(0.4, 0.9), lambda: OuterOptimizer("nesterov", 0.4, 0.9)),
}
SPLIT = {"fragments": [["coordinates.0"], ["coordinates.1"]], "offsets": [2, 3]}


def expected_run(
    num_steps: int, sync_every: int, method: Method, outer: str, *, is_split: bool
) -> Run:
    def inner(rank: int, t: int, x: np.ndarray) -> np.ndarray:
        lr = inner_lr_at(t, method.inner_lr is not None)
        return x - lr * np.array(MATRICES[rank]) @ (x - np.array(TARGETS[rank]))

    return simulate(
        np.array(START),
        num_steps,
        sync_every,
        method,
        OUTERS[outer][1],
        inner,
        fragments=[[0], [1]] if is_split else None,
        offsets=SPLIT["offsets"] if is_split else None,
    )


def check_against_oracle(pool: Any, settings: list[tuple[dict[str, Any], Method, str]]) -> None:
    """Each setting whole and in two fragments, 14 steps at H=3."""
    cases, expected = [], []
    for arguments, method, outer in settings:
        for is_split in (False, True):
            split = SPLIT if is_split else {}
            cases.append(case(14, 3, OUTERS[outer][0], **arguments, **split))
            expected.append(expected_run(14, 3, method, outer, is_split=is_split))
    for rank, traces in enumerate(pool.run(run_cases, cases)):
        for values, run, one in zip(traces, expected, cases, strict=True):
            for step, (local, outer) in enumerate(values, start=1):
                assert close(local, run.local[step][rank]), (rank, step, one)
                assert close(outer, run.outer[step][rank]), (rank, step, one)


def test_streaming_against_the_oracle(workers) -> None:
    settings: list[tuple[dict[str, Any], Method, str]] = []
    for delay, alpha, outer in [(0, 0.0, "sgd"), (0, 0.5, "nesterov"), (1, 0.0, "nesterov"),
                                (2, 0.25, "heavy_ball"), (2, 1.0, "sgd")]:  # fmt: skip
        method = Method("streaming", (delay, delay), alpha)
        settings.append(({"overlap": Streaming(delay, alpha)}, method, outer))
    for delays in [(0, 2), (2, 1)]:
        overlaps = [Streaming(delay, 0.5) for delay in delays]
        settings.append(({"overlaps": overlaps}, Method("streaming", delays, 0.5), "nesterov"))
    weighted = Method("streaming", (1, 1), 0.5, weights=(3.0, 1.0))
    settings.append(({"overlap": Streaming(), "weights": (3.0, 1.0)}, weighted, "nesterov"))
    check_against_oracle(workers(2), settings)


def test_delayed_and_eager_against_the_oracle(workers) -> None:
    settings: list[tuple[dict[str, Any], Method, str]] = []
    for rounds, outer in [(1, "sgd"), (1, "heavy_ball"), (2, "nesterov")]:
        settings.append(({"overlap": Delayed(rounds)}, Method("delayed", rounds=rounds), outer))
        for first in ("zero", "skip", "sync"):
            method = Method("eager", rounds=rounds, first=first)
            settings.append(({"overlap": Eager(rounds, first)}, method, outer))
    weights = {"weights": (1.0, 3.0)}
    settings.append(({"overlap": Eager(), **weights}, Method("eager", **weights), "nesterov"))
    settings.append(({"overlap": Delayed(), **weights}, Method("delayed", **weights), "sgd"))
    check_against_oracle(workers(2), settings)


@pytest.mark.nightly("4 s each; two rounds are the general case", but=["2"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_co2_against_the_oracle(rounds: int, workers) -> None:
    """Constant and gap-aware penalties, a clip that bites, and a decaying inner learning rate."""
    settings: list[tuple[dict[str, Any], Method, str]] = []
    for gap in (1.0, 2.5, "gap-aware"):
        for clip in (None, 0.1):
            bound = np.inf if clip is None else clip
            method = Method("co2", rounds=rounds, gap=gap, clip=bound)
            overlap = CO2(clip, gap, rounds=rounds)
            settings.append(({"overlap": overlap}, method, "heavy_ball"))
            settings.append(({"overlap": overlap}, method, "nesterov"))
    for gap, clip in ((1.0, 1.5), ("gap-aware", 1.0)):
        method = Method(
            "co2", rounds=rounds, gap=gap, clip=clip, inner_lr=lambda t: inner_lr_at(t, True)
        )
        numbers = {"clip": clip, "gap": gap, "rounds": rounds}
        settings.append(({"overlap": numbers, "decays": True}, method, "heavy_ball"))
    check_against_oracle(workers(2), settings)
