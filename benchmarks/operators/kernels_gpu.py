"""Time each operator on a GPU beside a copy, a kernel with the same traffic and plain PyTorch.

    python -m benchmarks.operators.kernels_gpu --json FILE  # 1 GiB, every wire and implementation
    python -m benchmarks.operators.kernels_gpu --check      # ends with status 1 below the bars
    python -m benchmarks.operators.kernels_gpu --jobs 8     # compile Triton's first, in 8 processes
    python -m benchmarks.operators.kernels_gpu --device cpu --size 1M -n 7    # without a GPU

Every sample times the copy, a kernel that has the operator's reads and writes and computes nothing,
all implementations and, where there is one, the same work in eager PyTorch and under
``torch.compile``, in turns; shares and ratios are taken sample by sample and their median is
reported. On a GPU the times are those of events, after reads that empty the L2 cache (writes would
leave lines there to be written back) and a pause of a millisecond, in which the host enqueues all
of the operator: what the host needs for that is no part of the time, and has a column of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.facts import clocks
from benchmarks.operators import traffic
from benchmarks.operators.kernels_gpu_cases import (
    BLOCK,
    DEFAULT_WIRES,
    MORE_PASSES,
    WIRES,
    Case,
    Data,
    cases,
    plain_twins,
)
from benchmarks.operators.kernels_gpu_predicted import COPY_GBPS, predict, recorded
from benchmarks.support import common
from diloco_comm.ops.implementations import default_on_cuda

FLUSH_BYTES = 512 << 20
PAUSE_CYCLES = 2_000_000  # about a millisecond
# The bars of a default implementation: percent of the copy's bandwidth, of fp32 tensors that are
# aligned (one, and 300), and of such that are not; times eager PyTorch's speed (encode), and times
# torch.compile's on one int8 tensor, and where its code needs more passes; microseconds of the host
# for an outer step of 300 tensors.
BAR_SHARES = {
    "encode": 90.0,
    "outer_step": 90.0,
    "decode": 90.0,
    "merge": 90.0,
    "reduce of 4": 75.0,
    "reduce of 8": 75.0,
    "norms": 80.0,
}
BAR_MISALIGNED, BAR_EAGER, BAR_HOST_US = 80.0, 5.0, 300.0
BAR_COMPILE, BAR_MORE_PASSES = 1.0, 1.5
BAR_WIRES = ("", "int8", "int4")
# A bar that a prediction misses fails no check if the figure is this part of the prediction.
PREDICTED_PART = 0.9


class HostClock:
    """Seconds of a call on the CPU."""

    host_seconds: float | None = None

    def time(self, function: Callable[[], object]) -> float:
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin


class DeviceClock:
    """Seconds between two events around a call, with an empty L2 cache.

    Attributes:
        host_seconds: Of the last call, on the host, which has nothing to wait for.
    """

    def __init__(self) -> None:
        self.host_seconds: float | None = None
        self.flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
        self.sum = torch.zeros((), device="cuda")
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time(self, function: Callable[[], object]) -> float:
        torch.sum(self.flush, dim=0, out=self.sum)
        # The device is busy until all of the call is enqueued, however many launches it is.
        torch.cuda._sleep(PAUSE_CYCLES)
        self.begin.record()
        began = time.perf_counter()
        function()
        self.host_seconds = time.perf_counter() - began
        self.end.record()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3


Clock = HostClock | DeviceClock
Seconds = dict[str, list[float]]


def measure(
    functions: dict[str, Callable[[], object]], clock: Clock, samples: int, warmup: int
) -> tuple[Seconds, Seconds]:
    """Time all functions in turn, ``samples`` times: seconds of each, and those of the host."""
    seconds: Seconds = {name: [] for name in functions}
    host: Seconds = {name: [] for name in functions}
    for i in range(warmup + samples):
        for name, function in functions.items():
            elapsed = clock.time(function)
            if i >= warmup:
                seconds[name].append(elapsed)
                if clock.host_seconds is not None:
                    host[name].append(clock.host_seconds)
    return seconds, host


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
    case: Case, impls: Sequence[str], data: Data, clock: Clock, samples: int, warmup: int,
    twins: dict[str, dict[tuple[str, str, str], Callable[[], object]]],
) -> list[dict[str, Any]]:  # fmt: skip
    """Return one row of the table for each implementation."""
    functions: dict[str, Callable[[], object]] = {}
    functions["copy"] = lambda: data.scratch.copy_(data.payloads["fp32"])
    functions |= {impl: lambda impl=impl: case.run(impl) for impl in impls}
    functions |= {kind: known[case.key] for kind, known in twins.items() if case.key in known}
    traffic_bytes = 0
    if data.device == "cuda" and traffic.triton is not None:
        arrays = (case.reads, case.updates, case.writes)
        functions["traffic"], traffic_bytes = traffic.mover(data.pool, data.num_elements, *arrays)
    wrong = differing(case, impls)
    seconds, host = measure(functions, clock, samples, warmup)
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
            "traffic_percent": 100 * moved_bytes / traffic_bytes
            * common.median_ratio(seconds["traffic"], seconds[impl]) if traffic_bytes else None,
            "host_us": 1e6 * common.summary(host[impl])["median"] if host[impl] else None,
            "is_same": impl not in wrong,
            "clocks": clocks(lambda impl=impl: case.run(impl)),
        }  # fmt: skip
        for kind in ("eager", "compile"):
            slow = seconds.get(kind)
            row[f"{kind}_ratio"] = common.median_ratio(slow, seconds[impl]) if slow else None
        rows.append(row)
    return rows


def compile_ahead(args: argparse.Namespace) -> None:
    """Compile Triton's kernels into its cache, in processes that run each operator once."""
    options = ["--wires", ",".join(args.wires), "--device", args.device]
    command = common.benchmark_command("operators.kernels_gpu", *options)
    parts = [["--part", f"{i}/{args.jobs}"] for i in range(args.jobs)]
    started = [subprocess.Popen([*command, *part]) for part in parts]
    for process in started:
        process.wait()


