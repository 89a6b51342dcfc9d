"""One round of a fragment: the buffers that it holds, and its state, which has one owner here.

    started -> agreed    all votes are here, and all are good
            -> voted     failed after the own vote: peers with all votes may apply the round
            -> rejected  failed by a bad vote: nobody applies the round
            -> failed    failed before the own vote: nobody applies the round
    agreed, voted -> applied

A round holds its payloads while it is started, voted or agreed. What a voted round becomes is
decided at the next change of the group (``membership.termination``): it is applied, or forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from .. import _C
from ..base.errors import SyncError
from ..base.memory import Payload
from ..ops.wire import Layout
from .headers import Header, error_from, from_native
from .waiting import Awaited

# Pairs of a payload, uint8, and its coefficient: their sum is the weighted mean.
Terms = list[tuple[Tensor, float]]
RoundState = Literal["started", "agreed", "voted", "rejected", "failed", "applied"]

# Of a round that is not applied everywhere, as the replicas say it when the group changes.
State = Literal["voted", "agreed", "rejected", "applied"]

_NEXT: Mapping[RoundState, Sequence[RoundState]] = {
    "started": ("agreed", "voted", "rejected", "failed"),
    "agreed": ("applied",),
    "voted": ("applied",),
}


@dataclass(frozen=True)
class Standing:
    """How far a replica is with one round, and the epoch in which the round was sent."""

    state: State
    epoch: int


class Job(Awaited, Protocol):
    """A started exchange: a job of the engine (``_C.Job``), or one on streams (``nccl.jobs``).

    Attributes:
        failure: Why the exchange failed; None before its end, and after a good one.
        standing: Of a failed exchange, how far its vote was: "none", "voted" or "rejected".
        headers: Of all ranks, in rank order; empty until they have been exchanged.
        weights: Normalised, in rank order.
        digest: Of the payloads, the same on all replicas.
        num_bad_encoded: Own elements that no wire carries; None while that is not known.
    """

    @property
    def is_done(self) -> bool: ...
    @property
    def failure(self) -> _C.Failure | None: ...
    @property
    def standing(self) -> str: ...
    @property
    def headers(self) -> list[_C.Header]: ...
    @property
    def weights(self) -> list[float]: ...
    @property
    def digest(self) -> int: ...
    @property
    def num_bad_encoded(self) -> int | None: ...
    @property
    def seconds(self) -> dict[str, float]: ...
    @property
    def encode_seconds(self) -> float: ...
    @property
    def counters(self) -> dict[str, int]: ...

    def wait_landed(self, runs: int, seconds: float) -> int:
        """Wait until more than ``runs`` runs of the result are here; return how many are."""
        ...

    def block_caller(self) -> None:
        """Make the caller's stream wait for what the exchange does on a device."""
        ...


@dataclass(eq=False)
class Round:
    """One exchange of a fragment, from its start until it is applied or dropped.

    Attributes:
        layout, mean_layout: Of the own payload, and of those of the mean; see ``ExchangeBuffers``.
        num_phases: Likewise; 0 of a saved round.
        own: The own encoded values.
        result: The other payloads in the order of ranks, or the mean; None with one rank, and in a
            saved round.
        terms: The mean, laid out as ``mean_layout``, once the round is agreed or voted.
        headers: Of all ranks, as soon as the round has them for good.
        rank: In the group of ``epoch``.
        job: The exchange; None of a saved round, and of one that is held before it is sent.
        error: Of a round that is voted, rejected or failed.
    """

    header: Header
    layout: Layout
    mean_layout: Layout
    num_phases: int
    own: Payload
    result: Payload | None
    state: RoundState = "started"
    terms: Terms = field(default_factory=list)
    epoch: int = 0
    headers: list[Header] = field(default_factory=list)
    digest: int = 0
    rank: int = 0
    job: Job | None = None
    error: SyncError | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Fragment and number."""
        return self.header.fragment, self.header.round

    @property
    def is_done(self) -> bool:
        """Whether the exchange has ended, well or not."""
        return self.state != "started" or (self.job is not None and self.job.is_done)

    def advance(self, state: RoundState) -> None:
        assert state in _NEXT.get(self.state, ()), f"a round that is {self.state} cannot be {state}"
        self.state = state

    def conclude(self) -> RoundState:
        """Keep what the exchange, which is done, has left; return the state that follows.

        An agreed or voted round keeps its terms, a voted, rejected or failed one its error.
        """
        job = self.job
        assert job is not None
        job.block_caller()
        if job.failure is not None:
            self.error = error_from(job.failure, self.header, job.headers)
            if job.standing != "voted":
                return "rejected" if job.standing == "rejected" else "failed"
        self.terms = self.combine(job.weights)
        self.headers = [from_native(header) for header in job.headers]
        self.digest = job.digest
        return "agreed" if self.error is None else "voted"

    @property
    def received(self) -> list[Tensor]:
        """The payloads that the exchange brings, in rank order."""
        assert self.result is not None
        return list(self.result.tensor.split(self.mean_layout.payload_bytes))

    def combine(self, weights: Sequence[float]) -> Terms:
        """Return the terms of the mean, of payloads that need not be complete yet."""
        own = self.own.tensor
        if self.result is None:
            return [(own, 1.0)]
        if self.num_phases == 2:
            return [(self.result.tensor, 1.0)]
        payloads = [self.result.tensor] if len(weights) == 2 else self.received
        payloads.insert(self.rank, own)
        return list(zip(payloads, weights, strict=True))
