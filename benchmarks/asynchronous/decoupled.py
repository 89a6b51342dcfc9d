"""Decoupled training against Streaming DiLoCo and an asynchronous server, on a virtual clock.

    python -m benchmarks.asynchronous.decoupled             # the missing runs, then the table
    python -m benchmarks.asynchronous.decoupled --limit-s 1200     # as many runs as fit
    python -m benchmarks.asynchronous.decoupled --model 118k       # the same with a larger model
    python -m benchmarks.asynchronous.decoupled --report --plot decoupled.png    # of present runs

Claims of arXiv 2604.21428 at a small scale: a byte-level transformer on the standard library's
sources, learners of equal and of very different speed, equal tokens for all methods of a cell. The
models, the start and the text are those of benchmarks/asynchronous/training.py. The outer
learning rate of each method is searched for each number of learners, on a seed of its own. Every
run is one line of --runs, and a run that is there is not repeated.
docs/measurements/decoupled-results.md explains the table.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.asynchronous import convergence
from benchmarks.asynchronous.decoupled_methods import (
    ASYNCHRONOUS,
    DELAYED,
    METHODS,
    MOMENTUM,
    STREAMING,
    CodedFragment,
    Method,
    seconds_of,
    steps_in_equal_time,
)
from benchmarks.asynchronous.decoupled_report import condense, draw, report_lines
from benchmarks.asynchronous.methods import SPEEDS
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
from diloco_comm import Nesterov
from diloco_comm.asynchronous.coordinator import ShardSchedule
from diloco_comm.asynchronous.decoupled.learner import Learner, Receipt
from diloco_comm.asynchronous.decoupled.merges import (
    Piece,
    WatchedFragment,
    effective_rate,
    pieces_of,
)
from diloco_comm.asynchronous.decoupled.syncer import Syncer
from diloco_comm.asynchronous.decoupled.virtual import DecoupledRun, Link, VirtualLearner
from diloco_comm.ops.wire import WireFormat
from diloco_comm_tools.demo.model import ByteTransformer

SYNC_EVERY = 8
# The fastest learner takes a step in one virtual second.
LATENCY_S, JITTER = 0.1, 0.05
# Attention, and the rest of the blocks.
_ATTENTION = ("norm1", "attention")


@dataclass(frozen=True)
class Run:
    """One run: ``lr`` is the outer learning rate, ``speeds`` a name of ``SPEEDS``.

    ``steps`` is the mean number of inner steps of the learners.
    """

    method: str
    model: str
    speeds: str
    num_learners: int
    steps: int
    seed: int
    lr: float


@dataclass(frozen=True)
class Cell:
    """What the methods of one table have in common, and the methods.

    Attributes:
        searched: Methods whose learning rate is searched in this cell. The others have that of the
            first cell with as many learners. K = M merges as often as the slowest learner allows,
            so its best rate depends on the speeds.
    """

    speeds: str
    num_learners: int
    steps: int
    methods: tuple[str, ...]
    searched: tuple[str, ...] = ()
    model: str = "34k"

    def keys(self) -> dict[str, Any]:
        """Return the values that identify the cell in the file."""
        found = asdict(self)
        del found["methods"], found["searched"]
        return found


_ORDER = (STREAMING, "K=1", "K=1, grace", "K=M", DELAYED)
_MORE = (
    "K=1, grace, RDA", "K=M, RDA", "K=1, carry", "K=1, grace, carry", "K=1, grace, int4",
    "K=1, grace, int4 feedback",
)  # fmt: skip
_MANY = ("K=M", "K=M, RDA")
# The most important first.
CELLS = (
    Cell("doubling", 4, 160, _ORDER),
    Cell("none", 4, 160, _ORDER, ("K=M",)),
    Cell("doubling", 4, 160, _MORE),
    Cell("none", 8, 160, _MANY),
    Cell("none", 16, 80, _MANY),
    Cell("none", 4, 160, _MORE, ("K=M, RDA",)),
)

# ------------------------------------------------------------------------------------- one run


def train(run: Run) -> dict[str, Any]:
    """Train to the end; returns one line of the file."""
    begin = time.process_time()
    made = _asynchronous(run) if run.method in ASYNCHRONOUS else _decoupled(run)
    return {**asdict(run), **made, "cpu_s": time.process_time() - begin}


def _asynchronous(run: Run) -> dict[str, Any]:
    made = convergence.train(
        convergence.Run(
            run.method, run.speeds, run.num_learners, run.model, run.seed, run.lr, run.steps
        ),
        SYNC_EVERY,
    )
    return {name: made[name] for name in ("loss", "seconds", "updates", "points")}


class LearnerTrainer(Trainer):
    """A learner's model on its own shard.

    Args:
        num_steps: Inner steps until the inner learning rate is at its end.
    """

    def __init__(self, run: Run, index: int, num_steps: int) -> None:
        super().__init__(run.model, run.seed, pretrained(run.model, run.seed))
        self._schedule = ShardSchedule(INNER_LR, LAST_LR, 0, num_steps)
        text = corpus(run.num_learners).shards[index]
        self._batches = batches_of(run.model, text, 1000 * run.seed + index)
        self._num_steps = 0

    def step(self) -> None:
        self.learn(self._batches, self._schedule.at(self._num_steps))
        self._num_steps += 1


def fragments_of(net: torch.nn.Module) -> list[list[Tensor]]:
    """Return three fragments: the embeddings with the last norm, attention, the perceptrons."""
    found: list[list[Tensor]] = [[], [], []]
    for name, param in net.named_parameters():
        is_block = name.startswith("blocks.")
        place = 0 if not is_block else 1 if any(part in name for part in _ATTENTION) else 2
        found[place].append(param.detach())
    return found


def _pieces(fragments: list[list[Tensor]], merge: str) -> list[list[Piece]]:
    # The first fragment holds the embeddings.
    return [
        pieces_of([t.shape for t in each], merge, by_mean=() if index else range(len(each)))
        for index, each in enumerate(fragments)
    ]


def _decoupled(run: Run) -> dict[str, Any]:
    torch.manual_seed(run.seed)
    method, count = METHODS[run.method], run.num_learners
    speeds = SPEEDS[run.speeds](count)
    seconds = seconds_of(run.speeds, count, run.steps)
    if method.is_synchronous:
        speeds = [max(speeds)] * count
        seconds = run.steps * speeds[0]
    trainers = [LearnerTrainer(run, i, round(seconds / speeds[i])) for i in range(count)]
    virtual = _virtual(run, method, speeds, trainers)
    points = [_point(run, virtual)]
    for number in range(1, NUM_EVALUATIONS + 1):
        virtual.until(seconds=seconds * number / NUM_EVALUATIONS)
        points.append(_point(run, virtual))
    return {"points": points, **_figures(run, virtual, points)}


def _virtual(
    run: Run, method: Method, speeds: list[float], trainers: list[LearnerTrainer]
) -> DecoupledRun:
    models = [fragments_of(trainer.net) for trainer in trainers]
    pieces, wire = _pieces(models[0], method.merge), WireFormat(method.wire)
    outer = Nesterov(run.lr, MOMENTUM)
    shared: list[WatchedFragment] = []
    for tensors, each in zip(models[0], pieces, strict=True):
        if method.wire == "fp32":
            shared.append(WatchedFragment(tensors, each, wire, outer))
        else:
            coded = CodedFragment(tensors, each, wire, outer, has_feedback=method.has_feedback)
            shared.append(coded)
    link = Link(latency_s=0.0 if method.is_synchronous else LATENCY_S)
    syncer = Syncer(
        shared, method.rule(run.num_learners), sync_every=SYNC_EVERY, sync_s=link.latency_s
    )
    learners = []
    for index, (model, trainer) in enumerate(zip(models, trainers, strict=True)):
        learner = Learner(
            f"{index:02}",
            model,
            pieces,
            wire=wire,
            receipt=Receipt(mode=method.receipt),
            error_feedback=method.has_feedback,
        )
        one = VirtualLearner(learner, trainer.step, speeds[index])
        if not method.is_synchronous:
            one.train_step = _with_jitter(one, trainer.step, 1000 * run.seed + index)
        learners.append(one)
    return DecoupledRun(syncer, learners, link=link)


def _with_jitter(one: VirtualLearner, step: Callable[[], None], seed: int) -> Callable[[], None]:
    """Return a step after which the next one takes another time: learners of equal speed drift."""
    generator = torch.Generator().manual_seed(seed)
    mean_s = one.step_s

    def next_step() -> None:
        step()
        shift = 2 * torch.rand((), generator=generator).item() - 1
        one.step_s = mean_s * (1 + JITTER * shift)

    return next_step


def _point(run: Run, virtual: DecoupledRun) -> dict[str, float]:
    """Return the held-out loss of the shared model at this moment."""
    net = ByteTransformer(MODELS[run.model], run.seed)
    for tensors, shared in zip(fragments_of(net), virtual.syncer.fragments, strict=True):
        for piece, values in zip(shared.pieces, shared.values, strict=True):
            own = [tensors[i] for i in piece.indices]
            for tensor, part in zip(own, values.split([t.numel() for t in own]), strict=True):
                tensor.copy_(part.view_as(tensor))
    loss = held_out_loss(net, run.model)
    steps = sum(one.learner.num_steps for one in virtual.learners.values())
    commits = len(virtual.commits)
    return {"steps": steps, "updates": commits, "seconds": virtual.now, "loss": loss}


def _figures(run: Run, virtual: DecoupledRun, points: list[dict[str, float]]) -> dict[str, Any]:
    """Return what the table shows of a run."""
    speeds = SPEEDS[run.speeds](run.num_learners)
    books = [part.steps for one in virtual.learners.values() for part in one.learner.fragments]
    learned = sum(book.learned for book in books)
    shared = [each for each in virtual.syncer.fragments if isinstance(each, WatchedFragment)]
    rho = [fmean(each.cosines) for each in shared if each.cosines]
    bytes_down = sum(
        each.coded_bytes if isinstance(each, CodedFragment) else 4 * sum(map(len, each.values))
        for commit in virtual.commits
        for each in (shared[commit.fragment],)
    )
    commits = virtual.commits
    return {
        "loss": points[-1]["loss"],
        "seconds": virtual.now,
        "updates": len(commits),
        "goodput": points[-1]["steps"] / (virtual.now * sum(1 / s for s in speeds)),
        "applied": sum(book.applied for book in books) / learned,
        "lost": sum(book.lost for book in books) / learned,
        "reports": fmean(len(commit.merged) for commit in commits) if commits else math.nan,
        "rho": rho,
        "effective_lr": fmean(effective_rate(run.lr, MOMENTUM, r) for r in rho),
        "bytes_up": virtual.bytes_up,
        "bytes_down": bytes_down * run.num_learners,
    }


# -------------------------------------------------------------------------------------- all runs


def make(runs: Trainings, cell: Cell) -> None:
    """Search the learning rates that are not known, then train with the seeds of the table."""
    best = {name: _tune(runs, cell, name) for name in cell.methods}
    for seed in SEEDS:
        for name, lr in best.items():
            runs.make(Run(method=name, seed=seed, lr=lr, **cell.keys()))
    steps = steps_in_equal_time(cell.speeds, cell.num_learners, cell.steps)
    if STREAMING in best and steps < cell.steps:
        short = replace(cell, steps=steps).keys()
        for seed in SEEDS:
            runs.make(Run(method=STREAMING, seed=seed, lr=best[STREAMING], **short))


def _tune(runs: Trainings, cell: Cell, name: str) -> float:
    method = METHODS.get(name)
    if method is not None and method.rate_of:
        return _tune(runs, cell, method.rate_of)
    start = ASYNCHRONOUS[name] if method is None else method.start
    first = next(each for each in CELLS if each.num_learners == cell.num_learners)
    at = cell if name in cell.searched else replace(first, model=cell.model)
    return runs.tune(Run(method=name, seed=TUNING_SEED, lr=start, **at.keys()), start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    common.add_runs(parser, "decoupled.jsonl", common.RESULTS / "asynchronous" / "decoupled.json")
    common.add_plot(parser, "draw the losses over time, and the differences by method")
    add("--model", choices=tuple(MODELS), default="34k")
    add("--cells", type=common.parse_numbers, default=list(range(len(CELLS))))
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = "python -m benchmarks.asynchronous.decoupled"
    runs = Trainings(options.runs, command, train, limit_s=options.limit_s)
    with runs.in_time():
        for number in [] if options.report else options.cells:
            make(runs, replace(CELLS[number], model=options.model))
    if runs.rows:
        runs.write_record(options.json, report_lines(runs.rows), condense(runs.rows))
        common.save_plot(options.plot, functools.partial(draw, runs.rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
