"""A model of the cost of faults: a schedule makes a group wait a few times, in known ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.elastic.schedules import Fault

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
