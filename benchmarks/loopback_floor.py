"""Measure what would be left of an all-reduce if the codec cost nothing, against gloo's in fp32.

    python benchmarks/loopback_floor.py -g 4 --wire int8,int4 -e 128M

On one machine the ranks share cores and memory, and these alone set a limit. Each rank reads the
fp32 tensor once, exchanges as many bytes as the wire format has over gloo, and writes the tensor
once, one after the other. Where there are no more cores than ranks, an engine that overlaps the
three has little to gain from it. Bar 11 is to be read beside this figure.
"""

from __future__ import annotations

import argparse
import ctypes
import sys

import common
import torch
import torch.distributed as dist

from diloco_comm.tools.bench_exchange import Sampler
from diloco_comm.tools.bench_methods import GlooAllReduce
from diloco_comm.wire import Layout, WireFormat


class Floor:
    """Read, exchange and write; what an all-reduce in this wire format cannot do without."""

    def __init__(self, wire: str) -> None:
        self.format = WireFormat(wire, 256)

    def prepare(self, num_elements: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.tensor = torch.zeros(num_elements)
        size = Layout.plan(num_elements, world, 1, self.format).payload_bytes
        # Two ranks send each other everything; more of them a part to each, and then its mean.
        self.phases = 1 if world == 2 else 2
        part = size if world == 2 else size // world
        self.splits = [0 if peer == rank else part for peer in range(world)]
        self.sent = torch.zeros(sum(self.splits), dtype=torch.uint8)
        self.received = torch.empty_like(self.sent)

    def load(self, source: torch.Tensor) -> None:
        self.tensor.copy_(source)

    def run(self) -> None:
        self.tensor.sum()
        for _ in range(self.phases):
            dist.all_to_all_single(self.received, self.sent, self.splits, self.splits)
        # The C library's stores bypass the cache where a tensor is this large, as ours do. Not
        # zeros: some processors write these at twice the speed of anything else.
        ctypes.memset(self.tensor.data_ptr(), 1, 4 * self.tensor.numel())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-g", "--nprocs", type=int, default=2, help="local processes")
    add("-e", "--bytes", type=common.parse_size, default="128M", help="fp32 bytes of the tensor")
    add("-n", "--iters", type=int, default=15, help="samples")
    add("--wire", default="int8,int4", help="comma list of wire formats")
    add("--json", default="", metavar="PATH", help="write figures and output there")
    args = parser.parse_args()
    if not common.is_worker():
        common.relaunch(args.nprocs, preload=())
        return 0
    rank, world = common.init_workers()
    report = common.Report("loopback_floor", quiet=rank != 0, workers=world, link="loopback")
    wires = args.wire.split(",")
    chosen = [GlooAllReduce(), *map(Floor, wires)]
    for method in chosen:
        method.prepare(args.bytes // 4)
    source = torch.ones(args.bytes // 4)
    gloo, *floors = Sampler().interleaved(chosen, source, 1, args.iters, 3)
    results = {}
    for wire, seconds in zip(wires, floors, strict=True):
        results[wire] = common.median_ratio(gloo, seconds)
        ms = 1e3 * common.summary(seconds)["median"]
        report.print(f"{wire:>8}  {ms:8.2f} ms  {results[wire]:6.3f} x gloo fp32")
    common.finish(report, results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
