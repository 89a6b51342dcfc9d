"""Schedules of the outer learning rate: objects that a configuration can name and restore."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..base.checks import integer, not_negative


@dataclass(frozen=True)
class WarmupCosine:
    """Outer learning rate that rises linearly to ``peak``, then falls along half a cosine.

    Give it as ``lr`` of an outer optimizer: ``Nesterov(lr=WarmupCosine(0.7, 10, 200))``. Round 0 is
    the first round of a fragment; every fragment goes through the whole schedule by its own rounds.
    The first round has ``peak / warmup_rounds`` (``peak`` without a warm-up), round
    ``warmup_rounds - 1`` has ``peak``, and round ``total_rounds - 1`` and all later ones have
    ``final``. A schedule holds no state: it is a function of the round alone, which a saved state
    and a joining replica bring along.

    Attributes:
        peak: Largest learning rate.
        warmup_rounds: Rounds until the peak is reached; 0 begins with it.
        total_rounds: Rounds of a fragment in the whole run, warm-up included.
        final: Learning rate of the last round.
    """

    peak: float
    warmup_rounds: int
    total_rounds: int
    final: float = 0.0

    def __post_init__(self) -> None:
        values = {
            "peak": not_negative("peak", self.peak),
            "warmup_rounds": integer("warmup_rounds", self.warmup_rounds),
            "total_rounds": integer("total_rounds", self.total_rounds),
            "final": not_negative("final", self.final),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if not 0 <= self.warmup_rounds < self.total_rounds:
            raise ValueError(
                f"warmup_rounds must be at least 0 and below total_rounds ({self.total_rounds}), "
                f"got {self.warmup_rounds}"
            )

    def __call__(self, round: int) -> float:
        """Return the learning rate of a round, counted from 0."""
        if round < self.warmup_rounds:
            return self.peak * (round + 1) / self.warmup_rounds
        first = max(self.warmup_rounds - 1, 0)
        last = self.total_rounds - 1
        progress = min((round - first) / (last - first), 1.0) if last > first else 1.0
        return self.final + (self.peak - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))

    def config(self) -> dict[str, Any]:
        """Return class and arguments as JSON types."""
        return {"name": type(self).__name__, **asdict(self)}


_BY_NAME = {schedule.__name__: schedule for schedule in (WarmupCosine,)}


def from_config(config: dict[str, Any]) -> WarmupCosine:
    """Make a schedule again from its ``config``.

    Raises:
        ValueError: If the configuration names no schedule, or has other arguments.
    """
    arguments = dict(config)
    name = arguments.pop("name", None)
    if name not in _BY_NAME:
        raise ValueError(f"unknown schedule {name!r}: it must be one of {', '.join(_BY_NAME)}")
    try:
        return _BY_NAME[name](**arguments)
    except TypeError as error:
        raise ValueError(f"the saved schedule {name} cannot be made: {error}") from None
