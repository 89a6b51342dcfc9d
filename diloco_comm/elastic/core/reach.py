"""Which processes reach each other, as their beats say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from ...group.reach import largest_connected
from ..beats import Beat


def largest_group(beats: Sequence[Beat]) -> list[Beat]:
    """Return the largest set of which all reach each other; of equal ones that of the lowest ids.

    Two processes reach each other if neither says that it could not reach the other.
    """
    everyone = sorted(beats, key=lambda beat: beat.member.key)
    cuts = [
        (one, other)
        for one, other in combinations(range(len(everyone)), 2)
        if not reach_each_other(everyone[one], everyone[other])
    ]
    return [everyone[place] for place in largest_connected(len(everyone), cuts)]


def reach_each_other(one: Beat, other: Beat) -> bool:
    return (
        one.member.nonce not in other.unreachable and other.member.nonce not in one.unreachable
    ) or one.member.key == other.member.key


def as_many_as_reach(group: Sequence[Beat], others: Sequence[Beat]) -> list[Beat]:
    """Return those of ``others``, in order, that reach all of the group and each other."""
    taken: list[Beat] = []
    for one in others:
        if all(reach_each_other(one, peer) for peer in (*group, *taken)):
            taken.append(one)
    return taken
