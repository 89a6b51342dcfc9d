"""Ctrl-C and SIGTERM: delayed during an outer step, and how a command ends by them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


@dataclass
class _Deferred:
    """A handler of SIGINT that keeps the first signal for later; a second is handled at once."""

    handler: Handler
    first: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.first is not None:
            self.handler(number, frame)
        self.first = (number, frame)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Delay a Ctrl-C in this block until the block ends; a second Ctrl-C is handled at once.

    Nothing changes in other threads than the main one, as Python runs handlers there alone, and
    where SIGINT has no Python handler.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler) or isinstance(handler, _Deferred):
        yield
        return
    later = _Deferred(handler)
    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if later.first is not None:
            handler(*later.first)


class Uninterruptible:
    """Guards sections that Ctrl-C must not split. Never held while waiting for peers.

    Attributes:
        has_begun: A section was entered since this attribute was set to False.
        is_broken: A section is under way, or a second Ctrl-C has ended one in the middle.
    """

    def __init__(self) -> None:
        self.has_begun = self.is_broken = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with deferred_interrupts():
            is_inner = self.is_broken
            self.has_begun = self.is_broken = True
            try:
                yield
            except Exception:
                self.is_broken = is_inner
                raise
            self.is_broken = is_inner

    def refuse_if_broken(self) -> None:
        """Raise RuntimeError if an interrupt has split an outer step."""
        if self.is_broken:
            raise RuntimeError(
                "an interrupt broke an outer step off in the middle: the state of this replica is "
                "neither the state before that step nor the state after it; close() this DiLoCo "
                "and load a saved state into a new one"
            )


# ----------------------------------------------------------------------------------- commands

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(SystemExit):
    """A signal has ended the program. The code is the exit status that a shell uses.

    Attributes:
        name: The name of the signal, such as SIGTERM.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise ``Stopped`` in this block, so that ``finally`` blocks run.

    A signal that the program ignores stays ignored, and nothing changes outside the main thread.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = _handle(stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)


def end_at_once() -> None:
    """Let SIGINT and SIGTERM end this process also while C++ code waits, where no handler can run.

    Nothing is cleaned up: this is for one process of a group, which waits for the others.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    _handle(lambda number, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while (number := os.read(read, 1)[0]) not in _SIGNALS:
            pass
        print(f"diloco-comm: ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
        os._exit(128 + number)

    threading.Thread(target=watch, name="signals", daemon=True).start()


def _handle(handler: Handler) -> dict[int, Any]:
    """Handle the signals, and return the handlers from before."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    return before
