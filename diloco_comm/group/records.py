"""Records: each says which replicas train together; the table holds the newest one.

Record n + 1 names record n by its hash, and says which rounds count that were under way when its
members stopped in record n. The table replaces its record by compare-and-swap only, so the records
form one chain, even if processes wrongly suspect each other. Records name processes, not addresses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .streams import Damaged, Positions, Reader, Writer

# An OPEN with a record of this length still fits into one control message of the link.
MAX_RECORD_BYTES = 60 << 10
NONCE_BYTES = HASH_BYTES = 16
# The first record has number 1.
NO_RECORD = 0
NO_HASH = bytes(HASH_BYTES)
# The first bytes of a record, and the version that follows them.
FIRST_BYTES = b"DCgr"
VERSION = 1
_MAX_NUMBER = 0xFFFFFFFF
_SOURCE, _FINISHED = 1, 2


class Key(NamedTuple):
    """One process.

    Attributes:
        number: The replica's number, which it keeps when its process starts again.
        nonce: 16 random bytes that name the process; it draws new ones when it starts again.
    """

    number: int
    nonce: bytes


class Attempt(NamedTuple):
    """The name of one attempt to go from a record to the next; a process makes one at a time.

    Attributes:
        proposer: The nonce of the process that leads the attempt.
        counter: How many attempts that process has begun, with this one.
    """

    proposer: bytes
    counter: int


@dataclass(frozen=True)
class Record:
    """The replicas that train together, and which rounds of the record before count.

    Attributes:
        number: One more than in the record before; 1 for the first record.
        parent: Hash of the record before; NO_HASH in the first record.
        table: Id of the table for which this record was made.
        founding: Hash of record 1; NO_HASH in record 1 itself.
        attempt: The attempt that led to this record.
        members: The processes that train together, by rising replica number.
        joined: Numbers of the members that bring no outer state of the record before.
        decision: For each stream (one fragment at one worker of a replica), which rounds of the
            record before count, and the number of the round with which the stream goes on.
        inner_step: The inner step from which the members go on.
        source: Number of the member whose outer state all members take, where the run begins or
            goes on from a checkpoint; None where the outer state of the record before goes on.
        left_out: Numbers of the members of the record before that are not members of this one.
        evicted: Numbers of those left out whose eviction somebody has asked for.
        is_finished: The members have taken all steps of the run.
    """

    number: int
    parent: bytes
    table: bytes
    founding: bytes
    attempt: Attempt
    members: tuple[Key, ...]
    joined: tuple[int, ...] = ()
    decision: Positions = ()
    inner_step: int = 0
    source: int | None = None
    left_out: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    is_finished: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple([member.number for member in self.members])

    def is_member(self, key: Key) -> bool:
        return key in self.members

    @property
    def run_id(self) -> bytes:
        """The same in all records that follow from one record 1, and in no other."""
        return self.hash if self.founding == NO_HASH else self.founding

    def to_bytes(self) -> bytes:
        """Return the bytes of this record: equal bytes for equal records.

        Raises:
            ValueError: If they are more than ``MAX_RECORD_BYTES``.
        """
        return _to_bytes(self)

    @staticmethod
    def from_bytes(content: bytes) -> Record:
        """Return the record that these bytes hold.

        Raises:
            ValueError: If the bytes are no record, a damaged one, or one of another version.
        """
        return _from_bytes(content)

    @property
    def hash(self) -> bytes:
        """The hash of this record's bytes, 16 bytes, by which the next record names it."""
        return record_hash(_to_bytes(self))


def cause_of(record: Record) -> str:
    """Return why a record follows the record before, in one clause for people."""
    if record.parent == NO_HASH:
        return "the run begins"
    causes = [f"replicas {list(record.left_out)} left"] if record.left_out else []
    causes += [f"replicas {list(record.joined)} join"] if record.joined else []
    return ", ".join(causes) or "the members meet again"


