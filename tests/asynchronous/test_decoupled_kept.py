"""What a syncer has on the disk when a merge breaks off, or when the folder takes no fsync."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from diloco_comm import SGD
from diloco_comm.asynchronous import snapshots
from diloco_comm.asynchronous.decoupled.merges import Piece, SharedFragment
from diloco_comm.asynchronous.decoupled.model import ServedModel
from diloco_comm.asynchronous.decoupled.settings import DecoupledSettings
from diloco_comm.asynchronous.decoupled.state import SyncerState
from diloco_comm.asynchronous.decoupled.syncer import Report
from diloco_comm.asynchronous.decoupled.tape import replay
from diloco_comm.asynchronous.keeper import Keeper
from diloco_comm.base import log

SIZES = (5, 3)


class Kept:
    """A syncer without a socket, with its folder, and one learner that reports ones."""

    def __init__(self, folder: Path, wire_down: str = "fp32") -> None:
        settings = DecoupledSettings(
            merge="mean", wire="fp32", wire_down=wire_down, receipt="carry", sync_every=1
        )
        files = partial(Keeper, folder, 1000, waits=True)
        self.state = SyncerState(settings, SGD(1.0), open_files=files, model_sizes=6.0, impl="")
        self.state.begin()
        if self.state.model is None:
            pieces, flats = [[Piece((), n, "mean") for n in SIZES]], [[*map(torch.zeros, SIZES)]]
            self.state._take_model(ServedModel(pieces, flats, settings, SGD(1.0), 1))
            self.state.save()
        assert self.state.keeper is not None
        self.keeper = self.state.keeper
        self.syncer = self.model.syncer
        self.syncer.join("a")

    @property
    def model(self) -> ServedModel:
        assert self.state.model is not None
        return self.state.model

    @property
    def published(self) -> tuple[int, list[float]]:
        """The version that learners get, and the first shared value of each piece."""
        shared = self.syncer.fragments[0].values
        return self.model.published[0].version, [values[0].item() for values in shared]

    def merge(self) -> None:
        """Call the learner, take its report of ones, and merge."""
        version = self.syncer.rounds[0].version
        self.syncer.stepped("a", self.syncer.steps_of("a") + 2, 1.0)
        self.state.advance(float(version))
        sizes = [layout.payload_bytes for layout in self.model.reports(0)]
        payloads = self.state.memory.take(sizes, may_use_file=False, must=True)
        assert payloads is not None
        for payload, size in zip(payloads, SIZES, strict=True):
            payload[:] = 0
            payload[: 4 * size] = torch.ones(size).view(torch.uint8)
        report = Report("a", version + 1, version, 1, 1)
        assert self.state.take_report(0, report, payloads, float(version)) == ""
        self.state.advance(float(version))

    def kill(self) -> None:
        """Leave the folder as it is."""
        self.keeper.release()


def breaking(monkeypatch: pytest.MonkeyPatch, where: str) -> type[BaseException]:
    """Let the next merge break off, and return the error."""

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    step = SharedFragment._step

    def half_a_step(fragment: SharedFragment, index: int, *rest: object) -> None:
        if index:
            raise KeyboardInterrupt
        step(fragment, index, *rest)  # type: ignore[arg-type]

    if where == "room":
        monkeypatch.setattr(SharedFragment, "room_for_copy", out_of_memory)
        return MemoryError
    if where == "publish":
        monkeypatch.setattr(ServedModel, "publish", out_of_memory)
        return MemoryError
    replaced = {"step": ("_step", half_a_step), "copy": ("copy_values", interrupted)}[where]
    monkeypatch.setattr(SharedFragment, *replaced)
    return KeyboardInterrupt


@pytest.mark.parametrize("wire_down", ["fp32", "int8"])
@pytest.mark.parametrize("where", ["room", "step", "copy", "publish"])
def test_a_merge_that_breaks_off_counts_once_or_not_at_all(
    where: str, wire_down: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last snapshot must not have its values and the version before."""
    kept = Kept(tmp_path, wire_down)
    kept.merge()
    kept.merge()
    with monkeypatch.context() as patched:
        error = breaking(patched, where)
        with pytest.raises(error):
            kept.merge()
        if where in ("room", "publish"):
            with pytest.raises(error):
                kept.state.advance(9.0)
        else:
            kept.state.advance(9.0)
        kept.state.end()
    header, _ = snapshots.read_snapshot(tmp_path / "snapshot")
    merged = 2
    if where == "room":
        # The step has not begun, and the reports wait: a snapshot has the two merges.
        assert header["versions"] == [2]
    else:
        assert header["versions"] == [0]
        merged += where == "publish"
    assert replay(tmp_path).versions == (merged,)
    back = Kept(tmp_path, wire_down)
    assert back.published == (merged, [-float(merged)] * 2)
    back.merge()
    back.state.end()
    assert Kept(tmp_path, wire_down).published == (merged + 1, [-float(merged + 1)] * 2)


