"""The intervals of one rank's trace, and the figures computed from the intervals.

Overlap is defined as in Holistic Trace Analysis: the time in which both communication and
computation run on the device, over the time in which communication runs. A kernel's name decides
whether it is communication or computation; copies and memsets are neither.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
COMMUNICATION, COMPUTATION, NEITHER = 0, 1, 2
_NCCL = re.compile(r"nccl.*Kernel")
_MEMORY = re.compile(r"Memcpy|Memset|dma")
_NO_COMPUTATION = re.compile(r".*Memcpy|Memset|.*Sync")
# "diloco_comm::encode fragment=0 round=3"; names in the package's NVTX domain have no prefix.
OUR_RANGE = re.compile(
    r"(?:diloco_comm::)?(\w+) fragment=(\d+) round=(\d+)(?: us=(\d+)(?: exposed_us=\d+)?)?$"
)
OURS = "diloco_comm"
_RANK = re.compile(r"rank[-_]?(\d+)")


class TraceError(ValueError):
    """A file is no trace, or an incomplete one; the message is one sentence."""


@functools.lru_cache(maxsize=1 << 16)
def kind_of(name: str) -> int:
    """Return the kind of a GPU activity by its name, as in Holistic Trace Analysis 0.5."""
    if _NCCL.match(name):
        return COMMUNICATION
    if _MEMORY.match(name) or _NO_COMPUTATION.match(name):
        return NEITHER
    return COMPUTATION


def rank_of(path: Path) -> int | None:
    """Return the rank in the name of a file such as rank3.json or trace_rank-3.sqlite."""
    found = _RANK.search(path.name)
    return int(found[1]) if found else None


@dataclass
class Phase:
    """How often a stage of this package ran, and for how long."""

    count: int = 0
    total_us: float = 0.0
    max_us: float = 0.0

    def add(self, us: float) -> None:
        self.count += 1
        self.total_us += us
        self.max_us = max(self.max_us, us)


def _none() -> tuple[Array, Array]:
    return np.empty(0), np.empty(0)


@dataclass
class RankTrace:
    """The activities of one rank, in microseconds; intervals in any order.

    Attributes:
        rank: None if neither the trace nor the file's name has a rank.
        device: "gpu", or "cpu" for a trace without GPU activities.
        ours: Communication kernels of this library.
        inner: All other communication.
        exchanges: This library's exchanges, as measured by its engine. They count as communication
            if the library has no communication kernels, as with gloo between sites.
        phases: This library's stages by name.
    """

    path: Path
    rank: int | None
    device: str
    ours: tuple[Array, Array] = field(default_factory=_none)
    inner: tuple[Array, Array] = field(default_factory=_none)
    computation: tuple[Array, Array] = field(default_factory=_none)
    exchanges: tuple[Array, Array] = field(default_factory=_none)
    phases: dict[str, Phase] = field(default_factory=dict)

    @property
    def our_traffic(self) -> tuple[Array, Array]:
        """This library's kernels, or its exchanges if it has no kernels."""
        return self.ours if len(self.ours[0]) else self.exchanges


def figures(trace: RankTrace) -> dict[str, Any]:
    """Return the figures of one rank; ``docs/how-to/profile.md`` has the schema."""
    computation = merge(*trace.computation)
    both = [np.concatenate(pair) for pair in zip(trace.ours, trace.inner, strict=True)]
    ends = [*trace.computation, *both]
    times = np.concatenate(ends)
    return {
        "rank": trace.rank,
        "file": str(trace.path),
        "device": trace.device,
        "span_us": float(times.max() - times.min()) if len(times) else 0.0,
        "computation_us": length(computation),
        **_overlap(merge(both[0], both[1]), computation),
        "ours": _overlap(merge(*trace.our_traffic), computation),
        "inner": _overlap(merge(*trace.inner), computation),
        "phases": {
            stage: {"count": p.count, "total_us": p.total_us, "max_us": p.max_us}
            for stage, p in sorted(trace.phases.items())
        },
    }


def _overlap(
    communication: tuple[Array, Array], computation: tuple[Array, Array]
) -> dict[str, float | None]:
    total = length(communication)
    overlapped = intersection(communication, computation)
    return {
        "communication_us": total,
        "overlapped_us": overlapped,
        "exposed_us": total - overlapped,
        "overlap": overlapped / total if total else None,
    }


def slowest_rank(ranks: Sequence[dict[str, Any]]) -> int | None:
    """Return the rank that computes longest, which the others wait for; None with one rank."""
    if len(ranks) < 2:
        return None
    return max(ranks, key=lambda rank: rank["computation_us"])["rank"]


def settle_ranks(traces: Sequence[RankTrace]) -> None:
    """Give traces without a rank the free numbers, in the order of the list.

    Raises:
        TraceError: If two traces have the same rank.
    """
    taken: dict[int, Path] = {}
    for trace in traces:
        if trace.rank is None:
            continue
        if trace.rank in taken:
            raise TraceError(f"{taken[trace.rank]} and {trace.path} are both of rank {trace.rank}")
        taken[trace.rank] = trace.path
    free = (number for number in range(len(traces)) if number not in taken)
    for trace in traces:
        if trace.rank is None:
            trace.rank = next(free)


# The arithmetic of intervals follows Holistic Trace Analysis (``merge_kernel_intervals``), so that
# both tools report the same overlap to the last digit. An interval whose times were rounded inwards
# may end before it begins; such an interval keeps its negative length.


def merge(begin: Array, end: Array) -> tuple[Array, Array]:
    """Merge intervals that touch; the result is sorted.

    Args:
        begin, end: 1-D, of equal length, any order.
    """
    if not len(begin):
        return begin, end
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    latest = np.maximum.accumulate(end)
    starts = np.flatnonzero(np.concatenate(([True], begin[1:] > latest[:-1])))
    return begin[starts], np.maximum.reduceat(end, starts)


def length(merged: tuple[Array, Array]) -> float:
    """Return the total length of merged intervals."""
    begin, end = merged
    return float((end - begin).sum())


def intersection(a: tuple[Array, Array], b: tuple[Array, Array]) -> float:
    """Return the length of the intersection of two lists of merged intervals."""
    times = np.concatenate((*a, *b))
    if not len(a[0]) or not len(b[0]):
        return 0.0
    # The running sum is 1 inside an interval of a, 2 inside one of b, and 3 inside both.
    changes = np.repeat((1, -1, 2, -2), (len(a[0]), len(a[0]), len(b[0]), len(b[0])))
    order = np.argsort(times, kind="stable")
    times, running = times[order], np.cumsum(changes[order])
    return float((times[1:] - times[:-1])[running[:-1] == 3].sum())


def inside(points: Array, merged: tuple[Array, Array]) -> NDArray[np.bool_]:
    """Whether each point lies in one of the merged intervals, ends included."""
    begin, end = merged
    if not len(begin):
        return np.zeros(len(points), dtype=bool)
    idx = np.searchsorted(begin, points, side="right") - 1
    return (idx >= 0) & (points <= end[np.maximum(idx, 0)])
