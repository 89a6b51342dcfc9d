"""Measure every bar that the package must clear and print figure, must, aim and verdict.

    make bars
    python benchmarks/bars.py --only 9,10
    python benchmarks/bars.py --only 1,2,3,4,5,6,7,8 --size 256M

Every figure is a ratio inside one interleaved run (or a count), so it carries over between
machines. The exit status is 1 when a must is missed. docs/benchmarks.md explains each bar.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import netns

_SKIPPED = 77  # exit status of private_loopback.py where it may not make a namespace
HERE = Path(__file__).resolve().parent


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


class Unavailable(Exception):
    """This machine lacks what a benchmark needs; the text says what."""


def run_script(name: str, *arguments: object, prefix: Sequence[str] = ()) -> Any:
    """Run a benchmark of this folder and return the results of its JSON file.

    Raises:
        Unavailable: If the benchmark says that this machine cannot run it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        script = [sys.executable, str(HERE / name), *map(str, arguments)]
        words = [*prefix, *script, "--json", str(path)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=600)
        if done.returncode == _SKIPPED:
            raise Unavailable(done.stdout.strip().removeprefix("# skipped: "))
        if not path.exists():
            raise RuntimeError(f"{name} {' '.join(map(str, arguments))} failed:\n{done.stdout}")
        return json.loads(path.read_text())["results"]


def run_on_link(world: int, rate: str, *arguments: object) -> Any:
    """Run exchange.py between network namespaces and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        script = [sys.executable, str(HERE / "exchange.py"), *map(str, arguments)]
        with netns.Network(world, netns.parse_rate(rate)) as network:
            network.run([*script, "--json", str(path)], stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())["results"]


def row_of(rows: list[dict[str, Any]], wire: str, size: int | None = None) -> dict[str, Any]:
    """Our row of this wire format, and of this size if there are several."""
    found = [r for r in rows if r["wire"] == wire and r["impl"] != "gloo"]
    return next(r for r in found if size in (None, r["size"]))


# ---------------------------------------------------------------- one function a group of bars


def operators(size: int = 1 << 30) -> Iterator[Figure]:
    """Bars 1 to 8: kernels against the machine's memory and against plain PyTorch."""
    for figure in run_script("roofline.py", "--bars", "--size", size):
        yield Figure(**figure)


def shaped_link(bar: int, rate: str, size: str) -> Iterator[Figure]:
    """Bars 9 and 10: speed-up over gloo fp32 where the link is the limit."""
    limits = {
        (9, "int8"): (3.6, 3.85),
        (9, "int4"): (7.0, 7.6),
        (10, "int8"): (3.6, 3.9),
        (10, "int4"): (6.7, 7.6),
    }
    reason = netns.missing() or ""
    for world in (2, 4):
        options = ["-b", size, "-e", size, "-n", 7, "-w", 1, "--wire", "int8,int4"]
        rows = [] if reason else run_on_link(world, rate, *options)
        for wire in ("int8", "int4"):
            value = None if reason else row_of(rows, wire)["vs_reference"]
            name = f"all-reduce {size}iB over {rate}, W={world}, {wire}, x gloo fp32"
            must, aim = limits[bar, wire]
            yield Figure(bar, name, value, must, aim, reason=reason)


