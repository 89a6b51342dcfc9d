"""Which samples each replica takes, in a group that changes.

All data are one endless stream: the data epochs, each in an order of its own, one after the other.
The stream is cut into *leases* of equal length, numbered from 0. A replica takes one lease for each
inner step. In a view of W members, the member in place r takes as its k-th lease the one with index
``k * W + r`` among the leases that the view has to give. So no two members of a view ever take the
same lease, without any message.

When the view changes, the members say how many leases they have taken. The next view begins behind
all of them. What a member left out, because another one was ahead, is given out again; so are the
leases that a lost replica had taken and that no outer step holds.

A change may break off on some members when others have ended it already. So a member first prepares
the next account and keeps the present one. If a single member has gone on with the next account,
then all members had prepared it, and those that are left go on with it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

REPEAT, SKIP = "repeat", "skip"

# In place of a view's number: no plan at all, and the plan with which a run begins.
NO_PLAN, FIRST_PLAN = -1, 0


@dataclass(frozen=True)
class Plan:
    """The leases that the members of one view take.

    Attributes:
        members: Numbers of the replicas, in order.
        first: All leases from this one on are new.
        again: Older leases, which are given out before the new ones.
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
    """What a member says of its leases when a view ends.

    Attributes:
        drawn: Leases that this member has taken in that view.
        unapplied: The leases that this member has taken and that no outer step holds, in order.
        sent: For each fragment the inner step up to which an outer step holds what this member
            learned, as the next view counts steps; () for a newcomer.
        sends: For each fragment the inner step of this member's last send, as the present view
            counts steps; () for a newcomer.
        has_sent: For each fragment whether this member has sent it since the present view began:
            also at the very step at which the view began, where a broken round is sent again.
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
    """Return what the next view has to give.

    Args:
        held: What the members of ``plan`` say that are still there, by number.
        members: Of the next view.
        lost: Leases of lost replicas that are to be given out again, if ``plan`` has given them.
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
    """What one replica knows of the leases of one view; ``taken`` grows with each lease.

    Attributes:
        view: Number of the view whose members have agreed on ``plan``, or FIRST_PLAN.
        step: Inner step at which the view began.
        known: What every member said at that step.
        taken: By this replica, in order, from the first one that no outer step held at that step.
        num_old: How many of ``taken`` this replica had taken before the view.
        used: How many of ``taken`` had been used for an inner step when the view began.
        set_back: Inner steps by which changes that broke off have set this replica back.
        sends: For each fragment the inner step of this replica's last send before the view; () if
            the replica has sent nothing then.
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
        """How many leases this replica has taken in the view."""
        return len(self.taken) - self.num_old

    def num_used(self, inner_step: int) -> int:
        """Return how many of ``taken`` were used for an inner step by now."""
        return min(len(self.taken), self.used + inner_step + self.set_back - self.step)

    def held(self, inner_step: int, sent: Sequence[int]) -> Held:
        """Return what this replica says of itself when the view ends.

        Args:
            inner_step: With which the next view begins.
            sent: For each fragment the inner step up to which outer steps hold what was learned.
        """
        used = self.num_used(inner_step)
        sends = tuple(one + self.set_back for one in sent)
        before = self.sends or (self.step,) * len(sends)
        has_sent = tuple(one > old for one, old in zip(sends, before, strict=True))
        # Before the first of ``taken`` there is nothing of this replica that could be unapplied.
        sent = tuple(max(one, inner_step - used) for one in sent)
        unapplied = max(0, inner_step - min(sent, default=inner_step))
        return Held(self.drawn, tuple(self.taken[used - unapplied :]), sent, sends, has_sent)

    def num_applied(self, replica: int, held: Mapping[int, Held]) -> int:
        """Return how many leases of another member outer steps hold, since the view began.

        Only what all members know counts, so that they all find the same number.

        Args:
            replica: A member that is gone.
            held: What the members say that are still there.
        """
        # Where a round travels during inner steps, a member may have sent it and another not yet.
        # A round that some member has not sent is in no outer step.
        sends = [min(each) for each in zip(*(one.sends for one in held.values()), strict=True)]
        have_sent = [all(each) for each in zip(*(m.has_sent for m in held.values()), strict=True)]
        begun = self.begun(replica).sent or (self.step,) * len(sends)
        now = [
            one if is_sent else old
            for old, one, is_sent in zip(begun, sends, have_sent, strict=True)
        ]
        return min(now, default=0) - min(begun, default=0)

    def begun(self, replica: int) -> Held:
        """Return a member's words about its leases at the change that began this view.

        The words are an empty ``Held`` if that member said nothing then.
        """
        return self.known.get(replica, Held())


class Book:
    """The leases of all replicas, as one replica keeps account of them.

    Args:
        replica: Number of this replica.
        lost: "repeat" to give the unapplied leases of lost replicas out again, "skip" to drop them.
        account: To begin with.

    Attributes:
        account: Of the present view.
        prepared: Of the view of the last change, as long as this replica has not seen its end.
    """

    def __init__(self, replica: int, lost: str, account: Account) -> None:
        self.replica, self.lost = replica, lost
        self.account = account
        self.prepared: Account | None = None

    def draw(self) -> int:
        """Take the next lease."""
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
        """Return what this replica says of itself, for each account that it may go on from.

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
            held: What the members that are still there say of the present account.
            members: Of the next view.
            inner_step: With which the next view begins.
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
        """Return what replicas that are gone had taken and no outer step holds."""
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
        """Go on with the account of this view; do nothing if that is the present one."""
        if self.account.view != view:
            assert self.prepared is not None and self.prepared.view == view
            # Whatever breaks in, the book has one of the two accounts.
            self.account = self.prepared
        self.prepared = None

    def saved(self, inner_step: int) -> Plan:
        """Return the plan for a training that goes on from this inner step.

        All members are taken to have used as many leases as this one.
        """
        account = self.account
        unused = len(account.taken) - account.num_used(inner_step)
        used = Held(drawn=max(0, account.drawn - unused))
        plan = account.plan
        return next_plan(plan, dict.fromkeys(plan.members, used), plan.members, ())


def known_of(held: Mapping[int, Held], members: Sequence[int]) -> dict[int, Held]:
    """Return what is known of each member of a view when the view begins."""
    return {replica: held.get(replica, Held()) for replica in members}
