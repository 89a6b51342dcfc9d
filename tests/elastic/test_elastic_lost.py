"""All replicas have died, the registry is another one or an older one, or the run has ended."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from async_helpers import wait_until
from choice_groups import grouped
from commands import run_python
from elastic_replicas import OPTIONS, attach, train_to
from elastic_replicas import registry as registry
from fault_replicas import (
    connect,
    lines_of_the_log,
    make_model,
    make_optimizer,
    take_inner_step,
    wait_for,
)
from registries import KINDS, Host, hosting, make_registry_keys, place_of, serving
from support_paths import FOLDERS
from workers import Pool

from diloco_comm import DiLoCo, Elastic, ReplicaMismatch, RunEnded, Streaming, SyncError
from diloco_comm.elastic import options
from diloco_comm.elastic.exits import MISFIT, status_of
from diloco_comm.elastic.registry import connect as registry_at
from diloco_comm.elastic.state_folder import StateFolder
from diloco_comm.group import driver
from diloco_comm.group.records import NO_RECORD, Key


def checkpoint_of(num_steps: int, overlap: Any = None) -> tuple[dict[str, Any], str]:
    """Return the saved state and the outer hash of a training of one replica."""
    model = make_model()
    optimizer = make_optimizer(model)
    diloco = DiLoCo(model, optimizer, overlap=overlap, **grouped({"num_replicas": 1, **OPTIONS}))
    train_to(diloco, model, optimizer, num_steps, num_steps)
    return diloco.state_dict(), diloco.outer_hash()


# ------------------------------------------------------------------------ from a checkpoint


def begin(
    rank: int, world: int, store: tuple[str, int], registry: str, steps: dict[int, int], how: str
) -> tuple[int, str, str, str]:
    """Begin a run as one of its founders, some of whom bring a checkpoint of so many steps."""
    overlap = Streaming(delay=2, alpha=0.5) if how == "streaming" else None
    saved, outer = checkpoint_of(steps[rank], overlap) if rank in steps else (None, "")
    options = {"overlap": overlap}
    diloco, model, optimizer = attach(registry, rank, options, checkpoint=saved, min_replicas=world)
    first, begun = diloco.inner_step, diloco.outer_hash()
    train_to(diloco, model, optimizer, rank, first + 6)
    diloco.flush()
    diloco.close()
    return first, begun, outer, diloco.outer_hash()


@pytest.mark.parametrize(
    ("steps", "newest", "how"),
    [({0: 9, 1: 12}, 1, "blocking"), ({2: 8}, 2, "streaming"), ({}, -1, "blocking")],
    ids=["two checkpoints", "one", "none"],
)
@pytest.mark.nightly("3 s each; they differ in who brings a checkpoint", but=["two checkpoints"])
def test_a_group_begins_with_the_newest_checkpoint(
    fresh_workers: Callable[..., Pool],
    registry: Host,
    steps: dict[int, int],
    newest: int,
    how: str,
) -> None:
    pool = fresh_workers(3, init_group=False)
    ends = pool.run(begin, pool.store, registry.address, steps, how, timeout=60)
    outer = ends[newest][2] if newest >= 0 else ends[0][1]
    assert [end[:2] for end in ends] == 3 * [(steps.get(newest, 0), outer)]
    assert len({end[3] for end in ends}) == 1 and ends[0][3] != outer


def test_a_checkpoint_without_a_step_is_refused() -> None:
    saved, _ = checkpoint_of(4)
    with pytest.raises(ValueError, match="the saved state has the inner step None"):
        attach("tcp://127.0.0.1:1", 0, checkpoint={**saved, "inner_step": None})


def save_and_die(rank: int, world: int, store: tuple[str, int], registry: str, folder: str) -> None:
    diloco, model, optimizer = attach(registry, rank, min_replicas=world)
    train_to(diloco, model, optimizer, rank, 8 + 4 * rank)
    torch.save(diloco.state_dict(), f"{folder}/{rank}.pt")
    Path(folder, f"{rank}.hash").write_text(diloco.outer_hash())
    train_to(diloco, model, optimizer, rank, 21)
    os.kill(os.getpid(), signal.SIGKILL)


def come_again(
    rank: int, world: int, store: tuple[str, int], registry: str, folder: str, saved: list[int]
) -> Any:
    """Come with a checkpoint; return where the group goes on, or why this replica has ended."""
    path = f"{folder}/{rank}.pt"
    checkpoint = torch.load(path, weights_only=True) if rank in saved else None
    try:
        diloco, model, optimizer = attach(
            registry, rank, checkpoint=checkpoint, founding_wait=2.0, quorum_wait=12.0
        )
    except SyncError as error:
        return str(error)
    found = diloco.view, diloco.inner_step, diloco.outer_hash(), diloco.members
    train_to(diloco, model, optimizer, rank, diloco.inner_step + 5)
    diloco.close()
    return found


@pytest.mark.nightly("25 s; the first tier begins a run with a checkpoint, and has the core's rule")
def test_all_replicas_die_and_the_group_goes_on_from_the_newest_checkpoint(
    fresh_workers: Callable[..., Pool], registry: Host, tmp_path: Path
) -> None:
    pool = fresh_workers(2, init_group=False)
    arguments = pool.store, registry.address, str(tmp_path)
    pool.run(save_and_die, *arguments, expect_exit={0, 1}, timeout=60)
    pool = fresh_workers(3, init_group=False)
    arguments = pool.store, registry.address, str(tmp_path)
    # Without a checkpoint nobody goes on.
    waited = pool.run(come_again, *arguments, [], timeout=60)
    sentence = "until a replica brings a checkpoint of inner step 0 or later"
    assert [text for text in waited[:2] if sentence not in text] == []
    # Replica 2 was never in a view, and may be the last that still waits.
    assert sentence in waited[2] or "until one of replicas [0, 1] starts again" in waited[2]
    # Replica 0 has an older one, replica 2 has none and was never there.
    ends = pool.run(come_again, *arguments, [0, 1], timeout=60)
    assert {(step, outer, members) for _, step, outer, members in ends} == {
        (12, (tmp_path / "1.hash").read_text(), (0, 1, 2))
    }
    assert all(view > 1 for view, *_ in ends)


def train_on(
    rank: int, world: int, store: tuple[str, int], registry: str, folder: str
) -> tuple[int, ...] | None:
    """Replica 0 founds, saves and dies when replica 1 is there, which trains on alone."""
    signs = connect(store)
    if rank == 1:
        signs.wait(["copied"])
    diloco, model, optimizer = attach(registry, rank, min_replicas=1)
    if rank == 0:
        train_to(diloco, model, optimizer, 0, 8)
        torch.save(diloco.state_dict(), f"{folder}/0.pt")
        signs.set("saved", "now")
    while not signs.check(["end"]):
        take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
        time.sleep(0.02)
        if len(diloco.members) == 2 and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and diloco.members == (1,):
            signs.set("alone", "now")
    os.kill(os.getpid(), signal.SIGKILL)
    return None


@pytest.mark.nightly("40 s; test_agreement_changes has the rule")
def test_an_older_journal_begins_no_second_training(
    fresh_workers: Callable[..., Pool], registry: Host, tmp_path: Path
) -> None:
    """All members of the recorded view are dead, but the group trains on in a later view."""
    pool = fresh_workers(2, init_group=False)
    pool.submit(train_on, pool.store, registry.address, str(tmp_path))
    wait_for(pool, ["saved"])
    shutil.copytree(tmp_path / "journal", tmp_path / "older")
    signs = connect(pool.store)
    signs.set("copied", "now")
    wait_for(pool, ["alone"], timeout=60)
    registry.kill()
    shutil.rmtree(tmp_path / "journal")
    shutil.copytree(tmp_path / "older", tmp_path / "journal")
    registry.start()
    other = fresh_workers(1, init_group=False)
    arguments = other.store, registry.address, str(tmp_path), [0]
    (waited,) = other.run(come_again, *arguments, timeout=60)
    assert "until replicas [1] tell the registry of the view that they are in" in waited
    signs.set("end", "now")
    pool.collect(expect_exit={0, 1}, timeout=60)
    # Now nobody has the state, and the checkpoint is of the recorded view or later.
    ((_, step, _, members),) = other.run(come_again, *arguments, timeout=60)
    assert (step, members) == (8, (0,))


# --------------------------------------------------------------------------- another registry


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_refuses_another_registry_than_its_folder_names(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StateFolder(tmp_path / "state")
    monkeypatch.setenv("DILOCO_COMM_STATE_DIR", str(folder.path))
    with hosting(kind) as host:
        registry = partial(Elastic, place_of(host), run="r", key=host.key)
        found = registry().connect()
        known = found.registry_id
        found.close()
        folder.remember("r", Key(0, bytes(16)), registry_id="ab" * 16, view=3)
        with pytest.raises(ReplicaMismatch) as refused:
            registry().connect()
        text = str(refused.value)
        assert known in text and "ab" * 16 in text and f"as {folder.file} notes" in text
        assert "give Elastic rollback=True" in text
        registry(rollback=True).connect().close()
        # The run has ended: another one may begin, wherever.
        folder.note_end()
        registry().connect().close()
        # It is that registry, with a journal from before the run.
        folder.remember("r", Key(0, bytes(16)), registry_id=known, view=3)
        with pytest.raises(
            ReplicaMismatch, match=r"knows nothing of run 'r'.* was in view 3 of it"
        ):
            registry().connect()
        registry(rollback=True).connect().close()


def live_through(
    rank: int, world: int, store: tuple[str, int], registry: str
) -> tuple[tuple[int, ...], list[str], str]:
    """Replica 0 trains while its registry is another one for a time; replica 1 comes later."""
    signs, lines = connect(store), lines_of_the_log()
    if rank == 1:
        signs.wait(["own registry"])
    diloco, model, optimizer = attach(registry, rank)
    signs.set(f"begun {rank}", "now")
    error = ""
    while len(diloco.members) < 2 and diloco.inner_step < 10**6:
        take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
        time.sleep(0.01)
        if any("belongs to the registry" in line for line in lines):
            signs.set("seen", "now")
        if signs.check(["other registry"]) and not error:
            # A second training in this process would begin anew.
            try:
                attach(registry, None)
            except ReplicaMismatch as refused:
                error = str(refused)
            signs.set("refused", "now")
    members = diloco.members
    diloco.close()
    return members, lines, error


def test_a_group_trains_on_while_its_registry_is_another_one(
    fresh_workers: Callable[..., Pool], registry: Host, tmp_path: Path
) -> None:
    pool = fresh_workers(2, init_group=False)
    signs = connect(pool.store)
    pool.submit(live_through, pool.store, registry.address)
    wait_for(pool, ["begun 0"])
    registry.kill()
    other = Host(address=registry.address, journal=tmp_path / "other")
    signs.set("other registry", "now")
    wait_for(pool, ["refused", "seen"])
    other.kill()
    registry.start()
    signs.set("own registry", "now")
    (members, lines, error), (joined, _, _) = pool.collect(timeout=60)
    assert members == joined == (0, 1)
    assert "belongs to the registry" in error and "as this process notes" in error
    lost = [line for line in lines if line.startswith("rounds go on, but nobody can come or go")]
    assert sum("belongs to the registry" in line for line in lost) == 1
    assert "the registry answers again" in lines


def outlive_registry(
    rank: int, world: int, store: tuple[str, int], registry: str, state_dir: str = ""
) -> list[str]:
    """Train until this replica has left; a sign for each warning that the test waits for."""
    if state_dir:
        os.environ["DILOCO_COMM_STATE_DIR"] = state_dir
    signs, lines = connect(store), lines_of_the_log()
    diloco, model, optimizer = attach(registry, rank)
    signs.set("begun", "now")
    while not diloco.is_done:
        take_inner_step(model, optimizer, rank, diloco.inner_step + 1)
        time.sleep(0.01)
        for sign in ("nobody can come or go", "leaves at its next", "cannot before"):
            if any(sign in line for line in lines):
                signs.set(sign, "now")
    diloco.close()
    return lines


def test_the_first_signal_says_that_the_registry_is_away(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(1, init_group=False)
    pool.submit(outlive_registry, pool.store, registry.address)
    wait_for(pool, ["begun"])
    registry.kill()
    wait_for(pool, ["nobody can come or go"])
    pool.kill(0, signal.SIGTERM)
    wait_for(pool, ["cannot before"])
    registry.start()
    (lines,) = pool.collect(timeout=60)
    asked = "this replica was asked to leave, and cannot before the registry answers: a second "
    assert sum(line.startswith(asked) for line in lines) == 1


@pytest.mark.parametrize("is_other", [False, True], ids=["away", "another"])
def test_a_launcher_that_asks_to_leave_promises_no_second_signal(
    is_other: bool, fresh_workers: Callable[..., Pool], registry: Host, tmp_path: Path
) -> None:
    """No signal has come to this process: the next one would be its first."""
    folder = StateFolder(tmp_path / "state")
    pool = fresh_workers(1, init_group=False)
    pool.submit(outlive_registry, pool.store, registry.address, str(tmp_path / "state"))
    wait_for(pool, ["begun"])
    registry.kill()
    other = Host(address=registry.address, journal=tmp_path / "other") if is_other else None
    wait_for(pool, ["nobody can come or go"])
    folder.ask_to_leave()
    wait_for(pool, ["cannot before"])
    if other is not None:
        other.kill()
    registry.start()
    (lines,) = pool.collect(timeout=60)
    own = "its own" if is_other else "the"
    asked = [line for line in lines if line.startswith("this replica was asked to leave, and ")]
    assert asked[0].endswith(f", and cannot before {own} registry answers")
    assert not [line for line in asked if "SIGTERM" in line]


def test_a_replica_whose_key_is_removed_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_KEY_WAIT_S", 0.5)
    make_registry_keys(tmp_path, "paris")
    with serving(keys=tmp_path / "server.key_secret") as server:
        diloco, model, optimizer = attach(server.address, 0, key=tmp_path / "paris.key_secret")
        train_to(diloco, model, optimizer, 0, 4)
        (tmp_path / "allowed" / "paris.key").unlink()
        with pytest.raises(ReplicaMismatch, match="does not let in the key of this") as refused:
            train_to(diloco, model, optimizer, 0, 10**6)
        assert status_of(refused.value) == MISFIT
        diloco.close()


# -------------------------------------------------------------------------- the run has ended


def test_the_end_is_written_when_the_registry_is_back(
    registry: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "connect", partial(registry_at, timeout_s=0.3))
    diloco, model, optimizer = attach(registry.address, 0, total_steps=8)
    train_to(diloco, model, optimizer, 0, 7)
    registry.kill()
    back = threading.Timer(1.0, registry.start)
    back.start()
    train_to(diloco, model, optimizer, 0, 8)
    diloco.close()
    back.join()
    # The registry that was started again has no beats: the record alone tells.
    with pytest.raises(RunEnded, match="run 'test' has ended"):
        attach(registry.address, None, total_steps=8)


LATE = f"""
import os, sys
sys.path[:0] = {FOLDERS!r}
from elastic_replicas import attach
diloco, *_ = attach(sys.argv[1], None, total_steps=8)
print("never printed")
"""


def finish(
    rank: int, world: int, store: tuple[str, int], registry: str, path: str
) -> tuple[int, list[tuple[str, int]]]:
    """Take all steps; return what the state folder notes before and after the end."""
    os.environ["DILOCO_COMM_STATE_DIR"] = f"{path}/{rank}"
    folder = StateFolder(f"{path}/{rank}")
    diloco, model, optimizer = attach(registry, rank, total_steps=8, min_replicas=world)
    # The driver's thread writes the note when it hears that the view has begun.
    wait_until(lambda: folder.last_view > NO_RECORD)
    notes = [(folder.registry_id, folder.last_view)]
    train_to(diloco, model, optimizer, rank, 8)
    diloco.close()
    return diloco.inner_step, [*notes, (folder.registry_id, folder.last_view)]


@pytest.mark.usefixtures("forked_programs")
def test_a_replica_that_comes_after_the_end_ends_at_once(
    fresh_workers: Callable[..., Pool], registry: Host, tmp_path: Path
) -> None:
    pool = fresh_workers(2, init_group=False)
    found = registry_at(registry.address, run="test")
    found.read()
    notes = [(found.registry_id, 1), ("", NO_RECORD)]
    ends = pool.run(finish, pool.store, registry.address, str(tmp_path), timeout=60)
    assert ends == 2 * [(8, notes)]
    sentence = r"run 'test' has ended: replicas \[0, 1\] have taken all their steps"
    with pytest.raises(RunEnded, match=sentence):
        attach(registry.address, None, total_steps=8)
    # The beats of the members are forgotten, and the record says so, too.
    registry.kill()
    registry.start()
    late = run_python("-c", LATE, registry.address)
    assert (late.returncode, late.stdout) == (0, ""), late.stderr
    (line,) = late.stderr.splitlines()
    assert line.startswith("diloco_comm: run 'test' has ended") and "another name" in line
