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

from benchmarks.support import common
from diloco_comm import ops
from diloco_comm.ops.wire import ELEMENT_WIRES, ROTATED_WIRES, SPARSE_WIRES, Layout, WireFormat

Run = Callable[[], object]
Seconds = dict[str, list[float]]

NUM_RUNS = 4  # the shards that `reduce` sums
BLOCK = 256  # elements that share a scale, in the wires where this can be chosen
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


class Data:
    """The buffers of one fragment: about nine times ``size_bytes`` in all.

    Args:
        size_bytes: Bytes of the fragment's fp32 parameters.
        impl: Implementation of the operators, "" for the default.
    """

    def __init__(self, size_bytes: int, impl: str) -> None:
        multiple = NUM_RUNS * _WHOLE_BLOCKS
        self.num_elements = n = size_bytes // 4 // multiple * multiple
        self.impl = impl
        names = ("outer", "params", "momentum", "residual", "rest")
        self.fp32 = {name: buffer(n, torch.float32) for name in names}
        rng = torch.Generator().manual_seed(1)
        for i, name in enumerate(names[:4]):
            pattern = torch.randn(min(n, PATTERN), generator=rng) * (1.0, 1.0, 1e-3, 1e-4)[i]
            for part in self.fp32[name].split(PATTERN):
                part.copy_(pattern[: part.numel()])
        self.bf16 = buffer(n, torch.bfloat16)
        self.codes = buffer(n, torch.int8)
        formats = [WireFormat(wire, BLOCK) for wire in ELEMENT_WIRES]
        formats += [WireFormat(wire) for wire in BLOCK_WIRES]
        self.layouts = {wire.name: Layout.plan(n, NUM_RUNS, 1, wire) for wire in formats}
        largest = self.layouts["fp32"].payload_bytes
        self.scratch = buffer(largest, torch.uint8)
        self.payloads = {w: self._payload(w) for w in ("int8", "int4", "fp8_e4m3", *BLOCK_WIRES)}
        self.norms = torch.zeros(2, dtype=torch.float64)
        self.sums = torch.zeros(2, dtype=torch.int64)

    def _payload(self, wire: str) -> Tensor:
        payload = buffer(self.layouts[wire].payload_bytes, torch.uint8)
        encode(self, wire, payload)()
        return payload

    def form(self, wire: str) -> tuple[int, str, int]:
        layout = self.layouts[wire]
        return layout.run_elements, wire, layout.wire.block_size

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["fp32"][name]
        except KeyError:
            raise AttributeError(name) from None


# The timed functions are closures over the buffers; a row says how many bytes they must move.


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    operator: str
    wire: str
    run: Run
    traffic_bytes: float  # for each element
    floor: str = ""  # common beginning of the names of the floors to compare with
    plain: str = ""  # the plain PyTorch twin

    @property
    def name(self) -> str:
        return f"{self.operator} {self.wire}".strip()


def encode(data: Data, wire: str, payload: Tensor | None = None, **options: Any) -> Run:
    """Encode outer - params; ``params`` and ``residual`` in the options replace the fp32 ones."""
    target = data.scratch[: data.layouts[wire].payload_bytes] if payload is None else payload
    params = [options.pop("params", data.fp32["params"])]
    outer, n, form = data.fp32["outer"], data.num_elements, data.form(wire)
    return lambda: ops.encode(outer, params, target, 0, n, *form, **options, impl=data.impl)


def outer_step(data: Data, wire: str, num_terms: int = 1, **options: Any) -> Run:
    """Take a Nesterov step and write the parameters."""
    params = [options.pop("params", data.fp32["params"])]
    payloads, n, form = [data.payloads[wire]] * num_terms, data.num_elements, data.form(wire)
    coefficients = [1.0, 0.25, -0.25][:num_terms]
    options = {"lr": 0.7, "mu": 0.9} | options
    return lambda: ops.outer_step(
        data.outer, data.momentum, params, payloads, coefficients, 0, n, *form, "nesterov",
        impl=data.impl, **options,
    )  # fmt: skip


def adam_step(data: Data, wire: str) -> Run:
    second = data.residual  # any fp32 buffer; the arithmetic needs it to be positive
    second.abs_()
    options: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 0.1, "step": 3}
    args = ([data.payloads[wire]], [1.0], 0, data.num_elements, *data.form(wire))
    return lambda: ops.outer_step_adam(
        data.outer, data.momentum, second, [data.params], *args, impl=data.impl, **options
    )


def decode(data: Data, wire: str) -> Run:
    args = ([data.payloads[wire]], [1.0], [data.rest], 0, data.num_elements, *data.form(wire))
    return lambda: ops.decode(*args, impl=data.impl)


