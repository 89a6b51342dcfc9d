"""Read an Nsight Systems report that was exported to SQLite.

An export lacks tables without events, and columns differ between versions, so all names are looked
up. Times are in nanoseconds in the export, and in microseconds in the result.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .trace import (
    COMMUNICATION,
    COMPUTATION,
    OUR_RANGE,
    OURS,
    Phase,
    RankTrace,
    TraceError,
    inside,
    kind_of,
    merge,
    rank_of,
)

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
# Types of NVTX events: two of ranges, and the creation of a domain.
_PUSH_POP, _START_END, _DOMAIN = 59, 60, 75
# A global thread number holds the process in its upper bits.
_PROCESS_MASK = ~0xFFFFFF

Pair = tuple[int, int]


def read(path: Path) -> list[RankTrace]:
    """Return one trace for each process in the report.

    Raises:
        TraceError: If the file is no such export.
        OSError: If the file cannot be read.
    """
    with path.open("rb"):
        pass
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        report = _Report(path, database)
        return report.traces()
    except sqlite3.DatabaseError as error:
        raise TraceError(f"{path} is truncated or no SQLite file: {error}") from None
    finally:
        database.close()


class _Report:
    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self.database = path, database
        names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.tables = {name for (name,) in names}
        if "StringIds" not in self.tables:
            raise TraceError(
                f"{path} is no Nsight Systems export: it has no table StringIds; "
                "make one by 'nsys export --type sqlite'"
            )
        if not self.tables & {KERNELS, NVTX}:
            raise TraceError(f"{path} holds neither CUDA kernels nor NVTX ranges")

    def columns(self, table: str) -> set[str]:
        return {row[1] for row in self.database.execute(f"PRAGMA table_info({table})")}

    def traces(self) -> list[RankTrace]:
        ranges = self._our_ranges()
        launches = self._launches_of_ours(ranges)
        kernels = self._kernels(launches)
        processes = sorted({*kernels, *(thread & _PROCESS_MASK for thread, *_ in ranges)})
        if KERNELS in self.tables and "globalPid" not in self.columns(KERNELS):
            processes = [0]
        rank = rank_of(self.path) if len(processes) <= 1 else None
        return [
            self._trace(process, rank, kernels.get(process, {}), ranges)
            for process in processes or [0]
        ]

    def _trace(
        self,
        process: int,
        rank: int | None,
        kernels: dict[str, list[Pair]],
        ranges: list[tuple[int, int, int, str]],
    ) -> RankTrace:
        phases: dict[str, Phase] = {}
        for thread, begin, end, stage in ranges:
            if process in (0, thread & _PROCESS_MASK):
                phases.setdefault(stage, Phase()).add((end - begin) / 1e3)
        parts = {
            part: _intervals(kernels.get(part, [])) for part in ("ours", "inner", "computation")
        }
        return RankTrace(self.path, rank, "gpu", **parts, phases=phases)

    def _kernels(self, ours: set[Pair]) -> dict[int, dict[str, list[Pair]]]:
        """Return begin and end of kernels in ns, by process and kind."""
        found: dict[int, dict[str, list[Pair]]] = {}
        if KERNELS not in self.tables:
            return found
        columns = self.columns(KERNELS)
        name = "demangledName" if "demangledName" in columns else "shortName"
        process = "k.globalPid" if "globalPid" in columns else "0"
        rows = self.database.execute(
            f"SELECT k.start, k.end, k.correlationId, {process}, s.value FROM {KERNELS} k "
            f"LEFT JOIN StringIds s ON s.id = k.{name}"
        )
        for begin, end, correlation, pid, text in rows:
            kind = kind_of(text or "")
            if kind == COMMUNICATION:
                part = "ours" if {(pid, correlation), (0, correlation)} & ours else "inner"
            elif kind == COMPUTATION:
                part = "computation"
            else:
                continue
            found.setdefault(pid, {}).setdefault(part, []).append((begin, end))
        return found

    def _our_ranges(self) -> list[tuple[int, int, int, str]]:
        """Return (thread, begin, end, stage) of this package's ranges."""
        if NVTX not in self.tables:
            return []
        found = []
        domains = self._our_domains()
        for begin, end, thread, domain, text in self._nvtx((_PUSH_POP, _START_END)):
            match = OUR_RANGE.match(text or "")
            if match and end is not None and (domain in domains or OURS in text):
                found.append((thread or 0, begin, end, match[1]))
        return found

    def _our_domains(self) -> set[Any]:
        return {domain for *_, domain, text in self._nvtx((_DOMAIN,)) if text == OURS}

    def _nvtx(self, kinds: tuple[int, ...]) -> Iterator[Any]:
        columns = self.columns(NVTX)
        text = "n.text" if "text" in columns else "NULL"
        if "textId" in columns:
            text = f"COALESCE({text}, s.value)"
        join = "LEFT JOIN StringIds s ON s.id = n.textId" if "textId" in columns else ""
        domain = "n.domainId" if "domainId" in columns else "NULL"
        marks = ", ".join("?" * len(kinds))
        return self.database.execute(
            f"SELECT n.start, n.end, n.globalTid, {domain}, {text} FROM {NVTX} n {join} "
            f"WHERE n.eventType IN ({marks})",
            kinds,
        )

    def _launches_of_ours(self, ranges: list[tuple[int, int, int, str]]) -> set[Pair]:
        """Return (process, correlation) of the launches inside this package's ranges."""
        if not ranges or RUNTIME not in self.tables:
            return set()
        has_process = KERNELS in self.tables and "globalPid" in self.columns(KERNELS)
        found: set[Pair] = set()
        for thread in {thread for thread, *_ in ranges}:
            own = _intervals([(b, e) for t, b, e, _ in ranges if t == thread])
            merged = merge(*own)
            rows = self.database.execute(
                f"SELECT start, correlationId FROM {RUNTIME} WHERE globalTid = ?", (thread,)
            )
            begins, ids = np.array(rows.fetchall() or [(0, 0)], dtype=np.int64).T
            process = thread & _PROCESS_MASK if has_process else 0
            hits = ids[inside(begins / 1e3, merged)]
            found.update((process, int(correlation)) for correlation in hits)
        return found


def _intervals(pairs: list[Pair]) -> tuple[Any, Any]:
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2) / 1e3
    return values[:, 0], values[:, 1]
