"""Invariants of elastic membership, checked from outside: each function returns the violations."""

from __future__ import annotations

import http.client
import math
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from benchmarks.elastic.ledger_replica import Applied
from diloco_comm.base.log import Log
from diloco_comm.elastic.registry import journal
from diloco_comm.group.records import NO_HASH, NO_RECORD, Record
from diloco_comm_tools.demo.crew import DONE, Entered

# Rounding errors of fp32 in the share of one process, times the number of members.
_ROUNDING = 0.05
# Of each end of a soak: a newcomer's transfer opens descriptors for some seconds.
_LEAST_SAMPLES = 5


@dataclass
class Life:
    """What one process has said of itself. Times are ``time.monotonic()``.

    Attributes:
        started, ended: When its life began and ended.
        pauses: Spans in which it could take no steps: it was paused or cut off.
        steps: When it began each of its inner steps.
        inner_step: The group's inner step then.
    """

    number: int
    process: int
    started: float = 0.0
    ended: float = math.inf
    pauses: list[tuple[float, float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    inner_step: int = 0
    entered: list[Entered] = field(default_factory=list)
    applied: list[Applied] = field(default_factory=list)
    how: str = ""
    outer_hash: str = ""

    def is_well(self, at: float) -> bool:
        """Whether the process lives, and can take steps."""
        return self.started <= at < self.ended and not any(a <= at < b for a, b in self.pauses)


def records_of(path: Path, run: str) -> Iterator[bytes]:
    """Yield the records of a run that a journal holds, from the oldest to the newest."""
    log = Log(path, journal.KIND, is_writable=False)
    try:
        yield from (record for name, record in journal.changes(log) if name == run)
    finally:
        log.release()


def check_chain(records: Sequence[bytes]) -> tuple[list[Record], list[str]]:
    """I3: the records are one chain, in which each one follows from the one before.

    Returns:
        The records, and the violations.
    """
    chain = [Record.from_bytes(content) for content in records]
    wrong: list[str] = []
    for before, record in zip([None, *chain], chain, strict=False):
        place = f"view {record.number}"
        parent, members = (NO_HASH, ()) if before is None else (before.hash, before.members)
        if record.number != (NO_RECORD if before is None else before.number) + 1:
            wrong.append(f"I3: {place} follows {before and before.number}")
        if record.parent != parent:
            wrong.append(f"I3: {place} does not name the record before it")
        if before is not None and record.run_id != before.run_id:
            wrong.append(f"I3: {place} is of another founding than the record before it")
        if before is not None and before.is_finished:
            wrong.append(f"I3: {place} follows the end of the run")
        left = {key.number for key in set(members) - set(record.members)}
        if set(record.left_out) != left - set(record.numbers):
            wrong.append(f"I3: {place} leaves out {record.left_out}, and {sorted(left)} have left")
        new = {key.number for key in set(record.members) - set(members)}
        if not new <= set(record.joined) <= set(record.numbers):
            wrong.append(f"I3: {place} lets in {record.joined}, and {sorted(new)} are new")
    return chain, wrong


def check_views(lives: Iterable[Life], chain: Sequence[Record]) -> list[str]:
    """Every view that a process has entered is a record of the chain, with the same members."""
    known = {record.number: record.numbers for record in chain}
    return [
        f"I3: process {life.process} was in view {one.view} of replicas {one.members}, and the "
        f"registry knows {known.get(one.view)}"
        for life in lives
        for one in life.entered
        if known.get(one.view) != one.members
    ]


@dataclass
class Round:
    """An outer step that counts: when the first replica applied it, and the steps that it holds.

    Attributes:
        num_members: Members of its view; ``members`` are their processes.
        steps: Inner steps by process; no whole numbers, as fp32 rounds.
    """

    at: float
    view: int
    num_members: int
    members: set[int]
    steps: dict[int, float]


def rounds_of(lives: Mapping[int, Life]) -> dict[int, Round]:
    """Return the rounds by number, in order, as the outer parameters after each round say."""
    views: dict[int, tuple[int, set[int]]] = {}
    for life in lives.values():
        for view in life.entered:
            views.setdefault(view.view, (len(view.members), set()))[1].add(life.process)
    first: dict[int, Applied] = {}
    for life in lives.values():
        for applied in life.applied:
            known = first.setdefault(applied.round, applied)
            first[applied.round] = min(known, applied, key=lambda one: one.at)
    found: dict[int, Round] = {}
    before: dict[int, float] = {}
    for number, one in sorted(first.items()):
        num_members, processes = views.get(one.view, (0, set()))
        ledger = dict(one.ledger)
        shares = {slot: ledger[slot] - before.get(slot, 0.0) for slot in ledger}
        steps = {slot: share * num_members for slot, share in shares.items() if share}
        found[number] = Round(one.at, one.view, num_members, processes, steps)
        before = ledger
    return found


def lost_rounds(lives: Iterable[Life]) -> list[int]:
    """Return the outer steps that replicas have taken differently, or that nobody tells of."""
    hashes: dict[int, set[str]] = {}
    for life in lives:
        for one in life.applied:
            hashes.setdefault(one.round, set()).add(one.outer_hash)
    return [n for n in range(max(hashes, default=-1) + 1) if len(hashes.get(n, ())) != 1]


def check_digests(lives: Iterable[Life]) -> list[str]:
    """I1, I2, I4: whoever applied a round has the same outer parameters after it."""
    wrong = []
    seen: dict[int, Applied] = {}
    for life in lives:
        rounds = [one.round for one in life.applied]
        if rounds != sorted(set(rounds)):
            wrong.append(f"I2: process {life.process} applied rounds out of order")
        for one in life.applied:
            first = seen.setdefault(one.round, one)
            if first.outer_hash != one.outer_hash:
                wrong.append(f"I1: after round {one.round} process {life.process} differs")
            if first.view != one.view:
                wrong.append(f"I2: round {one.round} counts in views {first.view} and {one.view}")
    missing = set(range(max(seen, default=-1) + 1)) - set(seen)
    if missing:
        wrong.append(f"I2: nobody told of rounds {sorted(missing)}")
    last = {life.outer_hash for life in lives if life.how == DONE}
    if len(last) > 1:
        wrong.append(f"I1: the replicas that ended together have {len(last)} different states")
    return wrong


def check_ledger(lives: Mapping[int, Life]) -> tuple[dict[int, int], list[str]]:
    """I5: each inner step is in one committed round at most, and in one if its process ends well.

    Args:
        lives: By process.

    Returns:
        The inner steps of each process that committed rounds hold, and the violations.
    """
    learned = dict.fromkeys(lives, 0)
    wrong: list[str] = []
    for number, one in rounds_of(lives).items():
        if not one.steps.keys() <= one.members:
            wrong.append(
                f"I2: round {number} of view {one.view} holds steps of processes "
                f"{sorted(one.steps)}, and its members are {sorted(one.members)}"
            )
        for process, steps in one.steps.items():
            if steps < 0 or abs(steps - round(steps)) > _ROUNDING:
                wrong.append(f"I5: round {number} holds {steps:.3f} steps of process {process}")
            learned[process] += round(steps)
    for process, life in lives.items():
        is_whole = life.how == DONE
        count = len(life.steps)
        if learned[process] > count or (is_whole and learned[process] != count):
            wrong.append(
                f"I5: process {process} ({life.how}) took {count} inner steps, and committed "
                f"rounds hold {learned[process]}"
            )
    return learned, wrong


@dataclass(frozen=True)
class Resources:
    """What a process holds at one moment."""

    num_members: int
    descriptors: int
    threads: int
    rss_mib: float


def resources(pid: int, num_members: int) -> Resources:
    """Look at a process.

    Raises:
        OSError: If it has ended.
    """
    place = Path("/proc") / str(pid)
    lines = (place / "status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    if "VmRSS" not in status:
        raise ProcessLookupError(f"process {pid} has ended, and its parent has not waited for it")
    rss_mib = int(status["VmRSS"].split()[0]) / 1024
    num_files = len(list((place / "fd").iterdir()))
    return Resources(num_members, num_files, int(status["Threads"]), round(rss_mib, 1))


def are_enough(samples: Sequence[Resources]) -> bool:
    """Whether ``check_flat`` can see growth in samples that all have as many members."""
    return (len(samples) - len(samples) // 3) // 4 >= _LEAST_SAMPLES


def check_flat(name: str, samples: Sequence[Resources], rss_mib: float) -> list[str]:
    """I7: descriptors, threads and memory do not grow, at equal numbers of members.

    Args:
        samples: Over time; the first third is warm-up.
        rss_mib: By how much the memory may grow after that.
    """
    wrong = []
    third = len(samples) // 3
    later = samples[third:]
    for size in {one.num_members for one in later}:
        same = [one for one in later if one.num_members == size]
        quarter = len(same) // 4
        if quarter < _LEAST_SAMPLES:
            continue
        for what, margin in (("descriptors", 4), ("threads", 2), ("rss_mib", rss_mib)):
            early = max(getattr(one, what) for one in same[:quarter])
            late = min(getattr(one, what) for one in same[-quarter:])
            if late > early + margin:
                wrong.append(f"I7: {what} of {name} grew from {early} to {late} ({size} members)")
    return wrong


class Metrics:
    """The metrics of a registry, which the parser of the Prometheus client must read.

    Attributes:
        num_scrapes: How often the metrics were read.
        wrong: A counter has fallen without a new ``_created``, or has no ``_created``.
    """

    def __init__(self, url: str) -> None:
        self.url, self.num_scrapes = url, 0
        self.wrong: list[str] = []
        # Value and time of creation by the metric and its labels.
        self._last: dict[str, tuple[float, float]] = {}

    def read(self) -> None:
        """Read all metrics once; nothing happens where no whole answer comes from the registry."""
        try:
            with urllib.request.urlopen(self.url, timeout=2.0) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            self.wrong.append(f"metrics: the registry answers with status {error.code}")
            return
        except (OSError, http.client.HTTPException):
            return
        self.take(content.decode("utf-8", "backslashreplace"))

    def take(self, text: str) -> None:
        self.num_scrapes += 1
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError as error:
            self.wrong.append(f"metrics: the parser refuses them: {error}")
            return
        for family in families:
            if family.type != "counter":
                continue
            values = {(one.name, str(one.labels)): one.value for one in family.samples}
            for (name, labels), value in values.items():
                if name.endswith("_total"):
                    self._judge(
                        name + labels, value, values.get((f"{family.name}_created", labels))
                    )

    def _judge(self, counter: str, value: float, created: float | None) -> None:
        if created is None:
            self.wrong.append(f"metrics: {counter} has no time of creation")
            return
        old, since = self._last.get(counter, (value, created))
        if created == since and value < old:
            self.wrong.append(f"metrics: {counter} fell from {old:g} to {value:g}")
        self._last[counter] = value, created
