"""How far rounds are, which of them count, and the bytes of it.

A *stream* is one fragment at one worker of a replica. Its rounds have absolute positions, which are
used once: from the begin of the run, over all changes of the group. All members list the streams
in one order. This module also has the reader and the writer that records and messages share.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Workers times fragments of a replica.
MOST_STREAMS = 1 << 16
# Rounds of a stream that one process names: those under way, and as many that may have ended.
MOST_ROUNDS = 64
_TOP = 1 << 62


@dataclass(frozen=True)
class Rounds:
    """The latest rounds of one stream.

    In a process's own ``Rounds`` a bit says that this process holds the whole result of a round: it
    has voted for it, or has applied it. In a decision a bit says that the round counts. Rounds
    before ``first`` have ended on all members.

    Attributes:
        first: Position of the round of bit 0.
        num: Rounds that are named: positions ``first`` to ``end - 1``.
        bits: One bit for each of these rounds.
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
        """The position of the next round."""
        return self.first + self.num

    def holds(self, position: int) -> bool:
        """Whether the bit of a round is set; False for a round that is not named."""
        return self.first <= position < self.end and bool(self.bits >> position - self.first & 1)


# The rounds of one process or of a decision, in the order of the streams; () without any state.
Positions = tuple[Rounds, ...]


def decide(sealed: Iterable[Positions]) -> Positions:
    """Return which rounds count: a round counts if all hold its result.

    Args:
        sealed: The rounds of the members that go on, as they were when they sealed. A member
            without state, which has given (), has voted for nothing and settled nothing.

    Returns:
        () if no member has any state: then nothing is decided.

    Raises:
        ValueError: If members have other streams, or are further apart than rounds are named.
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
    """Bytes that hold no message, no record or no part of one."""


class Writer:
    """Collects the bytes of a record or a message."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def fixed(self, form: str, *values: int | bytes) -> None:
        """Write values of fixed size, as ``struct`` does, the lowest byte first."""
        self._parts.append(struct.pack("<" + form, *values))

    def number(self, value: int) -> None:
        """Write a number from 0 on, in seven bits a byte."""
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
        """Write the rounds of all streams; successive streams that are alike take one entry."""
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
        """Read values of fixed size."""
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))

    def number(self, most: int = _TOP) -> int:
        """Read a number of at most ``most``."""
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
        """Check that all bytes are read."""
        if self._at != len(self._content):
            raise Damaged

    def _take(self, num_bytes: int) -> bytes:
        taken = self._content[self._at : self._at + num_bytes]
        if len(taken) != num_bytes:
            raise Damaged
        self._at += num_bytes
        return taken
