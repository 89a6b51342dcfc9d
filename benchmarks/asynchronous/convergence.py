"""Asynchronous training against synchronous DiLoCo, on a virtual clock in one process.

    python -m benchmarks.asynchronous.convergence             # the missing runs, then the table
    python -m benchmarks.asynchronous.convergence --cpu-minutes 40   # as many runs as fit
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.asynchronous.methods import METHODS, SPEEDS, Method
from benchmarks.asynchronous.report import condense, draw, kept_rows, report_lines
from benchmarks.support import common
from benchmarks.support.run_file import Row, RunFile
from benchmarks.support.tuning import Choice, choose, next_rate
from diloco_comm.asynchronous.coordinator import Coordinator, Outcome, ShardSampler, ShardSchedule
from diloco_comm.asynchronous.local import LocalModel
from diloco_comm.asynchronous.model import SharedModel
from diloco_comm.asynchronous.virtual import VirtualRun, VirtualWorker
from diloco_comm.ops.wire import WireFormat
from diloco_comm_tools.demo.data import Batches, Corpus, load_corpus, validation_windows
from diloco_comm_tools.demo.model import ByteTransformer, ModelConfig, byte_loss

RECORD = common.RESULTS / "asynchronous" / "async-convergence.json"
TUNING_SEED = 1000
NUM_SEEDS = 3
SYNC_EVERY = 16
SHORT, LONG, LONGEST = 160, 480, 1440  # inner steps of each worker
PRETRAINING_STEPS = 100
BATCH_SIZE = 8
INNER_LR, LAST_LR = 2e-3, 2e-4
NUM_EVALUATIONS = 8
MODELS = {
    "118k": ModelConfig(context=32, width=64, num_layers=2),
    "34k": ModelConfig(context=32, width=32, num_layers=1),
}
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


def tuning(name: str, lr: float, steps: int) -> Run:
    """Return a run that helps to choose the learning rate."""
    return Run(name, "very", 4, "118k", TUNING_SEED, lr, steps)


def at_very_different_speeds(lrs: dict[str, float], steps: int) -> Iterator[Run]:
    for seed in range(NUM_SEEDS):
        for name in LENGTHS[steps]:
            yield Run(name, "very", 4, "118k", seed, lrs[name], steps)


def at_other_speeds_and_sizes(lrs: dict[str, float]) -> Iterator[Run]:
    for speeds in ("none", "moderate", "slight"):
        for seed in range(NUM_SEEDS):
            # A barrier makes the result of a synchronous method the same at all speeds.
            for name in AT_SPEEDS:
                yield Run(name, speeds, 4, "118k", seed, lrs[name])
    for num_workers, model in ((2, "118k"), (8, "118k"), (4, "34k")):
        for seed in range(NUM_SEEDS):
            for name in AT_SIZES:
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
        virtual = self.virtual
        self.points.append(
            {
                "steps": virtual.num_steps,
                "updates": virtual.num_updates,
                "seconds": now,
                "loss": loss,
            }
        )

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
        trainer = Trainer(run, shards, index if method.is_synchronous else None)
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


def losses_of(rows: Iterable[Row], name: str, steps: int) -> dict[float, float]:
    """Return the losses of a method's tuning runs by learning rate."""
    return {
        row["lr"]: row["loss"]
        for row in rows
        if (row["method"], row["steps"], row["seed"]) == (name, steps, TUNING_SEED)
    }


def choices(rows: Sequence[Row], steps: int) -> dict[str, Choice]:
    """Return the learning rate of each method that was tuned for so many steps."""
    found = {name: losses_of(rows, name, steps) for name in LENGTHS[steps]}
    return {name: choose(losses) for name, losses in found.items() if losses}


def best_lrs(rows: Sequence[Row], steps: int) -> dict[str, float]:
    """Return the learning rate of each method whose tuning run ended lowest."""
    return {name: choice.lr for name, choice in choices(rows, steps).items()}


class OutOfTimeError(Exception):
    """The processor time that was granted is used up."""


class Runner:
    """Make the runs that a file does not hold yet.

    Args:
        cpu_minutes: Processor time after which no further run is begun.
    """

    def __init__(self, runs: RunFile, cpu_minutes: float) -> None:
        self.runs, self._cpu_s = runs, 60 * cpu_minutes

    def make(self, run: Run) -> None:
        if self.runs.find(asdict(run)):
            return
        if time.process_time() > self._cpu_s:
            raise OutOfTimeError
        row = train(run)
        self.runs.add(row)
        print(f"{row['cpu_s']:6.1f} s  {row['loss']:.4f}  {run}", flush=True)

    def tune(self, name: str, steps: int, start: float) -> None:
        """Try learning rates until the best one is bracketed."""
        while True:
            lr = next_rate(losses_of(self.runs.rows, name, steps), start)
            if lr is None:
                return
            self.make(tuning(name, lr, steps))

    def make_all(self) -> None:
        """Make the most important runs first."""
        starts = {name: method.start for name, method in METHODS.items()}
        for steps, names in LENGTHS.items():
            for name in names:
                self.tune(name, steps, starts[name])
            lrs = best_lrs(self.runs.rows, steps)
            # A search for longer runs begins where that for shorter ones ended.
            starts |= lrs
            for run in at_very_different_speeds(lrs, steps):
                self.make(run)
        for run in at_other_speeds_and_sizes(best_lrs(self.runs.rows, SHORT)):
            self.make(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_runs(parser, "async-convergence.jsonl")
    common.add_output(parser, default=RECORD)
    common.add_plot(parser, "draw the losses over the steps, and over time into another file")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument(
        "--cpu-minutes", type=float, default=float("inf"), help="begin no run after so many"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = RunFile(options.runs, "python -m benchmarks.asynchronous.convergence")
    is_complete = True
    if not options.report:
        try:
            Runner(runs, options.cpu_minutes).make_all()
        except OutOfTimeError:
            is_complete = False
            print("the processor time is used up; the next call goes on from here")
    chosen = {steps: choices(runs.rows, steps) for steps in LENGTHS}
    lines = report_lines(runs.rows, chosen, TUNING_SEED)
    runs.write_record(options.json, lines, condense(runs.rows))
    kept = kept_rows(runs.rows, chosen, TUNING_SEED)
    common.save_plot(options.plot, functools.partial(draw, kept, min(LENGTHS)))
    is_bracketed = all(choice.is_bracketed for row in chosen.values() for choice in row.values())
    return 0 if is_complete and is_bracketed else 1


if __name__ == "__main__":
    raise SystemExit(main())
