"""Time each operator against *floors*: plain loops that move the same bytes through memory.

A ratio is taken in each round, and the median of the ratios is reported: on a shared machine ratios
vary less than times. ``roofline`` adds plain PyTorch and ``torch.compile``.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.operators.kernels_gpu_cases import (
    NUM_RUNS,
    Buffers,
    Case,
    adam_case,
    decode_case,
    encode_case,
    formats,
    plain_case,
    reduce_case,
    step_case,
)
from benchmarks.support import common
from diloco_comm.ops.wire import ROTATED_WIRES, SPARSE_WIRES, Layout

Run = Callable[[], object]
Seconds = dict[str, list[float]]

# Wires with a code for a block as a whole; 4096 elements are whole blocks of all of them.
BLOCK_WIRES = (*ROTATED_WIRES, *SPARSE_WIRES)
_WHOLE_BLOCKS = 4096
PATTERN = 1 << 20  # elements after which the random data repeat
# Buffers exactly 2^29 bytes apart were read at two thirds of the speed on one processor, and
# encoded at half the speed. Tensors of a model do not have such distances.
_STAGGER_BYTES = 260 << 10


def buffer(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return zeroed memory on huge pages, touched once: fresh pages cost more than any kernel."""
    num_bytes = num_elements * dtype.itemsize + _STAGGER_BYTES
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[:num_elements].zero_()


class Data(Buffers):
    """The buffers on huge pages: about nine times ``size_bytes`` in all.

    Args:
        size_bytes: Bytes of the fragment's fp32 parameters.
        impl: Implementation of the operators, "" for the default.
    """

    def __init__(self, size_bytes: int, impl: str) -> None:
        multiple = NUM_RUNS * _WHOLE_BLOCKS
        self.num_elements = n = size_bytes // 4 // multiple * multiple
        self.impl = impl
        rng = torch.Generator().manual_seed(1)

        def fp32(scale: float) -> Tensor:
            pattern = torch.randn(min(n, PATTERN), generator=rng) * scale
            made = buffer(n, torch.float32)
            for part in made.split(PATTERN):
                part.copy_(pattern[: part.numel()])
            return made

        self.outer, self.params = fp32(1.0), fp32(1.0)
        self.momentum, self.residual = fp32(1e-3), fp32(1e-4)
        # Adam's second moment is any fp32 buffer without a negative number.
        self.second = self.residual.abs_()
        self.rest = buffer(n, torch.float32)
        self.bf16 = buffer(n, torch.bfloat16)
        self.codes = buffer(n, torch.int8)
        self.layouts = {form.name: Layout.plan(n, NUM_RUNS, 1, form) for form in formats()}
        self.scratch = buffer(self.layouts["fp32"].payload_bytes, torch.uint8)
        self.count = None
        self.payloads = {}
        for wire in ("int8", "int4", "fp8_e4m3", *BLOCK_WIRES):
            case = encode_case(self, wire, "one")
            case.run(impl)
            self.payloads[wire] = buffer(case.result.numel(), torch.uint8).copy_(case.result)
        self.norms = torch.zeros(2, dtype=torch.float64)
        self.sums = torch.zeros(2, dtype=torch.int64)


@dataclass(frozen=True)
class Row:
    """One line of the table: the operator on one tensor, and the bytes that it must move."""

    operator: str
    wire: str
    run: Run
    traffic_bytes: float  # for each element
    floor: str = ""  # common beginning of the names of the floors to compare with
    plain: str = ""  # the plain PyTorch twin

    @property
    def name(self) -> str:
        return f"{self.operator} {self.wire}".strip()


def row_of(data: Data, case: Case, floor: str = "", plain: str = "", more: str = "") -> Row:
    """Return the row of a call; ``more`` ends its name."""
    run = functools.partial(case.run, data.impl)
    return Row(case.operator + more, case.wire, run, case.traffic_bytes, floor, plain)


