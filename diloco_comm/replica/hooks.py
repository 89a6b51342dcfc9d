"""Count logical optimizer steps by post-step hooks, also through wrappers."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .optimizer_watch import refuse_second_weights

logger = logging.getLogger(__name__)
# Optimizers with hooks of this module; a copy of an optimizer has no hooks, and is not among them.
_attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def hookable(optimizer: Any, *, attach: bool = True) -> list[Optimizer]:
    """Return the real optimizers inside an argument: one optimizer, a wrapper, or a sequence.

    Args:
        attach: The optimizers' steps will be hooked; otherwise ``param_groups`` are enough.

    Raises:
        TypeError: If an item has no post-step hook, or no ``param_groups``, or trains two sets of
            weights.
        RuntimeError: If an optimizer is hooked already.
    """
    given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not given:
        raise TypeError("optimizer is an empty list: at least one is needed")
    found = [_unwrap(item, attach) for item in given]
    for item in found:
        if any(item is other for other in _attached):
            raise RuntimeError(
                f"this {type(item).__name__} is attached to a DiLoCo that is not closed, and its "
                "steps would count twice: close() that one first"
            )
    return found


def _unwrap(optimizer: Any, attach: bool) -> Optimizer:
    """Follow ``.optimizer`` until something really was initialised as a torch Optimizer."""
    inner, seen = optimizer, set()
    while id(inner) not in seen:
        seen.add(id(inner))
        refuse_second_weights(inner)
        # A wrapper may subclass Optimizer without running its __init__ and then cannot be hooked.
        if isinstance(inner, Optimizer) and hasattr(inner, "_optimizer_step_post_hooks"):
            return inner
        inner = getattr(inner, "optimizer", inner)
    if attach:
        raise TypeError(
            f"cannot hook the step of a {type(optimizer).__name__}: give the torch.optim.Optimizer "
            "inside it as optimizer=, or use attach=False and call diloco.step() after each step"
        )
    if not hasattr(inner, "param_groups"):
        raise TypeError(f"optimizer must have param_groups, got a {type(optimizer).__name__}")
    return inner


class StepHooks:
    """Call ``on_step`` once for each logical step of all optimizers together.

    A logical step is complete when every optimizer has stepped. If an optimizer steps again before
    that (a GradScaler has skipped the other one), the logical step before is complete.

    Attributes:
        num_steps: Logical steps so far.
    """

    def __init__(self, optimizers: Sequence[Optimizer], on_step: Callable[[], None]) -> None:
        self._on_step = on_step
        self.num_steps = 0
        self._all = set(range(len(optimizers)))
        self._stepped: set[int] = set()
        self._optimizers = optimizers
        self._handles = [
            optimizer.register_step_post_hook(self._make_hook(index))
            for index, optimizer in enumerate(optimizers)
        ]
        _attached.update(optimizers)

    def _make_hook(self, index: int) -> Callable[..., None]:
        @torch.compiler.disable
        def diloco_step_hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not _is_within_step(optimizer):
                self._stepped_once(index)

        return diloco_step_hook

    def _stepped_once(self, index: int) -> None:
        if index in self._stepped:
            self._complete({index})
            return
        self._stepped.add(index)
        if self._stepped == self._all:
            self._complete(set())

    def _complete(self, stepped: set[int]) -> None:
        """End a logical step; the optimizers in ``stepped`` have begun the next one."""
        self._stepped = stepped
        self.num_steps += 1
        self._on_step()

    def remove(self) -> None:
        """Stop counting; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _attached.difference_update(self._optimizers)
        self._optimizers = ()


# torch puts this function around the ``step`` of each class; the hooks run in its frame.
_AROUND_STEP = Optimizer.profile_hook_step(lambda: None).__code__


def _is_within_step(optimizer: Optimizer) -> bool:
    """Whether the step whose hooks run was called by another ``step`` of the same optimizer.

    A class that overrides ``step`` and calls ``super().step()`` runs the hooks twice. A step that a
    hook takes is another one.
    """
    own = sys._getframe(1)
    frame, num_steps = own.f_back, 0
    while frame is not None and frame.f_code is not own.f_code and num_steps < 2:
        if frame.f_code is _AROUND_STEP and frame.f_locals.get("self") is optimizer:
            num_steps += 1
        frame = frame.f_back
    return num_steps > 1


class SkippedSteps:
    """Count the steps that left the weights unchanged.

    A fused optimizer under a GradScaler runs its hooks on an overflow too, with the weights
    unchanged: the optimizer's own ``step`` counter shows that. A counter on an accelerator is not
    read, because the host would wait for it.

    Attributes:
        count: The steps without a change so far.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._last: dict[Any, int] = {}
        self.count = 0

    def observe(self, *, is_skipped: bool = False) -> None:
        """Look at the counter of a parameter that had a gradient in this logical step.

        Args:
            is_skipped: The optimizer was not called in this logical step.
        """
        if is_skipped:
            self.count += 1
            return
        for optimizer in self._optimizers:
            for param, state in getattr(optimizer, "state", {}).items():
                now = _counter(state)
                if now is None or getattr(param, "grad", None) is None:
                    continue
                self.count += now == self._last.get(param, 0)
                self._last[param] = now
                return


def _counter(state: Any) -> int | None:
    step = state.get("step") if isinstance(state, dict) else None
    if isinstance(step, torch.Tensor) and step.device.type == "cpu":
        return int(step.item())
    return step if isinstance(step, int) else None
