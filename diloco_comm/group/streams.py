"""Streams: how far their rounds are, which rounds count, and how records and messages encode this.

A *stream* is one fragment at one worker of a replica. Its rounds are numbered from the begin of the
run, over all changes of the group; such a number is a *position*, and is used once. All members
list the streams in one order. The reader and the writer serve all fields of records and messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# The most streams of a replica: workers times fragments.
MOST_STREAMS = 1 << 16
# The most rounds of a stream that a process names: those under way, and some that have ended.
MOST_ROUNDS = 64
_TOP = 1 << 62


@dataclass(frozen=True)
class Rounds:
    """The latest rounds of one stream, with one bit for each.

    Where a process says how far it is, a set bit means that it holds the whole result of that
    round: it has voted yes, or has applied the result. In a decision a set bit means that the
    round counts. Rounds before ``first`` have ended on all members.

    Attributes:
        first: Position of the round of bit 0.
        num: How many rounds have a bit: positions ``first`` to ``end - 1``.
        bits: The bits, as one integer.
    """

    first: int
    num: int
    bits: int

    def __post_init__(self) -> None:
        if not (0 <= self.first <= _TOP and 0 <= self.num <= MOST_ROUNDS):
            raise ValueError(
                f"a stream names {self.num} rounds from position {self.first} on, at most "
                f"{MOST_ROUNDS} can be named"
            )
        if not 0 <= self.bits < 1 << self.num:
            raise ValueError(f"a stream with {self.num} rounds has the bits {self.bits:#x}")

    @property
    def end(self) -> int:
        """The position behind the last named round."""
        return self.first + self.num

    def holds(self, position: int) -> bool:
        """Whether the round at this position has a bit, and the bit is set."""
        return self.first <= position < self.end and bool(self.bits >> position - self.first & 1)


# The rounds of all streams, in order, of one process or of a decision; () from a process that never
# held the outer state.
Positions = tuple[Rounds, ...]


def decide(sealed: Iterable[Positions]) -> Positions:
    """Return which rounds count: those whose result all members with outer state hold.

    Args:
        sealed: The rounds of each member that goes on, as they were when it sealed; () from a
            member that never held the outer state, and so has voted for nothing.

    Returns:
        For each stream, the rounds that count, from the furthest ``first`` to the furthest ``end``;
        () if no member holds the outer state.

    Raises:
        ValueError: If members have different numbers of streams, or one is so far behind that
            the others do not name its next round any more.
    """
    held = [positions for positions in sealed if positions]
    if len({len(positions) for positions in held}) > 1:
        raise ValueError(f"members have {sorted({len(p) for p in held})} streams: they must agree")
    return tuple(map(_decide_stream, zip(*held, strict=True)))


def _decide_stream(members: Sequence[Rounds]) -> Rounds:
    first, end = max(one.first for one in members), max(one.end for one in members)
    if min(one.end for one in members) < first:
        raise ValueError(
            f"a member is at round {min(one.end for one in members)} of a stream, and the others "
            f"name rounds from {first} on only"
        )
    bits = (1 << end - first) - 1
    for one in members:
        bits &= one.bits >> first - one.first
    return Rounds(first, end - first, bits)


# -------------------------------------------------------------------------------------- bytes


class Damaged(ValueError):
    """The bytes do not hold the message, record or field that they should."""


class Writer:
    """Collects the bytes of a record or a message."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def fixed(self, form: str, *values: int | bytes) -> None:
        """Write values in the ``struct`` format ``form``, little-endian and without padding."""
        self._parts.append(struct.pack("<" + form, *values))

    def number(self, value: int) -> None:
        """Write an integer of at least 0: seven bits a byte, lowest first; bit 7: more follow."""
        assert value >= 0
        while value > 0x7F:
            self._parts.append(bytes([value & 0x7F | 0x80]))
            value >>= 7
        self._parts.append(bytes([value]))

    def numbers(self, values: Sequence[int]) -> None:
        self.number(len(values))
        for value in values:
            self.number(value)

    def blob(self, value: bytes) -> None:
        self.number(len(value))
        self._parts.append(value)

    def positions(self, positions: Positions) -> None:
        """Write the rounds of all streams; successive equal ones take one entry with a count."""
        runs: list[list[int]] = []
        low = min((one.first for one in positions), default=0)
        for one in positions:
            entry = [one.first - low, one.num, one.bits]
            if runs and runs[-1][1:] == entry:
                runs[-1][0] += 1
            else:
                runs.append([1, *entry])
        self.number(low)
        self.number(len(runs))
        for run in runs:
            for value in run:
                self.number(value)

    @property
    def bytes(self) -> bytes:
        return b"".join(self._parts)


class Reader:
    """Reads what a ``Writer`` has written.

    Every method raises ``Damaged`` where the bytes end too early or hold too much.
    """

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def fixed(self, form: str) -> tuple[Any, ...]:
        """Read the values of a ``struct`` format, see ``Writer.fixed``."""
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))

    def number(self, most: int = _TOP) -> int:
        """Read an integer from 0 to ``most``."""
        value = shift = 0
        while True:
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if value > most or shift > 70:
                raise Damaged
            if byte < 0x80:
                return value

    def numbers(self, most_numbers: int, most: int = _TOP) -> tuple[int, ...]:
        return tuple([self.number(most) for _ in range(self.number(most_numbers))])

    def blob(self, most_bytes: int) -> bytes:
        return self._take(self.number(most_bytes))

    def positions(self) -> Positions:
        low = self.number()
        positions: list[Rounds] = []
        for _ in range(self.number(MOST_STREAMS)):
            num_alike = self.number(MOST_STREAMS - len(positions))
            first, num, bits = low + self.number(), self.number(MOST_ROUNDS), self.number(1 << 64)
            try:
                positions += [Rounds(first, num, bits)] * num_alike
            except ValueError:
                raise Damaged from None
        return tuple(positions)

    def end(self) -> None:
        """Raise ``Damaged`` if bytes are left over."""
        if self._at != len(self._content):
            raise Damaged

    def _take(self, num_bytes: int) -> bytes:
        taken = self._content[self._at : self._at + num_bytes]
        if len(taken) != num_bytes:
            raise Damaged
        self._at += num_bytes
        return taken
