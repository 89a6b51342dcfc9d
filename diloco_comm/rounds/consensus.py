"""One model of all replicas: the mean of their outer parameters, and the end of training.

Under ``Eager`` outer parameters and momenta differ between replicas. Where one model is wanted, the
mean over the replicas is taken.

While training goes on, the outer optimizer moves the outer parameters further than the replicas
have trained, and later rounds correct this. After the last round nothing does. So the last
``flush`` ends on the mean of the last round: the outer parameters before its outer step, minus its
mean pseudo-gradient, with any outer optimizer. For this, the payloads of the last round stay in the
buffers until the next one is encoded, and the state keeps the change that the outer step made.

A replica that has loaded a state, or has just joined, does not have these payloads; nor has any
replica after a round that was voted down. Then all replicas alike take back the look-ahead of
Nesterov's momentum instead: the outer parameters of torch's Nesterov are ahead of the iterate by
lr * mu * m. ``docs/measurements/end-of-training.md`` has the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.checks import logger_of
from ..base.errors import ReplicaMismatch, difference, named
from ..base.memory import device_of
from ..exchange.exchange import Exchange
from ..exchange.round import STATE_ADVICE, Header
from ..ops.wire import WireFormat
from .handshake import gather_json
from .part import SyncedFragment, SyncedPart, mixed

logger = logger_of(__name__)


def mean_state(exchange: Exchange, parts: Sequence[SyncedPart], impl: str) -> dict[str, Any]:
    """Return the means by parameter name, ``{"outer": ..., "buffers": ...}``; a collective call.

    The values travel in fp32 and are added up in rank order, so that all replicas get the same
    bits. This replica's own state does not change.

    Raises:
        SyncError: If the group fails.
    """
    state: dict[str, Any] = {"outer": {}, "buffers": {}}
    for part in parts:
        if isinstance(part, SyncedFragment) and part.num_elements:
            outer, buffers = _means_of(exchange, part, impl)
            state["outer"].update(part.fragment.views(outer))
            for name, flat in buffers.items():
                state["buffers"].setdefault(name, {}).update(part.fragment.views(flat))
    return state


def mean_outer(exchange: Exchange, parts: Sequence[SyncedFragment], impl: str) -> list[Tensor]:
    """Return each part's mean outer parameters, fp32 [num_elements]; a collective call."""
    return [
        _means_of(exchange, part, impl)[0] if part.num_elements else part.outer for part in parts
    ]


def equalize(exchange: Exchange, parts: Sequence[SyncedPart], impl: str) -> None:
    """Set outer parameters, momenta and local parameters to the means; a collective call.

    Raises:
        SyncError: If the group fails; the parts before the failure have been set then.
    """
    for part in parts:
        if isinstance(part, SyncedFragment) and part.num_elements:
            outer, buffers = _means_of(exchange, part, impl)
            part.outer.copy_(outer)
            part.state.load(buffers, part.state.extra())
            part.write_local(impl)


def _means_of(
    exchange: Exchange, part: SyncedFragment, impl: str
) -> tuple[Tensor, dict[str, Tensor]]:
    buffers = part.state.tensors()
    means = [torch.empty_like(part.outer) for _ in range(1 + len(buffers))]
    _mean(exchange, [part.outer, *buffers.values()], means, part.index, impl)
    return means[0], dict(zip(buffers, means[1:], strict=True))


def _mean(
    exchange: Exchange, tensors: list[Tensor], outs: list[Tensor], number: int, impl: str
) -> None:
    count = sum(tensor.numel() for tensor in tensors)
    if device_of(tensors).type != exchange.device.type:
        impl = ""
    buffers = exchange.buffers(count, WireFormat("fp32"), device=device_of(tensors))
    header = Header("all_reduce", layout_hash=count, fragment=number)
    outcome = exchange.start(buffers, outer=None, params=tensors, header=header).wait()
    outcome.decode(outs, impl=impl)
    buffers.commit()


# --------------------------------------------------------------------------- the end of training

# Returns a context for a block that changes the outer state of a part.
Writing = Callable[[SyncedPart], AbstractContextManager[None]]


class Ending:
    """The replicas' agreement, in a flush, on whether and how training ends.

    Args:
        is_wanted: Whether this flush ends training; None if this replica only repeats a flush that
            has failed on others.
    """

    def __init__(self, is_wanted: bool | None) -> None:
        self._is_wanted = is_wanted
        self._views: list[list[list[Any]]] = []

    def own(self, parts: Sequence[SyncedPart]) -> list[Any]:
        """Return the numbers that this replica gives the others, as JSON types."""
        return [self._is_wanted, [_view(part) for part in parts]]

    def hear(self, exchange: Exchange, views: Sequence[Sequence[Any]]) -> None:
        """Take the numbers of all replicas (``own``), in rank order.

        Raises:
            ReplicaMismatch: On every replica, if only some want to end training.
        """
        wanted: dict[str, list[int]] = {}
        for replica, (is_wanted, _) in zip(exchange.members, views, strict=True):
            if is_wanted is not None:
                wanted.setdefault(str(is_wanted), []).append(replica)
        if len(wanted) > 1:
            raise ReplicaMismatch(difference("final= of flush()", wanted), stage="flush")
        self._is_wanted = "True" in wanted
        self._views = [each for _, each in views]

    def reach(self, parts: Sequence[SyncedPart], impl: str, writing: Writing) -> None:
        """End training for each part, after the last round of a flush that ends training.

        ``hear`` took the replicas' numbers before that round. So a part that is at another step
        now has been sent in the flush.
        """
        due: list[tuple[SyncedFragment, list[_View]]] = []
        for part in parts if self._is_wanted else []:
            if not isinstance(part, SyncedFragment) or has_ended(part):
                continue
            heard = _at_same_step(part, self._views)
            ended = [view for view in heard if view.has_ended]
            if ended:
                # This newcomer has copied the ended state beside training, but not these numbers.
                part.state.ended_at, part.state.is_mean = part.state.num_steps, ended[0].is_mean
            else:
                due.append((part, heard))
        _end(due, impl, writing)
        # Only once: under ``Eager`` this is called again after the parts became the replicas' mean.
        self._is_wanted = False


