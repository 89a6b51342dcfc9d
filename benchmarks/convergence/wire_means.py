"""The mean of all replicas on a wire, in one process, with the operators of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.convergence.sparse_loco import SparseLoCo
from diloco_comm import ops
from diloco_comm.ops.residuals import Residuals
from diloco_comm.ops.wire import Layout, WireFormat, encoding_keys

Params = Sequence[Tensor]


class Mean(Protocol):
    """The mean of outer - local over all replicas, as it arrives at each of them."""

    def mean(self, outer: Tensor, replicas: Sequence[Params], round: int) -> Tensor:
        """Return the mean, fp32 [num_elements], for the tensors of each replica."""

    def bits(self) -> float:
        """Bits an element of one payload, with scales and without padding."""


class OnWire:
    """The mean on a wire of the package: what an exchange computes, without the exchange."""

    def __init__(
        self, wire: WireFormat, params: Params, num_replicas: int, error_feedback: bool, seed: int
    ) -> None:
        size = sum(p.numel() for p in params)
        self.wire, self.seed = wire, seed
        self.layout = Layout.plan(size, num_replicas, wire=wire)
        self._payloads = [
            torch.zeros(self.layout.payload_bytes, dtype=torch.uint8) for _ in range(num_replicas)
        ]
        self._residuals = [self._new_residuals(size, error_feedback) for _ in range(num_replicas)]
        # An owner reduces the elements of one run.
        for rank, residuals in enumerate(self._residuals):
            begin, end = self.layout.run_range(rank)
            residuals.plan_reduction(end - begin)

    def _new_residuals(self, size: int, error_feedback: bool) -> Residuals:
        return Residuals(
            size,
            error_feedback=error_feedback,
            dtype=torch.float32,
            carries=False,
            decay=self.wire.feedback_decay,
        )

    def bits(self) -> float:
        return self.wire.bits_per_element

    def mean(self, outer: Tensor, replicas: Sequence[Params], round: int) -> Tensor:
        layout, world = self.layout, len(replicas)
        form = (layout.run_elements, self.wire.name, self.wire.block_size)
        bad = torch.zeros(1, dtype=torch.int64)
        keys = [encoding_keys(self.wire, False, self.seed, r, round, 0) for r in range(world)]
        for rank, params in enumerate(replicas):
            residuals = self._residuals[rank]
            ops.encode(
                outer,
                params,
                self._payloads[rank],
                0,
                layout.num_elements,
                *form,
                rng_key=keys[rank][0],
                residual=residuals.value,
                new_residual=residuals.new,
                nonfinite=bad,
            )
            residuals.encoded()
        terms = self._payloads
        if world > 2 and not self.wire.is_gathered:
            terms = [self._reduce([key[1] for key in keys], bad)]
        for residuals in self._residuals:
            residuals.turn(0)
        mean = torch.empty_like(outer)
        weights = [1.0 / len(terms)] * len(terms)
        ops.decode(terms, weights, [mean], 0, layout.num_elements, *form)
        if bad.item():
            mean.fill_(float("nan"))
        return mean

    def _reduce(self, keys: Sequence[int], bad: Tensor) -> Tensor:
        layout, world = self.layout, len(self._payloads)
        result = torch.zeros_like(self._payloads[0])
        for rank in range(world):
            run = slice(rank * layout.run_bytes, (rank + 1) * layout.run_bytes)
            begin, end = layout.run_range(rank)
            residual, new_residual = self._residuals[rank].reduction(0)
            ops.reduce(
                torch.cat([payload[run] for payload in self._payloads]),
                result[run],
                [1.0 / world] * world,
                end - begin,
                layout.run_elements,
                self.wire.name,
                self.wire.block_size,
                rng_key=keys[rank],
                index_begin=begin,
                residual=residual,
                new_residual=new_residual,
                nonfinite=bad,
            )
        return result


class BySparseLoCo:
    """The mean of SparseLoCo's compression, which all replicas gather."""

    def __init__(self, params: Params, num_replicas: int) -> None:
        self._replicas = [SparseLoCo(params) for _ in range(num_replicas)]
        self._sent_elements = 0

    def bits(self) -> float:
        return self._replicas[0].sent_bits / self._sent_elements

    def mean(self, outer: Tensor, replicas: Sequence[Params], round: int) -> Tensor:
        total = torch.zeros_like(outer)
        self._sent_elements += outer.numel()
        for compression, params in zip(self._replicas, replicas, strict=True):
            starts = outer.split([p.numel() for p in params])
            local = zip(starts, params, strict=True)
            differences = [start.view_as(p) - p.detach() for start, p in local]
            decoded = compression.encode(differences)
            total += torch.cat([d.flatten() for d in decoded])
        return total / len(replicas)
