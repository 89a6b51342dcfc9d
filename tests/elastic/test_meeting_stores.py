"""The stores at which the members of an elastic group meet: with keys, and one for all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch.distributed as dist
from choice_groups import grouped
from diloco_comm.elastic.views import OPEN, Member, View
from elastic_replicas import registry as registry
from exchange_helpers import folder_of, make_folders
from fault_replicas import make_model, make_optimizer
from registries import Host
from test_elastic_lost import OPTIONS, train
from workers import Pool

from diloco_comm import DiLoCo, Elastic, Link, connect_store
from diloco_comm.base.service.keys import LinkKeys
from diloco_comm.base.store_host import dial_store, open_store
from diloco_comm.elastic.hosting import (
    Place,
    meeting_place,
    own_interface,
    place_of_workers,
    settings_of,
)

_forks = multiprocessing.get_context("forkserver")


def _host(out: Any, port: int, place: Path | None) -> None:
    hosted = open_store("127.0.0.1", port, None if place is None else LinkKeys.read(place))
    out.send(hosted.address)
    signal.pause()


@contextmanager
def hosting_store(keys: LinkKeys | None, address: str = "tcp://127.0.0.1:0") -> Iterator[Any]:
    """Host a store in a process of its own; yield the address and the process."""
    here, there = multiprocessing.Pipe()
    place = None if keys is None else keys.folder
    port = int(address.rpartition(":")[2])
    process = _forks.Process(target=_host, args=(there, port, place), daemon=True)
    process.start()
    try:
        assert here.poll(60)
        yield here.recv(), process
    finally:
        process.kill()
        process.join()


def _member(rank: int, world: int, registry: str, root: str, shared: str | None) -> Any:
    """Train in a group of three, which the last replica leaves in the middle."""
    model = make_model()
    optimizer = make_optimizer(model)
    peers = Elastic(
        registry, run="test", replica=rank, min_replicas=2, quorum_wait=40.0, store=shared
    )
    link = Link("tcp", listen="127.0.0.1:0", keys=folder_of(root, rank), suspect_after=3.0)
    options = grouped({"link": link, "timeout": 40.0, **OPTIONS})
    with closing(DiLoCo(model, optimizer, peers=peers, **options)) as diloco:
        first = diloco.members
        train(diloco, model, optimizer, rank, 12)
        # The process's own store, whether or not a view has met there, or the shared one.
        place = urlsplit(diloco._elastic.group._place.address)  # type: ignore[union-attr]
        with pytest.raises(dist.DistStoreError) as refused:
            dial_store(str(place.hostname), int(place.port or 0), 20.0)
        is_keyed = "has keys" in str(refused.value)
        if rank == world - 1:
            diloco.leave()
        # A registry may hear of that some rounds later.
        while diloco.members == first and not diloco.is_done:
            train(diloco, model, optimizer, rank, diloco.inner_step + 1)
        train(diloco, model, optimizer, rank, diloco.inner_step + 12)
        return first, is_keyed, diloco.members, diloco.outer_hash()


@pytest.mark.parametrize("is_shared", [False, True], ids=["hosted", "shared"])
def test_views_meet_at_stores_with_keys(
    fresh_workers: Callable[..., Pool], registry: Host, tmp_path: Path, is_shared: bool
) -> None:
    make_folders(tmp_path, 4)
    hosted = open_store("127.0.0.1", 0, LinkKeys.read(folder_of(tmp_path, 3)))
    shared = hosted.address if is_shared else None
    pool = fresh_workers(3, init_group=False)
    ends = pool.run(_member, registry.address, str(tmp_path), shared, timeout=60)
    assert [first for first, *_ in ends] == [(0, 1, 2)] * 3
    assert all(is_keyed for _, is_keyed, *_ in ends)
    assert [members for _, _, members, _ in ends[:2]] == [(0, 1)] * 2
    assert ends[0][3] == ends[1][3]
    # The members tell their settings while they live, and the last view is not deleted. The
    # replica that leaves may still write of itself into the view before, when that is deleted.
    names = hosted.store.list_keys()
    assert not any("settings" in name for name in names)
    own = "any_left", "beat/2", "report/2"
    views = {
        name.split("/")[1]
        for name in names
        if not ("/view1/" in name and name.partition("/board/")[2] in own)
    }
    assert len(views) == (1 if is_shared else 0), views


# ------------------------------------------------------------------- a store that members share


def view(number: int, *nonces: str, run: str = "paris") -> View:
    members = tuple([Member(n, nonce, "", 1, "") for n, nonce in enumerate(nonces)])
    return View(run, number, "", OPEN, members, number, (), 0, nonces[0])


def opened(place: Place, nonce: str) -> Place:
    place.publish(nonce, f"settings of {nonce}")
    return place


@pytest.fixture(params=[False, True], ids=["plain", "keyed"])
def sharing(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any]:
    """The keys of the shared store's host and of its clients, or none."""
    if not request.param:
        return None, None
    make_folders(tmp_path, 2)
    return tuple(LinkKeys.read(folder_of(tmp_path, number)) for number in range(2))  # type: ignore[return-value]


