"""Notice a training loop that puts other weights into an attached model.

An attached model is known by its parameters: the objects that were there at construction, and the
values that they had. Two things that a program may do later would go wrong without a word:

* ``load_state_dict`` writes other values. The outer parameters, or the server's weights, still
  follow the values before the load, and pull the loaded values back in the next rounds.
* ``load_state_dict(assign=True)``, ``resize_token_embeddings`` and others put another parameter
  under the same name. The model then computes with a parameter that nothing exchanges.

Hooks of every module notice a load, also one into a part of the model or through a wrapper. Before
the next optimizer step a digest shows whether the values differ from those before the load: a
program may load averaged weights, evaluate them and load its own back. A step without a load before
it costs a few comparisons. Writes that run no hook (``param.data = ...``, numpy) are not seen.

An optimizer may keep the weights a second time: an fp32 copy of bf16 parameters (*masters*), or a
copy in host memory. Such an optimizer steps on its copy and then writes the copy over the
parameters, so that no outer step lasts. Two things reveal such an optimizer:

* A tensor of the optimizer's state that equals its parameter up to the cast to a smaller dtype.
* The values of some elements after an exchange has written them. Let b and a be their values
  before and after the write, and p their values one inner step later. The *undone share* is
  <p - a, b - a> / |b - a|^2: near 0 for an ordinary optimizer, 1 if the write was undone. In rounds
  of at least four inner steps, three writes in a row with a share between 0.8 and 1.25, where the
  inner step moved mainly back along the write, are a warning. The share is no proof: an inner
  optimizer that reaches its own optimum in one step goes back as well.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from ..base.checks import first_of, warn
from ..base.memory import memory_order, page_locked
from ..ops.digests import digest_of
from . import sharding
from .fragments import Fragment, held, refuse_new_parameters, unwrap_model
from .hooks import UncountedSteps, second_weights, uncompiled

Checks = Literal["raise", "warn", "off"]
CHECKS: tuple[Checks, ...] = get_args(Checks)
# The most optimizer parameters outside the exchange that each step checks for being unfrozen.
_LOOKS_A_STEP = 64
# The sample that is copied around a write: about four parameters, divided among the fragments, with
# at least one of each of the first 16 fragments, and at most 4096 elements of each parameter.
_PARAMETERS, _MOST_PARAMETERS, _ELEMENTS = 4, 16, 4096
# A tensor of equal values is taken for a copy if it has this many distinct ones: zeros, or the ones
# of a normalisation, may be equal by chance.
_LEAST_VALUES = 17
_LEAST_STEPS = 4
_UNDONE, _LEAST_UNDONE = (0.8, 1.25), 3
_SLOW_WEIGHTS = ("slow", "slow_buffer", "slow_param", "slow_params", "slow_weights")

Report = Callable[[str], None]


class Trainer(Protocol):
    """An object that trains a replica, such as ``DiLoCo``, and may end with steps unshared."""

    def _warn_of_unshared_steps(self) -> None:
        """Warn if this trainer is open, and has steps that were neither shared nor saved."""


# The trainers of this process that still exist. A forked child trains with none of them.
_trainers: weakref.WeakSet[Trainer] = weakref.WeakSet()
os.register_at_fork(after_in_child=_trainers.clear)


def warn_at_exit(trainer: Trainer) -> None:
    """Let the end of the program warn of steps that this trainer has not shared by then."""
    _trainers.add(trainer)


@atexit.register
def _warn_of_all() -> None:
    # sys.last_value is the exception that ended the program. It is shown alone, without a warning.
    if getattr(sys, "last_value", None) is None:
        for trainer in list(_trainers):
            trainer._warn_of_unshared_steps()


def report(checks: str, sentence: str) -> None:
    """Raise RuntimeError with the sentence, or warn, or say nothing.

    Args:
        checks: One of ``CHECKS``.
    """
    if checks == "raise":
        raise RuntimeError(sentence)
    if checks == "warn":
        warn(sentence, RuntimeWarning)


def server_has_weights() -> str:
    """Return the sentence about weights loaded into a model whose shared weights a server has."""
    return (
        "weights were loaded into the model after it was attached, and the server's weights, which "
        "it began with, would pull them back: load weights before it is attached to a new server"
    )


def outer_has_weights(inner_step: int) -> str:
    """Return the sentence about weights loaded into a model that has taken inner steps."""
    return (
        f"weights were loaded into the model after {inner_step} inner steps, and the outer "
        "parameters, which are of the weights before, would pull them back: load weights before "
        "DiLoCo is constructed; to go on from a checkpoint, give its outer state to "
        "diloco.load_state_dict() too, on all replicas"
    )


class ModelWatch:
    """The hooks of one attached model.

    Args:
        model, optimizers: As the program uses them.
        fragments: The parameters that are exchanged.
        on_loaded: Called before an optimizer step, a send or a flush if other values were loaded
            since the last step; returns a sentence about why the load goes wrong, or "".
        checks: One of ``CHECKS``; "off" sets no hook of a module.
        sync_every: Inner steps of a round.
        is_hooked: Steps are counted by hooks of the optimizers; otherwise the program counts.
        refuses_new: Refuse a step on parameters that were added or unfrozen, whatever ``checks``
            is.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        fragments: Sequence[Fragment],
        on_loaded: Callable[[], str],
        checks: str,
        *,
        sync_every: int,
        is_hooked: bool,
        refuses_new: bool = False,
    ) -> None:
        self._model, self._fragments, self.checks = model, fragments, checks
        self._on_loaded, self._optimizers, self._is_left_out = on_loaded, optimizers, False
        self._named = [
            pair for part in fragments for pair in zip(part.names, part.params, strict=True)
        ]
        self._known = {id(param) for _, param in self._named}
        # The digest of the values before the first load since the last step; None without a load.
        self._before: int | None = None
        self._is_expected = self._is_paused = False
        self._overwritten: int | None = None
        self._is_lost: Callable[[], bool] | None = None
        # Reads the weights that the program loads into the model after it has loaded a state here.
        # Called until the next step.
        self._read_late: Callable[[], object] | None = None
        # The length of each optimizer group, and the ids of its first and last parameter: a change
        # shows that the parameters outside the exchange (``_others``) must be listed anew. The next
        # step looks at these from ``_next_other`` on.
        self._held: list[tuple[int, ...]] | None = None
        self._others: list[nn.Parameter] = []
        self._refuses_new, self._next_other = refuses_new, 0
        before_step = uncompiled(self._before_step, "diloco_before_step")
        able = [one for one in optimizers if hasattr(one, "register_step_pre_hook")]
        self._handles = [one.register_step_pre_hook(before_step) for one in able]
        self._sees_steps = bool(able)
        # Where each exchanged parameter is: a module's dict of parameters or of submodules, a name
        # in it, and the parameter, or the submodule on the way to it, that was there at first.
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        # By name of an exchanged parameter that was frozen at a write: the step when it was first
        # seen so, and the digest of its values after the last write.
        self._frozen: dict[str, tuple[int, int]] = {}
        self._sync_every, self._num_steps = sync_every, 0
        self._is_first_send = checks != "off"
        self._copies: CopyWatch | None = None
        self._uncounted: UncountedSteps | None = None
        if checks == "off":
            return
        self._copies = CopyWatch(optimizers, fragments, sync_every, self._report)
        if is_hooked:
            self._uncounted = UncountedSteps(optimizers, self._known, self._report)
        hook = LoadHook(self)
        for module in model.modules():
            self._handles.append(module.register_load_state_dict_pre_hook(hook))
        self._fsdp_modules = sharding.fsdp_modules(model)
        sharding.reshard(self._fsdp_modules)
        self._add_places(unwrap_model(model), set())

    def _add_places(self, module: nn.Module, seen: set[int]) -> bool:
        """Note the places of exchanged parameters in the module; return whether it has any."""
        places: list[tuple[dict[str, Any], str, Any]] = []
        for name, param in module._parameters.items():
            if id(param) in self._known:
                places.append((module._parameters, name, param))
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                if self._add_places(child, seen):
                    places.append((module._modules, name, child))
        self._places += places
        return bool(places)

    def close(self) -> None:
        """Take the hooks off; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._uncounted is not None:
            self._uncounted.close()

    def _report(self, sentence: str) -> None:
        report(self.checks, sentence)

    # ----------------------------------------------------------------------------- each step

    def before_send(self) -> None:
        """Raise, or warn, if something about the model or an optimizer went wrong since attaching.

        Raises:
            RuntimeError: With ``checks="raise"``.
            ValueError: If the optimizers train parameters that were not there, or frozen.
        """
        if self._read_late is not None:
            self.read_late(is_last=True)
        if self.checks != "off":
            if self._before is not None:
                self._look_at_load(self._before)
            self.refuse_replaced()
            self._refuse_left_out()
            if self._frozen:
                self._refuse_frozen()
            # The next two checks need gradients and optimizer state, and so at least one step.
            if self._is_first_send and self._num_steps:
                self._is_first_send = False
                if sentence := unheld_parameters(self._model, self._known):
                    warn(sentence, RuntimeWarning)
            if self._copies is not None and self._num_steps:
                self._copies.before_send()
        if self._refuses_new:
            refuse_new_parameters(self._model, self._optimizers, self._known)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Enter a block in which an exchange may write the parameters."""
        if self._copies is None:
            yield
            return
        with self._copies.writing():
            yield
        for name, param in self._named:
            if not param.requires_grad:
                first, _ = self._frozen.get(name, (self._num_steps, 0))
                self._frozen[name] = first, digest_of([held(param)])

    def forget_writes(self) -> None:
        """Do not check whether the last write was undone, nor whether frozen parameters moved."""
        self._frozen = {}
        if self._copies is not None:
            self._copies.forget()

    def stepped(self) -> None:
        """Count an inner step, and copy what the first step after a write has made of it."""
        self._num_steps += 1
        self._is_expected = False  # The pre-step hook does that too, if the optimizer has hooks.
        if self._copies is not None and self._copies.is_written:
            self._copies.stepped()

    # ------------------------------------------------------------------------------------- loads

    def expect_load(
        self,
        overwritten: int | None,
        is_lost: Callable[[], bool] | None = None,
        read_late: Callable[[], object] | None = None,
    ) -> None:
        """Report no load before the next step: it is a part of going on from a saved state.

        Args:
            overwritten: Digest of weights of another replica that have taken the place of this
                replica's own; None if that did not happen.
            is_lost: Asked before the next step whether the model has other weights than the saved
                state; None if the state cannot tell.
            read_late: Reads the model's weights for the state. Called before the next step, and by
                the method ``read_late`` until then, because the program may load the model after
                the state. None if the state needs nothing of the model.
        """
        self._before, self._is_expected, self._overwritten = None, True, overwritten
        self._is_lost, self._read_late = is_lost, read_late if self._sees_steps else None
        self.forget_writes()

    def read_late(self, *, is_last: bool = False) -> None:
        """Let a loaded state read the model's weights; with ``is_last``, for the last time."""
        if self._read_late is not None:
            self._read_late()
            if is_last:
                self._read_late = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Enter a block whose loads are not noted: it leaves the parameters as they were before."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def loading(self) -> None:
        """Note that values are about to be loaded into a module of the model."""
        if self._before is None and not self._is_expected and not self._is_paused:
            self._before = self._digest()

    def _before_step(self, *_: Any) -> None:
        """Check what the program has loaded, added or unfrozen since the last optimizer step."""
        if self._read_late is not None:
            self.read_late(is_last=True)
        if self._refuses_new:
            self._look_at_groups()
        if self.checks == "off":
            return
        if self._is_expected:
            self._is_expected = False
            self._look_at_resume()
        if self._before is not None:
            self._look_at_load(self._before)

    def _look_at_groups(self) -> None:
        """Raise before a step on parameters that were added to an optimizer or unfrozen.

        A step looks at a few of the parameters outside the exchange, so that it costs the same for
        any number of frozen ones. The next send looks at all.
        """
        groups = [group["params"] for one in self._optimizers for group in one.param_groups]
        held = [(len(params), *map(id, params[:1]), *map(id, params[-1:])) for params in groups]
        if held != self._held:
            self._others = [p for params in groups for p in params if id(p) not in self._known]
            self._held, self._next_other = held, 0
        begin, end = self._next_other, self._next_other + _LOOKS_A_STEP
        self._next_other = end if end < len(self._others) else 0
        if self._others and any(param.requires_grad for param in self._others[begin:end]):
            refuse_new_parameters(self._model, self._optimizers, self._known)

    def _look_at_load(self, before: int) -> None:
        """Report a load that has changed the values, if ``on_loaded`` says that it goes wrong.

        Args:
            before: The digest of the values before the load.
        """
        self._before = None
        self.refuse_replaced()
        if self._digest() != before and (sentence := self._on_loaded()):
            self._report(sentence)

    def _look_at_resume(self) -> None:
        overwritten, self._overwritten = self._overwritten, None
        if overwritten is not None and overwritten == self._digest():
            self._report(
                "this replica goes on from a saved state with the weights of another replica, "
                "which the construction of DiLoCo has copied over those that were loaded: load "
                "the model's state after DiLoCo is constructed"
            )
        is_lost, self._is_lost = self._is_lost, None
        if self.checks != "off" and is_lost is not None and is_lost():
            warn(
                "DiLoCo goes on from a state that was saved after an exchange, but the model does "
                "not have the weights of that save: load the model's state too, on all replicas, "
                "or the next exchange moves the shared model to these weights",
                RuntimeWarning,
            )

    def _digest(self) -> int:
        return digest_of([tensor for part in self._fragments for tensor in part.tensors()])

    def warn_of_unshared_steps(self, name: str, inner_step: int, remedy: str = "") -> None:
        """Warn that the program ends without a flush; not while an exception is handled.

        Args:
            name: The replica or the worker, for the message.
            inner_step: The replica's or the worker's last inner step.
            remedy: The advice at the end of the message; by default, to flush.
        """
        if self.checks != "off" and sys.exc_info()[0] is None:
            warn(
                f"what {name} learned since its last exchange is lost, up to inner step "
                f"{inner_step}: {remedy or 'call flush() before close()'}",
                RuntimeWarning,
            )

    # ---------------------------------------------------------------------- replaced parameters

    def refuse_replaced(self) -> None:
        """Raise, or warn, if the model has another parameter under the name of an exchanged one.

        Raises:
            RuntimeError: With ``checks="raise"``.
        """
        if not self._places:
            return
        if self._fsdp_modules:
            sharding.reshard(self._fsdp_modules)
        if all(table.get(name) is known for table, name, known in self._places):
            return
        # Under a parametrization, or an adapter around a module, a parameter may be elsewhere in
        # the model, and is not replaced.
        present = {id(param) for param in unwrap_model(self._model).parameters()}
        names = [name for name, param in self._named if id(param) not in present]
        if names:
            self._places = []
            self._report(
                f"the model has another parameter under the name {first_of(names)} than when it "
                "was attached (load_state_dict(assign=True) and resize_token_embeddings do that), "
                "and the old one is exchanged: change the model before it is attached, or attach "
                "it anew, with a new optimizer, on all replicas"
            )

    def _refuse_left_out(self) -> None:
        """Raise or warn, once, if an exchanged parameter is in no optimizer any more."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        held = {id(param) for group in groups for param in group["params"]}
        names = [name for name, param in self._named if id(param) not in held]
        if names and not self._is_left_out:
            self._is_left_out = True
            self._report(
                f"{first_of(names)} is in no group of the optimizer any more: the outer momentum "
                "would go on moving what is not trained; construct DiLoCo anew, on all replicas"
            )

    def _refuse_frozen(self) -> None:
        """Report parameters that were frozen for a round, and that no inner step has moved.

        A parameter that is frozen for a part of each step, as in loops that train one network
        against another, is not reported.
        """
        params = dict(self._named)
        for name, (_, digest) in list(self._frozen.items()):
            shard = held(params[name])
            if params[name].requires_grad or not shard.numel() or digest_of([shard]) != digest:
                del self._frozen[name]
        names = [
            name
            for name, (first, _) in self._frozen.items()
            if self._num_steps - first >= self._sync_every
        ]
        if names:
            self._frozen = {}
            self._report(
                f"{first_of(names)} had requires_grad=False for a whole round: the outer momentum "
                "would go on moving what is frozen; freeze before the model is attached, or attach "
                "it anew, on all replicas"
            )


class LoadHook:
    """The hook of each module, run before a load. In a copied or pickled model it does nothing."""

    def __init__(self, watch: ModelWatch | None = None) -> None:
        self._watch = None if watch is None else weakref.ref(watch)

    def __call__(self, *_: Any) -> None:
        watch = None if self._watch is None else self._watch()
        if watch is not None:
            watch.loading()

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadHook, ()


class CopyWatch:
    """Find copies of the weights that an optimizer writes over the exchanged parameters.

    Args:
        sync_every: Inner steps of a round.
        report: Called with the sentence about a copy.

    Attributes:
        is_written: Whether a block of ``writing`` has ended, and no inner step came after it.
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
                filled = [param for param in fragment.params if held(param).numel()]
                by_size = sorted(filled, key=lambda param: -param.numel())
                self._sample += by_size[:count]
            self._sample = self._sample[:_MOST_PARAMETERS]
        self._is_looked_at = False
        # The elements before the last write, after it, and one step later.
        self._before, self._after, self._moved = (_Copies(self._sample) for _ in range(3))
        self.is_written = self._is_measured = False
        self._num_undone = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Enter a block that may write the parameters; copy some elements before and after it."""
        if not self._sample:
            yield
            return
        self._before.take()
        yield
        self._after.take()
        self.is_written, self._is_measured = True, False

    def forget(self) -> None:
        """Do not check whether the last write was undone."""
        self.is_written = self._is_measured = False

    def stepped(self) -> None:
        """Copy the elements as they are one inner step after the last write."""
        self.is_written, self._is_measured = False, True
        self._moved.take()

    def before_send(self) -> None:
        """Report a copy in an optimizer's state, looked for once; warn if writes were undone."""
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
        """Return the undone share of the last write, and how far the step went along that write.

        The latter is the squared cosine of the angle between step and write. Both are NaN for a
        write that changed nothing.
        """
        before, after, moved = (
            torch.cat(copies.host) for copies in (self._before, self._after, self._moved)
        )
        change, moved = before - after, moved - after
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
                return second_weights(optimizer, f"its state {key!r}")
            if _is_wider_copy(value, param):
                return (
                    f"{optimizer} keeps an fp32 copy of parameter {name!r} in its state {key!r}, "
                    "and writes that copy over every outer step: use an optimizer without such a "
                    f"copy, or fp32 parameters under autocast instead of {param.dtype} ones"
                )
        return ""


