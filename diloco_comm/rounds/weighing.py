"""The weight with which a replica sends."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..base import checks
from ..exchange.exchange import Exchange

# This replica's weight, or the function that returns it at each step that sends.
Weight = float | Callable[[], float]


class Weighing:
    """Ask for the weight once at each inner step that sends: the function may reset a counter."""

    def __init__(self, weight: Weight, exchange: Exchange) -> None:
        self._weight, self._exchange = weight, exchange
        # Of the last send, by its inner step.
        self._last: dict[int, float] = {}

    def offered(self, inner_step: int) -> tuple[float, Exception | None]:
        """Return the weight to send with; NaN and the error if ``weight`` raises or is none.

        What is sent again at an inner step has the weight of the first send, unless that was 0:
        if all replicas have no weight, the round fails, and a function may do better later. With
        NaN the round fails at once on all replicas; without a send they would wait in vain.
        """
        try:
            if self._last.get(inner_step):
                return self._last[inner_step], None
            given = self._weight() if callable(self._weight) else self._weight
            weight = checks.not_negative("weight", given)
            self._last = {inner_step: weight}
            return weight, None
        except Exception as error:
            if self._exchange.size == 1:
                raise
            return math.nan, error

    def forget(self) -> None:
        """Ask anew at the next send: the inner steps are those of a saved state."""
        self._last = {}
