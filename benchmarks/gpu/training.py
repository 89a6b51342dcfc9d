"""Train two replicas on one device without any communication, and with Eager on the int4 wire.

    python -m benchmarks.gpu.training --device cuda --json FILE

Both share the device, so that what the exchange costs shows as tokens lost. Ends with status 1 when
the replicas' outer models differ after ``flush()``, or a loss is not finite.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.facts import clocks
from benchmarks.gpu.models import Trainer, add_training
from benchmarks.support import common
from diloco_comm import DiLoCo, Eager, Nesterov

LAST = 20


def train(args: argparse.Namespace, rank: int, world: int, with_diloco: bool) -> dict[str, Any]:
    """Train this replica; its figures."""
    device = torch.device(args.device)
    trainer = Trainer(args.model, device, rank, world)
    diloco = None
    if with_diloco:
        diloco = DiLoCo(
            trainer.model,
            trainer.optimizer,
            sync_every=args.sync_every,
            fragments=4,
            wire="int4",
            overlap=Eager(),
            outer=Nesterov(lr=0.7, momentum=0.9),
            link="gloo",
        )
    dist.barrier()
    run = trainer.train(args.iters, args.warmup_iters, diloco)
    figures: dict[str, Any] = {
        "tokens_per_s": run.num_tokens / run.seconds,
        "first_loss": run.losses[0],
        "last_loss": statistics.fmean(run.losses[-LAST:]),
        "is_finite": all(math.isfinite(loss) for loss in run.losses),
    }
    if diloco is not None:
        totals = diloco.totals()
        figures["outer_hash"] = diloco.outer_hash()
        for name in ("num_syncs", "sent_bytes", "exposed_s", "exchange_s"):
            figures[name] = getattr(totals, name)
        diloco.close()
    return figures


def report_on(alone: list[dict[str, Any]], eager: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the replicas' figures of both runs."""
    speeds = [statistics.fmean(r["tokens_per_s"] for r in runs) for runs in (alone, eager)]
    losses = [statistics.fmean(r["last_loss"] for r in runs) for runs in (alone, eager)]
    are_equal = len({r["outer_hash"] for r in eager}) == 1
    is_finite = all(r["is_finite"] for r in [*alone, *eager])
    share = 100 * speeds[1] / speeds[0]
    speed = f"{speeds[1]:.0f} tokens/s a replica, {share:.1f} % of that without exchange"
    return {
        "summary": f"Eager int4: {speed}; loss {losses[1]:.3f} against {losses[0]:.3f} alone",
        "alone": alone,
        "eager_int4": eager,
        "is_passed": are_equal and is_finite,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_training(parser, 120, 20)
    parser.add_argument(
        "-w", "--warmup_iters", type=int, default=45, help="steps before them: two rounds at least"
    )
    args = parser.parse_args()
    common.check_device(parser, args.device)
    if not common.is_worker():
        return common.relaunch_or_explain(2, timeout_s=300.0, preload=None)
    rank, world = common.init_workers()
    report = common.Report("gpu_training", quiet=rank != 0, device=args.device, model=args.model)
    gathered: list[list[dict[str, Any]]] = []
    for with_diloco in (False, True):
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, train(args, rank, world, with_diloco))
        gathered.append(everyone)
    report.header["clocks"] = clocks()
    return common.conclude(report, report_on(*gathered), args.json)


if __name__ == "__main__":
    sys.exit(main())
