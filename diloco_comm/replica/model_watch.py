"""Notice a training loop that puts other weights into an attached model.

An attached model is known by its parameters: the objects that were there at construction, and the
values that they had. Two things that a program may do later would go wrong without a word:

* ``load_state_dict`` writes other values. Outer parameters, or the server's, are of the values
  before, and pull the loaded ones back in the next rounds.
* ``load_state_dict(assign=True)``, ``resize_token_embeddings`` and others put another parameter
  under the same name. The model then computes with a parameter that nothing exchanges.

Hooks of every module tell of a load, also of one into a part of the model or through a wrapper.
A load is looked at before the next optimizer step, by a digest of the values: a program may load
averaged weights, evaluate them and load its own back. A step without a load before it costs one
comparison. Writes that run no hook (``param.data = ...``, numpy) are not seen. See
``optimizer_watch`` too: a watch looks at the optimizers as that module says.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..base.checks import first_of, warn
from ..ops.digests import digest_of
from . import sharding
from .fragments import Fragment, unwrap_model
from .optimizer_watch import CopyWatch, UncountedSteps, unheld_parameters

CHECKS = ("raise", "warn", "off")


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


class ModelWatch:
    """The hooks of one attached model.

    Args:
        model, optimizers: As the program uses them.
        fragments: The parameters that are exchanged.
        on_loaded: Called before an optimizer step, a send or a flush if values were loaded since
            the last step; returns a sentence about a load that goes wrong, or "".
        checks: One of ``CHECKS``; "off" sets no hook.
        sync_every: Inner steps of a round.
        is_hooked: Steps are counted by hooks of the optimizers; otherwise the program counts.
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
    ) -> None:
        self._model, self._fragments, self.checks = model, fragments, checks
        self._on_loaded, self._optimizers, self._is_left_out = on_loaded, optimizers, False
        self._named = [
            pair for part in fragments for pair in zip(part.names, part.params, strict=True)
        ]
        # The digest of the values before the first load since the last step; None without a load.
        self._before: int | None = None
        self._is_expected = self._is_paused = False
        self._overwritten: int | None = None
        self._is_lost: Callable[[], bool] | None = None
        self._handles: list[Any] = []
        # The tables of modules with what each has under a name: parameters, and modules with them.
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        # By name: the step when a frozen parameter was seen, and the digest after the last write.
        self._frozen: dict[str, tuple[int, int]] = {}
        self._sync_every, self._num_steps = sync_every, 0
        self._is_first_send = checks != "off"
        self._copies: CopyWatch | None = None
        self._uncounted: UncountedSteps | None = None
        if checks == "off":
            return
        params = [param for fragment in fragments for param in fragment.params]
        self._copies = CopyWatch(optimizers, fragments, sync_every, self._report)
        if is_hooked:
            self._uncounted = UncountedSteps(optimizers, params, self._report)
        hook = LoadHook(self)
        for module in model.modules():
            self._handles.append(module.register_load_state_dict_pre_hook(hook))
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_pre_hook"):
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._fsdp_modules = sharding.fsdp_modules(model)
        sharding.reshard(self._fsdp_modules)
        self._add_places(unwrap_model(model), {id(param) for _, param in self._named}, set())

    def _add_places(self, module: nn.Module, known: set[int], seen: set[int]) -> bool:
        """Return whether the module, or a module in it, has a known parameter."""
        places: list[tuple[dict[str, Any], str, Any]] = []
        for name, param in module._parameters.items():
            if id(param) in known:
                places.append((module._parameters, name, param))
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                if self._add_places(child, known, seen):
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
        """
        if self.checks == "off":
            return
        self._look_at_load()
        self.refuse_replaced()
        self._refuse_left_out()
        self._refuse_frozen()
        if self._is_first_send:
            self._is_first_send = False
            sentence = unheld_parameters(self._model, [param for _, param in self._named])
            if sentence:
                warn(sentence, RuntimeWarning)
        if self._copies is not None:
            self._copies.before_send()

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
                self._frozen[name] = first, digest_of([sharding.local(param).detach()])

    def forget_writes(self) -> None:
        """Measure nothing of the last write."""
        self._frozen = {}
        if self._copies is not None:
            self._copies.forget()

    def stepped(self) -> None:
        """Look at the parameters after an inner step, before anything is exchanged."""
        self._num_steps += 1
        self._is_expected = False  # Without hooks of the optimizer nothing else ends a resume.
        if self._copies is not None:
            self._copies.stepped()

    # ------------------------------------------------------------------------------------- loads

    def expect_load(
        self, overwritten: int | None, is_lost: Callable[[], bool] | None = None
    ) -> None:
        """Take what is loaded before the next step for a part of a resume.

        Args:
            overwritten: Digest of weights of another replica that have taken the place of this
                replica's own; None if that did not happen.
            is_lost: Asked before the next step whether the model has other weights than the saved
                state; None if the state cannot tell.
        """
        self._before, self._is_expected, self._overwritten = None, True, overwritten
        self._is_lost = is_lost
        self.forget_writes()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Enter a block after which the parameters are what they were before."""
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
        if self._is_expected:
            self._is_expected = False
            self._look_at_resume()
        self._look_at_load()

    def _look_at_load(self) -> None:
        if self._before is None:
            return
        before, self._before = self._before, None
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

    def warn_of_unshared_steps(self, name: str, inner_step: int) -> None:
        """Warn of an end in good order without a flush; not while an exception is handled.

        Args:
            name: The replica or the worker, for the message.
        """
        if self.checks != "off" and sys.exc_info()[0] is None:
            warn(
                f"what {name} learned since its last exchange is lost, up to inner step "
                f"{inner_step}: call flush() before close(), on all replicas of a DiLoCo",
                RuntimeWarning,
            )

    # ---------------------------------------------------------------------- replaced parameters

    def refuse_replaced(self) -> None:
        """Raise, or warn, if the model has another parameter under a name.

        Raises:
            RuntimeError: With ``checks="raise"``.
        """
        if not self._places:
            return
        sharding.reshard(self._fsdp_modules)
        if all(table.get(name) is known for table, name, known in self._places):
            return
        # A parametrization, or an adapter around a module, may keep the parameter elsewhere.
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
        """Report parameters that are exchanged and that no optimizer holds any more."""
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

        Loops that train one network against another freeze parameters for a part of each step.
        """
        params = dict(self._named) if self._frozen else {}
        for name, (_, digest) in list(self._frozen.items()):
            shard = sharding.local(params[name]).detach()
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
    """The hook of the modules. In a copy, or in a model that was pickled, the hook does nothing."""

    def __init__(self, watch: ModelWatch | None = None) -> None:
        self._watch = None if watch is None else weakref.ref(watch)

    def __call__(self, *_: Any) -> None:
        watch = None if self._watch is None else self._watch()
        if watch is not None:
            watch.loading()

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadHook, ()
