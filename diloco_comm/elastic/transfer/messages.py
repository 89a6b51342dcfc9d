"""Messages between a replica that joins and its donors: a header, numbers as JSON, raw bytes.

The header has 16 bytes, little endian:

    magic "DCTR", protocol u16, kind u16, number u64

An answer repeats the number of its request. Nothing is unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ...base import extension
from ...base.extension import TRANSFER as PROTOCOL

MAGIC = b"DCTR"
HEADER = struct.Struct("<4sHHQ")
# Bytes of outer state or of payloads in one message, at most.
PIECE_BYTES = 4 << 20
MAX_REQUEST = 1024
# ZeroMQ ends the connection of a donor that sends a longer frame.
MAX_ANSWER = 2 * PIECE_BYTES


class Kind(IntEnum):
    """What a message says; the comment names its numbers."""

    # Requests.
    STATUS = 1  # nothing
    STATE = 2  # fragment, begin, end: elements
    DIGEST = 3  # fragment, begin, end: elements
    ROUND = 4  # fragment, number, begin, end: bytes
    # Answers.
    IS_AT = 32  # fragments: list of a standing; log: list of a logged round; num_newcomers
    ELEMENTS = 33  # round, history, num_steps, digest; the body has the elements
    HASHED = 34  # round, history, num_steps, digest
    PAYLOADS = 35  # digest; the body has the bytes
    LATER = 36  # nothing: ask again
    GONE = 37  # nothing: the log does not have that round, or not any more
    REFUSED = 38  # sentence


NUMBERS: Mapping[Kind, tuple[str, ...]] = {
    Kind.STATUS: (),
    Kind.STATE: ("fragment", "begin", "end"),
    Kind.DIGEST: ("fragment", "begin", "end"),
    Kind.ROUND: ("fragment", "number", "begin", "end"),
    Kind.ELEMENTS: ("round", "history", "num_steps", "digest"),
    Kind.HASHED: ("round", "history", "num_steps", "digest"),
    Kind.PAYLOADS: ("digest",),
    Kind.LATER: (),
    Kind.GONE: (),
}
REQUESTS = (Kind.STATUS, Kind.STATE, Kind.DIGEST, Kind.ROUND)


class ProtocolError(ValueError):
    """Frames that are no message of this protocol; the text is one sentence."""


@dataclass(frozen=True)
class Message:
    """One parsed message.

    Attributes:
        numbers: As the comments of ``Kind`` name them.
        body: Raw bytes; b"" for most kinds.
    """

    kind: Kind
    number: int
    numbers: Mapping[str, Any] = field(default_factory=dict)
    body: Any = b""


def pack(message: Message) -> list[Any]:
    """Return the frames of a message."""
    header = HEADER.pack(MAGIC, PROTOCOL, message.kind, message.number)
    return [header, json.dumps(message.numbers).encode(), message.body]


def parse(frames: Sequence[Any]) -> Message:
    """Turn frames (bytes or buffers) into a message.

    Raises:
        ProtocolError: If the frames are no message; any bytes are allowed as input.
    """
    if len(frames) != 3 or len(frames[0]) != HEADER.size:
        raise ProtocolError("this is no message of a replica that joins, or of its donor")
    magic, protocol, of_kind, number = HEADER.unpack(bytes(frames[0]))
    if magic != MAGIC:
        raise ProtocolError("this is no message of a replica that joins, or of its donor")
    if protocol != PROTOCOL:
        raise ProtocolError(extension.refusal(protocol, PROTOCOL))
    try:
        kind = Kind(of_kind)
        numbers = json.loads(bytes(frames[1]))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be read: {error}") from None
    if not isinstance(numbers, dict) or not _has_numbers(kind, numbers):
        raise ProtocolError(f"{kind.name} has the numbers {NUMBERS.get(kind)}")
    return Message(kind, number, numbers, frames[2])


def _has_numbers(kind: Kind, numbers: Mapping[str, Any]) -> bool:
    return all(type(numbers.get(name)) is int for name in NUMBERS.get(kind, ()))
