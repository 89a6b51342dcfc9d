"""Attach DiLoCo to a model that a trainer has made, or has loaded from a checkpoint.

If a checkpoint's model has the local parameters, DiLoCo's state in the checkpoint is
``DiLoCo.state_dict()``. If the model has the outer parameters, the state is
``{"diloco": ..., "local": ...}``, where "local" has this worker's local parameters by name.
"""

from __future__ import annotations

import inspect
import os
import socket
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..base.checks import logger_of, warn
from ..ops.digests import digest_of
from ..options import check_names, choices_of, with_defaults
from ..replica.sharding import is_sharded, local
from ..rounds import handshake
from ..rounds.handshake import gather_json
from ..rounds.nonfinite import check_on_reset
from ..rounds.part import SyncedFragment
from ..training.arguments import check_arguments, defaults_of, seconds_of, settings_of, weight_of
from ..training.diloco import DiLoCo

_logger = logger_of(__name__)
Make = Callable[..., DiLoCo]
# The module of the presets, whose functions pass their further arguments on to ``DiLoCo``.
_PRESETS = "diloco_comm.training.presets"


def check(owner: Callable[..., Any], make: Make, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Check the arguments of a callback when it is made: the trainer begins much later.

    Names are checked for ``DiLoCo`` and for presets; all values are checked for ``DiLoCo`` alone.

    Args:
        owner: The class or function that the user calls.
        make: See ``attach``.

    Returns:
        The arguments, with those added that a ``functools.partial`` in ``make`` holds.

    Raises:
        TypeError: For an argument that ``make`` does not take, or if a required one is missing.
        TypeError, ValueError: For an invalid value.
    """
    if not callable(make):
        raise TypeError(f"make must be DiLoCo or a preset such as eager_diloco, got {make!r}")
    base: Any = make
    bound = dict(arguments)
    while isinstance(base, partial):
        base, bound = base.func, with_defaults(base.keywords, bound)
    is_ours = _is_ours(base)
    wanted = _named(make)
    if wanted.pop("**", None) is not None:
        if not is_ours:
            return bound  # A user's own function with **kwargs may take any argument.
        wanted = {**_named(DiLoCo), **wanted}
    own = inspect.signature(owner).parameters.values()
    names = [one.name for one in own if one.kind is not one.VAR_KEYWORD]
    check_names(owner.__name__, arguments, [*names, *wanted])
    for name, default in wanted.items():
        # Nothing is demanded for DiLoCo itself: a configuration file may have the argument.
        if default is inspect.Parameter.empty and name not in bound and base is not DiLoCo:
            asking = getattr(base, "__name__", type(base).__name__)
            raise TypeError(f"{owner.__name__} needs {name}=, which {asking} asks for")
    if is_ours:
        chosen = choices_of(defaults_of(DiLoCo) | bound, owner.__name__)
        check_arguments(nn.Module(), chosen)
        weight_of(chosen["weight"])
        seconds_of(chosen["timeout"])
    if base is DiLoCo:
        check_on_reset(chosen["on_reset"], settings_of(choices_of(bound)))
    return bound


def with_norms(make: Make, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with ``norms=True`` added, if ``make`` takes it and it is not given."""
    named = _named(make)
    takes = "norms" in named or ("**" in named and _is_ours(make))
    return {"norms": True, **arguments} if takes else dict(arguments)


def choices_for(make: Make, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``make`` as ``choices_of`` does."""
    return choices_of(arguments, is_ours=_is_ours(make))


def without_arguments(make: Make) -> Make:
    """Return the function inside ``functools.partial``, for DiLoCo and presets.

    ``check`` has added the arguments of the ``partial`` to its result.
    """
    if not _is_ours(make):
        return make
    while isinstance(make, partial):
        make = make.func
    return make


def _is_ours(make: Any) -> bool:
    """Whether ``make`` is DiLoCo or a preset, also through ``functools.partial``."""
    while isinstance(make, partial):
        make = make.func
    return make is DiLoCo or getattr(make, "__module__", "") == _PRESETS


def _named(make: Make) -> dict[str, Any]:
    """Return the arguments beside model and optimizer with their defaults; "**" for any others.

    Raises:
        TypeError: If ``make`` cannot be called with a model and an optimizer.
    """
    signature = inspect.signature(make)
    try:
        taken = signature.bind_partial("model", "optimizer").arguments
    except TypeError as error:
        raise TypeError(
            f"make is called as make(model, optimizer, ...), and {make!r} cannot be: {error}"
        ) from error
    return {
        "**" if one.kind is one.VAR_KEYWORD else one.name: one.default
        for one in signature.parameters.values()
        if one.name not in taken and one.kind is not one.VAR_POSITIONAL
    }


def attach(
    make: Make,
    model: nn.Module,
    optimizer: Any,
    arguments: Mapping[str, Any],
    saved: Mapping[str, Any] | None = None,
) -> DiLoCo:
    """Make a DiLoCo for a trainer's model and optimizer.

    Args:
        make: ``DiLoCo`` or a preset; called as ``make(model, optimizer, **arguments)``.
        saved: The state to continue from, in one of the two forms that this module's docstring has.
            The local parameters are those in the state, or those that the trainer has loaded. They
            differ between replicas, and stay so. A replica that joins a group which trains is given
            the state of the group instead.

    Raises:
        ValueError: If the saved local parameters do not fit the model.
    """
    make = without_arguments(make)
    if saved is None:
        return make(model, optimizer, **arguments)
    # Attaching copies the first replica's weights to all replicas; the code below undoes that.
    loaded = [(tensor, tensor.clone()) for tensor in _local_tensors(model)]
    diloco = make(model, optimizer, **arguments)
    if has_joined(diloco):
        _logger.info("the parameters and the outer state of the group replace the checkpoint's")
        return diloco
    try:
        with torch.no_grad():
            for tensor, value in loaded:
                tensor.copy_(value)
        if "local" in saved:
            write_parameters(diloco, saved["local"])
        diloco.load_state_dict(saved["diloco"] if "local" in saved else saved)
    except BaseException:
        diloco.close()
        raise
    return diloco


def has_joined(diloco: DiLoCo) -> bool:
    """Whether this replica has the state of a group that trains already, or of its checkpoint."""
    return diloco._elastic is not None and diloco._elastic.has_group_state


def with_total_steps(arguments: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """Return arguments whose ``Elastic`` ends at the trainer's last step, unless it has an end.

    Args:
        num_steps: The trainer's steps; below 1 if the trainer does not know.
    """
    elastic = choices_of(arguments, is_ours=False)["membership"]
    if elastic is None or elastic.total_steps is not None or num_steps < 1:
        return dict(arguments)
    return {**arguments, "peers": replace(elastic, total_steps=num_steps)}


def refuse_same_folder(diloco: DiLoCo, folder: str | None, remedy: str) -> None:
    """Make sure that no two replicas of a fixed group save into one folder; a collective call.

    Args:
        folder: Where this replica's trainer saves checkpoints; None if it saves none.
        remedy: How to give the trainer another folder.

    Raises:
        ValueError: On all replicas, if two replicas have the same folder of one machine.
    """
    place = None if folder is None else [socket.gethostname(), os.path.realpath(folder)]
    places = gather_json(diloco.exchange, place)
    for one in places:
        same = [diloco.members[rank] for rank, other in enumerate(places) if other == one]
        if one is not None and len(same) > 1:
            raise ValueError(
                f"replicas {same} save their checkpoints into one folder, here {folder!r}, where "
                f"each would overwrite the other's: {remedy}"
            )


def finish(diloco: DiLoCo) -> None:
    """Share what was trained since the last exchange and close, when the trainer has ended.

    With ``Elastic`` the other replicas may train on. Then this replica leaves without sharing,
    because a flush needs all replicas.
    """
    trains_on = diloco.view >= 0 and not diloco.is_done
    try:
        if trains_on:
            _logger.warning(
                "the trainer has ended at inner step %d, before the others: what this replica "
                "learned since its last exchange is lost",
                diloco.inner_step,
            )
        else:
            diloco.flush(final=True)
    finally:
        diloco._close(is_finished=not trains_on)


def _local_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors that attaching may write: trained parameters and buffers, detached."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [local(tensor) for tensor in [*trained, *model.buffers()]]


def state_with_local(diloco: DiLoCo) -> dict[str, Any]:
    """Return the state for a checkpoint whose model has the outer parameters.

    The model must hold the local parameters at the call.
    """
    return {"diloco": diloco.state_dict(), "local": parameters_of(diloco)}


def step_of(saved: Any) -> int | None:
    """Return the inner step of a saved state; None for something else."""
    state = saved.get("diloco", saved) if isinstance(saved, Mapping) else {}
    return state.get("inner_step") if isinstance(state, Mapping) else None


def savable(state: Any) -> Any:
    """Return a state that ``torch.save`` takes.

    ``torch.save`` refuses a DTensor whose local part starts inside its storage; such DTensors are
    copied.
    """
    if isinstance(state, Mapping):
        return {key: savable(value) for key, value in state.items()}
    if isinstance(state, Tensor) and is_sharded(state) and local(state).storage_offset():
        return state.clone()
    return state


def parameters_of(diloco: DiLoCo) -> dict[str, Tensor]:
    """Return views of this worker's parts of the trained parameters, by name."""
    fragments = [part.fragment for part in diloco.parts if isinstance(part, SyncedFragment)]
    return {
        name: tensor
        for fragment in fragments
        for name, tensor in zip(fragment.names, fragment.local(), strict=True)
    }


def write_parameters(diloco: DiLoCo, values: Mapping[str, Tensor]) -> None:
    """Set the trained parameters to values that ``parameters_of`` has returned.

    Raises:
        ValueError: If names or shapes differ; no parameter is changed then.
    """
    tensors = parameters_of(diloco)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    given = {name: tuple(value.shape) for name, value in values.items()}
    if given != shapes:
        wrong = sorted(n for n in {*given, *shapes} if given.get(n) != shapes.get(n))[0]
        raise ValueError(
            f"the saved local parameters are not those of this worker: {wrong!r} has shape "
            f"{given.get(wrong)} in the checkpoint, {shapes.get(wrong)} here"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])


# ----------------------------------------------------------------------------------------- counting


def move_schedule(schedule: Any, num_steps: int) -> None:
    """Move a learning-rate schedule on by the steps that the group took before this replica joined.

    Args:
        schedule: A scheduler, or the wrapper of accelerate around a scheduler; None does nothing.
    """
    # A scheduler of the user's may keep another one as ``scheduler``.
    is_own = isinstance(schedule, LRScheduler)
    inner = schedule if is_own else getattr(schedule, "scheduler", schedule)
    if num_steps < 1 or inner is None:
        return
    if isinstance(inner, ReduceLROnPlateau) or not isinstance(inner, LRScheduler):
        _logger.warning(
            "the learning rate of this replica begins anew, and the group has taken %d steps: a "
            "%s cannot be moved there",
            num_steps,
            type(inner).__name__,
        )
        return
    with warnings.catch_warnings():
        # Torch warns of schedule steps without steps of the optimizer; here they are intended.
        warnings.simplefilter("ignore")
        for _ in range(num_steps):
            inner.step()


def leave_schedules(diloco: DiLoCo) -> None:
    """Let DiLoCo not check the schedules: a callback has moved them, by epochs or batches too."""
    if diloco._elastic is not None:
        diloco._elastic.leave_schedules()


class TrainerSteps:
    """Keep DiLoCo's count of inner steps equal to the trainer's count.

    After an overflow a GradScaler does not call an optimizer that is not fused, so no hook counts
    the step. The trainer counts that step, and all replicas have agreed on a number of steps.

    Args:
        diloco: A DiLoCo with one optimizer: a trainer does not count the steps of several.
        num_steps: Steps that the trainer has counted so far.
    """

    def __init__(self, diloco: DiLoCo, num_steps: int) -> None:
        self._diloco = diloco
        self._missing = num_steps - self._num_hooked()

    def _num_hooked(self) -> int:
        hooks = self._diloco._hooks
        return 0 if hooks is None else hooks.num_steps

    def follow(self, num_steps: int) -> None:
        """Count the inner steps that no hook has counted, as skipped steps.

        Args:
            num_steps: Steps that the trainer has counted so far, skipped steps included.

        Raises:
            SyncError: As ``DiLoCo.step``.
        """
        # Without hooks (attach=False) the user counts the steps.
        if self._diloco._hooks is None:
            return
        while num_steps - self._num_hooked() > self._missing:
            self._missing += 1
            self._diloco._step(is_skipped=True)


# --------------------------------------------------------------------------------------- evaluating


Evaluate = Literal["local", "outer"]
CHOICES = get_args(Evaluate)


class Swap:
    """Put the outer parameters into the model between two hooks of a trainer.

    Args:
        diloco: Owner of the outer parameters; under ``shard_group`` all workers enter and leave
            together.
    """

    def __init__(self, diloco: DiLoCo) -> None:
        self._diloco = diloco
        self._block = ExitStack()
        self.is_entered = False

    @property
    def is_outer(self) -> bool:
        """Whether the model holds the outer parameters, put there by this object or the user."""
        return self._diloco._is_swapped

    @property
    def is_over(self) -> bool:
        """Whether the training is over: DiLoCo is closed, and its parameters remain readable."""
        return self._diloco._is_closed

    def enter(self) -> None:
        """Put the outer parameters into the model, unless this object has done so already."""
        if not self.is_entered:
            self._block.enter_context(self._diloco.outer_parameters())
            self.is_entered = True

    def leave(self, *, keep: bool = False) -> None:
        """Put the local parameters back, with the same bits, if ``enter`` has replaced them.

        Args:
            keep: Keep the values that are in the model now, because the trainer has loaded them.
                The saved local parameters are dropped.
        """
        if not self.is_entered:
            return
        kept = {n: tensor.clone() for n, tensor in parameters_of(self._diloco).items() if keep}
        self.is_entered = False
        self._block.close()
        if keep:
            write_parameters(self._diloco, kept)


def share_best(diloco: DiLoCo, step: int | None) -> bool:
    """Give all replicas the same best model; a collective call at the end of training.

    Args:
        step: Step of the checkpoint from which the trainer has loaded the best model; None if it
            has loaded none.

    Returns:
        Whether a replica has loaded a best model. All models are equal then: if they differed, all
        replicas take the model of the lowest such replica, with a warning.

    Raises:
        SyncError: If the group fails.
    """
    tensors = list(parameters_of(diloco).values())
    own = [step, 0 if step is None else digest_of(tensors)]
    views = handshake.gather_json(diloco.exchange, own)
    ranks = [rank for rank, view in enumerate(views) if view[0] is not None]
    if not ranks:
        return False
    if any(view != views[ranks[0]] for view in views):
        members = diloco.exchange.members
        found = zip(members, views, strict=True)
        steps = ", ".join(f"step {view[0]} on replica {replica}" for replica, view in found)
        warn(
            f"the best model differs between replicas ({steps}): all take the model of replica "
            f"{members[ranks[0]]}; evaluate on the same data everywhere"
        )
        diloco.exchange.broadcast(tensors, ranks[0])
    return True
