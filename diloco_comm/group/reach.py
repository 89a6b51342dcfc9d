"""The largest group of members that can go on together when some pairs cannot reach each other.

Members and cut pairs are the points and edges of a graph. A group in which all reach each other is
a set of points without an edge between them, so the largest group is a largest independent set.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

# The most members that all steps of one search may look at: about 0.1 s in Python.
MOST_LOOKS = 100_000
Name = TypeVar("Name", bound=Hashable)


def largest_group(members: Sequence[Name], cuts: Iterable[tuple[Name, Name]]) -> list[Name]:
    """Return the largest set of members that all reach each other, as ``largest_connected`` does.

    Args:
        members: Names; of two sets of equal size, the one with earlier names wins.
        cuts: Pairs of names; a pair with a name that no member has is left out.
    """
    place = {name: index for index, name in enumerate(members)}
    pairs = [(place[a], place[b]) for a, b in cuts if a in place and b in place]
    return [members[index] for index in largest_connected(len(members), pairs)]


def largest_connected(num_members: int, cuts: Iterable[tuple[int, int]]) -> list[int]:
    """Return the largest set of members that all reach each other.

    The set with the lowest members wins among equally large ones. The work is bounded: if an exact
    search needs more than ``MOST_LOOKS``, the function returns a large set that need not be the
    largest. The result depends on the arguments alone, so that all processes find the same set.

    Args:
        num_members: The members are the numbers from 0 to ``num_members - 1``.
        cuts: Pairs that cannot reach each other, in any order. A pair of equal numbers is no cut.

    Returns:
        Members in rising order.

    Raises:
        ValueError: If a pair names no member.
    """
    apart = [0] * num_members
    if not (cuts := list(cuts)):
        return list(range(num_members))
    for one, other in cuts:
        if not (0 <= one < num_members and 0 <= other < num_members):
            raise ValueError(f"the pair {one}, {other} is not of members 0 to {num_members - 1}")
        if one != other:
            apart[one] |= 1 << other
            apart[other] |= 1 << one
    everyone = (1 << num_members) - 1
    search = _Search(apart)
    chosen = 0
    for part in _parts(everyone, apart):
        try:
            chosen |= search.lowest(part)
        except _TooMuch:
            chosen |= _greedy(part, apart)
    return list(_members(chosen))


class _TooMuch(Exception):
    """The search has looked at more members than it may."""


class _Search:
    """Exact search. A set of members is an integer: bit i is set if member i is in the set.

    Args:
        apart: For each member, the set of members that it cannot reach.
    """

    def __init__(self, apart: Sequence[int]) -> None:
        self._apart = apart
        self._sizes: dict[int, int] = {}
        self._num_looks = 0

    def lowest(self, part: int) -> int:
        """Return the largest subset of ``part`` whose members all reach each other.

        Among equally large subsets, it is the one with the lowest members.

        Args:
            part: A set of members without a cut to any member outside the set.

        Raises:
            _TooMuch: If the search would look at more than ``MOST_LOOKS`` members.
        """
        chosen, size = 0, self.size(part)
        for member in _members(part):
            if not part >> member & 1:
                continue
            within = self._within(part, member)
            if 1 + self.size(within) == size:
                chosen, part, size = chosen | 1 << member, within, size - 1
            else:
                part &= ~(1 << member)
        return chosen

    def size(self, members: int) -> int:
        """Return the size of the largest subset of ``members`` that all reach each other."""
        if members not in self._sizes:
            self._sizes[members] = sum(map(self._size_of_part, _parts(members, self._apart)))
        return self._sizes[members]

    def _size_of_part(self, members: int) -> int:
        """Return the same as ``size``, for members that cuts connect.

        Each turn of the loop takes a member with at most one cut, if there is any. Else it tries
        the member with the most cuts: a nested call takes that member, and the next turn goes on
        without it, so that calls nest little.
        """
        best = num_taken = 0
        while members:
            self._look(members)
            num_cuts = {m: (self._apart[m] & members).bit_count() for m in _members(members)}
            least = min(num_cuts, key=lambda member: num_cuts[member])
            most = max(num_cuts, key=lambda member: num_cuts[member])
            if num_cuts[least] <= 1:
                # Some largest set has this member: it has one cut at most.
                num_taken += 1
                members = self._within(members, least)
                continue
            if num_cuts[most] > 2:
                best = max(best, num_taken + 1 + self.size(self._within(members, most)))
            # If each has exactly two cuts, these form rings: any one member can be left out.
            members &= ~(1 << most)
            if len(list(_parts(members, self._apart))) > 1:
                return max(best, num_taken + self.size(members))
        return max(best, num_taken)

    def _within(self, members: int, member: int) -> int:
        """Return the ``members`` that reach ``member``, without itself."""
        return members & ~(self._apart[member] | 1 << member)

    def _look(self, members: int) -> None:
        self._num_looks += members.bit_count()
        if self._num_looks > MOST_LOOKS:
            raise _TooMuch


def _greedy(part: int, apart: Sequence[int]) -> int:
    """Return a large set, not always the largest: take the member with the fewest cuts each time.

    Among members with equally few cuts, the lowest is taken.
    """
    chosen = 0
    while part:
        best = min(_members(part), key=lambda member: ((apart[member] & part).bit_count(), member))
        chosen |= 1 << best
        part &= ~(apart[best] | 1 << best)
    return chosen


def _parts(members: int, apart: Sequence[int]) -> Iterator[int]:
    """Yield the connected components of the graph of cuts, the one with the lowest member first."""
    while members:
        part = edge = members & -members
        while edge:
            around = 0
            for member in _members(edge):
                around |= apart[member]
            edge = around & members & ~part
            part |= edge
        yield part
        members &= ~part


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
