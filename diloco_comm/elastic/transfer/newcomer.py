"""A newcomer: copies the outer state from several donors while they train, and follows them.

A *donor* is a member that serves its outer state. A *piece* is a range of elements of a fragment.
Pieces come from any donor, each as it was after some round. The newcomer then takes the outer steps
of the rounds since, whose payloads the donors have logged. A second donor confirms the digest of
each piece. All is done in ``turn``, on the caller's thread, in the fragments' own tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ... import _C
from ...group.beats import Way
from ...ops.digests import digest_of
from ...rounds.part import SyncedFragment
from ...rounds.round_log import LoggedRound, Standing, replay, state_tensors
from .donors import Donor, Status
from .messages import PIECE_BYTES, Answer, Kind, Wanted, has_body, piece_elements


@dataclass
class Download:
    """The payloads of one logged round, as far as they have come.

    Attributes:
        entry: The description of the round.
        payloads: All payloads of the round, uint8.
        wanted: Ranges of bytes that no donor was asked for yet.
        num_missing: How many bytes have not come.
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
    """Return the body of an answer; None if there is none, or if it is not what was asked for.

    A donor that has sent a wrong body is asked nothing more.
    """
    if answer is None or not has_body(answer):
        return None
    is_right = answer.kind == kind and answer.body.numel() == size
    if not is_right or digest_of([answer.body]) != answer.digest:
        donor.lose(is_wrong=True)
        return None
    return answer.body


# ------------------------------------------------------------------------------------------- pieces


@dataclass(eq=False)
class Piece:
    """A range of elements of a fragment: its outer parameters and the outer optimizer's buffers.

    Attributes:
        begin, end: The range.
        standing: After which round the values are; None before the piece has come.
        is_asked: A request for the piece, or for its digest, is open.
        source: Name of the donor that sent the piece; "" for the values of a checkpoint.
        doubters: Names of donors whose digest of the piece differs.
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
        num_dropped: How many pieces had come and must be copied again, as the log lost their next
            round or as another donor had other values.
        is_saved: The fragment holds the state of a checkpoint, and its pieces have yet to be
            compared with the donors.
        was_ahead: No donor had the round of the checkpoint when donors were asked first.
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
        """The round after which all pieces are; None while pieces are missing or after others."""
        standings = {piece.standing for piece in self.pieces}
        return next(iter(standings)) if len(standings) == 1 else None

    @property
    def lowest(self) -> Standing | None:
        """The standing of the piece that is furthest behind; None before the first piece."""
        found = [piece.standing for piece in self.pieces if piece.standing is not None]
        return min(found, key=lambda standing: standing.round, default=None)

    @property
    def highest_round(self) -> int:
        rounds = [piece.standing.round for piece in self.pieces if piece.standing is not None]
        return max(rounds, default=0)

    def put(self, piece: Piece, standing: Standing, body: Tensor) -> None:
        """Copy the values of a piece (fp32, as uint8) into the fragment's tensors."""
        values = body.view(torch.float32)
        for tensor, row in zip(self._tensors, values.view(len(self._tensors), -1), strict=True):
            tensor[piece.begin : piece.end].copy_(row)
        piece.standing = standing

    def digest(self, piece: Piece) -> int:
        """Return the digest of a piece, in the layout in which donors compute theirs."""
        rows = [tensor[piece.begin : piece.end] for tensor in self._tensors]
        return digest_of([torch.stack(rows).cpu()])

    def adopt(self, status: Status, logged: Callable[[int, int], LoggedRound | None]) -> None:
        """Use the values of a checkpoint, which the fragment holds, as pieces to be confirmed.

        While the donors are behind the checkpoint, the call only notes that in ``was_ahead``. If
        their logs do not reach back to the checkpoint, all pieces are copied instead.

        Args:
            status: The status of the donor that is furthest.
            logged: Returns the round with this number of a fragment from a donor's log, or None.
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
        """Drop the pieces at this round or before, as no log can bring them forward.

        They are copied again.
        """
        for piece in self.pieces:
            if piece.standing is not None and piece.standing.round <= round:
                piece.forget()
                self.num_dropped += 1

    def advance(self, entry: LoggedRound, payloads: Tensor) -> None:
        """Take the outer step of a logged round on the pieces that are right before that round.

        Raises:
            ValueError: If the entry does not fit the pieces.
        """
        begin = Standing(entry.number, entry.before, entry.num_steps)
        behind = [piece for piece in self.pieces if piece.standing == begin]
        # The operators work on whole fragments: step all of it, and put the other pieces back.
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
        """Set the fragment's round, history and number of steps, if all pieces are at one round."""
        standing = self.standing
        if standing is not None:
            self.part.round, self.part.history = standing.round, standing.history
            self.part.state.num_steps = standing.num_steps


