"""Leases of samples: disjoint between replicas, and none is left out, whoever comes and goes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_comm.elastic.leases import (
    FIRST_PLAN,
    REPEAT,
    SKIP,
    Account,
    Book,
    Held,
    Plan,
    known_of,
    next_plan,
)

NUM_FRAGMENTS = 2


@dataclass
class Replica:
    """A replica that takes leases ahead of its training, as a data loader does."""

    book: Book
    ahead: int
    inner_step: int
    sent: list[int]
    drawn: list[int] = field(default_factory=list)
    num_used: int = 0
    # How many of ``drawn`` were used when each fragment was sent.
    num_sent: list[int] = field(default_factory=lambda: [0] * NUM_FRAGMENTS)

    def step(self) -> None:
        self.inner_step += 1
        self.num_used += 1
        while len(self.drawn) < self.num_used + self.ahead - 1:
            self.drawn.append(self.book.draw())

    def send(self, fragment: int) -> None:
        self.sent[fragment] = self.inner_step

    def share(self, fragment: int) -> None:
        self.send(fragment)
        self.num_sent[fragment] = self.num_used

    @property
    def num_applied(self) -> int:
        return min(self.num_sent)

    def set_back(self, agreed_step: int) -> None:
        self.book.set_back(self.inner_step - agreed_step)
        self.sent = [step - (self.inner_step - agreed_step) for step in self.sent]
        self.inner_step = agreed_step


class Group:
    """Replicas that train in step and share what they learned now and then."""

    def __init__(self, size: int, lost: str, chance: random.Random) -> None:
        self.lost, self.chance = lost, chance
        # Blocking sends a round that broke off again, at the same inner step, and counts sends that
        # were applied. Delayed, Eager and CO2 count all sends, and send no round again.
        self.sends_again = chance.random() < 0.5
        self.number, self.view, self.has_broken_off = size, FIRST_PLAN, False
        self.has_lost_round = False
        account = Account(FIRST_PLAN, Plan(tuple(range(size))), 0)
        self.living = {
            r: self._replica(r, replace(account, taken=[]), [0] * NUM_FRAGMENTS)
            for r in range(size)
        }
        # What counts in the end: each lease that a replica which still lived, or shared it, used.
        self.kept: list[int] = []
        self.dropped: list[int] = []

    def _replica(self, number: int, account: Account, sent: list[int]) -> Replica:
        ahead = self.chance.choice((1, 1, 2, 5))
        return Replica(Book(number, self.lost, account), ahead, account.step, list(sent))

    def train(self, num_steps: int) -> None:
        for replica in self.living.values():
            for _ in range(num_steps):
                replica.step()

    def share(self) -> None:
        for fragment in self.chance.choice(((0, 1), (0,), (1,))):
            for replica in self.living.values():
                replica.share(fragment)

    def send_on_some(self) -> None:
        """Let some replicas send a round that breaks off before the others have sent."""
        for replica in self.living.values():
            if self.chance.random() < 0.5:
                if not self.sends_again:
                    replica.send(self.chance.randrange(NUM_FRAGMENTS))
                self.has_lost_round = True

    def lose(self, num_lost: int) -> None:
        for number in self.chance.sample(sorted(self.living), min(num_lost, len(self.living) - 1)):
            gone = self.living.pop(number)
            self.kept += gone.drawn[: gone.num_applied]
            self.dropped += gone.drawn[gone.num_applied : gone.num_used]

    def change(self, num_lost: int, num_new: int, num_failures: int = 0) -> None:
        self.lose(num_lost)
        for _ in range(num_failures):
            self.has_broken_off = True
            self._attempt(0, is_last=False)
        self._attempt(num_new, is_last=True)

    def _attempt(self, num_new: int, *, is_last: bool) -> None:
        """Go to the next view; an attempt that is not the last breaks off somewhere."""
        chance, books = self.chance, {r: one.book for r, one in self.living.items()}
        self.view += 1
        agreed = min(one.inner_step for one in self.living.values())
        for one in self.living.values():
            one.set_back(agreed)
        new = range(self.number, self.number + num_new)
        members = tuple(sorted([*self.living, *new]))
        newest = max(book.account.view for book in books.values())
        # Each member says what it holds for both accounts, and hears which of the two counts.
        reports = {r: one.book.held(agreed, one.sent) for r, one in self.living.items()}
        held = {r: report[newest] for r, report in reports.items()}
        is_heard = is_last or chance.random() < 0.7
        plans = []
        for one in self.living.values():
            if is_heard or chance.random() < 0.5:
                one.book.go_on(newest)
                plans.append(one.book.prepare(self.view, held, members, agreed))
        assert len(set(plans)) <= 1
        if not is_heard:
            return
        for one in self.living.values():
            if is_last or chance.random() < 0.5:
                one.book.go_on(self.view)
                if not is_last:
                    for _ in range(chance.randrange(3)):
                        one.step()
        if not is_last:
            self.lose(chance.choice((0, 0, 1)))
            return
        self.number += num_new
        sent = next(iter(self.living.values())).sent
        for number in new:
            account = Account(self.view, plans[0], agreed, known_of(held, members))
            self.living[number] = self._replica(number, account, sent)

    def check(self) -> None:
        for replica in self.living.values():
            self.kept += replica.drawn
        assert len(set(self.kept)) == len(self.kept)
        self.change(0, 0)
        plan = next(iter(self.living.values())).book.account.plan
        old = set(range(plan.first))
        if self.lost == REPEAT:
            # Whatever the group has passed was used, or waits to be given out again. A replica that
            # is lost while it owes what a lost round held takes that along.
            assert set(self.kept) | set(plan.again) <= old
            assert self.has_lost_round or set(self.kept) | set(plan.again) == old
            assert not set(self.kept) & set(plan.again)
        else:
            assert set(self.kept) | set(plan.again) | set(self.dropped) <= old | set(self.dropped)
            # A lost replica may have been ahead of all others where a change broke off.
            assert self.has_broken_off or not set(self.kept) & set(self.dropped)


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.booleans(),
        st.booleans(),
        *(st.integers(0, 2) for _ in range(3)),
    )
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.integers(1, 4), st.sampled_from((REPEAT, SKIP)), EVENTS, st.randoms(use_true_random=False)
)
def test_leases_are_disjoint_and_none_is_left_out(
    size: int,
    lost: str,
    events: list[tuple[int, bool, bool, int, int, int]],
    chance: random.Random,
) -> None:
    """Also where changes break off on some members when others have ended them."""
    group = Group(size, lost, chance)
    has_newcomers = False
    for num_steps, shares, breaks_off, num_lost, num_new, num_failures in events:
        group.train(num_steps)
        # What broke off is sent again at the first step of a view that nobody has joined.
        if shares and (num_steps or (group.sends_again and not has_newcomers)):
            group.share()
        has_newcomers = num_new > 0
        group.train(num_steps // 2)
        if breaks_off:
            group.send_on_some()
        group.change(num_lost, num_new, num_failures)
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
    book = Book(0, lost, Account(FIRST_PLAN, Plan((0, 1)), 0))
    for _ in range(4):
        book.draw()
    held = book.held(4, [2])[FIRST_PLAN]
    assert held == Held(4, (4, 6), (2,), (2,), (True,))
    assert book.prepare(1, {0: held}, (0,), 4) == Plan((0,), 8, again)


def test_a_round_that_one_member_has_not_sent_counts_for_nobody() -> None:
    """Replica 0 has sent at step 8 and goes on at 7, replica 1 has sent at step 4."""
    books = [Book(r, REPEAT, Account(FIRST_PLAN, Plan((0, 1, 2)), 0)) for r in range(2)]
    for book, num_steps in zip(books, (9, 7), strict=True):
        for _ in range(num_steps):
            book.draw()
    books[0].set_back(2)
    held = {
        0: books[0].held(7, [6])[FIRST_PLAN],
        1: books[1].held(7, [4])[FIRST_PLAN],
    }
    plans = [book.prepare(1, held, (0, 1), 7) for book in books]
    assert plans[0] == plans[1]
    # Of the lost replica's leases 2, 5, 8, ... those of the first four steps are shared.
    assert [lease for lease in plans[0].again if lease % 3 == 2] == [14, 17, 20, 23, 26]


def test_a_round_that_is_sent_again_at_the_first_step_of_a_view_counts() -> None:
    """The round of step 4 breaks off as replica 2 dies, and is sent again; then replica 1 dies."""
    books = {r: Book(r, REPEAT, Account(FIRST_PLAN, Plan((0, 1, 2)), 0)) for r in range(2)}
    for book in books.values():
        for _ in range(4):
            book.draw()
    held = {r: book.held(4, [0])[FIRST_PLAN] for r, book in books.items()}
    for book in books.values():
        assert book.prepare(1, held, (0, 1), 4).again == (2, 5, 8, 11)
        book.go_on(1)
        book.draw()
    again = {0: books[0].held(5, [4])[1]}
    assert again[0].has_sent == (True,)
    # Replica 1 took leases 1, 4, 7 and 10 before the round, and lease 5 after the round.
    assert books[0].prepare(2, again, (0,), 5).again == (5, 8, 11)


def test_what_a_slower_replica_left_out_comes_again() -> None:
    held = {0: Held(3), 1: Held(1)}
    assert next_plan(Plan((0, 1), 4, (1, 2)), held, (0, 1, 2), ()) == Plan((0, 1, 2), 8, (5, 7))


def test_a_saved_book_gives_what_was_not_used() -> None:
    book = Book(0, REPEAT, Account(FIRST_PLAN, Plan((0, 1)), 0))
    for _ in range(5):
        book.draw()
    assert book.saved(3) == Plan((0, 1), 6)
