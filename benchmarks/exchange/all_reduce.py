"""Measure all-reduces: pseudo-gradient in, average out, against gloo's fp32 all_reduce.

    python -m benchmarks.exchange.all_reduce -g 4 -b 1M -e 128M -f 4 --wire int8,int4
    torchrun --nproc-per-node 4 -m benchmarks.exchange.all_reduce -b 64M -e 64M

The measurement and the options of ``diloco-comm bench exchange``, with what a laboratory needs
beside it: the bytes at the interface, and shapers that must be drained.
docs/measurements/exchange.md derives every column.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import typer

from benchmarks.support import common
from diloco_comm_tools.bench import command, methods
from diloco_comm_tools.bench import exchange as bench_exchange

INTERFACE = os.environ.get("GLOO_SOCKET_IFNAME", "lo")


def transmitted_bytes() -> int:
    """Return the transmit counter of gloo's interface, in this process's network namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == INTERFACE:
            return int(counters.split()[8])
    raise RuntimeError(f"no network interface {INTERFACE!r}")


def interface_bits(method: Any, source: torch.Tensor) -> dict[str, float]:
    """Return the bits that left the network interface for each element, as a mean over ranks.

    The figure is the median of three batches of four operations, since TCP may send a segment of
    one batch twice. On loopback the counter includes all ranks and all other programs.
    """
    world = dist.get_world_size()
    repeats = 4
    method.load(source)
    batches = []
    for _ in range(3):
        dist.barrier()
        time.sleep(0.1)
        before = transmitted_bytes()
        for _ in range(repeats):
            method.run()
        time.sleep(0.1)
        batches.append(float(transmitted_bytes() - before))
        dist.barrier()
    sent = torch.tensor(batches, dtype=torch.float64)
    dist.all_reduce(sent)
    if INTERFACE == "lo":
        sent /= world
    per_rank = float(sent.median()) / world / repeats
    return {"interface_bits": 8 * per_rank / (source.numel() * methods.bus_factor(world))}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="All other options: diloco-comm bench exchange."
    )
    add = parser.add_argument
    add("--count-bytes", action="store_true", help="read the network interface's counter")
    add("--link", default="", help="what the link is, for the header")
    add("--drain", type=int, default=0, help="bytes sent before each sample to empty a shaper")
    args, words = parser.parse_known_args()
    bench = typer.main.get_command(command.app).commands["exchange"]  # type: ignore[attr-defined]
    try:
        context = bench.make_context("bench exchange", words)
        settings, given = command.exchange_settings(context), context.params
        common.check_output("--json", given["json_path"])
    except (ValueError, click.ClickException) as error:
        parser.error(str(error))
    report = common.join_group(
        "exchange",
        given["nprocs"],
        preload=(),
        link=args.link or bench_exchange.describe_link(settings.link),
        wire=f"{given['wire']}, block {settings.block_size}",
        engine=f"{settings.lanes} lanes, chunk {settings.chunk_bytes or 'auto'}",
    )
    if report is None:
        return 0
    chosen = bench_exchange.make_methods(settings)
    drain = torch.zeros(args.drain // 4) if args.drain else None
    also = {"also": interface_bits} if args.count_bytes else {}
    rows = bench_exchange.run(report, settings, chosen, drain=drain, **also)
    bench_exchange.close(chosen)
    common.finish(report, rows, given["json_path"])
    return 1 if bench_exchange.count_wrong(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
