"""Server rules: how one arriving pseudo-gradient changes the shared model.

A rule collects ``period`` arrivals (N), each with weight 1/N times its discount for staleness, and
takes an outer step with the N-th. Between two outer steps the shared model either stays
(``Buffered``) or follows the arrivals (``DelayedNesterov``, arXiv 2401.09135, Algorithm 3). The
rule keeps the sum of the arrivals apart from the model of the last outer step. So without discount,
compensation and activation, the bytes after N arrivals equal those of a synchronous step on the
mean of the arrivals, summed in the same order.

A rule keeps one state for each fragment, which every arrival changes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..base.memory import empty_pages
from ..methods.outer import (
    SGD,
    FromTorch,
    HeavyBall,
    LearningRate,
    Nesterov,
    OuterOptimizer,
    OuterState,
    Update,
    make_outer,
    name_of,
)
from ..ops.wire import Layout, WireFormat
from .payloads import Payload, PayloadFile, pieces

_FP32 = WireFormat("fp32")


class RuleState(ABC):
    """A fragment's shared parameters, and the buffers that the rule keeps beside them.

    An *arrival* is an update that has arrived. A rule takes an outer step every ``period`` of them.

    Attributes:
        outer: fp32 [num_elements], the parameters after the last outer step.
        num_arrivals: Arrivals of this fragment so far.
    """

    def __init__(self, outer: Tensor, period: int, optimizer: OuterOptimizer) -> None:
        self.outer, self.period, self.optimizer = outer, period, optimizer
        self.num_arrivals = 0

    @property
    def num_pending(self) -> int:
        """Arrivals since the last outer step."""
        return self.num_arrivals % self.period

    def arrive(self, payload: Payload, layout: Layout, weight: float, impl: str = "") -> None:
        """Add weight * decode(payload); the last arrival of a period takes the outer step."""
        for piece, piece_layout, begin, end in pieces(payload, layout):
            self._add(piece, piece_layout, weight, begin, end, impl)
        self._added(impl)
        self.num_arrivals += 1

    @abstractmethod
    def _add(
        self, payload: Tensor, layout: Layout, weight: float, begin: int, end: int, impl: str
    ) -> None:
        """Add elements [begin, end) of an arrival."""

    @abstractmethod
    def _added(self, impl: str) -> None:
        """Called after ``_add`` for all elements of the arrival."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.outer.nbytes + sum(tensor.nbytes for tensor in self.tensors().values())

    def visible(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Return elements [begin, end) of the shared model as workers see it, fp32.

        The result may be a view of ``outer``.
        """
        return self.outer[begin:end]

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers beside ``outer`` that must be saved, fp32 [num_elements]."""

    def scalars(self) -> dict[str, Any]:
        """Return the numbers that must be saved, as JSON types."""
        return {"num_arrivals": self.num_arrivals}

    def load(self, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
        """Copy saved buffers in."""
        self.num_arrivals = int(scalars["num_arrivals"])
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])

    @abstractmethod
    def part(self, begin: int, end: int) -> RuleState:
        """Return a copy of the state of elements [begin, end)."""


