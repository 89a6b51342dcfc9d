"""Ctrl-C in the middle of an outer step: the step happens wholly or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class _Deferred:
    """Stands in for the handler of SIGINT: remembers the first, lets the second through."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.first: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.first is not None:
            self.handler(number, frame)
        self.first = (number, frame)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Handle a Ctrl-C that comes in this block at its end; a second one breaks in at once.

    Nothing changes in threads other than the main one, which never get it, and where Python does
    not handle the signal.
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
    """Blocks of one replica's outer steps that happen wholly or not at all.

    Attributes:
        has_begun: Such a block was entered since this was set to False.
        is_broken: One was left in the middle by an interrupt that could not be held back.
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
        """Raise RuntimeError if the state is neither that before nor after an outer step."""
        if self.is_broken:
            raise RuntimeError(
                "an interrupt broke an outer step off in the middle, and what this replica has is "
                "neither the state before it nor after it: close() this DiLoCo and load a saved "
                "state into a new one"
            )
