"""Time each operator beside the machine's memory and beside plain PyTorch, in turns.

    python -m benchmarks.operators.roofline              # 1 GiB of fp32, one thread, every operator
    python -m benchmarks.operators.roofline --size 256M --threads 2 --impl avx2
    python -m benchmarks.operators.roofline --bars       # the figures of bars 1 to 8
    python -m benchmarks.operators.roofline --block-bars # the figures of bars 19 to 21

Every round times memcpy, plain loops that move an operator's bytes and do nothing else (*floors*),
the operators, the same work in eager PyTorch and under ``torch.compile``. Ratios are taken round by
round and their median is reported: on a shared machine they hold where times do not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.operators import plain_operators as plain
from benchmarks.operators.kernels_gpu_cases import BLOCK
from benchmarks.operators.operator_table import (
    FLOOR_BYTES,
    Data,
    Row,
    Seconds,
    best_floor,
    block_rows,
    floor_rows,
    floors,
    rows,
)
from benchmarks.support import common
from diloco_comm import ops


def plain_twins(data: Data, compiled: bool) -> dict[str, Callable]:
    """Closures over the same buffers, by the operator's name."""
    scale = torch.full((data.num_elements // BLOCK, 1), 1e-5)
    wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
    encode_, decode_, reduce_, step_ = map(
        wrap, (plain.encode, plain.decode, plain.reduce, plain.outer_step)
    )
    return {
        "encode": lambda: encode_(data.outer, data.params),
        "decode": lambda: decode_(data.codes, scale),
        "reduce": lambda: reduce_(data.codes, scale),
        "outer_step": lambda: step_(data.outer, data.momentum, data.params, data.codes, scale),
    }


# Measuring and reporting.


def measure(
    data: Data, table: Sequence[Row], *, rounds: int, compiled: bool, twins: Sequence[str]
) -> Seconds:
    """Time everything in turns, each operator soon after its floors.

    The keys are rows' names, ``floor X``, ``eager X`` and ``compile X``.
    """
    functions: dict[str, Callable] = {}
    loops = floors(data)
    for start in ("memcpy", "encode", "read2", "decode", "feedback", "outer_step"):
        functions |= {f"floor {k}": f for k, f in loops.items() if k.startswith(start)}
        functions |= {row.name: row.run for row in table if (row.floor or "memcpy") == start}
    for kind in ["eager", "compile"] if compiled else ["eager"]:
        for name, function in plain_twins(data, kind == "compile").items():
            if name in twins:
                functions[f"{kind} {name}"] = function
    with torch.no_grad():
        return common.interleave(functions, rounds=rounds, warmup=2)


def figures(seconds: Seconds) -> list[dict[str, Any]]:
    """Bars 1 to 8 from the measured times, as ``bars.py`` wants them."""

    def share(name: str, floor: str) -> float:
        return 100 * common.median_ratio(best_floor(seconds, floor), seconds[name])

    def times(slow: str, name: str) -> float | None:
        return common.median_ratio(seconds[slow], seconds[name]) if slow in seconds else None

    memcpy = seconds["floor memcpy"]
    read = "of the two-stream read floor (%)"
    steps = "outer_step int8"
    bars: list[tuple] = [
        (1, f"encode int8, {read}", share("encode int8", "read2"), 90, 98),
        # Where stores take the memory's time, too, no encoder reaches the loop that only reads.
        (1, "encode int8, of its traffic (%)", share("encode int8", "encode"), None, None),
        (2, f"encode int4, {read}", share("encode int4", "read2"), 90, 98),
        (3, f"encode e4m3, {read}", share("encode fp8_e4m3", "read2"), 80, 95),
        (3, f"stochastic int8, {read}", share("encode stochastic int8", "read2"), 80, 95),
        (4, "encode int8 +feedback, of its traffic (%)",
         share("encode +feedback int8", "feedback"), 70, 85),
        (5, "decode int8, x time of memcpy",
         common.median_ratio(seconds["decode int8"], memcpy), 0.55, 0.48),
        # Where memcpy stores past the caches, no kernel takes less than 5/8 of its time.
        (5, "decode int8, of its traffic (%)", share("decode int8", "decode"), None, None),
        (6, "reduce of 4 int8, x time of memcpy",
         common.median_ratio(seconds["reduce of 4 int8"], memcpy), 0.30, 0.20),
        (7, "outer_step int8, of its traffic (%)", share(steps, "outer_step"), 78, 90),
        (8, "encode int8, x faster than eager", times("eager encode", "encode int8"), 20, 25),
        (8, "encode int8, x faster than torch.compile", times("compile encode", "encode int8"),
         3.5, 4.3),
        (8, "outer_step int8, x faster than eager", times("eager outer_step", steps), 10, 14),
        (8, "outer_step int8, x faster than torch.compile", times("compile outer_step", steps),
         None, None),
    ]  # fmt: skip
    lower = {5, 6}
    return [
        {
            "bar": bar,
            "name": name,
            "value": value,
            "must": must,
            "aim": aim,
            "higher_is_better": bar not in lower,
            "reason": "" if value is not None else "torch.compile was left out",
        }
        for bar, name, value, must, aim in bars
    ]


def block_figures(seconds: Seconds, table: Sequence[Row]) -> list[dict[str, Any]]:
    """Bars 19 to 21 from the measured times: the wires with a code for a block as a whole.

    A floor moves one byte of codes an element. The floor of an outer step, and of error feedback,
    is reduced to the bytes of the wire.
    """
    limits = {
        ("encode", "int2r"): (19, 70, 86),
        ("encode", "sub8"): (19, 85, 98),
        ("encode +feedback", "topk64"): (20, 60, 76),
        ("outer_step", "int2r"): (21, 75, 90),
        ("outer_step", "int1r"): (21, 75, 90),
        ("outer_step", "sub8"): (21, 75, 90),
    }
    found = []
    for row in table:
        if (row.operator, row.wire) not in limits:
            continue
        bar, must, aim = limits[row.operator, row.wire]
        of = "the two-stream read floor" if row.floor == "read2" else "its traffic"
        moved = 1.0 if row.floor == "read2" else row.traffic_bytes / FLOOR_BYTES[row.floor]
        ratio = common.median_ratio(best_floor(seconds, row.floor), seconds[row.name])
        found.append(
            {
                "bar": bar,
                "name": f"{row.name}, of {of} (%)",
                "value": 100 * moved * ratio,
                "must": must,
                "aim": aim,
            }
        )
    return sorted(found, key=lambda figure: figure["bar"])


def measure_block_bars(
    size_bytes: int = 1 << 30, *, rounds: int = 15, impl: str = ""
) -> tuple[list[dict[str, Any]], Seconds]:
    """Measure bars 19 to 21 on one thread; return the figures and the times they come from."""
    torch.set_num_threads(1)
    data = Data(size_bytes, impl)
    table = block_rows(data, bars_only=True)
    seconds = measure(data, table, rounds=rounds, compiled=False, twins=())
    return block_figures(seconds, table), seconds


def measure_bars(
    size_bytes: int = 1 << 30, *, rounds: int = 15, impl: str = "", compiled: bool = True
) -> tuple[list[dict[str, Any]], Seconds]:
    """Measure bars 1 to 8 on one thread; return the figures and the times they come from."""
    torch.set_num_threads(1)
    data = Data(size_bytes, impl)
    table = rows(data, bars_only=True)
    twins = ("encode", "outer_step")
    seconds = measure(data, table, rounds=rounds, compiled=compiled, twins=twins)
    return figures(seconds), seconds


def report_rows(
    report: common.Report, table: Sequence[Row], seconds: Seconds, num_elements: int, impl: str
) -> list[dict[str, Any]]:
    """Print the table and return its rows for the JSON file."""
    logical = 4 * num_elements
    memcpy = seconds["floor memcpy"]
    heads = ["time", "fp32", "moved", "memcpy", "floor", "eager", "compile"]
    units = ["(ms)", "(GB/s)", "(GB/s)", "(x time)", "(%)", "(x)", "(x)"]
    report.print(f"#{'operator':>26} {'wire':>9} {'impl':>7}" + "".join(f"{h:>10}" for h in heads))
    report.print("#" + " " * 44 + "".join(f"{u:>10}" for u in units))
    results = []
    for row in [*floor_rows(seconds), *table]:
        times = seconds[row.name]
        median = common.summary(times)["median"]
        best = best_floor(seconds, row.floor) if row.floor else []
        slower = {kind: seconds.get(f"{kind} {row.plain}") for kind in ("eager", "compile")}
        figure = {
            "operator": row.operator,
            "wire": row.wire,
            "impl": "" if row.operator.startswith("floor") else impl,
            "seconds": common.summary(times),
            "fp32_gbps": logical / median / 1e9,
            "moved_gbps": row.traffic_bytes * num_elements / median / 1e9,
            "memcpy_ratio": common.median_ratio(times, memcpy),
            "floor_percent": 100 * common.median_ratio(best, times) if best else None,
        }
        for kind, slow in slower.items():
            figure[f"{kind}_ratio"] = common.median_ratio(slow, times) if slow else None
        results.append(figure)
        numbers = [1e3 * median, *(figure[key] for key in list(figure)[4:])]
        cells = "".join(f"{'-' if x is None else format(x, '.2f'):>10}" for x in numbers)
        report.print(f" {row.operator:>26} {row.wire:>9} {figure['impl']:>7}{cells}")
    return results


def report_bars(report: common.Report, results: Sequence[dict[str, Any]], seconds: Seconds) -> None:
    """Print a line for each figure, and keep the times in the header of the file."""
    for figure in results:
        value = "-" if figure["value"] is None else f"{figure['value']:.3g}"
        report.print(f" {figure['bar']}  {figure['name']:<50} {value:>8}")
    report.header["seconds"] = {name: common.summary(t) for name, t in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=common.parse_size, default=1 << 30, help="bytes of fp32 parameters")
    add("-n", "--rounds", type=int, default=15, help="timed rounds after two of warm-up")
    add("--threads", type=int, default=1, help="intra-op threads")
    add("--impl", default="", help="implementation (default: the fastest)")
    add("--bars", action="store_true", help="figures of bars 1 to 8 alone, on one thread")
    add("--block-bars", action="store_true", help="figures of bars 19 to 21 alone, likewise")
    add("--no-compile", action="store_true", help="leave torch.compile out")
    common.add_output(parser, help="also write the figures to this file")
    args = parser.parse_args()
    if args.rounds < 7:
        parser.error("--rounds must be at least 7")
    impl = ops.resolve_impl(args.impl) or ops.available_impls()[-1]
    size, compiled = common.format_size(args.size), not args.no_compile
    header = {"size": size, "rounds": args.rounds, "block": BLOCK, "impl": impl}
    if args.bars:
        results, seconds = measure_bars(args.size, rounds=args.rounds, impl=impl, compiled=compiled)
        report = common.Report("roofline, bars 1 to 8", threads=1, **header)
        report_bars(report, results, seconds)
    elif args.block_bars:
        results, seconds = measure_block_bars(args.size, rounds=args.rounds, impl=impl)
        report = common.Report("roofline, bars 19 to 21", threads=1, **header)
        report_bars(report, results, seconds)
    else:
        torch.set_num_threads(args.threads)
        data = Data(args.size, impl)
        table = rows(data, bars_only=False)
        twins = ("encode", "decode", "reduce", "outer_step")
        seconds = measure(data, table, rounds=args.rounds, compiled=compiled, twins=twins)
        report = common.Report("roofline", threads=args.threads, **header)
        results = report_rows(report, table, seconds, data.num_elements, impl)
    common.save(report, args.json, results)


if __name__ == "__main__":
    sys.exit(main())
