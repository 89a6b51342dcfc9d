"""The sparse wires topk32 to topk256 in plain PyTorch: the signs of a block's largest elements.

The indices of the kept elements are in Elias and Fano's code, which takes the same bytes for every
choice of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference_codec import HUGE, SMALLEST_SCALE
from .reference_rotation import pack_bits, power_of_two, received_scales, unpack_bits
from .wire import WireFormat


def _kept(x: Tensor, count: int) -> Tensor:
    """Return the ascending indices of the largest magnitudes of each row, int64 [rows, count].

    Among equal magnitudes, elements with lower indices are kept.
    """
    order = x.abs().sort(dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values


def _code(indices: Tensor, signs: Tensor, low_bits: int) -> Tensor:
    """Return the code of kept elements, uint8 [rows, bytes].

    The code has a plane for each low bit of the indices; then the high bits, as ones at the places
    (high bits of index i) + i; then the signs.
    """
    rows, count = indices.shape
    planes = [pack_bits((indices >> bit) & 1 == 1) for bit in range(low_bits)]
    places = (indices >> low_bits) + torch.arange(count)
    upper = torch.zeros(rows, 2 * count, dtype=torch.bool).scatter_(1, places, True)
    return torch.cat([*planes, pack_bits(upper), pack_bits(signs)], dim=1)


def _encode_blocks(x: Tensor, count: int) -> Tensor:
    """Return scales and codes, uint8 [blocks, 2 + bytes], of good blocks x, fp32 [blocks, size]."""
    log_count = count.bit_length() - 1
    indices = _kept(x, count)
    values = x.gather(1, indices)
    exponent = ((x.abs().amax(1).view(torch.int32) >> 23).long() - 127).clamp(min=-100)
    total = (values.abs() * power_of_two(21 - exponent).unsqueeze(1)).round().long().sum(1)
    mean = total.double().float() / count
    scale = (mean * power_of_two(exponent - 21)).bfloat16()
    is_null = (total == 0) | ~(scale.float() >= SMALLEST_SCALE)
    codes = _code(indices, values.signbit(), x.shape[1].bit_length() - 1 - log_count)
    encoded = torch.cat([scale.view(torch.uint8).view(-1, 2), codes], dim=1)
    return torch.where(is_null.unsqueeze(1), torch.zeros_like(encoded), encoded)


def encode_run(x: Tensor, run: Tensor, run_elements: int, wire: WireFormat) -> int:
    """Encode x into one run of a payload and return the number of bad elements."""
    count, size = x.numel(), wire.block_size
    if count == 0:
        return 0
    blocks = torch.nn.functional.pad(x, (0, -count % size)).view(-1, size)
    bad = ~(blocks.abs() <= HUGE)
    good = torch.where(bad.any(1, keepdim=True), 0.0, blocks)
    encoded = _encode_blocks(good, wire.num_kept)
    offset = wire.code_offset(run_elements)
    run[: 2 * len(blocks)] = encoded[:, :2].flatten()
    run[offset : offset + wire.code_bytes(count)] = encoded[:, 2:].flatten()
    return int(bad.sum())


def decode_run(run: Tensor, run_elements: int, wire: WireFormat, count: int) -> Tensor:
    """Return the first ``count`` elements of one run as fp32; a null block is +0.

    A block whose code no encoder makes is NaN: the high bits of its indices must have a one for
    each kept element, and the indices must ascend.
    """
    if count == 0:
        return torch.empty(0)
    size, kept = wire.block_size, wire.num_kept
    low_bits = (size // kept).bit_length() - 1
    num_blocks, offset = -(-count // size), wire.code_offset(run_elements)
    scales = received_scales(run[: 2 * num_blocks], wire)
    bits = unpack_bits(run[offset : offset + wire.code_bytes(count)].view(num_blocks, -1))
    values = torch.zeros(num_blocks, size, dtype=torch.float32)
    for row, scale in enumerate(scales.tolist()):
        if scale == 0:
            continue
        planes = bits[row, : low_bits * kept].view(low_bits, kept).long()
        upper = bits[row, low_bits * kept : (low_bits + 2) * kept].nonzero().flatten()
        if scale != scale or upper.numel() != kept:
            values[row] = torch.nan
            continue
        low = (planes << torch.arange(low_bits).unsqueeze(1)).sum(0)
        indices = ((upper - torch.arange(kept)) << low_bits) + low
        if bool((indices.diff() <= 0).any()) or int(indices[-1]) >= size:
            values[row] = torch.nan
            continue
        signs = bits[row, (low_bits + 2) * kept :]
        values[row, indices] = torch.where(signs, -scale, scale)
    return values.flatten()[:count]
