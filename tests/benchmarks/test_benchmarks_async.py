"""The search for learning rates, the claims and the curves of benchmarks/asynchronous."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import run_benchmark

pytestmark = pytest.mark.usefixtures("forked_programs")


def search(best: float, start: float) -> list[float]:
    """Return the rates that are tried when the loss is least at ``best``."""
    from benchmarks.support.tuning import next_rate

    tried: dict[float, float] = {}
    while (lr := next_rate(tried, start)) is not None:
        assert lr not in tried
        tried[lr] = abs(math.log(lr / best))
    return list(tried)


def test_learning_rates_are_tried_until_the_best_is_between_two_others() -> None:
    from benchmarks.support.tuning import LADDER, choose

    assert search(0.1, 0.1) == [0.1, 0.03, 0.3]
    assert search(0.7, 0.1) == [0.1, 0.03, 0.3, 0.7, 1.0]
    assert search(0.003, 0.1) == [0.1, 0.03, 0.3, 0.01, 0.003, 0.001]
    assert search(LADDER[-1], 1.4)[-1] == LADDER[-1] and search(1e-9, LADDER[0])[:1] == [LADDER[0]]
    # A run that diverged is the worst.
    losses = {0.1: 2.0, 0.3: 1.5, 0.7: math.nan, 1.0: math.inf}
    assert (choose(losses).lr, choose(losses).is_bracketed) == (0.3, True)
    assert not choose({0.3: 1.0, 0.7: 2.0}).is_bracketed


def row(method: str, lr: float, seed: int, loss: float) -> dict[str, Any]:
    points = [{"steps": 640 * i, "updates": 40 * i, "seconds": i, "loss": loss} for i in range(2)]
    return {
        "method": method, "speeds": "very", "num_workers": 4, "model": "118k", "seed": seed,
        "lr": lr, "steps": 160, "loss": loss, "seconds": 1.0, "updates": 40, "mean_staleness": 1.0,
        "points": points, "cpu_s": 1.0,
    }  # fmt: skip


def test_a_best_rate_at_the_edge_is_an_error_of_the_report(tmp_path: Path) -> None:
    from benchmarks.asynchronous.report import choices, recorded_losses

    out, record, plot = (tmp_path / name for name in ("runs.jsonl", "record.json", "plot.png"))
    losses = {0.3: 2.4, 0.7: 2.3, 1.0: 2.35}
    rows = [row(name, lr, 1000, losses[lr]) for name in ("DiLoCo", "DN") for lr in losses]
    rows += [row(name, 0.7, seed, 2.3) for name in ("DiLoCo", "DN") for seed in range(2)]

    def report(chosen: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
        out.write_text("\n".join(["{}", *map(json.dumps, chosen)]) + "\n")
        written = ["--runs", out, "--json", record, "--plot", plot]
        return run_benchmark("asynchronous.convergence", "--report", *written)

    whole = report(rows)
    assert whole.returncode == 0 and "ERROR" not in whole.stdout, whole.stdout + whole.stderr
    assert whole.stdout.splitlines()[0].startswith(
        "# python -m benchmarks.asynchronous.convergence"
    )
    document = json.loads(record.read_text())
    assert document["output"] == whole.stdout.splitlines()
    chosen = choices(recorded_losses(document["results"]))
    assert {key: choice.lr for key, choice in chosen.items()} == {
        (160, "DiLoCo"): 0.7,
        (160, "DN"): 0.7,
    }
    assert plot.exists()
    cut = report([r for r in rows if (r["method"], r["lr"]) != ("DiLoCo", 1.0)])
    assert cut.returncode == 1
    assert "DiLoCo                     0.3: 2.4000, 0.7: 2.3000 -> 0.7  ERROR" in cut.stdout


def test_claims_hold_on_every_seed_or_are_undecided() -> None:
    from benchmarks.asynchronous.claims import (
        BETTER,
        NO_WORSE,
        SAME,
        WORSE,
        closed,
        differences,
        verdict,
    )

    assert [verdict(WORSE, d) for d in ([0.1, 0.2], [-0.1, 0.2], [-0.1, -0.2])] == [
        "holds", "undecided", "does not hold",
    ]  # fmt: skip
    assert verdict(BETTER, [-0.1, -0.2]) == "holds" and verdict(SAME, [0.02, -0.02]) == "holds"
    assert verdict(SAME, [0.02]) == "does not hold" and verdict(NO_WORSE, [-1.0]) == "holds"
    rows = [
        {"method": method, "seed": seed, "loss": loss + seed}
        for seed in range(2)
        for method, loss in (("DiLoCo", 1.0), ("async Nesterov", 1.4), ("DN", 1.1))
    ]
    assert differences(rows, "DN", "DiLoCo") == pytest.approx([0.1, 0.1])
    assert closed(rows, "DN") == pytest.approx(0.75) and closed(rows[:1], "DN") is None


def test_losses_are_compared_at_equal_numbers_of_updates() -> None:
    from benchmarks.asynchronous.report import loss_at

    points = [{"updates": 0, "loss": 4.0}, {"updates": 10, "loss": 2.0}]
    assert [loss_at(points, u) for u in (0, 5, 10, 99)] == [4.0, 3.0, 2.0, 2.0]


def test_every_method_makes_a_rule_and_starts_in_the_ladder() -> None:
    from benchmarks.asynchronous.methods import METHODS
    from benchmarks.support.tuning import LADDER

    for method in METHODS.values():
        assert method.start in LADDER and method.rule(method.start, 4).arrivals in (1, 4)
    assert METHODS["DN + DyLU, c = 0.1/N"].rule(0.3, 4).config()["activation"] == 0.025
