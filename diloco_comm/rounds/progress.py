"""The progress of one replica, for its log: a line for each round, and a summary at the end.

Lines go to the logger of ``metrics``, which also logs each skipped round. The lowest replica of the
group logs its rounds at level INFO, and each other replica at level DEBUG. Rounds that come faster
than one in ``PERIOD_S`` share a line.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from .metrics import Recorder, SyncMetrics, SyncTotals, logger

# Average seconds between two lines, and how many lines may follow each other at once.
PERIOD_S = 10.0
BURST = 5
# Lines list the members of a group up to this size, and give only the number of larger ones.
_MOST_NAMED = 8
# The summary names the replica for which this one waited longest if that wait was this share of the
# time; the line of a round names it if the wait took this many seconds.
_LEAST_SHARE, _LEAST_S = 0.001, 1.0


class Group(Protocol):
    """The attributes of an ``Exchange`` that log lines need."""

    collectives: str

    @property
    def replica(self) -> int: ...
    @property
    def members(self) -> tuple[int, ...]: ...


class Changes(Protocol):
    """The costs that changes of the group had for a replica; see ``ElasticTotals``."""

    @property
    def rounds_discarded(self) -> int: ...
    @property
    def forming_s(self) -> float: ...


class Bucket:
    """Limits the rate of lines (a token bucket): one in ``PERIOD_S`` seconds, ``BURST`` at once.

    Args:
        now: Seconds of a clock that never goes back.
    """

    def __init__(self, now: float) -> None:
        self._tokens, self._at = float(BURST), now

    def take(self, now: float) -> bool:
        """Return whether a line may pass now."""
        filled = self._tokens + (now - self._at) / PERIOD_S
        self._tokens, self._at = min(float(BURST), filled), now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Progress:
    """Logs the rounds of one replica, from ``begin`` to ``end``.

    Args:
        recorder: Has the sums of all rounds, and calls ``tell``.
        group: The exchange.
        num_parts: Number of fragments, plus one for averaged buffers.
        parameter_bytes: Bytes of the parameters that this worker exchanges, in their own dtypes.
        name: See ``DiLoCo``; lines begin with it unless it is "default".
        worker: This worker's rank, and the number of the replica's workers; only worker 0 logs.
        clock: A monotonic clock in seconds.

    Attributes:
        inner_step: Inner steps of the last round, or of the state that was loaded after it.
        level: Level of the lines of rounds on the lowest replica.
    """

    def __init__(
        self,
        recorder: Recorder,
        group: Group,
        *,
        num_parts: int,
        parameter_bytes: int,
        name: str = "default",
        worker: tuple[int, int] = (0, 1),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorder, self._group, self._clock = recorder, group, clock
        self._num_parts, self._parameter_bytes = num_parts, parameter_bytes
        self._prefix = "" if name == "default" else f"{name}: "
        self._worker, self._has_begun = worker, False
        self.inner_step, self.level = 0, logging.INFO
        self._data_parallel_bytes, self._began = 0.0, clock()
        self._bucket = Bucket(self._began)

    def begin(self, words: Sequence[str], inner_step: int) -> None:
        """Log ``words``, the settings of this replica, and which replica logs the rounds."""
        self.inner_step = inner_step
        rank, size = self._worker
        if rank != 0:
            return
        self._has_begun = True
        self._recorder.progress = self.tell
        group, members = self._group, self._group.members
        place = f"replica {group.replica} of {_named(members)}"
        settings = ", ".join([*words, *[f"link={group.collectives}"][: len(members) > 1]])
        of = f"; the figures are of its worker 0 of {size}" if size > 1 else ""
        speaker = f"replica {members[0]} logs the rounds{of}"
        self._log(logging.INFO, f"{place} begins: {settings}; {speaker}")

    def tell(self) -> None:
        """Log the rounds since the last line, unless there were too many lines just before."""
        members = self._group.members
        self._count_steps(members)
        if not logger.isEnabledFor(self._level(members)):
            self._recorder.take()
        elif self._recorder.since.num_syncs and self._bucket.take(self._clock()):
            self._log_rounds(members)

    def end(self, inner_step: int, changes: Changes | None = None) -> None:
        """Log the rounds that have no line yet, then the summary; once. Raises no error.

        "Data parallel N times as much": N is B / S. S are the bytes that this worker has sent in
        its rounds. B are the bytes that data parallel training would have sent in the inner steps
        of these rounds, by a ring all-reduce of the worker's parameters, in their own dtypes, at
        each inner step: ``ring_bytes`` with the size of the group at each round.
        """
        has_begun, self._has_begun = self._has_begun, False
        if has_begun:
            with contextlib.suppress(Exception):
                members = self._group.members
                self._count_steps(members)
                if self._recorder.since.num_syncs:
                    self._log_rounds(members)
                self._log(logging.INFO, self.summary(inner_step, changes))

    def summary(self, inner_step: int, changes: Changes | None) -> str:
        """Return the sentence about all rounds of this replica."""
        totals, elapsed_s = self._recorder.totals, self._clock() - self._began
        told = f"replica {self._group.replica} ends at inner step {inner_step}: "
        applied = totals.num_syncs - totals.num_skipped
        told += f"{applied} round{'s' * (applied != 1)} applied"
        told += f", {totals.num_skipped} skipped" if totals.num_skipped else ""
        if changes is not None and changes.rounds_discarded:
            told += f", {changes.rounds_discarded} discarded"
        if totals.sent_bytes:
            ratio = self._data_parallel_bytes / totals.sent_bytes
            told += f"; {_bytes(totals.sent_bytes)} sent, data parallel {ratio:.3g} times as much"
            share = totals.exposed_s / max(elapsed_s, totals.exposed_s)
            told += f"; waited {_seconds(totals.exposed_s)} of {_seconds(elapsed_s)} ({share:.1%})"
            told += _longest(self._recorder.awaited_s, _LEAST_SHARE * elapsed_s)
        if changes is not None and changes.forming_s:
            told += f"; changes of the group took {_seconds(changes.forming_s)}"
        return told

    def _count_steps(self, members: Sequence[int]) -> None:
        """Add the bytes that data parallel training would have sent since the round before."""
        if self._recorder.latest:
            last = self._recorder.latest[-1].inner_step
            steps, self.inner_step = max(0, last - self.inner_step), last
            self._data_parallel_bytes += steps * ring_bytes(self._parameter_bytes, len(members))

    def _level(self, members: Sequence[int]) -> int:
        return self.level if members[0] == self._group.replica else logging.DEBUG

    def _log_rounds(self, members: Sequence[int]) -> None:
        last, (since, awaited_s) = self._recorder.latest[-1], self._recorder.take()
        text = rounds_text(since, awaited_s, last, members, self._num_parts)
        self._log(self._level(members), text)

    def _log(self, level: int, text: str) -> None:
        logger.log(level, "%s%s", self._prefix, text)


def ring_bytes(num_bytes: int, world: int) -> float:
    """Return the bytes that each of ``world`` replicas sends in a ring all-reduce of a buffer.

    This is 2 (W - 1) / W of the buffer: (W - 1) / W in the reduce-scatter, and again in the
    all-gather.
    """
    return 2 * (world - 1) / world * num_bytes


def rounds_text(
    since: SyncTotals,
    awaited_s: Mapping[int, float],
    last: SyncMetrics,
    members: Sequence[int],
    num_parts: int,
) -> str:
    """Return the line about some rounds: their sums and waits, and the norm of the last one."""
    fragment = f"fragment {last.fragment}, " if num_parts > 1 else ""
    many = f"{since.num_syncs} rounds up to " if since.num_syncs > 1 else ""
    where = f"{many}{fragment}round {last.round} at inner step {last.inner_step}"
    told = [f"{where}: {_named(members)}"]
    # A replica alone exchanges nothing, and a round from a saved state was exchanged before.
    if since.sent_bytes:
        told.append(f"{_bytes(since.sent_bytes)} sent")
        told.append(f"waited {_seconds(since.exposed_s)}{_longest(awaited_s, _LEAST_S)}")
        told.append(f"{since.overlap_fraction:.0%} hidden")
    if not math.isnan(last.pseudo_gradient_norm):
        told.append(f"norm {last.pseudo_gradient_norm:.3g}")
    if since.num_skipped:
        told.append(f"{since.num_skipped} skipped")
    if since.num_reset:
        told.append(f"{since.num_reset} reset")
    return ", ".join(told)


def _longest(awaited_s: Mapping[int, float], least_s: float) -> str:
    """Return words for the replica with the longest wait, if that took more than ``least_s``."""
    slowest = max(awaited_s, key=awaited_s.__getitem__, default=-1)
    if slowest < 0 or awaited_s[slowest] <= least_s:
        return ""
    return f", longest for replica {slowest} ({_seconds(awaited_s[slowest])})"


def _named(members: Sequence[int]) -> str:
    many = len(members)
    return f"replicas {list(members)}" if many <= _MOST_NAMED else f"{many} replicas"


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def _bytes(count: float) -> str:
    """Return a number of bytes with a decimal unit, such as "16.5 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
