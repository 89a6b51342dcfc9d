"""The figures of a storm, their violations and their table."""

from __future__ import annotations

import itertools
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.elastic import checks
from benchmarks.elastic.checks import Life, Resources, Round
from benchmarks.elastic.schedules import Fault
from benchmarks.support import common

if TYPE_CHECKING:
    from benchmarks.elastic.storms import Storm

# Seconds between two points at which the model looks.
_GRID_S = 0.05
_FIRST_RESEND_S = 0.2
Span = tuple[float, float]


@dataclass(frozen=True)
class Waits:
    """The waits of a group, in seconds.

    Attributes:
        round_s: An undisturbed round.
        suspect_after_s, busy_after_s: As in ``Elastic``.
        sent_bits: Bits that a replica sends in a round.
        notice_s: From a death until the others, which train, begin to change the group.
        report_s: The same from the beginning of an exchange with a dead member on.
        change_s: One change of the group, in which all members wait.
        start_s: From the start of a process until it asks to be let in.
    """

    round_s: float
    suspect_after_s: float
    busy_after_s: float
    sent_bits: float = 0.0
    notice_s: float = 1.0
    report_s: float = 0.5
    change_s: float = 0.2
    start_s: float = 1.0


@dataclass
class Prediction:
    """Spans of time in which the model says that something is so.

    Attributes:
        stands: The group waits.
        out: By replica: it is no member.
        away: By replica: it does not live, or cannot take steps.
    """

    stands: list[Span]
    out: list[tuple[int, Span]]
    away: list[tuple[int, Span]]

    def lost_s(self, num_replicas: int, begin: float, end: float) -> float:
        """Return the seconds of living replicas in which they take no inner steps."""
        return self._sums(num_replicas, begin, end)[1]

    def useful(self, num_replicas: int, end: float) -> float:
        """Return the part of the inner steps that living replicas take, of those they could."""
        living, lost = self._sums(num_replicas, 0.0, end)
        return 1.0 - lost / living if living else 0.0

    def _sums(self, num_replicas: int, begin: float, end: float) -> tuple[float, float]:
        living_s = lost_s = 0.0
        count = max(1, round((end - begin) / _GRID_S))
        width = (end - begin) / count
        for at in (begin + width * (i + 0.5) for i in range(count)):
            living = set(range(num_replicas)) - {n for n, (a, b) in self.away if a <= at < b}
            out = {n for n, (a, b) in self.out if a <= at < b}
            stands = any(a <= at < b for a, b in self.stands)
            living_s += width * len(living)
            lost_s += width * len(living if stands else living & out)
        return living_s, lost_s


def predict(schedule: Sequence[Fault], waits: Waits) -> Prediction:
    """Predict what a group does under a schedule.

    Members train on until the next exchange, half a round on average; then they wait for a member
    that gives no sign. A newcomer is let in at the end of the round in which it asks, and all wait
    for the change. Changes wait while the registry is away.
    """
    found = Prediction([], [], [])
    half = waits.round_s / 2
    outages = [(one.time, one.end) for one in schedule if one.fault == "registry"]

    def change(at: float) -> float:
        """Let the group stand for a change that is due; return when the change is over."""
        ready = next((b for a, b in outages if a <= at < b), at)
        found.stands.append((at, ready + waits.change_s))
        return ready + waits.change_s

    def enter(at: float) -> float:
        """Let a process that starts come in at a boundary; return when it trains."""
        ready = next((b for a, b in outages if a <= at < b), at)
        boundary = ready + waits.start_s + half
        found.stands.append((boundary, boundary + waits.change_s))
        return boundary + waits.change_s

    def wait_for(fault: Fault, longest_s: float, end: float) -> None:
        """Let the others wait until a member is there again, or given up."""
        exchange, given_up = fault.time + half, fault.time + longest_s
        found.away.append((fault.replica, (fault.time, fault.end)))
        if end <= given_up:
            found.stands.append((exchange, end))
        else:
            found.stands.append((exchange, given_up + waits.report_s))
            change(given_up + waits.report_s)
            found.out.append((fault.replica, (fault.time, enter(fault.end))))

    for fault in schedule:
        if fault.fault in ("kill", "leave"):
            returns = (f for f in schedule if f.fault == "return" and f.replica == fault.replica)
            back = next((f.time for f in returns if f.time > fault.time), float("inf"))
            noticed, last_step = fault.time + half, fault.time
            if fault.fault == "kill":
                exchange, noticed = noticed, fault.time + waits.notice_s
                if exchange < noticed:
                    noticed = exchange + waits.report_s
                    found.stands.append((exchange, noticed))
                # Nobody has heard of the steps since the last exchange.
                last_step -= half
            change(noticed)
            found.away.append((fault.replica, (fault.time, back)))
            found.out.append((fault.replica, (last_step, enter(back))))
        elif fault.fault in ("hold", "evaluation"):
            wait_for(fault, max(waits.busy_after_s, waits.suspect_after_s), fault.end)
        elif fault.fault == "stop":
            wait_for(fault, waits.suspect_after_s, fault.end)
        elif fault.fault == "cut":
            # TCP sends again after .2 s, and after twice the wait each time.
            waited = _FIRST_RESEND_S
            while fault.time + half + waited < fault.end:
                waited = 2 * waited + _FIRST_RESEND_S
            wait_for(fault, waits.suspect_after_s, fault.time + half + waited)
        elif fault.fault == "slow":
            sends_s = waits.sent_bits / (1e6 * fault.mbps)
            part = sends_s / (waits.round_s + sends_s)
            found.stands.append((fault.time, fault.time + part * fault.seconds))
    return found


