"""Logs, at growing intervals, for which replica or store a long wait is."""

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
# Advice for errors about a lost store.
ANOTHER_STORE = "give all of them another store, by the argument store="


class WaitLog:
    """Logs the reason of one wait after ``FIRST_S``, then at intervals that double up to 5 minutes.

    Args:
        waited: Seconds that the wait has lasted already.
    """

    def __init__(self, waited: float = 0.0) -> None:
        self._begin = time.monotonic() - waited
        self._pause = FIRST_S
        self._next = self._begin + FIRST_S

    def remaining(self) -> float:
        """Return the seconds until the next line may be logged."""
        return max(0.0, self._next - time.monotonic())

    def tick(self, what_for: Callable[[], str]) -> None:
        """Log what this wait is for, if it is time and ``what_for`` returns words."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._pause
        self._pause = min(2 * self._pause, _MOST_S)
        if text := what_for():
            _log.warning("waiting for %s, for %.0f s now", text, now - self._begin)


def call_patiently(call: Callable[[], T], what_for: str) -> T:
    """Run a call that may block for long on a thread of its own; log while it does.

    If a Ctrl-C interrupts the wait, that thread is abandoned.

    Args:
        call: The call; its result is returned, and its error raised.
        what_for: Words for the log.
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
    """Return advice for a store that did not answer.

    If the store is only slow, the advice is to call again: a replica that changed to another store
    would be alone there.
    """
    if isinstance(error, dist.DistNetworkError):
        return ANOTHER_STORE
    return f"call again; if the store stays silent, {ANOTHER_STORE}"


def describe_store(store: dist.Store) -> str:
    """Return ``tcp://host:port`` of a store; its class, if it has no known address."""
    store, place = place_of_store(store)
    return class_of(store) if place is None else tcp_address(*place)
