"""The losses of four ends of training: one training, and the end that ``flush`` makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmark_runs import run_benchmark
from problems import Regression, train_step
from torch import Tensor

from benchmarks.convergence.end_of_training import ENDINGS
from benchmarks.convergence.wire_rounds import SendingRounds
from diloco_comm import DiLoCo, Nesterov
from diloco_comm.methods.overlap import Blocking
from diloco_comm.ops.wire import WireFormat

pytestmark = pytest.mark.usefixtures("forked_programs")

LR, MOMENTUM, SYNC_EVERY = 0.7, 0.9, 4


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = Regression()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def flushed(rank: int, world: int) -> Tensor:
    model, optimizer = make()
    outer = Nesterov(LR, MOMENTUM)
    with DiLoCo(model, optimizer, sync_every=SYNC_EVERY, outer=outer, wire="fp32") as diloco:
        for step in range(10):
            train_step(model, optimizer, rank, step)
        diloco.flush(final=True)
        return diloco.parts[0].outer.clone()


def test_flush_makes_the_end_that_is_measured_as_mean(workers) -> None:
    """theta - g, with theta before the last round and its mean pseudo-gradient g."""
    replicas = [make() for _ in range(2)]
    outer, wire = Nesterov(LR, MOMENTUM), WireFormat("fp32")
    rounds = SendingRounds(replicas, Blocking(), wire, sync_every=SYNC_EVERY, outer=outer)
    for step in range(10):
        for rank, (model, optimizer) in enumerate(replicas):
            train_step(model, optimizer, rank, step)
        rounds.after_step(step + 1)
    local = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model, _ in replicas]
    expected = torch.stack(local).mean(0)
    for outer in workers(2).run(flushed):
        torch.testing.assert_close(outer, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly("7 s; the table of a long run is made by the same functions")
def test_one_training_is_measured(tmp_path: Path) -> None:
    written = ["--runs", tmp_path / "runs.jsonl", "--json", tmp_path / "record.json"]
    arguments = ["--parts", "remainders", "--tasks", "digits", "--sync-every", "10"]
    arguments += ["--jobs", "1", "--limit-s", "1"]
    done = run_benchmark("convergence.end_of_training", *arguments, *written)
    assert done.returncode == 0, done.stderr
    assert "the time is up" in done.stdout
    rows = json.loads((tmp_path / "record.json").read_text())["results"]["runs"]
    assert [row["remainder"] for row in rows[:4]] == [1, 2, 5, 10]
    for row in rows:
        assert all(0 < row[name] < 3 for name in ENDINGS)
        assert row["scaled"] == row["nesterov"] or row["remainder"] < 10


@pytest.mark.nightly("10 s; the table of a long run is made by the same functions")
def test_the_ends_of_one_training_are_measured(tmp_path: Path) -> None:
    written = ["--runs", tmp_path / "runs.jsonl", "--json", tmp_path / "record.json"]
    arguments = ["--parts", "rounds", "--tasks", "digits", "--jobs", "1", "--limit-s", "1"]
    done = run_benchmark("convergence.end_of_training", *arguments, *written)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "record.json").read_text())["results"]["runs"]
    assert [row["rounds"] for row in rows[:5]] == [4, 8, 12, 20, 40]
    for row in rows:
        # At an outer rate of 0.2 the mean takes more of the last round than the others do.
        assert 0 < row["mean"] < 3 and row["mean"] not in (row["nesterov"], row["undone"])