def run_part(args: argparse.Namespace, impls: Sequence[str]) -> None:
    """Run every n-th case once; the sizes are others, but not what Triton compiles for them."""
    first, number = map(int, args.part.split("/"))
    for case in cases(Data(1 << 20, args.device), args.wires)[first::number]:
        for impl in impls:
            case.run(impl)


def operator_of(row: dict[str, Any]) -> str:
    """Name the operator of a row, whose name also tells its options."""
    words = row["operator"].replace("+", " ").split()
    has_own_name = words[-1] in ("adam", "delayed")
    return "_".join(words) if has_own_name else words[0]


def default_of(operator: str, device: str, impls: Sequence[str]) -> str:
    """Name the implementation that is held against the bars: the default, or else the last."""
    default = default_on_cuda(operator) if device == "cuda" else impls[-1]
    return default if default in impls else impls[-1]


def predicted(row: dict[str, Any], kind: str, value: float, must: float) -> str:
    """Return that a figure of this row is predicted to miss its bar; "" if that is not so."""
    expected = row["predicted"].get(kind, must)
    return f"{expected:g} predicted" if PREDICTED_PART * expected <= value < must > expected else ""


def verdicts(rows: Sequence[dict[str, Any]], defaults: dict[str, str]) -> list[dict[str, Any]]:
    """Hold the rows of the default implementations against the bars."""
    found: list[tuple[str, float, str, float, str]] = []
    for row in rows:
        name = " ".join(filter(None, (row["operator"], row["wire"], row["layout"])))
        if not row["is_same"]:
            found.append((f"{name}, {row['impl']}: same bytes", 0, ">=", 1, ""))
        if row["impl"] != defaults[operator_of(row)]:
            continue
        bars = []
        share = BAR_SHARES.get(row["operator"])
        if share is not None and row["wire"] in BAR_WIRES:
            must = min(share, BAR_MISALIGNED) if row["layout"] == "odd" else share
            bars.append(("share_percent", "of the copy's bandwidth (%)", must))
        is_int8 = (row["wire"], row["layout"]) == ("int8", "one")
        if is_int8 and row["operator"] == "encode":
            bars.append(("eager_ratio", "x faster than eager", BAR_EAGER))
        is_long = (row["operator"], row["wire"], row["layout"]) in MORE_PASSES
        if is_long or is_int8:
            must = BAR_MORE_PASSES if is_long else BAR_COMPILE
            bars.append(("compile_ratio", "x faster than compile", must))
        for kind, what, must in bars:
            if (value := row[kind]) is not None:
                reason = predicted(row, kind, value, must)
                found.append((f"{name}, {what}", value, ">=", must, reason))
        is_many = (row["operator"], row["layout"]) == ("outer_step", "mixed")
        if is_many and row["wire"] in BAR_WIRES and row["host_us"] is not None:
            what = f"{name}, host's time for 300 tensors (us)"
            found.append((what, row["host_us"], "<=", BAR_HOST_US, ""))
    return [
        {"name": name, "value": value, "is": sign, "must": must,
         "holds": value >= must if sign == ">=" else value <= must, "predicted": reason}
        for name, value, sign, must, reason in found
    ]  # fmt: skip


def print_row(report: common.Report, row: dict[str, Any]) -> None:
    numbers = [
        1e6 * row["seconds"]["median"],
        *(row[key] for key in ("moved_gbps", "copy_gbps", "traffic_percent", "share_percent")),
        row["predicted"].get("share_percent"),
        *(row[key] for key in ("eager_ratio", "compile_ratio", "host_us")),
    ]
    cells = "".join(f"{'-' if x is None else format(x, '.1f'):>10}" for x in numbers)
    names = f" {row['operator']:>20} {row['wire']:>9} {row['layout']:>6} {row['impl']:>7}"
    report.print(f"{names}{cells} {'yes' if row['is_same'] else 'NO':>5}")


