"""Turn fp32 values into the bytes of a run and back: the bits of every wire format, in torch.

The same definition as ``csrc/wire``, written to be read. The functions rely on sub-normals being
kept, which the operators in ``reference.py`` ensure.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .wire import WireFormat

HUGE = 2.0**126  # a larger magnitude is refused: its scale's inverse would be sub-normal
SMALLEST_SCALE = 2.0**-126


def philox(counter: Sequence[Tensor], key: int, rounds: int = 7) -> list[Tensor]:
    """Return the four 32-bit words (held in int64) of Philox-4x32 for four-word counters.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key & mask, (key >> 32) & mask
    for _ in range(rounds):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & mask) ^ c1 ^ k0,
            product1 & mask,
            ((product0 >> 32) & mask) ^ c3 ^ k1,
            product0 & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [c0, c1, c2, c3]


def random_bits(first_index: int, count: int, key: int) -> Tensor:
    """Return the 16 random bits of elements first_index, first_index + 1, ... of a fragment."""
    index = torch.arange(first_index, first_index + count, dtype=torch.int64)
    block = index >> 4
    zero = torch.zeros_like(block)
    words = torch.stack(philox([block & 0xFFFFFFFF, block >> 32, zero, zero], key))
    word = words.gather(0, ((index >> 2) & 3).unsqueeze(0)).squeeze(0)
    # An element's high byte is its own; its low byte is its neighbour's (index ^ 1) high byte.
    own = (word >> (8 * (index & 3))) & 0xFF
    return (own << 8) | ((word >> (8 * ((index & 3) ^ 1))) & 0xFF)


# Mantissa bits, and the exponent of the smallest normal number, of the floating-point codes. Below
# that number codes are equally spaced down to zero; e3m0 has only 0 below its 2^-2.
_GRIDS = {
    "bf16": (7, -126),
    "fp16": (10, -14),
    "fp8_e4m3": (3, -6),
    "fp8_e5m2": (2, -14),
    "e3m0": (0, -2),
}
_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
_E3M0 = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]


def _round_nearest(y: Tensor, wire: WireFormat) -> Tensor:
    """Return the fp32 values of the nearest codes; ties go to the even code."""
    if wire.name in ("int8", "int4"):
        return y.round().clamp(-wire.qmax, wire.qmax)
    if wire.name == "e3m0":
        a = y.abs()
        field = (a > 0.125).long() + (a >= 0.375) + (a > 0.75) + (a >= 1.5)
        field = field + (a > 3) + (a >= 6) + (a > 12)
        return torch.tensor(_E3M0, dtype=torch.float32)[field].copysign(y)
    if wire.has_scales:
        y = y.clamp(-wire.qmax, wire.qmax)
    return y.to(_DTYPES[wire.name]).float()


def _round_stochastic(y: Tensor, wire: WireFormat, bits: Tensor) -> Tensor:
    """Return the fp32 values of one of the two codes around each element.

    Their mean is y, up to the resolution of the random bits. The upper one is taken when the
    distance from the lower one plus a uniform number in [0, 1) made of 16 random bits (int8, int4:
    14) reaches 1. ``csrc/wire/stochastic.h`` says the same with integers.
    """
    if wire.name == "fp32":
        return y
    if wire.name in ("int8", "int4"):
        nearby = (y + 768.0) - 768.0  # a multiple of 2^-14, the last bit of numbers around 768
        return (nearby + (bits >> 2).float() * 2.0**-14).floor()
    uniform = (2 * bits + 1).float() * 2.0**-17
    mantissa_bits, min_exponent = _GRIDS[wire.name]
    dropped = 23 - mantissa_bits
    if dropped <= 16:
        # Take only as many random bits as the code drops from fp32's mantissa: a value that is
        # itself a code stays as it is.
        uniform = (bits >> (16 - dropped)).float() * 2.0**-dropped
    a = y.abs().double()
    exponent = (torch.frexp(a).exponent - 1).clamp(min=min_exponent)
    step = torch.ldexp(torch.ones_like(a), exponent - mantissa_bits)
    below = (a / step).floor()
    rounded = (below + (a / step - below + uniform >= 1)) * step
    if wire.name != "bf16":
        # Below the smallest normal code the definition has one fp32 addition, with its rounding.
        if wire.name == "fp16":
            uniform = uniform + 2.0**-14
        grid = y.abs() * 2.0 ** (mantissa_bits - min_exponent)
        tiny = (grid + uniform).floor() * 2.0 ** (min_exponent - mantissa_bits)
        rounded = torch.where(grid < 2.0**mantissa_bits, tiny.double(), rounded)
    if wire.has_scales:
        rounded = rounded.clamp(max=wire.qmax)
    return rounded.float().copysign(y)