class _Copies:
    """Copies of some elements of parameters in host memory; ``take`` does not wait for a device.

    Attributes:
        host: The elements of each parameter, fp32; complete once ``is_there`` returns True.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self.host: list[Tensor] = []
        self._event: torch.Event | None = None

    def take(self) -> None:
        """Begin to copy the elements, in the order of the device's current stream."""
        flats = [memory_order(held(param)) for param in self._params]
        begins = [max(0, flat.numel() - _ELEMENTS) // 2 for flat in flats]
        pieces = [flat[b : b + _ELEMENTS] for flat, b in zip(flats, begins, strict=True)]
        device = pieces[0].device
        if not self.host:
            make = torch.empty if device.type == "cpu" else page_locked
            self.host = [make(piece.numel(), dtype=torch.float32) for piece in pieces]
        for host, piece in zip(self.host, pieces, strict=True):
            host.copy_(piece, non_blocking=True)
        if device.type != "cpu":
            self._event = torch.Event(device)
            self._event.record(torch.accelerator.current_stream(device))

    def is_there(self) -> bool:
        """Whether the device has finished the copies of the last ``take``."""
        return self._event is None or self._event.query()


def _is_wider_copy(value: Any, param: nn.Parameter) -> bool:
    if not isinstance(value, Tensor) or value.shape != param.shape:
        return False
    if not value.is_floating_point() or value.element_size() <= param.element_size():
        return False
    part, kept = held(param), held(value)
    if part.shape != kept.shape or part.device != kept.device:
        return False
    own, copied = (each.reshape(-1)[:_ELEMENTS] for each in (part, kept))
    is_copy = torch.equal(own, copied.to(own.dtype))
    return is_copy and own.unique().numel() >= _LEAST_VALUES


def unheld_parameters(model: nn.Module, known: Collection[int]) -> str:
    """Return the sentence about parameters that get gradients and that no optimizer holds, or "".

    Such a parameter is not exchanged: each replica trains its own, by an optimizer that was not
    given, or none trains it. A teacher, or a backbone that is only evaluated, gets no gradient, and
    is not in the sentence.

    Args:
        known: The ids of the exchanged parameters.
    """
    named = unwrap_model(model).named_parameters()
    names = [name for name, param in named if param.grad is not None and id(param) not in known]
    if not names:
        return ""
    return (
        f"parameters have gradients but are in no optimizer that was given: {first_of(names)}; "
        "they are not exchanged: give their optimizer too, in a list, or set requires_grad=False"
    )
