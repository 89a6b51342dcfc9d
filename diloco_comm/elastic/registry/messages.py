"""Messages between the registry's server and its clients: a fixed header, then raw frames.

The header has 57 bytes, little endian:

    magic "DCRG", protocol u16, kind u16, number u64, registry id 16 bytes, server nonce 16 bytes,
    durable u8

An answer repeats the number of its request. A request holds the id of the registry that its client
knows, or zeros. Nothing is unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ...base import extension
from ...base.extension import REGISTRY as PROTOCOL
from .protocol import MAX_BEAT_BYTES, MAX_NAME, MAX_RECORD_BYTES

MAGIC = b"DCRG"
HEADER = struct.Struct("<4sHHQ16s16sB")
ID_BYTES = 16
NO_ID = bytes(ID_BYTES)
# Every frame is shorter; ZeroMQ ends the connection of a peer that sends a longer one.
MAX_FRAME = 2 * MAX_RECORD_BYTES
_MAX_NAME_BYTES = 4 * MAX_NAME
_MAX_SENTENCE = 2048


class Kind(IntEnum):
    """What a message says; the comment names the frames after the header."""

    # Requests.
    READ = 1  # run
    SWAP = 2  # run, old record, new record
    BEAT = 3  # run, member, text
    # Answers.
    RECORD = 32  # the record
    SWAPPED = 33  # b"\1" if the record was replaced, else b"\0"
    BEATS = 34  # member, text, member, text, ...
    REFUSED = 35  # a sentence; nothing was changed
    DOUBTFUL = 36  # a sentence; whether the swap will survive a crash is unknown
    STRANGER = 37  # a sentence; the request is for another registry


_REQUESTS = {
    Kind.READ: (_MAX_NAME_BYTES,),
    Kind.SWAP: (_MAX_NAME_BYTES, MAX_RECORD_BYTES, MAX_RECORD_BYTES),
    Kind.BEAT: (_MAX_NAME_BYTES, _MAX_NAME_BYTES, MAX_BEAT_BYTES),
}
_ANSWERS = {
    Kind.RECORD: (MAX_RECORD_BYTES,),
    Kind.SWAPPED: (1,),
    Kind.REFUSED: (_MAX_SENTENCE,),
    Kind.DOUBTFUL: (_MAX_SENTENCE,),
    Kind.STRANGER: (_MAX_SENTENCE,),
}
_LIMITS = {**_REQUESTS, **_ANSWERS}


@dataclass(frozen=True)
class Message:
    """One parsed message.

    Attributes:
        registry: Id of the registry, 16 bytes; zeros in a request of a client that knows none.
        nonce: Random bytes of the server's process; zeros in a request.
        parts: The frames after the header.
    """

    kind: Kind
    number: int
    registry: bytes = NO_ID
    nonce: bytes = NO_ID
    is_durable: bool = False
    parts: tuple[bytes, ...] = ()

    @property
    def sentence(self) -> str:
        """The text of a refusal."""
        return self.parts[0].decode(errors="replace")


class ProtocolError(ValueError):
    """Frames that are no message of this protocol; the text is one sentence.

    Attributes:
        number: Number of the request, if the frames begin like a message; else None.
        protocol: Version of the protocol that the frames are a message of, if it is another one.
    """

    number: int | None = None
    protocol: int | None = None


def pack(message: Message) -> list[bytes]:
    """Return the frames of a message."""
    header = HEADER.pack(
        MAGIC,
        PROTOCOL,
        message.kind,
        message.number,
        message.registry,
        message.nonce,
        message.is_durable,
    )
    return [header, *message.parts]


def parse(frames: Sequence[Any]) -> Message:
    """Turn frames (bytes or buffers) into a message.

    Raises:
        ProtocolError: If the frames are no message; any bytes are allowed as input.
    """
    first = bytes(frames[0]) if frames and len(frames[0]) == HEADER.size else b""
    if not first.startswith(MAGIC):
        raise ProtocolError("this is no message of a registry")
    _, protocol, of_kind, number, registry, nonce, is_durable = HEADER.unpack(first)
    try:
        if protocol != PROTOCOL:
            error = ProtocolError(extension.refusal(protocol, PROTOCOL))
            error.protocol = protocol
            raise error
        kind = _kind(of_kind)
        _check_parts(kind, [len(frame) for frame in frames[1:]])
    except ProtocolError as error:
        error.number = number
        raise
    parts = tuple(bytes(frame) for frame in frames[1:])
    return Message(kind, number, registry, nonce, bool(is_durable), parts)


def _kind(value: int) -> Kind:
    try:
        return Kind(value)
    except ValueError:
        raise ProtocolError(f"there is no kind of message {value}") from None


def _check_parts(kind: Kind, lengths: list[int]) -> None:
    if kind == Kind.BEATS:
        if len(lengths) % 2:
            raise ProtocolError("BEATS has a text for each member")
        return
    limits = _LIMITS[kind]
    if len(lengths) != len(limits):
        raise ProtocolError(
            f"{kind.name} has {len(limits)} frames after the header, got {len(lengths)}"
        )
    for length, limit in zip(lengths, limits, strict=True):
        if length > limit:
            raise ProtocolError(f"a frame of {kind.name} has {length} bytes, at most {limit} fit")
