"""Leases: which samples each replica takes, in a group that changes.

All data are one endless stream: the data epochs, each in an order of its own, one after the other.
The stream is cut into *leases* of equal length, numbered from 0. A replica takes one lease for each
inner step. In a view of W members, the member in place r takes as its k-th lease the one with index
``k * W + r`` among the leases that the view has to give. So no two members of a view ever take the
same lease, without any message.

When the view changes, the members say how many leases they have taken. The next view goes on behind
the member that is furthest ahead. The leases that slower members would have taken up to there are
given out again; so are the leases that a lost replica had taken and that are in no outer step.

Each replica keeps an *account* of its leases for each view. A change of the view may fail on some
members after others have completed it. So a member first prepares the next account and keeps the
present one. If a single member has gone on with the next account, then all members had prepared it,
and the members that are left go on with it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

REPEAT, SKIP = "repeat", "skip"

# These stand in place of a view's number: for no plan at all, and for the first plan of a run.
NO_PLAN, FIRST_PLAN = -1, 0


@dataclass(frozen=True)
class Plan:
    """The leases that the members of one view take.

    Attributes:
        members: Numbers of the replicas; their order is the order in which they take leases.
        first: The first lease that no view has given out before.
        again: Older leases that this view gives out once more, before the new ones.
    """

    members: tuple[int, ...]
    first: int = 0
    again: tuple[int, ...] = ()

    def lease(self, replica: int, number: int) -> int:
        """Return the lease that a member takes as its ``number``-th in this view, from 0."""
        return self.at(number * len(self.members) + self.members.index(replica))

    def at(self, index: int) -> int:
        """Return the lease with this index in the view."""
        is_again = index < len(self.again)
        return self.again[index] if is_again else self.first + index - len(self.again)


@dataclass(frozen=True)
class Held:
    """One member's report about its leases when a view ends.

    Attributes:
        drawn: How many leases this member has taken in that view.
        unapplied: The leases that this member has trained with, but whose result is in no outer
            step yet, in the order in which it took them.
        sent: For each fragment, the inner step up to which this member's training is in an outer
            step, counted after all set-backs (``Account.set_back``), as the next view counts; ()
            for a newcomer.
        sends: For each fragment, the inner step of this member's last send, counted as if there
            had been no set-back, as the present view began to count; () for a newcomer.
        has_sent: For each fragment, whether this member has sent it since the present view began.
            A broken round that is sent again at the first step of the view counts.
    """

    drawn: int = 0
    unapplied: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    sends: tuple[int, ...] = ()
    has_sent: tuple[bool, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Held:
        return cls(
            values["drawn"],
            tuple(values["unapplied"]),
            tuple(values["sent"]),
            tuple(values["sends"]),
            tuple(values["has_sent"]),
        )


def next_plan(
    plan: Plan, held: Mapping[int, Held], members: Sequence[int], lost: Sequence[int]
) -> Plan:
    """Return the plan of the view that follows the view of ``plan``.

    Args:
        held: The reports of the members of ``plan`` that are still there, by replica number.
        members: The members of the next view.
        lost: Leases that lost replicas had taken, and that are to be given out again.
    """
    most = max([one.drawn for one in held.values()], default=0)
    end = most * len(plan.members)
    left_out = {
        plan.lease(replica, number)
        for replica, one in held.items()
        for number in range(one.drawn, most)
    }
    again = sorted(left_out | set(lost)) + list(plan.again[end:])
    return Plan(tuple(members), plan.first + max(0, end - len(plan.again)), tuple(again))


@dataclass(frozen=True)
class Account:
    """The leases of one view, as one replica knows them.

    Attributes:
        view: Number of the view whose members have agreed on ``plan``, or FIRST_PLAN.
        plan: The leases that the view gives out.
        step: Inner step at which the view began.
        known: The report of every member at that step.
        taken: The leases that this replica has taken, in order; grows with each lease. The list
            begins with the leases that were unapplied when the view began.
        num_old: How many of ``taken`` this replica had taken before the view.
        used: How many of ``taken`` had been used for an inner step when the view began.
        set_back: Inner steps by which failed changes of the view have set this replica back.
        sends: For each fragment, the inner step of this replica's last send before the view; () if
            there was none.
    """

    view: int
    plan: Plan
    step: int
    known: Mapping[int, Held] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)
    num_old: int = 0
    used: int = 0
    set_back: int = 0
    sends: tuple[int, ...] = ()

    @property
    def drawn(self) -> int:
        """The number of leases that this replica has taken in the view."""
        return len(self.taken) - self.num_old

    def num_used(self, inner_step: int) -> int:
        """Return how many of ``taken`` have been used for inner steps up to ``inner_step``."""
        return min(len(self.taken), self.used + inner_step + self.set_back - self.step)

    def held(self, inner_step: int, sent: Sequence[int]) -> Held:
        """Return this replica's report for the end of the view.

        Args:
            inner_step: The inner step with which the next view begins.
            sent: For each fragment, the inner step up to which the training is in outer steps.
        """
        used = self.num_used(inner_step)
        sends = tuple(one + self.set_back for one in sent)
        before = self.sends or (self.step,) * len(sends)
        has_sent = tuple(one > old for one, old in zip(sends, before, strict=True))
        # All leases before the first of ``taken`` are applied, so no fragment lags behind that one.
        sent = tuple(max(one, inner_step - used) for one in sent)
        unapplied = max(0, inner_step - min(sent, default=inner_step))
        return Held(self.drawn, tuple(self.taken[used - unapplied :]), sent, sends, has_sent)

    def num_applied(self, replica: int, held: Mapping[int, Held]) -> int:
        """Return how many leases of a lost member have come into outer steps since the view began.

        The number follows from the reports alone, so that all members find the same one.

        Args:
            replica: The number of the lost member.
            held: The reports of the members that are still there.
        """
        # With overlap, one member may have sent a round that another has yet to send. A round that
        # some member has not sent is in no outer step.
        sends = [min(each) for each in zip(*(one.sends for one in held.values()), strict=True)]
        have_sent = [all(each) for each in zip(*(m.has_sent for m in held.values()), strict=True)]
        begun = self.begun(replica).sent or (self.step,) * len(sends)
        now = [
            one if is_sent else old
            for old, one, is_sent in zip(begun, sends, have_sent, strict=True)
        ]
        return min(now, default=0) - min(begun, default=0)

    def begun(self, replica: int) -> Held:
        """Return a member's report at the begin of this view; an empty ``Held`` if it gave none."""
        return self.known.get(replica, Held())