def reduce(data: Data, wire: str) -> Run:
    """Average the payload's four runs as if they were four ranks' shards of one run."""
    layout, form = data.layouts[wire], data.form(wire)
    result = data.scratch[: layout.run_bytes]
    args = (data.payloads[wire], result, [1 / NUM_RUNS] * NUM_RUNS, layout.run_elements, *form)
    return lambda: ops.reduce(*args, impl=data.impl)


def block_rows(data: Data, *, bars_only: bool) -> list[Row]:
    """List the operators on wires with a code for a block; the bars need some of them."""
    feedback = {"residual": data.residual, "new_residual": data.rest}
    found = []
    for wire, layout in data.layouts.items():
        if wire not in BLOCK_WIRES:
            continue
        coded = layout.wire.bits_per_element / 8
        steps = Row("outer_step", wire, outer_step(data, wire), 20 + coded, "outer_step")
        if wire in SPARSE_WIRES:
            run = encode(data, wire, **feedback)
            found.append(Row("encode +feedback", wire, run, 16 + coded, "feedback"))
        else:
            found += [Row("encode", wire, encode(data, wire), 8 + coded, "read2"), steps]
        if not bars_only:
            found.append(Row("decode", wire, decode(data, wire), 4 + coded))
            if not layout.wire.is_gathered:
                traffic = coded + coded / NUM_RUNS
                found.append(Row("reduce of 4", wire, reduce(data, wire), traffic))
    barred = {"int2r", "int1r", "sub8", "topk64"}
    return [row for row in found if not bars_only or row.wire in barred]


def rows(data: Data, *, bars_only: bool) -> list[Row]:
    """List the operators to time, first the operators of the bars."""
    feedback = {"residual": data.residual, "new_residual": data.rest}
    wire_bytes = {w: WireFormat(w, BLOCK).bits_per_element / 8 for w in ELEMENT_WIRES}
    w8, w4 = wire_bytes["int8"], wire_bytes["int4"]
    found = [
        Row("encode", "int8", encode(data, "int8"), 8 + w8, "read2", "encode"),
        Row("encode", "int4", encode(data, "int4"), 8 + w4, "read2"),
        Row("encode", "fp8_e4m3", encode(data, "fp8_e4m3"), 8 + w8, "read2"),
        Row("encode stochastic", "int8", encode(data, "int8", stochastic=True), 8 + w8, "read2"),
        Row("encode +feedback", "int8", encode(data, "int8", **feedback), 16 + w8, "feedback"),
        Row("decode", "int8", decode(data, "int8"), 4 + w8, "decode", "decode"),
        Row("reduce of 4", "int8", reduce(data, "int8"), w8 + w8 / NUM_RUNS, plain="reduce"),
        Row("outer_step", "int8", outer_step(data, "int8"), 20 + w8, "outer_step", "outer_step"),
    ]
    if bars_only:
        return found
    half: dict[str, Any] = {"params": data.bf16}
    for wire in ("fp8_e5m2", "e3m0", "fp16", "bf16", "fp32"):
        found.append(Row("encode", wire, encode(data, wire), 8 + wire_bytes[wire], "read2"))
    for wire in ("int4", "fp8_e4m3", "e3m0", "bf16"):
        run = encode(data, wire, stochastic=True)
        found.append(Row("encode stochastic", wire, run, 8 + wire_bytes[wire], "read2"))
    short = {"residual": buffer(data.num_elements, torch.bfloat16)}
    short["new_residual"] = buffer(data.num_elements, torch.bfloat16)
    return [
        *found,
        Row("encode bf16 params", "int8", encode(data, "int8", **half), 6 + w8),
        Row("encode +bf16 feedback", "int8", encode(data, "int8", **short), 12 + w8),
        Row("decode", "int4", decode(data, "int4"), 4 + w4),
        Row("decode", "fp8_e4m3", decode(data, "fp8_e4m3"), 4 + w8),
        Row("reduce of 4", "int4", reduce(data, "int4"), w4 + w4 / NUM_RUNS),
        Row("reduce of 4", "fp8_e4m3", reduce(data, "fp8_e4m3"), w8 + w8 / NUM_RUNS),
        Row("outer_step", "int4", outer_step(data, "int4"), 20 + w4, "outer_step"),
        Row("outer_step alpha=0.5", "int8", outer_step(data, "int8", alpha=0.5), 24 + w8),
        Row("outer_step bf16 params", "int8", outer_step(data, "int8", **half), 18 + w8),
        Row("outer_step 3 terms", "int8", outer_step(data, "int8", 3), 20 + 3 * w8),
        Row("outer_step adam", "int8", adam_step(data, "int8"), 28 + w8),
        Row("merge", "", lambda: ops.merge(data.outer, [data.rest], impl=data.impl), 8),
        Row(
            "norms", "", lambda: ops.norms(data.outer, [data.params], data.norms, impl=data.impl), 8
        ),
        Row("digest", "", lambda: ops.digest(data.outer, data.sums, impl=data.impl), 4),
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
