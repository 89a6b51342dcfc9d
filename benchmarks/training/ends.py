"""How training should end, and what a streamed merge should keep: held-out losses of small runs.

    python -m benchmarks.training.ends             # the missing runs, then both tables
    python -m benchmarks.training.ends --report    # the tables of the present runs

Replicas in one process train on the fp32 wire with Nesterov outside and AdamW inside. Each run ends
after a whole round in three ways, from the same state:

- flush: an ordinary outer step, as ``flush()`` makes;
- taken back: that step without its look-ahead;
- mean: the outer parameters before that step, less the mean pseudo-gradient, as
  ``flush(final=True)`` makes.

The first table compares these ends under ``Blocking``, by rounds, number of replicas, outer rate
and schedule of the inner rate. A constant rate has all its ends in one training. The second table
has the mean under ``Streaming(delay, alpha)`` less the mean under ``Blocking``. All comparisons are
paired: the same seed, data and start. Every run is one line of --runs; no run is made twice.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.convergence.in_one_process import Replica
from benchmarks.convergence.tasks import Digits, Task, Text
from benchmarks.support import common
from benchmarks.support.run_file import Row, RunFile, grouped
from diloco_comm import Nesterov, ops
from diloco_comm.methods.outer import Update
from diloco_comm_tools.demo.model import ModelConfig

MOMENTUM, WARMUP_STEPS, SEEDS = 0.9, 20, (0, 1, 2)
TASKS = {"digits": 2e-3, "text": 3e-3}  # and their inner rates
TEXT_MODEL = ModelConfig(context=32, width=32, deviation=0.1)
ROUNDS = {"constant": (4, 8, 12, 20, 40), "cosine": (4, 12, 40), "streamed": (4, 8, 16)}
ENDS = ("flush", "taken back", "mean")
PLACES = ("task", "world", "outer_lr", "schedule", "sync_every", "delay", "alpha")


@dataclass(frozen=True)
class Run:
    """One training; ``rounds`` are those after which an end is measured."""

    task: str
    world: int
    outer_lr: float
    schedule: str
    seed: int
    rounds: tuple[int, ...]
    sync_every: int = 10
    delay: int = 0
    alpha: float = 0.0

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then the schedule until the last step; `step` counts from 0."""
        base, total = TASKS[self.task], self.rounds[-1] * self.sync_every
        if step < WARMUP_STEPS or self.schedule == "constant":
            return base * min(1.0, (step + 1) / WARMUP_STEPS)
        progress = (step - WARMUP_STEPS) / (total - WARMUP_STEPS)
        return base * 0.5 * (1.0 + math.cos(math.pi * progress))

    def keys(self, num_rounds: int) -> Row:
        """Return the values that identify one end of this training in the file."""
        return {**asdict(self), "rounds": num_rounds}


def all_runs() -> Iterator[Run]:
    for task, seed in itertools.product(TASKS, SEEDS):
        for world, lr in itertools.product((2, 8), (0.2, 0.4, 0.7)):
            yield Run(task, world, lr, "constant", seed, ROUNDS["constant"])
            for rounds in ROUNDS["cosine"]:
                yield Run(task, world, lr, "cosine", seed, (rounds,))
        for lr in (0.4, 0.7):
            yield Run(task, 2, lr, "constant", seed, ROUNDS["streamed"], 20)
            for delay, alpha in itertools.product((1, 5, 10), (0.0, 0.25, 0.5, 0.75)):
                yield Run(task, 2, lr, "constant", seed, ROUNDS["streamed"], 20, delay, alpha)


