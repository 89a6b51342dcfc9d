"""The mean of all replicas on a wire, in one process, with the operators of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.convergence.sparse_loco import SparseLoCo
from diloco_comm import ops
from diloco_comm.ops.phases import mean_layout, num_phases
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
        self._mean = mean_layout(self.layout, num_replicas)
        self._payloads = [
            torch.zeros(self.layout.payload_bytes, dtype=torch.uint8) for _ in range(num_replicas)
        ]
        self._residuals = [self._new_residuals(size, error_feedback) for _ in range(num_replicas)]
        # An owner reduces the elements of one run.
        for rank, residuals in enumerate(self._residuals):
            begin, end = self.layout.run_range(rank)
            residuals.plan_reduction(end - begin if self._mean == self.layout else 0)

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
        if num_phases(self.wire, world) == 2:
            terms = [self._reduce([key[1] for key in keys], bad)]
            form = (layout.run_elements, self._mean.wire.name, self._mean.wire.block_size)
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
        mean = self._mean
        result = torch.zeros(mean.payload_bytes, dtype=torch.uint8)
        for rank in range(world):
            run = slice(rank * layout.run_bytes, (rank + 1) * layout.run_bytes)
            begin, end = layout.run_range(rank)
            if mean != layout:
                part = result[rank * mean.run_bytes : (rank + 1) * mean.run_bytes]
                self._reencode(run, part, end - begin, keys[rank], bad)
                continue
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

    def _reencode(self, run: slice, result: Tensor, length: int, key: int, bad: Tensor) -> None:
        """Reduce the payloads' runs to a mean on another wire."""
        layout, mean, world = self.layout, self._mean, len(self._payloads)
        runs, values = [payload[run] for payload in self._payloads], torch.empty(length)
        form = (layout.run_elements, self.wire.name, self.wire.block_size)
        ops.decode(runs, [1.0 / world] * world, [values], 0, length, *form)
        form = (layout.run_elements, mean.wire.name, mean.wire.block_size)
        ops.encode(None, [values], result, 0, length, *form, rng_key=key, nonfinite=bad)


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
