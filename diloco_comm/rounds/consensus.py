"""Outer parameters that all replicas can keep: their mean, and the iterate without look-ahead.

Under ``Eager`` outer parameters and momenta differ between replicas; the mean over the replicas is
taken where one model is wanted.

torch's Nesterov holds the point at which the next gradient is wanted. That point is ahead of the
iterate by lr * mu * m: up to nine rounds' worth of movement with a momentum of 0.9, however short
the last round was. While training goes on this is right. The model that is kept in the end is
better without: the last ``flush`` takes the look-ahead back, on all replicas or on none. The outer
parameters are then those before the last round, less lr times its mean pseudo-gradient.
``docs/measurements/end-of-training.md`` has the losses of this and other endings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ReplicaMismatch, difference
from ..base.memory import device_of
from ..exchange.exchange import Exchange
from ..exchange.round import Header
from ..ops.wire import WireFormat
from .handshake import gather_json
from .part import SyncedFragment, SyncedPart, mixed


def mean_state(exchange: Exchange, parts: Sequence[SyncedPart], impl: str) -> dict[str, Any]:
    """Return the means by parameter name, ``{"outer": ..., "buffers": ...}``; a collective call.

    The fp32 wire carries them exactly; sums are taken in rank order, so that all replicas get the
    same bits. Nothing of this replica is changed.

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
        SyncError: If the group fails; parts before the failure are equal then.
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

# Guards a block that changes the outer state of a part.
Writing = Callable[[SyncedPart], AbstractContextManager[None]]


class Ending:
    """The replicas' agreement on the end of training, before the last round of a flush.

    Args:
        is_wanted: Whether this flush ends training; None if this replica only repeats a flush that
            broke off on others.
    """

    def __init__(self, is_wanted: bool | None) -> None:
        self._is_wanted = is_wanted
        self._views: list[list[list[Any]]] = []

    def own(self, parts: Sequence[SyncedPart]) -> list[Any]:
        """Return this replica's view, as JSON types."""
        return [self._is_wanted, [_numbers(part) for part in parts]]

    def hear(self, exchange: Exchange, views: Sequence[Sequence[Any]]) -> None:
        """Take the views of all replicas, in rank order.

        Raises:
            ReplicaMismatch: On every replica, if they want different ends.
        """
        wanted: dict[str, list[int]] = {}
        for replica, (is_wanted, _) in zip(exchange.members, views, strict=True):
            if is_wanted is not None:
                wanted.setdefault(str(is_wanted), []).append(replica)
        if len(wanted) > 1:
            raise ReplicaMismatch(difference("final= of flush()", wanted), stage="flush")
        self._is_wanted = "True" in wanted
        self._views = [numbers for _, numbers in views]

    def reach(self, parts: Sequence[SyncedPart], impl: str, writing: Writing) -> None:
        """Take the look-ahead back, after the last round of a flush that ends training."""
        if self._is_wanted:
            for part in parts:
                _end(part, [view[part.index] for view in self._views], impl, writing)


def end_like_others(
    exchange: Exchange, parts: Sequence[SyncedPart], impl: str, writing: Writing
) -> None:
    """End the parts that others have ended, whose flush broke off here; a collective call."""
    views = gather_json(exchange, [_numbers(part) for part in parts])
    if exchange.replica in exchange.joined:
        return  # A newcomer is given the state, or has a copy of it, with its end.
    for part in parts:
        steps = _numbers(part)[0]
        heard = [view[part.index] for view in views]
        if any(has_ended for number, has_ended, _ in heard if number == steps):
            # The others have the state that this replica reaches now.
            _end(part, [[number, False, lr] for number, _, lr in heard], impl, writing)


def has_ended(part: SyncedPart) -> bool:
    """Whether a part's look-ahead was taken back, or there is none."""
    if not isinstance(part, SyncedFragment) or part.state.look_ahead() is None:
        return True
    return part.state.ended_at == part.state.num_steps


def _numbers(part: SyncedPart) -> list[Any]:
    """Return outer steps taken, whether training has ended there, and the last step's lr."""
    if not isinstance(part, SyncedFragment):
        return [0, False, None]
    steps = part.state.num_steps
    return [steps, part.state.ended_at == steps, part.state.last_lr]


def _end(part: SyncedPart, views: Sequence[Sequence[Any]], impl: str, writing: Writing) -> None:
    """Take back a part's look-ahead, unless the replicas have done so.

    Args:
        views: ``_numbers`` of all replicas, which may be older than this replica's state.
    """
    if not isinstance(part, SyncedFragment) or part.state.look_ahead() is None:
        return
    steps, has_ended, lr = _numbers(part)
    # A newcomer that has copied the state beside training lacks two of the numbers.
    heard = [view for view in views if view[0] == steps]
    known = [each for each in [*(view[2] for view in heard), lr] if each is not None]
    if has_ended or any(view[1] for view in heard):
        part.state.ended_at = steps
    elif known:
        with writing(part):
            part.take_back_look_ahead(known[0], impl)
            part.history = mixed(part.history, steps, known[0])