# MiB by which a process may grow from the first quarter to the last, after a third of the storm.
_RSS_MIB = 24.0


def violations(storm: Storm) -> list[str]:
    """Return all that is wrong; nothing if the invariants hold."""
    lives = list(storm.lives.values())
    opened, wrong = checks.check_chain(storm.records)
    wrong += checks.check_views(lives, opened)
    wrong += checks.check_digests(lives)
    wrong += checks.check_ledger(storm.lives)[1]
    wrong += checks.check_flat("a replica", storm.samples, _RSS_MIB)
    if storm.metrics is not None:
        wrong += storm.metrics.wrong
        if not storm.metrics.num_scrapes:
            wrong.append("metrics: the registry has never answered")
    return storm.failures + wrong


class Figures:
    """Figures of a group in spans of time; times are ``time.monotonic()``."""

    def __init__(self, lives: Mapping[int, Life], step_s: float) -> None:
        self.lives, self._step_s = lives, step_s
        self.rounds = list(checks.rounds_of(lives).values())
        learned = checks.check_ledger(lives)[0]
        # Rounds take the steps of a process in order: its last ones may be lost.
        self._kept = sorted(
            at for one in lives.values() for at in one.steps[: learned[one.process]]
        )

    def living_s(self, begin: float, end: float) -> float:
        """Return the seconds in which replicas lived and could take steps, summed over them."""
        edges = self._edges(begin, end)
        return sum((b - a) * len(self.living((a + b) / 2)) for a, b in itertools.pairwise(edges))

    def kept_s(self, begin: float, end: float) -> float:
        """Return the inner steps of the span that committed rounds hold, times a step's seconds."""
        return self._step_s * sum(begin <= at < end for at in self._kept)

    def living(self, at: float) -> set[int]:
        """Return the processes that live and can take steps."""
        return {life.process for life in self.lives.values() if life.is_well(at)}

    def _edges(self, begin: float, end: float, more: Iterable[float] = ()) -> list[float]:
        edges = {begin, end, *more}
        for life in self.lives.values():
            edges.update((life.started, life.ended, *itertools.chain(*life.pauses)))
        return sorted(at for at in edges if begin <= at <= end)

    def taking_part(self, begin: float, end: float) -> tuple[float, float]:
        """Return the part of the living whose steps the next round holds: mean and worst."""
        edges = self._edges(begin, end, (one.at for one in self.rounds))
        spans: list[tuple[float, float]] = []
        rest = iter(self.rounds)
        coming = next(rest, None)
        for a, b in itertools.pairwise(edges):
            while coming is not None and coming.at <= a:
                coming = next(rest, None)
            living = self.living((a + b) / 2)
            if coming is not None and living:
                spans.append((b - a, len(living & coming.steps.keys()) / len(living)))
        whole = sum(width for width, _ in spans)
        mean = sum(width * part for width, part in spans) / whole if whole else 0.0
        return mean, min((part for _, part in spans), default=0.0)

    def way_back_s(self, at: float) -> float | None:
        """Return the seconds until a round holds steps of all the living, and of nobody else."""
        return next(
            (one.at - at for one in self.rounds if one.at > at and self._is_full(one)), None
        )

    def _is_full(self, one: Round) -> bool:
        return self.living(one.at) == one.steps.keys() and one.num_members == len(one.steps)

    def num_discarded(self) -> int:
        """Return the rounds that were sent and count for nobody, each of them once."""
        found: dict[int, int] = {}
        for life in self.lives.values():
            before = 0
            for one in life.applied:
                more = one.num_discarded - before
                found[one.round] = max(found.get(one.round, 0), more)
                before = one.num_discarded
        return sum(found.values())


