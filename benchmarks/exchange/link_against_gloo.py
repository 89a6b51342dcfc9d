"""Measure the link of a single port against gloo: the same all-reduce, in the same processes.

    python -m benchmarks.exchange.link_against_gloo -g 2 --wire fp32,int8 -b 4M,64M

Both have an exchange of their own, and take turns: of each round the seconds on the slowest rank
count, and the seconds of the processor on all threads of all ranks. fp32 sends the most bytes, so
there the two ways differ most. Two exchanges over gloo that take turns show the noise (--noise).
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.exchange.link_times import folder_of_keys
from benchmarks.support import common
from diloco_comm.exchange.exchange import Exchange
from diloco_comm_tools.bench.exchange import Sampler
from diloco_comm_tools.bench.methods import DilocoAllReduce, source_of

_BLOCK = 256


class Counted(DilocoAllReduce):
    """An all-reduce whose seconds of the processor are counted, on all threads of this rank."""

    def __init__(self, exchange: Exchange, wire: str) -> None:
        super().__init__(exchange, wire, _BLOCK, torch.float32)
        self.seconds: list[float] = []

    def run(self) -> None:
        begin = time.process_time()
        super().run()
        self.seconds.append(time.process_time() - begin)

    def total_seconds(self, iters: int) -> list[float]:
        """Return the seconds of the processor of the last rounds, summed over the ranks."""
        total: Tensor = torch.tensor(self.seconds[-iters:], dtype=torch.float64)
        dist.all_reduce(total)
        return [float(one) for one in total]


def figures(tcp: list[float], gloo: list[float], sent: int) -> dict[str, Any]:
    """Summaries, the rate in GB/s that each rank sends at, and how the two compare in a round."""
    return {
        "tcp": common.summary(tcp),
        "gloo": common.summary(gloo),
        "tcp_gb_per_s": sent / common.summary(tcp)["median"] / 1e9,
        "rate_against_gloo": common.median_ratio(gloo, tcp),
    }


def measure(
    exchanges: list[Exchange], wire: str, num_bytes: int, repeats: int, iters: int
) -> dict[str, Any]:
    """Measure one size; a collective call."""
    methods = [Counted(exchange, wire) for exchange in exchanges]
    for method in methods:
        method.prepare(num_bytes // 4)
    source = source_of(dist.get_rank(), num_bytes // 4, torch.float32)
    gloo, tcp = Sampler().interleaved(methods, source, repeats, iters, 3)
    layout = methods[0].buffers.layout
    sent = layout.payload_bytes * (2 if dist.get_world_size() > 2 else 1)
    used = [method.total_seconds(iters * repeats) for method in methods]
    return {
        **figures(tcp, gloo, sent),
        "processor_against_gloo": common.median_ratio(used[1], used[0]),
        "processor_s_per_gb": sum(used[1]) / len(used[1]) / (sent * dist.get_world_size()) * 1e9,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-g", "--nprocs", type=int, default=2, help="local processes")
    add("-b", "--bytes", default="1M,64M", help="comma list of fp32 bytes")
    add("-n", "--iters", type=int, default=15, help="samples")
    add("-r", "--repeats", type=int, default=4, help="rounds in a sample")
    add("--wire", default="fp32,int8", help="comma list of wire formats")
    add("--lanes", type=int, default=1, help="lanes of both")
    add("--link", default="loopback", help="what the link is, for the report")
    add("--keys", action="store_true", help="the link has keys")
    add("--noise", action="store_true", help="gloo in the place of the link")
    common.add_output(parser)
    args = parser.parse_args()
    if not common.is_worker():
        common.relaunch(args.nprocs, preload=())
        return 0
    rank, world = common.init_workers()
    report = common.Report("link_against_gloo", quiet=rank != 0, workers=world, link=args.link)
    kinds = ("gloo", "gloo" if args.noise else "tcp")
    stack = ExitStack()
    keys = stack.enter_context(folder_of_keys(rank, world)) if args.keys else None
    exchanges = [
        Exchange.from_group(
            None,
            lanes=args.lanes,
            timeout=120.0,
            collectives=kind,
            link_keys=keys if kind == "tcp" else None,
        )
        for kind in kinds
    ]
    report.print("#")
    report.print(
        f"#{'wire':>9} {'bytes':>11} {'gloo':>9} {kinds[1]:>9} {'rate':>7} {'CPU':>7}  (ms)"
        f" {'Mbit/s':>9}"
    )
    results = {}
    for wire in args.wire.split(","):
        for num_bytes in map(common.parse_size, args.bytes.split(",")):
            found = measure(exchanges, wire, num_bytes, args.repeats, args.iters)
            results[f"{wire} {num_bytes}"] = found
            ms = " ".join(f"{1e3 * found[name]['median']:9.2f}" for name in ("gloo", "tcp"))
            ratios = f"{found['rate_against_gloo']:7.3f} {found['processor_against_gloo']:7.3f}"
            ratios += f"        {8e3 * found['tcp_gb_per_s']:8.1f}"
            report.print(f" {wire:>9} {num_bytes:>11} {ms} {ratios}")
    for exchange in exchanges:
        exchange.close()
    stack.close()
    common.finish(report, results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
