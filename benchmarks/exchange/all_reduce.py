"""Measure all-reduces: pseudo-gradient in, average out, against gloo's fp32 all_reduce.

    python -m benchmarks.exchange.all_reduce -g 4 -b 1M -e 128M -f 4 --wire int8,int4
    torchrun --nproc-per-node 4 -m benchmarks.exchange.all_reduce -b 64M -e 64M

The measurement of ``diloco-comm bench exchange``, with what a laboratory needs beside it: the bytes
at the interface, and shapers that must be drained. docs/measurements/exchange.md derives every
column.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support import common
from diloco_comm_tools.bench import exchange as bench_exchange
from diloco_comm_tools.bench import methods
from diloco_comm_tools.bench.exchange import DTYPES, Settings

INTERFACE = os.environ.get("GLOO_SOCKET_IFNAME", "lo")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, size = parser.add_argument, common.parse_size
    add("-b", "--minbytes", type=size, default="1M", help="smallest size, in fp32 bytes")
    add("-e", "--maxbytes", type=size, default="64M", help="largest size")
    add("-f", "--stepfactor", type=int, default=2, help="factor between sizes")
    add("-n", "--iters", type=int, default=20, help="samples a size")
    add("-w", "--warmup_iters", type=int, default=3, help="samples thrown away before them")
    add("-c", "--check", type=int, default=0, help="1: compare with the fp64 mean, fill #wrong")
    add("-d", "--datatype", choices=DTYPES, default="float", help="dtype of the tensor")
    add("-g", "--nprocs", type=int, default=0, help="start this many local processes")
    add("--wire", default="int8", help="comma list of wire formats; gloo_bf16 is gloo's bf16")
    add("--block-size", type=int, default=256, help="elements that share a scale")
    add("--lanes", type=int, default=1, help="process groups (TCP connections) used in parallel")
    add("--chunk", type=size, default=None, help="wire bytes of a chunk")
    add("--impl", default="", help="force an implementation: scalar, avx2, avx512, reference")
    add("--emulate-link", default="", metavar="GBPS[,RTT_MS]", help="throttle inside the engine")
    add("--count-bytes", action="store_true", help="read the network interface's counter")
    add("--link", default="", help="what the link is, for the header")
    add("--drain", type=int, default=0, help="bytes sent before each sample to empty a shaper")
    common.add_output(parser)
    return parser.parse_args()


def settings_of(args: argparse.Namespace) -> Settings:
    try:
        return Settings(
            min_bytes=args.minbytes,
            max_bytes=args.maxbytes,
            step_factor=args.stepfactor,
            iters=args.iters,
            warmup_iters=args.warmup_iters,
            check=bool(args.check),
            datatype=args.datatype,
            wires=tuple(args.wire.split(",")),
            block_size=args.block_size,
            lanes=args.lanes,
            chunk_bytes=args.chunk,
            impl=args.impl,
            link=bench_exchange.parse_link(args.emulate_link),
        )
    except ValueError as error:
        raise SystemExit(str(error)) from None


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
    args = parse_arguments()
    settings = settings_of(args)
    if args.nprocs and not common.is_worker():
        common.relaunch(args.nprocs, preload=())
        return 0
    rank, world = common.init_workers()
    chosen = bench_exchange.make_methods(settings)
    report = common.Report(
        "exchange",
        quiet=rank != 0,
        workers=world,
        link=args.link or bench_exchange.describe_link(settings.link),
        wire=f"{args.wire}, block {args.block_size}",
        engine=f"{args.lanes} lanes, chunk {args.chunk or 'auto'}",
    )
    drain = torch.zeros(args.drain // 4) if args.drain else None
    also = {"also": interface_bits} if args.count_bytes else {}
    rows = bench_exchange.run(report, settings, chosen, drain=drain, **also)
    bench_exchange.close(chosen)
    common.finish(report, rows, args.json)
    return 1 if bench_exchange.count_wrong(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
