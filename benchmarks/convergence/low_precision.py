"""Measure the cost of bf16 parameters, with DiLoCo and without: held-out losses against fp32.

    python -m benchmarks.convergence.low_precision
    python -m benchmarks.convergence.low_precision --seeds 0 --lrs 1e-3 --rounds 5 --still 5

Two replicas train the demo's model with AdamW for some rounds of H inner steps, at the default
settings: Blocking, Nesterov, fp32 wire. Then the inner learning rate is 0 for further rounds, and
nothing may move any more once the outer momentum has run out. Plain training has one model, and the
batches of both replicas. The same seed has the same batches in both dtypes, so each cost is a
difference of two losses of one seed. Losses are nats a byte, measured with the parameters widened
to fp32. The replicas live in one process (wire_rounds.py).
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch

from benchmarks.convergence.tasks import Text, inner_step
from benchmarks.convergence.wire_rounds import SendingRounds
from benchmarks.support import common
from diloco_comm import Nesterov
from diloco_comm.methods.overlap import Blocking
from diloco_comm.ops.wire import WireFormat
from diloco_comm_tools.demo.model import ModelConfig

WORLD, H, BATCH = 2, 10, 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODEL = ModelConfig(context=48, width=64, deviation=0.08)


def make(seed: int, replica: int, dtype: torch.dtype, lr: float) -> tuple[Text, Any]:
    torch.manual_seed(seed)
    task = Text(seed, replica, WORLD, BATCH, MODEL)
    task.model = task.model.to(dtype)
    return task, torch.optim.AdamW(task.model.parameters(), lr, betas=(0.9, 0.95))


def held_out(task: Text) -> float:
    """Return the held-out loss of the parameters, computed in fp32."""
    own, task.model = task.model, copy.deepcopy(task.model).float()
    loss = fmean(task.validate(half)[0] for half in (0, 1))
    task.model = own
    return loss


def plain(seed: int, dtype: torch.dtype, lr: float, num_steps: int) -> float:
    """Train one model on the batches of all replicas; return the held-out loss."""
    task, optimizer = make(seed, 0, dtype, lr)
    others = [make(seed, replica, dtype, lr)[0] for replica in range(1, WORLD)]
    for _ in range(num_steps):
        for each in (task, *others):
            (each.loss(task.model) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return held_out(task)


def diloco(
    seed: int, dtype: torch.dtype, lr: float, num_rounds: int, num_still: int
) -> tuple[float, float]:
    """Train replicas; return the held-out losses after the rounds, and after rounds at rate 0."""
    pairs = [make(seed, replica, dtype, lr) for replica in range(WORLD)]
    replicas = [(task.model, optimizer) for task, optimizer in pairs]
    wire, outer = WireFormat("fp32"), Nesterov(0.7, 0.9)
    rounds = SendingRounds(replicas, Blocking(), wire, sync_every=H, outer=outer)
    for number in range(1, num_rounds + 1):
        for task, optimizer in pairs:
            for _ in range(H):
                inner_step(task, [optimizer], lr)
        rounds.after_step(H * number)
    trained = held_out(pairs[0][0])
    # A step at rate 0 changes no parameter: only the outer steps are left of a round.
    for number in range(1, num_still + 1):
        rounds.after_step(H * (num_rounds + number))
    return trained, held_out(pairs[0][0])


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train everything; yield one row for each learning rate and seed."""
    for lr in args.lrs:
        for seed in args.seeds:
            row: dict[str, Any] = {"lr": lr, "seed": seed}
            for name, dtype in DTYPES.items():
                row[f"plain {name}"] = plain(seed, dtype, lr, H * args.rounds)
                trained, still = diloco(seed, dtype, lr, args.rounds, args.still)
                row |= {f"DiLoCo {name}": trained, f"still {name}": still}
            for kind in ("plain", "DiLoCo", "still"):
                row[f"{kind} cost"] = row[f"{kind} bf16"] - row[f"{kind} fp32"]
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--lrs", nargs="+", type=float, default=[1e-3, 3e-3], help="inner learning rates")
    add("--rounds", type=int, default=30, help="rounds of 10 inner steps")
    add("--still", type=int, default=100, help="further rounds at an inner learning rate of 0")
    common.add_output(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = common.Report("low precision", replicas=WORLD, H=H, rounds=args.rounds)
    names = [
        f"{kind} {what}" for kind in ("plain", "DiLoCo", "still") for what in (*DTYPES, "cost")
    ]
    report.print(f"#{'lr':>7}{'seed':>5}" + "".join(f"{name:>13}" for name in names))
    found, begin = [], time.monotonic()
    for row in rows(args):
        found.append(row)
        losses = "".join(f"{row[name]:>13.4f}" for name in names)
        report.print(f" {row['lr']:>7g}{row['seed']:>5}{losses}")
    means = "".join(f"{fmean(row[name] for row in found):>13.4f}" for name in names)
    report.print(f"#{'mean':>12}{means}")
    report.print(f"# {time.monotonic() - begin:.0f} s")
    common.save(report, args.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
