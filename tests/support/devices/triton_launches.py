"""The launches of Triton's kernels by real calls, recorded with CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from diloco_comm.kernels import operators
from diloco_comm.ops import implementations
from diloco_comm.ops.wire import (
    BLOCK_SIZES,
    ELEMENT_WIRES,
    ROTATED_WIRES,
    SPARSE_WIRES,
    Layout,
    WireFormat,
)

N = 1 << 16
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclass
class Launch:
    """A kernel and the arguments that an operator launches it with."""

    label: str
    operator: str
    kernel: Any
    args: tuple
    meta: dict


_recorded: list[Launch] = []


def _record(name: str, kernel: Any, num_programs: int, device: object, *args, **meta) -> None:
    _recorded.append(Launch("", name, kernel, args, meta))


def launches(label: str, name: str, *args, **kwargs) -> Iterator[Launch]:
    """Yield what one call of an operator launches."""
    operators.launch, real = _record, operators.launch
    _recorded.clear()
    try:
        schema = getattr(torch.ops.diloco_comm, name).default._schema
        implementations._kernel(name, schema.arguments, "cuda")(*args, **kwargs)
    finally:
        operators.launch = real
    for launch in _recorded:
        launch.label = f"{launch.kernel.__name__.strip('_')} {label}"
        yield launch


def _parameters(*dtypes: torch.dtype) -> list[Tensor]:
    """One tensor needs no tables; two of one dtype do."""
    parts = torch.zeros(N).tensor_split(len(dtypes))
    return [part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True)]


class Cases:
    """Calls of every operator with one wire and block size."""

    def __init__(self, wire: str, block_size: int | None = None) -> None:
        layout = Layout.plan(N, 1, 1, WireFormat(wire, block_size))
        self.name = f"{wire}/{layout.wire.block_size}"
        self.form = (layout.run_elements, wire, layout.wire.block_size)
        self.payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
        self.outer, self.momentum, self.second = torch.zeros(3, N)
        self.count = torch.zeros(1, dtype=torch.int64)

    def encode(
        self,
        *dtypes: torch.dtype,
        stochastic: bool = False,
        residual: torch.dtype | None = None,
        with_outer: bool = True,
    ) -> Iterator[Launch]:
        params = _parameters(*(dtypes or (FP32,)))
        options: dict[str, Any] = {"stochastic": stochastic, "rng_key": 1 << 40}
        if residual is not None:
            error = torch.zeros(N, dtype=residual)
            options.update(residual=error, new_residual=error)
        label = f"{self.name} {_names(dtypes)} {stochastic=} {residual=} {with_outer=}"
        yield from launches(
            label, "encode", self.outer if with_outer else None, params, self.payload, 0, N,
            *self.form, nonfinite=self.count, **options,
        )  # fmt: skip

    def reduce(
        self,
        num_ranks: int,
        stochastic: bool = False,
        residual: torch.dtype | None = None,
        max_blocks: int = 0,
    ) -> Iterator[Launch]:
        error = None if residual is None else torch.zeros(N, dtype=residual)
        received = self.payload.repeat(num_ranks)
        yield from launches(
            f"{self.name} {num_ranks=} {stochastic=} {residual=} {max_blocks=}", "reduce",
            received, self.payload, [1.0] * num_ranks, N, *self.form, stochastic, 1 << 40, 0,
            error, error, self.count, max_blocks,
        )  # fmt: skip

    def step(
        self, optimizer: str, *dtypes: torch.dtype, terms: int = 1, alpha: float = 0.0
    ) -> Iterator[Launch]:
        params = _parameters(*(dtypes or (FP32,)))
        span = ([self.payload] * terms, [1.0] * terms, 0, N, *self.form)
        label = f"{self.name} {optimizer} {_names(dtypes)} {terms=} {alpha=}"
        if optimizer == "adam":
            yield from launches(
                label, "outer_step_adam", self.outer, self.momentum, self.second, params, *span,
                lr=0.3, beta1=0.9, beta2=0.95, eps=0.1, step=1, alpha=alpha, verdict=self.count,
            )  # fmt: skip
        else:
            yield from launches(
                label, "outer_step", self.outer, self.momentum, params, *span, optimizer,
                lr=0.7, mu=0.9, alpha=alpha, verdict=self.count,
            )  # fmt: skip

    def delayed(self, first: bool, last: bool, behind: float = 0.0) -> Iterator[Launch]:
        yield from launches(
            f"{self.name} {first=} {last=} {behind=}", "outer_step_delayed",
            self.outer, self.momentum, self.second, [self.payload], [1.0], 0, N, *self.form,
            lr=0.7, mu=0.9, ahead=0.5, behind=behind, first=first, last=last, verdict=self.count,
        )  # fmt: skip

    def decode(self, *dtypes: torch.dtype, terms: int = 1) -> Iterator[Launch]:
        outs = _parameters(*(dtypes or (FP32,)))
        yield from launches(
            f"{self.name} {_names(dtypes)} {terms=}", "decode",
            [self.payload] * terms, [1.0] * terms, outs, 0, N, *self.form,
        )  # fmt: skip

    def plain(self, *dtypes: torch.dtype, alpha: float = 0.0) -> Iterator[Launch]:
        params = _parameters(*(dtypes or (FP32,)))
        label = _names(dtypes)
        yield from launches(f"{label} {alpha=}", "merge", self.outer, params, alpha)
        out = torch.zeros(2, dtype=torch.float64)
        yield from launches(label, "norms", self.outer, params, out)

    def digest(self, max_blocks: int = 0) -> Iterator[Launch]:
        """At each alignment of the data."""
        data, sums = torch.zeros(N, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
        for shift in (0, 4, 2, 1):
            label = f"{shift=} {max_blocks=}"
            yield from launches(label, "digest", data[shift:], sums, 1 << 40, max_blocks)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return "+".join(str(dtype).removeprefix("torch.") for dtype in dtypes or (FP32,))


def each_kernel() -> Iterator[Launch]:
    """Every kernel once, by the operators' defaults."""
    case = Cases("int8", 256)
    yield from case.encode()
    yield from case.reduce(4)
    yield from case.step("nesterov")
    yield from case.delayed(False, True)
    yield from case.decode()
    yield from case.plain(FP32)
    yield from case.digest()


