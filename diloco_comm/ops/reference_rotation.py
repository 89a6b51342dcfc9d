"""The rotated wires int2r, int1r and sub2 to sub16 in plain PyTorch, block by block.

A block is multiplied by random signs and transformed by Walsh and Hadamard's matrix; then one or
two bits of each coefficient travel, or one bit of some of them. Everything but the scale is
arithmetic on integers that never overflow, so that any order of additions gives the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference_codec import HUGE, SMALLEST_SCALE, philox
from .wire import KEY_BYTES, WireFormat

LARGEST = 2.0**116  # a larger magnitude is refused: a decoded value might not be finite
# The two levels of int2r, in units of the block's scale. An element of the rotated block has the
# large level if its magnitude exceeds 315/65536 of the sum of the block's magnitudes; with 256
# elements that is 1.2305 times their mean.
_SMALL, _LARGE, _BORDER = 3, 10, 315
_BIT = 1 << torch.arange(8)


def random_signs(key: int, count: int) -> Tensor:
    """Return which elements of a block change their sign, bool [count], count a multiple of 128."""
    counter = torch.arange(count // 128, dtype=torch.int64)
    zero = torch.zeros_like(counter)
    words = torch.stack(philox([counter, zero, zero + 1, zero], key), dim=1)
    return ((words.view(-1, 1) >> torch.arange(32)) & 1).bool().flatten()


def hadamard(values: Tensor) -> Tensor:
    """Return Y_k = sum_i (-1)^popcount(k & i) v_i for each row of ``values``, int64 [rows, n]."""
    rows, size = values.shape
    half = 1
    while half < size:
        pairs = values.view(rows, size // (2 * half), 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        values = torch.stack([low + high, low - high], dim=2).view(rows, size)
        half *= 2
    return values


def _flip(values: Tensor, signs: Tensor) -> Tensor:
    return torch.where(signs, -values, values)


def pack_bits(bits: Tensor) -> Tensor:
    """Return bool [rows, n] as uint8 [rows, n / 8]; bit k is bit k % 8 of byte k // 8."""
    return (bits.view(bits.shape[0], -1, 8) * _BIT).sum(dim=2).to(torch.uint8)


def unpack_bits(codes: Tensor) -> Tensor:
    """Return the bits of uint8 [rows, n / 8] as bool [rows, n]."""
    return ((codes.long().unsqueeze(2) >> torch.arange(8)) & 1).bool().flatten(1)


def _exactly_fp32(integers: Tensor) -> Tensor:
    """Round int64 of at most 53 bits to fp32, once."""
    return integers.double().float()


def power_of_two(exponent: Tensor) -> Tensor:
    """Return fp32 2^exponent, for exponents of normal numbers."""
    return ((exponent + 127) << 23).int().view(torch.float32)


def _rounded(x: Tensor, exponent: Tensor, bits: int) -> Tensor:
    """Return rint(x * 2^(bits - exponent)) as int64."""
    return (x * power_of_two(bits - exponent).unsqueeze(1)).round().long()


def _levels(magnitude: Tensor, total: Tensor) -> Tensor:
    """Return for each coefficient whether it gets the large level of int2r, bool.

    Args:
        magnitude: Absolute coefficients, [blocks, size].
        total: Their sum in each block.
    """
    return magnitude > ((_BORDER * total) >> 16).unsqueeze(1)