def _to_bytes(values: Tensor, wire: WireFormat) -> Tensor:
    """Return the bytes of code values; an odd 4-bit tail leaves the high nibble 0."""
    if wire.name in _DTYPES:
        return values.to(_DTYPES[wire.name]).view(torch.uint8)
    if wire.name == "int4":
        codes = values.long() & 15
    else:
        codes = torch.searchsorted(torch.tensor(_E3M0, dtype=torch.float32), values.abs())
        codes = codes + 8 * ((values < 0) & (codes > 0))
    codes = torch.nn.functional.pad(codes, (0, codes.numel() % 2))
    return (codes[0::2] | (codes[1::2] << 4)).to(torch.uint8)


def _from_bytes(codes: Tensor, wire: WireFormat, count: int) -> Tensor:
    """Return the fp32 values of the first ``count`` codes, whatever their bits."""
    if wire.name in _DTYPES:
        num_bytes = count * wire.code_bits // 8
        return codes[:num_bytes].clone().view(_DTYPES[wire.name]).float()
    pairs = codes[: (count + 1) // 2].long()
    nibbles = torch.stack([pairs & 15, pairs >> 4], dim=1).flatten()[:count]
    if wire.name == "int4":
        return (nibbles - 16 * (nibbles >> 3)).float()
    return torch.tensor(_E3M0 + [-value for value in _E3M0], dtype=torch.float32)[nibbles]


def _expand(per_block: Tensor, block_size: int, count: int) -> Tensor:
    return per_block.repeat_interleave(block_size)[:count]


def _scales(x: Tensor, wire: WireFormat) -> Tensor:
    """Return absmax / qmax of each block, rounded up to bf16, as fp32 with a bf16's bits."""
    padding = -x.numel() % wire.block_size
    blocks = torch.nn.functional.pad(x, (0, padding)).view(-1, wire.block_size)
    quotient = blocks.abs().amax(dim=1) / wire.qmax
    bits = (quotient.view(torch.int32) + 0xFFFF) & ~0xFFFF
    return bits.view(torch.float32).clamp(min=SMALLEST_SCALE)


def encode_run(
    x: Tensor,
    run: Tensor,
    run_elements: int,
    wire: WireFormat,
    first_index: int,
    stochastic: bool,
    key: int,
) -> int:
    """Encode x into one run of a payload and return the number of bad elements."""
    count = x.numel()
    if count == 0:
        return 0
    bad = ~(x.abs() <= HUGE)
    if wire.has_scales:
        num_blocks = -(-count // wire.block_size)
        bad_blocks = torch.zeros(num_blocks, dtype=torch.bool)
        bad_blocks[bad.nonzero().flatten() // wire.block_size] = True
        x = torch.where(_expand(bad_blocks, wire.block_size, count), 0.0, x)
        scales = _scales(x, wire)
        run[: 2 * num_blocks] = scales.bfloat16().view(torch.uint8)
        y = x * _expand(1.0 / scales, wire.block_size, count)
    else:
        y = torch.where(bad, 0.0, x)
    if stochastic:
        rounded = _round_stochastic(y, wire, random_bits(first_index, count, key))
    else:
        rounded = _round_nearest(y, wire)
    overflow = ~_from_bytes(_to_bytes(rounded, wire), wire, count).isfinite()
    codes = _to_bytes(torch.where(overflow, 0.0, rounded), wire)
    offset = wire.code_offset(run_elements)
    run[offset : offset + codes.numel()] = codes
    return int((bad | overflow).sum())


def decode_run(run: Tensor, run_elements: int, wire: WireFormat, count: int) -> Tensor:
    """Return the first ``count`` elements of one run as fp32."""
    values = _from_bytes(run[wire.code_offset(run_elements) :], wire, count)
    if not wire.has_scales:
        return values
    num_blocks = -(-count // wire.block_size)
    scales = run[: 2 * num_blocks].clone().view(torch.bfloat16).float()
    return values * _expand(scales, wire.block_size, count)
