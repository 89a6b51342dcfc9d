"""Descriptions and hashes of what replicas exchange, which must be alike on all of them."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from . import sharding
from .fragments import Fragment
from .schedule import Schedule


def describe_parameters(fragments: Sequence[Fragment], *, whole: bool = False) -> list[str]:
    """Describe every parameter in one line: fragment, name, shape, strides, dtype.

    Args:
        whole: Describe DTensors as wholes, however they are sharded, not this worker's shards.
    """
    lines = []
    for fragment in fragments:
        if fragment.alignment > 1:
            lines.append(f"fragment {fragment.index} aligned to {fragment.alignment}")
        if fragment.placement and not whole:
            lines.append(f"fragment {fragment.index} {fragment.placement}")
        for name, param in zip(fragment.names, fragment.params, strict=True):
            lines.append(describe(f"{fragment.index} {name}", param, whole=whole))
    return lines


def describe(what: str, tensor: Tensor, *, whole: bool = False) -> str:
    """Describe a tensor in one line: name, shape, strides, dtype, and which shard."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if whole or not sharding.is_sharded(tensor):
        return f"{what} {list(tensor.shape)} {list(tensor.stride())} {dtype}"
    shard = sharding.local(tensor)
    shape = f"{list(shard.shape)} {list(shard.stride())}"
    return f"{what} {shape} {dtype}, {sharding.position(tensor)}"


def layout_hash(fragments: Sequence[Fragment], schedule: Schedule, *, whole: bool = False) -> int:
    """Hash names, shapes, dtypes, fragments, H and offsets to 63 bits, alike on all replicas.

    ``whole`` as in ``describe_parameters``: then alike on all shards, too.
    """
    lines = describe_parameters(fragments, whole=whole)
    text = json.dumps([lines, schedule.sync_every, schedule.offsets])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def same_memory(these: str) -> str:
    """Return the sentence about two replicas, or workers, with the same tensors in memory."""
    return (
        f"{these} train the same tensors in shared memory, as torch.multiprocessing passes a model "
        "to its processes: make the model in each process, or begin there with "
        "model = copy.deepcopy(model)"
    )


def shared_memory(tensors: Iterable[Tensor]) -> list[str]:
    """Name the places in shared memory where tensors lie, alike in all processes of a machine.

    Returns:
        A digest of boot, device, inode and offset for each tensor in a shared mapping. A tensor on
        the CPU says by ``is_shared()`` that it lies in one, as ``torch.multiprocessing`` leaves the
        tensors that it passes; on another device that says nothing.
    """
    addresses = [t.data_ptr() for t in tensors if t.device.type == "cpu" and t.numel()
                 and t.is_shared()]  # fmt: skip
    if not addresses:
        return []
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    begins = [int(words[0].partition("-")[0], 16) for words in maps]
    places = []
    for address in addresses:
        index = bisect.bisect(begins, address) - 1
        _, _, offset, device, inode, *_ = maps[index]
        place = f"{boot} {device} {inode} {int(offset, 16) + address - begins[index]}"
        places.append(hashlib.blake2b(place.encode(), digest_size=8).hexdigest())
    return places
