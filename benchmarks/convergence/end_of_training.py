"""How training should end, and what a streamed merge should keep: held-out losses of small runs.

    python -m benchmarks.convergence.end_of_training                # the missing runs, the tables
    python -m benchmarks.convergence.end_of_training --parts remainders --limit-s 200
    python -m benchmarks.convergence.end_of_training --report       # of the present runs

Replicas train on the fp32 wire for some rounds of H inner steps; the last round has r steps, the
remainder, or all H. The outer optimizer is Nesterov: m' = mu*m + g; theta' = theta -
lr*(g + mu*m'). Each ending starts from the same outer parameters, momentum and local parameters:

- nesterov: an ordinary outer step, theta', as ``flush()`` makes;
- mean: the mean of the local parameters, theta - g, as ``flush(final=True)`` makes;
- undone: an ordinary outer step without its look-ahead, theta' + lr*mu*m' = theta - lr*g;
- scaled: the share r/H of an ordinary outer step, theta + r/H*(theta' - theta);
- last full: no step at all, theta, which is what the last full round left.

The part ``remainders`` has four replicas and one outer rate, and last rounds of all lengths; the
part ``rounds`` has whole rounds of 10 steps, with two and eight replicas and three outer rates; the
part ``streamed`` has ``Streaming(delay, alpha)`` beside ``Blocking``. The learning rate of AdamW,
the inner optimizer, is constant, falls to 0 along a cosine, or falls to 0 linearly over the last
fifth of all steps (wsd); it would be 0 at the step after the last one. A constant rate has all its
ends in one training. All comparisons are paired: the same seed, data and start.

The replicas live in one process (wire_rounds.py). Every end is one line of --runs, and a training
whose ends are there is not repeated; the record (--json) has the losses of all runs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.convergence.tasks import Digits, Task, Text, inner_step, make_optimizer
from benchmarks.convergence.wire_rounds import Part, SendingRounds, StreamingRounds
from benchmarks.support import common
from benchmarks.support.run_file import Row, RunFile, grouped
from diloco_comm import Nesterov, ops
from diloco_comm.methods.outer import Update
from diloco_comm.methods.overlap import Blocking, Streaming
from diloco_comm.ops.wire import WireFormat
from diloco_comm_tools.demo.model import ModelConfig

MOMENTUM, WARMUP_STEPS, SEEDS = 0.9, 20, (0, 1, 2)
CONSTANT, SCHEDULES = "constant", ("constant", "cosine", "wsd")
ENDINGS = ("nesterov", "mean", "undone", "scaled")
LAST_FULL = "last full"
INNER_LR = {"digits": 2e-3, "text": 3e-3}
# The transformer of each part, its batch and its windows of held-out text.
TEXT = {
    "remainders": (ModelConfig(context=48, width=64, deviation=0.08), 8, 1024),
    "rounds": (ModelConfig(context=32, width=32, deviation=0.1), 4, 512),
    "streamed": (ModelConfig(context=32, width=32, deviation=0.1), 4, 512),
}
# Full rounds before the remainder, by the inner steps of a round (H).
FULL_ROUNDS = {10: 25, 50: 8}
SETTING = (
    *("part", "task", "world", "outer_lr", "schedule", "sync_every", "delay", "alpha"),
    *("rounds", "remainder"),
)


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        ends: Number of rounds, and inner steps in the last one, where the ends are measured.
    """

    part: str
    task: str
    world: int
    outer_lr: float
    schedule: str
    sync_every: int
    seed: int
    ends: tuple[tuple[int, int], ...]
    delay: int = 0
    alpha: float = 0.0

    @property
    def steps(self) -> dict[int, tuple[int, int]]:
        """The ends by their inner steps."""
        return {(rounds - 1) * self.sync_every + rest: (rounds, rest) for rounds, rest in self.ends}

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then the schedule until the end of training; `step` counts from 0."""
        base, total = INNER_LR[self.task], max(self.steps)
        if step < WARMUP_STEPS or self.schedule == CONSTANT:
            return base * min(1.0, (step + 1) / WARMUP_STEPS)
        if self.schedule == "cosine":
            progress = (step - WARMUP_STEPS) / (total - WARMUP_STEPS)
            return base * 0.5 * (1.0 + math.cos(math.pi * progress))
        return base * min(1.0, (total - step) / (0.2 * total))

    def keys(self, rounds: int, remainder: int) -> Row:
        """Return the values that identify one end of this training in the file."""
        found = {**asdict(self), "rounds": rounds, "remainder": remainder}
        del found["ends"]
        return found


def remainders() -> Iterator[Run]:
    """List the trainings from the shortest rounds on."""
    for task, (sync_every, full) in itertools.product(INNER_LR, FULL_ROUNDS.items()):
        rests = (1, sync_every // 4, sync_every // 2, sync_every)
        ends = tuple((full + 1, rest) for rest in rests)
        for seed in SEEDS:
            yield Run("remainders", task, 4, 0.7, CONSTANT, sync_every, seed, ends)
            for schedule, end in itertools.product(SCHEDULES[1:], ends):
                yield Run("remainders", task, 4, 0.7, schedule, sync_every, seed, (end,))


def whole_rounds() -> Iterator[Run]:
    ends = tuple((rounds, 10) for rounds in (4, 8, 12, 20, 40))
    for task, seed in itertools.product(INNER_LR, SEEDS):
        for world, lr in itertools.product((2, 8), (0.2, 0.4, 0.7)):
            yield Run("rounds", task, world, lr, CONSTANT, 10, seed, ends)
            for end in ends[::2]:
                yield Run("rounds", task, world, lr, "cosine", 10, seed, (end,))


def streamed() -> Iterator[Run]:
    ends = tuple((rounds, 20) for rounds in (4, 8, 16))
    for task, seed, lr in itertools.product(INNER_LR, SEEDS, (0.4, 0.7)):
        run = partial(Run, "streamed", task, 2, lr, CONSTANT, 20, seed, ends)
        yield run()
        for delay, alpha in itertools.product((1, 5, 10), (0.0, 0.25, 0.5, 0.75)):
            yield run(delay, alpha)


PARTS = {"remainders": remainders, "rounds": whole_rounds, "streamed": streamed}


def train(run: Run, end: float = float("inf")) -> list[Row]:
    """Train to the last end; return one line of the file for each end, none after ``end``."""
    if time.monotonic() > end:
        return []
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    tasks = [_make_task(run, replica) for replica in range(run.world)]
    optimizers = [make_optimizer(task.model.parameters(), 1.0) for task in tasks]
    replicas = [(task.model, own) for task, own in zip(tasks, optimizers, strict=True)]
    policy = Streaming(run.delay, run.alpha) if run.delay else Blocking()
    kind = StreamingRounds if run.delay else SendingRounds
    outer, wire = Nesterov(run.outer_lr, MOMENTUM), WireFormat("fp32")
    rounds = kind(replicas, policy, wire, sync_every=run.sync_every, outer=outer)
    rows = []
    for step in range(1, max(run.steps) + 1):
        for task, optimizer in zip(tasks, optimizers, strict=True):
            inner_step(task, [optimizer], run.lr_at(step - 1))
        if step in run.steps:
            number, remainder = run.steps[step]
            losses = end_losses(tasks[0], rounds.parts[0], outer, remainder / run.sync_every)
            rows.append({**run.keys(number, remainder), **losses})
        rounds.after_step(step)
    return rows


def end_losses(task: Task, part: Part, outer: Nesterov, share: float) -> dict[str, float]:
    """Return the held-out loss of each ending; the replicas stay as they are.

    Args:
        share: Length of the last round as a part of a full one.
    """
    sent, params, theta = part.encode(0), part.params(0), part.outers[0]
    kept = [tensor.clone() for tensor in params]

    def loss_of(values: Tensor) -> float:
        ops.merge(values, params)
        return fmean(task.validate(half)[0] for half in (0, 1))

    state = outer.make_state(theta.clone())
    state.load({name: value.clone() for name, value in part.states[0].tensors().items()}, {})
    state.step(Update(sent.terms, params, sent.mean_layout, part.lr))
    stepped = state.outer.clone()
    state.take_back_look_ahead(part.lr, None)
    undone = state.outer.clone()
    state.outer.copy_(stepped)
    state.take_mean(params)
    ends = (stepped, state.outer, undone, theta + share * (stepped - theta), theta)
    losses = {name: loss_of(end) for name, end in zip((*ENDINGS, LAST_FULL), ends, strict=True)}
    torch._foreach_copy_(params, kept)
    return losses


def _make_task(run: Run, replica: int) -> Task:
    if run.task == "text":
        config, batch_size, num_windows = TEXT[run.part]
        return Text(run.seed, replica, run.world, batch_size, config, num_windows)
    return Digits(run.seed, replica, run.world, 16)


def report_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Make the tables: the losses of each ending less the loss of the mean, and who was best."""
    names = [name for name in (*ENDINGS, LAST_FULL) if name != "mean"]
    yield "# loss less the loss of mean: average of the seeds (smallest .. largest)"
    yield f"# {'task':>6} {'W':>2} {'lr':>3} {'H':>3} {'rounds':>6} {'r':>3} {'schedule':>9}" + (
        f" {'seeds':>5} {'mean':>8}" + "".join(f"{name:>29}" for name in names)
    )
    best: list[Row] = []
    for setting, runs in grouped([row for row in rows if not row["delay"]], SETTING):
        cells = [_range([row[name] - row["mean"] for row in runs]) for name in names]
        yield (
            f"  {setting['task']:>6} {setting['world']:2} {setting['outer_lr']:3} "
            f"{setting['sync_every']:3} {setting['rounds']:6} {setting['remainder']:3} "
            f"{setting['schedule']:>9} {len(runs):5} {fmean(row['mean'] for row in runs):8.4f}"
            + "".join(cells)
        )
        averages = {name: fmean(row[name] for row in runs) for name in ENDINGS}
        best.append({**setting, "best": min(averages, key=averages.__getitem__)})
    yield "# settings in which an ending is best, by the average of the seeds"
    yield f"# {'task':>6} {'H':>3} {'schedule':>9} {'settings':>8}" + "".join(
        f"{name:>10}" for name in ENDINGS
    )
    for group, own in grouped(best, ("task", "sync_every", "schedule")):
        yield _counts(f"{group['task']:>6} {group['sync_every']:3} {group['schedule']:>9}", own)
    yield _counts(f"{'all':>20}", best)
    yield from _streamed_lines(rows)


