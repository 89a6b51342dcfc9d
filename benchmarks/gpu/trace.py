"""Profile an overlapped training run: is the exchange hidden, does the host wait for the device?

    python -m benchmarks.gpu.trace --device cuda --json FILE --trace FILE.json.gz
    python -m benchmarks.gpu.trace --read FILE.json.gz      # the same figures, from a trace alone

Two replicas train on one device, with Eager and the int4 wire; the first is profiled. Ends with
status 1 when a call that waits for the device falls into one of our ranges, or when less of the
exchange is hidden than ``--least_hidden``. With ``--backend nccl``
the replicas are ranks of NCCL; where it takes but one on a device, ``--replicas 1`` profiles what a
replica without peers enqueues.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.facts import clocks
from benchmarks.gpu.models import Trainer, add_training
from benchmarks.gpu.trace_checks import (
    hidden_fraction,
    host_waits_in_ranges,
    our_ranges,
    overlap_fraction,
)
from benchmarks.support import common
from diloco_comm import DiLoCo, Eager, Nesterov

STAGES = {"encode", "wait", "outer_step"}


def profiled(args: argparse.Namespace, rank: int, world: int, path: str) -> None:
    """Train, and export the trace of the first replica."""
    device = torch.device(args.device)
    trainer = Trainer(args.model, device, rank, world)
    if args.backend == "nccl":
        # NCCL takes ranks on one GPU only if they seem to be on different hosts.
        os.environ["NCCL_HOSTID"] = f"diloco-{rank}"
    options: dict[str, Any] = {"sync_every": args.sync_every, "fragments": 2}
    options |= {"link": args.backend}
    options |= {"wire": "int4", "overlap": Eager(), "outer": Nesterov(lr=0.7, momentum=0.9)}
    with DiLoCo(trainer.model, trainer.optimizer, **options):
        for _ in range(2 * args.sync_every):
            trainer.step()
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        dist.barrier()
        if rank == 0:
            with profile(activities=activities, acc_events=True) as profiler:
                for _ in range(args.iters):
                    trainer.step()
                trainer.synchronize()
            profiler.export_chrome_trace(path)
        else:
            for _ in range(args.iters):
                trainer.step()
            trainer.synchronize()


def load(path: Path) -> list[dict[str, Any]]:
    """Read a trace's events, compressed or not."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return json.load(file)["traceEvents"]


def judge(events: list[dict[str, Any]], world: int, least_hidden: float = 0.0) -> dict[str, Any]:
    """Say what the trace shows; one replica alone has no exchange that could be hidden.

    Args:
        least_hidden: Percent of the exchange that must be hidden. One replica alone leaves this bar
            without a figure, which fails nothing.
    """
    waits = host_waits_in_ranges(events)
    ranges = our_ranges(events)
    stages = {one.stage for one in ranges}
    fraction, hidden_part = overlap_fraction(events), hidden_fraction(events)
    names = f"no host wait in {len(ranges)} ranges" if not waits else f"host waits: {waits[0]}, ..."
    # Without an exchange there is no number, and no bar that could hold.
    percent = None if world == 1 or math.isnan(hidden_part) else 100 * hidden_part
    is_hidden = percent is not None and percent >= least_hidden
    overlap = "one replica" if world == 1 else "no exchange"
    if percent is not None:
        overlap = f"hidden {percent:.1f} %, overlap {100 * fraction:.1f} %"
    hidden = {"name": "hidden part of the exchange (%)", "value": percent, "is": ">="}
    return {
        "summary": f"{overlap}; {names}",
        "overlap_fraction": None if math.isnan(fraction) else fraction,
        "hidden_fraction": None if math.isnan(hidden_part) else hidden_part,
        "host_waits": waits,
        "num_ranges": len(ranges),
        "bars": [hidden | {"must": least_hidden, "holds": is_hidden}] if least_hidden else [],
        "is_passed": not waits and stages >= STAGES and (is_hidden or world == 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add_training(parser, 24, 8)
    add("--backend", default="gloo", choices=["gloo", "nccl"], help="how payloads travel (gloo)")
    add("--replicas", type=common.parse_count, default=2, help="processes (2)")
    add("--least_hidden", type=float, default=0.0, help="percent that must be hidden (0)")
    add("--read", type=Path, metavar="TRACE", help="train nothing, look at this trace")
    common.add_output(parser, "--trace", help="keep the trace there")
    args = parser.parse_args()
    if args.read:
        try:
            figures = judge(load(args.read), args.replicas, args.least_hidden)
        except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
            parser.error(f"--read expects a trace of the profiler, got {args.read}: {error!r}")
        print(json.dumps(figures, indent=2))
        return 0 if figures["is_passed"] else 1
    common.check_device(parser, "cuda" if args.backend == "nccl" else args.device)
    if not common.is_worker():
        return common.relaunch_or_explain(args.replicas, timeout_s=300.0, preload=None)
    rank, world = common.init_workers()
    report = common.Report("gpu_trace", quiet=rank != 0, device=args.device, model=args.model)
    figures: dict[str, Any] = {"is_passed": True}
    with tempfile.TemporaryDirectory() as folder:
        path = str(args.trace or Path(folder) / "trace.json")
        profiled(args, rank, world, path)
        if rank == 0:
            figures = judge(load(Path(path)), world, args.least_hidden)
    report.header["clocks"] = clocks()
    return common.conclude(report, figures, args.json)


if __name__ == "__main__":
    sys.exit(main())
