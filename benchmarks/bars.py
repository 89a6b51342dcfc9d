"""Measure every bar that the package must clear and print figure, must, aim and verdict.

    make bars
    python -m benchmarks.bars --only 9,10
    python -m benchmarks.bars --only 1,2,3,4,5,6,7,8 --size 256M

Every figure is a ratio inside one interleaved run (or a count), so it carries over between
machines. The exit status is 1 when a must is missed. docs/measurements/benchmarks.md explains each
bar.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.against_torchft import peer as torchft_peer
from benchmarks.exchange import netns
from benchmarks.support import common
from diloco_comm.ops.wire import WireFormat, received_bits

_SKIPPED = 77  # exit status of private_loopback.py where making a namespace is not allowed


@dataclass(frozen=True)
class Figure:
    """One row of the table; `value` is None when it could not be measured, for `reason`."""

    bar: int
    name: str
    value: float | None
    must: float | None
    aim: float | None
    higher_is_better: bool = True
    reason: str = ""

    def clears(self, limit: float) -> bool:
        assert self.value is not None
        return self.value >= limit if self.higher_is_better else self.value <= limit

    @property
    def verdict(self) -> str:
        if self.value is None:
            return f"skipped: {self.reason}"
        if self.must is not None and not self.clears(self.must):
            return "FAIL"
        if self.aim is None:
            return "info" if self.must is None else "ok"
        return (
            "aim" if self.clears(self.aim) else ("must" if self.must is not None else "below aim")
        )

    def row(self) -> str:
        numbers = ["-" if x is None else f"{x:.4g}" for x in (self.value, self.must, self.aim)]
        sign = ">=" if self.higher_is_better else "<="
        columns = f"{numbers[0]:>9}  {sign} {numbers[1]:>6} {numbers[2]:>6}"
        return f" {self.bar:>3}  {self.name:<52} {columns}  {self.verdict}"


# Must and aim of each wire.
Limits = dict[str, tuple[float | None, float | None]]


class Unavailable(Exception):
    """This machine lacks what a benchmark needs; the text says what."""


def run_benchmark(name: str, *arguments: object, prefix: Sequence[str] = ()) -> Any:
    """Run a benchmark, named as in ``exchange.all_reduce``, and return the results in its file.

    Raises:
        Unavailable: If the benchmark says that this machine cannot run it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        words = [*prefix, *common.benchmark_command(name, *arguments), "--json", str(path)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=600)
        if done.returncode == _SKIPPED:
            raise Unavailable(done.stdout.strip().removeprefix("# skipped: "))
        if not path.exists():
            raise RuntimeError(f"{name} {' '.join(map(str, arguments))} failed:\n{done.stdout}")
        return json.loads(path.read_text())["results"]


def run_on_link(world: int, rate: str, *arguments: object) -> Any:
    """Run the all-reduce between network namespaces and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = common.benchmark_command("exchange.all_reduce", *arguments)
        with netns.Network(world, netns.parse_rate(rate)) as network:
            network.run([*command, "--json", str(path)], stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())["results"]


def row_of(rows: list[dict[str, Any]], wire: str, size: int | None = None) -> dict[str, Any]:
    """Our row of this wire format, and of this size if there are several."""
    found = [r for r in rows if r["wire"] == wire and r["impl"] != "gloo"]
    return next(r for r in found if size in (None, r["size"]))


# ---------------------------------------------------------------- one function a group of bars


def operators(option: str, size: int = 1 << 30) -> Iterator[Figure]:
    """Bars 1 to 8 and 19 to 21: kernels against the machine's memory and plain PyTorch."""
    for figure in run_benchmark("operators.roofline", option, "--size", size):
        yield Figure(**figure)