# ----------------------------------------------------------------------------------------- newcomer


# Seconds between two requests for a donor's status: beside training, and while all members wait.
_LOOK_S, _HASTY_LOOK_S = 0.2, 0.02
# ``catch_up``, for which all members wait, ends after so many seconds without a byte or a round.
_PATIENCE_S = 5.0
# Seconds between two checks that the link is connected to the donors.
_REACH_S = 0.2
# A donor that has not answered is asked nothing for so many seconds.
_LOST_S = 30.0
# A newcomer gives up copying beside training if its pieces had to be dropped more often than this,
# on the mean of all pieces.
_MAX_COPIES = 3


class Newcomer:
    """Copies the outer state of all fragments from the donors, and follows their rounds.

    Args:
        link: The link of this process.
        service: The name under which the donors' links serve the state.
        parts: All fragments, by index.
        donors: Returns the addresses of the donors' links, by name.
        bytes_per_s: Most bytes a second that this replica asks for; None: no limit.
        impl: Implementation of the operators.

    Attributes:
        received_bytes: Bytes of state and of payloads that have come.
        gave_up: Why the state cannot be copied beside training; "" while it can.
        refusal: Why this replica must not join, as its checkpoint has outer steps that the group
            has not taken; "" if it may.
    """

    def __init__(
        self,
        link: _C.Link,
        service: str,
        parts: Sequence[SyncedFragment],
        donors: Callable[[], Mapping[str, Way]],
        bytes_per_s: float | None = None,
        impl: str = "",
    ) -> None:
        self._link, self._service = link, service
        self._ways, self._bytes_per_s = donors, bytes_per_s
        self.copies = [FragmentCopy(part, impl) for part in parts]
        self.gave_up = self.refusal = ""
        self._donors: dict[str, Donor] = {}
        # Until when nothing is asked at the address of a lost donor.
        self._lost: dict[Way, float] = {}
        self._reach_at = 0.0
        self._lost_bytes = 0
        self._downloads: dict[int, Download] = {}
        self._look_at = 0.0
        self._look_s = _LOOK_S
        self._may_copy = True
        self._allowed_bytes, self._allowed_at = 0.0, time.monotonic()

    def close(self) -> None:
        """Drop all requests and connections; idempotent."""
        for donor in self._donors.values():
            donor.lose()
        self._link.reach(self._service, [])
        self._link.replies(self._service, 0.0)

    # ------------------------------------------------------------------------------- how far

    @property
    def received_bytes(self) -> int:
        return self._lost_bytes + sum(donor.received_bytes for donor in self._donors.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of the outer state of all fragments."""
        return sum(copy.num_bytes for copy in self.copies)

    @property
    def rounds_behind(self) -> int:
        """Rounds by which the slowest fragment is behind the donors; -1 while pieces are absent."""
        status = self._newest()
        if status is None or not all(copy.is_complete for copy in self.copies):
            return -1
        lags = [
            max(at.round, copy.highest_round) - copy.lowest.round
            for copy, at in zip(self.copies, status.standings, strict=True)
            if copy.lowest is not None
        ]
        return max([0, *lags])

    @property
    def is_ready(self) -> bool:
        """Whether this replica can ask to be let in.

        All pieces have come, are at most one round behind, and are confirmed if another donor is
        there.
        """
        if not 0 <= self.rounds_behind <= 1:
            return False
        names = [donor.name for donor in self._usable()]
        return all(
            piece.is_confirmed or not any(map(piece.may_be_confirmed_by, names))
            for copy in self.copies
            for piece in copy.pieces
        )

    @property
    def has_donor(self) -> bool:
        return bool(self._known())

    def use_saved(self) -> None:
        """Begin with the state of a checkpoint, which the fragments hold already."""
        for copy in self.copies:
            copy.is_saved = True

    def refuse_if_behind(self) -> None:
        """Set ``refusal`` if the group still lacks a round of the checkpoint."""
        for copy in self.copies:
            if copy.is_saved and copy.was_ahead:
                self._refuse(copy)

    def _refuse(self, copy: FragmentCopy) -> None:
        self.refusal = (
            f"the checkpoint holds outer steps of fragment {copy.part.index} that the group has "
            "not taken: give a checkpoint of this group, or join without one"
        )

    def catch_up(self, targets: Mapping[int, int]) -> None:
        """Take the last rounds that fragments lack, while all members wait; copy no more pieces.

        Args:
            targets: For each fragment, by index, the number of the members' next round.
        """
        self._may_copy, self._look_s, self._look_at = False, _HASTY_LOOK_S, 0.0
        self._bytes_per_s = None
        last_progress, mark = time.monotonic(), -1
        while time.monotonic() - last_progress < _PATIENCE_S:
            copies = [self.copies[index] for index in targets]
            behind = [
                copy
                for copy in copies
                if copy.pieces
                and copy.is_complete
                and (copy.standing is None or copy.standing.round < targets[copy.part.index])
            ]
            if not behind or not self._ways():
                break
            self.turn(0.02)
            progress = self.received_bytes + sum(copy.highest_round for copy in copies)
            if progress != mark:
                last_progress, mark = time.monotonic(), progress
        for copy in self.copies:
            copy.settle()

    # ------------------------------------------------------------------------------- one turn

    def turn(self, wait_s: float) -> None:
        """Handle what has come, for ``wait_s`` seconds at most, and ask for more."""
        self._connect()
        for number, head, body in self._link.replies(self._service, wait_s):
            any(donor.take(number, head, body) for donor in self._donors.values())
        for donor in self._usable():
            if donor.is_stalled:
                donor.lose()
        self._bring_forward()
        self._ask()

    def _connect(self) -> None:
        ways, now = self._ways(), time.monotonic()
        for name, donor in list(self._donors.items()):
            if donor.is_lost or ways.get(name) != donor.way:
                donor.lose()
                self._lost[donor.way] = math.inf if donor.is_wrong else now + _LOST_S
                self._lost_bytes += donor.received_bytes
                del self._donors[name]
        for name, way in ways.items():
            if name not in self._donors and self._lost.get(way, 0.0) < now:
                self._donors[name] = Donor(self._link, self._service, name, way)
                self._reach_at = now
        if now >= self._reach_at:
            self._reach_at = now + _REACH_S
            donors = list(self._donors.values())
            troubles = self._link.reach(self._service, [donor.way.words for donor in donors])
            for donor, trouble in zip(donors, troubles, strict=True):
                donor.trouble = trouble

    @property
    def trouble(self) -> str:
        """Which donors cannot be reached, and why, in words; "" if all can."""
        found = [
            f"{one.name} cannot be reached: {one.trouble}" for one in self._usable() if one.trouble
        ]
        return "; ".join(found)

    def _usable(self) -> list[Donor]:
        return [donor for donor in self._donors.values() if not donor.is_lost]

    def _known(self) -> list[Status]:
        return [donor.status for donor in self._usable() if donor.status is not None]

    def _logged(self, fragment: int, number: int) -> LoggedRound | None:
        """Return a logged round of any donor, as one that has joined lately has few; else None."""
        found = (status.log.get((fragment, number)) for status in self._known())
        return next((entry for entry in found if entry is not None), None)

    def _newest(self) -> Status | None:
        """Return the status of the donor whose rounds are furthest; None if none has answered."""
        return max(self._known(), key=lambda one: [at.round for at in one.standings], default=None)

    # ----------------------------------------------------------------------- bringing forward

    def _bring_forward(self) -> None:
        status = self._newest()
        if status is None:
            return
        for copy in self.copies:
            if copy.is_saved:
                copy.adopt(status, self._logged)
            index, low = copy.part.index, copy.lowest
            download = self._downloads.get(index)
            if download is not None and download.wanted and self._is_gone(download.entry):
                del self._downloads[index]
                download = None
            if download is not None and not download.num_missing:
                del self._downloads[index]
                self._advance(copy, download)
            elif low is not None and download is None and low.round < status.standings[index].round:
                self._begin_download(copy, low, status)
        if sum(copy.num_dropped for copy in self.copies) > _MAX_COPIES * sum(
            len(copy.pieces) for copy in self.copies
        ):
            self.gave_up = (
                "the rounds of the group come faster than this replica can copy its state: give "
                "the members more round_log_bytes, or this replica more join_bandwidth"
            )

    def _is_gone(self, entry: LoggedRound) -> bool:
        """Whether no donor has this round in its log any more."""
        known = [donor for donor in self._usable() if donor.status is not None]
        return bool(known) and all(_lacks(entry, donor) for donor in known)

    def _begin_download(self, copy: FragmentCopy, low: Standing, status: Status) -> None:
        entry = self._logged(copy.part.index, low.round)
        if entry is None or (entry.before, entry.num_steps) != (low.history, low.num_steps):
            # No log has the round, or the piece has another history than the group. Drop the piece
            # only if all donors are past that round: the status of a slower one may be too old.
            if all(known.standings[copy.part.index].round > low.round for known in self._known()):
                copy.forget_at(low.round)
        elif copy.is_complete or entry.num_bytes <= self._bytes_at(copy, low):
            self._downloads[copy.part.index] = Download.of(entry)

    def _bytes_at(self, copy: FragmentCopy, low: Standing) -> int:
        """Return the bytes of the pieces that a round would bring forward."""
        return sum(copy.bytes_of(piece) for piece in copy.pieces if piece.standing == low)

    def _advance(self, copy: FragmentCopy, download: Download) -> None:
        try:
            copy.advance(download.entry, download.payloads)
        except ValueError:
            copy.forget_at(download.entry.number)

    # ---------------------------------------------------------------------------------- asking

    def _ask(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + self._look_s
            for donor in self._usable():
                if not donor.has_open(Kind.STATUS):
                    known = 0 if donor.status is None else donor.status.last
                    donor.ask(Wanted(Kind.STATUS, number=known), 0, self._take_status)
        if self._bytes_per_s is not None:
            # If this process was suspended, it may ask for no more than the bytes of one second.
            earned = self._bytes_per_s * min(now - self._allowed_at, 1.0)
            self._allowed_bytes = min(self._allowed_bytes + earned, earned + PIECE_BYTES)
        self._allowed_at = now
        self._ask_for_rounds()
        if self._may_copy:
            self._ask_for_pieces()

    def _best(self, besides: Callable[[Donor], bool] = lambda donor: False) -> Donor | None:
        """Return the donor to ask for bytes: the least busy; None if none may be asked now."""
        if self._bytes_per_s is not None and self._allowed_bytes <= 0:
            return None
        able = [donor for donor in self._usable() if donor.may_ask and not besides(donor)]
        return min(able, key=lambda donor: donor.load, default=None)

    def _spend(self, num_bytes: int) -> None:
        self._allowed_bytes -= num_bytes

    def _give_back(self, answer: Answer | None, num_bytes: int) -> None:
        """Give the bytes of a request back to the allowance if its answer has no body."""
        if not has_body(answer):
            self._allowed_bytes += num_bytes

    def _ask_for_rounds(self) -> None:
        for index, download in self._downloads.items():
            entry = download.entry
            while download.wanted and (donor := self._best(partial(_lacks, entry))):
                begin, end = download.wanted[-1]
                wanted = Wanted(Kind.ROUND, index, entry.number, begin, end)
                take = partial(self._take_payloads, download, begin, end)
                if not donor.ask(wanted, end - begin, take):
                    continue
                download.wanted.pop()
                self._spend(end - begin)

    def _ask_for_pieces(self) -> None:
        for copy in self.copies:
            for piece in copy.pieces:
                if piece.is_asked or copy.is_saved:
                    continue
                is_new = piece.standing is None
                if not is_new and (piece.is_confirmed or copy.standing is None):
                    continue
                donor = self._best(partial(_cannot_confirm, piece)) if not is_new else self._best()
                if donor is None:
                    continue
                kind = Kind.STATE if is_new else Kind.DIGEST
                wanted = Wanted(kind, copy.part.index, 0, piece.begin, piece.end)
                size = copy.bytes_of(piece) if is_new else 1
                take = partial(self._take_piece if is_new else self._take_digest, copy, piece)
                if not donor.ask(wanted, size, take):
                    continue
                piece.is_asked = True
                self._spend(size)

    # ---------------------------------------------------------------------------------- taking

    def _take_status(self, donor: Donor, answer: Answer | None) -> None:
        if answer is None or answer.kind in (Kind.LATER, Kind.REFUSED):
            return
        try:
            donor.status = Status.read(answer.numbers(), len(self.copies), donor.status)
        except ValueError:
            donor.lose(is_wrong=True)

    def _take_payloads(
        self, download: Download, begin: int, end: int, donor: Donor, answer: Answer | None
    ) -> None:
        values = values_of(donor, answer, Kind.PAYLOADS, end - begin)
        if values is None:
            self._give_back(answer, end - begin)
            download.wanted.append((begin, end))
            if answer is not None and answer.kind == Kind.GONE:
                # This log has lost the round, and the others will soon: drop the download, and
                # let the next status tell which rounds are left.
                if self._downloads.get(download.entry.fragment) is download:
                    del self._downloads[download.entry.fragment]
            return
        download.payloads[begin:end] = values
        download.num_missing -= end - begin

    def _take_piece(
        self, copy: FragmentCopy, piece: Piece, donor: Donor, answer: Answer | None
    ) -> None:
        piece.is_asked = False
        values = values_of(donor, answer, Kind.ELEMENTS, copy.bytes_of(piece))
        if values is None or answer is None:
            self._give_back(answer, copy.bytes_of(piece))
            return
        copy.put(piece, answer.standing, values)
        piece.source, piece.is_confirmed = donor.name, False

    def _take_digest(
        self, copy: FragmentCopy, piece: Piece, donor: Donor, answer: Answer | None
    ) -> None:
        piece.is_asked = False
        if answer is None or answer.kind != Kind.HASHED or piece.standing != answer.standing:
            return
        if answer.digest == copy.digest(piece):
            piece.is_confirmed = True
            self._lose_all(piece.doubters)
            return
        piece.doubters.add(donor.name)
        if piece.source and len(piece.doubters) < 2:
            # Either the source or this donor is wrong: a third donor, if there is one, decides.
            return
        if copy.was_ahead and not piece.source:
            # The group has taken other outer steps than the checkpoint.
            self._refuse(copy)
        self._lose_all({piece.source})
        piece.forget()
        copy.num_dropped += 1

    def _lose_all(self, names: set[str]) -> None:
        """Ask nothing more of these donors, whose values were wrong."""
        for name in names & self._donors.keys():
            self._donors[name].lose(is_wrong=True)


def _lacks(entry: LoggedRound, donor: Donor) -> bool:
    """Whether a donor's log does not have a round, or has another entry for it."""
    return donor.status is None or donor.status.log.get((entry.fragment, entry.number)) != entry


def _cannot_confirm(piece: Piece, donor: Donor) -> bool:
    return not piece.may_be_confirmed_by(donor.name)
