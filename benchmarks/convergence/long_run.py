"""Eager and Delayed against Blocking over a hundred rounds, each at its own outer learning rate.

    python -m benchmarks.convergence.long_run             # the missing runs, then the table
    python -m benchmarks.convergence.long_run --report --plot long-run.png    # of the present runs

A byte-level transformer on the standard library's sources, M = 2 and M = 4 replicas, rounds of 15
inner steps. The outer learning rate of each method is searched with seed 0 on one half of the
held-out text, until a smaller and a larger one are worse; the table has the loss of the other half.
The replicas live in one process (wire_rounds.py). Every run is one line of --runs, and a run
that is there is not repeated; the record (--json) has losses and curves.
docs/measurements/convergence.md explains the table.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.convergence.tasks import Size, Text, inner_step, make_optimizer
from benchmarks.convergence.wire_rounds import SendingRounds
from benchmarks.support import common
from benchmarks.support.common import deviation
from benchmarks.support.run_file import Trainings, grouped
from benchmarks.support.tuning import choose
from diloco_comm import Nesterov
from diloco_comm.methods.overlap import Blocking, Delayed, Eager, Overlap
from diloco_comm.ops.wire import WireFormat
from diloco_comm_tools.common import plots
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
    optimizers = [make_optimizer(task.model.parameters(), size.inner_lr) for task in tasks]
    rounds = SendingRounds(
        [(task.model, optimizer) for task, optimizer in zip(tasks, optimizers, strict=True)],
        METHODS[run.method].policy,
        WireFormat("fp32"),
        sync_every=SYNC_EVERY,
        outer=Nesterov(run.lr, run.momentum),
    )
    curve: list[tuple[int, float]] = []
    for step in range(1, size.num_steps + 1):
        for task, optimizer in zip(tasks, optimizers, strict=True):
            inner_step(task, [optimizer], size.lr_at(step - 1))
        rounds.after_step(step)
        if step % (EVALUATE_EVERY_ROUNDS * SYNC_EVERY) == 0:
            with rounds.outer_parameters():
                curve.append((step // SYNC_EVERY, tasks[0].validate(1)[0]))
    rounds.flush(size.num_steps)
    return {
        **asdict(run),
        "tuning_loss": tasks[0].validate(0)[0],
        "loss": tasks[0].validate(1)[0],
        "curve": curve,
        "cpu_s": time.process_time() - begin,
    }


def make_all(runs: Trainings, args: argparse.Namespace) -> None:
    """Make the most important runs first."""
    for momentum in args.momentum:
        chosen = []
        for num_replicas in args.replicas:
            cell = {"num_replicas": num_replicas, "momentum": momentum, "model": args.model}
            best = {}
            for name, method in METHODS.items():
                run = Run(method=name, seed=0, lr=method.start, rounds=args.rounds, **cell)
                best[name] = runs.tune(run, method.start, LADDER, "tuning_loss")
            chosen.append((cell, best))
            _make_seeds(runs, {**cell, "rounds": args.rounds}, best)
        # Twice the rounds: what an overlapped method does in the time of a blocking one whose
        # exchanges take as long as its inner steps.
        for cell, best in chosen:
            overlapped = {name: lr for name, lr in best.items() if name != "Blocking"}
            _make_seeds(runs, {**cell, "rounds": 2 * args.rounds}, overlapped)


def _make_seeds(runs: Trainings, cell: dict[str, Any], best: dict[str, float]) -> None:
    for seed in range(NUM_SEEDS):
        for name, lr in best.items():
            runs.make(Run(method=name, seed=seed, lr=lr, **cell))


# ---------------------------------------------------------------------------- table and plot


Row = dict[str, Any]
CELL = ("model", "momentum", "num_replicas", "rounds")
STYLES = {
    "Blocking": (plots.BLACK, "-"),
    "Eager zero": (plots.BLUE, "-"),
    "Eager sync": (plots.SKY, "--"),
    "Delayed": (plots.VERMILION, "-."),
}


def cells(rows: list[Row]) -> dict[tuple[Any, ...], dict[str, list[Row]]]:
    """Return the runs of each cell by method, at the learning rate that the method's search chose.

    A cell has one model, momentum, number of replicas and number of rounds. The cell of longer runs
    has the overlapped methods at the learning rates of the searched runs, and the searched cell's
    Blocking to compare with.
    """
    found: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        methods = found.setdefault(tuple(row[key] for key in CELL), {})
        methods.setdefault(row["method"], []).append(row)
    for methods in found.values():
        for name, runs in methods.items():
            lr = choose({r["lr"]: r["tuning_loss"] for r in runs if r["seed"] == 0}).lr
            methods[name] = sorted((r for r in runs if r["lr"] == lr), key=lambda r: r["seed"])
    found = dict(sorted(found.items()))
    searched: dict[tuple[Any, ...], list[Row]] = {}
    for key, methods in found.items():
        blocking = methods.pop("Blocking", None) or searched.get(key[:-1], [])
        found[key] = {"Blocking": blocking, **methods} if blocking else methods
        searched.setdefault(key[:-1], blocking)
    return found


def condense(rows: list[Row]) -> list[Row]:
    """Return the record of the runs: the losses of each setting, and the mean of their curves."""
    found = []
    for setting, own in grouped(rows, (*CELL, "method", "lr")):
        losses = [[run["seed"], run["tuning_loss"], run["loss"]] for run in own]
        points = zip(*(run["curve"] for run in own), strict=True)
        curve = [[at[0][0], fmean(point[1] for point in at)] for at in points]
        found.append({**setting, "seed, tuning loss, loss": losses, "rounds, mean loss": curve})
    return found


def report_lines(rows: list[Row]) -> Iterator[str]:
    """Return the table's lines."""
    yield "# loss: mean of the outer parameters over the replicas after flush(), held-out text"
    yield "# over Blocking: mean and sample deviation of the differences, seed by seed"
    for (model, momentum, num_replicas, rounds), methods in cells(rows).items():
        yield ""
        yield f"# {model}, {num_replicas} replicas, {rounds} rounds, momentum {momentum}"
        names = f"#{'method':>13}{'rounds':>8}{'lr':>8}{'loss':>9}{'spread':>9}"
        yield f"{names}{'over Blocking':>20}{'seeds':>7}"
        base = {row["seed"]: row["loss"] for row in methods.get("Blocking", [])}
        for name, runs in methods.items():
            losses = [run["loss"] for run in runs]
            over = [run["loss"] - base[run["seed"]] for run in runs if run["seed"] in base]
            difference = f"{fmean(over):+.3f} ± {deviation(over):.3f}" if over else "-"
            yield (
                f"  {name:>12}{runs[0]['rounds']:>8}{runs[0]['lr']:>8g}{fmean(losses):>9.3f}"
                f"{deviation(losses):>9.3f}{difference:>20}{len(runs):>7}"
            )


