"""``Leasing``: the replicas of an elastic group agree on the leases of the next view."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from ..base.errors import ReplicaMismatch
from ..elastic.leases import FIRST_PLAN, NO_PLAN, Account, Book, Held, Plan, known_of
from ..exchange.exchange import Exchange
from ..replica.workers import ReplicaWorkers
from ..rounds.handshake import gather_json
from ..rounds.part import SyncedPart


class Leasing:
    """Keeps this replica's book of leases over all views; see ``elastic.leases``.

    Attributes:
        book: The book of this replica's sampler; None before there is a sampler.
        shape: The arguments that must be equal on all samplers, as JSON types; before there is a
            sampler here, the arguments of the other replicas' samplers.
        account: The account with which a later sampler here begins; None while no other replica has
            a sampler either.
    """

    def __init__(self, workers: ReplicaWorkers | None) -> None:
        self._workers = workers
        self.book: Book | None = None
        self.shape: Any = None
        self.account: Account | None = None

    @property
    def _present(self) -> Account | None:
        return self.account if self.book is None else self.book.account

    def set_back(self, steps: int) -> None:
        """Note that the inner step of this replica has become lower by so many steps."""
        if self.book is not None:
            self.book.set_back(steps)

    def change(
        self, exchange: Exchange, parts: Sequence[SyncedPart], view: int, beside: Any
    ) -> list[Any]:
        """Agree on the plan of the next view; a collective call of its members.

        After an error this replica has its present account, and perhaps a prepared one. The next
        change finds out which of the two counts.

        Args:
            view: Number of the next view.
            beside: A further JSON value of this replica.

        Returns:
            The values ``beside`` of all members, in rank order.

        Raises:
            ReplicaMismatch: If samplers differ.
            SyncError: If the group fails.
        """
        step = exchange.agreed_step
        sent = [part.last_sent for part in parts]
        self._agree_in_replica()
        with self.all_workers():
            plan, held, others, has_books = self._prepare(exchange, step, sent, view, beside)
        with self.all_workers():
            found = self._agreed_plan(exchange, plan) if has_books else None
        if found is not None:
            self.shape, plan = found
        if self.book is not None:
            self.book.go_on(view)
        elif plan is not None:
            self.account = Account(view, plan, step, known_of(held, exchange.members))
        return others

    def all_workers(self) -> AbstractContextManager[None]:
        """Return a context in which an error of one worker of this replica is raised on all."""
        return nullcontext() if self._workers is None else self._workers.all_workers()

    def _agree_in_replica(self) -> None:
        """Bring all workers of this replica to the newest account, and to the most leases drawn."""
        if self._workers is None:
            return
        own = self._present
        counts = [NO_PLAN, 0] if own is None else [own.view, own.drawn]
        view, drawn = max(self._workers.gather(counts))
        if self.book is not None:
            self.book.go_on(view)
            while self.book.account.drawn < drawn:
                self.book.draw()

    def _prepare(
        self, exchange: Exchange, step: int, sent: Sequence[int], view: int, beside: Any
    ) -> tuple[Plan | None, dict[int, Held], list[Any], bool]:
        """Exchange reports with all members, and prepare the next account.

        Returns:
            The plan of the next view as this replica computes it, or None; the reports by replica;
            all members' ``beside``; and whether any member has a book.
        """
        own = NO_PLAN if self._present is None else self._present.view
        holds = {} if self.book is None else self.book.held(step, sent)
        all_held = {number: asdict(one) for number, one in holds.items()}
        told = gather_json(exchange, [own, all_held, self.book is not None, beside])
        reports = {
            member: tuple(each[:2]) for member, each in zip(exchange.members, told, strict=True)
        }
        others, has_books = [each[3] for each in told], any(each[2] for each in told)
        # If a member has gone on with an account, all members had prepared it: take the newest.
        newest = max(number for number, _ in reports.values())
        held = {
            replica: Held.from_json(all_held[str(newest)])
            for replica, (_, all_held) in reports.items()
            if str(newest) in all_held
        }
        if self.book is not None:
            self.book.go_on(newest)
            return self.book.prepare(view, held, exchange.members, step), held, others, has_books
        if self.account is None:
            return None, held, others, has_books
        plan = self.account.plan
        return Plan(exchange.members, plan.first, plan.again), held, others, has_books

    def _agreed_plan(self, exchange: Exchange, plan: Plan | None) -> tuple[Any, Plan] | None:
        """Compare shape and plan of the replicas that have a book; return them, or None if none."""
        own = None if plan is None else [self.shape, plan.first, list(plan.again)]
        views = gather_json(exchange, own if self.book is not None else None)
        known = [(r, v) for r, v in zip(exchange.members, views, strict=True) if v is not None]
        if not known:
            return None
        lowest, (shape, first, again) = known[0]
        for replica, other in known:
            if other != known[0][1]:
                raise ReplicaMismatch(
                    f"the ElasticSamplers of replicas {lowest} and {replica} differ: "
                    f"{_words(known[0][1])} and {_words(other)}; give all replicas the same "
                    "arguments, and the same saved state or none",
                    stage="view",
                )
        return shape, Plan(exchange.members, first, tuple(again))

    def begin(self, shape: Any, replica: int, members: tuple[int, ...], step: int) -> Book:
        """Return a new book for this replica's sampler.

        Args:
            shape: The arguments that must be equal on all samplers, as JSON types.
            replica, members: Numbers of this replica, and of the members of the present view.
            step: The present inner step.

        Raises:
            RuntimeError: If there is a sampler already.
            ReplicaMismatch: If the samplers of the others have other arguments.
        """
        if self.book is not None:
            raise RuntimeError("this DiLoCo has an ElasticSampler already: use that one")
        if self.account is not None and self.shape is not None and self.shape != shape:
            raise ReplicaMismatch(
                f"the ElasticSampler of replica {replica} is {shape}, and those of the others are "
                f"{self.shape}: give all replicas the same arguments",
                stage="view",
            )
        self.shape = shape
        account = self.account or Account(FIRST_PLAN, Plan(members), step)
        self.book = Book(replica, shape["lost"], account)
        return self.book


def _words(plan: Sequence[Any]) -> str:
    shape, first, again = plan
    return f"{shape}, next lease {first}, to be given out again {again}"
