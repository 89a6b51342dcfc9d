"""The methods and speeds that ``convergence.py`` compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diloco_comm import SGD, Adam, HeavyBall, Nesterov
from diloco_comm.asynchronous.rules import Buffered, DelayedNesterov, Immediate, ServerRule

MOMENTUM = 0.9
# Staler arrivals are discarded by the threshold, as in the paper.
MAX_STALENESS = 10


@dataclass(frozen=True)
class Method:
    """A server rule as a function of the learning rate and the number of workers.

    Attributes:
        start: Where the search for the learning rate begins.
        grace_steps: The grace period, in steps of the slowest worker.
    """

    rule: Callable[[float, int], ServerRule]
    start: float
    uses_dylu: bool = False
    grace_steps: float = 0.0
    is_synchronous: bool = False


def _nesterov(lr: float) -> Nesterov:
    return Nesterov(lr, MOMENTUM)


def _delayed(share: float = 0.0) -> Callable[[float, int], ServerRule]:
    """Delayed Nesterov with c = ``share`` / N."""
    return lambda lr, n: DelayedNesterov(lr=lr, momentum=MOMENTUM, period=n, activation=share / n)


METHODS = {
    "DiLoCo": Method(
        lambda lr, n: Buffered(period=n, outer=_nesterov(lr)), 0.3, is_synchronous=True
    ),
    "DiLoCo, outer SGD": Method(
        lambda lr, n: Buffered(period=n, outer=SGD(lr)), 0.7, is_synchronous=True
    ),
    "async Nesterov": Method(lambda lr, n: Immediate(outer=_nesterov(lr)), 0.1),
    "async SGD": Method(lambda lr, n: Immediate(outer=SGD(lr)), 0.3),
    "async SGD momentum": Method(lambda lr, n: Immediate(outer=HeavyBall(lr, MOMENTUM)), 0.03),
    "async Adam": Method(lambda lr, n: Immediate(outer=Adam(lr)), 0.03),
    "buffer": Method(lambda lr, n: Buffered(period=n, outer=_nesterov(lr)), 0.3),
    "polynomial": Method(lambda lr, n: Immediate(outer=_nesterov(lr), discount=0.5), 0.1),
    "polynomial, threshold": Method(
        lambda lr, n: Immediate(outer=_nesterov(lr), discount=0.5, max_staleness=MAX_STALENESS),
        0.1,
    ),
    "compensation": Method(lambda lr, n: Immediate(outer=_nesterov(lr), compensation=1.0), 0.1),
    "DN": Method(_delayed(), 0.3),
    "DN + DyLU": Method(_delayed(), 0.3, uses_dylu=True),
    "DN + DyLU, c = 0.1/N": Method(_delayed(0.1), 0.3, uses_dylu=True),
    "DN + DyLU, grace": Method(_delayed(), 0.3, uses_dylu=True, grace_steps=1.0),
}


def _spread(slowest: float) -> Callable[[int], list[float]]:
    """Seconds per step of n workers, geometrically from 1 to ``slowest``."""
    return lambda n: [slowest ** (i / (n - 1)) for i in range(n)]


# "very" has the ratio of the paper's own example, 0.58 to 3.33 seconds.
SPEEDS = {
    "none": _spread(1.0),
    "slight": _spread(1.25),
    "moderate": _spread(2.0),
    "very": _spread(3.33 / 0.58),
    "doubling": lambda n: [(1.0, 1.0, 2.0, 4.0)[i % 4] for i in range(n)],
}
