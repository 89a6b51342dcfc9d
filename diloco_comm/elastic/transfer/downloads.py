"""The bytes that donors send: of a logged round on its way, and of one answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.digests import digest_of
from ...rounds.round_log import LoggedRound
from .donors import Donor
from .messages import PIECE_BYTES, Answer, Kind, has_body


@dataclass
class Download:
    """The payloads of a logged round on their way.

    Attributes:
        wanted: Ranges of bytes that nobody was asked for.
        num_missing: Bytes that have not come.
    """

    entry: LoggedRound
    payloads: Tensor
    wanted: list[tuple[int, int]]
    num_missing: int

    @classmethod
    def of(cls, entry: LoggedRound) -> Download:
        size = entry.num_bytes
        starts = range(0, size, PIECE_BYTES)
        wanted = [(begin, min(begin + PIECE_BYTES, size)) for begin in starts]
        return cls(entry, torch.empty(size, dtype=torch.uint8), wanted, size)


def values_of(donor: Donor, answer: Answer | None, kind: Kind, size: int) -> Tensor | None:
    """Return the body of an answer; None if there is none. A donor of wrong bytes is lost."""
    if answer is None or not has_body(answer):
        return None
    is_right = answer.kind == kind and answer.body.numel() == size
    if not is_right or digest_of([answer.body]) != answer.digest:
        donor.lose(is_wrong=True)
        return None
    return answer.body
