"""What the tests of the exchange share: jobs for the workers, and what the reference gives."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diloco_comm.base.service.keys import allow, make_pairs
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.round import Header, Mean
from diloco_comm.ops import reference
from diloco_comm.ops.wire import Layout, WireFormat, mean_layout

CHUNK_BYTES = 4096
# Elements of an exchange that may fail.
N = 60_000
# Its seconds: a failure must be noticed, and whoever waits for the timeout instead does not end
# within the limit of a test.
TIMEOUT = 300.0


def values(seed: int, replica: int, num_elements: int) -> Tensor:
    """Pseudo-random values with a wide range of magnitudes, different for each replica."""
    generator = torch.Generator().manual_seed(1000 * seed + replica)
    x = torch.randn(num_elements, generator=generator)
    return x * torch.exp2(torch.randint(-6, 3, (num_elements,), generator=generator).float())


def split(flat: Tensor) -> list[Tensor]:
    """The same elements as several tensors, cut at places that divide nothing."""
    n = flat.numel()
    sizes = [n // 3, 0, n - n // 3 - n // 7, n // 7]
    return list(flat.split(sizes))


def digest(outcome: Mean) -> str:
    """One hash of the payload bytes that matter: those of the runs that hold elements."""
    total = hashlib.sha256()
    layout = outcome.layout
    for payload, coefficient in outcome.terms:
        total.update(repr(coefficient).encode())
        for run in range(layout.num_runs):
            begin, end = layout.run_range(run)
            if end > begin:
                part = payload[run * layout.run_bytes : (run + 1) * layout.run_bytes]
                total.update(part.numpy().tobytes())
    return total.hexdigest()


def reference_digest(
    params: list[list[Tensor]], layout: Layout, weights: list[float], **kwargs: Any
) -> str:
    terms = reference.all_reduce(params, layout, weights, **kwargs)
    outcome = Mean(terms, mean_layout(layout, len(params)), [], [], {}, 0, 0)
    return digest(outcome)


def decode(outcome: Mean) -> Tensor:
    layout = outcome.layout
    out = torch.zeros(layout.num_elements)
    payloads = [payload for payload, _ in outcome.terms]
    coefficients = [coefficient for _, coefficient in outcome.terms]
    form = (layout.run_elements, layout.wire.name, layout.wire.block_size)
    reference.decode(payloads, coefficients, [out], 0, layout.num_elements, *form)
    return out


@contextlib.contextmanager
def exchange(rank: int, world: int, **kwargs: Any) -> Iterator[Exchange]:
    """An exchange among the workers' default group."""
    defaults: dict[str, Any] = {"chunk_bytes": CHUNK_BYTES, "timeout": timedelta(seconds=30)}
    made = Exchange.from_group(dist.group.WORLD, **{**defaults, **kwargs})
    try:
        yield made
    finally:
        made.close()


def sync(
    ex: Exchange,
    buffers: Any,
    params: list[Tensor],
    *,
    weight: float = 1.0,
    round: int = 0,
    fragment: int = 0,
    **kwargs: Any,
) -> Mean:
    header = Header("sync", fragment=fragment, round=round, weight=weight)
    return ex.start(buffers, outer=None, params=params, header=header, **kwargs).wait(40)


def wire_of(name: str) -> WireFormat:
    return WireFormat(name, 64)


def connect_replica(
    address: tuple[str, int], replica: int, members: list[int], **kwargs: Any
) -> Exchange:
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=30))
    defaults: dict[str, Any] = {
        "chunk_bytes": CHUNK_BYTES, "timeout": TIMEOUT, "report_patience": 2.0, "window": 3,
    }  # fmt: skip
    return Exchange(store, replica, members, **{**defaults, **kwargs})


def gives_reference_bytes(ex: Exchange, buffers: Any, round: int, members: list[int]) -> bool:
    """Whether one exchange among ``members`` gives the bytes of the reference."""
    inputs = [[values(round, replica, N)] for replica in members]
    outcome = sync(ex, buffers, inputs[ex.rank], round=round)
    buffers.commit()
    return digest(outcome) == reference_digest(inputs, buffers.layout, [1.0] * len(members))


def check_pairs(results: list[list[tuple[str, str]]]) -> None:
    """Compare what each rank got with what was expected, and the ranks with each other."""
    for rank_results in results:
        for got, expected in rank_results:
            assert got == expected
    assert all(result == results[0] for result in results)


def folder_of(root: str | Path, replica: int) -> Path:
    return Path(root, str(replica))


def make_folders(root: Path, world: int) -> None:
    """Make a folder of keys for each replica, which lets all others in."""
    for replica in range(world):
        make_pairs(folder_of(root, replica), [f"r{replica}"])
    for replica in range(world):
        others = [other for other in range(world) if other != replica]
        files = [folder_of(root, other) / f"r{other}.key" for other in others]
        allow(folder_of(root, replica), files)
