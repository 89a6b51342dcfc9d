"""Time functions in turn, and reduce the times to figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile; `percent` in 0..100."""
    ordered = sorted(values)
    return ordered[round((len(ordered) - 1) * percent / 100)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median with the spread around it, as stored in every results file."""
    return {
        "median": statistics.median(values),
        "p10": percentile(values, 10),
        "p90": percentile(values, 90),
        "samples": len(values),
    }


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median of the ratios taken round by round, so that slow phases of the machine cancel."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def interleave(
    functions: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Time all functions in turn, `rounds` times; seconds of each call, without the warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(warmup + rounds):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def slowest_of_ranks(seconds: Sequence[float]) -> list[float]:
    """Elementwise maximum over the ranks of the default group: an operation ends with its last."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()
