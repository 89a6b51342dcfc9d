"""How the last, shortened round should end: the held-out loss of four outer steps on it.

    python -m benchmarks.convergence.end_of_training                # the missing runs, the table
    python -m benchmarks.convergence.end_of_training --tasks digits --limit-s 200
    python -m benchmarks.convergence.end_of_training --report       # of the present runs

Replicas train for some full rounds of H inner steps, and then r more steps, the remainder. The
outer optimizer is Nesterov: m' = mu*m + g; theta' = theta - lr*(g + mu*m'). A run is trained once,
and each ending starts from the same outer parameters, momentum and local parameters:

- nesterov: an ordinary outer step, theta';
- mean: the mean of the local parameters, theta - g;
- undone: an ordinary outer step without its look-ahead, theta' + lr*mu*m' = theta - lr*g;
- scaled: the share r/H of an ordinary outer step, theta + r/H*(theta' - theta);
- last full: no step at all, theta, which is what the last full round left.

The learning rate of the inner optimizer, AdamW, is constant, falls to 0 along a cosine, or falls
to 0 linearly over the last fifth of all steps (wsd); it would be 0 at the step after the last one.
The replicas live in one process (in_one_process.py). Every run is one line of --runs, and a run
that is there is not repeated; the record (--json) has the losses of all runs.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.convergence.in_one_process import Replica, Replicas
from benchmarks.convergence.tasks import Digits, Task, Text
from benchmarks.support import common
from benchmarks.support.run_file import RunFile, grouped
from diloco_comm import SGD, Nesterov, ops
from diloco_comm.methods.outer import OuterOptimizer, OuterState, Update
from diloco_comm.methods.overlap import Blocking
from diloco_comm_tools.demo.model import ModelConfig

OUTER_LR, MOMENTUM = 0.7, 0.9
NUM_REPLICAS, SEEDS, WARMUP_STEPS = 4, (0, 1, 2), 20
# Full rounds before the remainder, by the inner steps of a round (H).
FULL_ROUNDS = {10: 25, 50: 8}
CONSTANT, SCHEDULES = "constant", ("constant", "cosine", "wsd")
ENDINGS = ("nesterov", "mean", "undone", "scaled")
LAST_FULL = "last full"
INNER_LR = {"digits": 2e-3, "text": 3e-3}
TEXT_MODEL = ModelConfig(context=48, width=64, deviation=0.08)
SETTING = ("task", "sync_every", "remainder", "schedule")


@dataclass(frozen=True)
class Run:
    """One training; a constant learning rate has all remainders in one training."""

    task: str
    sync_every: int
    schedule: str
    seed: int
    remainders: tuple[int, ...]

    @property
    def full_steps(self) -> int:
        return FULL_ROUNDS[self.sync_every] * self.sync_every

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then the schedule until the end of training; `step` counts from 0."""
        base, total = INNER_LR[self.task], self.full_steps + self.remainders[-1]
        if step < WARMUP_STEPS:
            return base * (step + 1) / WARMUP_STEPS
        if self.schedule == CONSTANT:
            return base
        if self.schedule == "cosine":
            progress = (step - WARMUP_STEPS) / (total - WARMUP_STEPS)
            return base * 0.5 * (1.0 + math.cos(math.pi * progress))
        return base * min(1.0, (total - step) / (0.2 * total))

    def keys(self, remainder: int) -> dict[str, Any]:
        """Return the values that identify one remainder of this training in the file."""
        found = asdict(self)
        del found["remainders"]
        return {**found, "remainder": remainder}


