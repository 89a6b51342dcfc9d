"""Time each operator on a GPU beside a copy of the device's memory and beside plain PyTorch.

    python benchmarks/kernels_gpu.py --json FILE    # 1 GiB, every wire, every implementation
    python benchmarks/kernels_gpu.py --check        # ends with status 1 below the bars
    python benchmarks/kernels_gpu.py --jobs 8       # compile Triton's first, in 8 processes
    python benchmarks/kernels_gpu.py --device cpu --size 1M -n 7    # the same script, no GPU

Every sample times the copy, all implementations and, where there is one, the same work in eager
PyTorch and under ``torch.compile``, in turns; shares and ratios are taken sample by sample and
their median is reported. On a GPU the times are those of events, after a write that empties the L2
cache and is long enough for the host to run ahead of it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import torch
from kernels_gpu_cases import BLOCK, Case, Data, cases, plain_twins

from diloco_comm import ops
from diloco_comm.wire import WIRES

FLUSH_BYTES = 512 << 20
# Rows that the bars are about, and the bars: percent of the copy's bandwidth, times eager's speed.
BAR_SHARE, BAR_EAGER = 90.0, 5.0
BAR_OPERATORS, BAR_WIRES = ("encode", "outer_step"), ("int8", "int4")
BAR_LAYOUTS = ("one", "mixed")


class HostClock:
    """Seconds of a call on the CPU."""

    def time(self, function: Callable[[], object]) -> float:
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin


class DeviceClock:
    """Seconds between two events around a call, with an empty L2 cache."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time(self, function: Callable[[], object]) -> float:
        self.flush.zero_()
        self.begin.record()
        function()
        self.end.record()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3


Clock = HostClock | DeviceClock
Seconds = dict[str, list[float]]


def measure(
    functions: dict[str, Callable[[], object]], clock: Clock, samples: int, warmup: int = 3
) -> Seconds:
    """Time all functions in turn, ``samples`` times."""
    seconds: Seconds = {name: [] for name in functions}
    for i in range(warmup + samples):
        for name, function in functions.items():
            elapsed = clock.time(function)
            if i >= warmup:
                seconds[name].append(elapsed)
    return seconds


def differing(case: Case, impls: Sequence[str]) -> list[str]:
    """Name the implementations that write other bytes than the first does."""
    if not case.is_pure:
        return []
    written = []
    for impl in impls:
        case.result.view(torch.uint8).fill_(0x5A)
        case.run(impl)
        written.append(case.result.view(torch.uint8).clone())
    return [impl for impl, own in zip(impls, written, strict=True) if not own.equal(written[0])]


def time_case(
    case: Case, impls: Sequence[str], data: Data, clock: Clock, samples: int,
    twins: dict[str, dict[str, Callable[[], object]]],
) -> list[dict[str, Any]]:  # fmt: skip
    """Return one row of the table for each implementation."""
    functions: dict[str, Callable[[], object]] = {}
    functions["copy"] = lambda: data.scratch.copy_(data.payloads["fp32"])
    functions |= {impl: lambda impl=impl: case.run(impl) for impl in impls}
    functions |= {kind: known[case.plain] for kind, known in twins.items() if case.plain}
    wrong = differing(case, impls)
    seconds = measure(functions, clock, samples)
    copied_bytes = 2 * data.payloads["fp32"].numel()
    moved_bytes = case.traffic_bytes * data.num_elements
    rows = []
    for impl in impls:
        row = {
            "operator": case.operator,
            "wire": case.wire,
            "layout": case.layout,
            "impl": impl,
            "seconds": common.summary(seconds[impl]),
            "moved_gbps": moved_bytes / common.summary(seconds[impl])["median"] / 1e9,
            "copy_gbps": copied_bytes / common.summary(seconds["copy"])["median"] / 1e9,
            "share_percent": 100 * moved_bytes / copied_bytes
            * common.median_ratio(seconds["copy"], seconds[impl]),
            "is_same": impl not in wrong,
        }  # fmt: skip
        for kind in ("eager", "compile"):
            slow = seconds.get(kind)
            row[f"{kind}_ratio"] = common.median_ratio(slow, seconds[impl]) if slow else None
        rows.append(row)
    return rows


def compile_ahead(args: argparse.Namespace) -> None:
    """Compile Triton's kernels into its cache, in processes that run each operator once."""
    wires = ["--wires", ",".join(args.wires), "--device", args.device]
    parts = [["--part", f"{i}/{args.jobs}"] for i in range(args.jobs)]
    started = [subprocess.Popen([sys.executable, __file__, *wires, *part]) for part in parts]
    for process in started:
        process.wait()


def run_part(args: argparse.Namespace, impls: Sequence[str]) -> None:
    """Run every n-th case once; the sizes are others, but not what Triton compiles for them."""
    first, number = map(int, args.part.split("/"))
    for case in cases(Data(1 << 20, args.device), args.wires)[first::number]:
        for impl in impls:
            case.run(impl)


