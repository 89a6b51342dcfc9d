"""Train one model with every method and compare the losses: the papers' claims, at our scale.

    python -m benchmarks.convergence.sweep
    python -m benchmarks.convergence.sweep --tasks digits --rows DDP,Eager,Delayed --seeds 0

Four replicas, the same tokens for every method, three seeds. Each run is one line of --runs, and a
run that is there is not repeated: an interrupted sweep goes on where it was. The
record (--json) has the table, and the losses by which the numbers of the methods were chosen. The
numbers that a method has are tuned first, on a seed and on held-out data that are not in the
table (methods.py). docs/measurements/convergence.md explains the table.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.convergence.methods import FAMILIES, ROW_OF, ROWS, Row, tuning_row
from benchmarks.convergence.tasks import (
    SIZES,
    SMOKE,
    TASKS,
    Size,
    Task,
    inner_step,
    make_optimizer,
)
from benchmarks.support import common
from benchmarks.support.run_file import RunFile
from diloco_comm import DiLoCo
from diloco_comm_tools.common import plots
from diloco_comm_tools.demo.replica import BucketExchange

TUNING_SEED = 1000
# The link of the exposed time: it changes no number, and so only a few rounds run over it.
LINK_GBPS, LINK_RTT_MS = 0.1, 100.0
_TIMED_ROUNDS, _TIMED_DDP_STEPS = 4, 6


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        kind: "tune" (one candidate), "train" (one seed of the table) or "link" (exposed time).
        candidate: Index in the family that is tuned; 0 otherwise.
    """

    task: str
    kind: str
    row: str
    seed: int
    family: str = ""
    candidate: int = 0


def plan(args: argparse.Namespace) -> list[Run]:
    """All runs in their order: candidates first, as what is tuned later depends on them."""
    runs: list[Run] = []
    rows = [ROW_OF[name] for name in args.rows]
    needed = {family for row in rows for family in row.families}
    for task in args.tasks:
        for family, candidates in FAMILIES.items():
            if family in needed:
                row = tuning_row(family).name
                options = [(family, i) for i in range(len(candidates))]
                runs += [Run(task, "tune", row, TUNING_SEED, *option) for option in options]
        # Seed by seed, so that an interrupted sweep has all methods of the seeds it reached.
        for seed in args.seeds:
            runs += [Run(task, "train", row.name, seed) for row in rows]
    # What is timed comes last, so that all before it may share the machine with other work.
    if "text" in args.tasks:
        runs += [Run("text", "link", row.name, 0) for row in rows]
    return runs


# -------------------------------------------------------------------------------- one run


def train(run: Run, choice: dict[str, float], size: Size) -> dict[str, Any]:
    """Train one model to the end; what the outer parameters reach, and the bytes sent."""
    row = ROW_OF[run.row]
    rank, world = dist.get_rank(), dist.get_world_size()
    task: Task = TASKS[run.task](run.seed, rank, world, size.batch_size)
    optimizer = make_optimizer(task.model.parameters(), size.inner_lr)
    half = 0 if run.kind == "tune" else 1
    begin = time.perf_counter()
    if row.is_data_parallel:
        curve, sent = _train_ddp(task, optimizer, size, half)
        final = task.validate(half)
    else:
        with _attach(row, task.model, optimizer, choice, size) as diloco:
            curve = _train_diloco(task, optimizer, diloco, size, half)
            diloco.flush()
            with diloco.outer_parameters():
                final = task.validate(half)
            sent = diloco.totals().sent_bytes
            hashes: list[Any] = [None] * world
            dist.all_gather_object(hashes, diloco.outer_hash())
            assert len(set(hashes)) == 1
    return {
        "loss": final[0],
        "accuracy": final[1],
        "curve": curve,
        "sent_bytes": sent,
        "seconds": time.perf_counter() - begin,
    }


def _attach(
    row: Row,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    choice: dict[str, float],
    size: Size,
) -> DiLoCo:
    arguments = row.arguments(choice)
    return DiLoCo(model, optimizer, sync_every=size.sync_every, init="check", **arguments)


