"""Finish exchanges on a thread, and set a ``torch.futures.Future`` when each has ended."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch


class Finisher:
    """Run the functions that end exchanges on one thread, in the order of the calls.

    The order is the same on all ranks. So a function may call a collective, if no other code uses
    that collective's group. The thread starts with the first call, and ends with the process at the
    latest.
    """

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def finish(self, end: Callable[[], Any]) -> torch.futures.Future[Any]:
        """Return a future with the result or the exception of ``end()``.

        C++ code does not see the exception of this future: give C++ code ``for_native(future)``.
        """
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="diloco_comm", daemon=True)
            self._thread.start()
        self._ends.put(lambda: _settle(future, end))
        return future

    def close(self) -> None:
        """Wait for all functions given so far and end the thread; idempotent."""
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
    # The top of a thread: the future raises the error in the thread that waits.
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
