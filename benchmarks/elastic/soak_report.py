"""What a soak has shown: figures, violations and their table."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.elastic import checks
from benchmarks.elastic.checks import Life, Resources
from benchmarks.support import common

# MiB by which a process may grow from the first quarter to the last, after a third of the soak.
_RSS_MIB = 24.0


class Event(Protocol):
    """See ``soak.Event``."""

    at: float
    kind: str
    settled_s: float


class Soak(Protocol):
    """See ``soak.Soak``."""

    lives: dict[int, Life]
    records: list[bytes]
    samples: list[Resources]
    failures: list[str]
    began: float

    @property
    def events(self) -> Sequence[Event]: ...

    @property
    def num_rounds(self) -> int: ...


def violations(soak: Soak) -> list[str]:
    """Return all that is wrong; nothing if the invariants hold."""
    lives = list(soak.lives.values())
    chain, wrong = checks.check_chain(soak.records)
    wrong += checks.check_views(lives, chain)
    wrong += checks.check_digests(lives)
    wrong += checks.check_ledger(soak.lives)[1]
    wrong += checks.check_flat("a replica", soak.samples, _RSS_MIB)
    return soak.failures + wrong


def results_of(soak: Soak) -> dict[str, Any]:
    """Return the figures of a soak, with its violations."""
    learned, _ = checks.check_ledger(soak.lives)
    lives = soak.lives.values()
    step_s = statistics.median(gap for life in lives for gap in life.step_s)
    seconds = sum(life.seconds for life in lives)
    stalls: dict[str, list[float]] = {}
    for event in soak.events:
        stalls.setdefault(event.kind, []).append(stall_s(soak, event))
    views = {one.view for life in lives for one in life.entered}
    return {
        "seconds": round(time.monotonic() - soak.began, 1),
        "events": dict(Counter(event.kind for event in soak.events)),
        "views": len(views),
        "records": len(soak.records),
        "processes": len(soak.lives),
        "rounds": soak.num_rounds,
        "inner_steps": {"taken": sum(life.count for life in lives), "kept": sum(learned.values())},
        "goodput": round(sum(learned.values()) * step_s / seconds, 4),
        "stall_s": {
            kind: {"median": round(statistics.median(found), 2), "worst": round(max(found), 2)}
            for kind, found in sorted(stalls.items())
        },
        "replica_that_stays": early_and_late(soak.samples),
        "violations": violations(soak),
        "log": [vars(event) for event in soak.events],
    }


def stall_s(soak: Soak, event: Event) -> float:
    """Return the longest time without an outer step of any replica while an event took effect."""
    begin = soak.began + event.at
    end = begin + event.settled_s
    firsts: dict[int, float] = {}
    for life in soak.lives.values():
        for one in life.applied:
            firsts[one.round] = min(one.at, firsts.get(one.round, one.at))
    times = sorted(firsts.values())
    inside = [at for at in times if begin < at <= end]
    before = max((at for at in times if at <= begin), default=begin)
    after = min((at for at in times if at > end), default=end)
    return max(b - a for a, b in itertools.pairwise([before, *inside, after]))


def print_results(report: common.Report, results: dict[str, Any]) -> None:
    steps = results["inner_steps"]
    events = ", ".join(f"{count} x {kind}" for kind, count in sorted(results["events"].items()))
    report.print(f"# {results['seconds']:.0f} s: {events}")
    report.print(
        f"# {results['views']} views, {results['processes']} processes, {results['rounds']} rounds"
    )
    lost = steps["taken"] - steps["kept"]
    report.print(f"# inner steps: {steps['taken']} taken, {lost} of them in no committed round")
    report.print(f"# goodput {results['goodput']:.3f}")
    report.print("#")
    report.print(
        f"# {'event':>10} {'median':>10} {'worst':>10}   longest time without an outer step, s"
    )
    for kind, found in results["stall_s"].items():
        report.print(f"  {kind:>10} {found['median']:>10.2f} {found['worst']:>10.2f}")
    if held := results["replica_that_stays"]:
        report.print(f"# a replica that stays, with {held['first']['num_members']} members:")
        for name, one in held.items():
            report.print(
                f"#   {name:>6}: {one['descriptors']} descriptors, {one['threads']} threads, "
                f"{one['rss_mib']:.0f} MiB"
            )
    for violation in results["violations"]:
        report.print(f"VIOLATED {violation}")
    verdict = "violated" if results["violations"] else "hold"
    report.print(f"# the invariants {verdict}")


def early_and_late(samples: Sequence[Resources]) -> dict[str, dict[str, Any]]:
    """Return what the steady replica held early and late, at the number of members seen most."""
    if not samples:
        return {}
    size = Counter(one.num_members for one in samples).most_common(1)[0][0]
    same = [one for one in samples if one.num_members == size]
    places = {"first": same[0], "middle": same[len(same) // 2], "last": same[-1]}
    return {name: vars(one) for name, one in places.items()}