class FusedState(RuleState):
    """Rules that ``ops.outer_step_delayed`` applies in one pass over the model.

    Args:
        mu: Factor of the momentum; None for a rule without one.
        direct, ahead, behind: As in ``ops.outer_step_delayed``.
        between: Factor of the momentum for each arrival before the last one of a period.
        follows: Workers see the arrivals since the last outer step.
    """

    def __init__(
        self,
        outer: Tensor,
        period: int,
        optimizer: OuterOptimizer,
        mu: float | None,
        direct: float,
        ahead: float,
        behind: float,
        *,
        between: float = 0.0,
        follows: bool = False,
    ) -> None:
        super().__init__(outer, period, optimizer)
        self._mu, self._direct, self._ahead, self._behind = mu, direct, ahead, behind
        self._between, self._follows = between, follows
        self.momentum = None if mu is None else empty_pages(outer.shape, torch.float32)
        self.pending = None if period == 1 else empty_pages(outer.shape, torch.float32)

    def config(self) -> dict[str, Any]:
        """Return the arguments of an equal state, without the optimizer."""
        return {
            "period": self.period,
            "mu": self._mu,
            "direct": self._direct,
            "ahead": self._ahead,
            "behind": self._behind,
            "between": self._between,
            "follows": self._follows,
        }

    @property
    def hides(self) -> bool:
        """Whether workers sometimes train from other parameters than ``outer``."""
        return self._follows and self.pending is not None

    def lr_at(self, num_arrivals: int) -> float:
        """Return the learning rate after this number of arrivals."""
        lr = self.optimizer.lr
        return float(lr(num_arrivals // self.period) if callable(lr) else lr)

    def _lr(self) -> float:
        return self.lr_at(self.num_arrivals)

    def _add(
        self, payload: Tensor, layout: Layout, weight: float, begin: int, end: int, impl: str
    ) -> None:
        state = self if (begin, end) == (0, self.outer.numel()) else self.view(begin, end)
        state.add_runs(payload, layout, weight, 0, layout.num_elements, self.num_arrivals, impl)

    def add_runs(
        self,
        payload: Tensor,
        layout: Layout,
        weight: float,
        begin: int,
        end: int,
        num_arrivals: int,
        impl: str = "",
    ) -> None:
        """Add elements [begin, end), whole runs, of the arrival after ``num_arrivals`` others."""
        place = num_arrivals % self.period
        is_first, is_last, lr = place == 0, place == self.period - 1, self.lr_at(num_arrivals)
        self.step([payload], [weight], layout, begin, end, lr, is_first, is_last, impl)

    def step(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        layout: Layout,
        begin: int,
        end: int,
        lr: float,
        is_first: bool = True,
        is_last: bool = True,
        impl: str = "",
    ) -> None:
        """Add payloads to the sum of a period; with ``is_last``, take the outer step on that sum.

        Args:
            payloads, weights: The payloads and their factors.
            begin, end: The range of elements.
            lr: The outer learning rate.
            is_first: These are the first payloads of the period.
            is_last: These are its last payloads.
        """
        ops.outer_step_delayed(
            self.outer,
            self.momentum,
            self.pending,
            payloads,
            weights,
            begin,
            end,
            *layout.whole[2:],
            lr,
            mu=self._mu or 0.0,
            direct=self._direct,
            ahead=self._ahead,
            behind=self._behind,
            first=is_first,
            last=is_last,
            impl=impl,
        )

    def _added(self, impl: str) -> None:
        pass

    def visible(self, begin: int = 0, end: int | None = None) -> Tensor:
        outer = self.outer[begin:end]
        if not self._follows or self.num_pending == 0:
            return outer
        assert self.pending is not None and self.momentum is not None
        step = self.pending[begin:end]
        if self._between:
            step = self.momentum[begin:end].mul(self.num_pending * self._between).add_(step)
        # Round the product and the difference separately, as the operators do.
        return torch.sub(outer, torch.mul(step, self._lr()))

    def tensors(self) -> dict[str, Tensor]:
        named = {"momentum": self.momentum, "pending": self.pending}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def view(self, begin: int, end: int) -> FusedState:
        """Return a state of elements [begin, end) that shares memory with this one."""
        part = FusedState.__new__(FusedState)
        part.__dict__.update(self.__dict__)
        part.outer = self.outer[begin:end]
        part.momentum = None if self.momentum is None else self.momentum[begin:end]
        part.pending = None if self.pending is None else self.pending[begin:end]
        return part

    def part(self, begin: int, end: int) -> FusedState:
        part = self.view(begin, end)
        part.outer = part.outer.clone()
        part.momentum = None if part.momentum is None else part.momentum.clone()
        part.pending = None if part.pending is None else part.pending.clone()
        return part


class PlainState(RuleState):
    """Rules with an optimizer beyond the fused ones; it steps on the sum of a period's arrivals."""

    def __init__(self, outer: Tensor, period: int, optimizer: OuterOptimizer) -> None:
        super().__init__(outer, period, optimizer)
        self._state: OuterState = optimizer.make_state(outer)
        self.pending: Tensor | None = None
        if period > 1:
            # The optimizer gets the sum as a payload of the fp32 wire.
            count, block = outer.numel(), _FP32.block_size
            self._layout = Layout(count, 1, max(block, -(-count // block) * block), _FP32)
            self._payload = empty_pages((self._layout.payload_bytes,), torch.uint8)
            self.pending = self._payload.view(torch.float32)[:count]

    def arrive(self, payload: Payload, layout: Layout, weight: float, impl: str = "") -> None:
        # An optimizer of torch may need all parameters at once: read the whole payload into memory.
        if isinstance(payload, PayloadFile) and isinstance(self.optimizer, FromTorch):
            payload = payload[:]
        super().arrive(payload, layout, weight, impl)

    def _add(
        self, payload: Tensor, layout: Layout, weight: float, begin: int, end: int, impl: str
    ) -> None:
        if self.pending is not None:
            ops.outer_step_delayed(
                self.outer[begin:end],
                None,
                self.pending[begin:end],
                [payload],
                [weight],
                *layout.whole,
                0.0,
                first=self.num_pending == 0,
                impl=impl,
            )
        elif end - begin == self.outer.numel():
            self._step(payload, layout, weight, impl)
        else:
            part = self.part(begin, end)
            part._step(payload, layout, weight, impl)
            self.outer[begin:end] = part.outer
            for name, tensor in self._state.tensors().items():
                tensor[begin:end] = part._state.tensors()[name]

    def _added(self, impl: str) -> None:
        if self.pending is None:
            self._state.num_steps = self.num_arrivals + 1
        elif self.num_pending == self.period - 1:
            self._step(self._payload, self._layout, 1.0, impl)

    @property
    def num_bytes(self) -> int:
        # An optimizer of torch needs a gradient as large as the parameters.
        is_torch = isinstance(self.optimizer, FromTorch)
        return super().num_bytes + is_torch * self.outer.nbytes

    def _step(self, payload: Tensor, layout: Layout, weight: float, impl: str) -> None:
        lr = self.optimizer.lr_at(self._state.num_steps, self._state)
        self._state.step(Update([(payload, weight)], [self.outer], layout, lr, impl=impl))

    def tensors(self) -> dict[str, Tensor]:
        own = {f"optimizer/{name}": tensor for name, tensor in self._state.tensors().items()}
        return own if self.pending is None else {"pending": self.pending, **own}

    def scalars(self) -> dict[str, Any]:
        # Tensors of one element, such as Adam's step count, become numbers.
        extra = {
            k: v.item() if isinstance(v, Tensor) else v for k, v in self._state.extra().items()
        }
        return {**super().scalars(), "num_steps": self._state.num_steps, "extra": extra}

    def load(self, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
        self.num_arrivals = int(scalars["num_arrivals"])
        if self.pending is not None:
            self.pending.copy_(tensors["pending"])
        self._state.num_steps = int(scalars["num_steps"])
        own = {k.removeprefix("optimizer/"): v for k, v in tensors.items() if k != "pending"}
        extra = {
            k: torch.tensor(float(v)) if isinstance(v, (int, float)) else v
            for k, v in scalars["extra"].items()
        }
        self._state.load(own, extra)

    def part(self, begin: int, end: int) -> PlainState:
        copy = PlainState(self.outer[begin:end].clone(), self.period, self.optimizer)
        parts = {name: tensor[begin:end] for name, tensor in self.tensors().items()}
        copy.load(parts, self.scalars())
        return copy


@dataclass(kw_only=True)
class ServerRule(ABC):
    """Base of the rules: their common arguments.

    Args:
        discount: Exponent d of the polynomial discount: an arrival has the factor
            (1 + staleness)^-d. 0 for no discount; 0.5 in arXiv 2401.09135.
        max_staleness: Arrivals of greater staleness are refused; None for no bound.
        compensation: lambda of delay compensation: the pseudo-gradient g becomes
            g + lambda*g*g*(theta_now - theta_then). With a lambda other than 0 the server keeps the
            parameters that its workers train from (theta_then), in files while the disk has room.
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
    """Take one outer step on the sum of ``period`` arrivals (FedBuff, arXiv 2106.06639).

    Each arrival has the factor ``weight(staleness)``: without a discount the sum is the mean.
    """

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
    """Step along every arrival at once, but update the momentum only with every N-th one.

    Args:
        lr, momentum: As in ``diloco_comm.Nesterov``.
        period: N; the number of workers is a natural choice.
        activation: c in [0, 1/N], the share of the momentum by which each of the other N - 1
            arrivals moves the model; the N-th one uses the rest.
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
    """Return (mu, direct, ahead, behind) of ``ops.outer_step_delayed``; None if not fused."""
    if isinstance(outer, SGD):
        return None, 1.0, 0.0, 0.0
    if isinstance(outer, HeavyBall):
        return outer.momentum, 0.0, 1.0, 0.0
    if isinstance(outer, Nesterov):
        return outer.momentum, 1.0, outer.momentum, 0.0
    return None


RULES: dict[str, type[ServerRule]] = {c.__name__: c for c in (Immediate, Buffered, DelayedNesterov)}