def _train_diloco(
    task: Task, optimizer: torch.optim.Optimizer, diloco: DiLoCo, size: Size, half: int
) -> list[tuple[int, float]]:
    """Loss of the outer parameters (their mean, where replicas differ) four times on the way."""
    curve = []
    for step in range(size.num_steps):
        inner_step(task, [optimizer], size.lr_at(step))
        if (step + 1) % max(1, size.num_steps // 4) == 0:
            is_shared = diloco.settings.overlap.is_shared
            with diloco.outer_parameters(consensus=not is_shared):
                curve.append((step + 1, task.validate(half)[0]))
    return curve


def _train_ddp(
    task: Task, optimizer: torch.optim.Optimizer, size: Size, half: int
) -> tuple[list[tuple[int, float]], int]:
    ddp = DistributedDataParallel(task.model, gradient_as_bucket_view=True, init_sync=False)
    curve = []
    for step in range(size.num_steps):
        inner_step(task, [optimizer], size.lr_at(step), ddp)
        if (step + 1) % max(1, size.num_steps // 4) == 0:
            curve.append((step + 1, task.validate(half)[0]))
    world = dist.get_world_size()
    elements = sum(p.numel() for p in task.model.parameters())
    # A ring all-reduce in fp32: 2 (W-1)/W of the gradients leave each replica, each step.
    return curve, int(4 * elements * 2 * (world - 1) / world) * size.num_steps


def expose(run: Run, choice: dict[str, float], size: Size) -> dict[str, Any]:
    """Train a few rounds over the emulated link: seconds exposed a round of H steps."""
    row = ROW_OF[run.row]
    rank, world = dist.get_rank(), dist.get_world_size()
    task: Task = TASKS[run.task](run.seed, rank, world, size.batch_size)
    optimizer = make_optimizer(task.model.parameters(), size.inner_lr)
    if row.is_data_parallel:
        exchange = BucketExchange("fp32", LINK_GBPS, LINK_RTT_MS)
        ddp = DistributedDataParallel(task.model, gradient_as_bucket_view=True, init_sync=False)
        ddp.register_comm_hook(exchange, BucketExchange.hook)
        for _ in range(_TIMED_DDP_STEPS):
            loss = task.loss(ddp)
            with exchange.timed_backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        exchange.close()
        exposed = exchange.exposed_s / _TIMED_DDP_STEPS * size.sync_every
    else:
        with _attach(row, task.model, optimizer, choice, size) as diloco:
            diloco.emulate_link(LINK_GBPS, LINK_RTT_MS)
            for step in range(_TIMED_ROUNDS * size.sync_every):
                inner_step(task, [optimizer], size.lr_at(step))
            exposed = diloco.totals().exposed_s / _TIMED_ROUNDS
    return {"exposed_s_per_round": common.slowest_of_ranks([exposed])[0]}


# ---------------------------------------------------------------------------------- sweep


class Tuned:
    """The best candidate of each family so far."""

    def __init__(self) -> None:
        self.losses: dict[tuple[str, str], dict[int, float]] = {}

    def add(self, run: Run, loss: float) -> None:
        self.losses.setdefault((run.task, run.family), {})[run.candidate] = loss

    def choice(self, run: Run) -> dict[str, float]:
        """Numbers for this run: the best of each family, and the candidate that it tries."""
        numbers: dict[str, float] = {}
        for family in ROW_OF[run.row].families:
            if run.kind == "tune" and family == run.family:
                numbers |= FAMILIES[family][run.candidate]
                continue
            losses = self.losses[run.task, family]
            # A run that diverged has a loss that is not a number.
            best = min(losses, key=lambda i: losses[i] if losses[i] == losses[i] else float("inf"))
            numbers |= FAMILIES[family][best]
        return numbers


def sweep(args: argparse.Namespace) -> None:
    """Work through the plan in every worker; rank 0 knows what is done and writes the files."""
    rank, _ = common.init_workers(timeout_s=1800.0)
    file = RunFile(args.runs, common.module_command()) if rank == 0 else None
    tuned = Tuned()
    runs = plan(args)
    for number, run in enumerate(runs):
        choice, size = tuned.choice(run), sizes_of(args)[run.task]
        wanted = {**asdict(run), "choice": choice, "size": asdict(size)}
        found = [[] if file is None else file.find(wanted)]
        dist.broadcast_object_list(found, 0)
        if not found[0]:
            measured = (expose if run.kind == "link" else train)(run, choice, size)
            # Losses and times of rank 0 are kept; replicas end with equal bits.
            found = [[{**wanted, **measured}]]
            if file is not None:
                file.add(found[0][0])
                shown = measured.get("loss", measured.get("exposed_s_per_round"))
                left = len(runs) - number - 1
                print(f"# {run}: {shown:.4f}  {choice}  ({left} left)", flush=True)
            # The choices of the next runs must be the same on all ranks.
            dist.broadcast_object_list(found, 0)
        if run.kind == "tune":
            tuned.add(run, found[0][0]["loss"])
    common.leave_workers()


def sizes_of(args: argparse.Namespace) -> dict[str, Size]:
    return SMOKE if args.smoke else SIZES


# ---------------------------------------------------------------------------- table and plot


def write_report(
    report: common.Report, results: list[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Print one table a task, best loss first; returns the rows as they are printed."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for task in dict.fromkeys(result["task"] for result in results):
        rows = tables[task] = _rows([r for r in results if r["task"] == task])
        report.print("#")
        names = ("loss", "spread", "accuracy", "sent MB", "exposed s")
        report.print(f"# {task:>24}" + "".join(f"{n:>11}" for n in names) + "  numbers")
        for row in rows:
            exposed = f"{row['exposed_s']:11.2f}" if row["exposed_s"] is not None else f"{'-':>11}"
            cells = f"{row['loss']:11.4f}{row['spread']:11.4f}{row['accuracy']:11.4f}"
            numbers = " ".join(f"{k} {v:g}" for k, v in row["choice"].items())
            line = f" {row['row']:>25}{cells}{row['sent_bytes'] / 1e6:11.1f}{exposed}  {numbers}"
            report.print(line)
    report.print("# loss: outer parameters after flush(), on held-out data, mean of the seeds;")
    report.print("#   spread: their sample standard deviation.")
    report.print("# exposed s: what a whole run would have waited on the link, from a few rounds.")
    return tables


def tuning_losses(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the loss of each candidate that was tried for the numbers of a method."""
    return [
        {key: result[key] for key in ("task", "family", "candidate", "choice", "loss")}
        for result in results
        if result["kind"] == "tune"
    ]


def _rows(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    exposed = {
        r["row"]: r["exposed_s_per_round"] * r["size"]["num_steps"] / r["size"]["sync_every"]
        for r in results
        if r["kind"] == "link"
    }
    trained: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if result["kind"] == "train":
            trained.setdefault(result["row"], []).append(result)
    rows = []
    for name, runs in trained.items():
        losses = [run["loss"] for run in runs]
        rows.append(
            {
                "row": name,
                "loss": statistics.fmean(losses),
                "spread": statistics.stdev(losses) if len(losses) > 1 else 0.0,
                "losses": losses,
                "accuracy": statistics.fmean(run["accuracy"] for run in runs),
                "sent_bytes": statistics.fmean(run["sent_bytes"] for run in runs),
                "exposed_s": exposed.get(name),
                "choice": runs[0]["choice"],
            }
        )
    # NaN compares as neither less nor more: a method that diverged goes to the end.
    return sorted(rows, key=lambda r: (r["loss"] != r["loss"], r["loss"]))


def draw(tables: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw mean and every seed of each method, one panel a task."""
    height = 1.5 + 0.25 * max(len(rows) for rows in tables.values())
    figure, panels = plots.new_panels(1, len(tables), 7, height)
    for axes, (task, rows) in zip(panels[0], tables.items(), strict=True):
        for place, row in enumerate(reversed(rows)):
            axes.plot(
                row["losses"], [place] * len(row["losses"]), "o", color=plots.GREY, markersize=4
            )
            axes.plot(row["loss"], place, "|", color=plots.BLUE, markersize=14, markeredgewidth=2)
        axes.set_yticks(range(len(rows)), [row["row"] for row in reversed(rows)], fontsize=8)
        axes.set_xlabel("validation loss, nats (bar: mean; dots: seeds)")
        axes.set_title(task)
    plots.save(figure, path)


def parse_rows(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ROW_OF]:
        raise argparse.ArgumentTypeError(f"among {', '.join(ROW_OF)}, not {unknown}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-g", "--nprocs", type=int, default=4, help="replicas, one process each")
    add("--tasks", type=lambda t: t.split(","), default=list(TASKS), help="text,digits")
    add("--rows", type=parse_rows, default=[row.name for row in ROWS], help="methods, a comma list")
    add("--seeds", type=common.parse_numbers, default=[0, 1, 2])
    runs = common.RUNS / "convergence.jsonl"
    common.add_output(parser, "--runs", default=runs, help="file of the runs, none made twice")
    add("--smoke", action="store_true", help="eight steps a run: shows that it works, no figures")
    add("--timeout", type=float, default=7200.0, help="seconds for all of it")
    common.add_plot(parser, "draw the table")
    common.add_output(parser)
    args = parser.parse_args()
    if common.is_worker():
        sweep(args)
        return 0
    sizes = sizes_of(args)
    header = {task: str(sizes[task]) for task in args.tasks}
    link = (
        f"simulated for the exposed time: {LINK_GBPS:g} Gbit/s, {LINK_RTT_MS:g} ms, in the engine"
    )
    report = common.Report("convergence", workers=args.nprocs, link=link, **header)
    with common.stoppable():
        common.relaunch(args.nprocs, timeout_s=args.timeout)
    file = RunFile(args.runs, common.module_command())
    # The newest run has the choices of this sweep.
    results = [
        file.find({**asdict(run), "size": asdict(sizes[run.task])})[-1] for run in plan(args)
    ]
    summary = write_report(report, results)
    tuned = tuning_losses(results)
    common.save(report, args.json, {"table": summary, "tuned": tuned})
    common.save_plot(args.plot, functools.partial(draw, summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
