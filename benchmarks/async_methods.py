"""The methods and speeds that ``async_convergence.py`` compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diloco_comm import SGD, Nesterov
from diloco_comm.asynchronous.rules import Buffered, DelayedNesterov, Immediate, ServerRule

MOMENTUM = 0.9
# Three candidates for every method: of rules that give each arrival its full weight, and of those
# that give it one N-th. The paper searched 0.03, 0.1, 0.3 and 0.7.
GRID = {"full": (0.03, 0.1, 0.3), "share": (0.1, 0.3, 0.7), "sgd": (0.3, 0.7, 1.0)}


@dataclass(frozen=True)
class Method:
    """A server rule as a function of the learning rate and the number of workers."""

    rule: Callable[[float, int], ServerRule]
    grid: str
    uses_dylu: bool = False
    is_synchronous: bool = False


def _nesterov(lr: float) -> Nesterov:
    return Nesterov(lr, MOMENTUM)


METHODS = {
    "DiLoCo": Method(
        lambda lr, n: Buffered(period=n, outer=_nesterov(lr)), "share", is_synchronous=True
    ),
    "DiLoCo, outer SGD": Method(
        lambda lr, n: Buffered(period=n, outer=SGD(lr)), "sgd", is_synchronous=True
    ),
    "async Nesterov": Method(lambda lr, n: Immediate(outer=_nesterov(lr)), "full"),
    "async SGD": Method(lambda lr, n: Immediate(outer=SGD(lr)), "share"),
    "buffer": Method(lambda lr, n: Buffered(period=n, outer=_nesterov(lr)), "share"),
    "polynomial": Method(lambda lr, n: Immediate(outer=_nesterov(lr), discount=0.5), "full"),
    "compensation": Method(lambda lr, n: Immediate(outer=_nesterov(lr), compensation=1.0), "full"),
    "DN": Method(lambda lr, n: DelayedNesterov(lr=lr, momentum=MOMENTUM, period=n), "share"),
    "DN + DyLU": Method(
        lambda lr, n: DelayedNesterov(lr=lr, momentum=MOMENTUM, period=n), "share", uses_dylu=True
    ),
}


def _spread(slowest: float) -> Callable[[int], list[float]]:
    """Seconds per step of n workers, geometrically from 1 to ``slowest``."""
    return lambda n: [slowest ** (i / (n - 1)) for i in range(n)]


# The last has the ratio of the paper's own example, 0.58 to 3.33 seconds.
SPEEDS = {
    "none": _spread(1.0),
    "slight": _spread(1.25),
    "moderate": _spread(2.0),
    "very": _spread(3.33 / 0.58),
}
