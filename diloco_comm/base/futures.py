"""Wait for exchanges on a thread, and tell a ``torch.futures.Future`` when each has ended."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch


class Finisher:
    """Run what ends an exchange, one after the other in the order in which they were started.

    The order is the same on all ranks, so an end may itself call a collective that nothing else
    uses. The thread begins with the first call; it ends no later than the process.
    """

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def finish(self, end: Callable[[], Any]) -> torch.futures.Future[Any]:
        """Return a future with the result of ``end()``, or with what it raised.

        For a reader in C++ the exception is a value like another: give it ``for_native`` of this.
        """
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="diloco_comm", daemon=True)
            self._thread.start()
        self._ends.put(lambda: _settle(future, end))
        return future

    def close(self) -> None:
        """Wait for what was given so far and end the thread; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ends.put(None)
            thread.join()

    def _run(self) -> None:
        while (end := self._ends.get()) is not None:
            end()


def for_native(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """Return a future that fails in C++ too; in Python its errors are RuntimeErrors."""
    return future.then(lambda done: done.value())


def _settle(future: torch.futures.Future[Any], end: Callable[[], Any]) -> None:
    try:
        result = end()
    # The top of a thread: whoever waits for the future gets it.
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
