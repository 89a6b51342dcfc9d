"""Floating-point buffers of a model, averaged over the replicas at the end of each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..base.memory import device_of, memory_order
from ..exchange.exchange import Exchange
from ..exchange.round import decode_terms
from ..methods.outer_state import Update
from ..ops.implementations import is_served
from ..ops.wire import WireFormat
from ..replica.fragments import DTYPES, is_dense, memory_of, refuse_change, unwrap_model
from .synced import Measure, SyncedPart, squared_norm


@dataclass
class _Buffer:
    name: str
    owner: nn.Module = field(repr=False)
    attribute: str = ""


class SyncedBuffers(SyncedPart):
    """Floating-point buffers, such as BatchNorm's statistics: averaged, exactly, in fp32."""

    def __init__(self, index: int, model: nn.Module) -> None:
        self._buffers = _floating_buffers(model)
        super().__init__(index, sum(tensor.numel() for tensor in self.tensors()))
        self.device = device_of(self.tensors())
        self._memory = {name: memory_of(tensor) for name, tensor in self.named().items()}

    def named(self) -> dict[str, Tensor]:
        return {b.name: getattr(b.owner, b.attribute).detach() for b in self._buffers}

    def refuse_changes(self) -> None:
        for name, tensor in self.named().items():
            refuse_change(f"buffer {name!r}", tensor, self._memory[name])

    def open_buffers(self, exchange: Exchange) -> None:
        if self.num_elements:
            self.buffers = exchange.buffers(
                self.num_elements, WireFormat("fp32"), device=self.device
            )

    def squared_norm(self, impl: str) -> Tensor:
        return squared_norm(None, self.tensors(), impl)

    def apply(
        self, update: Update, *, own: Tensor | None = None, measure: Measure | None = None
    ) -> None:
        if not update.terms:
            return
        if own is None:
            decode_terms(update.terms, update.layout, update.params, impl=update.impl)
            return
        # The steps since the send have changed the buffers: that change stays.
        change = torch.empty(self.num_elements, device=self.device)
        decode_terms([*update.terms, (own, -1.0)], update.layout, [change], impl=update.impl)
        offset = 0
        for tensor in update.params:
            flat = memory_order(tensor)
            flat += change[offset : offset + flat.numel()]
            offset += flat.numel()


def _floating_buffers(model: nn.Module) -> Sequence[_Buffer]:
    """List each buffer once, with the module that owns it: buffers may be replaced by new ones.

    Buffers that hold infinities or NaN from the start, such as attention masks, are constants of
    the model, not statistics: they are left out.
    """
    found, seen = [], set()
    for prefix, module in unwrap_model(model).named_modules():
        for attribute, buffer in module.named_buffers(recurse=False):
            if buffer.dtype not in DTYPES or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            name = f"{prefix}.{attribute}" if prefix else attribute
            _check_buffer(name, buffer)
            if bool(torch.isfinite(buffer).all()):
                found.append(_Buffer(name, module, attribute))
    return found


def _check_buffer(name: str, buffer: Tensor) -> None:
    if not is_served(buffer.device):
        raise TypeError(
            f"buffer {name!r} is on {buffer.device}: only buffers on a GPU or in CPU memory can be "
            "averaged"
        )
    if not is_dense(buffer):
        raise ValueError(
            f"buffer {name!r} of shape {list(buffer.shape)} and strides {list(buffer.stride())} "
            "is not dense in memory: make it contiguous, or leave average_buffers off"
        )
