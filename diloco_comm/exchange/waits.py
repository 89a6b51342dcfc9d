"""Log, at growing intervals, what a wait is for: a replica that does not come, a silent store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..base.checks import class_of, logger_of
from ..base.service.addresses import tcp_address
from ..base.store_host import place_of_store

T = TypeVar("T")

_log = logger_of(__name__)
FIRST_S = 10.0
_MOST_S = 300.0
# What cures the loss of a store.
ANOTHER_STORE = "give all of them another store, by the argument store="


class WaitLog:
    """Log what one wait is for after ``FIRST_S``, then at intervals that double up to 5 minutes.

    Args:
        waited: Seconds that the wait has lasted already.
    """

    def __init__(self, waited: float = 0.0) -> None:
        self._begin = time.monotonic() - waited
        self._pause = FIRST_S
        self._next = self._begin + FIRST_S

    def remaining(self) -> float:
        """Return the seconds until there may be something to say."""
        return max(0.0, self._next - time.monotonic())

    def tick(self, what_for: Callable[[], str]) -> None:
        """Log what is waited for if it is time, and if ``what_for`` returns anything."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._pause
        self._pause = min(2 * self._pause, _MOST_S)
        if text := what_for():
            _log.warning("waiting for %s, for %.0f s now", text, now - self._begin)


def call_patiently(call: Callable[[], T], what_for: str) -> T:
    """Return what a call that may wait for long returns, or raise what it raises.

    It runs on a thread of its own, which is left behind when this wait is interrupted.
    """
    results: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            results.append((call(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    log = WaitLog()
    while thread.is_alive():
        thread.join(log.remaining() + 0.1)
        log.tick(lambda: what_for)
    value, error = results[0]
    if error is not None:
        raise error
    return value


def store_advice(error: dist.DistError) -> str:
    """Say what to do when a store did not answer.

    A slow answer is no loss: a replica that turned to another store then would be alone there.
    """
    if isinstance(error, dist.DistNetworkError):
        return ANOTHER_STORE
    return f"call again; if the store stays silent, {ANOTHER_STORE}"


def describe_store(store: dist.Store) -> str:
    """Say where a store is: ``tcp://host:port``, or of what kind it is."""
    store, place = place_of_store(store)
    return class_of(store) if place is None else tcp_address(*place)
