"""Asynchronous training against synchronous DiLoCo in real time: processes slowed on purpose.

    python -m benchmarks.asynchronous.real           # 2 seeds, about 4 minutes on 2 cores

Model, text, speeds, outer learning rates and number of inner steps are those of the longer runs of
``convergence.py``; the workers are four processes, each of whose steps lasts a time of its
own (it sleeps for what is left of it, so that the cores are not what limits), the server is the
one of ``diloco-comm serve`` on loopback, and the synchronous runs are ``DiLoCo`` over gloo. What is
compared is the time that passes until a validation loss is reached.
docs/measurements/asynchronous-results.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.asynchronous.convergence import LONG, RECORD, SYNC_EVERY
from benchmarks.asynchronous.methods import METHODS, MOMENTUM, SPEEDS
from benchmarks.asynchronous.report import choices, recorded_losses
from benchmarks.asynchronous.training import (
    INNER_LR,
    LAST_LR,
    MODELS,
    Trainer,
    batches_of,
    corpus,
    held_out_loss,
    pretrained,
)
from benchmarks.support import common
from diloco_comm import DiLoCo, Link, Nesterov
from diloco_comm.asynchronous.coordinator import ShardSampler
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.worker import AsyncDiLoCo
from diloco_comm_tools.demo.model import ByteTransformer

WORKERS, SIZE, TEXT_SHARDS = 4, "118k", 4
NAMES = ("DiLoCo", "async Nesterov", "DN + DyLU")
MAX_EVALUATIONS = 60


@dataclass(frozen=True)
class Run:
    """One run; ``unit_s`` is what a step of the fastest worker takes, ``steps`` those of each."""

    method: str
    seed: int
    lr: float
    steps: int
    unit_s: float
    folder: str
    port: int
    address: str = ""


@dataclass
class Shared:
    """What the workers of a run share beside the model."""

    barrier: Barrier
    done: Synchronized  # inner steps of all of them
    learned: SynchronizedArray  # of each shard


class PacedTrainer(Trainer):
    """One worker's model, data and pace."""

    def __init__(self, run: Run, shared: Shared, rank: int) -> None:
        super().__init__(SIZE, run.seed, torch.load(Path(run.folder) / "start.pt"))
        self.run, self.shared, self.rank = run, shared, rank
        shards = corpus(TEXT_SHARDS).shards
        self.batches = [
            batches_of(SIZE, text, 1000 * run.seed + 10 * rank + index)
            for index, text in enumerate(shards)
        ]
        self.sampler = ShardSampler([len(text) for text in shards], seed=10 * run.seed + rank)
        self.shard = rank
        self.slot_s = run.unit_s * SPEEDS["very"](WORKERS)[rank]
        self.next_at = 0.0
        self.busy_s = 0.0
        self.times: list[float] = []
        self.flats: list[Tensor] = []

    def draw(self, num_steps: int) -> None:
        """Choose the shard of the next round."""
        with self.shared.learned.get_lock():
            self.sampler.learned = list(self.shared.learned)
            self.shard = self.sampler.draw()
            self.shared.learned[self.shard] += num_steps

    def step(self) -> None:
        """Take one inner step and let its time pass."""
        begin = time.monotonic()
        progress = min(1.0, self.shared.done.value / (self.run.steps * WORKERS))
        self.learn(self.batches[self.shard], INNER_LR + progress * (LAST_LR - INNER_LR))
        now = time.monotonic()
        self.busy_s += now - begin
        time.sleep(max(0.0, self.next_at - now))
        self.next_at = max(self.next_at, now) + self.slot_s

    def start(self) -> None:
        self.shared.barrier.wait()
        self.begin = time.monotonic()
        self.next_at = self.begin + self.slot_s

    def note(self, num_steps: int) -> None:
        """Count a round, and keep the shared parameters that the model holds now."""
        with self.shared.done.get_lock():
            self.shared.done.value += num_steps
        self.times.append(time.monotonic())
        self.flats.append(torch.cat([p.detach().flatten() for p in self.net.parameters()]))
        self.next_at = time.monotonic() + self.slot_s

    def save(self) -> None:
        row = {
            "begin": self.begin,
            "times": self.times,
            "flats": self.flats,
            "busy": self.busy_s / (time.monotonic() - self.begin),
        }
        torch.save(row, Path(self.run.folder) / f"worker-{self.rank}.pt")


