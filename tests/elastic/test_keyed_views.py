"""An elastic group whose link has keys: the stores of its views ask for a key, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elastic_replicas import registry as registry
from exchange_helpers import folder_of, make_folders
from fault_replicas import make_model, make_optimizer
from registries import Host
from test_elastic_lost import OPTIONS, train
from workers import Pool

from diloco_comm import DiLoCo, Elastic, Link
from diloco_comm.base.store_host import _speaks_tls
from diloco_comm.options import grouped


def _member(rank: int, world: int, store: Any, registry: str, root: str) -> Any:
    """Train in a group of three, which the last replica leaves in the middle."""
    model = make_model()
    optimizer = make_optimizer(model)
    peers = Elastic(registry, run="test", replica=rank, min_replicas=2, quorum_wait=40.0)
    link = Link("tcp", listen="127.0.0.1:0", keys=folder_of(root, rank), suspect_after=3.0)
    options = grouped({"link": link, "timeout": 40.0, **OPTIONS})
    with closing(DiLoCo(model, optimizer, peers=peers, **options)) as diloco:
        first = diloco.members
        train(diloco, model, optimizer, rank, 12)
        # The process hosts a store, whether or not a view has met there.
        place = urlsplit(diloco._elastic.group._place.address)  # type: ignore[union-attr]
        is_keyed = _speaks_tls(str(place.hostname), int(place.port or 0), 5.0)
        if rank == world - 1:
            diloco.leave()
        train(diloco, model, optimizer, rank, 24)
        return first, is_keyed, diloco.members, diloco.outer_hash()


def test_views_meet_at_stores_with_keys(
    fresh_workers: Callable[..., Pool], registry: Host, tmp_path: Path
) -> None:
    make_folders(tmp_path, 3)
    pool = fresh_workers(3, init_group=False)
    ends = pool.run(_member, pool.store, registry.address, str(tmp_path), timeout=60)
    assert [first for first, *_ in ends] == [(0, 1, 2)] * 3
    assert all(is_keyed for _, is_keyed, *_ in ends)
    assert [members for _, _, members, _ in ends[:2]] == [(0, 1)] * 2
    assert ends[0][3] == ends[1][3]