def block_rows(data: Data, *, bars_only: bool) -> list[Row]:
    """List the operators on wires with a code for a block; the bars need some of them."""
    found = []
    for wire in BLOCK_WIRES:
        if wire in SPARSE_WIRES:
            found.append(row_of(data, encode_case(data, wire, "one", " +feedback"), "feedback"))
        else:
            found.append(row_of(data, encode_case(data, wire, "one"), "read2"))
            found.append(row_of(data, step_case(data, wire, "one"), "outer_step"))
        if not bars_only:
            found.append(row_of(data, decode_case(data, wire, "one")))
            if not data.layouts[wire].wire.is_gathered:
                found.append(row_of(data, reduce_case(data, wire)))
    barred = {"int2r", "int1r", "sub8", "topk64"}
    return [row for row in found if not bars_only or row.wire in barred]


def rows(data: Data, *, bars_only: bool) -> list[Row]:
    """List the operators to time, first the operators of the bars."""

    def encode(wire: str, kind: str = "", *names: str, **options: Any) -> Row:
        return row_of(data, encode_case(data, wire, "one", kind, **options), *names)

    def stochastic(wire: str) -> Row:
        return encode(wire, " stochastic", "read2", stochastic=True)

    def step(wire: str, *names: str, **options: Any) -> Row:
        return row_of(data, step_case(data, wire, "one", **options), *names)

    found = [
        encode("int8", "", "read2", "encode"),
        encode("int4", "", "read2"),
        encode("fp8_e4m3", "", "read2"),
        stochastic("int8"),
        encode("int8", " +feedback", "feedback"),
        row_of(data, decode_case(data, "int8", "one"), "decode", "decode"),
        row_of(data, reduce_case(data, "int8"), "", "reduce"),
        step("int8", "outer_step", "outer_step"),
    ]
    if bars_only:
        return found
    found += [encode(w, "", "read2") for w in ("fp8_e5m2", "e3m0", "fp16", "bf16", "fp32")]
    found += [stochastic(wire) for wire in ("int4", "fp8_e4m3", "e3m0", "bf16")]
    short = [buffer(data.num_elements, torch.bfloat16) for _ in range(2)]
    return [
        *found,
        encode("int8", " bf16 params", params=data.bf16),
        encode("int8", " +bf16 feedback", residuals=short),
        *(row_of(data, decode_case(data, wire, "one")) for wire in ("int4", "fp8_e4m3")),
        *(row_of(data, reduce_case(data, wire)) for wire in ("int4", "fp8_e4m3")),
        step("int4", "outer_step"),
        step("int8", alpha=0.5),
        step("int8", "", "", " bf16 params", params=data.bf16),
        step("int8", num_terms=3),
        row_of(data, adam_case(data, "int8", "one")),
        *(row_of(data, plain_case(data, name, "one")) for name in ("merge", "norms", "digest")),
        *block_rows(data, bars_only=False),
    ]


def floors(data: Data) -> dict[str, Run]:
    """Return the loops of csrc/codec/bench/floors.h, with and without non-temporal stores."""
    outer, params, momentum = data.outer, data.params, data.momentum
    arguments = {
        "memcpy": [outer, data.rest],
        "read2": [outer, params],
        "decode": [data.codes, data.rest],
        "encode": [outer, params, data.codes],
        "feedback": [outer, params, data.residual, data.rest, data.codes],
        "outer_step": [outer, momentum, params, data.codes],
        "arrival": [outer, momentum, data.codes],
    }
    found: dict[str, Run] = {}
    for name in torch.ops.diloco_comm._floors():
        buffers = next(b for start, b in arguments.items() if name.startswith(start))
        found[name] = functools.partial(torch.ops.diloco_comm._floor, name, buffers)
    return found


def best_floor(seconds: Seconds, start: str) -> list[float]:
    """Return the seconds of a floor's fastest variant, by the median."""
    variants = [times for name, times in seconds.items() if name.startswith(f"floor {start}")]
    return min(variants, key=lambda times: common.summary(times)["median"])


# Bytes that a floor moves for each element.
FLOOR_BYTES = {
    "memcpy": 8,
    "read2": 8,
    "decode": 5,
    "encode": 9,
    "feedback": 17,
    "outer_step": 21,
    "arrival": 17,
}


def floor_rows(seconds: Seconds) -> list[Row]:
    return [
        Row(name, "", lambda: None, next(b for k, b in FLOOR_BYTES.items() if k in name))
        for name in seconds
        if name.startswith("floor")
    ]