def representative() -> Iterator[Launch]:
    """The defaults of every operator, and each of their options once."""
    case = Cases("int8", 256)
    yield from case.encode()
    yield from case.encode(BF16, BF16)
    yield from case.encode(FP32, BF16, FP16, stochastic=True, residual=FP32)
    yield from case.reduce(4)
    yield from case.step("nesterov")
    yield from case.step("nesterov", BF16, BF16)
    yield from case.step("nesterov", FP32, BF16, FP16, terms=3, alpha=0.5)
    yield from case.step("adam", BF16)
    yield from case.delayed(False, True, behind=0.1)
    yield from case.decode()
    yield from case.plain(FP32, BF16, FP16, alpha=0.5)
    yield from case.digest()
    yield from case.reduce(4, max_blocks=1)
    yield from case.digest(max_blocks=1)
    yield from Cases("int4", 256).encode(BF16)
    yield from Cases("e3m0", 32).encode(stochastic=True)
    yield from Cases("fp8_e4m3", 1024).encode(residual=BF16)
    yield from Cases("fp16", 64).step("heavy_ball", FP16)
    yield from Cases("fp8_e5m2", 128).reduce(9)
    for wire in ("int2r", "sub8", "topk64"):
        yield from Cases(wire).encode(residual=FP32)
        yield from Cases(wire).step("nesterov", terms=2)
    yield from Cases("int2r").reduce(4)
    yield from Cases("sub2").decode()
    yield from Cases("topk256").decode()


def everything() -> Iterator[Launch]:
    """Every wire with every block size and rounding, and every option of every operator."""
    for wire in ELEMENT_WIRES:
        for block_size in BLOCK_SIZES:
            case = Cases(wire, block_size)
            yield from case.encode()
            yield from case.encode(FP32, BF16, FP16, stochastic=True, residual=FP32)
            yield from case.reduce(4)
            yield from case.reduce(4, max_blocks=1)
            yield from case.step("nesterov", FP32, BF16, FP16, terms=3, alpha=0.5)
        case = Cases(wire, 256)
        yield from case.encode(stochastic=True)
        for max_blocks in (0, 1):
            yield from case.reduce(9, stochastic=True, residual=BF16, max_blocks=max_blocks)
        yield from case.step("nesterov")
        yield from case.step("adam", BF16)
        yield from case.decode()
        yield from case.delayed(False, False)
        yield from case.delayed(False, True)
    for wire in ROTATED_WIRES + SPARSE_WIRES:
        case = Cases(wire)
        yield from case.encode()
        yield from case.encode(FP32, BF16, FP16, residual=FP32)
        for ranks, max_blocks in ((4, 0), (4, 1), (9, 0)):
            yield from case.reduce(ranks, residual=BF16, max_blocks=max_blocks)
        yield from case.step("nesterov", FP32, BF16, FP16, terms=3, alpha=0.5)
        yield from case.step("adam", BF16)
        yield from case.decode()
        yield from case.delayed(False, True)
    yield from _all_dtypes(Cases("int8", 256))
    for max_blocks in (0, 1):
        yield from Cases("int8", 256).digest(max_blocks)
    case = Cases("int4", 256)
    for count in range(2, 10):
        yield from case.reduce(count, residual=FP32)
        yield from case.step("nesterov", terms=count)
        yield from case.decode(BF16, terms=count)
    for first in (False, True):
        yield from case.delayed(first, True, behind=0.1)


def _all_dtypes(case: Cases) -> Iterator[Launch]:
    """One tensor, two of one dtype, and every set of dtypes."""
    dtypes = (FP32, BF16, FP16)
    sets = [part for count in (1, 2, 3) for part in combinations(dtypes, count)]
    for chosen in sets + [(dtype, dtype) for dtype in dtypes]:
        yield from case.encode(*chosen, residual=BF16)
        yield from case.encode(*chosen, with_outer=False)
        for optimizer in ("sgd", "heavy_ball", "nesterov", "adam"):
            yield from case.step(optimizer, *chosen, alpha=0.5 * (optimizer != "sgd"))
        for alpha in (0.0, 0.5):
            yield from case.plain(*chosen, alpha=alpha)
