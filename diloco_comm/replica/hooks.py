"""Hooks of optimizers: count the steps, and notice steps that are not counted.

Steps of the attached optimizers are counted. Another optimizer on the same parameters, made anew
after the model was attached, or one that steps within ``backward()``, takes steps that are not.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from ..base.checks import class_of
from ..base.memory import memory_order
from . import sharding

# Elements of a parameter that are compared, to see whether a step has moved it.
_ELEMENTS = 4096
# Optimizers with hooks of this module; a copy of an optimizer has no hooks, and is not among them.
_attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def hookable(optimizer: Any, *, attach: bool = True) -> list[Optimizer]:
    """Return the real optimizers inside an argument: one optimizer, a wrapper, or a sequence.

    Args:
        attach: Whether the optimizers' steps will be hooked. If not, an object with
            ``param_groups`` is accepted too.

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
    """Return the first object, along ``.optimizer``, that was initialised as a torch Optimizer."""
    inner, seen = optimizer, set()
    while id(inner) not in seen:
        seen.add(id(inner))
        refuse_second_weights(inner)
        # A wrapper may be an instance of Optimizer without having run its __init__, and even show
        # the inner optimizer's hooks. Only an object with hooks of its own calls them.
        if isinstance(inner, Optimizer) and "_optimizer_step_post_hooks" in vars(inner):
            return inner
        inner = getattr(inner, "optimizer", inner)
    if attach:
        raise TypeError(
            f"cannot hook the step of {class_of(optimizer)}: give the torch.optim.Optimizer "
            "inside it as optimizer=, or use attach=False and call diloco.step() after each step"
        )
    if not hasattr(inner, "param_groups"):
        raise TypeError(f"optimizer must have param_groups, got {class_of(optimizer)}")
    return inner


def uncompiled(function: Callable[..., None], name: str) -> Callable[..., None]:
    """Return a hook that a compiled step calls as it is, outside of its graph.

    ``torch.compiler.disable`` alone does that too, and costs several microseconds in each call.
    """
    outside = torch.compiler.disable(function)

    def hook(*arguments: Any) -> None:
        if torch.compiler.is_compiling():
            outside(*arguments)
        else:
            function(*arguments)

    hook.__name__ = name
    return hook


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
        self._num_optimizers = len(optimizers)
        self._stepped: set[int] = set()
        self._optimizers = optimizers
        self._handles = [
            optimizer.register_step_post_hook(self._make_hook(index, _may_nest(optimizer)))
            for index, optimizer in enumerate(optimizers)
        ]
        _attached.update(optimizers)

    def _make_hook(self, index: int, may_nest: bool) -> Callable[..., None]:
        def count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if may_nest and _is_within_step(optimizer):
                return
            begins_next = index in self._stepped
            self._stepped.add(index)
            if begins_next or len(self._stepped) == self._num_optimizers:
                self._stepped = {index} if begins_next else set()
                self.num_steps += 1
                self._on_step()

        hook = uncompiled(count, "diloco_step_hook")
        _counters[hook] = weakref.ref(self)
        return hook

    @property
    def is_between(self) -> bool:
        """Whether each optimizer has stepped as often as the others."""
        return not self._stepped

    def remove(self) -> None:
        """Stop counting; idempotent. In a step of an optimizer the hooks stay, and do nothing."""
        # A step under way iterates over its hooks, and would raise if one were removed.
        frame: FrameType | None = sys._getframe()
        while frame is not None and not _steps_any(frame, self._optimizers):
            frame = frame.f_back
        if frame is None:
            for handle in self._handles:
                handle.remove()
        self._handles, self._on_step = [], lambda: None
        _attached.difference_update(self._optimizers)
        self._optimizers = ()


# The counter of each hook that counts steps. The counter refers to the optimizer, and the optimizer
# refers to the hook.
_counters: weakref.WeakKeyDictionary[Callable[..., None], weakref.ref[StepHooks]] = (
    weakref.WeakKeyDictionary()
)
# torch puts this function around the ``step`` of each class; the hooks run in its frame.
_AROUND_STEP = Optimizer.profile_hook_step(lambda: None).__code__


def _may_nest(optimizer: Optimizer) -> bool:
    """Whether a class of the optimizer overrides a ``step``, and so may call another one."""
    above = [base for base in type(optimizer).__mro__ if base is not Optimizer]
    return sum("step" in vars(base) for base in above) > 1


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


