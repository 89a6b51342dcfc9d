"""Measure all-reduces: pseudo-gradient in, average out, against gloo's fp32 all_reduce.

    python benchmarks/exchange.py -g 4 -b 1M -e 128M -f 4 --wire int8,int4
    torchrun --nproc-per-node 4 benchmarks/exchange.py -b 64M -e 64M

All methods are timed in turn within each sample, so slow phases of the machine hit all of them.
docs/benchmarks.md derives every column.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import exchange_methods as methods
import torch
import torch.distributed as dist

_DTYPES = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}
_COLUMNS = "#{:>11} {:>11} {:>9} {:>7} {:>10} {:>8} {:>8} {:>8} {:>7} {:>8}"
_ROW = " {:>11} {:>11} {:>9} {:>7} {:>10.1f} {:>8.3f} {:>8.3f} {:>8.3f} {:>7} {:>8.2f}"
# A sample repeats the operation until it lasts about this long, as a barrier costs about 0.1 ms.
_SAMPLE_S = 0.02
# gloo sums in place: 2^6 * 8^32 still fits fp32.
_MAX_REPEATS = 32


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "-b",
        "--minbytes",
        type=common.parse_size,
        default="1M",
        help="smallest size, in fp32 bytes",
    )
    add("-e", "--maxbytes", type=common.parse_size, default="64M", help="largest size")
    add("-f", "--stepfactor", type=int, default=2, help="factor between sizes")
    add("-n", "--iters", type=int, default=20, help="samples a size")
    add("-w", "--warmup_iters", type=int, default=3, help="samples thrown away before them")
    add("-c", "--check", type=int, default=0, help="1: compare with the fp64 mean, fill #wrong")
    add("-d", "--datatype", choices=_DTYPES, default="float", help="dtype of the tensor")
    add("-g", "--nprocs", type=int, default=0, help="start this many local processes")
    add("--wire", default="int8", help="comma list of wire formats; gloo_bf16 is gloo's bf16")
    add("--block-size", type=int, default=256, help="elements that share a scale")
    add("--lanes", type=int, default=1, help="process groups (TCP connections) used in parallel")
    add("--chunk", type=common.parse_size, default=None, help="wire bytes of a chunk")
    add("--impl", default="", help="force an implementation: scalar, avx2, avx512, reference")
    add("--emulate-link", default="", metavar="GBPS[,RTT_MS]", help="throttle inside the engine")
    add("--count-bytes", action="store_true", help="read the network interface's counter")
    add("--link", default="", help="what the link is, for the header")
    add("--drain", type=int, default=0, help="bytes sent before each sample to empty a shaper")
    add("--json", default="", metavar="PATH", help="write figures and output there")
    return parser.parse_args()


def sizes(args: argparse.Namespace) -> Iterator[int]:
    if args.stepfactor < 2:
        raise SystemExit(f"--stepfactor must be at least 2, got {args.stepfactor}")
    size = args.minbytes
    while size <= args.maxbytes:
        yield size
        size *= args.stepfactor


def make_methods(args: argparse.Namespace) -> list[Any]:
    """The reference first: gloo fp32, or our own fp32 wire when the engine emulates a link."""
    wires = args.wire.split(",")
    dtype = _DTYPES[args.datatype]
    exchange = None
    if any(not wire.startswith("gloo") for wire in wires) or args.emulate_link:
        exchange = make_exchange(args)
    chosen: list[Any] = [
        methods.DilocoAllReduce(exchange, "fp32", args.block_size, torch.float32)
        if args.emulate_link
        else methods.GlooAllReduce()
    ]
    for wire in wires:
        if wire.startswith("gloo"):
            chosen.append(methods.GlooAllReduce(wire.removeprefix("gloo_")))
        else:
            chosen.append(methods.DilocoAllReduce(exchange, wire, args.block_size, dtype))
    return chosen


def make_exchange(args: argparse.Namespace) -> Any:
    from diloco_comm.exchange import Exchange

    exchange = Exchange.from_group(
        None, lanes=args.lanes, chunk_bytes=args.chunk, impl=args.impl, timeout=120.0
    )
    if args.emulate_link:
        gbps, _, rtt_ms = args.emulate_link.partition(",")
        exchange.emulate_link(float(gbps), float(rtt_ms or 0.0))
    return exchange


class Sampler:
    """Times one method: barrier, drained link, as many repeats as make a sample long enough."""

    def __init__(self, drain_bytes: int) -> None:
        self.drain = torch.zeros(drain_bytes // 4) if drain_bytes else None

    def sample(self, method: Any, source: torch.Tensor, repeats: int) -> float:
        """Seconds of one operation on this rank."""
        method.load(source)
        dist.barrier()
        if self.drain is not None:
            dist.all_reduce(self.drain)
            dist.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            method.run()
        return (time.perf_counter() - begin) / repeats

    def repeats(self, reference: Any, source: torch.Tensor) -> int:
        """How often all methods repeat in a sample, agreed by the ranks."""
        self.sample(reference, source, 1)
        once = common.slowest_of_ranks([self.sample(reference, source, 1)])[0]
        return max(1, min(_MAX_REPEATS, round(_SAMPLE_S / once)))


def measure_size(
    args: argparse.Namespace, chosen: list[Any], size: int
) -> tuple[list[dict[str, Any]], int]:
    """All methods at one size; a row for each, and the repeats of a sample."""
    count = size // 4
    dtype = _DTYPES[args.datatype]
    source = methods.source_of(dist.get_rank(), count, dtype)
    for method in chosen:
        method.prepare(count)
    checks = [check(args, method, source) if args.check else {} for method in chosen]
    sampler = Sampler(args.drain)
    repeats = sampler.repeats(chosen[0], source)
    seconds: list[list[float]] = [[] for _ in chosen]
    for i in range(args.warmup_iters + args.iters):
        for times, method in zip(seconds, chosen, strict=True):
            once = sampler.sample(method, source, repeats)
            if i >= args.warmup_iters:
                times.append(once)
    seconds = [common.slowest_of_ranks(times) for times in seconds]
    rows = []
    for method, times, checked in zip(chosen, seconds, checks, strict=True):
        row = describe(method, size, times, seconds[0]) | checked
        if args.count_bytes:
            row |= interface_bits(method, source, count)
        rows.append(row)
    return rows, repeats


def describe(method: Any, size: int, times: list[float], reference: list[float]) -> dict[str, Any]:
    """The figures of one row; docs/benchmarks.md has the formulas."""
    world = dist.get_world_size()
    median = statistics.median(times)
    gigabytes = size / 1e9
    sent = method.sent_bytes()
    return {
        "size": size,
        "count": size // 4,
        "wire": method.wire,
        "impl": method.impl,
        "seconds": common.summary(times),
        "algbw": gigabytes / median,
        "busbw": gigabytes / median * methods.bus_factor(world),
        "wirebw": sent / 1e9 / median,
        "sent_bytes": sent,
        "formula_bits": 8 * sent / (size // 4 * methods.bus_factor(world)),
        "vs_reference": common.median_ratio(reference, times),
    }


def check(args: argparse.Namespace, method: Any, source: torch.Tensor) -> dict[str, Any]:
    """Run once, untimed, and compare with the fp64 mean."""
    world, dtype = dist.get_world_size(), _DTYPES[args.datatype]
    count = source.numel()
    method.load(source)
    method.run()
    result = method.result()
    sources = [methods.source_of(rank, count, dtype) for rank in range(world)]
    exact = methods.exact_mean(world, count, dtype)
    two_phases = world > 2 or method.impl == "gloo"
    bound = methods.error_bound(method.wire, args.block_size, sources, exact, two_phases=two_phases)
    if method.wire == "bf16" and method.impl == "gloo":
        bound = bound * world
    if dtype != torch.float32:
        kept = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        bound = bound + kept * (exact.abs() + bound)
    return {
        "wrong": methods.count_wrong(result, exact, bound),
        "identical": methods.same_on_all_ranks(result),
        "relative_l2": methods.relative_l2(result, exact),
    }


def interface_bits(method: Any, source: torch.Tensor, count: int) -> dict[str, float]:
    """Bits an element that left this rank's network interface, in the mean over the ranks.

    The median of three batches of four operations: one may hold a segment that TCP sent twice. On
    loopback the counter holds the traffic of all ranks and of everything else on the machine.
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
    if os.environ.get("GLOO_SOCKET_IFNAME", "lo") == "lo":
        sent /= world
    per_rank = float(sent.median()) / world / repeats
    return {"interface_bits": 8 * per_rank / (count * methods.bus_factor(world))}


