"""The largest group in which all reach each other, against a search through all sets."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco_comm.group import reach
from diloco_comm.group.reach import largest_connected

Pairs = list[tuple[int, int]]


def first_largest(num_members: int, cuts: Pairs) -> list[int]:
    """Try all sets, larger ones first, and sets of one size in their order."""
    apart = {frozenset(pair) for pair in cuts if pair[0] != pair[1]}
    for size in range(num_members, 0, -1):
        for members in itertools.combinations(range(num_members), size):
            if not any(frozenset(pair) in apart for pair in itertools.combinations(members, 2)):
                return list(members)
    return []


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, Pairs]:
    num_members = draw(st.integers(1, 10))
    member = st.integers(0, num_members - 1)
    return num_members, draw(st.lists(st.tuples(member, member), max_size=25))


@given(graphs())
@example((0, []))
@example((5, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]))
@settings(max_examples=300, deadline=None)
def test_the_largest_group_is_found_and_of_several_the_one_with_the_lowest_members(
    graph: tuple[int, Pairs],
) -> None:
    assert largest_connected(*graph) == first_largest(*graph)


@given(graphs(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_the_cuts_changes_nothing(
    graph: tuple[int, Pairs], order: random.Random
) -> None:
    num_members, cuts = graph
    turned = [pair if order.random() < 0.5 else pair[::-1] for pair in cuts]
    order.shuffle(turned)
    assert largest_connected(num_members, turned) == largest_connected(num_members, cuts)


@pytest.mark.parametrize(("num_members", "num_cuts"), [(48, 48), (64, 96), (80, 80)])
def test_a_few_cuts_between_many_members_take_a_small_part_of_the_bound(
    monkeypatch: pytest.MonkeyPatch, num_members: int, num_cuts: int
) -> None:
    order = random.Random(1)
    cuts = [(order.randrange(num_members), order.randrange(num_members)) for _ in range(num_cuts)]
    found = largest_connected(num_members, cuts)
    monkeypatch.setattr(reach, "MOST_LOOKS", reach.MOST_LOOKS // 5)
    assert largest_connected(num_members, cuts) == found


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_a_tangle_is_answered_within_the_bound_by_members_that_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    order = random.Random(2)
    cuts = [p for p in itertools.combinations(range(300), 2) if order.random() < share]
    looks: list[int] = []
    look = reach._Search._look

    def counted(search: reach._Search, members: int) -> None:
        looks.append(members.bit_count())
        look(search, members)

    monkeypatch.setattr(reach._Search, "_look", counted)
    found = set(largest_connected(300, cuts))
    assert found and not any(one in found and other in found for one, other in cuts)
    assert sum(looks) <= reach.MOST_LOOKS + 300


def test_two_sites_that_are_cut_apart_give_the_site_of_the_lowest() -> None:
    halves = [(one, other) for one in range(32) for other in range(32, 64)]
    assert largest_connected(64, halves) == list(range(32))


def test_a_long_chain_of_cuts_does_not_nest_calls() -> None:
    chain = [(member, member + 1) for member in range(2999)]
    assert len(largest_connected(3000, chain)) == 1500


def test_a_pair_without_a_member_is_refused() -> None:
    with pytest.raises(ValueError, match="the pair 0, 3 is not of members 0 to 2"):
        largest_connected(3, [(0, 3)])