def draw(rows: list[Row], path: Path) -> None:
    """Draw the loss over the rounds, mean and range of the seeds, one panel a cell."""
    found = cells(rows)
    figure, panels = plots.new_panels(1, len(found), 4.2, 3.6)
    for axes, ((_, momentum, num_replicas, rounds), methods) in zip(
        panels[0], found.items(), strict=True
    ):
        shown: list[float] = []
        for name, runs in methods.items():
            colour, line = STYLES[name]
            x = [point[0] for point in runs[0]["curve"]]
            losses = list(zip(*([p[1] for p in run["curve"]] for run in runs), strict=True))
            mean = [fmean(values) for values in losses]
            axes.plot(x, mean, line, color=colour, label=f"{name}, lr {runs[0]['lr']:g}")
            low, high = map(min, losses), map(max, losses)
            axes.fill_between(x, list(low), list(high), color=colour, alpha=0.15, linewidth=0)
            shown += [value for at, value in zip(x, mean, strict=True) if at >= rounds // 5]
        plots.show_range(axes, shown)
        axes.set_title(f"{num_replicas} replicas, momentum {momentum}", fontsize="medium")
        axes.set_xlabel("rounds of 15 inner steps")
        plots.legend(axes, fontsize="small")
    panels[0, 0].set_ylabel("held-out loss (nats a byte)")
    plots.save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    common.add_runs(parser, "long-run.jsonl", common.RESULTS / "convergence" / "long-run.json")
    common.add_plot(parser, "draw the losses over the rounds")
    add("--replicas", type=common.parse_numbers, default=[2, 4])
    add("--momentum", type=lambda t: [float(n) for n in t.split(",")], default=[0.9, 0.8])
    add("--rounds", type=int, default=100)
    add("--model", choices=tuple(MODELS), default="118k")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = Trainings(args.runs, common.module_command(), train, limit_s=args.limit_s)
    with runs.in_time():
        if not args.report:
            make_all(runs, args)
    runs.write_record(args.json, report_lines(runs.rows), condense(runs.rows))
    common.save_plot(args.plot, functools.partial(draw, runs.rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
