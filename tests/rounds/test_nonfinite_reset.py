"""``on_nonfinite="reset"``: a replica with bad values is left out of a round, the others go on.

Every policy against ``oracle``, which leaves that replica out; and what a reset replica has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from choice_groups import grouped
from oracle import Method, Run, simulate
from problems import INNER_LR, MATRICES, START, TARGETS, Quadratic
from test_overlap_examples import OUTERS, SPLIT, Trace, close
from workers import Pool

from diloco_comm import CO2, Blocking, Delayed, DiLoCo, Eager, Streaming

H, NUM_STEPS = 3, 14
Sick = frozenset[tuple[int, int]]

# Inner steps at which all of them or one of the split fragments is sent.
SICK: list[Sick] = [
    frozenset({(6, 1)}),
    frozenset({(3, 0)}),
    frozenset({(6, 0), (9, 0)}),
    frozenset({(6, 1), (9, 0)}),
]


def run_cases(rank: int, world: int, cases: list[tuple[dict[str, Any], Sick]]) -> list[Trace]:
    """Train each case; returns local and outer values after every inner step."""
    return [run_case(rank, arguments, sick) for arguments, sick in cases]


def run_case(rank: int, arguments: dict[str, Any], sick: Sick) -> Trace:
    model = Quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=INNER_LR)
    steps = itertools.count(1)

    def spoil(*_: Any) -> None:
        # What the other coordinate has learned is finite, and must not count either.
        if (next(steps), rank) in sick:
            model.coordinates[1].data.fill_(math.nan)

    optimizer.register_step_post_hook(spoil)
    arguments = {"sync_every": H, "wire": "fp32", **arguments}
    arguments["weight"] = arguments.pop("weights", (1.0, 1.0))[rank]
    values: Trace = []
    with DiLoCo(model, optimizer, **grouped({"on_nonfinite": "reset", **arguments})) as diloco:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            outer = [part.outer.tolist() for part in diloco.parts]
            values.append((model.values(), [v for part in outer for v in part]))
        assert diloco.totals().num_skipped == 0
    return values


def expected_run(method: Method, outer: str, *, is_split: bool) -> Run:
    def inner(rank: int, t: int, x: np.ndarray) -> np.ndarray:
        return x - INNER_LR * np.array(MATRICES[rank]) @ (x - np.array(TARGETS[rank]))

    split = {"fragments": [[0], [1]], "offsets": SPLIT["offsets"]} if is_split else {}
    return simulate(np.array(START), NUM_STEPS, H, method, OUTERS[outer][1], inner, **split)


POLICIES: list[tuple[dict[str, Any], Method, str]] = [
    ({"overlap": Blocking()}, Method(), "nesterov"),
    ({"overlap": Streaming(2, 0.25)}, Method("streaming", (2, 2), 0.25), "nesterov"),
    ({"overlap": Streaming(1, 1.0)}, Method("streaming", (1, 1), 1.0), "sgd"),
    ({"overlap": Delayed()}, Method("delayed"), "sgd"),
    ({"overlap": Delayed(2)}, Method("delayed", rounds=2), "nesterov"),
    *(
        ({"overlap": Eager(rounds, first)}, Method("eager", rounds=rounds, first=first), "nesterov")
        for rounds in (1, 2)
        for first in ("zero", "skip", "sync")
    ),
    (
        {"overlap": Eager(), "weights": (1.0, 3.0)},
        Method("eager", weights=(1.0, 3.0)),
        "heavy_ball",
    ),
    ({"overlap": CO2(0.1, "gap-aware")}, Method("co2", gap="gap-aware", clip=0.1), "heavy_ball"),
]


@pytest.mark.nightly("5 s each; one replica, then another", but=["6_1-9_0"])
@pytest.mark.parametrize(
    "sick", SICK, ids=lambda sick: "-".join(f"{t}_{r}" for t, r in sorted(sick))
)
def test_every_policy_against_the_oracle(workers: Callable[[int], Pool], sick: Sick) -> None:
    """Each whole, and in two fragments that are sent at different steps."""
    cases, expected = [], []
    for arguments, method, outer in POLICIES:
        for is_split in (False, True):
            split = SPLIT if is_split else {}
            cases.append(({**arguments, **split, "outer": OUTERS[outer][0]}, sick))
            method = Method(**{**vars(method), "sick": sick})
            expected.append(expected_run(method, outer, is_split=is_split))
    for rank, traces in enumerate(workers(2).run(run_cases, cases)):
        for values, run, (one, _) in zip(traces, expected, cases, strict=True):
            for step, (local, outer) in enumerate(values, start=1):
                if (step, rank) in sick and not all(map(math.isfinite, local)):
                    pytest.fail(f"replica {rank} was not reset at step {step}: {one}")
                assert close(local, run.local[step][rank]), (rank, step, one)
                assert close(outer, run.outer[step][rank]), (rank, step, one)
