"""The mean over replicas of outer parameters and momenta, where they differ (``Eager``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.memory import device_of
from ...exchange.exchange import Exchange
from ...exchange.headers import Header
from ...ops.wire import WireFormat
from ..synced import SyncedFragment, SyncedPart


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
        SyncError: If the group fails; parts before the one that failed are equal then.
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