def verdicts(rows: Sequence[dict[str, Any]], default: str) -> list[dict[str, Any]]:
    """Hold the default implementation's rows against the bars."""
    found = []
    for row in rows:
        name = f"{row['operator']} {row['wire']} {row['layout']}".strip()
        if not row["is_same"]:
            found.append({"name": f"{name}, {row['impl']}: same bytes", "value": 0, "must": 1})
        if row["impl"] != default or row["operator"] not in BAR_OPERATORS:
            continue
        if row["wire"] in BAR_WIRES and row["layout"] in BAR_LAYOUTS:
            what = f"{name}, of the copy's bandwidth (%)"
            found.append({"name": what, "value": row["share_percent"], "must": BAR_SHARE})
        if row["eager_ratio"] is not None:
            what = f"{name}, x faster than eager"
            found.append({"name": what, "value": row["eager_ratio"], "must": BAR_EAGER})
    return [verdict | {"holds": verdict["value"] >= verdict["must"]} for verdict in found]


def print_row(report: common.Report, row: dict[str, Any]) -> None:
    numbers = [
        1e6 * row["seconds"]["median"],
        *(row[key] for key in ("moved_gbps", "copy_gbps", "share_percent")),
        *(row[key] for key in ("eager_ratio", "compile_ratio")),
    ]
    cells = "".join(f"{'-' if x is None else format(x, '.1f'):>10}" for x in numbers)
    names = f" {row['operator']:>18} {row['wire']:>9} {row['layout']:>6} {row['impl']:>7}"
    report.print(f"{names}{cells} {'yes' if row['is_same'] else 'NO':>5}")


def print_head(report: common.Report) -> None:
    heads = ["time", "moved", "copy", "share", "eager", "compile"]
    units = ["(us)", "(GB/s)", "(GB/s)", "(%)", "(x)", "(x)"]
    report.print(
        f"#{'operator':>18} {'wire':>9} {'tensors':>7} {'impl':>6}"
        + "".join(f"{head:>10}" for head in heads) + "  same"
    )  # fmt: skip
    report.print("#" + " " * 43 + "".join(f"{unit:>10}" for unit in units))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--size", type=common.parse_size, default=1 << 30, help="bytes of fp32 parameters")
    add("-n", "--samples", type=int, default=20, help="timed samples after three of warm-up")
    add("--wires", default=",".join(("int8", "int4", *(w for w in WIRES if "int" not in w))))
    add("--impl", default="", help="comma list (default: all that run there)")
    add("--no-compile", action="store_true", help="leave torch.compile out")
    add(
        "-j",
        "--jobs",
        type=int,
        default=0,
        help="first compile Triton's kernels in so many processes",
    )
    add("--part", default="", metavar="I/N", help="only run every N-th case once, from the I-th on")
    add("--check", action="store_true", help="end with status 1 when a bar does not hold")
    add("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(arguments)
    args.wires = args.wires.split(",")
    for wire in args.wires:
        if wire not in WIRES:
            parser.error(f"--wires must be of {', '.join(WIRES)}, got {wire!r}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu runs the same script without one")
    if args.size < 1 << 20:
        parser.error(f"--size must be at least 1M, got {args.size}")
    return args


def run(args: argparse.Namespace, impls: Sequence[str], default: str) -> bool:
    """Time everything, print and save it; whether the bars hold."""
    where = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    header: dict[str, Any] = {"size": common.format_size(args.size), "samples": args.samples}
    header |= {"block": BLOCK, "device": where, "cuda": torch.version.cuda}
    report = common.Report("kernels", **header, impls=impls, default=default)
    data = Data(args.size, args.device)
    clock: Clock = DeviceClock() if args.device == "cuda" else HostClock()
    kinds = ["eager"] if args.no_compile else ["eager", "compile"]
    twins = {kind: plain_twins(data, kind == "compile") for kind in kinds}
    print_head(report)
    rows: list[dict[str, Any]] = []
    for case in cases(data, args.wires):
        for row in time_case(case, impls, data, clock, args.samples, twins):
            rows.append(row)
            print_row(report, row)
        if args.json:  # also what a time limit leaves of it
            report.save(args.json, {"rows": rows, "bars": None})
    checks = verdicts(rows, default)
    for check in checks:
        state = "holds" if check["holds"] else "FAILS"
        report.print(f"# {check['name']:<52}{check['value']:8.1f} >= {check['must']:g}  {state}")
    num_held = sum(check["holds"] for check in checks)
    report.header["summary"] = f"{num_held} of {len(checks)} bars hold"
    if args.json:
        report.save(args.json, {"rows": rows, "bars": checks})
    return num_held == len(checks)


@torch.no_grad()
def main() -> int:
    args = parse()
    known = [impl for impl in ops.available_impls(args.device) if impl != "reference"]
    impls = args.impl.split(",") if args.impl else known
    if args.part:
        run_part(args, impls)
        return 0
    if args.jobs:
        compile_ahead(args)
    holds = run(args, impls, known[-1])
    return int(args.check and not holds)


if __name__ == "__main__":
    sys.exit(main())
