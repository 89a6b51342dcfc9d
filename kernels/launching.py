"""The launch of operators: tiles, grid, device, and the table of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .checks import RunLayout, check_fragment
from .digest import TILE as DIGEST_TILE
from .norms import TILE as NORM_TILE
from .tables import Tiles, find_tiles, lone_tensor, make_tiles

# Elements of a tile (a multiple of the largest block; a block of a sparse wire is larger, and is a
# tile) and warps of its program. Where maxima are taken a thread has eight elements, so that one
# warp has a block of 256; elsewhere four, which are 16 bytes of fp32 and need no exchange between
# threads. Words of a tile for digest, which adds to its sums once a program. By reasoning: other
# sizes have not been measured.
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
    """Run a kernel of an operator, without contraction: a product is rounded before it is added."""
    if num_programs == 0:
        return
    with _on(device):
        kernel[(num_programs,)](*args, **meta, num_warps=PROGRAMS[name][1], enable_fp_fusion=False)


def check_max_blocks(max_blocks: int) -> None:
    """Refuse a bound below none, 0. The kernels of ``encode`` and ``decode`` keep no bound.

    A bound on ``reduce`` left other streams no more room (docs/measurements/gpu-kernels.md).
    """
    if max_blocks < 0:
        raise ValueError(f"max_blocks must not be negative, got {max_blocks}")


def bounded(num_tiles: int, max_blocks: int) -> tuple[int, bool]:
    """Return the number of programs, and whether each may have to do more than one tile.

    Args:
        num_tiles: Tiles of the call; without a bound each has a program of its own.
        max_blocks: Most programs; 0: no bound.
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
    """Return where an operator's tensors lie, checked when they were not met before."""
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
    """The compile-time shape of a tile."""
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