def transmitted_bytes() -> int:
    """The transmit counter of the interface that gloo uses, in this process's network namespace."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == name:
            return int(counters.split()[8])
    raise RuntimeError(f"no network interface {name!r}")


def print_header(report: common.Report, args: argparse.Namespace) -> None:
    against = "vs fp32" if args.emulate_link else "vs gloo"
    report.print("#")
    names = ("size", "count", "wire", "impl", "time", "algbw", "busbw", "wirebw", "#wrong", against)
    report.print(_COLUMNS.format(*names))
    units = ("(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", "(GB/s)", "", "(x)")
    report.print(_COLUMNS.format(*units))


def print_row(report: common.Report, row: dict[str, Any]) -> None:
    report.print(
        _ROW.format(
            row["size"],
            row["count"],
            row["wire"],
            row["impl"],
            row["seconds"]["median"] * 1e6,
            row["algbw"],
            row["busbw"],
            row["wirebw"],
            row.get("wrong", "N/A"),
            row["vs_reference"],
        )
    )


def main() -> int:
    args = parse_arguments()
    if args.nprocs and not common.is_worker():
        common.relaunch(args.nprocs)
        return 0
    rank, world = common.init_workers()
    chosen = make_methods(args)
    link = args.link or "loopback or what the host has"
    if args.emulate_link:
        link = f"simulated: emulated by sleep in the engine, {args.emulate_link} Gbit/s[,RTT ms]"
    report = common.Report(
        "exchange",
        quiet=rank != 0,
        workers=world,
        link=link,
        wire=f"{args.wire}, block {args.block_size}",
        engine=f"{args.lanes} lanes, chunk {args.chunk or 'auto'}",
    )
    print_header(report, args)
    rows: list[dict[str, Any]] = []
    for size in sizes(args):
        measured, _ = measure_size(args, chosen, size)
        for row in measured:
            print_row(report, row)
        rows += measured
    wrong = sum(row.get("wrong", 0) for row in rows)
    report.print(f"# out of bounds values: {wrong if args.check else 'not checked (-c 1)'}")
    if args.json and rank == 0:
        report.save(args.json, rows)
    finish(chosen)
    return 1 if wrong else 0


def finish(chosen: list[Any]) -> None:
    for exchange in {id(m.exchange): m.exchange for m in chosen if hasattr(m, "exchange")}.values():
        exchange.close()
    common.leave_workers()


if __name__ == "__main__":
    sys.exit(main())
