"""The mean of all replicas on a wire, in one process, with the operators of the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_comm import ops
from diloco_comm.methods.overlap import Terms
from diloco_comm.ops.residuals import Residuals
from diloco_comm.ops.wire import Layout, WireFormat, encoding_keys, mean_layout, num_phases

Params = Sequence[Tensor]


@dataclass
class Sent:
    """A round that all replicas have sent.

    Attributes:
        step: The inner step of the send.
        payloads, layout: What each replica has encoded.
        terms, mean_layout: Payloads and coefficients whose sum is the mean.
        is_bad: A value was such that the wire does not carry it: there is no mean.
    """

    step: int
    payloads: list[Tensor]
    layout: Layout
    terms: Terms
    mean_layout: Layout
    is_bad: bool

    def mean(self) -> Tensor:
        """Return the mean, fp32 [num_elements]; NaN if there is none."""
        layout = self.mean_layout
        mean = torch.empty(layout.num_elements)
        payloads = [payload for payload, _ in self.terms]
        weights = [weight for _, weight in self.terms]
        ops.decode(payloads, weights, [mean], 0, layout.num_elements, *_form(layout))
        return mean.fill_(float("nan")) if self.is_bad else mean


class OnWire:
    """The rounds of one fragment on a wire: what an exchange computes, without the exchange.

    Args:
        params: Of one replica.
        fragment: Index of the fragment, for random signs.
        carries, must_gather: See ``ops.residuals`` and ``ops.wire``.
    """

    def __init__(
        self,
        wire: WireFormat,
        params: Params,
        num_replicas: int,
        error_feedback: bool,
        seed: int,
        *,
        fragment: int = 0,
        carries: bool = False,
        must_gather: bool = False,
    ) -> None:
        size = sum(p.numel() for p in params)
        self.wire, self.seed, self.fragment = wire, seed, fragment
        self.layout = Layout.plan(size, num_replicas, wire=wire)
        self._num_phases = num_phases(wire, num_replicas, must_gather=must_gather)
        self._mean = mean_layout(self.layout, num_replicas, must_gather=must_gather)
        # As the engine has it, in fp32.
        self.share = float(torch.tensor(1.0 / num_replicas))
        self._residuals = [
            Residuals(
                size,
                error_feedback=error_feedback,
                dtype=torch.float32,
                carries=carries,
                decay=wire.feedback_decay,
            )
            for _ in range(num_replicas)
        ]
        # An owner reduces the elements of one run.
        for rank, residuals in enumerate(self._residuals):
            begin, end = self.layout.run_range(rank)
            residuals.plan_reduction(end - begin if self._mean == self.layout else 0)

    def send(
        self,
        outers: Sequence[Tensor | None],
        replicas: Sequence[Params],
        round: int,
        step: int = 0,
    ) -> Sent:
        """Encode outer - local of each replica, and reduce the payloads where owners do that.

        Args:
            outers: fp32 [num_elements] of each replica; None encodes the tensors themselves.
            replicas: The tensors of each replica.
            round: Number of the round, for random signs.
            step: The inner step of the send.
        """
        layout, world = self.layout, len(replicas)
        bad = torch.zeros(1, dtype=torch.int64)
        keys = [
            encoding_keys(self.wire, False, self.seed, rank, round, self.fragment)
            for rank in range(world)
        ]
        payloads = [torch.zeros(layout.payload_bytes, dtype=torch.uint8) for _ in range(world)]
        for rank, (outer, params) in enumerate(zip(outers, replicas, strict=True)):
            residuals = self._residuals[rank]
            ops.encode(
                outer,
                params,
                payloads[rank],
                0,
                layout.num_elements,
                *_form(layout),
                rng_key=keys[rank][0],
                residual=residuals.added,
                new_residual=residuals.new,
                nonfinite=bad,
            )
            residuals.encoded()
        terms = [(payload, self.share) for payload in payloads]
        if self._num_phases == 2:
            terms = [(self._reduce(payloads, [key[1] for key in keys], bad), 1.0)]
        for residuals in self._residuals:
            residuals.turn(0)
        return Sent(step, payloads, layout, terms, self._mean, bool(bad.item()))

    def _reduce(self, payloads: list[Tensor], keys: Sequence[int], bad: Tensor) -> Tensor:
        layout, mean, world = self.layout, self._mean, len(payloads)
        result = torch.zeros(mean.payload_bytes, dtype=torch.uint8)
        for rank in range(world):
            run = slice(rank * layout.run_bytes, (rank + 1) * layout.run_bytes)
            begin, end = layout.run_range(rank)
            runs = [payload[run] for payload in payloads]
            if mean != layout:
                part = result[rank * mean.run_bytes : (rank + 1) * mean.run_bytes]
                self._reencode(runs, part, end - begin, keys[rank], bad)
                continue
            residual, new_residual = self._residuals[rank].reduction(0)
            ops.reduce(
                torch.cat(runs),
                result[run],
                [self.share] * world,
                end - begin,
                *_form(layout),
                rng_key=keys[rank],
                index_begin=begin,
                residual=residual,
                new_residual=new_residual,
                nonfinite=bad,
            )
        return result

    def _reencode(
        self, runs: list[Tensor], result: Tensor, length: int, key: int, bad: Tensor
    ) -> None:
        """Reduce the payloads' runs to a mean on another wire."""
        values, weights = torch.empty(length), [self.share] * len(runs)
        ops.decode(runs, weights, [values], 0, length, *_form(self.layout))
        form = _form(self._mean)
        ops.encode(None, [values], result, 0, length, *form, rng_key=key, nonfinite=bad)


