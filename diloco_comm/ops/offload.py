"""Outer state in page-locked host memory, brought to the device chunk by chunk and back.

Two chunks are on the device at a time. While the operators work on one, the next one comes in and
the one before goes out, on streams of their own. The training stream waits for copies; the host
does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from .. import _C
from ..base.memory import memory_order
from .wire import Layout

# Elements of a chunk: enough to keep the device busy, and so few that two chunks take only 32 MiB
# of the device for each fp32 tensor of outer state. The number was chosen, not measured.
CHUNK_ELEMENTS = 4 << 20


def chunks_of(
    layout: Layout, most: int = CHUNK_ELEMENTS, *, begin: int = 0, end: int | None = None
) -> list[tuple[int, int]]:
    """Cut elements [begin, end) of a fragment into ranges of whole runs.

    A range has at most ``most`` elements, or it is a single run, because operators take whole runs.
    """
    step = max(1, most // layout.run_elements) * layout.run_elements
    end = layout.num_elements if end is None else end
    return [(first, min(first + step, end)) for first in range(begin, end, step)]


class Offloaded:
    """The outer state of one fragment in host memory, and the loader that all fragments share.

    Args:
        tensors: 1-D, page-locked, of one size.
    """

    def __init__(self, tensors: Sequence[Tensor], loader: _C.ChunkLoader) -> None:
        self.tensors, self.loader = list(tensors), loader

    @contextmanager
    def chunk(self, begin: int, end: int, *, is_written: bool) -> Iterator[list[Tensor]]:
        """Bring the range to the device, and back afterwards if it is written.

        The tensors that the block gets hold this range alone, and are valid until it ends. If the
        block raises, what it has written still goes back to host memory.
        """
        tensors = self.loader.load(self.tensors, begin, end)
        try:
            yield tensors
        finally:
            self.loader.release(self.tensors, begin, end, is_written)

    def finish(self) -> None:
        """Wait until the device has read its chunks, and written chunks are in host memory."""
        self.loader.finish()


def slices(tensors: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
    """View elements [begin, end) of dense tensors, counted through them all, as 1-D pieces."""
    pieces, offset = [], 0
    for tensor in tensors:
        first, last = max(begin - offset, 0), min(end - offset, tensor.numel())
        if first < last:
            pieces.append(memory_order(tensor)[first:last])
        offset += tensor.numel()
    return pieces