def loopback() -> Iterator[Figure]:
    """Bars 11 and 12: speed-up over gloo fp32 where the processor is the limit."""
    biggest = common.parse_size("128M")
    must11 = {(2, "int8"): 2.0, (4, "int8"): 2.5, (2, "int4"): 3.5, (4, "int4"): 3.5}
    aim11 = {"int8": 4.0, "int4": 6.0}
    sweeps = {}
    # Small messages are a matter of wake-ups, and vary most.
    steps = (("64K", "8M", 45), ("16M", biggest // 2, 15), (biggest, biggest, 15))
    for world in (2, 4):
        options = ["-g", world, "--wire", "int8,int4"]
        sweeps[world] = []
        for first, last, samples in steps:
            sizes = ["-b", first, "-e", last, "-n", samples]
            sweeps[world] += run_script("exchange.py", *options, *sizes)
    for (world, wire), must in must11.items():
        value = row_of(sweeps[world], wire, biggest)["vs_reference"]
        name = f"all-reduce 128MiB over loopback, W={world}, {wire}, x gloo fp32"
        yield Figure(11, name, value, must, aim11[wire])
    for world in (2, 4):
        floors = run_script("loopback_floor.py", "-g", world, "-e", biggest, "-n", 15)
        for wire, value in floors.items():
            name = f"read, send and write alone, W={world}, {wire}, x gloo fp32"
            yield Figure(11, name, value, None, None)
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
    alone = [sys.executable, str(HERE / "private_loopback.py")]
    rows, uncounted = {}, ""
    for world in (2, 4, 8):
        try:
            rows[world] = run_script("exchange.py", "-g", world, *options, prefix=alone)
        except Unavailable as error:
            uncounted = str(error)
            plain = [word for word in options if word != "--count-bytes"]
            rows[world] = run_script("exchange.py", "-g", world, *plain)
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
    counts = run_script("steady_state.py", "-g", 2)["int8"]
    name = "allocations above 64 KiB in any of 50 syncs"
    yield Figure(15, name, counts["large_allocations"]["max"], 0, 0, False)
    faults = counts["caller_faults"]["mean"] + counts["engine_faults"]["mean"]
    yield Figure(15, "minor page faults a sync, mean of 50", faults, 1, 0, False)


def outer_step() -> Iterator[Figure]:
    """Bars 16 to 18: time blocked and memory of an outer step, blocking and overlapped."""
    results = run_script("outer_step.py", "-g", 2)
    name = "blocked time of flat-buffer torch DiLoCo, x ours"
    yield Figure(16, name, results["blocked_ratio"], 2.0, 3.0)
    name = "that baseline over all_reduce + sub + foreach SGD"
    yield Figure(16, name, results["honesty"], 1.3, None, False)
    memory = run_script("outer_step.py", "-g", 2, "--memory")
    name = "extra memory at peak, blocking, int8, model sizes"
    yield Figure(18, name, memory["peak_sizes"], 2.75, 2.5, False)
    ours = ["--memory-only", "--variants", "diloco_int8"]
    memory = run_script("against_torchft.py", "-n", 3, *_STREAMING, *ours)["diloco_int8"]["memory"]
    name = "extra memory at peak, 4 fragments, delay 1, int8"
    yield Figure(18, name, memory["peak_sizes"], 2.75, 2.5, False)
    yield from torchft()


_STREAMING = ("--sync-every", 8, "--fragments", 4, "--delay", 1)
_PEERS = {"torchft": "torchft", "torchft_buckets": "torchft with buckets"}


def torchft() -> Iterator[Figure]:
    """Bars 16 and 17 against torchft, where it is installed; no time is lost where it is not."""
    free = ("4 fragments, delay 1", 17, 5.0, 8.0, _STREAMING)
    # Replicas that meet before every call do not wait for each other, which is what overlap hides.
    lockstep = ("4 fragments, delay 1, in lockstep", 17, None, None, (*_STREAMING, "--lockstep"))
    for what, bar, must, aim, options in (("blocking", 16, 4.0, 6.0, ()), free, lockstep):
        results, reason = None, ""
        try:
            results = run_script("against_torchft.py", "-n", 7, "-w", 1, *options)["diloco_int8"]
        except Unavailable as error:
            reason = str(error)
        for key, peer in _PEERS.items():
            value = None if results is None else results[f"against_{key}"]["blocked"]
            name = f"blocked time of {peer}, {what}, x ours"
            yield Figure(bar, name, value, must, aim, reason=reason)


OPERATOR_BARS = (1, 2, 3, 4, 5, 6, 7, 8)
GROUPS: dict[tuple[int, ...], Callable[[], Iterator[Figure]]] = {
    OPERATOR_BARS: operators,
    (9,): functools.partial(shaped_link, 9, "1gbit", "64M"),
    (10,): functools.partial(shaped_link, 10, "100mbit", "32M"),
    (11, 12): loopback,
    (13, 14): bytes_and_bits,
    (15,): steady_state,
    (16, 17, 18): outer_step,
}


def parse_only(text: str) -> set[int]:
    known = {bar for bars in GROUPS for bar in bars}
    if not text:
        return known
    chosen = {int(word) for word in text.split(",") if word.isdecimal()}
    if not chosen or chosen - known:
        raise argparse.ArgumentTypeError(f"bars among {sorted(known)}, not {text!r}")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=parse_only, default="", help="bars to measure, as 9,10")
    parser.add_argument(
        "--size", type=common.parse_size, default=1 << 30, help="bytes of parameters, bars 1 to 8"
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="results file, the text goes beside it (.txt); all bars: benchmarks/results/bars.json",
    )
    args = parser.parse_args()
    if args.json is None and args.only == parse_only(""):
        args.json = common.RESULTS / "bars.json"
    size = common.format_size(args.size)
    report = common.Report("bars", link="loopback; 9 and 10: network namespaces", size=size)
    report.print("#")
    report.print(f"#{'bar':>3}  {'what':<52} {'figure':>9}  {'must':>9} {'aim':>6}  verdict")
    figures: list[Figure] = []
    groups = {**GROUPS, OPERATOR_BARS: functools.partial(operators, args.size)}
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
        results = [asdict(figure) | {"verdict": figure.verdict} for figure in figures]
        if args.json is not None:
            report.save(args.json, results)
            args.json.with_suffix(".txt").write_text("\n".join(report.lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
