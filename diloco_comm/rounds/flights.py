"""Rounds in flight: what was sent, when its mean is due, and the mean once it has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..exchange.membership.regroup import Repair
from ..exchange.round import Kind, Mean, Round
from ..ops.wire import Layout


class NormReading(Protocol):
    """A norm that was measured on a device, or over the workers of the replica."""

    @property
    def is_there(self) -> bool:
        """Whether ``norm`` returns without a wait for other workers."""
        ...

    def norm(self) -> float: ...


@dataclass(eq=False)
class RoundInFlight:
    """One round of one part, from its send until it is applied or lost.

    The headers of its mean carry the numbers that all replicas share: the lowest replica's outer
    learning rate and gap, and all weights.

    Attributes:
        number: Number of the round.
        apply_step: Inner step after which the result is due; -1 when that is at a send.
        own: This replica's payload, laid out as ``layout``; None after a resume that needs none.
        coefficient: With which the own payload went into this replica's outer parameters already.
        lr: Outer learning rate, without an inner one.
        reading: The norm while it is being measured; see ``measured_norm``.
        is_local_kept: The local parameters still hold what was sent.
        is_reset: No wire carries what was to be sent: the own payload is zeros of weight 0.
        members: Replicas of the group that the round was sent in, in rank order.
        work: The exchange; None when the round comes from a saved state.
        mean: The result once all replicas have agreed on the round; one from a saved state has a
            single header, with the sum of the weights.
        has_digest: False for a round in a saved state of an older version.
        saved_resets: Replicas that were reset in a round from a saved state.
        exposed_s: Seconds that the training loop waited for the result, doing nothing else.
        outer_step_s: Seconds of the outer step.
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
    reading: NormReading | None = None
    coefficient: float = 0.0
    is_local_kept: bool = False
    is_reset: bool = False
    members: tuple[int, ...] = ()
    work: Round | None = None
    mean: Mean | None = None
    has_digest: bool = True
    saved_resets: tuple[int, ...] = ()
    exposed_s: float = 0.0
    outer_step_s: float = 0.0

    @property
    def senders(self) -> tuple[int, ...]:
        """The replicas whose payloads are the terms of the mean, in order; none if owners made it.

        For a round that has arrived.
        """
        assert self.mean is not None
        return self.members if len(self.members) == len(self.mean.terms) else ()

    def measured_norm(self) -> float:
        """Return the pseudo-gradient's norm, or NaN when it was not measured."""
        if self.reading is not None:
            self.norm, self.reading = self.reading.norm(), None
        return self.norm

    def reset_replicas(self) -> tuple[int, ...]:
        """Return the replicas that were reset in this round, as far as headers have come."""
        if self.work is None:
            return self.saved_resets
        headers = self.work.headers if self.mean is None else self.mean.headers
        pairs = zip(self.members, headers, strict=False)
        return tuple(replica for replica, header in pairs if header.is_reset)

    def own_after(self, inner_step: int) -> Tensor | None:
        """Return the own payload if the local values have changed since it was sent."""
        return None if self.is_reset or self.sent_step == inner_step else self.own

    def offer(self) -> Mean:
        """As ``wait``, but the verdict may be left to the device; see ``Round.offer``."""
        if self.mean is None and self.work is not None:
            offered = self.work.offer()
            if offered.verdict is not None:
                return offered
        return self.wait()

    def wait(self) -> Mean:
        """Wait for the vote; repeatable.

        Raises:
            SyncError: There is no result.
        """
        if self.mean is None:
            assert self.work is not None
            self.mean = self.work.wait()
        return self.mean


def weight_sum(mean: Mean) -> float:
    """Return the sum of all replicas' weights in a round."""
    return sum(header.weight for header in mean.headers)


def mean_of(repair: Repair, flight: RoundInFlight | None) -> Mean:
    """Return the mean of a round that counts and that this replica has not applied.

    Args:
        flight: The round, if this replica still has it in flight.
    """
    if flight is not None and flight.mean is not None:
        return flight.mean
    return Mean(
        terms=repair.terms,
        layout=repair.layout,
        headers=repair.headers,
        weights=[],
        seconds={},
        sent_bytes=0,
        received_bytes=0,
        digest=repair.digest,
    )
