"""Rounds under way: what was sent, what is due when, and what came back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..base.memory import Reading
from ..exchange.headers import Header, Kind
from ..exchange.membership.regroup import Repair
from ..exchange.work import ExchangeWork, Mean, Terms
from ..ops.wire import Layout

if TYPE_CHECKING:
    from .norms import SharedReading


@dataclass
class Arrival:
    """What is needed of an agreed round to apply it.

    Attributes:
        terms: Payloads laid out as ``layout`` whose weighted sum is the mean.
        weight_sum: Of all replicas.
        outcome: None when the round comes from a saved state.
        digest: Of the payloads as they were exchanged, the same on all replicas; None for a round
            in a saved state of an older version.
        reset: Replicas that were reset in it.
    """

    terms: Terms
    layout: Layout
    outer_lr: float
    gap: float
    weight_sum: float
    outcome: Mean | None = None
    digest: int | None = 0
    reset: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        terms: Terms,
        layout: Layout,
        headers: list[Header],
        digest: int,
        outcome: Mean | None = None,
    ) -> Arrival:
        """Take the shared numbers from the headers: the lowest replica's."""
        weight_sum = sum(header.weight for header in headers)
        lr, gap = headers[0].outer_lr, headers[0].gap
        return cls(terms, layout, lr, gap, weight_sum, outcome, digest)

    @classmethod
    def from_outcome(cls, outcome: Mean) -> Arrival:
        """Take what an exchange gave."""
        return cls.of(outcome.terms, outcome.layout, outcome.headers, outcome.digest, outcome)


@dataclass(eq=False)
class RoundInFlight:
    """One round of one part, from its send until it is applied or lost.

    Attributes:
        number: Of the round.
        apply_step: Inner step after which the result is due; -1 when that is at a send.
        own: This replica's payload, laid out as ``layout``; None after a resume that needs none.
        coefficient: With which the own payload went into this replica's outer parameters already.
        lr: Outer learning rate, without an inner one.
        reading: Of the norm, until it is looked at.
        is_local_kept: The local parameters still hold what was sent.
        is_reset: No wire carries what was to be sent: the own payload is zeros of weight 0.
        members: Replicas of the group that it was sent in, in rank order.
        pending: None when the round comes from a saved state.
    """

    number: int
    kind: Kind
    sent_step: int
    apply_step: int
    weight: float
    lr: float
    own: Tensor | None
    layout: Layout
    norm: float = float("nan")
    reading: Reading | SharedReading | None = None
    coefficient: float = 0.0
    is_local_kept: bool = False
    is_reset: bool = False
    members: tuple[int, ...] = ()
    work: ExchangeWork | None = None
    arrival: Arrival | None = None

    def measured_norm(self) -> float:
        """Return the pseudo-gradient's norm, or NaN when it was not measured."""
        if self.reading is not None:
            self.norm, self.reading = self.reading.norm(), None
        return self.norm

    def reset_replicas(self) -> tuple[int, ...]:
        """Return who was reset in this round, as far as headers have come."""
        if self.arrival is not None:
            return self.arrival.reset
        headers = [] if self.work is None else self.work.headers
        pairs = zip(self.members, headers, strict=False)
        return tuple(replica for replica, header in pairs if header.is_reset)

    def offer(self) -> Arrival:
        """As ``wait``, but the verdict may be left to the device; see ``ExchangeWork.offer``."""
        if self.arrival is not None or self.work is None:
            return self.wait()
        outcome = self.work.offer()
        if outcome.verdict is None:
            return self.wait()
        return Arrival.from_outcome(outcome)

    def wait(self) -> Arrival:
        """Wait for the vote; repeatable.

        Raises:
            SyncError: There is no result.
        """
        if self.arrival is None:
            assert self.work is not None
            outcome = self.work.wait()
            reset = self.reset_replicas()
            self.arrival = Arrival.from_outcome(outcome)
            self.arrival.reset = reset
        return self.arrival


def arrival_of(repair: Repair, flight: RoundInFlight | None) -> Arrival:
    """Return what came back in a round that is settled; ``flight`` is the round, if still known."""
    if flight is not None and flight.arrival is not None:
        return flight.arrival
    return Arrival.of(repair.terms, repair.layout, repair.headers, repair.digest)
