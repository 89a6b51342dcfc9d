"""What a profiler's trace says of an overlapped run: does the host wait in our ranges, and how much
of the exchange is hidden behind computation.

Traces are PyTorch's (Kineto): times and durations in microseconds. Overlap is measured as Holistic
Trace Analysis does: of the time in which something was communicated, the share in which something
was computed too.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diloco_comm_tools.profile.trace import Array, intersection, length, merge

Event = dict[str, Any]
Interval = tuple[float, float]
Spans = tuple[Array, Array]

# Calls that wait for the device, or for the driver's lock of all devices.
HOST_WAITS = re.compile(
    r"^(cuda|hip)(Stream|Device|Event)Synchronize|^cu(Stream|Ctx|Event)Synchronize"
    r"|^(cuda|hip)(Malloc|Free|HostAlloc|HostMalloc|MallocHost|FreeHost|HostRegister|Memcpy)$"
)
LONG_CALL_US = 1000.0  # A launch that takes longer waited for room in the device's queue.
_OURS = re.compile(r"^diloco_comm::(\w+) fragment=(-?\d+) round=(-?\d+)")
_EXCHANGE = re.compile(
    r"^diloco_comm::exchange fragment=(\d+) round=(\d+) us=(\d+) exposed_us=(\d+)"
)
_NCCL = re.compile(r"^nccl", re.IGNORECASE)


@dataclass(frozen=True)
class Range:
    """One of our ranges on the host; times in microseconds."""

    stage: str
    fragment: int
    round: int
    begin: float
    end: float
    thread: tuple[Any, Any]


def complete(events: Iterable[Event]) -> list[Event]:
    """Keep the events that have a duration."""
    return [e for e in events if e.get("ph") == "X" and "dur" in e]


def our_ranges(events: Iterable[Event]) -> list[Range]:
    """List our ranges on the host, in order of time."""
    found = []
    for event in complete(events):
        match = _OURS.match(event["name"])
        # The same range is shown a second time on the device's track.
        if match and event.get("cat") in ("user_annotation", "cpu_op"):
            stage, fragment, round = match.groups()
            begin, thread = float(event["ts"]), (event.get("pid"), event.get("tid"))
            end = begin + float(event["dur"])
            found.append(Range(stage, int(fragment), int(round), begin, end, thread))
    return sorted(found, key=lambda one: one.begin)


def host_waits_in_ranges(events: Sequence[Event]) -> list[str]:
    """Describe every call that makes the host wait for the device inside one of our ranges.

    These are calls that wait by their names, copies of memory that is not page-locked, and calls
    that took a millisecond.
    """
    pageable = {
        event.get("args", {}).get("correlation")
        for event in complete(events)
        if event.get("cat") == "gpu_memcpy" and "Pageable" in event["name"]
    }
    by_thread: dict[Any, list[Range]] = {}
    for one in our_ranges(events):
        by_thread.setdefault(one.thread, []).append(one)
    found = []
    for event in complete(events):
        is_call = event.get("cat") in ("cuda_runtime", "cuda_driver")
        is_copy = is_call and event.get("args", {}).get("correlation", -1) in pageable
        is_long = is_call and float(event["dur"]) >= LONG_CALL_US
        if not (HOST_WAITS.match(event["name"]) or is_copy or is_long):
            continue
        ranges = by_thread.get((event.get("pid"), event.get("tid")), [])
        at = bisect.bisect_right([one.begin for one in ranges], float(event["ts"])) - 1
        if at >= 0 and float(event["ts"]) < ranges[at].end:
            one = ranges[at]
            found.append(
                f"{event['name']} in {one.stage} of fragment {one.fragment}, round {one.round}"
            )
    return found


def exchange_times(events: Iterable[Event]) -> dict[tuple[int, int], tuple[int, int]]:
    """Read from the ranges' names what each exchange took, by (fragment, round).

    Returns:
        Microseconds of the exchange, and of the training that stood still for it.
    """
    found = (_EXCHANGE.match(event["name"]) for event in complete(events))
    return {(int(m[1]), int(m[2])): (int(m[3]), int(m[4])) for m in found if m}


def exchanges(events: Sequence[Event]) -> Spans:
    """When something was communicated.

    On NCCL these are its kernels. Over gloo nothing of it is on the device: an exchange begins when
    its encode range ends and takes as long as the engine says.
    """
    kernels = [e for e in complete(events) if e.get("cat") == "kernel" and _NCCL.match(e["name"])]
    if kernels:
        return _merged(map(_interval, kernels))
    times = exchange_times(events)
    sent = {(one.fragment, one.round): one for one in our_ranges(events) if one.stage == "encode"}
    return _merged((sent[key].end, sent[key].end + times[key][0]) for key in sent.keys() & times)


def computation(events: Sequence[Event]) -> tuple[list[Interval], list[Interval]]:
    """When something was computed: by kernels; on a CPU, by operators outside our ranges.

    Returns:
        The intervals of what computes, and of what does not count.
    """
    all_events = complete(events)
    kernels = [e for e in all_events if e.get("cat") == "kernel" and not _NCCL.match(e["name"])]
    if kernels:
        return [_interval(e) for e in kernels], []
    operators = [_interval(e) for e in all_events if e["name"].startswith("aten::")]
    return operators, [(one.begin, one.end) for one in our_ranges(events)]


def hidden_fraction(events: Sequence[Event]) -> float:
    """Return the share of the exchanges for which no training stood still; NaN when there was none.

    The overlap says less of replicas that share a device: while the kernels of one replica run, the
    kernels of the other wait.
    """
    total = exposed = 0
    for took, stood_still in exchange_times(events).values():
        total, exposed = total + took, exposed + stood_still
    return 1.0 - exposed / total if total else float("nan")


def overlap_fraction(events: Sequence[Event]) -> float:
    """Return the share of communication that computation hides; NaN when there was none."""
    communicated = exchanges(events)
    total = length(communicated)
    if total == 0:
        return float("nan")
    computed, left_out = computation(events)
    either = intersection(communicated, _merged([*computed, *left_out]))
    return (either - intersection(communicated, _merged(left_out))) / total


def _interval(event: Event) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _merged(intervals: Iterable[Interval]) -> Spans:
    times = np.array(list(intervals), dtype=np.float64).reshape(-1, 2)
    return merge(times[:, 0], times[:, 1])
