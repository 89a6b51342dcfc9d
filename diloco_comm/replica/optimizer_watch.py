"""Notice an inner optimizer whose steps are not counted, or that undoes what is exchanged.

An optimizer may keep the weights a second time: an fp32 copy of bf16 parameters (*masters*), or a
copy in host memory. Such an optimizer steps on its copy and then writes the copy over the
parameters, so that no outer step lasts. Two looks find that:

* A tensor of the optimizer's state that equals its parameter up to the cast to a smaller dtype.
* The values of some elements after an exchange has written them. Let b and a be their values
  before and after the write, and p their values one inner step later. The *undone share* is
  <p - a, b - a> / |b - a|^2: near 0 for an ordinary optimizer, 1 if the write was undone. A share
  between 0.8 and 1.25 of a movement that is mostly this one, after three writes in a row, is a
  warning, in rounds of at least four inner steps. The share is no proof: an inner optimizer that
  reaches its own optimum in one step goes back as well.

A step that is not counted is one of another optimizer on the same parameters: one that was made
anew after the model was attached, or that steps within ``backward()``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from ..base.checks import first_of, warn
from ..base.memory import memory_order, page_locked
from . import sharding
from .fragments import Fragment, unwrap_model

# Elements that are looked at, in that many parameters.
_PARAMETERS, _MOST_PARAMETERS, _ELEMENTS = 4, 16, 4096
# A copy with fewer values may be a constant: zeros, or ones of a normalisation.
_LEAST_VALUES = 17
_LEAST_STEPS = 4
_UNDONE, _LEAST_UNDONE = (0.8, 1.25), 3
_SLOW_WEIGHTS = ("slow", "slow_buffer", "slow_param", "slow_params", "slow_weights")

Report = Callable[[str], None]


class CopyWatch:
    """Find copies of the weights that an optimizer writes over the exchanged parameters.

    Args:
        sync_every: Inner steps of a round.
        report: Called with the sentence about a copy.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        fragments: Sequence[Fragment],
        sync_every: int,
        report: Report,
    ) -> None:
        self._optimizers, self._report = optimizers, report
        self._names = {id(p): n for f in fragments for n, p in zip(f.names, f.params, strict=True)}
        self._sample: list[nn.Parameter] = []
        if sync_every >= _LEAST_STEPS:
            count = -(-_PARAMETERS // max(1, len(fragments)))
            for fragment in fragments:
                held = [param for param in fragment.params if sharding.local(param).numel()]
                by_size = sorted(held, key=lambda param: -param.numel())
                self._sample += by_size[:count]
            self._sample = self._sample[:_MOST_PARAMETERS]
        self._is_looked_at = False
        # The elements before the last write, after it, and one step later.
        self._before, self._after, self._moved = (_Copies(self._sample) for _ in range(3))
        self._is_written = self._is_measured = False
        self._num_undone = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep some elements before and after a block that may write the parameters."""
        if not self._sample:
            yield
            return
        self._before.take()
        yield
        self._after.take()
        self._is_written, self._is_measured = True, False

    def forget(self) -> None:
        """Measure nothing of the last write."""
        self._is_written = self._is_measured = False

    def stepped(self) -> None:
        """Keep the elements one inner step after the last write."""
        if self._is_written:
            self._is_written, self._is_measured = False, True
            self._moved.take()

    def before_send(self) -> None:
        """Look at the optimizer's state once, and at the undone share of each write."""
        if not self._is_looked_at:
            self._is_looked_at = True
            self._look_at_states()
        if not self._is_measured or not self._moved.is_there():
            return
        self._is_measured = False
        share, along = self.shares()
        # A block that wrote nothing has no share.
        if not math.isnan(share):
            is_undone = _UNDONE[0] < share < _UNDONE[1] and along > 0.5
            self._num_undone = self._num_undone + 1 if is_undone else 0
        if self._num_undone == _LEAST_UNDONE:
            warn(
                "one inner step after each of the last three exchanges the parameters were back "
                f"where they had been before ({100 * share:.0f} % of the outer step was undone). "
                "An optimizer that keeps a copy of the weights, such as fp32 masters or an "
                "offloaded copy, does that, and no outer step lasts: use one without such a copy, "
                "with fp32 parameters under autocast if bf16 alone is too coarse. An optimizer "
                "that converges within one step does that too",
                RuntimeWarning,
            )

    def shares(self) -> tuple[float, float]:
        """Return the undone share, and the share of the movement that lies along the write.

        NaN for a write that changed nothing.
        """
        after = self._after.values()
        change, moved = self._before.values() - after, self._moved.values() - after
        along = torch.dot(moved, change)
        undone = along / torch.dot(change, change)
        return float(undone), float(undone * along / torch.dot(moved, moved))

    def _look_at_states(self) -> None:
        for optimizer in self._optimizers:
            for param, state in list(getattr(optimizer, "state", {}).items()):
                if id(param) in self._names and isinstance(state, dict):
                    sentence = self._sentence_about(type(optimizer).__name__, param, state)
                    if sentence:
                        self._report(sentence)
                        return

    def _sentence_about(self, optimizer: str, param: nn.Parameter, state: dict[str, Any]) -> str:
        name = self._names[id(param)]
        for key, value in state.items():
            if key in _SLOW_WEIGHTS and isinstance(value, Tensor) and value.shape == param.shape:
                return _second_weights(optimizer, f"its state {key!r}")
            if _is_wider_copy(value, param):
                return (
                    f"{optimizer} keeps an fp32 copy of parameter {name!r} in its state {key!r}, "
                    "and writes that copy over every outer step: use an optimizer without such a "
                    f"copy, or fp32 parameters under autocast instead of {param.dtype} ones"
                )
        return ""


class _Copies:
    """Copies of some elements of parameters in host memory; ``take`` does not wait for a device."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._host: list[Tensor] = []
        self._event: torch.Event | None = None

    def take(self) -> None:
        """Copy the elements as they are when the device is here."""
        flats = [memory_order(sharding.local(param).detach()) for param in self._params]
        begins = [max(0, flat.numel() - _ELEMENTS) // 2 for flat in flats]
        pieces = [flat[b : b + _ELEMENTS] for flat, b in zip(flats, begins, strict=True)]
        device = pieces[0].device
        if not self._host:
            make = torch.empty if device.type == "cpu" else page_locked
            self._host = [make(piece.numel(), dtype=torch.float32) for piece in pieces]
        for host, piece in zip(self._host, pieces, strict=True):
            host.copy_(piece, non_blocking=True)
        if device.type != "cpu":
            self._event = torch.Event(device)
            self._event.record(torch.accelerator.current_stream(device))

    def is_there(self) -> bool:
        """Whether the device has made the copies."""
        return self._event is None or self._event.query()

    def values(self) -> Tensor:
        """Return the elements, fp32 [n], once they are there."""
        return torch.cat(self._host)


def _is_wider_copy(value: Any, param: nn.Parameter) -> bool:
    if not isinstance(value, Tensor) or value.shape != param.shape:
        return False
    if not value.is_floating_point() or value.element_size() <= param.element_size():
        return False
    part, kept = sharding.local(param).detach(), sharding.local(value).detach()
    if part.shape != kept.shape or part.device != kept.device:
        return False
    own, copied = (each.reshape(-1)[:_ELEMENTS] for each in (part, kept))
    is_copy = torch.equal(own, copied.to(own.dtype))
    return is_copy and own.unique().numel() >= _LEAST_VALUES


def refuse_second_weights(optimizer: Any) -> None:
    """Raise if an optimizer, or a wrapper of one, trains two sets of weights that belong together.

    Raises:
        TypeError: For Lookahead and for schedule-free optimizers: an exchange of one set would be
            undone by the other.
    """
    name = type(optimizer).__name__
    names = " ".join(base.__name__.lower() for base in type(optimizer).__mro__)
    if "lookahead" in names:
        raise TypeError(_second_weights(name, "its slow weights"))
    groups = getattr(optimizer, "param_groups", [])
    # The public schedule-free optimizers keep this flag in each group.
    if "schedulefree" in names or any("train_mode" in group for group in groups):
        raise TypeError(_second_weights(name, "one for train() and one for eval()"))


def _second_weights(optimizer: str, where: str) -> str:
    return (
        f"{optimizer} keeps a second set of weights ({where}), which is not exchanged and would "
        "pull the exchanged parameters back: give an optimizer that has one set of weights; the "
        "outer optimizer averages over steps already"
    )


def unheld_parameters(model: nn.Module, exchanged: Iterable[nn.Parameter]) -> str:
    """Return the sentence about parameters that get gradients and that no optimizer holds, or "".

    Such a parameter is not exchanged: each replica trains its own, by an optimizer that was not
    given, or none trains it. A teacher, or a backbone that is only evaluated, gets no gradient.
    """
    known = set(map(id, exchanged))
    named = unwrap_model(model).named_parameters()
    names = [name for name, param in named if param.grad is not None and id(param) not in known]
    if not names:
        return ""
    return (
        f"parameters have gradients but are in no optimizer that was given: {first_of(names)}; "
        "they are not exchanged: give their optimizer too, in a list, or set requires_grad=False"
    )


class UncountedSteps:
    """Report steps of other optimizers on the exchanged parameters.

    A step within a counted step, or around one, is part of the latter: optimizers may be nested.

    Args:
        optimizers: Those whose steps are counted, by hooks.
        report: Called with the sentence about the first step that was not counted.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], params: Iterable[nn.Parameter], report: Report
    ) -> None:
        self._counted: weakref.WeakSet[Optimizer] = weakref.WeakSet(optimizers)
        self._params = set(map(id, params))
        self._report: Report | None = report
        self._is_inside = False
        self._num_counted = 0
        # Whether an optimizer holds exchanged parameters, and the count when its step began.
        self._holds: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._began: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[Tensor]]] = (
            weakref.WeakKeyDictionary()
        )
        handles = [
            hooks.register_optimizer_step_pre_hook(_weak(self, "_before")),
            hooks.register_optimizer_step_post_hook(_weak(self, "_after")),
        ]
        # Hooks of all optimizers would outlive a watch that nobody closes.
        self._end = weakref.finalize(self, _remove, handles)

    def close(self) -> None:
        """Take the hooks off; idempotent."""
        self._end()

    def _before(self, optimizer: Optimizer) -> None:
        if optimizer in self._counted:
            self._is_inside = True
        elif not self._is_inside and self._has_ours(optimizer):
            self._began[optimizer] = self._num_counted, [t.clone() for t in self._some(optimizer)]

    def _after(self, optimizer: Optimizer) -> None:
        if optimizer in self._counted:
            self._is_inside = False
            self._num_counted += 1
            return
        count, values = self._began.pop(optimizer, (-1, []))
        if count != self._num_counted or self._report is None:
            return
        # A wrapper may collect gradients, and call the counted optimizer in a later step.
        if all(map(torch.equal, values, self._some(optimizer))):
            return
        report, self._report = self._report, None
        report(
            f"a {type(optimizer).__name__} that was not given has stepped parameters that are "
            "exchanged, and its steps are not counted: give that optimizer as optimizer=, on all "
            "replicas; one that is made anew, also by a trainer, is another optimizer"
        )

    def _some(self, optimizer: Optimizer) -> list[Tensor]:
        """Return some elements of exchanged parameters of an optimizer."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        ours = [param for param in params if id(param) in self._params]
        return [memory_order(sharding.local(param).detach())[:_ELEMENTS] for param in ours[:16]]

    def _has_ours(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._holds:
            groups = optimizer.param_groups
            params = (param for group in groups for param in group["params"])
            self._holds[optimizer] = any(id(param) in self._params for param in params)
        return self._holds[optimizer]


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _weak(watch: UncountedSteps, name: str) -> Callable[..., None]:
    """Return a hook of all optimizers that does not keep the watch alive."""
    reference = weakref.ref(watch)

    def diloco_look_at_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # No break in the graph of an optimizer that is compiled, whoever compiles it.
        if torch.compiler.is_compiling():
            return
        present = reference()
        if present is not None:
            getattr(present, name)(optimizer)

    return diloco_look_at_step
