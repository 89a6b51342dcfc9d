"""The stores at which groups of gloo connect: on a member, and one for all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from elastic_replicas import attach, train_to
from elastic_replicas import registry as registry
from exchange_helpers import folder_of, make_folders
from fault_replicas import connect, listen_to_the_log
from registries import Host
from workers import Pool

from diloco_comm import DiLoCo, Elastic, SyncError, connect_store
from diloco_comm.base.service.keys import LinkKeys
from diloco_comm.base.store_host import open_store
from diloco_comm.elastic.options import Place, meeting_place, own_interface
from diloco_comm.exchange.membership import change

GLOO = {"backend": "gloo"}
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


def _train(diloco: DiLoCo, model: Any, optimizer: Any, rank: int, until: int) -> None:
    """Train; after a Ctrl-C, too."""
    while diloco.inner_step < until and not diloco.is_done:
        with suppress(KeyboardInterrupt):
            train_to(diloco, model, optimizer, rank, until)


def _member(rank: int, world: int, registry: str, shared: str | None, **choices: Any) -> Any:
    """Train over gloo in a group of three, which the last replica leaves in the middle."""
    choices = {"min_replicas": 2, "founding_wait": 2.0, "suspect_after": 20.0, **choices}
    diloco, model, optimizer = attach(registry, rank, GLOO, store=shared, **choices)
    with closing(diloco):
        first = diloco.members
        _train(diloco, model, optimizer, rank, 12)
        if rank == world - 1:
            diloco.leave()
        # A registry may hear of that some rounds later.
        while diloco.members == first and not diloco.is_done:
            _train(diloco, model, optimizer, rank, diloco.inner_step + 1)
        _train(diloco, model, optimizer, rank, diloco.inner_step + 12)
        return first, diloco.members, diloco.outer_hash()


@pytest.mark.parametrize("is_shared", [False, True], ids=["hosted", "shared"])
def test_groups_of_gloo_connect_at_stores(
    fresh_workers: Callable[..., Pool], registry: Host, is_shared: bool
) -> None:
    hosted = open_store("127.0.0.1", 0)
    shared = hosted.address if is_shared else None
    pool = fresh_workers(3, init_group=False)
    ends = pool.run(_member, registry.address, shared, timeout=60)
    assert [first for first, *_ in ends] == [(0, 1, 2)] * 3
    assert [members for _, members, _ in ends[:2]] == [(0, 1)] * 2
    assert ends[0][2] == ends[1][2]
    # The keys of the last view alone are left.
    names = {name.split("/")[1] for name in hosted.store.list_keys()}
    assert len(names) == (1 if is_shared else 0), names


# ------------------------------------------------------------------- who never comes to connect


def _beside_one_that_never_connects(
    rank: int, world: int, store: tuple[str, int], registry: str, round_log: int
) -> Any:
    """Replica 2 comes later: it is heard on its link, and no group of gloo with it connects."""
    signs, num_attempts, connect_all = connect(store), 0, change.connect

    def connect_or_not(member: Any, attempt: Any) -> Any:
        nonlocal num_attempts
        num_attempts += 2 in attempt.members
        if rank == 2:
            raise SyncError("no route to any host", stage="connect")
        return connect_all(member, attempt)

    change.GLOO_LIMIT_S, change.connect = 1.0, connect_or_not
    if rank == 2:
        signs.wait(["founded"])
    lines = listen_to_the_log()
    membership = {"min_replicas": 2, "quorum_wait": 20.0, "suspect_after": 2.0}
    membership |= {"founding_wait": 2.0, "round_log_bytes": round_log}
    try:
        diloco, model, optimizer = attach(registry, rank, GLOO, **membership)
        with closing(diloco):
            signs.set("founded", "")
            while diloco.inner_step < 100:
                train_to(diloco, model, optimizer, rank, diloco.inner_step + 1)
                time.sleep(0.1)
            return diloco.members, diloco.outer_hash(), num_attempts, lines
    except SyncError as error:
        return str(error)


@pytest.mark.parametrize("round_log", [0, 1 << 20], ids=["copied", "beside"])
@pytest.mark.nightly("15 s each; the core's tests have the waits", but=["copied"])
def test_members_train_on_beside_one_that_never_connects(
    fresh_workers: Callable[..., Pool], registry: Host, round_log: int
) -> None:
    pool = fresh_workers(3, init_group=False)
    arguments = pool.store, registry.address, round_log
    ends = pool.run(_beside_one_that_never_connects, *arguments, timeout=100)
    # Each of 25 rounds could let the newcomer in.
    assert [(members, 1 <= num <= 6) for members, _, num, _ in ends[:2]] == 2 * [((0, 1), True)]
    assert ends[0][1] == ends[1][1]
    for *_, lines in ends[:2]:
        found = [line for line in lines if line.startswith("replica 2 is not let in for ")]
        assert found and "as no group with it could connect: " in found[0], lines


def _leave_and_fail_once(rank: int, world: int, registry: str, how: str) -> Any:
    """Replica 2 leaves, and the next group fails to connect once at replica 1."""
    known: list[bool] = []
    connect_all = change.connect

    def connect_but_once(member: Any, attempt: Any) -> Any:
        if rank == 1 and 2 not in attempt.members and not known:
            known.append(attempt.record is not None)
            if how == "ctrl-c":
                raise KeyboardInterrupt
            raise SyncError("lost on purpose", stage="connect")
        return connect_all(member, attempt)

    change.GLOO_LIMIT_S, change.connect = 1.0, connect_but_once
    return known, _member(rank, world, registry, None)


@pytest.mark.parametrize("how", ["error", "ctrl-c"])
@pytest.mark.nightly("4 s each; they differ in the failure alone", but=["error"])
def test_a_view_that_cannot_begin_is_followed_by_another(
    fresh_workers: Callable[..., Pool], registry: Host, how: str
) -> None:
    """The members had agreed on the view before they connected, as a replica had left."""
    pool = fresh_workers(3, init_group=False)
    ends = pool.run(_leave_and_fail_once, registry.address, how, timeout=60)
    assert [known for known, _ in ends] == [[], [True], []]
    (_, members, outer), (_, others, same) = [end for _, end in ends[:2]]
    assert members == others == (0, 1) and outer == same


# ------------------------------------------------------------------- a store that members share


def _leave_as_the_store_dies(rank: int, world: int, registry: str, shared: str, pid: int) -> Any:
    leave = DiLoCo.leave

    def kill_and_leave(diloco: DiLoCo) -> None:
        os.kill(pid, signal.SIGKILL)
        leave(diloco)

    DiLoCo.leave = kill_and_leave  # type: ignore[method-assign]
    lines = listen_to_the_log()
    # A store must answer within ``suspect_after``.
    return _member(rank, world, registry, shared, suspect_after=2.0), lines


def test_a_view_waits_for_a_shared_store_that_has_died(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(3, init_group=False)
    with ExitStack() as stack:
        address, process = stack.enter_context(hosting_store(None))

        def bring_back() -> None:
            process.join()
            time.sleep(5.0)
            stack.enter_context(hosting_store(None, address))

        thread = threading.Thread(target=bring_back)
        thread.start()
        arguments = registry.address, address, process.pid
        ends = pool.run(_leave_as_the_store_dies, *arguments, timeout=90)
        thread.join()
    (_, members, outer), (_, others, same) = [end for end, _ in ends[:2]]
    assert members == others == (0, 1) and outer == same
    assert any(
        f"the store of the view, at {address}, did not answer" in line for line in ends[0][1]
    )


def test_the_lowest_member_tidies_its_own_run() -> None:
    hosted = open_store("127.0.0.1", 0)
    low, high = (Place.shared(hosted.address, "paris", 10.0) for _ in range(2))
    for run, attempt in (("paris", "a.1"), ("paris", "a.2"), ("tokyo", "c.1")):
        meeting_place(run, attempt, hosted.address, 10.0).set("key", "1")
    every = {"paris/a.1/key", "paris/a.2/key", "tokyo/c.1/key"}
    high.tidy("a.2", is_lowest=False)
    assert every == set(hosted.store.list_keys())
    low.tidy("a.2", is_lowest=True)
    assert every - {"paris/a.1/key"} == set(hosted.store.list_keys())


def test_a_shared_store_may_stop_and_start_again() -> None:
    with hosting_store(None) as (address, host):
        place = Place.shared(address, "paris", 10.0)
        os.kill(host.pid, signal.SIGSTOP)
        begin = time.monotonic()
        place.tidy("a.2", is_lowest=True)
        assert time.monotonic() - begin < 30
        os.kill(host.pid, signal.SIGKILL)
        host.join()
        place.tidy("a.3", is_lowest=True)
    with hosting_store(None, address) as (again, _):
        assert again == address
        old = meeting_place("paris", "a.3", address, 10.0)
        old.set("key", "1")
        place.tidy("a.4", is_lowest=True)
        assert not old.check(["key"])


def test_the_registry_may_be_a_store_with_keys(tmp_path: Path) -> None:
    make_folders(tmp_path, 2)
    keys = [LinkKeys.read(folder_of(tmp_path, number)) for number in range(2)]
    hosted = open_store("127.0.0.2", 0, keys[0])
    store = connect_store(hosted.address, keys=folder_of(tmp_path, 1), timeout=10.0)
    assert own_interface(dist.PrefixStore("runs", store)) == own_interface(hosted.address)
    for wrong in (5, "tcp://localhost", ("tcp://localhost", 5)):
        with pytest.raises((TypeError, ValueError), match="store must be tcp://host:port with"):
            Elastic("tcp://127.0.0.1:1", store=wrong)  # type: ignore[arg-type]