def _counts(label: str, own: Sequence[Row]) -> str:
    found = [row["best"] for row in own]
    return f"  {label} {len(found):8}" + "".join(f"{found.count(name):10}" for name in ENDINGS)


def _streamed_lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "# ends under Streaming(delay, alpha), H=20, less the same under Blocking"
    places = f"{'task':>6} {'lr':>3} {'rounds':>6} {'delay/H':>7} {'alpha':>5}"
    yield f"# {places} {'mean':>29} {'nesterov':>29}"
    keys = [key for key in (*SETTING, "seed") if key not in ("delay", "alpha")]
    base = {tuple(row[key] for key in keys): row for row in rows if not row["delay"]}
    for setting, own in grouped([row for row in rows if row["delay"]], SETTING):
        pairs = [(row, base[tuple(row[key] for key in keys)]) for row in own]
        more = [[row[end] - plain[end] for row, plain in pairs] for end in ("mean", "nesterov")]
        share = setting["delay"] / setting["sync_every"]
        place = f"{setting['task']:>6} {setting['outer_lr']:3} {setting['rounds']:6}"
        yield f"  {place} {share:7} {setting['alpha']:5} {''.join(map(_range, more))}"


def _range(values: Sequence[float]) -> str:
    return f"{fmean(values):+9.4f} ({min(values):+.4f} .. {max(values):+.4f})".rjust(29)


