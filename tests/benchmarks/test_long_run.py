"""The long run of Eager: its replicas in one process are those of the library, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import run_benchmark, shows
from choice_groups import grouped
from problems import Regression, train_step
from torch import Tensor

from benchmarks.convergence.wire_rounds import SendingRounds
from diloco_comm import DiLoCo, Nesterov
from diloco_comm.methods.overlap import Blocking, Delayed, Eager, Overlap
from diloco_comm.ops.wire import WireFormat
from diloco_comm_tools.common import plots

pytestmark = pytest.mark.usefixtures("forked_programs")

SYNC_EVERY, NUM_STEPS = 3, 15
POLICIES = [Blocking(), Delayed(), Delayed(rounds=2), Eager(), Eager(first="sync"), Eager(rounds=2)]


def make(policy: Overlap) -> tuple[torch.nn.Module, torch.optim.Optimizer, Nesterov]:
    model = Regression()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), Nesterov(0.4, 0.9)


def values(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_with_the_library(rank: int, world: int, policy: Overlap) -> list[Tensor]:
    """Parameters after each step, and the shared model's parameters at the end."""
    model, optimizer, outer = make(policy)
    seen = []
    options = {"sync_every": SYNC_EVERY, "outer": outer, "overlap": policy, "wire": "fp32"}
    with DiLoCo(model, optimizer, **grouped(options)) as diloco:
        for step in range(NUM_STEPS):
            train_step(model, optimizer, rank, step)
            seen.append(values(model))
        diloco.flush()
        with diloco.outer_parameters():
            seen.append(values(model))
    return seen


def train_in_one_process(rank: int, one: int, world: int, policy: Overlap) -> list[list[Tensor]]:
    replicas = [make(policy)[:2] for _ in range(world)]
    outer, wire = make(policy)[2], WireFormat("fp32")
    rounds = SendingRounds(replicas, policy, wire, sync_every=SYNC_EVERY, outer=outer)
    seen: list[list[Tensor]] = [[] for _ in range(world)]
    for step in range(NUM_STEPS):
        for rank, (model, optimizer) in enumerate(replicas):
            train_step(model, optimizer, rank, step)
        rounds.after_step(step + 1)
        for own, (model, _) in zip(seen, replicas, strict=True):
            own.append(values(model))
    rounds.flush(NUM_STEPS)
    for own, (model, _) in zip(seen, replicas, strict=True):
        own.append(values(model))
    return seen


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_replicas_in_one_process_are_those_of_the_library(policy: Overlap, workers) -> None:
    """Bit by bit, after every step and at the end."""
    expected = workers(2).run(train_with_the_library, policy)
    (simulated,) = workers(1).run(train_in_one_process, 2, policy)
    for own, library in zip(simulated, expected, strict=True):
        assert len(own) == len(library) == NUM_STEPS + 1
        assert all(torch.equal(a, b) for a, b in zip(own, library, strict=True))


def row(method: str, seed: int, lr: float, loss: float) -> dict[str, Any]:
    curve = [[rounds, loss + 1.0 / rounds] for rounds in (5, 50, 100)]
    cell = {"num_replicas": 2, "momentum": 0.9, "rounds": 100, "model": "118k"}
    losses = {"tuning_loss": loss - 0.1, "loss": loss, "curve": curve, "cpu_s": 1.0}
    return {"method": method, "seed": seed, "lr": lr, **cell, **losses}


def test_the_table_has_the_best_rate_and_differences_seed_by_seed(tmp_path: Path) -> None:
    rows = [row("Blocking", seed, 0.4, 2.0 + 0.1 * seed) for seed in range(3)]
    rows += [row("Eager zero", seed, 0.2, 2.25 + 0.1 * seed) for seed in range(3)]
    rows += [row("Eager zero", 0, lr, 2.5) for lr in (0.1, 0.4)]
    rows += [{**row("Eager zero", seed, 0.2, 1.9 + 0.1 * seed), "rounds": 200} for seed in range(3)]
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(["{}", *map(json.dumps, rows)]) + "\n")
    record, plot = tmp_path / "record.json", tmp_path / "plot.png"
    written = ["--runs", path, "--json", record, "--plot", plot]
    done = run_benchmark("convergence.long_run", "--report", *written)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "Eager zero" in line]
    assert lines == [
        ["Eager", "zero", "100", "0.2", "2.350", "0.100", "+0.250", "±", "0.000", "3"],
        ["Eager", "zero", "200", "0.2", "2.000", "0.100", "-0.100", "±", "0.000", "3"],
    ]
    document = json.loads(record.read_text())
    assert document["output"] == done.stdout.splitlines()
    # Two settings of each method and rate: the searched runs, and those of twice the rounds.
    rates = [(row["method"], row["rounds"], row["lr"]) for row in document["results"]]
    assert rates == [
        ("Blocking", 100, 0.4),
        ("Eager zero", 100, 0.2),
        ("Eager zero", 100, 0.1),
        ("Eager zero", 100, 0.4),
        ("Eager zero", 200, 0.2),
    ]
    assert document["results"][0]["rounds, mean loss"][0] == [5, pytest.approx(2.1 + 0.2)]
    assert shows(plot, plots.BLACK, plots.BLUE)
