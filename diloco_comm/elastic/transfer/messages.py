"""Requests of a newcomer for outer state, and the heads of the answers.

A request has 32 bytes, the head of an answer 40, both little endian. Nothing is unpickled. The
donors' side is ``StateSource`` in ``csrc/exchange/joining``.
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

# The most bytes of outer state, or of payloads, in one answer.
PIECE_BYTES: int = _C.StateSource.MOST_BYTES
# The most bytes of a status, or of a sentence that refuses.
MOST_TEXT = 8 << 20

# A request: kind, fragment, number, begin, end.
_REQUEST = struct.Struct("<IIQQQ")
# The head of an answer: kind, zero, the standing's round, history and num_steps, digest.
_HEAD = struct.Struct("<IIQQQQ")


class Kind(IntEnum):
    """The kind of a request (below 32) or of an answer; ``StateSource`` explains each."""

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
    """A request: for elements [begin, end) of a fragment, bytes [begin, end) of a round, a status.

    Attributes:
        number: The round's number; for a status, ``Status.last`` of the last answer.
    """

    kind: Kind
    fragment: int = 0
    number: int = 0
    begin: int = 0
    end: int = 0

    def to_bytes(self) -> bytes:
        return _REQUEST.pack(self.kind, self.fragment, self.number, self.begin, self.end)


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer of a donor.

    Attributes:
        kind: The kind of the answer.
        standing: The round after which the donor's elements have these values.
        digest: The digest of the body or, if only that was asked for, of the elements.
        body: uint8; empty for most kinds.
    """

    kind: Kind
    standing: Standing
    digest: int
    body: Tensor

    @classmethod
    def read(cls, head: bytes, body: Tensor) -> Answer:
        """Return the answer with this head and body.

        Raises:
            ValueError: If the head is none; it may have any bytes.
        """
        if len(head) != _HEAD.size:
            raise ValueError(f"the head of an answer has {_HEAD.size} bytes, got {len(head)}")
        kind, _, *standing, digest = _HEAD.unpack(head)
        return cls(Kind(kind), Standing(*standing), digest, body)

    def numbers(self) -> dict[str, Any]:
        """Return the JSON of a status.

        Raises:
            ValueError: If the body is no status; it may have any bytes.
        """
        try:
            found = json.loads(bytes(self.body.numpy()))
        except RecursionError as error:
            raise ValueError(str(error)) from None
        if self.kind != Kind.IS_AT or not isinstance(found, dict):
            raise ValueError(f"a status is expected, got {self.kind.name}")
        return found


def has_body(answer: Answer | None) -> bool:
    """Whether an answer has the state, payloads, digest or status asked for, right or wrong."""
    return answer is not None and answer.kind not in (Kind.LATER, Kind.GONE, Kind.REFUSED)


def piece_elements(part: SyncedFragment) -> int:
    """Return how many elements of a fragment travel in one answer, with all buffers."""
    return max(1, PIECE_BYTES // (4 * len(state_tensors(part))))
