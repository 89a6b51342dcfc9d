"""The messages by which processes agree on the next record, and their bytes.

    HERE      to the process that is to lead: the sender has stopped, or its caller demands a group
    PREPARE   proposer to members: stop in your record, and connect to the members of the next one
    SEALED    member to proposer: the sender has stopped for good, and how far its rounds are
    READY     member to proposer: the sender is connected to every member of the next record
    NO        refuses a HERE or a PREPARE, or ends an attempt or a caller's wait, and says why
    OPEN      brings a record: from its proposer to its members, or to a process that is behind

The *base* is the record that a process has entered, and from which it goes on to the next one.
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

# The attempt in a NO about no attempt: the NO answers HERE, or a caller waits no longer.
NO_ATTEMPT = Attempt(bytes(NONCE_BYTES), 0)


class Why(IntEnum):
    """The reason of a NO.

    CUT: the sender cannot reach some members. SETTINGS: the sender has another model or other
    settings. MEMBERS: the sender's caller demands other members. FAILED: a member could not
    connect, whatever the reason; a proposer also ends its own attempt with this NO. With
    ``NO_ATTEMPT``, the sender's caller waits no longer. KEY: the sender does not let in the keys of
    some members; the proposer passes this on to them.
    """

    CUT = 1
    SETTINGS = 2
    MEMBERS = 3
    FAILED = 4
    KEY = 5


@dataclass(frozen=True)
class Here:
    """The sender has stopped in its base, or its caller demands these members.

    It also answers a PREPARE of another base or table than the sender's.

    Attributes:
        base: Number of the record that the sender has entered; NO_RECORD for a newcomer.
        base_hash: Hash of that record.
        demand: Numbers of the replicas that its caller demands; () for all that live.
        cut: Nonces of members that the sender cannot reach.
    """

    base: int
    base_hash: bytes
    demand: tuple[int, ...] = ()
    cut: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Prepare:
    """The proposer asks the members of the next record to stop in the base and to connect.

    Attributes:
        base: Number of the record from which they go on; NO_RECORD where the run is founded.
        base_hash: Hash of that record.
        members: All members of the next record, by number.
        joined: Numbers of the members that bring no outer state of the base.
        is_patient: Nobody is left out, so that rounds under way can end before a member seals.
        settings: Hash of the settings that must be equal on all members.
        table: Id of the table for which the next record is made.
        cause: Why the group changes, for people.
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
        base: Number of the record that the sender has entered.
        positions: How far each stream of the sender is; () if it never held the outer state.
        inner_step: The inner step that the sender has reached.
    """

    attempt: Attempt
    base: int
    positions: Positions
    inner_step: int


@dataclass(frozen=True)
class Ready:
    """The sender has connected its link, and its devices, to every member of the attempt."""

    attempt: Attempt


@dataclass(frozen=True)
class No:
    """A refusal.

    Attributes:
        attempt: The attempt that is refused or ended; NO_ATTEMPT where there is none.
        cut: Nonces of members that the sender cannot reach, or whose keys it does not let in.
        demand: Numbers of the replicas that the sender's caller demands.
        text: One sentence for people, or "".
    """

    attempt: Attempt
    why: Why
    cut: tuple[bytes, ...] = ()
    demand: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Open:
    """A record that its receiver may not have entered yet, as bytes."""

    record: bytes


Message = Here | Prepare | Sealed | Ready | No | Open


def encode(message: Message) -> bytes:
    """Return the bytes of a message.

    Raises:
        ValueError: If the message is longer than ``MAX_MESSAGE_BYTES``.
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
        ValueError: If the bytes hold no message of this version. Bytes raise no other error.
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
    """How one field of a message, or ``num_fields`` successive ones, become bytes and back.

    Attributes:
        write: Takes a ``Writer`` and the values of the fields.
        read: Takes a ``Reader``, and returns the values.
    """

    write: Callable[..., None]
    read: Callable[[Reader], Iterable[Any]]
    num_fields: int = 1


def _one_of(*choices: int) -> _Part:
    """Return the part for a field of one byte, which has one of these values."""

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
    # The limit may fall within a character of several bytes: drop its first bytes, too.
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
        run: Name of the run.
        own, other: Numbers of the replica and of a member with other settings.
        here, there: Settings and model of the replica and of that member, as JSON; "" where
            unknown. If both are known, the sentence names the first value that differs.
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
        where: How the sentence names the two replicas, such as "on replica 3".
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