def results_of(storm: Storm) -> dict[str, Any]:
    """Return the figures of a storm, with its violations."""
    settings, begin, end = storm.settings, storm.begin, storm.end
    lives = storm.lives.values()
    figures = Figures(storm.lives, settings.step_s)
    # An all-reduce in fp32: each element leaves a replica nearly twice.
    sent_bits = 2 * 32 * settings.num_elements * (1 - 1 / storm.num_replicas)
    waits = Waits(
        settings.sync_every * settings.step_s,
        settings.suspect_after_s,
        settings.busy_after_s,
        sent_bits,
    )
    prediction = predict(storm.schedule, waits)
    rows = []
    for fault, after in itertools.zip_longest(storm.schedule, storm.schedule[1:]):
        until = end if after is None else begin + after.time
        since = begin + fault.time
        ways = {figures.way_back_s(begin + edge) for edge in {fault.time, fault.end}}
        lost_s = figures.living_s(since, until) - figures.kept_s(since, until)
        expected = prediction.lost_s(storm.num_replicas, fault.time, until - begin)
        rows.append(
            {
                **vars(fault),
                "lost_s": round(lost_s, 2),
                "predicted_lost_s": round(expected, 2),
                "way_back_s": None if None in ways else round(max(filter(None, ways)), 2),
            }
        )
    gaps = [b - a for life in lives for a, b in itertools.pairwise(life.steps)]
    living_s = figures.living_s(begin, end)
    mean, worst = figures.taking_part(begin, end)
    ways_back = [row["way_back_s"] for row in rows]
    return {
        "seconds": round(end - begin, 1),
        "faults": dict(Counter(fault.fault for fault in storm.schedule)),
        "useful": round(figures.kept_s(begin, end) / living_s, 4) if living_s else 0.0,
        "predicted": round(prediction.useful(storm.num_replicas, end - begin), 4),
        "taking_part": {"mean": round(mean, 4), "worst": round(worst, 4)},
        "outer_steps_lost": len(checks.lost_rounds(lives)),
        "longest_way_back_s": None if None in ways_back else max(ways_back, default=0.0),
        "rounds": len(figures.rounds),
        "rounds_discarded": figures.num_discarded(),
        "views": len({one.view for life in lives for one in life.entered}),
        "processes": len(lives),
        "ends": dict(Counter(life.how for life in lives)),
        "scrapes": 0 if storm.metrics is None else storm.metrics.num_scrapes,
        "median_step_s": round(statistics.median(gaps), 4) if gaps else None,
        "load": [round(load, 1) for load in os.getloadavg()],
        "replica_that_stays": early_and_late(storm.samples),
        "violations": violations(storm),
        "log": rows,
    }


def print_results(report: common.Report, results: dict[str, Any]) -> None:
    faults = ", ".join(f"{count} x {kind}" for kind, count in sorted(results["faults"].items()))
    report.print(f"# {results['seconds']:.0f} s: {faults}")
    report.print(
        f"# {results['views']} views, {results['processes']} processes, {results['rounds']} rounds "
        f"that count, {results['rounds_discarded']} discarded; load {results['load'][0]}, "
        f"median of a step {results['median_step_s']} s"
    )
    report.print("# lost: seconds of living replicas without a step that counts, to the next line")
    report.print("# back: seconds until all living replicas take part")
    report.print(
        f"# {'time':>6} {'fault':<10} {'replica':>7} {'lasts':>6} {'lost':>7} model   back"
    )
    for row in results["log"]:
        back = "never" if row["way_back_s"] is None else f"{row['way_back_s']:6.2f}"
        report.print(
            f"  {row['time']:6.1f} {row['fault']:<10} {row['replica']:>7} {row['seconds']:6.1f} "
            f"{row['lost_s']:7.2f} {row['predicted_lost_s']:5.1f} {back:>6}"
        )
    if held := results["replica_that_stays"]:
        report.print(f"# a replica that stays, with {held['first']['num_members']} members:")
        for name, one in held.items():
            report.print(
                f"#   {name:>6}: {one['descriptors']} descriptors, {one['threads']} threads, "
                f"{one['rss_mib']:.0f} MiB"
            )
    part = results["taking_part"]
    report.print(f"# take part of those alive: mean {part['mean']:.3f}, worst {part['worst']:.3f}")
    report.print(f"# longest way back: {results['longest_way_back_s']} s")
    report.print(f"# scrapes of the metrics: {results['scrapes']}")
    report.print(f"# outer steps lost: {results['outer_steps_lost']}")
    report.print(
        f"# inner steps that count, of those that the living could take: {results['useful']:.3f} "
        f"(model {results['predicted']:.3f})"
    )
    for violation in results["violations"]:
        report.print(f"VIOLATED {violation}")
    report.print(f"# the invariants {'violated' if results['violations'] else 'hold'}")


def early_and_late(samples: Sequence[Resources]) -> dict[str, dict[str, Any]]:
    """Return what the steady replica held early and late, at the number of members seen most."""
    if not samples:
        return {}
    size = Counter(one.num_members for one in samples).most_common(1)[0][0]
    same = [one for one in samples if one.num_members == size]
    places = {"first": same[0], "middle": same[len(same) // 2], "last": same[-1]}
    return {name: vars(one) for name, one in places.items()}
