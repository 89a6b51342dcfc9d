"""Eager and Delayed against Blocking over a hundred rounds, each at its own outer learning rate.

    python -m benchmarks.convergence.long_run             # the missing runs, then the table
    python -m benchmarks.convergence.long_run --report --plot long-run.png    # of the present runs

A byte-level transformer on the standard library's sources, M = 2 and M = 4 replicas, rounds of 15
inner steps. The outer learning rate of each method is searched with seed 0 on one half of the
held-out text, until a smaller and a larger one are worse; the table has the loss of the other half.
The replicas live in one process (in_one_process.py). Every run is one line of --runs, and a run
that is there is not repeated; the record (--json) has losses and curves.
docs/measurements/convergence.md explains the table.
"""

from __future__ import annotations

import argparse
import functools
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence.in_one_process import Replica, Replicas
from benchmarks.convergence.long_run_report import condense, draw, report_lines
from benchmarks.convergence.tasks import Size, Text
from benchmarks.support import common
from benchmarks.support.run_file import RunFile
from benchmarks.support.tuning import choose, next_rate
from diloco_comm import Nesterov
from diloco_comm.methods.overlap import Blocking, Delayed, Eager, Overlap
from diloco_comm_tools.demo.model import ModelConfig

SYNC_EVERY, BATCH_SIZE = 15, 8
NUM_SEEDS = 3
EVALUATE_EVERY_ROUNDS = 5
NUM_WINDOWS = 512
MODELS = {"118k": ModelConfig(context=32, width=64), "428k": ModelConfig()}
# Factors of about 1.5 are finer than what the seeds can tell apart.
LADDER = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.4)


@dataclass(frozen=True)
class Method:
    """A policy, and the learning rate at which the search of its own begins."""

    policy: Overlap
    start: float


METHODS = {
    "Blocking": Method(Blocking(), 0.4),
    "Eager zero": Method(Eager(), 0.2),
    "Eager sync": Method(Eager(first="sync"), 0.2),
    "Delayed": Method(Delayed(), 0.1),
}


@dataclass(frozen=True)
class Run:
    """One run; ``lr`` and ``momentum`` are the outer optimizer's."""

    method: str
    num_replicas: int
    momentum: float
    seed: int
    lr: float
    rounds: int = 100
    model: str = "118k"


def train(run: Run) -> dict[str, Any]:
    """Train to the end; returns one line of the file."""
    begin = time.process_time()
    size = Size(run.rounds * SYNC_EVERY, SYNC_EVERY, BATCH_SIZE, 2e-3, 60)
    config, world = MODELS[run.model], run.num_replicas
    tasks = [Text(run.seed, i, world, BATCH_SIZE, config, NUM_WINDOWS) for i in range(world)]
    outer = Nesterov(run.lr, run.momentum)
    replicas = Replicas(
        [Replica(task.model, _inner_optimizer(task.model, size), outer) for task in tasks],
        METHODS[run.method].policy,
    )
    curve: list[tuple[int, float]] = []
    for step in range(size.num_steps):
        for task, replica in zip(tasks, replicas.replicas, strict=True):
            for group in replica.optimizer.param_groups:
                group["lr"] = size.lr_at(step)
            task.loss(task.model).backward()
            replica.optimizer.step()
            replica.optimizer.zero_grad()
        if (step + 1) % SYNC_EVERY:
            continue
        replicas.exchange()
        rounds = (step + 1) // SYNC_EVERY
        if rounds % EVALUATE_EVERY_ROUNDS == 0:
            with replicas.outer_parameters():
                curve.append((rounds, tasks[0].validate(1)[0]))
    replicas.flush()
    return {
        **asdict(run),
        "tuning_loss": tasks[0].validate(0)[0],
        "loss": tasks[0].validate(1)[0],
        "curve": curve,
        "cpu_s": time.process_time() - begin,
    }


def _inner_optimizer(model: torch.nn.Module, size: Size) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), size.inner_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


class Runs(RunFile):
    """The runs that a file holds, and those that are added to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "python -m benchmarks.convergence.long_run")

    def make(self, run: Run) -> None:
        if self.find(asdict(run)):
            return
        row = train(run)
        self.add(row)
        print(f"{row['cpu_s']:6.1f} s  {row['loss']:.4f}  {run}", flush=True)

    def tune(self, name: str, cell: dict[str, Any]) -> float:
        """Try learning rates with seed 0 until the best one is bracketed; return the best."""
        while True:
            wanted = {"method": name, "seed": 0, **cell}
            losses = {row["lr"]: row["tuning_loss"] for row in self.find(wanted)}
            lr = next_rate(losses, METHODS[name].start, LADDER)
            if lr is None:
                return choose(losses).lr
            self.make(Run(lr=lr, **wanted))


def make_all(runs: Runs, args: argparse.Namespace) -> None:
    """Make the most important runs first."""
    for momentum in args.momentum:
        cells = [
            {"num_replicas": n, "momentum": momentum, "rounds": args.rounds, "model": args.model}
            for n in args.replicas
        ]
        chosen = []
        for cell in cells:
            best = {name: runs.tune(name, cell) for name in METHODS}
            chosen.append((cell, best))
            _make_seeds(runs, cell, best)
        # Twice the rounds: what an overlapped method does in the time of a blocking one whose
        # exchanges take as long as its inner steps.
        for cell, best in chosen:
            overlapped = {name: lr for name, lr in best.items() if name != "Blocking"}
            _make_seeds(runs, cell | {"rounds": 2 * args.rounds}, overlapped)


def _make_seeds(runs: Runs, cell: dict[str, Any], best: dict[str, float]) -> None:
    for seed in range(NUM_SEEDS):
        for name, lr in best.items():
            runs.make(Run(method=name, seed=seed, lr=lr, **cell))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    common.add_runs(parser, "long-run.jsonl")
    common.add_output(parser, default=common.RESULTS / "convergence" / "long-run.json")
    common.add_plot(parser, "draw the losses over the rounds")
    add("--report", action="store_true", help="train nothing")
    add("--replicas", type=lambda t: [int(n) for n in t.split(",")], default=[2, 4])
    add("--momentum", type=lambda t: [float(n) for n in t.split(",")], default=[0.9, 0.8])
    add("--rounds", type=int, default=100)
    add("--model", choices=tuple(MODELS), default="118k")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = Runs(args.runs)
    if not args.report:
        make_all(runs, args)
    runs.write_record(args.json, report_lines(runs.rows), condense(runs.rows))
    common.save_plot(args.plot, functools.partial(draw, runs.rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
