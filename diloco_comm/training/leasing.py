"""How the replicas of an elastic group agree on the leases of the next view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..base.errors import ReplicaMismatch
from ..elastic.leases import Book, Held, Plan
from ..exchange.exchange import Exchange
from ..replica.workers import ReplicaWorkers
from ..rounds.agreement.handshake import gather_json
from ..rounds.synced import SyncedPart


class Leasing:
    """Keep the book of this replica's sampler over all views.

    Attributes:
        book: None while there is no sampler here.
        shape: What must be equal on all samplers, as JSON types; of the others before there is one.
        plan: Of the others, for a newcomer whose sampler is not there yet.
    """

    def __init__(self, workers: ReplicaWorkers | None) -> None:
        self._workers = workers
        self.book: Book | None = None
        self.shape: Any = None
        self.plan: Plan | None = None

    def change(self, exchange: Exchange, parts: Sequence[SyncedPart], before: int) -> None:
        """Agree on the next plan, when the members have met; every member calls this.

        Args:
            before: Inner step of this replica before the change; -1 for a newcomer.

        Raises:
            ReplicaMismatch: If samplers differ.
            SyncError: If the group fails.
        """
        agreed = exchange.agreed_step
        # Relative to the slowest replica; see ``RoundRunner.settle``.
        applied = before - agreed + min([part.last_sent for part in parts], default=agreed)
        own = self._own(before, applied, agreed)
        reports = gather_json(exchange, None if own is None else asdict(own))
        held = {
            replica: Held.from_json(report)
            for replica, report in zip(exchange.members, reports, strict=True)
            if report is not None
        }
        plan = None
        if self.book is not None:
            plan = self.book.next(held, exchange.members, applied)
        elif self.plan is not None:
            plan = Plan(exchange.members, self.plan.first, self.plan.again)
        self._take(exchange, plan)
        if self.book is not None:
            assert self.plan is not None
            self.book.turn(self.plan, held, before, agreed)

    def _own(self, before: int, applied: int, agreed: int) -> Held | None:
        """Return what this replica says; all its workers say the same."""
        own = None if self.book is None else self.book.held(before, applied, agreed)
        if self._workers is None or self.book is None or own is None:
            return own
        drawn = max(self._workers.gather(own.drawn))
        while self.book.drawn < drawn:
            self.book.draw()
        return self.book.held(before, applied, agreed)

    def _take(self, exchange: Exchange, plan: Plan | None) -> None:
        """Take the plan of the lowest replica that has a book; refuse others that differ."""
        own = None if plan is None else [self.shape, plan.first, list(plan.again)]
        views = gather_json(exchange, own if self.book is not None else None)
        known = [(r, v) for r, v in zip(exchange.members, views, strict=True) if v is not None]
        if not known:
            self.plan = plan
            return
        lowest, (shape, first, again) = known[0]
        for replica, other in known:
            if other != known[0][1]:
                raise ReplicaMismatch(
                    f"the ElasticSamplers of replicas {lowest} and {replica} differ: "
                    f"{known[0][1][:2]} and {other[:2]}; give all replicas the same arguments, and "
                    "the same saved state or none",
                    stage="view",
                )
        self.shape = shape
        self.plan = Plan(exchange.members, first, tuple(again))

    def begin(self, shape: Any, replica: int, members: tuple[int, ...], step: int) -> Book:
        """Open the book of a sampler.

        Raises:
            RuntimeError: If there is a sampler already.
            ReplicaMismatch: If the samplers of the others are not like this one.
        """
        if self.book is not None:
            raise RuntimeError("this DiLoCo has an ElasticSampler already: use that one")
        if self.plan is not None and self.shape is not None and self.shape != shape:
            raise ReplicaMismatch(
                f"the ElasticSampler of replica {replica} is {shape}, and those of the others are "
                f"{self.shape}: give all replicas the same arguments",
                stage="view",
            )
        self.shape = shape
        plan = Plan(members) if self.plan is None else self.plan
        self.book = Book(replica, shape["lost"], plan, step)
        return self.book