def print_head(report: common.Report) -> None:
    heads = ["time", "moved", "copy", "traffic", "share", "predicted", "eager", "compile", "host"]
    units = ["(us)", "(GB/s)", "(GB/s)", "(%)", "(%)", "(%)", "(x)", "(x)", "(us)"]
    report.print(
        f"#{'operator':>20} {'wire':>9} {'tensors':>7} {'impl':>6}"
        + "".join(f"{head:>10}" for head in heads) + "  same"
    )  # fmt: skip
    report.print("#" + " " * 45 + "".join(f"{unit:>10}" for unit in units))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--size", type=common.parse_size, default=1 << 30, help="bytes of fp32 parameters")
    add("-n", "--samples", type=common.parse_count, default=20, help="timed samples (20)")
    add("--warmup", type=int, default=3, help="samples of warm-up before them (3)")
    add("--wires", default=",".join(DEFAULT_WIRES))
    add("--impl", default="", help="comma list (default: all that run there)")
    add("--no-compile", action="store_true", help="leave torch.compile out")
    add("-j", "--jobs", type=int, default=0, help="first compile Triton's kernels in N processes")
    add("--part", default="", metavar="I/N", help="only run every N-th case once, from the I-th on")
    is_flag = argparse.BooleanOptionalAction
    add("--check", action=is_flag, help="end with status 1 when a bar does not hold")
    common.add_output(parser, help="also write the figures to this file")
    args = parser.parse_args(arguments)
    args.wires = args.wires.split(",")
    for wire in args.wires:
        if wire not in WIRES:
            parser.error(f"--wires must be of {', '.join(WIRES)}, got {wire!r}")
    common.check_device(parser, args.device)
    args.impls = common.parse_impls(parser, args.impl, args.device)
    if args.part:
        first, _, number = args.part.partition("/")
        if not (first.isdecimal() and number.isdecimal() and int(first) < int(number)):
            parser.error(f"--part must be I/N with I from 0 to N - 1, got {args.part!r}")
    if args.size < 1 << 18:
        parser.error(f"--size must be at least 256K, got {args.size}")
    return args


def run(args: argparse.Namespace, impls: Sequence[str]) -> bool:
    """Time everything, print and save it; whether the bars hold."""
    where = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    header: dict[str, Any] = {"size": common.format_size(args.size), "samples": args.samples}
    header |= {"block": BLOCK, "device": where, "cuda": torch.version.cuda}
    report = common.Report("kernels", **header, impls=impls)
    data = Data(args.size, args.device)
    clock: Clock = DeviceClock() if args.device == "cuda" else HostClock()
    kinds = ["eager"] if args.no_compile else ["eager", "compile"]
    twins = {kind: plain_twins(data, kind == "compile") for kind in kinds}
    print_head(report)
    rows: list[dict[str, Any]] = []
    model, records = next((name for name in COPY_GBPS if name in where), ""), recorded()
    for case in cases(data, args.wires):
        for row in time_case(case, impls, data, clock, args.samples, args.warmup, twins):
            row["predicted"] = (
                predict(case, model, records) if model and row["impl"] == "cuda" else {}
            )
            rows.append(row)
            print_row(report, row)
        # Also what a time limit leaves of it.
        common.save(report, args.json, {"rows": rows, "bars": None})
    operators = dict.fromkeys(map(operator_of, rows))
    defaults = {name: default_of(name, args.device, impls) for name in operators}
    report.print(f"# default of each operator: {json.dumps(defaults)}")
    checks = verdicts(rows, defaults)
    for check in checks:
        state = "FAILS"
        if check["holds"]:
            state = "holds"
        elif check["predicted"]:
            state = f"missed as predicted: {check['predicted']}"
        figure = f"{check['value']:8.1f} {check['is']} {check['must']:g}"
        report.print(f"# {check['name']:<52}{figure}  {state}")
    num_held = sum(check["holds"] for check in checks)
    num_predicted = sum(bool(check["predicted"]) for check in checks if not check["holds"])
    report.header["summary"] = f"{num_held} of {len(checks)} bars hold, "
    report.header["summary"] += f"{num_predicted} are missed as predicted"
    common.save(report, args.json, {"rows": rows, "bars": checks})
    return num_held + num_predicted == len(checks)


@torch.no_grad()
def main() -> int:
    args = parse()
    if args.part:
        run_part(args, args.impls)
        return 0
    if args.jobs:
        compile_ahead(args)
    holds = run(args, args.impls)
    return int(bool(args.check) and not holds)


if __name__ == "__main__":
    sys.exit(main())