def test_a_merge_is_published_once_after_an_error_in_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    with monkeypatch.context() as patched:
        error = breaking(patched, "publish")
        with pytest.raises(error):
            kept.merge()
    kept.state.advance(9.0)
    kept.merge()
    assert kept.published == (2, [-2.0, -2.0])
    kept.kill()
    assert replay(tmp_path).versions == (2,)


# ---------------------------------------------------------------------------------- the folder


@pytest.fixture
def fail_folder(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """``fail_folder(True)``: an fsync of any folder fails from now on."""
    is_failing = False
    fsync = os.fsync

    def syncing(number: int) -> None:
        if is_failing and stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(number)

    def switch(fails: bool) -> None:
        nonlocal is_failing
        is_failing = fails

    monkeypatch.setattr(os, "fsync", syncing)
    return switch


def test_merges_after_a_snapshot_whose_folder_took_no_fsync_are_kept(
    tmp_path: Path, fail_folder: Callable[[bool], None]
) -> None:
    kept = Kept(tmp_path)
    for _ in range(3):
        kept.merge()
    fail_folder(True)
    kept.state.save()
    words = f"{tmp_path}/journal-3 cannot be written: Input/output error; merges wait"
    assert words in kept.keeper.problem
    # The new snapshot may be lost with the power: the old one's journal stays.
    assert (tmp_path / "journal-0").exists()
    kept.keeper._retry_at = 0.0
    kept.merge()
    assert kept.published[0] == 3
    fail_folder(False)
    kept.keeper._retry_at = 0.0
    for _ in range(2):
        kept.state.advance(9.0)
        kept.merge()
    assert kept.keeper.problem == "" and kept.published == (6, [-6.0, -6.0])
    kept.kill()
    back = Kept(tmp_path)
    assert back.published == (6, [-6.0, -6.0])
    back.state.end()
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "snapshot", "journal-6"}


def test_a_journal_whose_fsync_failed_is_written_anew_without_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed fsync nobody knows what is on the disk, also if the next fsync succeeds."""
    kept = Kept(tmp_path)
    kept.merge()
    journal = tmp_path / "journal-0"
    with monkeypatch.context() as patched:

        def failing(number: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patched.setattr(os, "fsync", failing)
        kept.merge()
        words = f"{journal} cannot be written: Input/output error; merges wait"
        assert kept.published[0] == 1 and words in kept.keeper.problem
        kept.keeper._retry_at = 0.0
        kept.state.advance(9.0)
    before = journal.stat().st_ino
    kept.keeper._retry_at = 0.0
    kept.state.advance(9.0)
    assert kept.published[0] == 2 and kept.keeper.problem == ""
    assert journal.stat().st_ino != before
    kept.merge()
    kept.kill()
    assert replay(tmp_path).versions == (3,)


def test_what_a_killed_syncer_had_written_is_on_the_disk_before_anybody_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_folder: Callable[[bool], None]
) -> None:
    kept = Kept(tmp_path)
    kept.merge()
    kept.kill()
    synced, fsync = [], os.fsync

    def syncing(number: int) -> None:
        fsync(number)
        synced.append(Path(os.readlink(f"/proc/self/fd/{number}")))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", syncing)
        back = Kept(tmp_path)
    assert back.published[0] == 1 and synced == [tmp_path / "journal-0", tmp_path]
    back.kill()
    fail_folder(True)
    with pytest.raises(OSError, match=r"journal-0 cannot be written: .*must be on the disk before"):
        Kept(tmp_path)
    fail_folder(False)
    Kept(tmp_path).kill()


def test_a_snapshot_that_could_not_be_read_does_not_replace_the_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header would be too long, for the many names of learners."""
    monkeypatch.setattr(log, "MAX_HEAD", 4096)
    kept = Kept(tmp_path)
    kept.merge()
    before = (tmp_path / "snapshot").read_bytes()
    newest = kept.model.published[0]
    names = {f"learner-{number}": 1 for number in range(1000)}
    kept.model.published[0] = replace(newest, merged={**newest.merged, **names})
    kept.state.save()
    words = "snapshot cannot be written: the header has "
    assert words in kept.keeper.problem and "at most 4096 are read" in kept.keeper.problem
    assert "a crash loses nothing" in kept.keeper.problem
    kept.merge()
    kept.kill()
    assert (tmp_path / "snapshot").read_bytes() == before
    assert Kept(tmp_path).published == (2, [-2.0, -2.0])
