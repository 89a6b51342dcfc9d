"""Find chunk size, lanes and wire for a link by measurement; never slower than the default.

First every candidate is timed a few times. Then the best candidates and the default are timed in
turns. A candidate is chosen only if it is faster than the default in this second measurement.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from diloco_comm.exchange.exchange import Exchange
from diloco_comm.ops.wire import WIRES, WireFormat

from ..common import reports
from ..common.sizes import at_least, format_size
from . import exchange as bench_exchange
from . import methods

# Wire formats, from the most precise to the coarsest. Sparse wires come at the end: they send most
# elements some rounds later. docs/explanation/bits.md says what this costs in training.
_PRECISION = (
    "fp32", "fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2", "int4", "e3m0", "int2r", "int1r",
    "sub2", "sub4", "sub8", "sub16", "topk256", "topk128", "topk64", "topk32",
)  # fmt: skip
CHUNKS = (None, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20)
LANES = (1, 2, 4)
_NUM_FINALISTS = 3
# Least speedup over the default: on a noisy machine two equal settings may differ by less.
_LEAST_GAIN = 1.02


@dataclass(frozen=True)
class Candidate:
    """One setting of wire, lanes and chunk size; without a chunk size the engine chooses it."""

    wire: str
    lanes: int = 1
    chunk_bytes: int | None = None

    def config(self) -> dict[str, Any]:
        """Return arguments of ``DiLoCo``."""
        config = {"wire": self.wire, "lanes": self.lanes, "chunk_bytes": self.chunk_bytes}
        return config | ({"error_feedback": True} if WireFormat(self.wire).is_sparse else {})


@dataclass(frozen=True)
class Settings:
    """Settings to try: fragments of ``size_bytes`` of fp32 over a link.

    With a ``budget_s``, the most precise wire is chosen whose exchange takes no longer. Without a
    ``budget_s`` the wire is the first of ``wires``.
    """

    size_bytes: int = 64 << 20
    wires: tuple[str, ...] = ("int8",)
    chunks: tuple[int | None, ...] = CHUNKS
    lanes: tuple[int, ...] = LANES
    block_size: int = 256
    budget_s: float | None = None
    iters: int = 9
    collectives: str = "gloo"
    link: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for wire in self.wires:
            if wire not in WIRES:
                raise ValueError(f"--wire must be of {', '.join(WIRES)}, got {wire!r}")
        if self.size_bytes < 4:
            raise ValueError(f"--size must be at least 4 bytes, got {self.size_bytes}")
        at_least(3, iters=self.iters)
        at_least(1, lanes=min(self.lanes))
        if self.budget_s is not None and not self.budget_s > 0:
            raise ValueError(f"--budget must be a positive number of seconds, got {self.budget_s}")


def run(report: reports.Report, settings: Settings) -> dict[str, Any]:
    """Measure and choose; a collective call.

    Returns:
        ``config`` for ``DiLoCo``, the measurements (``results``), the ``speedup`` over the default
        for the same wire, and what the exchange went ``over``.
    """
    bench = _Bench(settings)
    try:
        report.print("#")
        report.print(f"#{'wire':>10} {'lanes':>6} {'chunk':>8} {'time':>10} {'vs default':>11}")
        report.print(f"#{'':>10} {'':>6} {'':>8} {'(ms)':>10} {'(x)':>11}")
        found = [_choose(report, bench, wire) for wire in _by_precision(settings.wires)]
        over = bench.exchanges[Candidate.lanes].collectives  # the exchange of the default setting
    finally:
        bench.close()
    chosen = _fitting(found, settings)
    config = chosen["config"]
    chunk = config["chunk_bytes"]
    shown = "by size" if chunk is None else format_size(chunk)
    report.print(f"# chosen: wire {config['wire']}, lanes {config['lanes']}, chunk {shown}")
    return {**chosen, "over": over, "results": [row for choice in found for row in choice["rows"]]}


def _by_precision(wires: tuple[str, ...]) -> list[str]:
    return sorted(wires, key=_PRECISION.index) if len(wires) > 1 else list(wires)


def _fitting(found: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """Return the choice of the most precise wire within the budget, else of the fastest wire.

    Without a budget it is the choice of the first wire in the settings.

    Args:
        found: The choices, one for each wire, the most precise wire first.
    """
    if settings.budget_s is None:
        return next(c for c in found if c["config"]["wire"] == settings.wires[0])
    for choice in found:
        if choice["seconds"] <= settings.budget_s:
            return choice
    return min(found, key=lambda choice: choice["seconds"])


def _choose(report: reports.Report, bench: _Bench, wire: str) -> dict[str, Any]:
    """Find the best setting for a wire."""
    settings = bench.settings
    default = Candidate(wire)
    candidates = [Candidate(wire, n, c) for n in settings.lanes for c in settings.chunks]
    others = [candidate for candidate in candidates if candidate != default]
    quick = {c: statistics.median(bench.measure([c], 2)[0]) for c in others}
    finalists = [default, *sorted(quick, key=quick.__getitem__)[:_NUM_FINALISTS]]
    seconds = bench.measure(finalists, settings.iters)
    rows = []
    for candidate, times in zip(finalists, seconds, strict=True):
        rows.append(
            {
                **asdict(candidate),
                "size": settings.size_bytes,
                "time": statistics.median(times) * 1e6,
                "vs_default": reports.ratio_of_medians(seconds[0], times),
            }
        )
        chunk = candidate.chunk_bytes
        shown = "by size" if chunk is None else format_size(chunk)
        report.print(
            f" {wire:>10} {candidate.lanes:>6} {shown:>8} {rows[-1]['time'] / 1e3:>10.2f} "
            f"{rows[-1]['vs_default']:>11.3f}"
        )
    best = max(range(len(rows)), key=lambda index: rows[index]["vs_default"])
    if rows[best]["vs_default"] < _LEAST_GAIN:
        best = 0
    return {
        "config": finalists[best].config(),
        "seconds": statistics.median(seconds[best]),
        "speedup": rows[best]["vs_default"],
        "rows": rows,
    }


class _Bench:
    """An exchange for each number of lanes, and one tensor that all candidates average."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.exchanges: dict[int, Exchange] = {}
        self.count = settings.size_bytes // 4
        self.source = methods.source_of(dist.get_rank(), self.count, torch.float32)
        self.sampler = bench_exchange.Sampler()
        self.repeats = 0

    def measure(self, candidates: list[Candidate], iters: int) -> list[list[float]]:
        """Time the candidates in turns; return each one's seconds on the slowest rank."""
        chosen = [self._method(candidate) for candidate in candidates]
        if not self.repeats:
            self.repeats = self.sampler.repeats(chosen[0], self.source)
        return self.sampler.interleaved(chosen, self.source, self.repeats, iters, 1)

    def _method(self, candidate: Candidate) -> methods.DilocoAllReduce:
        exchange = self.exchanges.get(candidate.lanes)
        if exchange is None:
            shared = bench_exchange.Settings(
                lanes=candidate.lanes,
                collectives=self.settings.collectives,
                link=self.settings.link,
            )
            exchange = bench_exchange.make_exchange(shared)
            self.exchanges[candidate.lanes] = exchange
        exchange.chunk_bytes = candidate.chunk_bytes
        block = self.settings.block_size
        method = methods.DilocoAllReduce(exchange, candidate.wire, block, torch.float32)
        method.prepare(self.count)
        return method

    def close(self) -> None:
        for exchange in self.exchanges.values():
            exchange.close()