class Book:
    """One replica's accounts of the leases: of the present view, and of a view that may follow.

    Args:
        replica: Number of this replica.
        lost: "repeat" to give the unapplied leases of lost replicas out again, "skip" to drop them.
        account: The first account.

    Attributes:
        account: The account of the present view.
        prepared: The account of the next view while the change to it goes on; else None.
    """

    def __init__(self, replica: int, lost: str, account: Account) -> None:
        self.replica, self.lost = replica, lost
        self.account = account
        self.prepared: Account | None = None

    def draw(self) -> int:
        """Take this replica's next lease, and return its number."""
        account = self.account
        lease = account.plan.lease(self.replica, account.drawn)
        account.taken.append(lease)
        return lease

    def set_back(self, steps: int) -> None:
        """Note that this replica's inner step has become lower by so many steps."""
        if self.prepared is not None:
            self.prepared = replace(self.prepared, set_back=self.prepared.set_back + steps)
        self.account = replace(self.account, set_back=self.account.set_back + steps)

    def held(self, inner_step: int, sent: Sequence[int]) -> dict[int, Held]:
        """Return this replica's reports by view: of the present account and of the prepared one.

        Args:
            inner_step, sent: See ``Account.held``.
        """
        accounts = [self.account] if self.prepared is None else [self.account, self.prepared]
        return {one.view: one.held(inner_step, sent) for one in accounts}

    def prepare(
        self,
        view: int,
        held: Mapping[int, Held],
        members: Sequence[int],
        inner_step: int,
    ) -> Plan:
        """Prepare the account of the next view; return its plan, equal on all members with a book.

        Args:
            view: Number of the next view.
            held: The reports of the members that are still there, about the present account.
            members: The members of the next view.
            inner_step: The inner step with which the next view begins.
        """
        old, own = self.account, held[self.replica]
        plan = next_plan(old.plan, held, members, self._lost_leases(held))
        num_dropped = len(old.taken) - len(own.unapplied)
        self.prepared = Account(
            view,
            plan,
            inner_step,
            known_of(held, members),
            list(own.unapplied),
            len(own.unapplied),
            old.num_used(inner_step) - num_dropped,
            sends=tuple(one - old.set_back for one in own.sends),
        )
        return plan

    def _lost_leases(self, held: Mapping[int, Held]) -> list[int]:
        """Return the leases that lost replicas had taken, and whose result is in no outer step."""
        if self.lost == SKIP:
            return []
        account = self.account
        most = max([one.drawn for one in held.values()], default=0)
        found: list[int] = []
        for replica in set(account.plan.members) - held.keys():
            mine = [account.plan.lease(replica, number) for number in range(most)]
            all_mine = [*account.begun(replica).unapplied, *mine]
            found += all_mine[account.num_applied(replica, held) :]
        return found

    def go_on(self, view: int) -> None:
        """Make the account of this view the present one, unless it is; forget a prepared one."""
        if self.account.view != view:
            assert self.prepared is not None and self.prepared.view == view
            # One assignment: if a signal interrupts here, the book has one of the two accounts.
            self.account = self.prepared
        self.prepared = None

    def saved(self, inner_step: int) -> Plan:
        """Return the plan to save in a checkpoint of this inner step, from which a run goes on.

        The plan assumes that all members have used as many leases as this one.
        """
        account = self.account
        unused = len(account.taken) - account.num_used(inner_step)
        used = Held(drawn=max(0, account.drawn - unused))
        plan = account.plan
        return next_plan(plan, dict.fromkeys(plan.members, used), plan.members, ())


def known_of(held: Mapping[int, Held], members: Sequence[int]) -> dict[int, Held]:
    """Return the report of each member of a view at its begin: an empty one for a newcomer."""
    return {replica: held.get(replica, Held()) for replica in members}
