"""Time each operator beside the machine's memory and beside plain PyTorch, in turns.

    python benchmarks/roofline.py                     # 1 GiB of fp32, one thread, every operator
    python benchmarks/roofline.py --size 256M --threads 2 --impl avx2
    python benchmarks/roofline.py --bars              # the figures of bars 1 to 8

Every round times memcpy, plain loops that move an operator's bytes and do nothing else (*floors*),
the operators, the same work in eager PyTorch and under ``torch.compile``. Ratios are taken round by
round and their median is reported: on a shared machine they hold where times do not.
"""

from __future__ import annotations

import argparse
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import plain_operators as plain
import torch
from torch import Tensor

from diloco_comm import ops
from diloco_comm.wire import WIRES, Layout, WireFormat

NUM_RUNS = 4  # the shards that `reduce` sums
BLOCK = 256
PATTERN = 1 << 20  # elements after which the random data repeat


def buffer(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return zeroed memory on huge pages, touched once: fresh pages cost more than any kernel."""
    num_bytes = max(num_elements * dtype.itemsize, 1)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[:num_elements].zero_()


class Data:
    """The buffers of one fragment: about nine times ``size_bytes`` in all.

    Args:
        size_bytes: Bytes of the fragment's fp32 parameters.
        impl: Implementation of the operators, "" for the default.
    """

    def __init__(self, size_bytes: int, impl: str) -> None:
        self.num_elements = n = size_bytes // 4 // (NUM_RUNS * 1024) * NUM_RUNS * 1024
        self.impl = impl
        names = ("outer", "params", "momentum", "residual", "rest")
        self.fp32 = {name: buffer(n, torch.float32) for name in names}
        rng = torch.Generator().manual_seed(1)
        for i, name in enumerate(names[:4]):
            pattern = torch.randn(min(n, PATTERN), generator=rng) * (1.0, 1.0, 1e-3, 1e-4)[i]
            for part in self.fp32[name].split(PATTERN):
                part.copy_(pattern[: part.numel()])
        self.bf16 = buffer(n, torch.bfloat16)
        self.codes = buffer(n, torch.int8)
        self.layouts = {w: Layout.plan(n, NUM_RUNS, 1, WireFormat(w, BLOCK)) for w in WIRES}
        largest = self.layouts["fp32"].payload_bytes
        self.scratch = buffer(largest, torch.uint8)
        self.payloads = {w: self._payload(w) for w in ("int8", "int4", "fp8_e4m3")}
        self.norms = torch.zeros(2, dtype=torch.float64)

    def _payload(self, wire: str) -> Tensor:
        payload = buffer(self.layouts[wire].payload_bytes, torch.uint8)
        encode(self, wire, payload)()
        return payload

    def form(self, wire: str) -> tuple[int, str, int]:
        return self.layouts[wire].run_elements, wire, BLOCK

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["fp32"][name]
        except KeyError:
            raise AttributeError(name) from None


# What is timed: closures over the buffers, and the bytes they must move for each element.


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    operator: str
    wire: str
    run: Callable[[], object]
    traffic_bytes: float  # for each element
    floor: str = ""  # names of the floors it is compared with, by their common beginning
    plain: str = ""  # the plain PyTorch twin

    @property
    def name(self) -> str:
        return f"{self.operator} {self.wire}".strip()


def encode(data: Data, wire: str, payload: Tensor | None = None, **options: Any) -> Callable:
    """Encode outer - params; ``params`` and ``residual`` in the options replace the fp32 ones."""
    target = data.scratch[: data.layouts[wire].payload_bytes] if payload is None else payload
    params = [options.pop("params", data.fp32["params"])]
    outer, n, form = data.fp32["outer"], data.num_elements, data.form(wire)
    return lambda: ops.encode(outer, params, target, 0, n, *form, **options, impl=data.impl)


def outer_step(data: Data, wire: str, num_terms: int = 1, **options: Any) -> Callable:
    """Take a Nesterov step and write the parameters."""
    params = [options.pop("params", data.fp32["params"])]
    payloads, n, form = [data.payloads[wire]] * num_terms, data.num_elements, data.form(wire)
    coefficients = [1.0, 0.25, -0.25][:num_terms]
    options = {"lr": 0.7, "mu": 0.9} | options
    return lambda: ops.outer_step(
        data.outer, data.momentum, params, payloads, coefficients, 0, n, *form, "nesterov",
        impl=data.impl, **options,
    )  # fmt: skip


def adam_step(data: Data, wire: str) -> Callable:
    second = data.residual  # any fp32 buffer; the arithmetic needs it to be positive
    second.abs_()
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 0.1, "step": 3}
    args = ([data.payloads[wire]], [1.0], 0, data.num_elements, *data.form(wire))
    return lambda: ops.outer_step_adam(
        data.outer, data.momentum, second, [data.params], *args, impl=data.impl, **options
    )


def decode(data: Data, wire: str) -> Callable:
    args = ([data.payloads[wire]], [1.0], [data.rest], 0, data.num_elements, *data.form(wire))
    return lambda: ops.decode(*args, impl=data.impl)


def reduce(data: Data, wire: str) -> Callable:
    """Average the payload's four runs as if they were four ranks' shards of one run."""
    layout, form = data.layouts[wire], data.form(wire)
    result = data.scratch[: layout.run_bytes]
    args = (data.payloads[wire], result, [1 / NUM_RUNS] * NUM_RUNS, layout.run_elements, *form)
    return lambda: ops.reduce(*args, impl=data.impl)


def rows(data: Data, *, bars_only: bool) -> list[Row]:
    """List the operators to time; the first ones are those of the bars."""
    feedback = {"residual": data.residual, "new_residual": data.rest}
    wire_bytes = {w: WireFormat(w, BLOCK).bits_per_element / 8 for w in WIRES}
    w8, w4 = wire_bytes["int8"], wire_bytes["int4"]
    found = [
        Row("encode", "int8", encode(data, "int8"), 8 + w8, "read2", "encode"),
        Row("encode", "int4", encode(data, "int4"), 8 + w4, "read2"),
        Row("encode", "fp8_e4m3", encode(data, "fp8_e4m3"), 8 + w8, "read2"),
        Row("encode stochastic", "int8", encode(data, "int8", stochastic=True), 8 + w8, "read2"),
        Row("encode +feedback", "int8", encode(data, "int8", **feedback), 16 + w8, "feedback"),
        Row("decode", "int8", decode(data, "int8"), 4 + w8, plain="decode"),
        Row("reduce of 4", "int8", reduce(data, "int8"), w8 + w8 / NUM_RUNS, plain="reduce"),
        Row("outer_step", "int8", outer_step(data, "int8"), 20 + w8, "outer_step", "outer_step"),
    ]
    if bars_only:
        return found
    half = {"params": data.bf16}
    for wire in ("fp8_e5m2", "e3m0", "fp16", "bf16", "fp32"):
        found.append(Row("encode", wire, encode(data, wire), 8 + wire_bytes[wire], "read2"))
    for wire in ("int4", "fp8_e4m3", "e3m0", "bf16"):
        run = encode(data, wire, stochastic=True)
        found.append(Row("encode stochastic", wire, run, 8 + wire_bytes[wire], "read2"))
    short = {"residual": buffer(data.num_elements, torch.bfloat16)}
    short["new_residual"] = buffer(data.num_elements, torch.bfloat16)
    return [
        *found,
        Row("encode bf16 params", "int8", encode(data, "int8", **half), 6 + w8),
        Row("encode +bf16 feedback", "int8", encode(data, "int8", **short), 12 + w8),
        Row("decode", "int4", decode(data, "int4"), 4 + w4),
        Row("decode", "fp8_e4m3", decode(data, "fp8_e4m3"), 4 + w8),
        Row("reduce of 4", "int4", reduce(data, "int4"), w4 + w4 / NUM_RUNS),
        Row("reduce of 4", "fp8_e4m3", reduce(data, "fp8_e4m3"), w8 + w8 / NUM_RUNS),
        Row("outer_step", "int4", outer_step(data, "int4"), 20 + w4, "outer_step"),
        Row("outer_step alpha=0.5", "int8", outer_step(data, "int8", alpha=0.5), 24 + w8),
        Row("outer_step bf16 params", "int8", outer_step(data, "int8", **half), 18 + w8),
        Row("outer_step 3 terms", "int8", outer_step(data, "int8", 3), 20 + 3 * w8),
        Row("outer_step adam", "int8", adam_step(data, "int8"), 28 + w8),
        Row("merge", "", lambda: ops.merge(data.outer, [data.rest], impl=data.impl), 8),
        Row(
            "norms", "", lambda: ops.norms(data.outer, [data.params], data.norms, impl=data.impl), 8
        ),
    ]


def floors(data: Data) -> dict[str, Callable]:
    """The plain loops of csrc/codec/floors.cpp, each with and without non-temporal stores."""
    outer, params, momentum = data.outer, data.params, data.momentum
    arguments = {
        "memcpy": [outer, data.rest],
        "read2": [outer, params],
        "feedback": [outer, params, data.residual, data.rest, data.codes],
        "outer_step": [outer, momentum, params, data.codes],
    }
    found: dict[str, Callable] = {}
    for name in torch.ops.diloco_comm._floors():
        buffers = next(b for start, b in arguments.items() if name.startswith(start))
        found[name] = lambda name=name, buffers=buffers: torch.ops.diloco_comm._floor(name, buffers)
    return found


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

Seconds = dict[str, list[float]]


def measure(
    data: Data, table: Sequence[Row], *, rounds: int, compiled: bool, twins: Sequence[str]
) -> Seconds:
    """Time everything in turns, each operator soon after its floors.

    The keys are rows' names, ``floor X``, ``eager X`` and ``compile X``.
    """
    functions: dict[str, Callable] = {}
    loops = floors(data)
    for start in ("memcpy", "read2", "feedback", "outer_step"):
        functions |= {f"floor {k}": f for k, f in loops.items() if k.startswith(start)}
        functions |= {row.name: row.run for row in table if (row.floor or "memcpy") == start}
    for kind in ["eager", "compile"] if compiled else ["eager"]:
        for name, function in plain_twins(data, kind == "compile").items():
            if name in twins:
                functions[f"{kind} {name}"] = function
    with torch.no_grad():
        return common.interleave(functions, rounds=rounds, warmup=2)


def best_floor(seconds: Seconds, start: str) -> list[float]:
    """The fastest variant of a floor, by its median."""
    variants = [times for name, times in seconds.items() if name.startswith(f"floor {start}")]
    return min(variants, key=lambda times: common.summary(times)["median"])


def figures(seconds: Seconds) -> list[dict[str, Any]]:
    """Bars 1 to 8 from the measured times, as ``bars.py`` wants them."""

    def share(name: str, floor: str) -> float:
        return 100 * common.median_ratio(best_floor(seconds, floor), seconds[name])

    def times(slow: str, name: str) -> float | None:
        return common.median_ratio(seconds[slow], seconds[name]) if slow in seconds else None

    memcpy = seconds["floor memcpy"]
    # For large copies some C libraries store past the caches, as the operators do: then a decode
    # moves 5/8 of memcpy's bytes and no kernel is faster than that. Ordinary stores move 12 bytes.
    cached = seconds.get("floor memcpy_cached", memcpy)
    read = "of the two-stream read floor (%)"
    steps = "outer_step int8"
    bars: list[tuple] = [
        (1, f"encode int8, {read}", share("encode int8", "read2"), 90, 98),
        (2, f"encode int4, {read}", share("encode int4", "read2"), 90, 98),
        (3, f"encode e4m3, {read}", share("encode fp8_e4m3", "read2"), 80, 95),
        (3, f"stochastic int8, {read}", share("encode stochastic int8", "read2"), 80, 95),
        (4, "encode int8 +feedback, of its traffic (%)",
         share("encode +feedback int8", "feedback"), 70, 85),
        (5, "decode int8, x time of a copy with ordinary stores",
         common.median_ratio(seconds["decode int8"], cached), 0.55, 0.48),
        (5, "decode int8, x this C library's memcpy time",
         common.median_ratio(seconds["decode int8"], memcpy), None, None),
        (6, "reduce of 4 int8, x time of a copy with ordinary stores",
         common.median_ratio(seconds["reduce of 4 int8"], cached), 0.30, 0.20),
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


def floor_rows(seconds: Seconds) -> list[Row]:
    traffic_bytes = {"memcpy": 8, "read2": 8, "feedback": 17, "outer_step": 21}
    return [
        Row(name, "", lambda: None, next(b for k, b in traffic_bytes.items() if k in name))
        for name in seconds
        if name.startswith("floor")
    ]


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
    add("--no-compile", action="store_true", help="leave torch.compile out")
    add("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.rounds < 7:
        parser.error("--rounds must be at least 7")
    impl = ops.resolve_impl(args.impl) or ops.available_impls()[-1]
    size, compiled = common.format_size(args.size), not args.no_compile
    header = {"size": size, "rounds": args.rounds, "block": BLOCK, "impl": impl}
    if args.bars:
        results, seconds = measure_bars(args.size, rounds=args.rounds, impl=impl, compiled=compiled)
        report = common.Report("roofline, bars 1 to 8", threads=1, **header)
        for figure in results:
            value = "-" if figure["value"] is None else f"{figure['value']:.3g}"
            report.print(f" {figure['bar']}  {figure['name']:<50} {value:>8}")
        report.header["seconds"] = {name: common.summary(t) for name, t in seconds.items()}
    else:
        torch.set_num_threads(args.threads)
        data = Data(args.size, impl)
        table = rows(data, bars_only=False)
        twins = ("encode", "decode", "reduce", "outer_step")
        seconds = measure(data, table, rounds=args.rounds, compiled=compiled, twins=twins)
        report = common.Report("roofline", threads=args.threads, **header)
        results = report_rows(report, table, seconds, data.num_elements, impl)
    if args.json:
        report.save(args.json, results)


if __name__ == "__main__":
    sys.exit(main())