def is_in_step(
    frame: FrameType | None,
    optimizers: Sequence[Optimizer],
    owner: object,
    codes: Collection[CodeType],
) -> bool:
    """Whether a call came in the middle of a step, as a signal handler may call.

    The call stack is read, instead of a flag that a failed step would leave set. No step counts as
    under way in a closure that the optimizer calls before its update, nor in a hook that runs
    after the hook of ``StepHooks``.

    Args:
        frame: The frame of the caller, where the search in the call stack begins.
        optimizers: The optimizers whose steps are looked for.
        owner, codes: A method of ``owner`` whose code is one of ``codes`` is a step as well.
    """
    inner: set[CodeType] = set()
    while frame is not None:
        if frame.f_code in codes and frame.f_locals.get("self") is owner:
            return True
        if _steps_any(frame, optimizers) and not (_is_counted(frame) or _is_before(frame, inner)):
            return True
        inner.add(frame.f_code)
        frame = frame.f_back
    return False


def _steps_any(frame: FrameType, optimizers: Sequence[Optimizer]) -> bool:
    """Whether a frame is torch's wrapper around ``step``, run for one of the optimizers."""
    if frame.f_code is not _AROUND_STEP:
        return False
    return any(frame.f_locals.get("self") is one for one in optimizers)


def _is_counted(frame: FrameType) -> bool:
    """Whether a step, given its frame, runs a hook that comes after the hook that counted it."""
    present = frame.f_locals.get("post_hook")
    if present is None:
        return False
    for hook in frame.f_locals["self"]._optimizer_step_post_hooks.values():
        if hook is present:
            return False
        if hook in _counters:
            counter = _counters[hook]()
            return counter is None or counter.is_between
    return False


def _is_before(frame: FrameType, inner: Collection[CodeType]) -> bool:
    """Whether a step, given its frame, calls its closure and has changed no parameter yet.

    Optimizers of torch, all but LBFGS, begin by their only call of the closure; others may not.

    Args:
        inner: The code of each function on the call stack inside the step.
    """
    values = frame.f_locals
    module = getattr(values.get("func"), "__module__", "")
    if "out" in values or not module.startswith("torch.optim.") or module == "torch.optim.lbfgs":
        return False
    closure = values["kwargs"].get("closure", [*values["args"], None, None][1])
    while isinstance(closure, partial):
        closure = closure.func
    if not hasattr(closure, "__code__"):
        closure = getattr(closure, "__func__", type(closure).__call__)
    return getattr(closure, "__code__", None) in inner


def refuse_in_step(call: str, *place: Any) -> None:
    """Raise if a call came in the middle of a step.

    Args:
        call: The name of the function that was called, for the message.
        place: The arguments of ``is_in_step``.

    Raises:
        RuntimeError: If a step is under way.
    """
    if is_in_step(*place):
        raise RuntimeError(
            f"{call}() came in the middle of a step, where model and state do not fit together: "
            "let diloco.after_step(f) call f when the step has ended"
        )


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
        # By the index of an optimizer whose state held no step counter when last looked at: that
        # state, and its length. The optimizer is skipped until either changes.
        self._uncounted: dict[int, tuple[Any, int]] = {}
        self.count = 0

    def observe(self, *, is_skipped: bool = False) -> None:
        """Count a logical step if the first counter of a parameter with a gradient did not move.

        Args:
            is_skipped: The optimizer was not called in this logical step, which is then counted.
        """
        if is_skipped:
            self.count += 1
            return
        for index, optimizer in enumerate(self._optimizers):
            states = getattr(optimizer, "state", {})
            seen, length = self._uncounted.get(index, (None, 0))
            if seen is states and length == len(states):
                continue
            has_counter = False
            for param, state in states.items():
                now = _counter(state)
                has_counter = has_counter or now is not None
                if now is None or getattr(param, "grad", None) is None:
                    continue
                self.count += now == self._last.get(param, 0)
                self._last[param] = now
                return
            if not has_counter:
                self._uncounted[index] = states, len(states)


def _counter(state: Any) -> int | None:
    step = state.get("step") if isinstance(state, dict) else None
    if isinstance(step, torch.Tensor) and step.device.type == "cpu":
        return int(step.item())
    return step if isinstance(step, int) else None


