"""Asynchronous training against synchronous DiLoCo, on a virtual clock in one process.

    python benchmarks/async_convergence.py               # the runs that are missing, then the table
    python benchmarks/async_convergence.py --report      # table and plot of what has been run

The claims of arXiv 2401.09135 at a small scale: a byte-level transformer on the standard library's
sources, workers of different speed, the same number of inner steps for every method. The outer
learning rate of each method is the best of three on another seed, at very different speeds.
Every run is one line of the result file, and a run that is there is not repeated.
docs/asynchronous.md explains the table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import common
import torch
from async_methods import GRID, METHODS, SPEEDS, Method
from async_report import write_report
from torch import Tensor

from diloco_comm.asynchronous.coordinator import Coordinator, Outcome
from diloco_comm.asynchronous.local import LocalModel
from diloco_comm.asynchronous.model import SharedModel
from diloco_comm.asynchronous.scheduling import ShardSampler, ShardSchedule
from diloco_comm.asynchronous.virtual import VirtualRun, VirtualWorker
from diloco_comm.tools.demo_data import Batches, Corpus, load_corpus, validation_windows
from diloco_comm.tools.demo_model import ByteTransformer, ModelConfig, byte_loss
from diloco_comm.wire import WireFormat

TUNING_SEED = 1000
SYNC_EVERY = 16
SHORT, LONG = 160, 480  # inner steps of each worker
PRETRAINING_STEPS = 100
BATCH_SIZE = 8
INNER_LR, LAST_LR = 2e-3, 2e-4
NUM_EVALUATIONS = 8
MODELS = {
    "118k": ModelConfig(context=32, width=64, num_layers=2),
    "34k": ModelConfig(context=32, width=32, num_layers=1),
}


@dataclass(frozen=True)
class Run:
    """One run; ``lr`` is the outer learning rate, and ``speeds`` a name of ``SPEEDS``."""

    method: str
    speeds: str
    num_workers: int
    model: str
    seed: int
    lr: float
    steps: int = SHORT

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


# Long runs are made for these alone.
LONG_METHODS = ("DiLoCo", "async Nesterov", "async SGD", "DN", "DN + DyLU")


def tuning(steps: int) -> Iterator[Run]:
    """All runs that choose the learning rates."""
    for name, method in METHODS.items():
        for lr in GRID[method.grid]:
            if steps == SHORT or name in LONG_METHODS:
                yield Run(name, "very", 4, "118k", TUNING_SEED, lr, steps)


def long_table(lrs: dict[str, float]) -> Iterator[Run]:
    """Three times as many rounds, at very different speeds."""
    for seed in range(3):
        for name in LONG_METHODS:
            yield Run(name, "very", 4, "118k", seed, lrs[name], LONG)


def table(lrs: dict[str, float]) -> Iterator[Run]:
    """All runs of the table, the most important ones first."""
    main = ("DiLoCo", "async Nesterov", "DN", "DN + DyLU")
    for seed in range(3):
        for name in main:
            yield Run(name, "very", 4, "118k", seed, lrs[name])
    for speeds in ("none", "moderate", "slight"):
        for seed in range(3):
            # A barrier makes the result the same at all speeds.
            for name in main[1:]:
                yield Run(name, speeds, 4, "118k", seed, lrs[name])
    for speeds in ("very", "none"):
        for seed in range(3):
            for name in METHODS:
                if name not in main and (speeds == "very" or name != "DiLoCo, outer SGD"):
                    yield Run(name, speeds, 4, "118k", seed, lrs[name])
    for num_workers, model in ((4, "34k"), (2, "118k"), (8, "118k")):
        for seed in range(3):
            for name in ("DiLoCo", "async Nesterov", "DN + DyLU"):
                yield Run(name, "very", num_workers, model, seed, lrs[name])


# ------------------------------------------------------------------------------------- one run


@cache
def corpus(num_workers: int) -> Corpus:
    return load_corpus(None, num_workers)


@cache
def pretrained(model: str, seed: int) -> tuple[Tensor, ...]:
    """Return the parameters that all methods start from: some steps of plain training."""
    net = ByteTransformer(MODELS[model], seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=INNER_LR)
    text = corpus(4)
    batches = [Batches(s, BATCH_SIZE, MODELS[model].context, 77 + seed) for s in text.shards]
    for step in range(PRETRAINING_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = INNER_LR * min(1.0, (step + 1) / 30)
        byte_loss(net, *batches[step % len(batches)].next()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return tuple(p.detach().clone() for p in net.parameters())


class Shards:
    """Data, optimizer state and learning rate of each shard: they stay with the shard."""

    def __init__(self, run: Run) -> None:
        shards = corpus(run.num_workers).shards
        context = MODELS[run.model].context
        self.batches = [
            Batches(text, BATCH_SIZE, context, 1000 * run.seed + index)
            for index, text in enumerate(shards)
        ]
        self.states: list[list[dict[str, Tensor]]] = [[] for _ in shards]
        self.steps = [0] * len(shards)
        self.sampler = ShardSampler([len(text) for text in shards], seed=run.seed)
        self.schedule = ShardSchedule(INNER_LR, LAST_LR, 0, run.steps)


class Trainer:
    """One worker's model, trained on the shard that the round has been given.

    Args:
        fixed: The shard to stay on, or None to draw one for each round.
    """

    def __init__(self, run: Run, shards: Shards, fixed: int | None) -> None:
        self.net = ByteTransformer(MODELS[run.model], run.seed)
        start = pretrained(run.model, run.seed)
        with torch.no_grad():
            for param, value in zip(self.net.parameters(), start, strict=True):
                param.copy_(value)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=INNER_LR)
        self.shards, self.fixed, self.shard = shards, fixed, 0

    def begin_round(self, num_steps: int) -> None:
        shards = self.shards
        self.shard = shards.sampler.draw() if self.fixed is None else self.fixed
        shards.sampler.learn(self.shard, num_steps)
        states = shards.states[self.shard]
        self.optimizer.state.clear()
        for param, state in zip(self.net.parameters(), states, strict=False):
            self.optimizer.state[param] = state

    def step(self) -> None:
        shards, shard = self.shards, self.shard
        self.optimizer.param_groups[0]["lr"] = shards.schedule.at(shards.steps[shard])
        byte_loss(self.net, *shards.batches[shard].next()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        shards.steps[shard] += 1
        if not shards.states[shard]:
            shards.states[shard] = [self.optimizer.state[p] for p in self.net.parameters()]


class Evaluation:
    """The loss of the shared model on text that nobody trains on, at even distances."""

    def __init__(self, run: Run, virtual: VirtualRun) -> None:
        self.net = ByteTransformer(MODELS[run.model], run.seed)
        self.local = LocalModel(
            self.net, [torch.optim.SGD(self.net.parameters())], wire=WireFormat("fp32")
        )
        context = MODELS[run.model].context
        self.windows = validation_windows(corpus(4).validation, 192, context)
        self.virtual = virtual
        self.every = run.steps * run.num_workers / NUM_EVALUATIONS
        self.points: list[dict[str, float]] = []

    def measure(self, now: float) -> None:
        for target, source in zip(
            self.local.outer, self.virtual.coordinator.model.read_all(), strict=True
        ):
            target.copy_(source)
        self.local.write()
        with torch.no_grad():
            loss = byte_loss(self.net, self.windows[:, :-1], self.windows[:, 1:]).item()
        self.points.append({"steps": self.virtual.num_steps, "seconds": now, "loss": loss})

    def after_update(self, now: float, worker: int, outcome: Outcome) -> None:
        if self.virtual.num_steps >= self.every * len(self.points):
            self.measure(now)


def train(run: Run) -> dict[str, Any]:
    """Train until all workers together have taken their steps; returns one line of the file."""
    begin = time.process_time()
    torch.manual_seed(run.seed)
    method: Method = METHODS[run.method]
    shards = Shards(run)
    workers = []
    for index, seconds in enumerate(SPEEDS[run.speeds](run.num_workers)):
        trainer = Trainer(run, shards, index if method.is_synchronous else None)
        local = LocalModel(
            trainer.net, [trainer.optimizer], wire=WireFormat("int8"), name=str(index)
        )
        workers.append(VirtualWorker(local, trainer.step, seconds, begin_round=trainer.begin_round))
    model = SharedModel(workers[0].local.sizes, method.rule(run.lr, run.num_workers))
    coordinator = Coordinator(
        model,
        sync_every=SYNC_EVERY,
        dylu=method.uses_dylu,
        grace=float("inf") if method.is_synchronous else 0.0,
    )
    # Speeds are known from the start: all but the first rounds would be measured anyway.
    for index, worker in enumerate(workers):
        coordinator.speeds.measure(str(index), 1, worker.seconds_per_step)
    virtual = VirtualRun(coordinator, workers)
    evaluation = Evaluation(run, virtual)
    evaluation.measure(0.0)
    virtual.until(num_steps=run.steps * run.num_workers, on_update=evaluation.after_update)
    if evaluation.points[-1]["steps"] != virtual.num_steps:
        evaluation.measure(virtual.now)
    return {
        **asdict(run),
        "loss": evaluation.points[-1]["loss"],
        "seconds": virtual.now,
        "updates": virtual.num_updates,
        "mean_staleness": sum(s * n for s, n in coordinator.counts.staleness.items())
        / max(1, sum(coordinator.counts.staleness.values())),
        "points": evaluation.points,
        "cpu_s": time.process_time() - begin,
    }


# -------------------------------------------------------------------------------------- all runs


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the runs that the file holds, by key."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines[1:]]
    fields = Run.__dataclass_fields__
    return {Run(**{name: row[name] for name in fields}).key: row for row in rows}


def best_lrs(rows: dict[str, dict[str, Any]], steps: int) -> dict[str, float]:
    """Return the learning rate of each method whose tuning run ended lowest."""
    best: dict[str, tuple[float, float]] = {}
    for run in tuning(steps):
        if run.key not in rows:
            continue
        row = rows[run.key]
        loss = row["loss"] if row["loss"] == row["loss"] else float("inf")
        best[run.method] = min(best.get(run.method, (float("inf"), 0.0)), (loss, run.lr))
    return {name: lr for name, (_, lr) in best.items()}


def run_missing(path: Path, runs: Iterator[Run]) -> dict[str, dict[str, Any]]:
    done = read(path)
    for run in runs:
        if run.key in done:
            continue
        done[run.key] = train(run)
        with path.open("a") as file:
            file.write(json.dumps(done[run.key]) + "\n")
        row = done[run.key]
        print(f"{row['cpu_s']:6.1f} s  {row['loss']:.4f}  {run}", flush=True)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "results" / "async-convergence.jsonl"
    parser.add_argument("--out", type=Path, default=default, help="file of the runs")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.out.exists():
        about = {"machine": common.machine(), "versions": common.versions()}
        command = "python benchmarks/async_convergence.py"
        options.out.write_text(json.dumps({**about, "command": command}) + "\n")
    if not options.report:
        for steps, runs in ((SHORT, table), (LONG, long_table)):
            lrs = best_lrs(run_missing(options.out, tuning(steps)), steps)
            run_missing(options.out, runs(lrs))
    rows = read(options.out)
    lrs_by_steps = {steps: best_lrs(rows, steps) for steps in (SHORT, LONG)}
    write_report(options.out, list(rows.values()), lrs_by_steps, TUNING_SEED)


if __name__ == "__main__":
    main()