def test_the_lowest_member_tidies_its_own_run(sharing: tuple[Any, Any]) -> None:
    hosted = open_store("127.0.0.1", 0, sharing[0])
    low, high, other = (
        opened(Place.shared(hosted.address, run, 10.0, sharing[1]), nonce)
        for run, nonce in (("paris", "a"), ("paris", "b"), ("tokyo", "c"))
    )
    for one in (view(1, "a", "b"), view(2, "a", "b"), view(1, "c", run="tokyo")):
        meeting_place(one, hosted.address, 10.0, sharing[1]).set("key", "1")
        place_of_workers(one, 1, hosted.address, 10.0, sharing[1]).set("failed", "1")
    gone = opened(Place.shared(hosted.address, "paris", 10.0, sharing[1]), "gone")
    left = {
        *("paris/view2/a/key", "paris/view2/a/workers1/failed", "paris/view1/a/workers1/failed"),
        *("tokyo/view1/c/key", "tokyo/view1/c/workers1/failed"),
        *("paris/settings/a", "paris/settings/b", "tokyo/settings/c"),
    }
    high.tidy(view(2, "a", "b"))
    every = {*left, "paris/view1/a/key", "paris/settings/gone"}
    assert every == set(hosted.store.list_keys())
    low.tidy(view(2, "a", "b"))
    assert left == set(hosted.store.list_keys())
    # A process that waits shows its settings again when it has come in.
    gone.tidy(view(3, "a", "gone"))
    assert settings_of(view(3, "gone"), hosted.address, 10.0, sharing[1]) == "settings of gone"
    with pytest.raises(dist.DistStoreError, match="knows nothing of that replica"):
        settings_of(view(3, "z"), hosted.address, 10.0, sharing[1])
    for place in (low, high, gone):
        place.withdraw()
    assert not [key for key in hosted.store.list_keys() if key.startswith("paris/settings")]
    other.withdraw()


def test_a_shared_store_may_stop_and_start_again(sharing: tuple[Any, Any]) -> None:
    with hosting_store(sharing[0]) as (address, host):
        place = opened(Place.shared(address, "paris", 10.0, sharing[1]), "a")
        os.kill(host.pid, signal.SIGSTOP)
        begin = time.monotonic()
        place.tidy(view(2, "a"))
        place.withdraw()
        assert time.monotonic() - begin < 30
        os.kill(host.pid, signal.SIGKILL)
        host.join()
        place.tidy(view(3, "a"))
    with hosting_store(sharing[0], address) as (again, _):
        assert again == address
        place.tidy(view(4, "a"))
        assert settings_of(view(4, "a"), address, 10.0, sharing[1]) == "settings of a"


def test_the_registry_may_be_a_store_with_keys(tmp_path: Path) -> None:
    make_folders(tmp_path, 2)
    keys = [LinkKeys.read(folder_of(tmp_path, number)) for number in range(2)]
    hosted = open_store("127.0.0.2", 0, keys[0])
    store = connect_store(hosted.address, keys=folder_of(tmp_path, 1), timeout=10.0)
    assert own_interface(dist.PrefixStore("runs", store)) == own_interface(hosted.address)
    for wrong in (5, "tcp://localhost", ("tcp://localhost", 5)):
        with pytest.raises((TypeError, ValueError), match="store must be tcp://host:port with"):
            Elastic("tcp://127.0.0.1:1", store=wrong)  # type: ignore[arg-type]
