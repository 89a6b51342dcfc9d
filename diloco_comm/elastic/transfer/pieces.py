"""What a newcomer has of one fragment: pieces, which logged rounds bring forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...ops.digests import digest_of
from ...rounds.part import SyncedFragment
from ...rounds.round_log import LoggedRound, Standing, replay, state_tensors
from .answers import Status
from .messages import piece_elements


@dataclass(eq=False)
class Piece:
    """A range of elements of a fragment, with all buffers of its outer optimizer.

    Attributes:
        standing: After which round; None before the piece has come.
        is_asked: A request is open, for the piece or for its digest.
        source: The donor that sent the piece; "" for the values of a checkpoint.
        doubters: Donors that have other values.
        is_confirmed: Another donor has the same values.
    """

    begin: int
    end: int
    standing: Standing | None = None
    is_asked: bool = False
    source: str = ""
    doubters: set[str] = field(default_factory=set)
    is_confirmed: bool = False

    def forget(self) -> None:
        self.standing, self.is_confirmed, self.source = None, False, ""
        self.doubters.clear()

    def may_be_confirmed_by(self, donor: str) -> bool:
        return donor != self.source and donor not in self.doubters


class FragmentCopy:
    """The copy of one fragment that a newcomer is making, in the fragment's own tensors.

    Attributes:
        num_dropped: Pieces that had come and must be copied again, as the log lost their round or
            another donor did not confirm them.
        is_saved: The fragment holds the state of a checkpoint, which no donor has been asked about.
        was_ahead: No donor had the round of the checkpoint when it was asked first.
    """

    def __init__(self, part: SyncedFragment, impl: str = "") -> None:
        self.part, self._impl = part, impl
        step = piece_elements(part)
        self.pieces = [
            Piece(begin, min(begin + step, part.num_elements))
            for begin in range(0, part.num_elements, step)
        ]
        self._tensors = state_tensors(part)
        self.num_dropped = 0
        self.is_saved = self.was_ahead = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the fragment's outer state."""
        return 4 * len(self._tensors) * self.part.num_elements

    def bytes_of(self, piece: Piece) -> int:
        return 4 * len(self._tensors) * (piece.end - piece.begin)

    @property
    def is_complete(self) -> bool:
        return all(piece.standing is not None for piece in self.pieces)

    @property
    def standing(self) -> Standing | None:
        """Where the whole copy stands; None while pieces are missing or stand apart."""
        standings = {piece.standing for piece in self.pieces}
        return next(iter(standings)) if len(standings) == 1 else None

    @property
    def lowest(self) -> Standing | None:
        """Where the piece stands that is furthest behind; None before the first piece."""
        found = [piece.standing for piece in self.pieces if piece.standing is not None]
        return min(found, key=lambda standing: standing.round, default=None)

    @property
    def highest_round(self) -> int:
        rounds = [piece.standing.round for piece in self.pieces if piece.standing is not None]
        return max(rounds, default=0)

    def put(self, piece: Piece, standing: Standing, body: Tensor) -> None:
        """Take in the values of a piece, uint8."""
        values = body.view(torch.float32)
        for tensor, row in zip(self._tensors, values.view(len(self._tensors), -1), strict=True):
            tensor[piece.begin : piece.end].copy_(row)
        piece.standing = standing

    def digest(self, piece: Piece) -> int:
        """Return the digest of a piece as a donor makes one."""
        rows = [tensor[piece.begin : piece.end] for tensor in self._tensors]
        return digest_of([torch.stack(rows).cpu()])

    def adopt(self, status: Status, logged: Callable[[int, int], LoggedRound | None]) -> None:
        """Take the fragment's own values, from a checkpoint, as pieces that donors must confirm.

        Nothing is done while the donors are behind the checkpoint. Where the log does not reach
        back to the checkpoint, all pieces are copied.
        """
        part = self.part
        index, at = part.index, status.standings[part.index]
        if at.round < part.round:
            self.was_ahead = True
            return
        self.is_saved = False
        entry = logged(index, part.round)
        if at.round > part.round:
            if entry is None:
                return
            at = Standing(entry.number, entry.before, entry.num_steps)
        if at.num_steps == part.state.num_steps:
            for piece in self.pieces:
                piece.standing = at

    def forget_at(self, round: int) -> None:
        """Copy the pieces again that stand at a round which no log has any more."""
        for piece in self.pieces:
            if piece.standing is not None and piece.standing.round <= round:
                piece.forget()
                self.num_dropped += 1

    def advance(self, entry: LoggedRound, payloads: Tensor) -> None:
        """Take the outer step of a logged round on the pieces that stand right before the round.

        Raises:
            ValueError: If the entry does not fit the pieces.
        """
        begin = Standing(entry.number, entry.before, entry.num_steps)
        behind = [piece for piece in self.pieces if piece.standing == begin]
        # The step is taken on the whole fragment: an operator takes no part of a run.
        others = [piece for piece in self.pieces if piece.standing not in (begin, None)]
        kept = [[tensor[p.begin : p.end].clone() for tensor in self._tensors] for p in others]
        part = self.part
        part.round, part.history, part.state.num_steps = begin.round, begin.history, begin.num_steps
        replay(part, entry, payloads, self._impl)
        for piece, values in zip(others, kept, strict=True):
            for tensor, value in zip(self._tensors, values, strict=True):
                tensor[piece.begin : piece.end].copy_(value)
        for piece in behind:
            piece.standing = Standing.of(part)

    def settle(self) -> None:
        """Give the fragment the numbers of a copy that stands at one round."""
        standing = self.standing
        if standing is not None:
            self.part.round, self.part.history = standing.round, standing.history
            self.part.state.num_steps = standing.num_steps
