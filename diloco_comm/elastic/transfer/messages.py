"""Requests of a replica that joins, and the heads of answers; csrc/exchange/joining has the rest.

A request has 32 bytes, the head of an answer 40, both little endian. Nothing is unpickled.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor

from ... import _C
from ...rounds.part import SyncedFragment
from ...rounds.round_log import Standing, state_tensors

# Bytes of outer state or of payloads in one answer, at most.
PIECE_BYTES: int = _C.StateSource.MOST_BYTES
# Bytes of a status or of a sentence, at most.
MOST_TEXT = 8 << 20

# Kind and fragment; number; begin and end.
_REQUEST = struct.Struct("<IIQQQ")
# Kind and zero; round, history and num_steps of a standing; digest.
_HEAD = struct.Struct("<IIQQQQ")


class Kind(IntEnum):
    """A request asks for this, or an answer holds this; see ``StateSource``."""

    STATUS = 1
    STATE = 2
    DIGEST = 3
    ROUND = 4
    IS_AT = 32
    ELEMENTS = 33
    HASHED = 34
    PAYLOADS = 35
    LATER = 36
    GONE = 37
    REFUSED = 38


@dataclass(frozen=True)
class Wanted:
    """A request: elements [begin, end) of a fragment, or bytes [begin, end) of a round."""

    kind: Kind
    fragment: int = 0
    number: int = 0
    begin: int = 0
    end: int = 0

    def to_bytes(self) -> bytes:
        return _REQUEST.pack(self.kind, self.fragment, self.number, self.begin, self.end)


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer.

    Attributes:
        standing: After which round the elements are.
        digest: The digest of the body, or of the elements in question.
        body: uint8; empty for most kinds.
    """

    kind: Kind
    standing: Standing
    digest: int
    body: Tensor

    @classmethod
    def read(cls, head: bytes, body: Tensor) -> Answer:
        """Return the answer with these bytes.

        Raises:
            ValueError: If they are none; any bytes are allowed as input.
        """
        if len(head) != _HEAD.size:
            raise ValueError(f"the head of an answer has {_HEAD.size} bytes, got {len(head)}")
        kind, _, *standing, digest = _HEAD.unpack(head)
        return cls(Kind(kind), Standing(*standing), digest, body)

    def numbers(self) -> dict[str, Any]:
        """Return the JSON of a status.

        Raises:
            ValueError: If the body is none; any bytes are allowed.
        """
        try:
            found = json.loads(bytes(self.body.numpy()))
        except RecursionError as error:
            raise ValueError(str(error)) from None
        if self.kind != Kind.IS_AT or not isinstance(found, dict):
            raise ValueError(f"a status is expected, got {self.kind.name}")
        return found


def has_body(answer: Answer | None) -> bool:
    """Whether a donor has answered with what was asked for, right or wrong."""
    return answer is not None and answer.kind not in (Kind.LATER, Kind.GONE, Kind.REFUSED)


def piece_elements(part: SyncedFragment) -> int:
    """Return how many elements of a fragment travel in one answer, with all buffers."""
    return max(1, PIECE_BYTES // (4 * len(state_tensors(part))))
