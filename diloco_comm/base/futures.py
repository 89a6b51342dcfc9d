"""Finish exchanges on a thread, and set a ``torch.futures.Future`` when each has ended."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .memory import CPU, current


class Finisher:
    """Runs functions that end exchanges on one thread, in the order in which they are given.

    All ranks give them in the same order. So a function may call a collective, if no other code
    uses that collective's group. The thread starts with the first call, and ends with the process
    at the latest.
    """

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def finish(
        self, end: Callable[[], Any], device: torch.device = CPU
    ) -> torch.futures.Future[Any]:
        """Return a future with the result or the exception of ``end()``.

        C++ code does not see the exception of this future: give C++ code ``for_native(future)``.

        Args:
            device: The device, with an index, on which ``end`` writes. On a device with streams
                ``end`` runs on the stream that is current now, and the stream of a thread that
                waits for the future waits for what ``end`` enqueued.
        """
        on_stream: AbstractContextManager[Any] = nullcontext()
        future: torch.futures.Future[Any] = torch.futures.Future()
        if device.type != "cpu":
            on_stream = current(torch.accelerator.current_stream(device))
            future = torch.futures.Future(devices=[device])
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="diloco_comm", daemon=True)
            self._thread.start()
        self._ends.put(lambda: _settle(future, end, on_stream))
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


def _settle(
    future: torch.futures.Future[Any],
    end: Callable[[], Any],
    on_stream: AbstractContextManager[Any],
) -> None:
    try:
        with on_stream:
            future.set_result(end())
    # The top of a thread: the future raises the error in the thread that waits.
    except Exception as error:
        if not future.done():
            future.set_exception(error)
