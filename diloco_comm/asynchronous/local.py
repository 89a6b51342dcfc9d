"""A worker's model: the shared parameters, the payloads to send, the residuals of encoding."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..base.memory import empty_pages, memory_order
from ..ops.digests import each_digest
from ..ops.residuals import Residuals
from ..ops.wire import STAGE_ENCODE, Layout, WireFormat, rng_key
from ..replica.fragments import (
    Fragment,
    FragmentSpec,
    buffer_names,
    describe_parameters,
    make_fragments,
    shared_memory,
    trainable_parameters,
    unexchanged_tensors,
)
from .messages import MAX_PLACES
from .model import layout_of


class LocalModel:
    """The parameters of a worker by fragment, and the shared parameters its round started from.

    Args:
        model, optimizers: Define which parameters are exchanged, as in ``DiLoCo``.
        fragments: As in ``DiLoCo``.
        wire: Format of the payloads.
        error_feedback: Add the rounding errors of one encoding to the next.
        rounding, seed: As in ``DiLoCo``.
        name: Name of the worker; workers of different names draw different random numbers.
        impl: Force an implementation of the operators.

    Attributes:
        outer: The shared parameters, fp32 [num_elements] for each fragment.
        payloads, layouts: The encoded pseudo-gradient of each fragment.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        fragments: FragmentSpec = 1,
        wire: WireFormat,
        error_feedback: bool = False,
        rounding: str = "nearest",
        seed: int = 0,
        name: str = "",
        impl: str = "",
    ) -> None:
        named = trainable_parameters(model, list(optimizers))
        self.fragments = [f for f in make_fragments(model, named, fragments) if f.num_elements]
        self.sizes = [fragment.num_elements for fragment in self.fragments]
        self.wire, self.impl = wire, ops.resolve_impl(impl)
        self._is_stochastic, self._seed = rounding == "stochastic", seed
        self.rename(name)
        self.outer = [empty_pages((size,), torch.float32) for size in self.sizes]
        self.layouts = [layout_of(size, wire) for size in self.sizes]
        self.payloads = [empty_pages((lay.payload_bytes,), torch.uint8) for lay in self.layouts]
        self.residuals = [
            Residuals(
                size,
                error_feedback=error_feedback,
                dtype=torch.float32,
                carries=False,
                decay=wire.feedback_decay,
            )
            for size in self.sizes
        ]

    def rename(self, name: str) -> None:
        """Set the worker's name, from which the random numbers of rounding are made."""
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        self._replica = int.from_bytes(digest, "little")

    @property
    def layout_hash(self) -> int:
        """Hash of names, shapes and dtypes in 62 bits, the same on all workers of one model."""
        return layout_hash(self.fragments)

    def encode(self, seq: int) -> bool:
        """Encode the pseudo-gradient of the round into the payloads.

        Args:
            seq: Number of the update, for stochastic rounding.

        Returns:
            False if some value is not finite.
        """
        self._refuse_changes()
        bad = torch.zeros(1, dtype=torch.int64)
        for index, fragment in enumerate(self.fragments):
            layout, residual = self.layouts[index], self.residuals[index]
            ops.encode(
                self.outer[index],
                fragment.tensors(),
                self.payloads[index],
                0,
                layout.num_elements,
                layout.run_elements,
                self.wire.name,
                self.wire.block_size,
                stochastic=self._is_stochastic,
                rng_key=rng_key(self._seed, self._replica, STAGE_ENCODE, seq, index),
                residual=residual.value,
                new_residual=residual.new,
                nonfinite=bad,
                impl=self.impl,
            )
            residual.encoded()
        return not bad.item()

    def encode_parameters(self) -> tuple[list[Tensor], list[Layout]]:
        """Return the parameters in fp32, which the first worker sends to the server."""
        payloads, layouts = [], []
        for fragment in self.fragments:
            layout = layout_of(fragment.num_elements, WireFormat("fp32"))
            payload = empty_pages((layout.payload_bytes,), torch.uint8)
            values = payload.view(torch.float32)
            flat = torch.cat([memory_order(t) for t in fragment.tensors()]).float()
            for index in range(layout.num_runs):
                begin, end = layout.run_range(index)
                offset = index * (layout.run_bytes // 4)
                values[offset : offset + end - begin] = flat[begin:end]
            payloads.append(payload)
            layouts.append(layout)
        return payloads, layouts

    def update_applied(self) -> None:
        """Note that the server applied the update: its residual belongs to the next encoding."""
        for residual in self.residuals:
            residual.turn(0)

    def write(self) -> None:
        """Set the parameters to the shared ones, in place."""
        self._refuse_changes()
        for outer, fragment in zip(self.outer, self.fragments, strict=True):
            ops.merge(outer, fragment.tensors(), impl=self.impl)

    def read(self) -> None:
        """Set the shared parameters to the local ones."""
        for outer, fragment in zip(self.outer, self.fragments, strict=True):
            torch.cat([memory_order(t) for t in fragment.tensors()], out=outer)

    def _refuse_changes(self) -> None:
        for fragment in self.fragments:
            fragment.refuse_changes()


def layout_hash(fragments: Sequence[Fragment]) -> int:
    """Return a hash of names, shapes and dtypes in 62 bits."""
    text = json.dumps(describe_parameters(fragments))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def beside_layout(model: nn.Module, fragments: Sequence[Fragment], checks: str) -> dict[str, Any]:
    """Return what the first message to a server says of a model beside its layout.

    Args:
        checks: With "off" the server compares no frozen parameters and buffers; with "warn" a
            difference is a warning.
    """
    places = sorted(shared_memory(t for fragment in fragments for t in fragment.tensors()))
    # Models that are shared as a whole have the same first places.
    found: dict[str, Any] = {"memory": places[:MAX_PLACES]} if places else {}
    if checks != "off":
        names = {name for fragment in fragments for name in fragment.names}
        tensors, buffers = unexchanged_tensors(model, names), buffer_names(model)
        found["unexchanged"] = [
            _digest({name: t for name, t in tensors.items() if (name in buffers) == is_buffer})
            for is_buffer in (False, True)
        ]
        found["warns"] = checks == "warn"
    return found


def _digest(tensors: Mapping[str, Tensor]) -> int:
    """Return one digest of the names and the bytes of tensors."""
    names = sorted(tensors)
    digests = each_digest([tensors[name] for name in names])
    text = json.dumps(list(zip(names, digests, strict=True)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
