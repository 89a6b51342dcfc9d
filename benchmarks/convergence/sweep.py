"""Train one model with every method and compare the losses: the papers' claims, at our scale.

    python -m benchmarks.convergence.sweep
    python -m benchmarks.convergence.sweep --tasks digits --rows DDP,Eager,Delayed --seeds 0

Four replicas, the same tokens for every method, three seeds. Each run is one JSON file in
--folder, and a run that is there is not repeated: an interrupted sweep goes on where it was. The
record (--json) has the table, and the losses by which the numbers of the methods were chosen. The
numbers that a method has are tuned first, on a seed and on held-out data that are not in the
table (convergence_methods.py). docs/measurements/convergence.md explains the table.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
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
from benchmarks.convergence.report import draw, tuning_losses, write_report
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
from diloco_comm import DiLoCo
from diloco_comm_tools.demo.ddp import BucketExchange

TUNING_SEED = 1000
RUNS = common.RUNS / "convergence"
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

    @property
    def file_name(self) -> str:
        words = [self.task, self.kind, self.family or self.row, str(self.candidate or self.seed)]
        if self.kind == "tune":
            words[-1] = str(self.candidate)
        return "-".join(words).replace(" ", "_") + ".json"


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
    sizes = SMOKE if args.smoke else SIZES
    tuned = Tuned()
    runs = plan(args)
    for number, run in enumerate(runs):
        path = args.folder / run.file_name
        choice = tuned.choice(run)
        wanted = {**asdict(run), "choice": choice, "size": asdict(sizes[run.task])}
        found = [_load(path, wanted) if rank == 0 else None]
        dist.broadcast_object_list(found, 0)
        result = found[0]
        if result is None:
            measured = (expose if run.kind == "link" else train)(run, choice, sizes[run.task])
            # Losses and times of rank 0 are kept; replicas end with equal bits.
            result = {**wanted, **measured}
            if rank == 0:
                _store(path, result)
                left = len(runs) - number - 1
                shown = result.get("loss", result.get("exposed_s_per_round"))
                print(f"# {path.stem}: {shown:.4f}  {choice}  ({left} left)", flush=True)
            # The choices of the next runs must be the same on all ranks.
            found = [result]
            dist.broadcast_object_list(found, 0)
            result = found[0]
        if run.kind == "tune":
            tuned.add(run, result["loss"])
    common.leave_workers()


def _load(path: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The result of an earlier run with the very same settings."""
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    return result if all(result.get(key) == value for key, value in wanted.items()) else None


def _store(path: Path, result: dict[str, Any]) -> None:
    """Write by renaming: an interrupted sweep leaves no half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, path)


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
    add("--folder", type=Path, default=RUNS, help="one JSON a run")
    add("--smoke", action="store_true", help="eight steps a run: shows that it works, no figures")
    add("--timeout", type=float, default=7200.0, help="seconds for all of it")
    common.add_plot(parser, "draw the table")
    common.add_output(parser)
    args = parser.parse_args()
    if common.is_worker():
        sweep(args)
        return 0
    sizes = SMOKE if args.smoke else SIZES
    header = {task: str(sizes[task]) for task in args.tasks}
    link = (
        f"simulated for the exposed time: {LINK_GBPS:g} Gbit/s, {LINK_RTT_MS:g} ms, in the engine"
    )
    report = common.Report("convergence", workers=args.nprocs, link=link, **header)
    with common.stoppable():
        common.relaunch(args.nprocs, timeout_s=args.timeout)
    results = [json.loads((args.folder / run.file_name).read_text()) for run in plan(args)]
    summary = write_report(report, results)
    tuned = tuning_losses(results)
    common.save(report, args.json, {"table": summary, "tuned": tuned})
    common.save_plot(args.plot, functools.partial(draw, summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