class UncountedSteps:
    """Report steps of other optimizers on the exchanged parameters.

    Optimizers may be nested: a step within a counted step, or around one, is not reported.

    Args:
        optimizers: The optimizers whose steps are counted, by hooks.
        params: The ids of the exchanged parameters, which the caller keeps.
        report: Called with the sentence about the first step that was not counted.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        params: Collection[int],
        report: Callable[[str], None],
    ) -> None:
        # The optimizers are kept, so that no later object can get one of their ids.
        self._optimizers, self._counted = optimizers, frozenset(map(id, optimizers))
        self._params = params
        self._report: Callable[[str], None] | None = report
        self._is_inside = False
        self._num_counted = 0
        # Whether each other optimizer holds exchanged parameters; and, while it steps, the number
        # of counted steps, and some elements of these parameters, when its step began.
        self._holds: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._began: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[Tensor]]] = (
            weakref.WeakKeyDictionary()
        )
        handles = [
            hooks.register_optimizer_step_pre_hook(_weak(self, UncountedSteps._before)),
            hooks.register_optimizer_step_post_hook(_weak(self, UncountedSteps._after)),
        ]
        # These hooks are global to torch, and would outlive an object that nobody closes.
        self._end = weakref.finalize(self, _remove, handles)

    def close(self) -> None:
        """Take the hooks off; idempotent."""
        self._end()

    def _before(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._counted:
            self._is_inside = True
        elif not self._is_inside and self._has_ours(optimizer):
            self._began[optimizer] = self._num_counted, [t.clone() for t in self._some(optimizer)]

    def _after(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._counted:
            self._is_inside = False
            self._num_counted += 1
            return
        count, values = self._began.pop(optimizer, (-1, []))
        if count != self._num_counted or self._report is None:
            return
        # A wrapper may only collect gradients in this step, and move no parameter.
        if all(map(torch.equal, values, self._some(optimizer))):
            return
        report, self._report = self._report, None
        report(
            f"{class_of(optimizer)} that was not given has stepped parameters that are "
            "exchanged, and its steps are not counted: give that optimizer as optimizer=, on all "
            "replicas; one that is made anew, also by a trainer, is another optimizer"
        )

    def _some(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the first elements of at most 16 exchanged parameters of an optimizer."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        ours = [param for param in params if id(param) in self._params]
        return [memory_order(sharding.local(param))[:_ELEMENTS] for param in ours[:16]]

    def _has_ours(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._holds:
            groups = optimizer.param_groups
            params = (param for group in groups for param in group["params"])
            self._holds[optimizer] = any(id(param) in self._params for param in params)
        return self._holds[optimizer]


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _weak(
    watch: UncountedSteps, method: Callable[[UncountedSteps, Optimizer], None]
) -> Callable[..., None]:
    """Return a hook that calls the method for any optimizer, and does not keep ``watch`` alive."""
    reference = weakref.ref(watch)

    def diloco_look_at_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # In a compiled optimizer this hook would break the graph, so that it does nothing there.
        if torch.compiler.is_compiling():
            return
        present = reference()
        if present is not None:
            method(present, optimizer)

    return diloco_look_at_step


def refuse_second_weights(optimizer: Any) -> None:
    """Raise if an optimizer, or a wrapper of one, trains two sets of weights that belong together.

    Raises:
        TypeError: For Lookahead, for schedule-free optimizers, and for optimizers of DeepSpeed and
            Megatron, which step copies: an exchange of one set would be undone by the other.
    """
    name = type(optimizer).__name__
    trainer = {"deepspeed": "DeepSpeed", "megatron": "Megatron"}.get(
        type(optimizer).__module__.partition(".")[0]
    )
    # DeepSpeed's own Adam and Lamb are torch optimizers, and keep no copies.
    if trainer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{name} of {trainer} steps copies of the model's parameters, which would undo each "
            "outer step: use FSDP2 or DDP inside a replica"
        )
    names = " ".join(base.__name__.lower() for base in type(optimizer).__mro__)
    if "lookahead" in names:
        raise TypeError(second_weights(name, "its slow weights"))
    groups = getattr(optimizer, "param_groups", [])
    # The public schedule-free optimizers keep this flag in each group.
    if "schedulefree" in names or any("train_mode" in group for group in groups):
        raise TypeError(second_weights(name, "one for train() and one for eval()"))


def second_weights(optimizer: str, where: str) -> str:
    """Return the sentence about an optimizer with two sets of weights."""
    return (
        f"{optimizer} keeps a second set of weights ({where}), which is not exchanged and would "
        "pull the exchanged parameters back: give an optimizer that has one set of weights; the "
        "outer optimizer averages over steps already"
    )
