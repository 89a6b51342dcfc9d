"""How many bits a pseudo-gradient needs: the loss on every wire, and on SparseLoCo's own scheme.

    python -m benchmarks.convergence.wires                        # the missing runs, then the table
    python -m benchmarks.convergence.wires --cells 0,1 --limit-s 200
    python -m benchmarks.convergence.wires --report --plot wires.png    # of the present runs
    python -m benchmarks.convergence.wires --report --page docs/explanation/bits.md
    python -m benchmarks.convergence.wires --muloco --runs muloco.jsonl --json muloco.json

A byte-level transformer on the standard library's sources, equal tokens for all wires of a cell.
The method is that of the cell: blocking rounds, Streaming with two fragments, or Eager. The outer
optimizer is SGD. Its learning rate is searched for each wire with a seed of its own, on one half of
the held-out text; the table has the loss of the other half. The replicas live in one process
(wire_means.py, wire_rounds.py). Every run is one line of --runs, and a run that is there is not
repeated; the record (--json) has the losses of all runs. docs/explanation/bits.md explains the
table.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.convergence.tasks import Size, Text, inner_step, make_optimizer
from benchmarks.convergence.wire_rounds import METHODS, Replica, Rounds, SparseLoCoRounds
from benchmarks.convergence.wires_report import BLOCKING, condense, draw, report_lines, write_page
from benchmarks.support import common
from benchmarks.support.run_file import Trainings
from diloco_comm import SGD
from diloco_comm.ops.wire import WireFormat
from diloco_comm_tools.demo.model import ModelConfig

BATCH_SIZE, NUM_WINDOWS, INNER_LR = 8, 512, 3e-3
TUNING_SEED, SEEDS = 1000, (0, 1, 2)
LADDER = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
START_LR = 1.0
SPARSE_LOCO = "SparseLoCo"
# int4 has error feedback, as the documents advise; int2r has it not, as it has no need of it.
WITH_FEEDBACK = {"int4"}
# The end of the name of a wire that has error feedback beside the wire without.
FEEDBACK = " +feedback"
WIRES = (
    "fp32", "int4", "int2r", "int1r", "sub2", "sub4", "sub8", "sub16",
    "topk256", "topk128", "topk64", "topk32", SPARSE_LOCO,
)  # fmt: skip
MODELS = {
    "118k": ModelConfig(context=48, width=64, deviation=0.08),
    "118k, initial 0.02": ModelConfig(context=48, width=64),
    "1.4M": ModelConfig(context=48, width=192, num_layers=3, deviation=0.08),
}


@dataclass(frozen=True)
class Cell:
    """What the wires of one table have in common, and the wires that are tried."""

    model: str = "118k"
    num_replicas: int = 4
    sync_every: int = 10
    rounds: int = 30
    wires: tuple[str, ...] = WIRES
    seeds: tuple[int, ...] = SEEDS
    method: str = BLOCKING

    def keys(self) -> dict[str, Any]:
        """Return the values that identify the cell in the file."""
        found = asdict(self)
        del found["wires"], found["seeds"]
        return found


_OVERLAPPED = ("fp32", "int4", "int2r", "int1r", "sub2", "sub8", "topk64")
_FEW = ("fp32", "int2r", "int1r", "sub8", "topk64")
# The most important first.
CELLS = (
    Cell(),
    Cell("118k, initial 0.02", wires=("fp32", "int1r", "sub8")),
    Cell(sync_every=30, rounds=10, wires=_FEW),
    Cell(num_replicas=2, wires=_FEW),
    Cell(num_replicas=8, wires=_FEW),
    Cell(sync_every=100, rounds=6, wires=_FEW),
    Cell(rounds=150, wires=(*_FEW, SPARSE_LOCO)),
    Cell("1.4M", wires=(*_FEW, SPARSE_LOCO)),
    Cell(method="streaming", wires=_OVERLAPPED),
    Cell(method="eager", wires=_OVERLAPPED, seeds=(0, 1)),
    Cell(
        num_replicas=16,
        wires=("fp32", "int1r", "sub2", "sub4", "sub8", "sub16", "topk256"),
        seeds=(0, 1),
    ),
)
# MuLoCo: the model's name ends with the inner optimizer, whose learning rate is searched on fp32.
_SEARCHED = {"AdamW": (1e-2, 3e-3, 3e-2), "Muon": (3e-2, 1e-2, 1e-1)}
# The first rate is the best: there all wires are trained.
MULOCO = tuple(
    Cell(
        f"118k, {inner} {lr:g}",
        num_replicas=2,
        wires=("fp32",) if index else ("fp32", "int2r", "int2r" + FEEDBACK),
        seeds=() if index else SEEDS,
    )
    for inner, rates in _SEARCHED.items()
    for index, lr in enumerate(rates)
)


@dataclass(frozen=True)
class Run:
    """One run; ``lr`` is the outer optimizer's."""

    wire: str
    seed: int
    lr: float
    model: str
    num_replicas: int
    sync_every: int
    rounds: int
    method: str = BLOCKING


