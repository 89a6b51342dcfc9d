"""Asynchronous training against synchronous DiLoCo, on a virtual clock in one process.

    python -m benchmarks.asynchronous.convergence             # the missing runs, then the table
    python -m benchmarks.asynchronous.convergence --limit-s 2400     # as many runs as fit
    python -m benchmarks.asynchronous.convergence --report --plot async.png    # of present runs

The claims of arXiv 2401.09135 at a small scale: a byte-level transformer on the standard library's
sources, workers of different speed, the same number of inner steps for every method. The outer
learning rate of each method is searched on another seed, at very different speeds, until a smaller
and a larger one are worse; where that fails the report says so and the script ends with status 1.
Every run is one line of --runs, and a run that is there is not repeated. --plot draws the losses
over the steps, and into a second file (-time) those over time.
docs/measurements/asynchronous-results.md explains the table.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.asynchronous.methods import METHODS, SPEEDS, Method
from benchmarks.asynchronous.report import choices, condense, draw, kept_rows, report_lines
from benchmarks.asynchronous.training import (
    INNER_LR,
    LAST_LR,
    MODELS,
    NUM_EVALUATIONS,
    SEEDS,
    TUNING_SEED,
    Trainer,
    batches_of,
    corpus,
    held_out_loss,
    pretrained,
)
from benchmarks.support import common
from benchmarks.support.run_file import Trainings
from diloco_comm.asynchronous.coordinator import Coordinator, Outcome, ShardSampler, ShardSchedule
from diloco_comm.asynchronous.local import LocalModel
from diloco_comm.asynchronous.model import SharedModel
from diloco_comm.asynchronous.virtual import VirtualRun, VirtualWorker
from diloco_comm.ops.wire import WireFormat
from diloco_comm_tools.demo.model import ByteTransformer

RECORD = common.RESULTS / "asynchronous" / "async-convergence.json"
SYNC_EVERY = 16
SHORT, LONG, LONGEST = 160, 480, 1440  # inner steps of each worker
# Which methods are run for how long.
LENGTHS = {
    SHORT: tuple(METHODS),
    LONG: (
        "DiLoCo", "async Nesterov", "async SGD", "DN", "DN + DyLU", "DN + DyLU, c = 0.1/N",
        "DN + DyLU, grace",
    ),
    LONGEST: ("DiLoCo", "async SGD", "DN + DyLU", "DN + DyLU, grace"),
}  # fmt: skip
# Methods that are run at other speeds, and with other models and numbers of workers.
AT_SPEEDS = ("async Nesterov", "async SGD", "DN", "DN + DyLU", "DN + DyLU, grace")
AT_SIZES = ("DiLoCo", "async Nesterov", "DN + DyLU", "DN + DyLU, grace")


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


def at_very_different_speeds(lrs: dict[str, float], steps: int) -> Iterator[Run]:
    for seed in SEEDS:
        for name in LENGTHS[steps]:
            yield Run(name, "very", 4, "118k", seed, lrs[name], steps)


def at_other_speeds_and_sizes(lrs: dict[str, float]) -> Iterator[Run]:
    for speeds in ("none", "moderate", "slight"):
        for seed in SEEDS:
            # A barrier makes the result of a synchronous method the same at all speeds.
            for name in AT_SPEEDS:
                yield Run(name, speeds, 4, "118k", seed, lrs[name])
    for num_workers, model in ((2, "118k"), (8, "118k"), (4, "34k")):
        for seed in SEEDS:
            for name in AT_SIZES:
                yield Run(name, "very", num_workers, model, seed, lrs[name])


# ------------------------------------------------------------------------------------- one run


class Shards:
    """Data, optimizer state and learning rate of each shard: they stay with the shard."""

    def __init__(self, run: Run) -> None:
        shards = corpus(run.num_workers).shards
        self.batches = [
            batches_of(run.model, text, 1000 * run.seed + index)
            for index, text in enumerate(shards)
        ]
        self.states: list[list[dict[str, Tensor]]] = [[] for _ in shards]
        self.steps = [0] * len(shards)
        self.sampler = ShardSampler([len(text) for text in shards], seed=run.seed)
        self.schedule = ShardSchedule(INNER_LR, LAST_LR, 0, run.steps)


class ShardTrainer(Trainer):
    """One worker's model, trained on the shard that the round has been given.

    Args:
        fixed: The shard to stay on, or None to draw one for each round.
    """

    def __init__(self, run: Run, shards: Shards, fixed: int | None) -> None:
        super().__init__(run.model, run.seed, pretrained(run.model, run.seed))
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
        self.learn(shards.batches[shard], shards.schedule.at(shards.steps[shard]))
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
        self.virtual, self.model = virtual, run.model
        self.every = run.steps * run.num_workers / NUM_EVALUATIONS
        self.points: list[dict[str, float]] = []

    def measure(self, now: float) -> None:
        virtual = self.virtual
        for target, source in zip(
            self.local.outer, virtual.coordinator.model.read_all(), strict=True
        ):
            target.copy_(source)
        self.local.write()
        figures = {"steps": virtual.num_steps, "updates": virtual.num_updates, "seconds": now}
        self.points.append({**figures, "loss": held_out_loss(self.net, self.model)})

    def after_update(self, now: float, worker: int, outcome: Outcome) -> None:
        if self.virtual.num_steps >= self.every * len(self.points):
            self.measure(now)


def train(run: Run, sync_every: int = SYNC_EVERY) -> dict[str, Any]:
    """Train until all workers together have taken their steps; returns one line of the file."""
    begin = time.process_time()
    torch.manual_seed(run.seed)
    method: Method = METHODS[run.method]
    shards = Shards(run)
    workers, step_seconds = [], SPEEDS[run.speeds](run.num_workers)
    for index, seconds in enumerate(step_seconds):
        trainer = ShardTrainer(run, shards, index if method.is_synchronous else None)
        local = LocalModel(
            trainer.net, [trainer.optimizer], wire=WireFormat("int8"), name=str(index)
        )
        workers.append(VirtualWorker(local, trainer.step, seconds, begin_round=trainer.begin_round))
    model = SharedModel(workers[0].local.sizes, method.rule(run.lr, run.num_workers))
    coordinator = Coordinator(
        model,
        sync_every=sync_every,
        dylu=method.uses_dylu,
        grace=float("inf") if method.is_synchronous else method.grace_steps * max(step_seconds),
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


def make_all(runs: Trainings) -> None:
    """Make the most important runs first."""
    starts, found = {name: method.start for name, method in METHODS.items()}, {}
    for steps, names in LENGTHS.items():
        for name in names:
            run = Run(name, "very", 4, "118k", TUNING_SEED, starts[name], steps)
            found[steps, name] = runs.tune(run, starts[name])
            # A search for longer runs begins where that for shorter ones ended.
            starts[name] = found[steps, name]
        lrs = {name: found[steps, name] for name in names}
        for run in at_very_different_speeds(lrs, steps):
            runs.make(run)
    for run in at_other_speeds_and_sizes({name: found[SHORT, name] for name in LENGTHS[SHORT]}):
        runs.make(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_runs(parser, "async-convergence.jsonl", RECORD)
    common.add_plot(parser, "draw the losses over the steps, and over time into another file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = "python -m benchmarks.asynchronous.convergence"
    runs = Trainings(options.runs, command, train, limit_s=options.limit_s)
    with runs.in_time():
        if not options.report:
            make_all(runs)
    runs.write_record(options.json, report_lines(runs.rows), condense(runs.rows))
    common.save_plot(options.plot, functools.partial(draw, kept_rows(runs.rows), min(LENGTHS)))
    is_bracketed = all(choice.is_bracketed for choice in choices(runs.rows).values())
    return 0 if runs.is_complete and is_bracketed else 1


if __name__ == "__main__":
    raise SystemExit(main())