def shaped_link(
    bar: int, rate: str, size: str, limits: Callable[[int], Limits]
) -> Iterator[Figure]:
    """Bars 9, 10 and 22: speed-up over gloo fp32 where the link is the limit.

    Args:
        limits: Returns must and aim of each wire for a number of ranks.
    """
    reason = netns.missing() or ""
    for world in (2, 4):
        wires = limits(world)
        options = ["-b", size, "-e", size, "-n", 7, "-w", 1, "--wire", ",".join(wires)]
        rows = [] if reason else run_on_link(world, rate, *options)
        for wire, (must, aim) in wires.items():
            value = None if reason else row_of(rows, wire)["vs_reference"]
            name = f"all-reduce {size}iB over {rate}, W={world}, {wire}, x gloo fp32"
            yield Figure(bar, name, value, must, aim, reason=reason)


def block_limits(world: int) -> Limits:
    """With four ranks the least figure is 85 % of the ratio of the bytes that a rank receives."""
    least = {"int2r": 13.0, "int1r": 24.0, "sub8": 100.0}
    if world > 2:
        least = {wire: 0.85 * ratio_of_bytes(wire, world) for wire in least}
    return {wire: (must, None) for wire, must in least.items()}


block_wires_on_link = functools.partial(shaped_link, 22, "100mbit", "32M", block_limits)


def ratio_of_bytes(wire: str, world: int) -> float:
    """Return the bytes that a rank receives in gloo's fp32 all-reduce over those on a wire."""
    form = WireFormat(wire)
    phases = 2 * (world - 1) / world
    return phases * 32 / received_bits(form, world)


