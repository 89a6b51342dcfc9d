"""Lengths of unions and intersections of time intervals, on numpy arrays.

The arithmetic is that of Holistic Trace Analysis (``merge_kernel_intervals``), so that both tools
report the same overlap to the last digit. An interval whose times were rounded inwards may end
before it begins; such an interval keeps its negative length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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
