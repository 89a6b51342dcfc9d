"""Messages of processes about the next record, and their bytes.

    HERE      a member has stopped in its record, or its caller demands a group: who leads?
    PREPARE   proposer to members: stop in the base, and get ready for these members
    SEALED    member to proposer: this process has stopped for good; how far it is
    READY     member to proposer: every member is heard on a link, and the devices are connected
    NO        the answer to HERE or PREPARE that goes no further, and why
    OPEN      proposer to members, and the answer on a lower base: a later record

A message belongs to the channel of one run, between two processes that know each other's nonces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from .records import (
    MAX_RECORD_BYTES,
    NO_HASH,
    NO_RECORD,
    NONCE_BYTES,
    Attempt,
    Key,
    read_members,
    write_members,
)
from .streams import Damaged, Positions, Reader, Writer

VERSION = 1
# An OPEN with the longest record is the longest message.
MAX_MESSAGE_BYTES = MAX_RECORD_BYTES + 64
MAX_TEXT_BYTES = 1024
_MOST_MEMBERS = MAX_RECORD_BYTES // 24
_MAX_NUMBER = 0xFFFFFFFF
MISSING = "nothing"
_LONGEST_VALUE = 200

# The attempt of a NO that answers HERE.
NO_ATTEMPT = Attempt(bytes(NONCE_BYTES), 0)


class Why(IntEnum):
    """The reason of a NO.

    CUT: no way to some members. SETTINGS: another model or other settings. MEMBERS: the caller of
    this process demands other members. FAILED: a member could not connect, whatever the reason; a
    proposer says this of its own attempt, too; without an attempt, the caller of this process waits
    no longer. KEY: as CUT, where a member does not let in the keys
    of others; a proposer says this to them, too.
    """

    CUT = 1
    SETTINGS = 2
    MEMBERS = 3
    FAILED = 4
    KEY = 5


@dataclass(frozen=True)
class Here:
    """A member has stopped in its base, or is told with whom to go on.

    Attributes:
        base: Number of the record that it has entered; NO_RECORD for a newcomer.
        base_hash: Hash of that record.
        demand: Numbers that its caller demands; () for all that live.
        cut: Nonces of members that it cannot reach.
    """

    base: int
    base_hash: bytes
    demand: tuple[int, ...] = ()
    cut: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Prepare:
    """A proposer asks members to stop in the base.

    Attributes:
        base: Number of the record from which they go on; NO_RECORD where the run is founded.
        base_hash: Hash of that record.
        members: All members of the next record, by number.
        joined: Numbers of members that bring no state of the base.
        is_patient: Rounds under way end before a member seals, as nobody is left out.
        settings: Hash of what must be equal on all members.
        table: Id of the table for which the next record is made.
        cause: For people.
    """

    attempt: Attempt
    base: int
    base_hash: bytes
    members: tuple[Key, ...]
    joined: tuple[int, ...]
    settings: bytes
    table: bytes
    is_patient: bool = False
    cause: str = ""


@dataclass(frozen=True)
class Sealed:
    """A promise: this process votes and applies nothing any more, except by the next record.

    Attributes:
        positions: How far it is; () if it never came to hold the state.
        inner_step: That it has reached.
    """

    attempt: Attempt
    base: int
    positions: Positions
    inner_step: int


@dataclass(frozen=True)
class Ready:
    """Every member of the attempt is heard on a link, and devices are connected."""

    attempt: Attempt


@dataclass(frozen=True)
class No:
    """A refusal.

    Attributes:
        attempt: NO_ATTEMPT as the answer to HERE.
        cut: Nonces of members to which it has no way.
        demand: Numbers that its caller demands.
        text: One sentence for people, or "".
    """

    attempt: Attempt
    why: Why
    cut: tuple[bytes, ...] = ()
    demand: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Open:
    """Attributes: record: The bytes of the next record."""

    record: bytes


Message = Here | Prepare | Sealed | Ready | No | Open


def encode(message: Message) -> bytes:
    """Return the bytes of a message.

    Raises:
        ValueError: If they would be too long.
    """
    kind, values = type(message), list(vars(message).values())
    writer = Writer()
    writer.fixed("BB", VERSION, _KINDS.index(kind))
    for part in _PARTS[kind]:
        part.write(writer, *values[: part.num_fields])
        del values[: part.num_fields]
    content = writer.bytes
    if len(content) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a message {kind.__name__} of the group has {len(content)} bytes, at most "
            f"{MAX_MESSAGE_BYTES} are allowed"
        )
    return content


def decode(content: bytes) -> Message:
    """Return the message that bytes hold.

    Raises:
        ValueError: If they hold none, with one sentence; no other error.
    """
    if content[:1] and content[0] != VERSION:
        raise ValueError(
            f"a message of the group has version {content[0]}, and this diloco_comm reads version "
            f"{VERSION}: let all replicas run the same version of diloco_comm"
        )
    try:
        if not 2 <= len(content) <= MAX_MESSAGE_BYTES or content[1] >= len(_KINDS):
            raise Damaged
        kind, reader = _KINDS[content[1]], Reader(content[2:])
        values = [value for part in _PARTS[kind] for value in part.read(reader)]
        reader.end()
    except Damaged:
        shown = repr(content[:40]) + ("..." if len(content) > 40 else "")
        raise ValueError(f"a message of the group is damaged: {shown}") from None
    return kind(*values)


# ------------------------------------------------------------------------ the bytes of fields


class _Part(NamedTuple):
    """The bytes of one field of a message, or of successive ones.

    Attributes:
        write: Writes the values of the fields.
        read: Returns them.
    """

    write: Callable[..., None]
    read: Callable[[Reader], Iterable[Any]]
    num_fields: int = 1


def _one_of(*choices: int) -> _Part:
    """Return one byte for one of these values."""

    def read(reader: Reader) -> list[int]:
        (value,) = reader.fixed("B")
        if value not in choices:
            raise Damaged
        return [choices[choices.index(value)]]

    return _Part(lambda writer, value: writer.fixed("B", value), read)


def _write_base(writer: Writer, base: int, base_hash: bytes) -> None:
    writer.number(base)
    writer.fixed("16s", base_hash)


def _read_base(reader: Reader) -> tuple[int, bytes]:
    base = reader.number()
    (base_hash,) = reader.fixed("16s")
    if (base == NO_RECORD) != (base_hash == NO_HASH):
        raise Damaged
    return base, base_hash


def _write_nonces(writer: Writer, nonces: tuple[bytes, ...]) -> None:
    writer.number(len(nonces))
    for nonce in nonces:
        writer.fixed("16s", nonce)


def _read_nonces(reader: Reader) -> list[tuple[bytes, ...]]:
    return [tuple([reader.fixed("16s")[0] for _ in range(reader.number(_MOST_MEMBERS))])]


def _write_text(writer: Writer, text: str) -> None:
    # A cut may fall into a character of several bytes.
    short = text.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
    writer.blob(short.encode())


def _read_text(reader: Reader) -> list[str]:
    try:
        return [reader.blob(MAX_TEXT_BYTES).decode()]
    except UnicodeDecodeError:
        raise Damaged from None


_ATTEMPT = _Part(
    lambda writer, attempt: writer.fixed("16sI", *attempt),
    lambda reader: [Attempt(*reader.fixed("16sI"))],
)
_BASE = _Part(_write_base, _read_base, 2)
_HASH = _Part(lambda writer, value: writer.fixed("16s", value), lambda reader: reader.fixed("16s"))
_MEMBERS = _Part(write_members, read_members, 2)
_NONCES = _Part(_write_nonces, _read_nonces)
_NUMBER = _Part(Writer.number, lambda reader: [reader.number()])
_NUMBERS = _Part(Writer.numbers, lambda reader: [reader.numbers(_MOST_MEMBERS, _MAX_NUMBER)])
_POSITIONS = _Part(Writer.positions, lambda reader: [reader.positions()])
_RECORD = _Part(Writer.blob, lambda reader: [reader.blob(MAX_RECORD_BYTES)])
_TEXT = _Part(_write_text, _read_text)
# The parts of each message, in the order of its fields.
_PARTS: dict[type[Message], tuple[_Part, ...]] = {
    Here: (_BASE, _NUMBERS, _NONCES),
    Prepare: (_ATTEMPT, _BASE, _MEMBERS, _HASH, _HASH, _one_of(False, True), _TEXT),
    Sealed: (_ATTEMPT, _NUMBER, _POSITIONS, _NUMBER),
    Ready: (_ATTEMPT,),
    No: (_ATTEMPT, _one_of(*Why), _NONCES, _NUMBERS, _TEXT),
    Open: (_RECORD,),
}
_KINDS = tuple(_PARTS)


# ------------------------------------------------------------------------- settings that differ


def other_settings(run: str, own: int, other: int, here: str = "", there: str = "") -> str:
    """Return why a replica cannot join a run, in one sentence.

    Args:
        own, other: Numbers of the replica and of a member with other settings.
        here, there: The settings and the model of the two, as JSON; "" where unknown. The sentence
            names the first value that differs.
    """
    try:
        where = (f"on replica {own}", f"on replica {other}")
        found = difference(json.loads(here), json.loads(there), where=where)
    except (ValueError, RecursionError):
        found = ""
    found = found or f"replica {own} has another model or other settings than replica {other}"
    return (
        f"replica {own} cannot join run {run!r}, as {found}: start replica {own} with the model, "
        "settings and number of workers of the members"
    )


def difference(
    here: Any, there: Any, name: str = "", where: tuple[str, str] = ("here", "there")
) -> str:
    """Say where two values of JSON types differ first; "" if they are equal.

    Args:
        here, there: The values of this replica and of another one.
        name: The keys that lead to the values, with dots; "" at the top.
        where: Words for the two replicas.
    """
    if here == there:
        return ""
    if isinstance(here, dict) and isinstance(there, dict):
        values = {key: (here.get(key, MISSING), there.get(key, MISSING)) for key in here | there}
        key = next(key for key, (ours, theirs) in values.items() if ours != theirs)
        return difference(*values[key], f"{name}.{key}" if name else key, where)
    if isinstance(here, list) and isinstance(there, list):
        longest = range(max(len(here), len(there)))
        ours, theirs = ([*one, *[MISSING] * (len(longest) - len(one))] for one in (here, there))
        place = next(index for index in longest if ours[index] != theirs[index])
        return difference(ours[place], theirs[place], f"{name}[{place}]", where)
    return f"{name} is {_shown(here)} {where[0]} and {_shown(there)} {where[1]}"


def _shown(value: Any) -> str:
    text = value if value == MISSING else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
