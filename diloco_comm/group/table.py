"""The table of a group: one record, the beats, texts for its host; and the thread that asks it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..base.checks import logger_of
from .state import Outcome

logger = logger_of(__name__)

# A *post* is a text about a process that the table's host keeps for people. Least seconds between
# two posts of a process, and seconds from its start to its first post.
POST_S, _FIRST_POST_S = 5.0, 1.0
# A warning is logged once, after so many posts in a row have failed. A single post may fail
# harmlessly, when the training thread changes the figures while they are read.
_MOST_FAILED = 3
# Seconds for which a process that ends repeats its last swap while the table does not answer.
_LAST_SWAP_S = 5.0


class TableAway(Exception):
    """The table gave no usable answer in time.

    A swap that was asked for may have been made all the same, or may still be made.

    Attributes:
        is_refused: The table does not let in the key of this process.
        is_other: An answer came, but from another table than before, or with a record that this
            process cannot read.
        is_lost: The connection has broken, and cannot be made again.
    """

    is_refused = is_other = is_lost = False


class UnreadableRecord(TableAway):
    """The table answers with bytes that are no record; somebody may repair that by hand."""

    is_other = True


class Look(NamedTuple):
    """The answer of a table.

    Attributes:
        record: The bytes of the newest record at that moment (linearizable); b"" if there is none.
        beats: The last beat of each process by name. If the table fills ``counts``, the second
            line of a text may be from an earlier beat.
        counts: How often each process has beaten; {} if the table does not count, and the counters
            in the beats must do.
    """

    record: bytes
    beats: Mapping[str, bytes]
    counts: Mapping[str, int]


class Table(Protocol):
    """One record and the beats of one run. ``swap`` and ``look`` raise ``TableAway``."""

    @property
    def id(self) -> bytes:
        """16 bytes that a table gets when it begins empty; b"" before the first answer."""
        ...

    def swap(self, old: bytes, new: bytes) -> bool:
        """Replace the record by ``new`` if it is ``old``, in one step; return whether it was."""
        ...

    def look(self, name: str, text: bytes) -> Look:
        """Publish a beat of this process; return all beats, and the record as it is then.

        Args:
            name: The name of the beat; "" publishes nothing.
            text: The text of the beat; b"" removes the last beat of this name.
        """
        ...

    def post(self, name: str, text: bytes) -> None:
        """Leave a text about this process with the host of the table; other processes never get it.

        Waits for no answer, and raises nothing. Does nothing if the host keeps no such texts.

        Args:
            name: The name of this process's beats.
            text: At most 2048 bytes; b"" removes the last post of this name.
        """
        ...

    def close(self) -> None:
        """End the connection; idempotent."""
        ...


@dataclass(frozen=True)
class Seen:
    """The answer to a look, and the id of the table that gave it."""

    table: bytes
    look: Look


@dataclass(frozen=True)
class Swapped:
    """The outcome of the swap to ``new``."""

    new: bytes
    outcome: Outcome


class TableThread:
    """Asks the table on a thread of its own, so that a slow answer holds up no other thread.

    Args:
        table: The table; from now on only this thread uses it.
        period_s: The most seconds between two looks; the attribute may be changed.
        beat: Returns name and text of this process's next beat.
        post: Called with each answer of the table, with each ``TableAway`` in place of an answer,
            and with an error that ends the thread.
        figures: Returns the text of the next post; b"" for no post.
    """

    def __init__(
        self,
        table: Table,
        period_s: float,
        beat: Callable[[], tuple[str, bytes]],
        post: Callable[[Seen | Swapped | Exception], None],
        figures: Callable[[], bytes],
    ) -> None:
        self._table, self.period_s, self._beat, self._post = table, period_s, beat, post
        self._figures, self._posts_at = figures, time.monotonic() + _FIRST_POST_S
        # The name of the last post, and the number of failed posts in a row.
        self._posted, self._num_failed = "", 0
        self._swaps: deque[tuple[bytes, bytes]] = deque()
        self._old_names: deque[str] = deque()
        self._news, self._is_closed = threading.Event(), False
        self._is_left = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="diloco_comm table")

    def start(self) -> None:
        self._thread.start()

    def look(self) -> None:
        """Let the thread publish a beat and read the table soon."""
        self._news.set()

    def ask_swap(self, old: bytes, new: bytes) -> None:
        """Ask for a swap soon."""
        self._swaps.append((old, new))
        self._news.set()

    def withdraw(self, name: str) -> None:
        """Remove this process's last beat under a former name from the table soon."""
        self._old_names.append(name)
        self._news.set()

    def leave(self) -> None:
        """Let the thread end after the call under way, and deliver no further answer."""
        self._post, self._is_left = lambda _: None, True
        self._news.set()

    def close(self, patience_s: float) -> None:
        """Make the swaps asked for, publish a last beat, and end the connection; idempotent.

        Args:
            patience_s: The most seconds to wait for that.
        """
        self._is_closed = True
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def _run(self) -> None:
        try:
            is_last = False
            while not is_last:
                self._news.wait(self.period_s)
                self._news.clear()
                is_last = self._is_closed
                if self._is_left:
                    return
                while self._swaps:
                    self._swap(*self._swaps.popleft(), is_last=is_last)
                if name := self._look():
                    self._leave_figures(name, is_last=is_last)
        except Exception as error:
            # Without this, nobody would learn that the thread has ended.
            self._post(error)
        finally:
            self._table.close()
            # These functions belong to the driver, which refers to this object: break the cycle.
            self._beat, self._post = lambda: ("", b""), lambda _: None
            self._figures = lambda: b""

    def _swap(self, old: bytes, new: bytes, *, is_last: bool) -> None:
        until = time.monotonic() + _LAST_SWAP_S
        while True:
            try:
                is_done = self._table.swap(old, new)
            except TableAway as error:
                self._post(error)
                if not is_last or time.monotonic() > until:
                    self._post(Swapped(new, Outcome.UNKNOWN))
                    return
                time.sleep(self.period_s)
            else:
                self._post(Swapped(new, Outcome.DONE if is_done else Outcome.REFUSED))
                return

    def _look(self) -> str:
        """Publish a beat and read the table; return the beat's name, "" without an answer."""
        try:
            while self._old_names:
                self._table.look(self._old_names.popleft(), b"")
            name, text = self._beat()
            look = self._table.look(name, text)
            self._post(Seen(self._table.id, look))
        except TableAway as error:
            self._post(error)
            return ""
        return name

    def _leave_figures(self, name: str, *, is_last: bool) -> None:
        """Post the figures if a post is due; at the end, take the last post back; raise nothing."""
        now, former = time.monotonic(), self._posted
        is_due = not is_last and now >= self._posts_at
        try:
            if former and (is_last or former != name):
                self._posted = ""
                self._table.post(former, b"")
            if is_due:
                self._posts_at = now + POST_S
                if text := self._figures():
                    self._table.post(name, text)
                    self._posted = name
        except Exception as error:
            self._num_failed += 1
            if self._num_failed == _MOST_FAILED:
                with contextlib.suppress(Exception):  # of a handler of the log
                    logger.warning(
                        "this process cannot post its figures, and goes on without: %r", error
                    )
        else:
            # After the warning the count stays, so that there is no second one.
            if is_due and self._num_failed < _MOST_FAILED:
                self._num_failed = 0