def record_hash(content: bytes) -> bytes:
    """Return the hash of a record's bytes, which is its name in the next record."""
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


@lru_cache(maxsize=64)
def _to_bytes(record: Record) -> bytes:
    flags = _SOURCE * (record.source is not None) | _FINISHED * record.is_finished
    writer = Writer()
    writer.fixed("4sHH", FIRST_BYTES, VERSION, flags)
    writer.fixed("Q16s16s16s", record.number, record.parent, record.table, record.founding)
    writer.fixed("16sI", record.attempt.proposer, record.attempt.counter)
    writer.fixed("qI", record.inner_step, record.source or 0)
    write_members(writer, record.members, record.joined)
    writer.positions(record.decision)
    writer.numbers(record.left_out)
    writer.numbers(record.evicted)
    content = writer.bytes
    if len(content) > MAX_RECORD_BYTES:
        raise ValueError(
            f"the record of {len(record.members)} members and {len(record.decision)} streams has "
            f"{len(content)} bytes, and a table holds {MAX_RECORD_BYTES}: let fewer replicas "
            "train, or divide the model into fewer fragments"
        )
    return content


@lru_cache(maxsize=64)
def _from_bytes(content: bytes) -> Record:
    if content[: len(FIRST_BYTES)] != FIRST_BYTES:
        raise ValueError(f"the table holds no record of a group: {_start(content)}")
    version = int.from_bytes(content[4:6], "little")
    if version != VERSION:
        raise ValueError(
            f"the table's record has version {version}, and this diloco_comm reads version "
            f"{VERSION}: let all replicas run the same version of diloco_comm"
        )
    try:
        record = _read(Reader(content))
    except Damaged:
        record = None
    if record is None or _to_bytes(record) != content:
        raise ValueError(f"the table's record of a group is damaged: {_start(content)}")
    return record


def _read(reader: Reader) -> Record:
    _, _, flags = reader.fixed("4sHH")
    number, parent, table, founding = reader.fixed("Q16s16s16s")
    proposer, counter = reader.fixed("16sI")
    inner_step, source = reader.fixed("qI")
    members, joined = read_members(reader)
    decision = reader.positions()
    left_out, evicted = (reader.numbers(MAX_RECORD_BYTES, _MAX_NUMBER) for _ in range(2))
    reader.end()
    if not 0 < number < 1 << 62 or (number == 1) != (founding == NO_HASH):
        raise Damaged
    return Record(
        number=number,
        parent=parent,
        table=table,
        founding=founding,
        attempt=Attempt(proposer, counter),
        members=members,
        joined=joined,
        decision=decision,
        inner_step=inner_step,
        source=source if flags & _SOURCE else None,
        left_out=left_out,
        evicted=evicted,
        is_finished=bool(flags & _FINISHED),
    )


def write_members(writer: Writer, members: Sequence[Key], joined: Sequence[int]) -> None:
    """Write members, 24 bytes each: number, whether the number is in ``joined``, nonce."""
    writer.number(len(members))
    for member in members:
        writer.fixed("II16s", member.number, member.number in joined, member.nonce)


def read_members(reader: Reader) -> tuple[tuple[Key, ...], tuple[int, ...]]:
    """Read members in the order of their numbers, and the numbers of those that have joined.

    Raises:
        Damaged: If there are none, or they are out of order.
    """
    members: list[Key] = []
    joined: list[int] = []
    for _ in range(reader.number(MAX_RECORD_BYTES // 24)):
        number, has_joined, nonce = reader.fixed("II16s")
        if has_joined not in (0, 1) or (members and number <= members[-1].number):
            raise Damaged
        members.append(Key(number, nonce))
        joined += [number] * bool(has_joined)
    if not members:
        raise Damaged
    return tuple(members), tuple(joined)


def _start(content: bytes) -> str:
    return repr(content[:40]) + ("..." if len(content) > 40 else "")
