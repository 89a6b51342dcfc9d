"""What the registry's server knows: the records, changed in groups, and the members' beats."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from ...base.log import DoubtfulWrite
from .journal import Change, Journal
from .messages import Kind

logger = logging.getLogger(__name__)

# A server that these bounds do not suit serves more than its memory should hold.
MAX_RUNS = 1024
MAX_MEMBERS = 1024
MAX_BEATS = 16384
MAX_GROUP = 64
# A longer gap between two looks at the clock is a time in which this process stood still.
_MAX_GAP_S = 1.0


class LimitReached(ValueError):
    """The server holds as many runs or members as it may."""


@dataclass(frozen=True)
class Outcome:
    """The answer to a swap: its kind, and the frame after the header."""

    kind: Kind
    part: bytes


_YES, _NO = Outcome(Kind.SWAPPED, b"\1"), Outcome(Kind.SWAPPED, b"\0")


class Records:
    """The record of each run; swaps are collected, written together, and then answered.

    Args:
        journal: Where swaps are written; None keeps the records in memory only.
    """

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self.registry_id = journal.registry_id if journal else secrets.token_bytes(16)
        self._records: dict[str, bytes] = dict(journal.records) if journal else {}
        # The group: changes by run, and each swap's outcome if the changes can be written.
        self._changes: dict[str, bytes] = {}
        self._swaps: list[tuple[Callable[[Outcome], None], Outcome, bool]] = []
        self._has_trouble = False

    @property
    def is_durable(self) -> bool:
        return self._journal is not None

    def read(self, run: str) -> bytes:
        """Return the record that a crash would leave; b"" for none."""
        return self._records.get(run, b"")

    @property
    def is_full(self) -> bool:
        """The group is to be committed before the next swap."""
        return len(self._changes) >= MAX_GROUP

    def swap(self, run: str, old: bytes, new: bytes, answer: Callable[[Outcome], None]) -> None:
        """Add a swap to the group; ``commit`` answers it.

        Raises:
            LimitReached: If the run is one too many.
        """
        is_certain = run not in self._changes
        if (self._changes.get(run) if not is_certain else self.read(run)) != old:
            self._swaps.append((answer, _NO, is_certain))
            return
        is_new = run not in self._records and run not in self._changes
        if is_new and len(self._records) + len(self._changes) >= MAX_RUNS:
            raise LimitReached(f"this registry holds {MAX_RUNS} runs, no more fit")
        self._changes[run] = new
        self._swaps.append((answer, _YES, False))

    def commit(self) -> None:
        """Write the group's changes, with one fsync for all of them, then answer its swaps."""
        swaps, changes = self._swaps, list(self._changes.items())
        self._swaps, self._changes = [], {}
        trouble = self._write(changes) if changes else None
        for answer, outcome, is_certain in swaps:
            answer(outcome if trouble is None or is_certain else trouble)

    def _write(self, changes: list[Change]) -> Outcome | None:
        """Return what to answer instead if the changes could not be written."""
        try:
            if self._journal is not None:
                self._journal.append(changes)
        except OSError as error:
            reason = f"{error.filename} cannot be written: {error.strerror or error}"
            if not self._has_trouble:
                logger.error("%s; swaps are refused until it can", reason)
            self._has_trouble = True
            kind = Kind.DOUBTFUL if isinstance(error, DoubtfulWrite) else Kind.REFUSED
            return Outcome(kind, reason.encode())
        if self._has_trouble:
            logger.warning("the journal can be written again")
        self._has_trouble = False
        for run, record in changes:
            if record:
                self._records[run] = record
            else:
                self._records.pop(run, None)
        return None

    def close(self) -> None:
        """Close the journal; swaps that were not committed are forgotten."""
        if self._journal is not None:
            self._journal.close()


class Beats:
    """The last beat of each member of each run, in memory.

    Args:
        drop_after: Seconds, counted by ``pass_time``, after which a beat is dropped.
    """

    def __init__(self, drop_after: float) -> None:
        self._drop_after = drop_after
        self._runs: dict[str, dict[str, tuple[bytes, float]]] = {}
        self._num_beats = 0
        self._time_s = self._looked_at = 0.0

    def pass_time(self, now: float) -> None:
        """Let the time pass until ``now``, but for gaps in which this process stood still.

        While the process stands still no member can beat, so all beats would be too old after it.
        """
        if self._looked_at:
            self._time_s += min(max(0.0, now - self._looked_at), _MAX_GAP_S)
        self._looked_at = now

    def beat(self, run: str, member: str, text: bytes) -> dict[str, bytes]:
        """Keep a member's beat, unless the name is empty, and return all beats of the run.

        Raises:
            LimitReached: If the member is one too many.
        """
        if member:
            self._forget(run, member)
            if text:
                self._keep(run, member, text)
        self._drop(run)
        return {name: text for name, (text, _) in self._runs.get(run, {}).items()}

    def _keep(self, run: str, member: str, text: bytes) -> None:
        num_members = len(self._runs.get(run, ()))
        if num_members >= MAX_MEMBERS or self._num_beats >= MAX_BEATS:
            self.drop_all()
            num_members = len(self._runs.get(run, ()))
        if num_members >= MAX_MEMBERS or self._num_beats >= MAX_BEATS:
            raise LimitReached(
                f"this registry holds the beats of {self._num_beats} members, no more fit"
            )
        self._runs.setdefault(run, {})[member] = (text, self._time_s)
        self._num_beats += 1

    def _forget(self, run: str, member: str) -> None:
        beats = self._runs.get(run, {})
        if beats.pop(member, None) is not None:
            self._num_beats -= 1
            if not beats:
                del self._runs[run]

    def _drop(self, run: str) -> None:
        """Drop the beats of one run that are too old."""
        last = self._time_s - self._drop_after
        for member, (_, at) in list(self._runs.get(run, {}).items()):
            if at < last:
                self._forget(run, member)

    def drop_all(self) -> None:
        """Drop the beats of all runs that are too old."""
        for run in list(self._runs):
            self._drop(run)
