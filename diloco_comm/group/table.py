"""The table of a group: one record, beats and posts, and the thread that asks the table."""

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

# Seconds between two posts of a process at least, and from its begin to its first post.
POST_S, _FIRST_POST_S = 5.0, 1.0
# So many posts in a row fail before the log says so: one may meet the training thread's work.
_MOST_FAILED = 3
# Seconds in which the last swap of a process is tried again while the table does not answer.
_LAST_SWAP_S = 5.0


class TableAway(Exception):
    """The table gave no answer in time; a swap may have been done, and may be done later.

    Attributes:
        is_refused: The table does not let in the key of this process.
        is_other: Another table answers than before, or with a record that cannot be read.
        is_lost: The connection has broken, and is not made again.
    """

    is_refused = is_other = is_lost = False


class UnreadableRecord(TableAway):
    """The table answers, and its record is none; somebody may put the record back."""

    is_other = True


class Look(NamedTuple):
    """The answer of a table.

    Attributes:
        record: b"" if there is none; linearizable.
        beats: The last beat of each process by name. The first line of a text is the newest; the
            rest may be older where the table counts.
        counts: How often each process has beaten, as the table counts; {} where the counters in the
            beats say so.
    """

    record: bytes
    beats: Mapping[str, bytes]
    counts: Mapping[str, int]


class Table(Protocol):
    """One record and the beats of one run. All methods raise ``TableAway``."""

    @property
    def id(self) -> bytes:
        """16 bytes that a table gets when it begins empty; b"" before the first answer."""
        ...

    def swap(self, old: bytes, new: bytes) -> bool:
        """Replace the record by ``new`` if it is ``old``, in one step; return whether it was."""
        ...

    def look(self, name: str, text: bytes) -> Look:
        """Publish the beat of a process, and return all beats, and the record as it is then.

        Args:
            name: "" publishes nothing.
            text: b"" takes the last beat of this name back.
        """
        ...

    def post(self, name: str, text: bytes) -> None:
        """Leave a text of a process with the host of the table, where no other process reads it.

        Waits for no answer, and raises nothing. Does nothing where the host keeps no such texts.

        Args:
            text: At most 2048 bytes; b"" takes the last post of this name back.
        """
        ...

    def close(self) -> None:
        """End the connection; idempotent."""
        ...


@dataclass(frozen=True)
class Seen:
    """The contents of the table of this id."""

    table: bytes
    look: Look


@dataclass(frozen=True)
class Swapped:
    """The outcome of the swap to ``new``."""

    new: bytes
    outcome: Outcome


class TableThread:
    """Asks the table on a thread of its own: a slow answer holds nobody up.

    Args:
        table: Used by this thread alone from now on.
        period_s: Seconds between two looks at most; may be changed.
        beat: Returns name and text of the own beat.
        post: Takes the answers of the table, ``TableAway``, and the error that ends the thread.
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
        # The name of the last post, and how many have failed since.
        self._posted, self._num_failed = "", 0
        self._swaps: deque[tuple[bytes, bytes]] = deque()
        self._old_names: deque[str] = deque()
        self._news, self._is_closed = threading.Event(), False
        self._is_left = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="diloco_comm table")

    def start(self) -> None:
        self._thread.start()

    def look(self) -> None:
        """Beat and read soon."""
        self._news.set()

    def ask_swap(self, old: bytes, new: bytes) -> None:
        """Ask for a swap soon."""
        self._swaps.append((old, new))
        self._news.set()

    def withdraw(self, name: str) -> None:
        """Take the last beat under an old name of this process back soon."""
        self._old_names.append(name)
        self._news.set()

    def leave(self) -> None:
        """Ask the table nothing more, once a call under way has ended, and post nothing more."""
        self._post, self._is_left = lambda _: None, True
        self._news.set()

    def close(self, patience_s: float) -> None:
        """Do what was asked for, publish the last beat, and end the connection; idempotent."""
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
            # Nobody else would learn of the end of this thread.
            self._post(error)
        finally:
            self._table.close()
            # The driver refers to this object.
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
        """Beat and read; return the name of the beat, "" where the table gives no answer."""
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
            # Once the log has said so, the log says no more.
            if is_due and self._num_failed < _MOST_FAILED:
                self._num_failed = 0
