"""A kernel with an operator's reads and writes that computes nothing: what the memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ROW = 512  # words: each of 128 lanes moves 16 bytes of a row
MOST_ROWS = 16  # of an array, for one row of the smallest


if triton is not None:

    @triton.jit
    def _move(reads, writes, READS: tl.constexpr, WRITES: tl.constexpr, ROW: tl.constexpr):
        """Write the xor of READS[i] rows of each array i to WRITES[i] rows of each array."""
        program = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, ROW)
        word = tl.zeros([ROW], tl.int32)
        for i in tl.static_range(len(READS)):
            # Triton 3.6 takes an element of a constexpr tuple for a plain number.
            for j in tl.static_range(tl.constexpr(READS[i])):
                word ^= tl.load(reads[i] + (program * READS[i] + j) * ROW + lane)
        for i in tl.static_range(len(WRITES)):
            for j in tl.static_range(tl.constexpr(WRITES[i])):
                tl.store(writes[i] + (program * WRITES[i] + j) * ROW + lane, word)
        if WRITES[0] == 0:
            # Without a use of the words the compiler would drop the reads.
            tl.store(writes[0] + lane, word, mask=word == 0x12345678)


def mover(
    pool: Tensor, count: int, reads: Sequence[float], updates: Sequence[float],
    writes: Sequence[float],
) -> tuple[Callable[[], object], int]:  # fmt: skip
    """Return a call that moves ``count`` elements of arrays in int32 ``pool``, and its bytes.

    The arrays are given by their bytes for each element: read, updated in place, and written.
    """
    sizes = [*reads, *updates, *writes]
    unit = 2.0 ** round(math.log2(max(min(sizes), max(sizes) / MOST_ROWS)))
    rows = [round(size / unit) for size in sizes]
    programs = int(count * unit) // 4 // ROW
    words = [programs * ROW * number for number in rows]
    arrays = pool[: sum(words)].split(words)
    first, last = len(reads), len(reads) + len(updates)
    read, written = tuple(rows[:last]), tuple(rows[first:]) or (0,)
    tensors = tuple(arrays[:last]), tuple(arrays[first:]) or (pool,)
    call = lambda: _move[(programs,)](*tensors, read, written, ROW)  # noqa: E731
    return call, 4 * ROW * programs * (sum(read) + sum(written))