def worker_main(run: Run, shared: Shared, rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    trainer = PacedTrainer(run, shared, rank)
    (train_synchronous if run.method == "DiLoCo" else train_asynchronous)(trainer)
    trainer.save()


def train_synchronous(trainer: PacedTrainer) -> None:
    run = trainer.run
    store = dist.TCPStore("127.0.0.1", run.port, WORKERS, is_master=trainer.rank == 0)
    dist.init_process_group("gloo", store=store, rank=trainer.rank, world_size=WORKERS)
    diloco = DiLoCo(
        trainer.net, trainer.optimizer, sync_every=SYNC_EVERY, outer=Nesterov(run.lr, MOMENTUM),
        wire="int8", init="check", attach=False,
    )  # fmt: skip
    trainer.start()
    for step in range(run.steps):
        trainer.step()
        diloco.step()
        if (step + 1) % SYNC_EVERY == 0:
            trainer.note(SYNC_EVERY)
    diloco.close()
    dist.destroy_process_group()


def train_asynchronous(trainer: PacedTrainer) -> None:
    run = trainer.run
    worker = AsyncDiLoCo(
        trainer.net, trainer.optimizer, server=run.address, name=f"w{trainer.rank}", wire="int8",
        link=Link(timeout=60.0), attach=False, on_round=lambda metrics: trainer.note(metrics.steps),
    )  # fmt: skip
    trainer.start()
    while trainer.shared.done.value < run.steps * WORKERS:
        trainer.draw(worker.round_steps)
        for _ in range(worker.round_steps):
            trainer.step()
            worker.step()
            if worker.round_step == 0:
                break
    worker.close()


# ------------------------------------------------------------------------------------- one run


def train(run: Run) -> dict[str, Any]:
    """Run the workers of one method and return its curve."""
    method = METHODS[run.method]
    if method.is_synchronous:
        return run_workers(run)
    rule = method.rule(run.lr, WORKERS)
    with AsyncServer(rule, sync_every=SYNC_EVERY, dylu=method.uses_dylu) as server:
        row = run_workers(replace(run, address=server.address))
    return {**row, "updates": server.state.version}


def run_workers(run: Run) -> dict[str, Any]:
    torch.save(list(pretrained(SIZE, run.seed)), Path(run.folder) / "start.pt")
    context = mp.get_context("spawn")
    shared = Shared(
        context.Barrier(WORKERS), context.Value("q", 0), context.Array("q", [0] * TEXT_SHARDS)
    )
    processes = [
        context.Process(target=worker_main, args=(run, shared, rank)) for rank in range(WORKERS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    if any(process.exitcode != 0 for process in processes):
        raise RuntimeError(f"a worker of {run.method} failed")
    rows = [torch.load(Path(run.folder) / f"worker-{rank}.pt") for rank in range(WORKERS)]
    begin = min(row["begin"] for row in rows)
    # In a synchronous run all workers hold the same.
    told = rows[:1] if METHODS[run.method].is_synchronous else rows
    snapshots = sorted(
        (at - begin, index, flat)
        for row in told
        for index, (at, flat) in enumerate(zip(row["times"], row["flats"], strict=True))
    )
    return {
        "curve": curve(run, [(at, flat) for at, _, flat in snapshots]),
        "busy": [round(row["busy"], 3) for row in rows],
        "steps": shared.done.value,
    }


def curve(run: Run, snapshots: list[tuple[float, Tensor]]) -> list[tuple[float, float]]:
    """Return (seconds, validation loss) of the shared model, the last one included."""
    net = ByteTransformer(MODELS[SIZE], run.seed)
    stride = max(1, -(-len(snapshots) // MAX_EVALUATIONS))
    points = []
    for at, flat in [*snapshots[::-1][::stride]][::-1]:
        torch.nn.utils.vector_to_parameters(flat, net.parameters())
        points.append((round(at, 3), held_out_loss(net, SIZE)))
    return points


def seconds_to(points: list[tuple[float, float]], loss: float) -> float | None:
    """Return when the curve first reaches a loss, interpolated; None if it does not."""
    before: tuple[float, float] | None = None
    for at, value in points:
        if value <= loss:
            if before is None:
                return at
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (at - before[0])
        before = (at, value)
    return None


# ------------------------------------------------------------------------------------ all runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=LONG, help="inner steps of each worker")
    parser.add_argument("--unit-ms", type=float, default=20.0, help="a step of the fastest worker")
    common.add_output(parser, default=common.RESULTS / "asynchronous" / "async-real.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = choices(recorded_losses(json.loads(RECORD.read_text())["results"]))
    slots = [options.unit_ms * factor for factor in SPEEDS["very"](WORKERS)]
    report = common.Report(
        "asynchronous and synchronous training in real time", workers=WORKERS,
        inner_steps=options.steps, step_ms=" ".join(f"{slot:.0f}" for slot in slots),
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for name in NAMES:
            with tempfile.TemporaryDirectory() as folder:
                unit_s = options.unit_ms / 1000
                lr, port = chosen[LONG, name].lr, common.free_port()
                run = Run(name, seed, lr, options.steps, unit_s, folder, port)
                rows.append({"method": name, "seed": seed, "lr": run.lr, **train(run)})
    report.print(
        "#  seed  method            lr     seconds   final loss   target   seconds to it   x DiLoCo"
    )
    for seed in range(options.seeds):
        those = [row for row in rows if row["seed"] == seed]
        # What all of them reach.
        target = max(min(loss for _, loss in row["curve"]) for row in those)
        for row in those:
            row["target"], row["seconds_to_target"] = target, seconds_to(row["curve"], target)
        first = those[0]["seconds_to_target"]
        for row in those:
            at, loss = row["curve"][-1]
            report.print(
                f"   {seed:4d}  {row['method']:15} {row['lr']:5.2f} {at:10.1f} {loss:12.4f}"
                f" {target:8.4f} {row['seconds_to_target']:15.1f}"
                f" {row['seconds_to_target'] / first:10.2f}"
            )
    common.save(report, options.json, rows)


if __name__ == "__main__":
    main()