def _int2r_sums(magnitude: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return each block's sum of |coefficient| * level, and its sum of level^2, both fp32."""
    is_large = _levels(magnitude, total)
    product = 3.0 * _exactly_fp32(total) + 7.0 * _exactly_fp32((magnitude * is_large).sum(1))
    square = 9 * magnitude.shape[1] + 91 * is_large.sum(1)
    return product, square.float()


def _encode_blocks(x: Tensor, signs: Tensor, wire: WireFormat, least_squares: bool) -> Tensor:
    """Return scales and codes, uint8 [blocks, 2 + bytes], of good blocks x, fp32 [blocks, size]."""
    size = x.shape[1]
    exponent = ((x.abs().amax(1).view(torch.int32) >> 23).long() - 127).clamp(min=-100)
    if wire.name.startswith("sub"):
        fraction, bits = int(wire.name[3:]), 15
        folded = _flip(_rounded(x, exponent, bits), signs)
        coefficients = hadamard(folded.view(-1, fraction, size // fraction).sum(1))
    else:
        fraction, bits = 1, 17
        coefficients = hadamard(_flip(_rounded(x, exponent, bits), signs))
    magnitude = coefficients.abs()
    total = magnitude.sum(1)
    product, square = _exactly_fp32(total), torch.full_like(total, size // fraction).float()
    if wire.name == "int2r":
        product, square = _int2r_sums(magnitude, total)
    energy = _exactly_fp32((magnitude**2).sum(1))
    gain = product / square if least_squares else energy / product
    # In a block of zeros the quotient is 0 / 0; ``is_null`` replaces its scale and code.
    unit = exponent - bits - (size // fraction).bit_length() + 1
    scale = (gain * power_of_two(unit)).bfloat16()
    is_null = (total == 0) | ~(scale.float() >= SMALLEST_SCALE)
    codes = [pack_bits(coefficients < 0)]
    if wire.name == "int2r":
        codes.insert(0, pack_bits(_levels(magnitude, total)))
    encoded = torch.cat([scale.view(torch.uint8).view(-1, 2), *codes], dim=1)
    return torch.where(is_null.unsqueeze(1), torch.zeros_like(encoded), encoded)


def encode_run(
    x: Tensor, run: Tensor, run_elements: int, wire: WireFormat, key: int, least_squares: bool
) -> int:
    """Encode x into one run of a payload and return the number of bad elements.

    Args:
        key: The key of the random signs, which is stored at the start of the run.
        least_squares: Choose the scale with the smallest error, for error feedback, instead of the
            one with which the projection of the decoded block on x is x.
    """
    count, size = x.numel(), wire.block_size
    if count == 0:
        return 0
    blocks = torch.nn.functional.pad(x, (0, -count % size)).view(-1, size)
    bad = ~(blocks.abs() <= LARGEST)
    good = torch.where(bad.any(1, keepdim=True), 0.0, blocks)
    encoded = _encode_blocks(good, random_signs(key, size), wire, least_squares)
    begin, offset = wire.scale_offset, wire.code_offset(run_elements)
    run[:KEY_BYTES] = torch.tensor([key], dtype=torch.int64).view(torch.uint8)
    run[begin : begin + 2 * len(blocks)] = encoded[:, :2].flatten()
    run[offset : offset + wire.code_bytes(count)] = encoded[:, 2:].flatten()
    return int(bad.sum())


def largest_scale(wire: WireFormat) -> float:
    """Return the largest scale with which no decoded element exceeds 2^126."""
    if wire.is_sparse:
        return HUGE
    num_coefficients = 8 * wire.code_unit[1] // (2 if wire.name == "int2r" else 1)
    return HUGE / (num_coefficients * (_LARGE if wire.name == "int2r" else 1))


def received_scales(encoded: Tensor, wire: WireFormat) -> Tensor:
    """Return the fp32 scales in the bytes of a run's scales; one that no encoder makes is NaN."""
    bits = encoded.clone().view(torch.bfloat16)
    scales = bits.float()
    is_in_range = (scales >= SMALLEST_SCALE) & (scales <= largest_scale(wire))
    is_made = (bits.view(torch.int16) == 0) | is_in_range
    return torch.where(is_made, scales, torch.nan)


def decode_run(run: Tensor, run_elements: int, wire: WireFormat, count: int) -> Tensor:
    """Return the first ``count`` elements of one run as fp32; a null block is +0."""
    if count == 0:
        return torch.empty(0)
    size = wire.block_size
    num_blocks, offset = -(-count // size), wire.code_offset(run_elements)
    begin = wire.scale_offset
    scales = received_scales(run[begin : begin + 2 * num_blocks], wire)
    bits = unpack_bits(run[offset : offset + wire.code_bytes(count)].view(num_blocks, -1))
    if wire.name == "int2r":
        levels = torch.where(bits[:, :size], _LARGE, _SMALL)
        coefficients = _flip(levels, bits[:, size:])
    else:
        coefficients = _flip(torch.ones_like(bits, dtype=torch.int64), bits)
    key = int(run[:KEY_BYTES].clone().view(torch.int64))
    repeated = hadamard(coefficients).repeat(1, size // coefficients.shape[1])
    values = _flip(repeated, random_signs(key, size)).float() * scales.unsqueeze(1)
    return torch.where(scales.unsqueeze(1) == 0, 0.0, values).flatten()[:count]