def train(run: Run) -> dict[str, Any]:
    """Train to the end; returns one line of the file."""
    begin = time.process_time()
    steps = run.rounds * run.sync_every
    model, inner, inner_lr = _inner(run.model)
    size = Size(steps, run.sync_every, BATCH_SIZE, inner_lr, min(60, steps // 5))
    config, world = MODELS[model], run.num_replicas
    tasks = [Text(run.seed, i, world, BATCH_SIZE, config, NUM_WINDOWS) for i in range(world)]
    optimizers = [inner_optimizers(task.model, inner == "Muon") for task in tasks]
    replicas = [(task.model, own[0]) for task, own in zip(tasks, optimizers, strict=True)]
    rounds = make_rounds(run, replicas)
    for step in range(steps):
        for task, own in zip(tasks, optimizers, strict=True):
            inner_step(task, own, size.lr_at(step))
        rounds.after_step(step + 1)
    rounds.flush(steps)
    return {
        **asdict(run),
        "bits": rounds.bits(),
        "tuning_loss": tasks[0].validate(0)[0],
        "loss": tasks[0].validate(1)[0],
        "cpu_s": time.process_time() - begin,
    }


def _inner(name: str) -> tuple[str, str, float]:
    """Return the model, the inner optimizer and its learning rate."""
    if name in MODELS:
        return name, "AdamW", INNER_LR
    model, inner = name.rsplit(", ", 1)
    return model, inner.split()[0], float(inner.split()[1])


def inner_optimizers(model: nn.Module, has_muon: bool) -> list[torch.optim.Optimizer]:
    """Return AdamW, and Muon for the matrices of the layers if there is to be one.

    Muon scales its steps to the size of AdamW's, so that both have one learning rate.
    """
    named = list(model.named_parameters())
    matrices = [p for name, p in named if has_muon and p.ndim == 2 and name.startswith("blocks.")]
    ids = set(map(id, matrices))
    others = [param for _, param in named if id(param) not in ids]
    adamw = make_optimizer(others, INNER_LR)
    if not has_muon:
        return [adamw]
    return [adamw, torch.optim.Muon(matrices, INNER_LR, adjust_lr_fn="match_rms_adamw")]


def make_rounds(run: Run, replicas: Sequence[Replica]) -> Rounds:
    """Return the rounds of the run's method; its parameters begin as those of the replicas.

    Raises:
        ValueError: If the method is unknown, or SparseLoCo's scheme is not to be blocking.
    """
    if (run.method, run.wire) == (BLOCKING, SPARSE_LOCO):
        return SparseLoCoRounds(replicas, run.sync_every, run.lr)
    if run.wire == SPARSE_LOCO or run.method not in METHODS:
        raise ValueError(f"no method {run.method!r} with wire {run.wire!r}")
    wire = _format(run.wire)
    return METHODS[run.method](
        replicas,
        wire,
        sync_every=run.sync_every,
        outer=SGD(run.lr),
        error_feedback=_has_feedback(run.wire),
        seed=run.seed,
    )


def _format(wire: str) -> WireFormat:
    return WireFormat(wire.removesuffix(FEEDBACK))


def _has_feedback(wire: str) -> bool:
    return wire.endswith(FEEDBACK) or wire in WITH_FEEDBACK or _format(wire).is_sparse


def open_runs(path: Path, limit_s: float = float("inf")) -> Trainings:
    """Open a file of runs, of which the oldest have no method: they are blocking."""
    command, defaults = "python -m benchmarks.convergence.wires", {"method": BLOCKING}
    return Trainings(path, command, train, limit_s=limit_s, defaults=defaults)


def make(runs: Trainings, cell: Cell) -> None:
    """Search the learning rate of each wire, then train with the seeds of the table."""
    best = {}
    for wire in cell.wires:
        run = Run(wire=wire, seed=TUNING_SEED, lr=START_LR, **cell.keys())
        best[wire] = runs.tune(run, START_LR, LADDER, "tuning_loss")
    for seed in cell.seeds:
        for wire, lr in best.items():
            runs.make(Run(wire=wire, seed=seed, lr=lr, **cell.keys()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    common.add_runs(parser, "wires.jsonl", common.RESULTS / "convergence" / "wires.json")
    common.add_plot(parser, "draw the tables")
    add("--page", type=Path, help="Markdown page whose tables are written anew")
    add("--cells", type=common.parse_numbers, default=list(range(len(CELLS))))
    add("--muloco", action="store_true", help="train MuLoCo and DiLoCo in place of the cells")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = open_runs(args.runs, args.limit_s)
    runs.command += " --muloco" * args.muloco
    cells = MULOCO if args.muloco else [CELLS[number] for number in args.cells]
    with runs.in_time():
        for cell in [] if args.report else cells:
            make(runs, cell)
    runs.write_record(args.json, report_lines(runs.rows), condense(runs.rows))
    common.save_plot(args.plot, functools.partial(draw, runs.rows))
    if args.page is not None:
        write_page(runs.rows, args.page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
