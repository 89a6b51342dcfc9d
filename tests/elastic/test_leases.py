"""Leases of samples: disjoint between replicas, and none is left out, whoever comes and goes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_comm.elastic.leases import REPEAT, SKIP, Book, Held, Plan, next_plan


@dataclass
class Replica:
    """A replica that takes leases ahead of its training, as a data loader does."""

    book: Book
    joined: int
    ahead: int
    drawn: list[int] = field(default_factory=list)

    def step(self, inner_step: int) -> None:
        while len(self.drawn) < inner_step - self.joined + self.ahead:
            self.drawn.append(self.book.draw())

    def used(self, inner_step: int) -> list[int]:
        return self.drawn[: max(0, inner_step - self.joined)]


class Group:
    """Replicas that train in step and share what they learned now and then."""

    def __init__(self, size: int, lost: str, chance: random.Random) -> None:
        self.lost, self.chance = lost, chance
        self.step = self.applied = 0
        self.number = size
        plan = Plan(tuple(range(size)))
        self.living = {r: Replica(Book(r, lost, plan, 0), 0, self._ahead()) for r in plan.members}
        # What counts in the end: each lease that a replica which still lived, or shared it, used.
        self.kept: list[int] = []
        self.dropped: list[int] = []

    def _ahead(self) -> int:
        return self.chance.choice((1, 1, 2, 5))

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for replica in self.living.values():
                replica.step(self.step)
            self.step += 1

    def share(self) -> None:
        self.applied = self.step

    def change(self, num_lost: int, num_new: int) -> None:
        gone = self.chance.sample(sorted(self.living), min(num_lost, len(self.living) - 1))
        for number in gone:
            replica = self.living.pop(number)
            self.kept += replica.used(self.applied)
            self.dropped += replica.used(self.step)[max(0, self.applied - replica.joined) :]
        new = range(self.number, self.number + num_new)
        self.number += num_new
        members = tuple(sorted([*self.living, *new]))
        held = {
            r: one.book.held(self.step, self.applied, self.step) for r, one in self.living.items()
        }
        plans = [one.book.next(held, members, self.applied) for one in self.living.values()]
        assert len(set(plans)) == 1
        for one in self.living.values():
            one.book.turn(plans[0], held, self.step, self.step)
        for number in new:
            book = Book(number, self.lost, plans[0], self.step)
            book.known = {r: held.get(r, Held(start=self.step)) for r in members}
            self.living[number] = Replica(book, self.step, self._ahead())

    def check(self) -> None:
        for replica in self.living.values():
            self.kept += replica.drawn
        assert len(set(self.kept)) == len(self.kept)
        self.change(0, 0)
        plan = next(iter(self.living.values())).book.plan
        old = set(range(plan.first))
        if self.lost == REPEAT:
            # Whatever the group has passed was used, or waits to be given out again.
            assert set(self.kept) | set(plan.again) == old
            assert not set(self.kept) & set(plan.again)
        else:
            assert set(self.kept) | set(plan.again) | set(self.dropped) <= old | set(self.dropped)
            assert not set(self.kept) & set(self.dropped)


EVENTS = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 2), st.integers(0, 2)))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4), st.sampled_from((REPEAT, SKIP)), EVENTS, st.randoms(use_true_random=False)
)
def test_leases_are_disjoint_and_none_is_left_out(
    size: int, lost: str, events: list[tuple[int, bool, int, int]], chance: random.Random
) -> None:
    group = Group(size, lost, chance)
    for num_steps, shares, num_lost, num_new in events:
        group.train(num_steps)
        if shares:
            group.share()
        group.train(num_steps // 2)
        group.change(num_lost, num_new)
    group.train(3)
    group.check()


def test_a_view_gives_its_leases_in_turn() -> None:
    plan = Plan((0, 2, 5), first=10, again=(3, 4))
    assert [plan.lease(0, k) for k in range(3)] == [3, 11, 14]
    assert [plan.lease(2, k) for k in range(3)] == [4, 12, 15]
    assert [plan.lease(5, k) for k in range(3)] == [10, 13, 16]


@pytest.mark.parametrize(("lost", "again"), [(REPEAT, (5, 7)), (SKIP, ())])
def test_a_lost_replica(lost: str, again: tuple[int, ...]) -> None:
    """Of four steps two are shared: the lost replica's leases of the others come again."""
    book = Book(0, lost, Plan((0, 1)), 0)
    for _ in range(4):
        book.draw()
    held = {0: book.held(4, 2, 4)}
    assert held[0] == Held(4, (4, 6), 2)
    assert book.next(held, (0,), 2) == Plan((0,), 8, again)


def test_what_a_slower_replica_left_out_comes_again() -> None:
    held = {0: Held(3), 1: Held(1)}
    assert next_plan(Plan((0, 1), 4, (1, 2)), held, (0, 1, 2), ()) == Plan((0, 1, 2), 8, (5, 7))


def test_a_saved_book_gives_what_was_not_used() -> None:
    book = Book(0, REPEAT, Plan((0, 1)), 0)
    for _ in range(5):
        book.draw()
    assert book.saved(3) == Plan((0, 1), 6)
