"""An elastic group whose members bind the keys of links to numbers of replicas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from elastic_replicas import attach, train_to
from elastic_replicas import registry as registry
from exchange_helpers import folder_of, make_folders
from registries import Host
from workers import Pool

from diloco_comm import Link, ReplicaMismatch
from diloco_comm.base.service.keys import allow


def _member(rank: int, world: int, address: tuple[str, int], registry: str, root: str) -> Any:
    """Train until the newcomer, the last replica, has come twice; replica 1 is in charge of keys.

    Returns:
        Why the newcomer was refused (empty on the members), the members at last, and the hash.
    """
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=60))
    newcomer, refusal = world - 1, ""
    # The shortest wait of a member for a newcomer that the member's other members refuse.
    link = Link("tcp", listen="127.0.0.1:0", keys=folder_of(root, rank), suspect_after=3.0)
    options = {"link": link, "timeout": 60.0}
    membership = {"min_replicas": 2, "quorum_wait": 60.0, "founding_wait": 2.0}
    membership["suspect_after"] = 20.0
    if rank == newcomer:
        store.wait([f"began/{replica}" for replica in range(newcomer)])
        with pytest.raises(ReplicaMismatch) as caught:
            attach(registry, rank, options, **membership)
        refusal = str(caught.value)
        bind(root, world)
    diloco, model, optimizer = attach(registry, rank, options, **membership)
    with closing(diloco):
        train_to(diloco, model, optimizer, rank, 4)
        store.set(f"began/{rank}", "")
        while len(diloco.members) < world:
            train_to(diloco, model, optimizer, rank, diloco.inner_step + 1)
        train_to(diloco, model, optimizer, rank, diloco.inner_step + 8)
        return refusal, diloco.members, diloco.outer_hash()


def bind(root: str | Path, world: int, *numbers: int) -> None:
    """Bind the key of the newcomer in the folder of replica 1."""
    file = folder_of(root, world - 1) / f"r{world - 1}.key"
    allow(folder_of(root, 1), [file], numbers or [world - 1])


@pytest.mark.nightly("12 s; the first tier has the same refusal in a fixed group")
def test_a_newcomer_whose_key_has_another_number_ends(
    fresh_workers: Callable[..., Pool], registry: Host, tmp_path: Path
) -> None:
    """One member alone refuses the newcomer; the members go on, and the right number comes in."""
    make_folders(tmp_path, 3)
    bind(tmp_path, 3, 5)
    pool = fresh_workers(3, init_group=False)
    ends = pool.run(_member, pool.store, registry.address, str(tmp_path), timeout=90)
    refusal = ends[2][0]
    assert "the allowed keys of replica 1 bind the key r2.key (" in refusal
    assert "to replica 5, and the owner of that key takes part as replica 2: " in refusal
    assert [members for _, members, _ in ends] == [(0, 1, 2)] * 3
    assert len({outer for *_, outer in ends}) == 1
