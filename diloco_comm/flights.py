"""Rounds under way: what was sent, what is due when, and what came back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .exchange import Header, Outcome, Pending
from .headers import Kind
from .memory import Reading
from .pending import Terms
from .wire import Layout

if TYPE_CHECKING:
    from .shared_norms import SharedReading


@dataclass
class Arrival:
    """What is needed of an agreed round to apply it.

    Attributes:
        terms: Payloads laid out as ``layout`` whose weighted sum is the mean.
        weight_sum: Of all replicas.
        outcome: None when the round comes from a saved state.
    """

    terms: Terms
    layout: Layout
    outer_lr: float
    gap: float
    weight_sum: float
    outcome: Outcome | None = None

    @classmethod
    def of(
        cls,
        terms: Terms,
        layout: Layout,
        headers: list[Header],
        outcome: Outcome | None = None,
    ) -> Arrival:
        """Take the shared numbers from the headers: the lowest replica's."""
        weight_sum = sum(header.weight for header in headers)
        return cls(terms, layout, headers[0].outer_lr, headers[0].gap, weight_sum, outcome)


@dataclass(eq=False)
class Flight:
    """One round of one part, from its send until it is applied or lost.

    Attributes:
        number: Of the round.
        apply_step: Inner step after which the result is due; -1 when that is at a send.
        own: This replica's payload, laid out as ``layout``; None after a resume that needs none.
        coefficient: With which the own payload went into this replica's outer parameters already.
        lr: Outer learning rate, without an inner one.
        reading: Of the norm, until it is looked at.
        is_local_kept: The local parameters still hold what was sent.
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
    pending: Pending | None = None
    arrival: Arrival | None = None

    def measured_norm(self) -> float:
        """Return the pseudo-gradient's norm, or NaN when it was not measured."""
        if self.reading is not None:
            self.norm, self.reading = self.reading.norm(), None
        return self.norm

    def offer(self) -> Arrival:
        """As ``wait``, but the verdict may be left to the device; see ``Pending.offer``."""
        if self.arrival is not None or self.pending is None:
            return self.wait()
        outcome = self.pending.offer()
        if outcome.verdict is None:
            return self.wait()
        return Arrival.of(outcome.terms, outcome.layout, outcome.headers, outcome)

    def wait(self) -> Arrival:
        """Wait for the vote; repeatable.

        Raises:
            SyncError: There is no result.
        """
        if self.arrival is None:
            assert self.pending is not None
            outcome = self.pending.wait()
            self.arrival = Arrival.of(outcome.terms, outcome.layout, outcome.headers, outcome)
        return self.arrival
