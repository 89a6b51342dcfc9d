"""Samples, the last step and the sums of replicas that come and go."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from elastic_replicas import OPTIONS, PACE_S, SUSPECT_AFTER_S, attach
from elastic_replicas import registry as registry
from fault_replicas import connect, take_inner_step
from registries import Host
from torch.utils.data import DataLoader, SubsetRandomSampler
from workers import Pool

from diloco_comm import ElasticSampler, ReplicaMismatch, SyncError
from diloco_comm.elastic.events import ElasticTotals, Meter
from diloco_comm.rounds.handshake import gather_json
from diloco_comm.training import leases

NUM_SAMPLES, BATCH, LAST_STEP = 1 << 20, 3, 400
WAITS = {"suspect_after": SUSPECT_AFTER_S, "founding_wait": 2.0}


@dataclass
class End:
    samples: list[int]
    inner_step: int
    outer: str
    totals: ElasticTotals
    leases: set[int]


def break_off_once(number: int) -> None:
    """Let the ``number``-th message about leases fail here, when it has come to all others."""
    numbers = itertools.count(1)

    def gather(*arguments: Any) -> list[Any]:
        values = gather_json(*arguments)
        if next(numbers) == number:
            raise SyncError("a link broke", stage="view")
        return values

    leases.gather_json = gather  # type: ignore[attr-defined]


def live(
    rank: int,
    world: int,
    store: tuple[str, int],
    registry: str,
    num_loaders: int,
    folder: str,
    broken: int = 0,
) -> End:
    """Replicas 0 and 1 begin, 2 joins; replica 1 dies between two outer steps."""
    signs = connect(store)
    if broken and rank == 0:
        break_off_once(broken)
    if rank == 2:
        signs.wait(["start 2"])
    diloco, model, optimizer = attach(registry, rank, total_steps=LAST_STEP, **WAITS)
    sampler = ElasticSampler(NUM_SAMPLES, diloco, batch_size=BATCH, seed=3)
    data = range(NUM_SAMPLES)
    loader: Any = DataLoader(
        data,  # type: ignore[arg-type]
        BATCH,
        sampler=sampler,
        num_workers=num_loaders,
        multiprocessing_context="fork" if num_loaders else None,
    )
    samples: list[int] = []
    written = Path(folder, f"samples-{rank}").open("w")
    for batch in loader:
        samples += batch.tolist()
        print(*batch.tolist(), file=written, flush=True)
        if diloco.inner_step >= 20:
            signs.set("start 2", "now")
        if rank == 1 and diloco.inner_step % 4 == 2 and len(diloco.members) == 3 and not broken:
            os._exit(1)
        take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
        time.sleep(PACE_S)
        if diloco.is_done:
            break
    assert diloco.is_done
    outer = diloco.outer_hash()
    totals = diloco.elastic_totals()
    places = sampler._orders.order(0).argsort()[samples]
    diloco.flush()
    diloco.close()
    return End(samples, diloco.inner_step, outer, totals, set((places // BATCH).tolist()))


def test_a_turn_of_the_book_that_breaks_off(
    fresh_workers: Callable[..., Pool], registry: Host, tmp_path: Path
) -> None:
    """Replica 0 does not see the end of a change; the others have gone on with the next plan."""
    pool = fresh_workers(3, init_group=False)
    ends = pool.run(live, pool.store, registry.address, 0, str(tmp_path), 2, timeout=60)
    assert len({(end.outer, end.inner_step) for end in ends}) == 1
    leases = [one for end in ends for one in end.leases]
    assert len(set(leases)) == len(leases) == sum(len(end.samples) for end in ends) / BATCH
    # Nothing is left out, but for a few leases at the end, where the replicas have not come yet.
    assert set(range(max(leases) - 10)) <= set(leases)
    assert ends[1].totals.num_views > ends[0].totals.num_views


@pytest.mark.nightly("14 s; test_leases has disjoint leases of samples")
@pytest.mark.parametrize("num_loaders", [0, 1])
def test_no_two_replicas_take_the_same_sample(
    fresh_workers: Callable[..., Pool], registry: Host, tmp_path: Path, num_loaders: int
) -> None:
    pool = fresh_workers(3, init_group=False)
    ends = pool.run(
        live,
        pool.store,
        registry.address,
        num_loaders,
        str(tmp_path),
        timeout=60,
        expect_exit={1},
    )
    first, _, joined = ends
    assert first.inner_step == joined.inner_step == LAST_STEP
    assert first.outer == joined.outer
    mine, theirs = set(first.samples), set(joined.samples)
    # The death ends the view between two steps, and a survivor that was ahead takes these steps
    # again: a round at most, as all have met in the last one.
    assert len(mine) == len(first.samples)
    assert BATCH * LAST_STEP <= len(mine) <= BATCH * (LAST_STEP + OPTIONS["sync_every"])
    assert len(theirs) == len(joined.samples) and not mine & theirs
    # The lost replica's last samples, which it never shared, are given out again.
    lines = (tmp_path / "samples-1").read_text().splitlines()
    lost = [[int(one) for one in line.split()] for line in lines]
    assert set(lost[-3]) | set(lost[-2]) <= mine | theirs
    assert not {one for batch in lost[:-4] for one in batch} & (mine | theirs)
    assert first.totals.num_views == 3 and joined.totals.num_views == 2
    assert first.totals.forming_s > 0 and 0 < first.totals.goodput < 1
    assert joined.totals.joining_s > 0


def read_own_part(
    rank: int, world: int, store: tuple[str, int], registry: str
) -> tuple[list[int], int, str]:
    """Train to the last step on a loader that ``diloco.shard`` has made."""
    diloco, model, optimizer = attach(registry, rank, total_steps=24, min_replicas=2, **WAITS)
    data: Any = range(NUM_SAMPLES)
    loader = diloco.shard(DataLoader(data, BATCH, shuffle=True), batches_per_step=2)
    with pytest.raises(ValueError, match="sharded already"):
        diloco.shard(loader)
    with pytest.raises(ValueError, match=r"sampler=ElasticSampler\(dataset, diloco, batch_size="):
        diloco.shard(DataLoader(data, BATCH, sampler=SubsetRandomSampler([1])))
    samples: list[int] = []
    for number, batch in enumerate(loader, 1):
        samples += batch.tolist()
        if number % 2 == 0:
            take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
        if diloco.is_done:
            break
    outer = diloco.outer_hash()
    diloco.close()
    return samples, diloco.inner_step, outer


def test_a_sharded_loader_of_an_elastic_group(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(2, init_group=False)
    first, second = pool.run(read_own_part, pool.store, registry.address, timeout=60)
    assert first[1:] == second[1:] and first[1] == 24
    assert len(first[0]) == len(second[0]) == 24 * 2 * BATCH
    assert len({*first[0], *second[0]}) == 2 * 24 * 2 * BATCH


def differ(rank: int, world: int, store: tuple[str, int], registry: str) -> str:
    """Replica 1 comes with another setting, and replica 2 with a number that is taken."""
    signs = connect(store)
    if rank == 0:
        diloco, model, optimizer = attach(registry, 0, total_steps=10**6)
        signs.set("begun", "now")
        while not signs.check(["refused 1", "refused 2"]):
            take_inner_step(model, optimizer, 0, diloco.inner_step + 1)
        diloco.close()
        return ""
    signs.wait(["begun"])
    steps, number = (10, 1) if rank == 1 else (10**6, 0)
    error = ""
    try:
        attach(registry, number, total_steps=steps, quorum_wait=2.0)
    except SyncError as refused:
        error = f"{type(refused).__name__}: {refused}"
    signs.set(f"refused {rank}", "now")
    return error


def test_a_newcomer_hears_what_does_not_fit(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(3, init_group=False)
    _, other, taken = pool.run(differ, pool.store, registry.address, timeout=60)
    assert other.startswith(ReplicaMismatch.__name__)
    assert "total_steps is 10 on replica 1 and 1000000 on replica 0" in other
    assert "until the other process with replica number 0 has gone" in taken


# ---------------------------------------------------------------- The sums of one replica's changes


def test_the_times_of_two_views() -> None:
    meter = Meter(100.0)
    meter.waits(101.0, True)
    meter.waits(102.0, True)
    assert meter.totals(103.0) == ElasticTotals(elapsed_s=3, joining_s=3, waiting_s=2)
    meter.waits(104.0, False)
    meter.entered(105.0, 5.0)
    meter.entered(115.0, 4.0)
    meter.discarded(2)
    totals = meter.totals(125.0)
    assert totals == ElasticTotals(25, 5, 4, 3, 2, 2)
    assert totals.goodput == 0.8
    assert ElasticTotals().goodput == 0.0


def share_a_folder(rank: int, world: int, store: tuple[str, int], registry: str, path: str) -> int:
    """Replica 0 has a folder as a launcher gives it; the second process has a copy of the folder.

    Returns the number of the replica when both train.
    """
    signs = connect(store)
    if rank == 1:
        signs.wait(["begun"])
        # Replica 0 trains on, and may be writing a new version beside its file.
        unfinished = shutil.ignore_patterns("*.partial.*")
        shutil.copytree(f"{path}/0", f"{path}/1", ignore=unfinished)
    os.environ["DILOCO_COMM_STATE_DIR"] = f"{path}/{rank}"
    try:
        diloco, model, optimizer = attach(registry, None, total_steps=10**6)
    finally:
        del os.environ["DILOCO_COMM_STATE_DIR"]
    signs.set("begun", "now")
    while len(diloco.members) < 2:
        take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
        time.sleep(PACE_S)
    number = diloco.members[diloco.replica_index]
    diloco.close()
    return number


@pytest.mark.nightly("4 s; it differs from a new folder in one file")
def test_a_copied_state_folder_gives_another_number(
    fresh_workers: Callable[..., Pool], registry: Host, tmp_path: Path
) -> None:
    pool = fresh_workers(2, init_group=False)
    assert pool.run(share_a_folder, pool.store, registry.address, str(tmp_path)) == [0, 1]
