"""Measure all-reduces: pseudo-gradient in, average out, against the backend's own all_reduce.

Each sample times all methods in turn, so that slow phases of the machine affect all methods.
docs/reference/bench.md derives every column. The columns and JSON names are those of nccl-tests.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from diloco_comm.exchange.exchange import Exchange
from diloco_comm.ops.wire import BLOCK_SIZES, WIRES

from ..common import reports
from ..common.console import progress_bar
from ..common.sizes import format_size
from . import methods

DTYPES = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}
BACKENDS = ("gloo", "nccl", "diloco")
_COLUMNS = "#{:>11} {:>11} {:>9} {:>7} {:>10} {:>8} {:>8} {:>8} {:>7} {:>8}"
_ROW = " {:>11} {:>11} {:>9} {:>7} {:>10.1f} {:>8.3f} {:>8.3f} {:>8.3f} {:>7} {:>8.2f}"
# A sample repeats the operation for about this long, since a barrier costs about 0.1 ms.
_SAMPLE_S = 0.02
# gloo sums in place, so values grow with each repetition: 2^6 * 8^32 still fits into fp32.
_MAX_REPEATS = 32

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Options of the measurement; sizes in bytes as fp32, the link in Gbit/s and ms."""

    min_bytes: int = 1 << 20
    max_bytes: int = 64 << 20
    step_factor: int = 2
    iters: int = 20
    warmup_iters: int = 3
    check: bool = False
    datatype: str = "float"
    wires: tuple[str, ...] = ("int8",)
    block_size: int = 256
    lanes: int = 1
    chunk_bytes: int | None = None
    impl: str = ""
    backend: str = "gloo"
    collectives: str = "gloo"
    link: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        known = (*WIRES, "gloo_bf16")
        for wire in self.wires:
            if wire not in known:
                raise ValueError(f"--wire must be of {', '.join(known)}, got {wire!r}")
        for name, value, least in (
            ("--minbytes", self.min_bytes, 4),
            ("--maxbytes", self.max_bytes, self.min_bytes),
            ("--stepfactor", self.step_factor, 2),
            ("--iters", self.iters, 1),
            ("--warmup_iters", self.warmup_iters, 0),
            ("--lanes", self.lanes, 1),
            ("--chunk", self.chunk_bytes or 1, 1),
        ):
            if value < least:
                floor = f"{least} (--minbytes)" if name == "--maxbytes" else least
                raise ValueError(f"{name} must be at least {floor}, got {value}")
        for name, given, allowed in (
            ("--datatype", self.datatype, tuple(DTYPES)),
            ("--backend", self.backend, BACKENDS),
            ("--block-size", self.block_size, BLOCK_SIZES),
        ):
            if given not in allowed:
                shown = ", ".join(map(str, allowed))
                raise ValueError(f"{name} must be one of {shown}, got {given}")

    def sizes(self) -> Iterator[int]:
        """Yield the sizes in bytes."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size *= self.step_factor

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.datatype]

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"


def parse_link(text: str) -> tuple[float, float] | None:
    """Read ``GBPS[,RTT_MS]``; None for "", without an emulated link."""
    if not text:
        return None
    gbps, _, rtt_ms = text.partition(",")
    try:
        link = float(gbps), float(rtt_ms or 0.0)
    except ValueError:
        link = (-1.0, 0.0)
    if not (link[0] > 0 and link[1] >= 0):
        raise ValueError(f"--emulate-link must be GBPS[,RTT_MS] such as 0.5,10, got {text!r}")
    return link


def describe_link(link: tuple[float, float] | None) -> str:
    """Describe a link for the header of the output."""
    if link is None:
        return "loopback or what the host has"
    return f"simulated: emulated by sleep in the engine, {link[0]:g},{link[1]:g} Gbit/s,RTT ms"


def make_exchange(settings: Settings) -> Exchange:
    """Make an exchange of all ranks; a collective call."""
    is_on_gpu = settings.device == "cuda"
    exchange = Exchange.from_group(
        None,
        lanes=settings.lanes,
        chunk_bytes=settings.chunk_bytes,
        impl=settings.impl,
        timeout=120.0,
        device="cuda" if is_on_gpu else "cpu",
        collectives="nccl" if is_on_gpu else settings.collectives,
    )
    if settings.link is not None:
        exchange.emulate_link(*settings.link)
    return exchange


def make_methods(settings: Settings) -> list[Any]:
    """Return the methods, the reference first.

    The reference is the backend's fp32, or this library's fp32 if the engine emulates a link.
    """
    exchange = None
    if any(not wire.startswith("gloo") for wire in settings.wires) or settings.link:
        exchange = make_exchange(settings)
    block, device = settings.block_size, settings.device
    chosen: list[Any] = [methods.GlooAllReduce("fp32", settings.backend)]
    if settings.link:
        assert exchange is not None
        chosen = [methods.DilocoAllReduce(exchange, "fp32", block, torch.float32, device)]
    for wire in settings.wires:
        if wire.startswith("gloo"):
            chosen.append(methods.GlooAllReduce(wire.removeprefix("gloo_"), settings.backend))
        else:
            assert exchange is not None
            chosen.append(methods.DilocoAllReduce(exchange, wire, block, settings.dtype, device))
    return chosen


class Sampler:
    """Measures how long each implementation of an all-reduce (a *method*) takes.

    A sample begins after a barrier, when nothing else is sent, and is a mean of repetitions.
    """

    def __init__(self, device: str = "cpu", drain: torch.Tensor | None = None) -> None:
        self.drain = drain
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def sample(self, method: Any, source: torch.Tensor, repeats: int) -> float:
        """Return the seconds of one operation on this rank."""
        method.load(source)
        self.wait()
        dist.barrier()
        if self.drain is not None:
            dist.all_reduce(self.drain)
            dist.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            method.run()
        self.wait()
        return (time.perf_counter() - begin) / repeats

    def repeats(self, reference: Any, source: torch.Tensor) -> int:
        """Return the number of repetitions in a sample, the same on all ranks."""
        self.sample(reference, source, 1)
        once = reports.slowest_of_ranks([self.sample(reference, source, 1)])[0]
        return max(1, min(_MAX_REPEATS, round(_SAMPLE_S / once)))

    def interleaved(
        self, chosen: list[Any], source: torch.Tensor, repeats: int, iters: int, warmup_iters: int
    ) -> list[list[float]]:
        """Return the seconds of every method on the slowest rank, one list for each method."""
        seconds: list[list[float]] = [[] for _ in chosen]
        title, total = format_size(source.nbytes), (warmup_iters + iters) * len(chosen)
        with progress_bar(title, total) as advance:
            for i in range(warmup_iters + iters):
                for times, method in zip(seconds, chosen, strict=True):
                    once = self.sample(method, source, repeats)
                    if i >= warmup_iters:
                        times.append(once)
                    advance(note=method.wire)
        return [reports.slowest_of_ranks(times) for times in seconds]


def measure_size(
    settings: Settings,
    chosen: list[Any],
    size: int,
    drain: torch.Tensor | None = None,
    also: Callable[[Any, torch.Tensor], Row] = lambda method, source: {},
) -> list[Row]:
    """Measure all methods at one size and return a row for each; a collective call.

    Args:
        size: Bytes of the tensor as fp32.
        drain: A tensor that is averaged before each sample, so that a traffic shaper on the link
            has no burst left.
        also: Called with a method and the tensor that it averages; returns more figures of the row.
    """
    count = size // 4
    source = methods.source_of(dist.get_rank(), count, settings.dtype)
    for method in chosen:
        method.prepare(count)
    checks = [check(settings, method, source) if settings.check else {} for method in chosen]
    sampler = Sampler(settings.device, drain)
    repeats = sampler.repeats(chosen[0], source)
    seconds = sampler.interleaved(chosen, source, repeats, settings.iters, settings.warmup_iters)
    rows = []
    for method, times, checked in zip(chosen, seconds, checks, strict=True):
        row = describe(method, size, times, seconds[0], settings.datatype)
        rows.append(row | checked | also(method, source))
    return rows


def describe(
    method: Any, size: int, times: list[float], reference: list[float], datatype: str = "float"
) -> Row:
    """Return the figures of one method at one size; docs/reference/bench.md explains them."""
    world = dist.get_world_size()
    median = statistics.median(times)
    gigabytes = size / 1e9
    sent = method.sent_bytes()
    bus = gigabytes / median * methods.bus_factor(world)
    return {
        "size": size,
        "count": size // 4,
        "type": datatype,
        "redop": "avg",
        "root": -1,
        "in_place": {
            "time": median * 1e6,
            "alg_bw": gigabytes / median,
            "bus_bw": bus,
            "nwrong": None,
        },
        "wire": method.wire,
        "impl": method.impl,
        "wire_bw": sent / 1e9 / median,
        "time_us": {
            "p10": reports.percentile(times, 10) * 1e6,
            "p50": median * 1e6,
            "p90": reports.percentile(times, 90) * 1e6,
            "samples": len(times),
        },
        "sent_bytes": sent,
        "formula_bits": 8 * sent / (size // 4 * methods.bus_factor(world)),
        "vs_reference": reports.ratio_of_medians(reference, times),
        "identical": None,
        "relative_l2": None,
    }


def check(settings: Settings, method: Any, source: torch.Tensor) -> Row:
    """Run once, untimed, and compare.

    The backend's own mean is compared with the fp64 mean, and may differ by the rounding errors of
    fp32 sums. This library's mean must have the bits that the plain reference computes.
    """
    world, dtype = dist.get_world_size(), settings.dtype
    count = source.numel()
    method.load(source)
    number = getattr(method, "round", 0)
    method.run()
    result = method.result()
    sources = [methods.source_of(rank, count, dtype) for rank in range(world)]
    exact = methods.exact_mean(world, count, dtype)
    if isinstance(method, methods.GlooAllReduce):
        magnitude = torch.stack(sources).abs().amax(0).double()
        rounding = 2.0**-8 if method.wire == "bf16" else 2.0**-21
        wrong = methods.count_wrong(result, exact, world * rounding * magnitude)
    else:
        defined = methods.defined_mean(sources, method.buffers.layout, number).to(dtype).double()
        wrong = methods.count_wrong(result, defined, torch.zeros_like(defined))
    return {
        "wrong": wrong,
        "identical": methods.same_on_all_ranks(result),
        "relative_l2": methods.relative_l2(result, exact),
    }


# ------------------------------------------------------------------------------------- the table


def run(report: reports.Report, settings: Settings, chosen: list[Any], **more: Any) -> list[Row]:
    """Measure all sizes and print a line for each, as ``measure_size``; a collective call."""
    against = "vs fp32" if settings.link else f"vs {settings.backend}"
    report.print("#")
    names = ("size", "count", "wire", "impl", "time", "algbw", "busbw", "wirebw", "#wrong", against)
    report.print(_COLUMNS.format(*names))
    units = ("(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", "(GB/s)", "", "(x)")
    report.print(_COLUMNS.format(*units))
    rows: list[Row] = []
    for size in settings.sizes():
        for row in measure_size(settings, chosen, size, **more):
            row["in_place"]["nwrong"] = row.pop("wrong", None)
            rows.append(row)
            report.print(_line(row))
    wrong = count_wrong(rows)
    report.print(f"# out of bounds values: {wrong if settings.check else 'not checked (-c 1)'}")
    return rows


def count_wrong(rows: list[Row]) -> int:
    """Return the number of elements out of bounds, in all rows that were checked."""
    return sum(row["in_place"]["nwrong"] or 0 for row in rows)


def _line(row: Row) -> str:
    figures, wrong = row["in_place"], row["in_place"]["nwrong"]
    return _ROW.format(
        row["size"],
        row["count"],
        row["wire"],
        row["impl"],
        figures["time"],
        figures["alg_bw"],
        figures["bus_bw"],
        row["wire_bw"],
        "N/A" if wrong is None else wrong,
        row["vs_reference"],
    )


def exchanges_of(chosen: list[Any]) -> list[Exchange]:
    """Return the exchanges of the methods, each once."""
    return list({id(m.exchange): m.exchange for m in chosen if hasattr(m, "exchange")}.values())


def collectives_of(chosen: list[Any]) -> str | None:
    """Return the name of the transport of the methods' exchange; None without an exchange."""
    return next((exchange.collectives for exchange in exchanges_of(chosen)), None)


def close(chosen: list[Any]) -> None:
    """Close the engines of the methods."""
    for exchange in exchanges_of(chosen):
        exchange.close()