def _place(row: Row) -> list[Any]:
    order = {"schedule": SCHEDULES.index, "part": list(PARTS).index}
    return [order.get(key, lambda value: value)(row[key]) for key in (*SETTING, "seed")]


def _short(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, record = parser.add_argument, common.RESULTS / "convergence" / "end-of-training.json"
    common.add_runs(parser, "end-of-training.jsonl", record)
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--tasks", nargs="+", choices=list(INNER_LR), default=list(INNER_LR))
    add("--sync-every", nargs="+", type=int, default=[10, 20, 50])
    add("-j", "--jobs", type=int, default=2, help="trainings at a time")
    args = parser.parse_args()
    runs, end = RunFile(args.runs, common.module_command()), time.monotonic() + args.limit_s
    missing = [
        run
        for part in args.parts
        for run in PARTS[part]()
        if run.task in args.tasks and run.sync_every in args.sync_every
        if not all(runs.find(run.keys(*place)) for place in run.ends)
    ]
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        for rows in pool.imap(partial(train, end=end), [] if args.report else missing):
            for row in rows:
                if not runs.find({key: row[key] for key in (*SETTING, "seed")}):
                    runs.add(row)
    if not args.report and time.monotonic() > end:
        print("# the time is up: the same command goes on with the missing runs")
    rows = sorted(runs.rows, key=_place)
    settings = {"momentum": MOMENTUM, "warmup_steps": WARMUP_STEPS, "inner_lr": INNER_LR}
    settings["text"] = {part: asdict(config) for part, (config, *_) in TEXT.items()}
    kept = [{key: _short(value) for key, value in row.items()} for row in rows]
    runs.write_record(args.json, report_lines(rows), {"settings": settings, "runs": kept})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