def train(run: Run) -> list[Row]:
    """Train to the end; return one line of the file for each end."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    tasks = [_make_task(run, replica) for replica in range(run.world)]
    optimizers = [
        torch.optim.AdamW(task.model.parameters(), 1.0, betas=(0.9, 0.95), weight_decay=0.1)
        for task in tasks
    ]
    outer = Nesterov(run.outer_lr, MOMENTUM)
    replicas = [
        Replica(task.model, optimizer, outer)
        for task, optimizer in zip(tasks, optimizers, strict=True)
    ]
    rows, sent = [], [torch.empty(0)]
    for step in range(run.rounds[-1] * run.sync_every):
        for task, optimizer in zip(tasks, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = run.lr_at(step)
            task.loss(task.model).backward()
            optimizer.step()
            optimizer.zero_grad()
        number, since = divmod(step + 1, run.sync_every)
        if since == 0:
            sent = [replica.encode(number) for replica in replicas]
            if number in run.rounds:
                rows.append({**run.keys(number), **_losses(tasks[0], replicas[0], outer, sent)})
        if number and since == run.delay:
            for replica in replicas:
                replica.state.step(_update(replica, sent, run.alpha))
    return rows


def _update(replica: Replica, sent: Sequence[Tensor], alpha: float) -> Update:
    terms = [(payload, 1.0 / len(sent)) for payload in sent]
    params = replica.local.fragments[0].tensors()
    return Update(terms, params, replica.layout, replica.lr, alpha)


def _losses(
    task: Task, replica: Replica, optimizer: Nesterov, sent: Sequence[Tensor]
) -> dict[str, float]:
    """Return the held-out loss of each end; the replica stays as it is."""
    params = replica.local.fragments[0].tensors()
    kept = [tensor.clone() for tensor in params]
    state = optimizer.make_state(replica.state.outer.clone())
    state.load({name: tensor.clone() for name, tensor in replica.state.tensors().items()}, {})
    state.step(_update(replica, sent, 0.0))
    flushed, losses = state.outer.clone(), [_loss(task)]
    state.take_back_look_ahead(replica.lr, None)
    ops.merge(state.outer, params)
    losses.append(_loss(task))
    state.outer.copy_(flushed)
    state.take_mean(params)
    losses.append(_loss(task))
    for tensor, value in zip(params, kept, strict=True):
        tensor.copy_(value)
    return dict(zip(ENDS, losses, strict=True))


def _loss(task: Task) -> float:
    return fmean(task.validate(half)[0] for half in (0, 1))


def _make_task(run: Run, replica: int) -> Task:
    if run.task == "text":
        return Text(run.seed, replica, run.world, 4, TEXT_MODEL, 512)
    return Digits(run.seed, replica, run.world, 16)


def report_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Make both tables; a number is an average over the seeds, with the smallest and largest."""
    blocking = [row for row in rows if row["sync_every"] == 10]
    yield "# the mean; what flush and taken back have more; and what the mean has more than flush"
    yield f"# {'task':>6} {'W':>2} {'lr':>3} {'rate':>8} {'rounds':>6} {'mean':>8}" + "".join(
        f"{name:>29}" for name in ("flush", "taken back", "mean worse by")
    )
    for setting, own in grouped(_in_order(blocking), (*PLACES, "rounds")):
        more = [[row[name] - row["mean"] for row in own] for name in ("flush", "taken back")]
        more.append([max(row["mean"] - row["flush"], 0.0) for row in own])
        place = f"{setting['task']:>6} {setting['world']:2} {setting['outer_lr']:3}"
        yield (
            f"  {place} {setting['schedule']:>8} {setting['rounds']:6} "
            f"{fmean(row['mean'] for row in own):8.4f}{''.join(map(_range, more))}"
        )
    streamed = [row for row in rows if row["delay"]]
    yield "# mean at the end under Streaming(delay, alpha), H=20, less the mean under Blocking"
    places = f"{'task':>6} {'lr':>3} {'rounds':>6} {'delay/H':>7} {'alpha':>5}"
    yield f"# {places} {'mean':>29} {'flush':>29}"
    for setting, own in grouped(_in_order(streamed), (*PLACES, "rounds")):
        more = [[], []]
        for row in own:
            base = next(r for r in rows if _is_base(r, row))
            more[0].append(row["mean"] - base["mean"])
            more[1].append(row["flush"] - base["flush"])
        share = setting["delay"] / setting["sync_every"]
        place = f"{setting['task']:>6} {setting['outer_lr']:3} {setting['rounds']:6}"
        yield f"  {place} {share:7} {setting['alpha']:5} {''.join(map(_range, more))}"


def _is_base(candidate: Row, row: Row) -> bool:
    keys = ("task", "outer_lr", "rounds", "seed", "sync_every")
    return not candidate["delay"] and all(candidate[key] == row[key] for key in keys)


def _range(values: Sequence[float]) -> str:
    return f"{fmean(values):+9.4f} ({min(values):+.4f} .. {max(values):+.4f})".rjust(29)


def _in_order(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: [row[key] for key in (*PLACES, "rounds", "seed")])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_runs(parser, "ends.jsonl")
    common.add_output(parser, default=common.RESULTS / "training" / "ends.json")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--most", type=int, default=None, help="make at most so many trainings")
    args = parser.parse_args()
    runs = RunFile(args.runs, "python -m benchmarks.training.ends")
    missing = [
        run for run in all_runs() if not all(runs.find(run.keys(number)) for number in run.rounds)
    ]
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        for rows in pool.imap(train, [] if args.report else missing[: args.most]):
            for row in rows:
                if not runs.find({key: row[key] for key in (*PLACES, "rounds", "seed")}):
                    runs.add(row)
    rows = [{key: _short(value) for key, value in row.items()} for row in _in_order(runs.rows)]
    settings: dict[str, Any] = {"momentum": MOMENTUM, "warmup_steps": WARMUP_STEPS}
    settings |= {"inner": "AdamW", "inner_lr": TASKS, "text_model": asdict(TEXT_MODEL)}
    runs.write_record(args.json, report_lines(runs.rows), {"settings": settings, "runs": rows})
    return 0


def _short(value: object) -> object:
    return round(value, 5) if isinstance(value, float) else value


if __name__ == "__main__":
    raise SystemExit(main())
