"""Who reaches whom, and how many of a view are enough to go on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..beats import Beat


def largest_group(beats: Sequence[Beat]) -> list[Beat]:
    """Return the largest set of which all reach each other; of equal ones that of the lowest ids.

    Two processes reach each other if neither says that it could not reach the other.
    """
    everyone = sorted(beats, key=lambda beat: beat.member.key)
    cuts = {
        place: {
            other
            for other, peer in enumerate(everyone)
            if not reach_each_other(everyone[place], peer)
        }
        for place in range(len(everyone))
    }
    return [everyone[place] for place in _largest(list(range(len(everyone))), cuts)]


def reach_each_other(one: Beat, other: Beat) -> bool:
    return (
        one.member.nonce not in other.unreachable and other.member.nonce not in one.unreachable
    ) or one.member.key == other.member.key


def _largest(places: list[int], cuts: dict[int, set[int]]) -> list[int]:
    """Leave out either the process with the most cuts, or all from which it is cut."""
    most = max(places, key=lambda p: len(cuts[p].intersection(places)), default=-1)
    if most < 0 or not cuts[most].intersection(places):
        return places
    without = _largest([p for p in places if p != most], cuts)
    within = _largest([p for p in places if p not in cuts[most]], cuts)
    return min(without, within, key=lambda found: (-len(found), found))


def is_majority(ids: Collection[int], base: Sequence[int]) -> bool:
    """Whether ``ids`` are more than half of ``base``, or half of it with its lowest."""
    present = set(ids) & set(base)
    twice = 2 * len(present)
    return twice > len(base) or (twice == len(base) and min(base) in present)


def as_many_as_reach(group: Sequence[Beat], others: Sequence[Beat]) -> list[Beat]:
    """Return those of ``others``, in order, that reach all of the group and each other."""
    taken: list[Beat] = []
    for one in others:
        if all(reach_each_other(one, peer) for peer in (*group, *taken)):
            taken.append(one)
    return taken