def all_runs(tasks: Sequence[str], rounds: Sequence[int]) -> Iterator[Run]:
    """List the trainings, task by task, and within a task from the shortest rounds on."""
    for task in tasks:
        for sync_every in rounds:
            remainders = (1, sync_every // 4, sync_every // 2, sync_every)
            for seed in SEEDS:
                yield Run(task, sync_every, CONSTANT, seed, remainders)
                for schedule in SCHEDULES[1:]:
                    for remainder in remainders:
                        yield Run(task, sync_every, schedule, seed, (remainder,))


def train(run: Run) -> Iterator[dict[str, Any]]:
    """Train to the end; yields one line of the file for each remainder."""
    torch.manual_seed(run.seed)
    tasks = [_make_task(run, replica) for replica in range(NUM_REPLICAS)]
    optimizers = [
        torch.optim.AdamW(
            task.model.parameters(), 1.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        for task in tasks
    ]
    outer = Nesterov(OUTER_LR, MOMENTUM)
    replicas = [
        Replica(task.model, optimizer, outer)
        for task, optimizer in zip(tasks, optimizers, strict=True)
    ]
    rounds = Replicas(replicas, Blocking())
    for step in range(run.full_steps + run.remainders[-1]):
        for task, optimizer in zip(tasks, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = run.lr_at(step)
            task.loss(task.model).backward()
            optimizer.step()
            optimizer.zero_grad()
        remainder = step + 1 - run.full_steps
        if remainder in run.remainders:
            endings = make_endings(replicas, remainder / run.sync_every)
            losses = {name: _loss_at(tasks[0], replicas[0], end) for name, end in endings.items()}
            yield {**run.keys(remainder), **losses}
        elif remainder <= 0 and (step + 1) % run.sync_every == 0:
            rounds.exchange()


def make_endings(replicas: Sequence[Replica], share: float) -> dict[str, Tensor]:
    """Return the outer parameters after each ending; the replicas stay as they are.

    Args:
        share: Length of the remainder as a part of a full round.
    """
    payloads = [replica.encode(0) for replica in replicas]
    first = replicas[0]
    theta = first.state.outer

    def step(outer: OuterOptimizer, lr: float) -> OuterState:
        state = outer.make_state(theta.clone())
        state.load({name: first.state.tensors()[name] for name in state.tensors()}, {})
        terms = [(payload, 1.0 / len(payloads)) for payload in payloads]
        state.step(Update(terms, [torch.empty_like(theta)], first.layout, lr))
        return state

    ordinary = step(Nesterov(OUTER_LR, MOMENTUM), OUTER_LR)
    mean = step(SGD(1.0), 1.0).outer
    undone = ordinary.outer + OUTER_LR * MOMENTUM * ordinary.tensors()["momentum"]
    # The iterate without look-ahead is a plain step on the gradient.
    torch.testing.assert_close(undone, theta + OUTER_LR * (mean - theta), rtol=0.0, atol=1e-5)
    scaled = theta + share * (ordinary.outer - theta)
    ends = (ordinary.outer, mean, undone, scaled)
    return {**dict(zip(ENDINGS, ends, strict=True)), LAST_FULL: theta.clone()}


def _make_task(run: Run, replica: int) -> Task:
    if run.task == "text":
        return Text(run.seed, replica, NUM_REPLICAS, 8, TEXT_MODEL, 1024)
    return Digits(run.seed, replica, NUM_REPLICAS, 16)


def _loss_at(task: Task, replica: Replica, outer: Tensor) -> float:
    """Return the held-out loss of these outer parameters; the local ones stay as they are."""
    params = replica.local.fragments[0].tensors()
    kept = [tensor.clone() for tensor in params]
    ops.merge(outer, params)
    loss = fmean(task.validate(half)[0] for half in (0, 1))
    for tensor, value in zip(params, kept, strict=True):
        tensor.copy_(value)
    return loss


def report_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Make the table: the loss of each ending less the loss of the mean, and who was best."""
    names = [name for name in (*ENDINGS, LAST_FULL) if name != "mean"]
    yield "# loss less the loss of mean: average of the seeds (smallest .. largest)"
    yield f"# {'task':>6} {'H':>3} {'r':>3} {'schedule':>9} {'seeds':>5} {'mean':>8}" + "".join(
        f"{name:>29}" for name in names
    )
    best: list[tuple[dict[str, Any], str]] = []
    for setting, runs in grouped(_in_order(rows), SETTING):
        cells = []
        for name in names:
            less = [row[name] - row["mean"] for row in runs]
            cells.append(f"{fmean(less):+9.4f} ({min(less):+.4f} .. {max(less):+.4f})".rjust(29))
        task, sync_every, remainder, schedule = setting.values()
        yield (
            f"  {task:>6} {sync_every:3} {remainder:3} {schedule:>9} {len(runs):5} "
            f"{fmean(row['mean'] for row in runs):8.4f}" + "".join(cells)
        )
        averages = {name: fmean(row[name] for row in runs) for name in ENDINGS}
        best.append((setting, min(averages, key=averages.__getitem__)))
    yield "# settings in which an ending is best, by the average of the seeds"
    yield f"# {'task':>6} {'H':>3} {'schedule':>9} {'settings':>8}" + "".join(
        f"{name:>10}" for name in ENDINGS
    )
    for group, own in grouped(
        [{**setting, "best": name} for setting, name in best], ("task", "sync_every", "schedule")
    ):
        yield _counts(f"{group['task']:>6} {group['sync_every']:3} {group['schedule']:>9}", own)
    yield _counts(f"{'all':>20}", [{"best": name} for _, name in best])


def _counts(label: str, own: Sequence[dict[str, Any]]) -> str:
    found = [row["best"] for row in own]
    return f"  {label} {len(found):8}" + "".join(f"{found.count(name):10}" for name in ENDINGS)


def _in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        schedule = SCHEDULES.index(row["schedule"])
        return row["task"], row["sync_every"], schedule, row["remainder"], row["seed"]

    return sorted(rows, key=place)


def _short(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value


def _settings() -> dict[str, Any]:
    return {
        "outer": Nesterov(OUTER_LR, MOMENTUM).config(),
        "inner": {"name": "AdamW", "betas": [0.9, 0.95], "weight_decay": 0.1, "lr": INNER_LR},
        "num_replicas": NUM_REPLICAS,
        "warmup_steps": WARMUP_STEPS,
        "full_rounds": {str(sync_every): count for sync_every, count in FULL_ROUNDS.items()},
        "text_model": asdict(TEXT_MODEL),
        "batch_size": {"digits": 16, "text": 8},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    common.add_runs(parser, "end-of-training.jsonl")
    common.add_output(parser, default=common.RESULTS / "convergence" / "end-of-training.json")
    add("--report", action="store_true", help="train nothing")
    add("--tasks", nargs="+", choices=list(INNER_LR), default=list(INNER_LR))
    add("--sync-every", nargs="+", type=int, choices=list(FULL_ROUNDS), default=list(FULL_ROUNDS))
    add("--limit-s", type=float, default=float("inf"), help="begin no run after this many seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = RunFile(args.runs, "python -m benchmarks.convergence.end_of_training")
    end = time.monotonic() + args.limit_s
    for run in [] if args.report else all_runs(args.tasks, args.sync_every):
        if all(runs.find(run.keys(remainder)) for remainder in run.remainders):
            continue
        if time.monotonic() > end:
            print("# the time is up: the same command goes on with the missing runs")
            break
        begin = time.process_time()
        for row in train(run):
            if not runs.find(run.keys(row["remainder"])):
                runs.add(row)
        print(f"{time.process_time() - begin:6.1f} s  {run}", flush=True)
    rows = [{key: _short(value) for key, value in row.items()} for row in _in_order(runs.rows)]
    results = {"settings": _settings(), "runs": rows}
    runs.write_record(args.json, report_lines(runs.rows), results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