def _form(layout: Layout) -> tuple[int, str, int]:
    return layout.run_elements, layout.wire.name, layout.wire.block_size


# -------------------------------------------------------------------------------- SparseLoCo


NUM_KEPT = 64
DECAY = 0.95
INDEX_BITS, VALUE_BITS, TABLE_BITS = 12, 2, 4 * 32
_TILE, _CHUNK = 64, 4096
_LEVELS, _LEVEL_DISTANCE = 4, 1.5


class SparseLoCo:
    """SparseLoCo's compression (arXiv 2508.15706) of one replica, to compare the topk wires with.

    Each tensor is cut into chunks: a matrix into tiles of up to 64 x 64 elements, any other tensor
    into pieces of up to 4096. The k largest elements of a chunk are sent: an index of 12 bits and a
    value of 2 bits each. The values of a tensor share a table of four: a value goes to the nearest
    of four levels that are 1.5 standard deviations apart, and is decoded as the mean of its level's
    values. An element that is not sent stays in the residual, fp32, which is multiplied by 0.95 in
    each round.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._residuals = [torch.zeros_like(p, dtype=torch.float32) for p in params]
        self.sent_bits = 0

    def encode(self, differences: Sequence[Tensor]) -> list[Tensor]:
        """Return what the receivers decode for outer - local of each tensor, and count its bits."""
        decoded = []
        for residual, difference in zip(self._residuals, differences, strict=True):
            residual.mul_(DECAY).add_(difference)
            sent, num_values = compress(residual)
            self.sent_bits += num_values * (INDEX_BITS + VALUE_BITS) + TABLE_BITS
            residual.sub_(sent)
            decoded.append(sent)
        return decoded


def compress(x: Tensor) -> tuple[Tensor, int]:
    """Return ``x`` as it is decoded, with zeros where nothing was sent, and how many were sent."""
    chunks = _chunks(x)
    count = min(NUM_KEPT, chunks.shape[1])
    places = chunks.abs().topk(count, dim=1).indices
    values = quantised(chunks.gather(1, places))
    sent = torch.zeros_like(chunks).scatter_(1, places, values)
    return _joined(sent, x.shape), places.numel()


def quantised(values: Tensor) -> Tensor:
    """Replace each value by the mean of those in its level; one table for all values."""
    mean = values.mean()
    centred = values - mean
    deviation = centred.std() if values.numel() > 1 else torch.zeros(())
    step = _LEVEL_DISTANCE * deviation if deviation > 0 else torch.ones(())
    level = (centred / step).round().add_(_LEVELS // 2).clamp_(0, _LEVELS - 1).long()
    counts = torch.bincount(level.flatten(), minlength=_LEVELS)
    sums = torch.zeros(_LEVELS).index_add_(0, level.flatten(), centred.flatten())
    return (sums / counts.clamp(min=1))[level] + mean


def _divisor(length: int, limit: int) -> int:
    """Return the largest divisor of ``length`` up to ``limit``."""
    return next(n for n in range(min(length, limit), 0, -1) if length % n == 0)


def _chunks(x: Tensor) -> Tensor:
    """Cut a tensor into its chunks, [chunks, elements]."""
    if x.dim() != 2:
        return x.reshape(-1, _divisor(x.numel(), _CHUNK)).clone()
    rows, columns = (_divisor(length, _TILE) for length in x.shape)
    tiles = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
    return tiles.reshape(-1, rows * columns)


def _joined(chunks: Tensor, shape: torch.Size) -> Tensor:
    """Put chunks together to a tensor; the inverse of ``_chunks``."""
    if len(shape) != 2:
        return chunks.reshape(shape)
    rows, columns = (_divisor(length, _TILE) for length in shape)
    tiles = chunks.view(shape[0] // rows, shape[1] // columns, rows, columns)
    return tiles.transpose(1, 2).reshape(shape)


class BySparseLoCo:
    """The mean of SparseLoCo's compression, which all replicas gather."""

    def __init__(self, params: Params, num_replicas: int) -> None:
        self._replicas = [SparseLoCo(params) for _ in range(num_replicas)]
        self._sent_elements = 0

    def bits(self) -> float:
        return self._replicas[0].sent_bits / self._sent_elements

    def mean(self, outer: Tensor, replicas: Sequence[Params]) -> Tensor:
        """Return the mean of outer - local, fp32 [num_elements]."""
        total = torch.zeros_like(outer)
        self._sent_elements += outer.numel()
        for compression, params in zip(self._replicas, replicas, strict=True):
            starts = outer.split([p.numel() for p in params])
            local = zip(starts, params, strict=True)
            differences = [start.view_as(p) - p.detach() for start, p in local]
            decoded = compression.encode(differences)
            total += torch.cat([d.flatten() for d in decoded])
        return total / len(replicas)
