"""Time functions in turn, and reduce the times to figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from .printing import progress_bar


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile; `percent` in 0..100."""
    ordered = sorted(values)
    return ordered[round((len(ordered) - 1) * percent / 100)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median and its spread, as stored in every results file."""
    return {
        "median": statistics.median(values),
        "p10": percentile(values, 10),
        "p90": percentile(values, 90),
        "samples": len(values),
    }


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median of the ratios of each round, so that slow phases of the machine cancel."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the ratio of two times that a table shows as medians, so that it fits the columns."""
    return statistics.median(numerator) / statistics.median(denominator)


def interleave(
    functions: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Time all functions in turn, `rounds` times; return the seconds of each call after warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    with progress_bar("timing", (warmup + rounds) * len(functions)) as advance:
        for i in range(warmup + rounds):
            for name, function in functions.items():
                begin = time.perf_counter()
                function()
                if i >= warmup:
                    seconds[name].append(time.perf_counter() - begin)
                advance(note=name)
    return seconds


def slowest_of_ranks(seconds: Sequence[float]) -> list[float]:
    """Return the elementwise maximum over ranks: an operation ends when its last rank ends."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()
