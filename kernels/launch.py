"""The launch of kernels: their tiles, grid and device, and the tables of tensors' addresses."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checks import RunLayout, check_fragment
from .digest import TILE as DIGEST_TILE
from .norms import TILE as NORM_TILE
from .tiles import DTYPES

# For each operator the elements of a tile (for digest: words), and the warps of a program. On a
# sparse wire, whose blocks are larger than this, a tile is one block. encode and reduce need a
# block's maximum, and have eight elements per thread, so that one warp has a block of 256.
# outer_step, decode and merge have four, which are 16 bytes of fp32. norms and digest read their
# larger tiles in a loop. Other sizes have not been measured.
PROGRAMS = {
    "encode": (2048, 8),
    "reduce": (2048, 8),
    "outer_step": (1024, 8),
    "decode": (1024, 8),
    "merge": (1024, 8),
    "norms": (NORM_TILE, 1),
    "digest": (DIGEST_TILE, 8),
}


def launch(
    name: str, kernel: Any, num_programs: int, device: torch.device, *args: object, **meta
) -> None:
    """Run an operator's kernel, without fused multiply-adds: products are rounded, then added."""
    if num_programs == 0:
        return
    with _on(device):
        kernel[(num_programs,)](*args, **meta, num_warps=PROGRAMS[name][1], enable_fp_fusion=False)


def check_max_blocks(max_blocks: int) -> None:
    """Raise ValueError for a negative bound; 0 means no bound.

    The kernels of ``encode`` and ``decode`` ignore the bound: with one, ``reduce`` left other
    streams no more room (docs/measurements/gpu-kernels.md).
    """
    if max_blocks < 0:
        raise ValueError(f"max_blocks must not be negative, got {max_blocks}")


def bounded(num_tiles: int, max_blocks: int) -> tuple[int, bool]:
    """Return the number of programs, and whether each may have to do more than one tile.

    Args:
        num_tiles: Tiles of the call; without a bound each tile has a program of its own.
        max_blocks: The most programs; 0 means no bound.
    """
    check_max_blocks(max_blocks)
    if max_blocks == 0 or num_tiles <= max_blocks:
        return num_tiles, False
    return max_blocks, True


def _on(device: torch.device) -> AbstractContextManager:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def tiles_of(
    what: str, tensors: Sequence[Tensor], device: torch.device, run_elements: int, tile: int
) -> Tiles:
    """Return the tables of an operator's tensors. Several tensors are checked when first seen."""
    lone = lone_tensor(tensors, run_elements, tile)
    found = None if lone else find_tiles(tensors, device, run_elements, tile)
    if found is None:
        check_fragment(what, tensors, device)
        found = lone or make_tiles(tensors, device, run_elements, tile)
    return found


def tile_of(name: str, layout: RunLayout) -> int:
    """Return the elements of a tile, at least one block."""
    return max(PROGRAMS[name][0], layout.block_size)


def geometry(name: str, layout: RunLayout) -> dict:
    """Return the compile-time arguments of a kernel that describe a tile."""
    return {
        "ROWS": tile_of(name, layout) // layout.block_size,
        "BLOCK_SIZE": layout.block_size,
        "WIRE": layout.wire,
        "CODE_BITS": layout.code_bits,
    }


def span_of(tiles_per_run: int, layout: RunLayout, begin: int, end: int) -> tuple[int, tuple]:
    """Return the number of programs for [begin, end), and the kernel's arguments for the range."""
    first_run = begin // layout.run_elements
    num_runs = -(-end // layout.run_elements) - first_run if end > begin else 0
    where = (
        first_run * tiles_per_run,
        first_run,
        tiles_per_run,
        layout.run_elements,
        layout.run_bytes,
        layout.code_offset,
        end,
    )
    return num_runs * tiles_per_run, where


def mark_written(tensors: Sequence[Tensor]) -> None:
    """Tell autograd, which may have saved the tensors, that they were written."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


# ------------------------------------------------------------------------------------------- tables


# If all tables together are larger than this, those used least recently are dropped. The tables of
# a fragment take some 16 bytes for a thousand elements and each size of runs and tiles.
MAX_TABLE_BYTES = 1 << 28


@dataclass(frozen=True)
class Tiles:
    """The tables of one fragment that is divided into runs and tiles, for kernels (``tiles.py``).

    ``tiles`` is int64 [num_tiles, 2] and ``segments`` int64 [num_segments, 4], both on the device.
    If ``dtype_set`` is 0, ``tiles`` is None, and ``segments`` is the fragment's only tensor.
    """

    num_elements: int
    tiles_per_run: int
    dtype_set: int
    tiles: Tensor | None
    segments: Tensor
    stream: int = 0

    @property
    def num_bytes(self) -> int:
        return self.segments.nbytes + (0 if self.tiles is None else self.tiles.nbytes)


def lone_tensor(tensors: Sequence[Tensor], run_elements: int, tile: int) -> Tiles | None:
    """Return the ``Tiles`` of a fragment that is one tensor and needs no tables; else None."""
    if len(tensors) != 1:
        return None
    return Tiles(tensors[0].numel(), -(-run_elements // tile), 0, None, tensors[0])


def build_tiles(tensors: Sequence[Tensor], run_elements: int, tile: int) -> tuple[Tensor, Tensor]:
    """Return the two tables (``tiles.py``), of tiles and of segments, int64 on the CPU."""
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


# The lock guards the tables, which the training thread and the engine's thread use.
_lock = threading.Lock()
_tables: OrderedDict[tuple, Tiles] = OrderedDict()
_captured: list[Tiles] = []  # tables whose addresses are in CUDA graphs: they are never freed


def find_tiles(
    tensors: Sequence[Tensor], device: torch.device, run_elements: int, tile: int
) -> Tiles | None:
    """Return the tables that ``make_tiles`` made for tensors at the same addresses, or None."""
    key = (_layout_of(tensors), device, run_elements, tile)
    with _lock:
        found = _tables.get(key)
        if found is not None:
            _tables.move_to_end(key)
    if found is not None:
        _keep(found, device)
    return found


def make_tiles(
    tensors: Sequence[Tensor], device: torch.device, run_elements: int, tile: int
) -> Tiles:
    """Make the tables of tiles and segments, by which kernels find the elements of the tensors.

    The tables are copied to the device and kept for ``find_tiles``. This is the only step of a
    launch in which the host waits for the device.

    Raises:
        RuntimeError: While a CUDA graph is captured, because a graph cannot contain this copy.
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
    with _lock:
        _tables[_layout_of(tensors), device, run_elements, tile] = made
        total_bytes = sum(tables.num_bytes for tables in _tables.values())
        while total_bytes > MAX_TABLE_BYTES and len(_tables) > 1:
            total_bytes -= _tables.popitem(last=False)[1].num_bytes
    return made


def _layout_of(tensors: Sequence[Tensor]) -> tuple:
    return tuple(
        (t.data_ptr(), t.numel(), t.dtype, t.is_contiguous() or t.stride()) for t in tensors
    )


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _keep(tiles: Tiles, device: torch.device) -> None:
    """See to it that the tables' memory is not reused while this stream or a graph may read it."""
    if device.type != "cuda":
        return
    if torch.cuda.is_current_stream_capturing():
        _captured.append(tiles)
    elif _stream(device) != tiles.stream:
        assert tiles.tiles is not None
        for table in (tiles.tiles, tiles.segments):
            table.record_stream(torch.cuda.current_stream(device))
