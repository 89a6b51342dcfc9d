"""Process groups of a backend by its name, as the tests of the backend "diloco" make them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

LARGE = 5003  # fp32 elements; 20,012 bytes
MIN_BYTES = 20_000


@contextmanager
def group(
    rank: int, world: int, address: tuple[str, int], name: str, backend: str = "diloco", **env: str
) -> Iterator[None]:
    settings = {"BACKEND_MIN_BYTES": str(MIN_BYTES), **env}
    os.environ |= {f"DILOCO_COMM_{key}": value for key, value in settings.items()}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=30))
    store = dist.PrefixStore(f"{name}/{world}", store)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        for key in settings:
            del os.environ[f"DILOCO_COMM_{key}"]


def numbers(rank: int, count: int = LARGE) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))
