"""Reduce a Kineto trace to the intervals that the report needs."""

from __future__ import annotations

import gzip
import json
import zlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from .trace import (
    COMMUNICATION,
    COMPUTATION,
    OUR_RANGE,
    OURS,
    Array,
    Phase,
    RankTrace,
    TraceError,
    inside,
    kind_of,
    merge,
    rank_of,
)

STEP = "ProfilerStep"
# Names of torch.distributed's events on the processor; gloo has no other events.
_CPU_COMMUNICATION = ("gloo:", "c10d::", "record_param_comms")


class Rows:
    """Rows of numbers, one row for each event, without a Python object for each."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._values = array("d")
        # ``add`` is called for every event, so it is a C function.
        self.add = self._values.extend

    def columns(self) -> Any:
        """Return the columns as views of the rows; no row may be added afterwards."""
        values = np.frombuffer(self._values) if self._values else np.empty(0)
        return values.reshape(-1, self.width).T


class KinetoTrace:
    """The numbers of a Kineto trace that the report needs, collected while the file is read.

    The choice of kernels is that of Holistic Trace Analysis: with two or more profiled steps, only
    kernels launched before the last step begins. Times with fractions of a microsecond are rounded
    inwards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rank: int | None = None
        self.step_names: set[str] = set()
        self.phases: dict[str, Phase] = {}
        self._has_fractions = False
        # begin, end, correlation, stream, kind, 1 if its process group is one of this package
        self._gpu = Rows(6)
        # begin, correlation, thread
        self._launches = Rows(3)
        # begin, end, thread
        self._ranges = Rows(3)
        self._exchanges = Rows(2)
        self._cpu = Rows(2)
        self._cpu_communication = Rows(2)
        self._steps = array("d")
        self._threads: dict[tuple[Any, Any], int] = {}
        # The begin of the encoding, by fragment and round, until the exchange is recorded.
        self._sent: dict[tuple[str, str], float] = {}

    @classmethod
    def read(cls, path: Path) -> KinetoTrace:
        """Read a file of JSON, or of JSON packed by gzip.

        Raises:
            TraceError: If the file is empty, foreign or truncated.
            OSError: If the file cannot be read.
        """
        trace, text = cls(path), _text_of(path)
        try:
            content = json.loads(text, object_hook=trace._take)
            rest = content.get("traceEvents")
            if not isinstance(rest, list):
                raise TraceError(f"{path} is no Kineto trace: it has no traceEvents")
            for event in rest:
                if isinstance(event, dict):
                    trace._add(event)
        except TraceError:
            raise
        except json.JSONDecodeError:
            if '"traceEvents"' not in text:
                raise TraceError(f"{path} is no Kineto trace: it has no traceEvents") from None
            raise TraceError(f"{path} is truncated: its events do not end") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"{path} has an event that is none of Kineto's: {error}") from None
        info = content.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        trace.rank = rank if isinstance(rank, int) else rank_of(path)
        return trace

    def _take(self, found: dict[str, Any]) -> dict[str, Any] | None:
        """Serve as the JSON parser's hook: record an event and return None in its place.

        Any other object is returned as it is.
        """
        if not {"ph", "pid"} <= found.keys():
            return found
        self._add(found)
        return None

    def _add(self, found: dict[str, Any]) -> None:
        begin, us, category = found.get("ts"), found.get("dur"), found.get("cat")
        if type(begin) is not int:
            # As in Holistic Trace Analysis, a missing time makes all times floating-point.
            self._has_fractions = True
        if us is None or category is None or begin is None or category == "Trace":
            return
        args, name = found.get("args") or {}, str(found.get("name"))
        begin, end = float(begin), float(begin) + float(us)
        stream, correlation = _integer(args.get("stream")), _integer(args.get("correlation"))
        if STEP in name:
            self.step_names.add(name)
        is_sync = name in ("Event Sync", "Context Sync")
        if stream != -1:
            ours = OURS in str(args.get("Process Group Description", ""))
            self._gpu.add((begin, end, correlation, stream, kind_of(name), ours))
        if not is_sync and not (stream >= 0 and correlation >= 0):
            self._add_cpu(found, category, name, begin, end, correlation)

    def _add_cpu(
        self, event: dict[str, Any], category: str, name: str, begin: float, end: float, corr: int
    ) -> None:
        if STEP in name:
            self._steps.append(begin)
        thread = (event.get("pid"), event.get("tid"))
        if corr != -1:
            self._launches.add((begin, corr, self._threads.setdefault(thread, len(self._threads))))
        elif name.startswith(_CPU_COMMUNICATION):
            self._cpu_communication.add((begin, end))
        elif category == "cpu_op":
            self._cpu.add((begin, end))
        elif category == "user_annotation" and (found := OUR_RANGE.match(name)):
            idx = self._threads.setdefault(thread, len(self._threads))
            self._ranges.add((begin, end, idx))
            self._add_ours(found[1], (found[2], found[3]), begin, end, found[4])

    def _add_ours(
        self, stage: str, key: tuple[str, str], begin: float, end: float, took_us: str | None
    ) -> None:
        """Note a stage of this package; an exchange is recorded when the wait for it has ended.

        The exchange begins when its encoding begins, and lasts as long as the engine measured, at
        most until the end of the wait.
        """
        if stage == "encode":
            self._sent[key] = begin
        if stage == "exchange" and took_us is not None:
            sent = self._sent.pop(key, begin - float(took_us))
            self._exchanges.add((sent, min(sent + float(took_us), begin)))
            self.phases.setdefault(stage, Phase()).add(float(took_us))
        else:
            self.phases.setdefault(stage, Phase()).add(end - begin)

    def finish(self, num_steps: int) -> RankTrace:
        """Filter the events, round the times, and return the intervals.

        Args:
            num_steps: Number of different profiled steps in the traces of all ranks.
        """
        begin, end, correlation, stream, kind, ours = self._gpu.columns()
        if not len(begin):
            return self._finish_cpu()
        if self._has_fractions:
            begin, end = np.ceil(begin), np.floor(end)
        is_ours = ours.astype(bool) | self._is_launched_by_us(correlation)
        if num_steps > 1:
            kept = self._is_profiled(begin, correlation, stream)
            begin, end, kind, is_ours = begin[kept], end[kept], kind[kept], is_ours[kept]
        communication = kind == COMMUNICATION
        pick = [communication & is_ours, communication & ~is_ours, kind == COMPUTATION]
        mine, inner, computation = ((begin[mask], end[mask]) for mask in pick)
        return self._trace("gpu", mine, inner, computation)

    def _finish_cpu(self) -> RankTrace:
        kinds = (self._exchanges, self._cpu_communication, self._cpu)
        ours, inner, computation = (tuple(own.columns()) for own in kinds)
        return self._trace("cpu", ours, inner, computation)

    def _trace(self, device: str, ours: Any, inner: Any, computation: Any) -> RankTrace:
        begin, end = self._exchanges.columns()
        exchanges = (begin, end)
        return RankTrace(
            self.path, self.rank, device, ours, inner, computation, exchanges, self.phases
        )

    def _is_profiled(self, begin: Array, correlation: Any, stream: Any) -> Any:
        steps = np.array(self._steps)
        launched, ids, _ = self._launches.columns()
        if self._has_fractions:
            steps, launched = np.ceil(steps), np.ceil(launched)
        if not len(steps):
            return np.zeros(len(begin), dtype=bool)
        last = steps.max()
        is_kernel = (stream >= 0) & (correlation >= 0)
        return np.where(is_kernel, np.isin(correlation, ids[launched < last]), begin < last)

    def _is_launched_by_us(self, correlation: Any) -> Any:
        """Whether a kernel was launched inside a range of this package, on the range's thread."""
        begin, end, threads = self._ranges.columns()
        launched, ids, launching = self._launches.columns()
        found = [np.empty(0, dtype=np.int64)]
        for thread in np.unique(threads):
            own, at = threads == thread, launching == thread
            merged = merge(begin[own], end[own])
            found.append(ids[at][inside(launched[at], merged)])
        return np.isin(correlation, np.concatenate(found))


def _text_of(path: Path) -> str:
    """Return the text of a file, unpacked, which must begin as an object of JSON."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            text = (gzip.open(file) if is_gzip else file).read().decode(errors="replace")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{path} is truncated or no gzip file: {error}") from None
    if not text:
        raise TraceError(f"{path} is empty")
    if text.lstrip()[:1] not in ("{", ""):
        raise TraceError(f"{path} is no Kineto trace: it is not a JSON object")
    return text


def _integer(value: Any) -> int:
    """Return the number of a stream or a launch; -1 if the event has none."""
    try:
        return -1 if value is None else int(value)
    except ValueError:
        return -1