def loopback() -> Iterator[Figure]:
    """Bars 11 and 12: where the processor is the limit, against the floor and gloo fp32."""
    biggest = common.parse_size("128M")
    floors = {}
    for world in (2, 4):
        floors[world] = run_benchmark(
            "exchange.loopback_floor", "-g", world, "-e", biggest, "-n", 15
        )
        for wire, found in floors[world].items():
            name = f"all-reduce 128MiB, loopback, W={world}, {wire}, x its floor"
            yield Figure(11, name, found["over_floor"], 1.25, 1.1, False)
    for world, found_by_wire in floors.items():
        for wire, found in found_by_wire.items():
            for key, what in (("ours", "all-reduce"), ("floor", "its floor")):
                name = f"{what} 128MiB, loopback, W={world}, {wire}, x gloo fp32"
                yield Figure(11, name, found[f"{key}_vs_gloo"], None, None)
    sweeps = {}
    # Small messages are a matter of wake-ups, and vary most.
    steps = (("64K", "8M", 45), ("16M", biggest // 2, 15), (biggest, biggest, 15))
    for world in (2, 4):
        options = ["-g", world, "--wire", "int8,int4"]
        sweeps[world] = []
        for first, last, samples in steps:
            sizes = ["-b", first, "-e", last, "-n", samples]
            sweeps[world] += run_benchmark("exchange.all_reduce", *options, *sizes)
    for world, rows in sweeps.items():
        ours = [row for row in rows if row["wire"] == "int8"]
        for floor, must, aim in (("1M", 1.0, None), ("64K", None, 1.0)):
            sized = [r for r in ours if r["size"] >= common.parse_size(floor)]
            worst = min(sized, key=lambda r: r["vs_reference"])
            at = common.format_size(worst["size"])
            name = f"slowest from {floor}iB, W={world}, int8 (at {at}iB), x gloo fp32"
            yield Figure(12, name, worst["vs_reference"], must, aim)


def bytes_and_bits() -> Iterator[Figure]:
    """Bars 13 and 14: bits on the wire, error of the result, equality of the ranks."""
    limits = {"int8": (8.13, 0.0102), "int4": (4.13, 0.185), "e3m0": (4.13, None)}
    # A million elements and seven more, so that no run is full.
    size = 4 * ((1 << 20) + 7)
    options = ["-b", size, "-e", size, "-n", 3, "-w", 1, "-c", 1, "--count-bytes"]
    options += ["--wire", ",".join(limits)]
    alone = common.benchmark_command("exchange.private_loopback")
    rows, uncounted = {}, ""
    for world in (2, 4, 8):
        try:
            rows[world] = run_benchmark("exchange.all_reduce", "-g", world, *options, prefix=alone)
        except Unavailable as error:
            uncounted = str(error)
            plain = [word for word in options if word != "--count-bytes"]
            rows[world] = run_benchmark("exchange.all_reduce", "-g", world, *plain)
    for wire, (bits, _) in limits.items():
        for kind in ("formula", "interface"):
            reason = uncounted if kind == "interface" else ""
            found = [] if reason else [row_of(r, wire)[f"{kind}_bits"] for r in rows.values()]
            name = f"bits an element by {kind}, {wire}, W<=8"
            yield Figure(13, name, max(found, default=None), bits, None, False, reason)
    for wire, (_, l2) in limits.items():
        if l2 is not None:
            for world in (2, 4):
                name = f"relative L2 of the all-reduce, {wire}, W={world}"
                yield Figure(14, name, row_of(rows[world], wire)["relative_l2"], l2, None, False)
    ours = [row_of(r, wire) for r in rows.values() for wire in limits]
    wrong = sum(row["in_place"]["nwrong"] for row in ours)
    differ = sum(not row["identical"] for row in ours)
    yield Figure(14, "results that differ between ranks", differ, 0, None, False)
    yield Figure(14, "elements out of the format's bound", wrong, 0, None, False)


def steady_state() -> Iterator[Figure]:
    """Bar 15: what a sync allocates and faults."""
    counts = run_benchmark("training.steady_state", "-g", 2)["int8"]
    name = "allocations above 64 KiB in any of 50 syncs"
    yield Figure(15, name, counts["large_allocations"]["max"], 0, 0, False)
    faults = counts["caller_faults"]["mean"] + counts["engine_faults"]["mean"]
    yield Figure(15, "minor page faults a sync, mean of 50", faults, 1, 0, False)


def outer_step() -> Iterator[Figure]:
    """Bars 16 to 18: time blocked and memory of an outer step, blocking and overlapped."""
    results = run_benchmark("training.outer_step", "-g", 2)
    name = "blocked time of flat-buffer torch DiLoCo, x ours"
    yield Figure(16, name, results["blocked_ratio"], 2.0, 3.0)
    name = "that baseline over all_reduce + sub + foreach SGD"
    yield Figure(16, name, results["honesty"], 1.3, None, False)
    memory = run_benchmark("training.outer_step", "-g", 2, "--memory")
    name = "extra memory at peak, blocking, int8, model sizes"
    yield Figure(18, name, memory["peak_sizes"], 2.75, 2.5, False)
    ours = ["--memory-only", "--variants", "diloco_int8"]
    memory = run_benchmark("against_torchft.compare", "-n", 3, *_STREAMING, *ours)["diloco_int8"][
        "memory"
    ]
    name = "extra memory at peak, 4 fragments, delay 1, int8"
    yield Figure(18, name, memory["peak_sizes"], 2.75, 2.5, False)
    yield from against_others()


_STREAMING = ("--sync-every", 8, "--fragments", 4, "--delay", 1)
_PEERS = {"torchft": "torchft", "torchft_buckets": "torchft with buckets"}


def against_others() -> Iterator[Figure]:
    """Bars 16 and 17: ours against its plain traffic, and against torchft where it is installed."""
    reason = torchft_peer.missing() or ""
    peers = () if reason else tuple(_PEERS)
    # Replicas that meet before every call do not wait for each other, which is what overlap hides.
    for what, options, limits in (
        ("4 fragments, delay 1", _STREAMING, (1.35, 1.15)),
        ("4 fragments, delay 1, in lockstep", (*_STREAMING, "--lockstep"), (None, None)),
    ):
        ours = compare(*options, "--variants", ",".join((*peers, "plain", "diloco_int8")))
        name = f"blocked, {what}, x its plain traffic"
        yield Figure(17, name, ours["over_plain"], *limits, False)
        yield from of_peers(17, what, ours, (None, None), reason)
    ours = {} if reason else compare("--variants", ",".join((*peers, "diloco_int8")))
    yield from of_peers(16, "blocking", ours, (4.0, 6.0), reason)


def compare(*options: object) -> dict[str, Any]:
    """Run against_torchft/compare.py; return the results of our int8 wire."""
    timing = ("-n", 7, "-w", 1, "--time-only")
    return run_benchmark("against_torchft.compare", *timing, *options)["diloco_int8"]


def of_peers(
    bar: int, what: str, ours: dict[str, Any], limits: tuple[Any, Any], reason: str
) -> Iterator[Figure]:
    for key, peer in _PEERS.items():
        value = None if reason else ours[f"against_{key}"]["blocked"]
        yield Figure(bar, f"blocked time of {peer}, {what}, x ours", value, *limits, reason=reason)


OPERATOR_BARS = (1, 2, 3, 4, 5, 6, 7, 8)
BLOCK_OPERATOR_BARS = (19, 20, 21)
GROUPS: dict[tuple[int, ...], Callable[[], Iterator[Figure]]] = {
    OPERATOR_BARS: functools.partial(operators, "--bars"),
    (9,): functools.partial(
        shaped_link, 9, "1gbit", "64M", lambda world: {"int8": (3.6, 3.85), "int4": (7.0, 7.6)}
    ),
    (10,): functools.partial(
        shaped_link, 10, "100mbit", "32M", lambda world: {"int8": (3.6, 3.9), "int4": (6.7, 7.6)}
    ),
    (11, 12): loopback,
    (13, 14): bytes_and_bits,
    (15,): steady_state,
    (16, 17, 18): outer_step,
    BLOCK_OPERATOR_BARS: functools.partial(operators, "--block-bars"),
    (22,): block_wires_on_link,
}


def parse_only(text: str) -> set[int]:
    known = {bar for bars in GROUPS for bar in bars}
    if not text:
        return known
    chosen = {int(word) for word in text.split(",") if word.isdecimal()}
    if not chosen or chosen - known:
        raise argparse.ArgumentTypeError(f"bars among {sorted(known)}, not {text!r}")
    return chosen


def record_name(machine: dict[str, Any]) -> str:
    """Return the file of a processor's recorded run, as in ``bars-amd-avx2.json``."""
    maker = re.match("[a-z]*", machine["cpu"].lower())
    assert maker is not None
    return f"bars-{maker[0] or 'other'}-{machine['isa'].lower().replace(' ', '-')}.json"


def save(report: common.Report, path: Path, figures: list[Figure]) -> bool:
    """Write the figures and what was printed; False after a sentence where that fails."""
    results = [asdict(figure) | {"verdict": figure.verdict} for figure in figures]
    try:
        report.save(path, results)
    except OSError as error:
        print(error, file=sys.stderr)
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=parse_only, default="", help="bars to measure, as 9,10")
    parser.add_argument(
        "--size",
        type=common.parse_size,
        default=1 << 30,
        help="bytes of parameters, bars 1 to 8, 19 to 21",
    )
    record = common.RESULTS / record_name(common.machine())
    common.add_output(parser, help=f"results file; all bars: benchmarks/results/{record.name}")
    args = parser.parse_args()
    if args.json is None and args.only == parse_only(""):
        args.json = record
        common.check_default(parser, "--json", args.json)
    size = common.format_size(args.size)
    report = common.Report("bars", link="loopback; 9, 10 and 22: network namespaces", size=size)
    report.print("#")
    report.print(f"#{'bar':>3}  {'what':<52} {'figure':>9}  {'must':>9} {'aim':>6}  verdict")
    figures: list[Figure] = []
    groups = {
        **GROUPS,
        OPERATOR_BARS: functools.partial(operators, "--bars", args.size),
        BLOCK_OPERATOR_BARS: functools.partial(operators, "--block-bars", args.size),
    }
    try:
        with common.stoppable():
            for bars, measure in groups.items():
                if not args.only & set(bars):
                    continue
                for figure in measure():
                    if figure.bar in args.only:
                        figures.append(figure)
                        report.print(figure.row())
    finally:
        # A benchmark that fails, or Ctrl-C, does not lose what was measured before.
        failed = [figure for figure in figures if figure.verdict == "FAIL"]
        report.print(f"# {len(figures)} figures, {len(failed)} below their must")
        is_saved = args.json is None or save(report, args.json, figures)
    return 0 if is_saved and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
