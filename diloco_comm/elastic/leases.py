"""Which samples each replica takes, in a group that changes.

All data are one endless stream: the data epochs, each in an order of its own, one after the other.
The stream is cut into *leases* of equal length, numbered from 0. A replica takes one lease for each
inner step. In a view of W members, the member in place r takes as its k-th lease the one with index
``k * W + r`` among the leases that the view has to give. So no two members of a view ever take the
same lease, without any message.

When the view changes, the members say how many leases they have taken. The next view begins behind
all of them. What a member left out, because another one was ahead, is given out again; so are the
leases that a lost replica had taken and that no outer step holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

REPEAT, SKIP = "repeat", "skip"


@dataclass(frozen=True)
class Plan:
    """What the members of one view have to give.

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
        start: Inner step before the one for which the first of ``unapplied`` was, or will be used.
    """

    drawn: int = 0
    unapplied: tuple[int, ...] = ()
    start: int = 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Held:
        return cls(values["drawn"], tuple(values["unapplied"]), values["start"])


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


@dataclass
class Book:
    """The leases of all replicas, as one replica keeps account of them.

    Args:
        replica: Number of this replica.
        lost: "repeat" to give the unapplied leases of lost replicas out again, "skip" to drop them.
        plan: Of the present view.
        step: Inner step at which the present view began.
    """

    replica: int
    lost: str
    plan: Plan
    step: int
    drawn: int = 0
    # Taken by this replica, in order, from the first one that no outer step holds.
    taken: list[int] = field(default_factory=list)
    # How many of ``taken`` had been used for an inner step when the view began.
    used: int = 0
    # What every member of the present view said at its beginning.
    known: dict[int, Held] = field(default_factory=dict)

    def draw(self) -> int:
        """Take the next lease."""
        lease = self.plan.lease(self.replica, self.drawn)
        self.drawn += 1
        self.taken.append(lease)
        return lease

    def num_used(self, inner_step: int) -> int:
        """Return how many of ``taken`` were used for an inner step by now."""
        return min(len(self.taken), self.used + inner_step - self.step)

    def held(self, inner_step: int, applied_step: int, agreed_step: int) -> Held:
        """Return what this replica says of itself when the present view ends.

        Args:
            inner_step: Of this replica.
            applied_step: Up to which outer steps hold what was learned.
            agreed_step: With which the next view begins.
        """
        used = self.num_used(inner_step)
        unapplied = min(used, max(0, inner_step - applied_step))
        kept = used - unapplied
        return Held(self.drawn, tuple(self.taken[kept:]), agreed_step - unapplied)

    def lost_leases(self, held: Mapping[int, Held], applied_step: int) -> list[int]:
        """Return what replicas that are gone had taken and no outer step holds."""
        if self.lost == SKIP:
            return []
        most = max([one.drawn for one in held.values()], default=0)
        found: list[int] = []
        for replica in set(self.plan.members) - held.keys():
            begun = self.known.get(replica, Held(start=self.step))
            mine = [self.plan.lease(replica, number) for number in range(most)]
            found += [*begun.unapplied, *mine][max(0, applied_step - begun.start) :]
        return found

    def next(self, held: Mapping[int, Held], members: Sequence[int], applied_step: int) -> Plan:
        """Return the plan of the next view, equal on all members that keep a book.

        Args:
            held: What the members that are still there say, by number.
        """
        return next_plan(self.plan, held, members, self.lost_leases(held, applied_step))

    def turn(self, plan: Plan, held: Mapping[int, Held], inner_step: int, agreed_step: int) -> None:
        """Go on in the next view.

        Args:
            held: As for ``next``.
            inner_step: Of this replica, before the change.
        """
        own = held[self.replica]
        used = self.num_used(inner_step)
        dropped = len(self.taken) - len(own.unapplied)
        self.taken, self.used = list(own.unapplied), max(0, used - dropped)
        self.plan, self.step, self.drawn = plan, agreed_step, 0
        self.known = {
            replica: held.get(replica, Held(start=agreed_step)) for replica in plan.members
        }

    def saved(self, inner_step: int) -> Plan:
        """Return the plan for a training that goes on from this inner step.

        All members are taken to have used as many leases as this one.
        """
        unused = len(self.taken) - self.num_used(inner_step)
        used = Held(drawn=max(0, self.drawn - unused))
        return next_plan(self.plan, dict.fromkeys(self.plan.members, used), self.plan.members, ())
