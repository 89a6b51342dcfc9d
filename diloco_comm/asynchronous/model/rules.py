"""Server rules: how one arriving pseudo-gradient changes the shared model.

A rule collects ``period`` arrivals (N), each with weight 1/N, and takes an outer step with the
N-th. Between two outer steps the shared model either stays (``Buffered``) or follows the arrivals
(``DelayedNesterov``, arXiv 2401.09135, Algorithm 3). The rule keeps the sum of the arrivals apart
from the model of the last outer step. So after N arrivals the bytes equal those of a synchronous
step on the mean, taken in the same order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from ...methods.outer import (
    SGD,
    HeavyBall,
    LearningRate,
    Nesterov,
    OuterOptimizer,
    make_outer,
    name_of,
)
from .rule_states import FusedState, PlainState, RuleState


@dataclass(kw_only=True)
class ServerRule(ABC):
    """Base of the rules: their common arguments.

    Args:
        discount: Exponent d of the polynomial discount: an arrival has the factor
            (1 + staleness)^-d. 0 for no discount; 0.5 in arXiv 2401.09135.
        max_staleness: A staler arrival is refused and changes nothing; None for no bound.
        compensation: lambda of delay compensation, g + lambda*g*g*(theta_now - theta_then). With a
            lambda other than 0 the server keeps, in files, the parameters that its workers train
            from.
    """

    discount: float = 0.0
    max_staleness: int | None = None
    compensation: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.discount < math.inf:
            raise ValueError(f"discount must be a number of at least 0, got {self.discount!r}")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness must not be negative, got {self.max_staleness!r}")
        if not math.isfinite(self.compensation):
            raise ValueError(f"compensation must be finite, got {self.compensation!r}")

    @property
    @abstractmethod
    def arrivals(self) -> int:
        """Arrivals that make one outer step (N)."""

    @abstractmethod
    def make_state(self, outer: Tensor) -> RuleState:
        """Allocate the rule's state of a fragment, which keeps ``outer``, 1-D fp32."""

    def weight(self, staleness: int) -> float:
        """Return the factor of an arrival, including its share 1/N of the outer step."""
        return (1.0 + staleness) ** -self.discount / self.arrivals

    def config(self) -> dict[str, Any]:
        """Return class and arguments as JSON types."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if isinstance(values.get("outer"), OuterOptimizer):
            values["outer"] = values["outer"].config()
        shown = {k: name_of(v) if callable(v) else v for k, v in values.items()}
        return {"name": type(self).__name__, **shown}


@dataclass(kw_only=True)
class Buffered(ServerRule):
    """Collect ``period`` arrivals and take one outer step on their mean (FedBuff, 2106.06639)."""

    period: int = 4
    outer: OuterOptimizer = field(default_factory=Nesterov)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_period(self.period)
        self.outer = make_outer(self.outer)

    @property
    def arrivals(self) -> int:
        return self.period

    def make_state(self, outer: Tensor) -> RuleState:
        numbers = fused_numbers(self.outer)
        if numbers is None:
            return PlainState(outer, self.period, self.outer)
        return FusedState(outer, self.period, self.outer, *numbers)


@dataclass(kw_only=True)
class Immediate(ServerRule):
    """Take an outer step with every arrival: asynchronous SGD, heavy-ball, Nesterov, ..."""

    outer: OuterOptimizer = field(default_factory=Nesterov)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.outer = make_outer(self.outer)

    @property
    def arrivals(self) -> int:
        return 1

    def make_state(self, outer: Tensor) -> RuleState:
        return Buffered(period=1, outer=self.outer).make_state(outer)


@dataclass(kw_only=True)
class DelayedNesterov(ServerRule):
    """Descend every arrival at once; use and update the momentum with every N-th arrival only.

    Args:
        lr, momentum: As in ``diloco_comm.Nesterov``.
        period: N; the number of workers is a natural choice.
        activation: c in [0, 1/N], the share of the momentum that the other arrivals use.
    """

    lr: LearningRate = 0.7
    momentum: float = 0.9
    period: int = 4
    activation: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_period(self.period)
        if not 0 <= self.activation <= 1 / self.period:
            raise ValueError(
                f"activation must lie in [0, 1/period] = [0, {1 / self.period:g}], "
                f"got {self.activation!r}"
            )

    @property
    def arrivals(self) -> int:
        return self.period

    def make_state(self, outer: Tensor) -> RuleState:
        optimizer = Nesterov(self.lr, self.momentum)
        between = self.activation * self.momentum
        rest = self.period - 1
        numbers = (self.momentum, 1.0, self.momentum - rest * between, rest * between)
        return FusedState(outer, self.period, optimizer, *numbers, between=between, follows=True)


def _check_period(period: int) -> None:
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise ValueError(f"period must be an integer of at least 1, got {period!r}")


def fused_numbers(outer: OuterOptimizer) -> tuple[float | None, float, float, float] | None:
    """Return (mu, direct, ahead, behind) of ``ops.outer_step_delayed``, or None."""
    if isinstance(outer, SGD):
        return None, 1.0, 0.0, 0.0
    if isinstance(outer, HeavyBall):
        return outer.momentum, 0.0, 1.0, 0.0
    if isinstance(outer, Nesterov):
        return outer.momentum, 1.0, outer.momentum, 0.0
    return None


RULES: dict[str, type[ServerRule]] = {c.__name__: c for c in (Immediate, Buffered, DelayedNesterov)}
