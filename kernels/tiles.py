"""A fragment's tensors where they lie, for kernels that must not know how many there are.

A *tile* is what one program handles: consecutive elements of one run. A table on the device has a
row for each tile of the fragment, so that one launch covers any chunk:

    (address, dtype)       the whole tile lies in one tensor, at a multiple of 16 bytes
    (segment, -1 - count)  it is cut short, or lies in ``count`` tensors from ``segment`` on

and a second one a row for each tensor that is not empty: (begin, end, address, dtype). Both are
made once for a fragment and a way of cutting it, and are found again by the tensors' addresses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import bf16_bits

# The number of a dtype in the tables; bit 1 << number says that a fragment has such tensors.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_TABLES = 256  # far more than the fragments of a model; the least recently used is dropped


@triton.jit
def _load_one(
    address,
    dtype,
    offsets,
    mask,
    NUMBER: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Load what lies at the address if it has the dtype NUMBER; else 0, and nothing is read."""
    if NUMBER == 0:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif NUMBER == 1:
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(tl.float16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if (1 << NUMBER) == DTYPE_SET:
        raw = tl.load(pointer + offsets) if ALIGNED else tl.load(pointer + offsets, mask, other=0)
    else:
        is_this = (offsets * 0 + dtype) == NUMBER
        raw = tl.load(pointer + offsets, mask=is_this if ALIGNED else mask & is_this, other=0)
    if NUMBER == 1:
        value = (raw.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def _load_at(address, dtype, offsets, mask, DTYPE_SET: tl.constexpr, ALIGNED: tl.constexpr):
    """Load elements of one tensor as fp32; with more than one dtype, only the right one is read."""
    if DTYPE_SET & 1:
        value = _load_one(address, dtype, offsets, mask, 0, DTYPE_SET, ALIGNED)
    if DTYPE_SET & 2:
        bf16 = _load_one(address, dtype, offsets, mask, 1, DTYPE_SET, ALIGNED)
        value = tl.where(dtype == 1, bf16, value) if DTYPE_SET & 1 else bf16
    if DTYPE_SET & 4:
        fp16 = _load_one(address, dtype, offsets, mask, 2, DTYPE_SET, ALIGNED)
        value = tl.where(dtype == 2, fp16, value) if DTYPE_SET & 3 else fp16
    return value


@triton.jit
def _store_one(
    address,
    dtype,
    offsets,
    value,
    mask,
    NUMBER: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store fp32 values at the address, rounded to the dtype NUMBER, if that is the dtype there."""
    if NUMBER == 0:
        pointer = address.to(tl.pointer_type(tl.float32))
        raw = value
    elif NUMBER == 1:
        pointer = address.to(tl.pointer_type(tl.uint16))
        raw = bf16_bits(value).to(tl.uint16)
    else:
        pointer = address.to(tl.pointer_type(tl.float16))
        raw = value.to(tl.float16)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if (1 << NUMBER) == DTYPE_SET:
        if ALIGNED:
            tl.store(pointer + offsets, raw)
        else:
            tl.store(pointer + offsets, raw, mask=mask)
    else:
        is_this = (offsets * 0 + dtype) == NUMBER
        tl.store(pointer + offsets, raw, mask=is_this if ALIGNED else mask & is_this)


@triton.jit
def _store_at(address, dtype, offsets, value, mask, DTYPE_SET: tl.constexpr, ALIGNED: tl.constexpr):
    if DTYPE_SET & 1:
        _store_one(address, dtype, offsets, value, mask, 0, DTYPE_SET, ALIGNED)
    if DTYPE_SET & 2:
        _store_one(address, dtype, offsets, value, mask, 1, DTYPE_SET, ALIGNED)
    if DTYPE_SET & 4:
        _store_one(address, dtype, offsets, value, mask, 2, DTYPE_SET, ALIGNED)


@triton.jit
def load_tile(
    where, kind, segments_ptr, element, offsets, mask, DTYPE_SET: tl.constexpr, FULL: tl.constexpr
):
    """Load a tile's elements as fp32. ``where`` and ``kind`` are its row, ``element`` its first.

    FULL: the row gives the address. Else the tensors are gone through, and what is not in ``mask``
    is 0.
    """
    if FULL:
        x = _load_at(where, kind, offsets, None, DTYPE_SET, True)
    else:
        x = (offsets * 0).to(tl.float32)
        for i in range(0, -1 - kind):
            row = segments_ptr + (where + i) * 4
            begin, end = tl.load(row), tl.load(row + 1)
            address, dtype = tl.load(row + 2), tl.load(row + 3)
            index = offsets + element
            inside = (index >= begin) & (index < end) & mask
            part = _load_at(address, dtype, index - begin, inside, DTYPE_SET, False)
            x = tl.where(inside, part, x)
    return x


@triton.jit
def store_tile(
    where,
    kind,
    segments_ptr,
    element,
    offsets,
    value,
    mask,
    DTYPE_SET: tl.constexpr,
    FULL: tl.constexpr,
):
    """Store a tile's elements, rounded to nearest in the dtype of each tensor."""
    if FULL:
        _store_at(where, kind, offsets, value, None, DTYPE_SET, True)
    else:
        for i in range(0, -1 - kind):
            row = segments_ptr + (where + i) * 4
            begin, end = tl.load(row), tl.load(row + 1)
            address, dtype = tl.load(row + 2), tl.load(row + 3)
            index = offsets + element
            inside = (index >= begin) & (index < end) & mask
            _store_at(address, dtype, index - begin, value, inside, DTYPE_SET, False)


@dataclass(frozen=True)
class Tiles:
    """The tables of one fragment, cut in runs and tiles.

    ``tiles`` is int64 [num_tiles, 2], ``segments`` int64 [num_segments, 4], both on the device.
    """

    num_elements: int
    tiles_per_run: int
    dtype_set: int
    tiles: Tensor
    segments: Tensor
    stream: int


def build_tiles(tensors: Sequence[Tensor], run_elements: int, tile: int) -> tuple[Tensor, Tensor]:
    """Return the rows of the tiles and of the segments, int64 on the CPU."""
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    sizes = torch.tensor([tensor.numel() for tensor in filled], dtype=torch.int64)
    ends = sizes.cumsum(0)
    begins = ends - sizes
    addresses = torch.tensor([tensor.data_ptr() for tensor in filled], dtype=torch.int64)
    dtypes = torch.tensor([DTYPES[tensor.dtype] for tensor in filled], dtype=torch.int64)
    segments = torch.stack([begins, ends, addresses, dtypes], dim=1)
    total = int(ends[-1]) if filled else 0
    starts = torch.arange(0, total, run_elements)[:, None] + torch.arange(0, run_elements, tile)
    run_ends = torch.arange(0, total, run_elements)[:, None] + run_elements
    stops = torch.minimum(starts + tile, run_ends).clamp(max=total).flatten()
    starts = starts.flatten()
    is_empty = starts >= stops
    first = torch.searchsorted(ends, starts, right=True)
    last = torch.searchsorted(ends, stops - 1, right=True)
    inside = first.clamp(max=max(len(filled) - 1, 0))
    item_bytes = torch.where(dtypes == 0, 4, 2)[inside]
    address = addresses[inside] + (starts - begins[inside]) * item_bytes
    is_direct = (first == last) & (stops - starts == tile) & (address % 16 == 0)
    where = torch.where(is_direct, address, first)
    kind = torch.where(is_direct, dtypes[inside], -1 - (last - first + 1))
    kind = torch.where(is_empty, -1, kind)
    return torch.stack([where, kind], dim=1), segments


_tables: OrderedDict[tuple, Tiles] = OrderedDict()
_captured: list[Tiles] = []  # CUDA graphs hold their addresses for as long as the process lives


def find_tiles(
    tensors: Sequence[Tensor], device: torch.device, run_elements: int, tile: int
) -> Tiles | None:
    """Return the tables that ``make_tiles`` made for these tensors, if they lie where they lay."""
    key = (_layout_of(tensors), device, run_elements, tile)
    found = _tables.get(key)
    if found is not None:
        _tables.move_to_end(key)
        _keep(found, device)
    return found


def make_tiles(
    tensors: Sequence[Tensor], device: torch.device, run_elements: int, tile: int
) -> Tiles:
    """Make the tables and copy them to the device, the only time that the host waits for it.

    Raises:
        RuntimeError: While a CUDA graph is captured, which can hold no such copy.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the operators meet these tensors for the first time while a CUDA graph is captured: "
            "call them once before the capture"
        )
    tiles, segments = build_tiles(tensors, run_elements, tile)
    dtype_set = 0
    for tensor in tensors:
        dtype_set |= 1 << DTYPES[tensor.dtype]
    made = Tiles(
        num_elements=sum(tensor.numel() for tensor in tensors),
        tiles_per_run=-(-run_elements // tile),
        dtype_set=dtype_set or 1,
        tiles=tiles.to(device),
        segments=segments.to(device),
        stream=_stream(device),
    )
    _tables[_layout_of(tensors), device, run_elements, tile] = made
    while len(_tables) > MAX_TABLES:
        _tables.popitem(last=False)
    return made


def _layout_of(tensors: Sequence[Tensor]) -> tuple:
    return tuple(
        (t.data_ptr(), t.numel(), t.dtype, t.is_contiguous() or t.stride()) for t in tensors
    )


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _keep(tiles: Tiles, device: torch.device) -> None:
    """Let no table's memory be reused while a stream or a graph may still read it."""
    if device.type != "cuda":
        return
    if torch.cuda.is_current_stream_capturing():
        _captured.append(tiles)
    elif _stream(device) != tiles.stream:
        for table in (tiles.tiles, tiles.segments):
            table.record_stream(torch.cuda.current_stream(device))
