"""Outer optimizers: the step on averaged pseudo-gradients, taken on one fragment at a time.

A pseudo-gradient is outer minus local parameters, so every outer optimizer descends it. An outer
optimizer holds its arguments only; the buffers of a fragment are in its ``OuterState``. The
learning rate, and nothing else, may be assigned at any time (``diloco.outer.lr = 0.5``) or be a
function of the round; all replicas use the rate that the lowest replica sent with the round.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _C, ops
from ..base.checks import class_of, integer, not_negative, number
from ..base.memory import persistent_like
from ..ops.offload import CHUNK_ELEMENTS, Offloaded, chunks_of
from ..ops.wire import Layout

# A context manager: inside its block a part of the outer parameters, and of each buffer, is on the
# device. The block gets these tensors, the outer parameters first.
Pieces = AbstractContextManager[list[Tensor]]


@dataclass
class Update:
    """One outer step: the encoded gradient, the parameters to write, and numbers of the round.

    Attributes:
        terms: Payloads (uint8, laid out as ``layout``) and their coefficients.
        params: The fragment's parameters, written in place.
        lr: Learning rate of this round.
        alpha: Weight of the local value in the merge.
        clip: Bound of the momentum's elements, for optimizers with a momentum.
        penalty: The factor by which the overlap policy has divided the coefficients (``CO2``); else
            1. The terms' sum times this factor is the gradient before that division.
        base_lr: ``lr`` without the factor of this round's overlap policy; None without a factor.
        impl: Implementation of the operators; "" for the fastest.
        verdict: None, or int64 [1] on the device: unless it is 0 the step does nothing. Only for a
            state with ``takes_verdict``.
    """

    terms: list[tuple[Tensor, float]]
    params: list[Tensor]
    layout: Layout
    lr: float
    alpha: float = 0.0
    clip: float = math.inf
    penalty: float = 1.0
    base_lr: float | None = None
    impl: str = ""
    verdict: Tensor | None = None

    def payloads(self) -> dict[str, Any]:
        """Return the arguments that say where the encoded elements are."""
        payloads, coefficients = [], []
        for payload, coefficient in self.terms:
            payloads.append(payload)
            coefficients.append(coefficient)
        return {
            "payloads": payloads,
            "coefficients": coefficients,
            "run_elements": self.layout.run_elements,
            "wire": self.layout.wire.name,
            "block_size": self.layout.wire.block_size,
            "impl": self.impl,
        }


class OuterState(ABC):
    """Outer parameters of one fragment, and the buffers that its optimizer keeps for them.

    Attributes:
        outer: fp32 ``[num_elements]``; the shared model.
        num_steps: Outer steps taken.
        last_lr: Learning rate of the last step; None where that is not known.
        last_momentum: Factor of the momentum in the last step, if the step looked ahead.
        last_update: The arguments of the last step, for ``take_mean``. None once the fragment's
            next payload is encoded, since that may overwrite the payloads here, and after a load or
            a copy. After a change of the group it keeps payloads of the former group alive, in case
            the next flush is the final one.
        equal_at: Number of outer steps at which all replicas had the same outer parameters.
        ended_at: Number of outer steps after which training ended; -1 while it goes on.
        is_mean: Whether the end of training replaced the last step by ``take_mean``.
        takes_verdict: Whether ``step`` can read on the device whether it is to do anything
            (``Update.verdict``), so that the host need not know.
    """

    takes_verdict = False
    num_steps: int
    last_lr: float | None = None
    equal_at = 0
    last_momentum: float | None = None
    last_update: Update | None = None
    ended_at = -1
    is_mean = False
    _before: tuple[float | None, float | None] = None, None

    def count_step(self, update: Update, momentum: float | None = None) -> None:
        """Count an outer step that was taken, or was left to the device's decision.

        Args:
            momentum: See ``last_momentum``.
        """
        self.num_steps += 1
        self._before = self.last_lr, self.last_momentum
        self.last_lr, self.last_momentum = update.lr, momentum
        self.last_update = update

    def uncount_step(self) -> None:
        """Take back the count of the last outer step, which was not taken."""
        self.num_steps, self.last_update = self.num_steps - 1, None
        self.last_lr, self.last_momentum = self._before

    def __init__(self, outer: Tensor) -> None:
        self.outer = outer
        self.num_steps = 0
        self.offloaded: Offloaded | None = None

    def offload(self, loader: _C.ChunkLoader) -> None:
        """Keep the state in host memory, where its tensors are already, page-locked.

        Raises:
            ValueError: If this optimizer cannot.
        """
        if not self.takes_verdict:
            raise ValueError(
                "offload='cpu' goes with SGD, HeavyBall, Nesterov and Adam as outer optimizer, not "
                "with one of torch"
            )
        self.offloaded = Offloaded([self.outer, *self.tensors().values()], loader)

    def ranges(self, layout: Layout) -> Iterator[tuple[int, int, Pieces]]:
        """Cut the fragment into ranges [begin, end) of elements; one, unless it is offloaded.

        The third value of a range brings the outer parameters and buffers of these elements to the
        device, for the time of its block. Enter the blocks one after the other.
        """
        if self.offloaded is None:
            yield 0, layout.num_elements, nullcontext([self.outer, *self.tensors().values()])
            return
        for begin, end in chunks_of(layout):
            yield begin, end, self.offloaded.chunk(begin, end, is_written=True)

    @abstractmethod
    def step(self, update: Update) -> None:
        """Take one outer step and merge the result into the parameters."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers with one fp32 element for each parameter element."""

    def look_ahead(self) -> tuple[Tensor, float] | None:
        """Return a momentum m and a factor, if the last step ended with outer -= lr * factor * m.

        That last move looks ahead to the next step (Nesterov). None for other optimizers.
        """
        return None

    def take_back_look_ahead(self, lr: float, momentum: float | None) -> None:
        """Undo the last step's look-ahead: outer += lr * momentum * m, see ``look_ahead``.

        Args:
            lr: Learning rate of the last step.
            momentum: Factor of the momentum in the last step; None is this optimizer's.
        """
        ahead = self.look_ahead()
        if ahead is not None:
            _add(self.outer, ahead[0], lr * (ahead[1] if momentum is None else momentum))

    def take_mean(self, params: list[Tensor]) -> None:
        """Set ``outer`` to what it was before ``last_update``, less the mean pseudo-gradient.

        Args:
            params: The fragment's parameters, which are set to the same values.
        """
        update = self.last_update
        assert update is not None
        for begin, end, pieces in self.ranges(update.layout):
            with pieces as (outer, *buffers):
                # Undoing the step still lacks +multiple * gradient, and taking the mean is
                # -penalty * gradient: both together are one plain step.
                multiple = self._undo(outer, buffers, update.lr)
                ops.outer_step(
                    outer,
                    None,
                    params,
                    begin=begin,
                    end=end,
                    **update.payloads(),
                    optimizer="sgd",
                    lr=update.penalty - multiple,
                    outer_begin=begin,
                )

    def _undo(self, outer: Tensor, buffers: Sequence[Tensor], lr: float) -> float:
        """Undo the last step, except for the multiple of the gradient that it subtracted.

        Args:
            outer, buffers: The tensors of one range, see ``ranges``.

        Returns:
            The factor of the gradient that the caller has yet to add.
        """
        raise NotImplementedError

    def extra(self) -> dict[str, Any]:
        """Return the values to be saved that are not in ``tensors``."""
        return {}

    def load(self, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None:
        """Copy saved buffers in; ``num_steps`` has the saved value already."""
        for name, tensor in self.tensors().items():
            if tensor is not tensors[name]:
                tensor.copy_(tensors[name])

    def without(self, buffer: str) -> Collection[str]:
        """Return the parameters, by name, for which the optimizer keeps no such buffer."""
        return ()

    def check(self, names: set[str], extra: Mapping[str, Any] | None) -> None:
        """Raise ValueError unless ``load`` can take buffers of these names, and ``extra``.

        Args:
            extra: None for a state without an outer step.
        """
        own = set(self.tensors())
        if own != names:
            raise ValueError(
                f"the saved outer optimizer has buffers {sorted(names)}, this one {sorted(own)}"
            )


@dataclass(frozen=True)
class WarmupCosine:
    """Outer learning rate that rises linearly to ``peak``, then falls along half a cosine.

    Give it as ``lr`` of an outer optimizer: ``Nesterov(lr=WarmupCosine(0.7, 10, 200))``. Round 0 is
    the first round of a fragment; every fragment goes through the whole schedule by its own rounds.
    The first round has ``peak / warmup_rounds`` (``peak`` without a warm-up), round
    ``warmup_rounds - 1`` has ``peak``, and round ``total_rounds - 1`` and all later ones have
    ``final``, also where that is the first round. A schedule holds no state: it is a function of
    the round alone, which a saved state and a joining replica bring along.

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


_SCHEDULES = {schedule.__name__: schedule for schedule in (WarmupCosine,)}


def from_config(config: dict[str, Any]) -> WarmupCosine:
    """Make a schedule again from its ``config``.

    Raises:
        ValueError: If the configuration names no schedule, or has other arguments.
    """
    arguments = dict(config)
    name = arguments.pop("name", None)
    if name not in _SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}: it must be one of {', '.join(_SCHEDULES)}")
    try:
        return _SCHEDULES[name](**arguments)
    except TypeError as error:
        raise ValueError(f"the saved schedule {name} cannot be made: {error}") from None


LearningRate = float | Callable[[int], float]


class OuterOptimizer(ABC):
    """Base of the outer optimizers, which hold arguments that all replicas must share.

    Only ``lr`` may be assigned later: the learning rate travels with each round.
    """

    lr: LearningRate

    def __setattr__(self, name: str, value: Any) -> None:
        is_argument = name in {field.name for field in fields(self)}  # type: ignore[arg-type]
        is_first = is_argument and name not in vars(self)
        if not (is_first or name == "lr" or name.startswith("_")):
            raise AttributeError(
                f"{type(self).__name__}.{name} cannot be assigned: only the lr of an outer "
                "optimizer may change, the rest is given when it is made"
            )
        super().__setattr__(name, self._checked(name, value))

    def _checked(self, name: str, value: Any) -> Any:
        """Return the value of an argument as plain numbers.

        Raises:
            TypeError, ValueError: If it cannot be.
        """
        if name == "lr" and not callable(value):
            return not_negative("outer lr", value, "a number or a function")
        if name == "momentum":
            return _fraction("momentum", value)
        if name == "betas":
            if not isinstance(value, Sequence) or len(value) != 2:
                raise TypeError(f"betas must be two numbers, got {value!r}")
            return tuple(_fraction("each of betas", beta) for beta in value)
        if name == "eps":
            eps = number("eps", value)
            if not 0 < eps < math.inf:
                raise ValueError(f"eps must be positive and finite, got {eps}")
            return eps
        return value

    @abstractmethod
    def make_state(self, outer: Tensor) -> OuterState:
        """Allocate the buffers for one fragment's outer parameters."""

    def lr_at(self, round: int, state: OuterState) -> float:
        """Return the learning rate of this round.

        Raises:
            TypeError, ValueError: If a function returns no learning rate.
        """
        if callable(self.lr):
            return not_negative(f"outer lr {name_of(self.lr)}({round})", self.lr(round))
        return self.lr

    def config(self) -> dict[str, Any]:
        """Return class and arguments as JSON types; a function is shown by its name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        shown = {k: _shown(v) for k, v in values.items()}
        return {"name": type(self).__name__, **shown}

    def shared_config(self) -> dict[str, Any]:
        """Return the values that all replicas must have in common, after ``make_state``."""
        return self.config()


# ------------------------------------------------------------------------- the fused operators


@dataclass
class SGD(OuterOptimizer):
    """outer -= lr*g with the gradient g. With lr 1.0 it averages: FedAvg (arXiv 1602.05629)."""

    lr: LearningRate = 1.0

    def make_state(self, outer: Tensor) -> OuterState:
        return _FusedState(outer, "sgd", 0.0)


@dataclass
class HeavyBall(OuterOptimizer):
    """m = momentum*m + g; outer -= lr*m, with the gradient g and a buffer m."""

    lr: LearningRate = 0.3
    momentum: float = 0.9

    def make_state(self, outer: Tensor) -> OuterState:
        return _FusedState(outer, "heavy_ball", self.momentum)


@dataclass
class Nesterov(OuterOptimizer):
    """m = momentum*m + g; outer -= lr*(g + momentum*m), as ``torch.optim.SGD(nesterov=True)``.

    Here g is the gradient and m a buffer. The defaults are DiLoCo's (arXiv 2311.08105).
    """

    lr: LearningRate = 0.7
    momentum: float = 0.9

    def make_state(self, outer: Tensor) -> OuterState:
        return _FusedState(outer, "nesterov", self.momentum)


@dataclass
class Adam(OuterOptimizer):
    """Adam with bias correction; DiLoCo needed eps 0.1 (arXiv 2311.08105, Table 5)."""

    lr: LearningRate = 0.3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 0.1

    def make_state(self, outer: Tensor) -> OuterState:
        return _AdamState(outer, self)


class _FusedState(OuterState):
    takes_verdict = True

    def __init__(self, outer: Tensor, kind: str, momentum: float) -> None:
        super().__init__(outer)
        self.kind, self.mu = kind, momentum
        self.momentum = None if kind == "sgd" else persistent_like(outer)

    def step(self, update: Update) -> None:
        for begin, end, pieces in self.ranges(update.layout):
            with pieces as (outer, *momentum):
                ops.outer_step(
                    outer,
                    momentum[0] if momentum else None,
                    update.params,
                    begin=begin,
                    end=end,
                    **update.payloads(),
                    optimizer=self.kind,
                    lr=update.lr,
                    mu=self.mu,
                    alpha=update.alpha,
                    clip=update.clip,
                    verdict=update.verdict,
                    outer_begin=begin,
                )
        self.count_step(update, self.mu if self.kind == "nesterov" else None)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.momentum is None else {"momentum": self.momentum}

    def _undo(self, outer: Tensor, buffers: Sequence[Tensor], lr: float) -> float:
        if self.kind == "sgd":
            return lr
        is_ahead = self.kind == "nesterov"
        _add(outer, buffers[0], lr * self.mu if is_ahead else lr)
        return lr if is_ahead else 0.0

    def look_ahead(self) -> tuple[Tensor, float] | None:
        is_ahead = self.kind == "nesterov" and self.momentum is not None
        return (self.momentum, self.mu) if is_ahead else None  # type: ignore[return-value]


class _AdamState(OuterState):
    takes_verdict = True

    def __init__(self, outer: Tensor, config: Adam) -> None:
        super().__init__(outer)
        self.config = config
        self.exp_avg = persistent_like(outer)
        self.exp_avg_sq = persistent_like(outer)

    def step(self, update: Update) -> None:
        for begin, end, pieces in self.ranges(update.layout):
            with pieces as (outer, exp_avg, exp_avg_sq):
                ops.outer_step_adam(
                    outer,
                    exp_avg,
                    exp_avg_sq,
                    update.params,
                    begin=begin,
                    end=end,
                    **update.payloads(),
                    lr=update.lr,
                    beta1=self.config.betas[0],
                    beta2=self.config.betas[1],
                    eps=self.config.eps,
                    step=self.num_steps + 1,
                    alpha=update.alpha,
                    verdict=update.verdict,
                    outer_begin=begin,
                )
        self.count_step(update)

    def _undo(self, outer: Tensor, buffers: Sequence[Tensor], lr: float) -> float:
        (beta1, beta2), eps = self.config.betas, self.config.eps
        size, correction = lr / (1 - beta1**self.num_steps), math.sqrt(1 - beta2**self.num_steps)
        for begin in range(0, outer.numel(), CHUNK_ELEMENTS):
            here = slice(begin, begin + CHUNK_ELEMENTS)
            # fp64, because fp32 square roots differ between devices.
            first, second = buffers[0][here].double(), buffers[1][here].double()
            outer[here] += (first * size / (second.sqrt() / correction + eps)).float()
        return 0.0

    def tensors(self) -> dict[str, Tensor]:
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


# --------------------------------------------------------------------- any torch.optim.Optimizer

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
# A function that cuts a 1-D tensor of a fragment's elements into one view for each parameter, by
# name; see ``Fragment.cut``.
Cut = Callable[[Tensor], dict[str, Tensor]]
# The class of an outer optimizer, in lower case too.
OuterName = Literal["SGD", "HeavyBall", "Nesterov", "Adam", "sgd", "heavyball", "nesterov", "adam"]


@dataclass
class FromTorch(OuterOptimizer):
    """Any ``torch.optim.Optimizer`` over the outer parameters, one for each fragment.

    Slower than the fused operators: the mean pseudo-gradient is decoded into ``.grad`` first. When
    the optimizer is made, one step with a gradient of zeros shows which tensors the optimizer
    keeps; then that step is taken back.

    Args:
        factory: Called once for each fragment, with a list of fp32 parameters, which share the
            memory of the outer parameters; returns their optimizer. The parameters have the shapes
            of the model's parameters, but for three cases: a parameter of no dimensions has the
            shape [1]; of a parameter that several workers share (FSDP2, ``shard_group``), this
            worker's part is a vector; and a parameter without elements is left out.
        lr: Rate of the first group; each other group keeps its ratio to the first one. None leaves
            the learning rate to the optimizer's own groups.
    """

    factory: Factory
    lr: LearningRate | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._made: dict[str, Any] = {}

    def make_state(self, outer: Tensor, cut: Cut | None = None) -> OuterState:
        """Make the optimizer of one fragment.

        Args:
            cut: Cuts ``outer`` into the parameters of the optimizer; None: one vector.
        """
        state = _TorchState(outer, self.factory, cut or (lambda flat: {"": flat}))
        first, *others = (
            {name: _plain(value) for name, value in group.items() if name != "params"}
            for group in state.optimizer.param_groups
        )
        groups = {"groups": others} if others else {}
        self._made = {"optimizer": type(state.optimizer).__name__, **first, **groups}
        return state

    def shared_config(self) -> dict[str, Any]:
        """Return this configuration, and class and arguments of the optimizer that was made."""
        return {**self._made, **{k: v for k, v in self.config().items() if v is not None}}

    def _checked(self, name: str, value: Any) -> Any:
        return None if name == "lr" and value is None else super()._checked(name, value)

    def lr_at(self, round: int, state: OuterState) -> float:
        assert isinstance(state, _TorchState)
        if self.lr is None:
            return not_negative("lr", state.optimizer.param_groups[0].get("lr", 0.0))
        return super().lr_at(round, state)


class _TorchState(OuterState):
    """An optimizer of torch, whose tensors of the parameters' shapes lie in flat buffers.

    Attributes:
        params: Views of ``outer``, by the names of the parameters.
        values: The optimizer's state for each parameter; before the first step, what one step with
            a gradient of zeros has left.
    """

    def __init__(self, outer: Tensor, factory: Factory, cut: Cut) -> None:
        super().__init__(outer)
        self._cut = cut
        self.params = {name: nn.Parameter(view) for name, view in cut(outer).items()}
        # Outer parameters before the last step less the mean pseudo-gradient, for ``take_mean``. It
        # is kept at each step, because a step of an optimizer of torch cannot be undone, and only
        # a later flush says which step was the last.
        self.mean = persistent_like(outer)
        self.optimizer = factory(list(self.params.values()))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"outer={name_of(factory)} made {class_of(self.optimizer)}: "
                "a torch.optim.Optimizer is expected"
            )
        self._flats: dict[str, Tensor] = {}
        self._views: dict[str, dict[str, Tensor]] = {}
        self._fresh = {p: copy.deepcopy(values) for p, values in self.optimizer.state.items()}
        before = outer.clone()
        self._descend(torch.zeros_like(outer))
        outer.copy_(before)
        self._restart()

    def _descend(self, gradient: Tensor) -> None:
        """Take a step of the optimizer, and move what it keeps into the flat buffers."""
        for name, grad in self._cut(gradient).items():
            self.params[name].grad = grad
        self.optimizer.step()
        for param in self.params.values():
            param.grad = None
        self._keep()
        self.values = {name: self.optimizer.state.get(p, {}) for name, p in self.params.items()}

    def _keep(self) -> None:
        for name, param in self.params.items():
            values = self.optimizer.state.get(param, {})
            for key, value in values.items():
                if not self._is_elementwise(name, value):
                    continue
                if key not in self._flats:
                    self._flats[key] = persistent_like(self.outer)
                    self._views[key] = self._cut(self._flats[key])
                home = self._views[key][name]
                if value is not home:
                    values[key] = home.copy_(value.detach())

    def _restart(self) -> None:
        """Set the optimizer's state to the state in which the optimizer was made."""
        self.optimizer.state.clear()
        for flat in self._flats.values():
            flat.zero_()
        self.optimizer.state.update({p: copy.deepcopy(v) for p, v in self._fresh.items()})
        self._keep()

    def step(self, update: Update) -> None:
        gradient, count = torch.empty_like(self.outer), update.layout.num_elements
        ops.decode(outs=[gradient], begin=0, end=count, **update.payloads())
        groups = [group for group in self.optimizer.param_groups if "lr" in group]
        before = [float(group["lr"]) for group in groups]
        during = _led(before, update.lr)
        for group, rate in zip(groups, during, strict=True):
            group["lr"] = rate
        torch.sub(self.outer, gradient, alpha=update.penalty, out=self.mean)
        self._descend(gradient)
        if update.base_lr is not None:
            # The next round does not inherit the factor. The optimizer may have set another rate.
            for group, rate, base in zip(groups, during, _led(before, update.base_lr), strict=True):
                if group["lr"] == rate:
                    group["lr"] = base
        ops.merge(self.outer, update.params, alpha=update.alpha, impl=update.impl)
        ahead = self.look_ahead()
        self.count_step(update, None if ahead is None else ahead[1])

    def take_mean(self, params: list[Tensor]) -> None:
        self.outer.copy_(self.mean)
        ops.merge(self.outer, params)

    def look_ahead(self) -> tuple[Tensor, float] | None:
        first, *others = self.optimizer.param_groups
        is_ahead = type(self.optimizer) is torch.optim.SGD and first["nesterov"] and not others
        if not is_ahead or not self.optimizer.state:
            return None
        return self._flats["momentum_buffer"], first["momentum"]

    def _is_elementwise(self, name: str, value: Any) -> bool:
        param = self.params[name]
        return isinstance(value, Tensor) and (value.shape, value.dtype) == (
            param.shape,
            param.dtype,
        )

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._flats)

    def without(self, buffer: str) -> Collection[str]:
        return [
            name
            for name, values in self.values.items()
            if not self._is_elementwise(name, values.get(buffer))
        ]

    def extra(self) -> dict[str, Any]:
        """Return numbers that all parameters share, and other values by the parameters' names."""
        found: dict[str, dict[str, Any]] = {}
        for name, values in self.values.items():
            for key, value in values.items():
                if not self._is_elementwise(name, value):
                    found.setdefault(key, {})[name] = value
        return {key: _shared(by_name) for key, by_name in found.items()}

    def check(self, names: set[str], extra: Mapping[str, Any] | None) -> None:
        super().check(names, extra)
        if extra is None:
            return
        for key, own in self.extra().items():
            for name, value in own.items() if isinstance(own, Mapping) else [("", own)]:
                saved = _of(extra.get(key), name)
                shape = value.shape if isinstance(value, Tensor) else ()
                if key not in extra or getattr(saved, "shape", ()) != shape:
                    raise ValueError(
                        f"the saved outer optimizer lacks {key!r} of shape {list(shape)} for "
                        f"parameter {name!r}: it is from another function, or from a version that "
                        "gave the function one vector for each fragment"
                    )

    def load(self, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None:
        if self.num_steps == 0:
            self._restart()
            return
        super().load(tensors, extra)
        for name, param in self.params.items():
            loaded = {}
            for key, value in self.values[name].items():
                if self._is_elementwise(name, value):
                    loaded[key] = self._views[key][name]
                elif key in extra:
                    saved = _of(extra[key], name)
                    is_on = isinstance(saved, Tensor) and isinstance(value, Tensor)
                    loaded[key] = saved.to(value.device, copy=True) if is_on else saved
            self.optimizer.state[param] = self.values[name] = loaded


def _led(rates: Sequence[float], first: float) -> list[float]:
    """Return the learning rates of an optimizer's groups after the first group's becomes ``first``.

    The other groups keep their ratio to the first group; if its rate was 0, all become ``first``.
    """
    lead = rates[0] if rates else 0.0
    return [first if rate == lead or not lead else rate * (first / lead) for rate in rates]


def _shared(by_name: dict[str, Any]) -> Any:
    """Return the one number that all parameters have; without one, the values by name."""
    first = next(iter(by_name.values()))
    for value in by_name.values():
        if (isinstance(value, Tensor) and value.ndim) or value != first:
            return by_name
    return first


def _of(saved: Any, name: str) -> Any:
    """Return the value of the parameter ``name`` in a result of ``_shared``."""
    return saved.get(name) if isinstance(saved, Mapping) else saved


def _add(outer: Tensor, momentum: Tensor, factor: float) -> None:
    """Add factor * momentum to ``outer``, in place."""
    for begin in range(0, outer.numel(), CHUNK_ELEMENTS):
        here = slice(begin, begin + CHUNK_ELEMENTS)
        # The product is rounded before it is added: a fused add would round otherwise, on some
        # devices.
        outer[here] += momentum[here] * factor


def _plain(value: Any) -> Any:
    """Return an optimizer's argument as JSON types, alike in all processes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):  # a tensor or a number of NumPy
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return name_of(value)


def make_outer(outer: OuterOptimizer | Factory | str | dict[str, Any] | None) -> OuterOptimizer:
    """Turn the argument ``outer`` into an optimizer; None is ``Nesterov()``.

    A name in any case, such as "nesterov", is that optimizer with its defaults.

    Raises:
        TypeError: If it is neither an outer optimizer nor callable; an optimizer of torch that is
            made already, or its class, is answered with the function to write.
        ValueError: If no optimizer of this package has the name, or if a saved configuration names
            a function, which cannot be restored.
    """
    if outer is None:
        return Nesterov()
    if isinstance(outer, OuterOptimizer):
        return outer
    if isinstance(outer, dict):
        return _from_config(outer)
    if isinstance(outer, str):
        return _kind(outer)()
    if isinstance(outer, type) and issubclass(outer, OuterOptimizer):
        raise TypeError(f"outer={outer.__name__} is a class: give an object, {outer.__name__}(...)")
    if isinstance(outer, torch.optim.Optimizer):
        raise TypeError(
            f"outer={type(outer).__name__}(...) holds parameters of its own, and the outer "
            "optimizer must be made over the outer parameters: write "
            f"outer=lambda params: {call_of(outer, 'params')}"
        )
    if isinstance(outer, type) and issubclass(outer, torch.optim.Optimizer):
        raise TypeError(
            f"outer={outer.__name__} is a class, and its default learning rate is seldom one for "
            f"an outer optimizer: write outer=lambda params: {class_name(outer)}(params, lr=0.7) "
            "with the arguments that you want"
        )
    if callable(outer):
        return FromTorch(outer)  # type: ignore[arg-type]
    raise TypeError(f"outer must be SGD, HeavyBall, Nesterov, Adam or a callable, got {outer!r}")


def _from_config(config: dict[str, Any]) -> OuterOptimizer:
    arguments = dict(config)
    name = arguments.pop("name", None)
    for key, what in (("factory", "outer"), ("lr", "outer lr")):
        if isinstance(arguments.get(key), str):
            raise ValueError(
                f"the saved configuration names a function as {what}, {arguments[key]!r}, which "
                "cannot be restored: give outer= again"
            )
    kind = _kind(name)
    unknown = arguments.keys() - {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown:
        raise ValueError(f"the saved outer {name} has unknown arguments {sorted(unknown)}")
    if isinstance(arguments.get("lr"), dict):
        arguments["lr"] = from_config(arguments["lr"])
    return kind(**arguments)


def _kind(name: Any) -> type[OuterOptimizer]:
    for known, kind in _BY_NAME.items():
        if isinstance(name, str) and name.lower() == known.lower():
            return kind
    raise ValueError(f"unknown outer {name!r}: it must be one of {', '.join(_BY_NAME)}")


_BY_NAME: dict[str, type[OuterOptimizer]] = {
    c.__name__: c for c in (SGD, HeavyBall, Nesterov, Adam)
}


def _fraction(name: str, value: Any) -> float:
    fraction = number(name, value)
    if not 0 <= fraction < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {fraction}")
    return fraction


def _shown(value: Any) -> Any:
    """Return an argument as JSON types; a function other than a schedule by its name."""
    if isinstance(value, WarmupCosine):
        return value.config()
    return name_of(value) if callable(value) else value


def name_of(function: Callable[..., Any]) -> str:
    """Name a function in saved configurations and messages."""
    return getattr(function, "__qualname__", None) or type(function).__name__


def call_of(optimizer: torch.optim.Optimizer, argument: str) -> str:
    """Return the call that makes such an optimizer, of its first group's arguments.

    Arguments that are the class's own defaults are left out, but for the learning rate.

    Args:
        argument: The word that stands for the parameters.
    """
    made = type(optimizer)
    values = {**optimizer.defaults, **optimizer.param_groups[0]}
    written = [argument]
    for name, parameter in inspect.signature(made).parameters.items():
        value = values.get(name, parameter.default)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        is_plain = isinstance(value, (bool, int, float, str, tuple, list))
        if name != "params" and is_plain and (name == "lr" or value != parameter.default):
            written.append(f"{name}={value!r}")
    return f"{class_name(made)}({', '.join(written)})"


def class_name(kind: type[torch.optim.Optimizer]) -> str:
    """Return the name of an optimizer's class as a program writes it."""
    is_public = kind.__module__.startswith("torch.optim") and hasattr(torch.optim, kind.__name__)
    return "torch.optim." * is_public + kind.__name__