def end_like_others(
    exchange: Exchange,
    parts: Sequence[SyncedPart],
    impl: str,
    writing: Writing,
    beside: Any = None,
) -> list[Any] | None:
    """End training for parts that others have ended, in a flush that failed here.

    A collective call.

    Args:
        beside: A further JSON value that this replica gives the others.

    Returns:
        The values ``beside`` of all replicas, in rank order; None on a newcomer, and on every
        replica if this call has ended a part on any of them, so that the values may be out of date.

    Raises:
        ReplicaMismatch: On every replica, if one lacks the mean on which others have ended.
    """
    views, others = zip(
        *gather_json(exchange, [[_view(part) for part in parts], beside]), strict=True
    )
    for part in parts:
        _refuse_without_mean(exchange, part, [_View(*view[part.index]) for view in views])
    if exchange.replica in exchange.joined:
        return None  # A newcomer is given the state, or has a copy of it, with its end.
    due: list[tuple[SyncedFragment, list[_View]]] = []
    for part in parts:
        if isinstance(part, SyncedFragment) and not has_ended(part):
            # Replicas at the same step that have ended: this replica ends in the same way.
            ended = [view for view in _at_same_step(part, views) if view.has_ended]
            if ended:
                due.append((part, ended))
    _end(due, impl, writing)
    ends = {(part.index, *view[part.index][:2]) for part in parts for view in views}
    # A replica was at the same step of a part as another one that has ended there: this call has
    # ended the part on that replica, too.
    is_new = len({end[:2] for end in ends}) < len(ends)
    return None if is_new else list(others)


def _refuse_without_mean(exchange: Exchange, part: SyncedPart, views: Sequence[_View]) -> None:
    ends = {view.num_steps for view in views if view.has_ended and view.is_mean}
    lacking = [
        replica
        for replica, view in zip(exchange.members, views, strict=True)
        if view.num_steps in ends
        and not (view.has_ended or view.is_mean or replica in exchange.joined)
    ]
    if lacking:
        raise ReplicaMismatch(
            f"training of fragment {part.index} has ended on the mean of the last round, which "
            f"{named(lacking)} no longer has since a load or another send: {STATE_ADVICE}",
            stage="outer state",
        )


def has_ended(part: SyncedPart) -> bool:
    """Whether training has ended for a part, or has not begun."""
    if not isinstance(part, SyncedFragment) or not part.state.num_steps:
        return True
    return part.state.ended_at == part.state.num_steps


class _View(NamedTuple):
    """The numbers about a fragment that a replica gives the others, as JSON types.

    Attributes:
        num_steps: Outer steps of the fragment.
        has_ended: Training has ended at this number of outer steps.
        is_mean: Training has ended on the mean of the last round; or, if it has not ended, the
            replica still has that mean.
        lr, momentum: Outer learning rate and momentum of the last outer step; None on a newcomer
            that has copied the state beside training.
    """

    num_steps: int
    has_ended: bool
    is_mean: bool
    lr: float | None
    momentum: float | None


def _view(part: SyncedPart) -> _View:
    if not isinstance(part, SyncedFragment):
        return _View(0, False, False, None, None)
    state, is_over = part.state, part.state.ended_at == part.state.num_steps
    is_mean = state.is_mean if is_over else state.last_update is not None
    return _View(state.num_steps, is_over, is_mean, state.last_lr, state.last_momentum)


def _at_same_step(part: SyncedFragment, views: Sequence[Sequence[Any]]) -> list[_View]:
    of_part = [_View(*view[part.index]) for view in views]
    return [view for view in of_part if view.num_steps == part.state.num_steps]


def _end(due: Sequence[tuple[SyncedFragment, list[_View]]], impl: str, writing: Writing) -> None:
    """End each part like the replicas at the same step; log the parts that end without the mean."""
    for part, heard in due:
        _end_one(part, heard, impl, writing)
    lacking = [part.index for part, _ in due if has_ended(part) and not part.state.is_mean]
    if lacking:
        logger.info(
            "training ends without the mean of the last round in fragments %s: since a load, a "
            "join or a lost round it is gone on some replica, and only the look-ahead of Nesterov "
            "is taken back",
            lacking,
        )


def _end_one(part: SyncedFragment, heard: Sequence[_View], impl: str, writing: Writing) -> None:
    """End a part, if a replica knows the learning rate of its last outer step."""
    views = [*heard, _view(part)]
    known = [(view.lr, view.momentum) for view in views if view.lr is not None]
    if not known:
        return
    lr, momentum = known[0]
    is_mean = all(view.is_mean for view in views)
    with writing(part):
        part.end(lr, momentum, impl, is_mean=is_mean)
        part.history = mixed(part.history, part.state.num_steps, lr, int(is_mean))
