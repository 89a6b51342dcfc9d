"""Measure our all-reduce against what would be left of it if the codec cost nothing: its floor.

    python -m benchmarks.exchange.loopback_floor -g 4 --wire int8,int4 -e 128M

On one machine the ranks share cores and memory, and these alone set a limit. For the floor each
rank reads the fp32 tensor once, exchanges over gloo as many bytes as the wire format has, in the
phases of our engine, and writes the tensor once, one after the other. Where there are no more cores
than ranks, an engine that overlaps the three has little to gain from it. Ours, the floor and gloo's
fp32 all-reduce take turns in the same processes; all ranks begin together. This is bar 11.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support import common
from diloco_comm.ops.wire import Layout, WireFormat
from diloco_comm_tools.bench.exchange import Sampler, Settings, make_exchange
from diloco_comm_tools.bench.methods import DilocoAllReduce, GlooAllReduce, source_of

_BLOCK = 256


class Floor:
    """Read, exchange and write; what an all-reduce in this wire format cannot do without."""

    def __init__(self, wire: str) -> None:
        self.wire, self.format = wire, WireFormat(wire, _BLOCK)

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


def figures(ours: list[float], floor: list[float], gloo: list[float]) -> dict[str, Any]:
    """Summaries in seconds, and ratios taken sample by sample."""
    return {
        "ours": common.summary(ours),
        "floor": common.summary(floor),
        "gloo": common.summary(gloo),
        "over_floor": common.median_ratio(ours, floor),
        "ours_vs_gloo": common.median_ratio(gloo, ours),
        "floor_vs_gloo": common.median_ratio(gloo, floor),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-g", "--nprocs", type=int, default=2, help="local processes")
    add("-e", "--bytes", type=common.parse_size, default="128M", help="fp32 bytes of the tensor")
    add("-n", "--iters", type=int, default=15, help="samples")
    add("--wire", default="int8,int4", help="comma list of wire formats")
    common.add_output(parser)
    args = parser.parse_args()
    report = common.join_group("loopback_floor", args.nprocs, preload=(), link="loopback")
    if report is None:
        return 0
    wires = args.wire.split(",")
    exchange = make_exchange(Settings())
    chosen: list[Any] = [GlooAllReduce()]
    for wire in wires:
        # The floor's turn comes after ours, in every sample.
        chosen += [DilocoAllReduce(exchange, wire, _BLOCK, torch.float32), Floor(wire)]
    for method in chosen:
        method.prepare(args.bytes // 4)
    source = source_of(dist.get_rank(), args.bytes // 4, torch.float32)
    gloo, *seconds = Sampler().interleaved(chosen, source, 1, args.iters, 3)
    report.print("#")
    report.print(f"#{'wire':>9} {'ours':>9} {'floor':>9} {'gloo':>9} {'ours/floor':>11}  (ms)")
    results = {}
    for wire, ours, floor in zip(wires, seconds[::2], seconds[1::2], strict=True):
        found = results[wire] = figures(ours, floor, gloo)
        ms = [1e3 * found[name]["median"] for name in ("ours", "floor", "gloo")]
        cells = "".join(f" {one:9.2f}" for one in ms)
        report.print(f" {wire:>9}{cells} {found['over_floor']:11.3f}")
    exchange.close()
    common.finish(report, results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
