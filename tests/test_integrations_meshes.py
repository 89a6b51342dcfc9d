"""Replicas of several workers, as the example makes them: FSDP2 and DDP inside, DiLoCo between."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "replicas_of_several_workers.py"


def run_example(rank: int, world: int, inside: str, replicas: int) -> tuple[float, str, bytes, int]:
    """Return the last loss, the shard's hash, the whole parameters, and the outer elements here."""
    sys.argv = [str(SCRIPT), "--inside", inside, "--replicas", str(replicas), "--steps", "60"]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        # A mesh that spans replicas is a warning of DiLoCo's.
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", module="torch")
        end = runpy.run_path(str(SCRIPT))
    whole = [
        param.full_tensor() if isinstance(param, DTensor) else param
        for param in end["model"].parameters()
    ]
    parameters = torch.cat([param.detach().flatten() for param in whole])
    diloco = end["diloco"]
    num_outer = sum(part.outer.numel() for part in diloco.parts)
    hashes = [""] * world
    dist.all_gather_object(hashes, diloco.outer_hash())
    per_replica = world // replicas
    same_shard = {hashes[r] for r in range(rank % per_replica, world, per_replica)}
    assert len(same_shard) == 1
    return end["loss"].item(), hashes[rank], parameters.numpy().tobytes(), num_outer


@pytest.mark.parametrize(("world", "inside", "replicas"), [(4, "fsdp2", 2), (4, "ddp", 2)])
def test_replicas_of_several_workers(world: int, inside: str, replicas: int, workers) -> None:
    results = workers(world).run(run_example, inside, replicas)
    # All replicas end with the same parameters, of which each worker keeps its part.
    assert len({parameters for _, _, parameters, _ in results}) == 1
    num_elements = len(results[0][2]) // 4
    per_replica = world // replicas
    assert sum(num_outer for *_, num_outer in results[:per_replica]) == pytest.approx(
        num_elements, abs=256 * per_replica
    )
    # The sum of eight standard normal numbers has variance 8.
    assert all(loss < 6.0 for loss, *_ in results)
