"""Find payloads that no encoder makes: infinities, NaN, codes out of range.

The functions check the scales, and the codes for bit patterns that an encoder never writes. They
decode sparse payloads alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...ops.reference import decode_run
from ...ops.reference_rotation import largest_scale
from ...ops.wire import SCALE_BYTES, Layout, WireFormat
from .payloads import Payload

HUGE = 2.0**126
_SMALLEST_BITS = 0x0080  # 2^-126, as bf16
_INFINITY_BITS = 0x7F80


def find_garbage(payload: Payload, layout: Layout) -> str:
    """Say what is wrong with a payload, uint8 [payload_bytes]; "" if nothing is."""
    run_bytes = layout.run_bytes
    for run in range(layout.num_runs):
        begin, end = layout.run_range(run)
        if begin == end:
            continue
        found = find_run_garbage(
            payload[run * run_bytes : (run + 1) * run_bytes], layout, end - begin
        )
        if found:
            return found
    return ""


def find_run_garbage(run: Tensor, layout: Layout, count: int) -> str:
    """Say what is wrong with the first ``count`` elements of a run, uint8 [run_bytes]."""
    wire = layout.wire
    offset = wire.code_offset(layout.run_elements)
    if wire.has_scales:
        num_blocks = -(-count // wire.block_size)
        # Read as integers, the bits of positive finite bf16 numbers sort like the numbers.
        begin = wire.scale_offset
        bits = run[begin : begin + SCALE_BYTES * num_blocks].numpy().view(np.int16)
        # A null block of a wire without a code for each element has the scale zero.
        may_be_null = not wire.has_element_codes
        is_made = (bits >= _SMALLEST_BITS) | (bits == 0) if may_be_null else bits > 0
        if not is_made.all() or bits.max() >= _INFINITY_BITS:
            return "a scale is not a finite positive number"
        if bits.max() > _largest_scale_bits(wire):
            return "a scale is larger than any that an encoder makes"
    if wire.is_rotated:
        return ""  # every code is one that an encoder may make
    if wire.is_sparse:
        is_sound = not bool(decode_run(run, layout.run_elements, wire, count).isnan().any())
        return "" if is_sound else "the indices of a block are not those of its largest elements"
    codes = run[offset : offset + wire.code_bytes(count)]
    return _bad_codes(codes, wire.name)


def _largest_scale_bits(wire: WireFormat) -> int:
    """Return the bf16 bits of the largest scale that an encoder makes, or a little more."""
    if not wire.has_element_codes:
        return int(np.float32(largest_scale(wire)).view(np.uint32)) >> 16
    # Here the scale of a block is rounded up.
    return (int(np.float32(HUGE / wire.qmax).view(np.uint32)) + 0xFFFF) >> 16


def _bad_codes(codes: Tensor, wire: str) -> str:
    if wire == "int8":
        return "a code is -128" if codes.numpy().view(np.int8).min() == -128 else ""
    if wire == "int4":
        return "a code is -8" if bool(_nibble(codes, 8).any()) else ""
    if wire == "e3m0":
        return "a code is minus zero" if bool(_nibble(codes, 8).any()) else ""
    if wire == "fp8_e4m3":
        return "a code is NaN" if bool(((codes & 0x7F) == 0x7F).any()) else ""
    if wire == "fp8_e5m2":
        return "a code is not finite" if bool(((codes & 0x7F) >= 0x7C).any()) else ""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[wire]
    low, high = torch.aminmax(codes.view(dtype))
    is_good = bool((low >= -HUGE) & (high <= HUGE)) if wire != "fp16" else _is_finite(low, high)
    return "" if is_good else "a value is not finite"


def _is_finite(low: Tensor, high: Tensor) -> bool:
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _nibble(codes: Tensor, value: int) -> Tensor:
    return ((codes & 0x0F) == value) | ((codes >> 4) == value)
