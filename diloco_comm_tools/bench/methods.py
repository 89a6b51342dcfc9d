"""The all-reduces that ``bench exchange`` compares, and the check of their results."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from diloco_comm import ops, reference
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.round import Header, Mean
from diloco_comm.ops.wire import ELEMENT_WIRES, Layout, WireFormat, mean_layout


def format_of(wire: str, block_size: int) -> WireFormat:
    """Return the format of a wire; ``block_size`` is ignored for wires with blocks of one size."""
    return WireFormat(wire, block_size) if wire in ELEMENT_WIRES else WireFormat(wire)


class GlooAllReduce:
    """The baseline: `torch.distributed.all_reduce` over gloo or another backend.

    In fp32 only the collective is timed, without the subtraction before and the division after the
    collective. In bf16 the two casts are timed too.
    """

    def __init__(self, wire: str = "fp32", backend: str = "gloo") -> None:
        self.wire = wire
        self.impl = backend
        self.device = "cuda" if backend == "nccl" else "cpu"

    def prepare(self, num_elements: int) -> None:
        self.tensor = torch.zeros(num_elements, device=self.device)
        size = num_elements if self.wire == "bf16" else 0
        self.half = torch.zeros(size, dtype=torch.bfloat16, device=self.device)

    def load(self, source: Tensor) -> None:
        self.tensor.copy_(source)

    def run(self) -> None:
        if self.wire == "fp32":
            dist.all_reduce(self.tensor)
            return
        self.half.copy_(self.tensor)
        dist.all_reduce(self.half)
        self.tensor.copy_(self.half)

    def result(self) -> Tensor:
        return (self.tensor / dist.get_world_size()).cpu()

    def sent_bytes(self) -> int:
        """Return the bytes that a ring all-reduce sends from one rank, by formula."""
        element_size = 4 if self.wire == "fp32" else 2
        world = dist.get_world_size()
        return 2 * (world - 1) * self.tensor.numel() * element_size // world


class DilocoAllReduce:
    """This library's exchange: pseudo-gradient in, averaged tensor out, in place."""

    def __init__(
        self,
        exchange: Exchange,
        wire: str,
        block_size: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self.exchange = exchange
        self.device = device
        self.format = format_of(wire, block_size)
        self.wire = wire
        self.dtype = dtype
        # The fastest implementation is the last of the list, and the default.
        self.impl = ops.resolve_impl(exchange.impl) or ops.available_impls()[-1]
        self.round = 0
        self.last: Mean | None = None

    def prepare(self, num_elements: int) -> None:
        self.buffers = self.exchange.buffers(num_elements, self.format)
        self.tensor = torch.zeros(num_elements, dtype=self.dtype, device=self.device)

    def load(self, source: Tensor) -> None:
        self.tensor.copy_(source)

    def run(self) -> None:
        header = self._header()
        work = self.exchange.start(self.buffers, outer=None, params=[self.tensor], header=header)
        self.last = work.collect(self.tensor, impl=self.exchange.impl)
        self.buffers.commit()
        self.round += 1

    def _header(self) -> Header:
        return Header(
            kind="all_reduce",
            layout_hash=self.tensor.numel(),
            fragment=0,
            round=self.round,
            sync_every=1,
            num_fragments=1,
            weight=1.0,
            outer_lr=0.0,
            inner_step=self.round,
        )

    def result(self) -> Tensor:
        return self.tensor.float().cpu()

    def sent_bytes(self) -> int:
        """Return the bytes that the engine sent to the peers in the last round."""
        assert self.last is not None
        return self.last.sent_bytes


def source_of(rank: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return Gaussian data of a rank, which any other rank can make too."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + num_elements)
    return torch.randn(num_elements, generator=generator).to(dtype).float()


def exact_mean(world: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return the mean over ranks in fp64."""
    total = torch.zeros(num_elements, dtype=torch.float64)
    for rank in range(world):
        total += source_of(rank, num_elements, dtype)
    return total / world


def defined_mean(sources: Sequence[Tensor], layout: Layout, round: int) -> Tensor:
    """Return the mean that the wire's definition prescribes, fp32, by the plain reference.

    Args:
        sources: What the ranks send, fp32 [num_elements] each.
        layout: The layout of the exchange that is compared.
        round: The number of the exchange, on which random signs depend.
    """
    terms = reference.all_reduce([[source] for source in sources], layout, round=round)
    layout = mean_layout(layout, len(sources))
    mean = torch.empty_like(sources[0])
    payloads, coefficients = zip(*terms, strict=True)
    form = (layout.run_elements, layout.wire.name, layout.wire.block_size)
    reference.decode(payloads, coefficients, [mean], 0, layout.num_elements, *form)
    return mean


def relative_l2(result: Tensor, exact: Tensor) -> float:
    """Return ||result - exact|| / ||exact||, in fp64."""
    return float(
        torch.linalg.vector_norm(result.double() - exact) / torch.linalg.vector_norm(exact)
    )


def count_wrong(result: Tensor, exact: Tensor, bound: Tensor) -> int:
    """Count elements further from the exact mean than the bound; all if the ranks differ."""
    if not same_on_all_ranks(result):
        return result.numel()
    error = (result.double() - exact).abs()
    return int((~(error <= bound)).sum())


def same_on_all_ranks(tensor: Tensor) -> bool:
    """Whether every rank holds the same bytes; a collective."""
    digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


def bus_factor(world: int) -> float:
    """Return busbw / algbw of an all-reduce, as derived on nccl-tests' page PERFORMANCE."""
    return 2 * (world - 1) / world if world > 1 else math.nan
