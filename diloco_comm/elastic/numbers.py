"""Which number a replica takes that the user has given none."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set

from ..group.beats import PULLING, READY, Beat
from ..group.records import Key, Record

logger = logging.getLogger(__name__)


class NumberChoice:
    """Find a number that no other process has.

    Args:
        before: Number and nonce of the process before this one of the same replica, whose number
            is free again; None if there was none.
    """

    def __init__(self, before: Key | None) -> None:
        self._before = before
        self._beat_before = -1

    def instead_of(self, own: Key, beats: Sequence[Beat], record: Record | None) -> int | None:
        """Return the number to take instead of ``own``'s; None to keep that one.

        Args:
            beats: The last beat of every process.
            record: The present record of the run; None before the first.
        """
        self._forget_before_if_alive(beats)
        members = () if record is None else record.members
        if own in members:
            return None
        taken = {key.number for key in members if key != self._before}
        others = [one for one in beats if one.key.nonce != own.nonce and one.key != self._before]
        clash = any(
            one.key.number == own.number
            and (one.stage not in (READY, PULLING) or one.key.nonce < own.nonce)
            for one in others
        )
        if not clash and own.number not in taken:
            return None
        return lowest_free({*taken, *(one.key.number for one in others)})

    def _forget_before_if_alive(self, beats: Sequence[Beat]) -> None:
        """Leave the process before its number if that process still beats."""
        # The last beat of a process that has ended says so.
        counters = [one.counter for one in beats if one.key == self._before and not one.is_gone]
        if self._before is not None and counters and 0 <= self._beat_before < counters[0]:
            logger.warning(
                "replica %d still runs elsewhere, so that the state folder of this process is a "
                "copy: this process takes another number",
                self._before.number,
            )
            self._before = None
        self._beat_before = counters[0] if counters else -1


def lowest_free(taken: Set[int]) -> int:
    """Return the lowest number that is not taken."""
    return next(number for number in range(len(taken) + 1) if number not in taken)
