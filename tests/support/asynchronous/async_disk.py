"""A small disk for tests of a server's files, and a worker that trains beside it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from async_helpers import Flat

from diloco_comm.asynchronous.worker import AsyncDiLoCo

# A snapshot of 400 kB, and as much for each update in the journal.
SIZE = 100_001


class Disk:
    """A small file system."""

    def __init__(self, root: Path) -> None:
        self.root, self._filler = root, root / "filler"

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Leave so many bytes, give or take a page."""
        with self._filler.open("wb") as file:
            file.write(bytes(max(0, self.free_bytes - leave)))

    def empty(self) -> None:
        self._filler.unlink()


def train(model: Flat, worker: AsyncDiLoCo, updates: int) -> None:
    for _ in range(updates):
        model.descend(torch.full((SIZE,), 0.5))
        worker.step()
