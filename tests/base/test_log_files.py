"""A log's file: full and failing disks, other programs, links, pipes, and interrupted writes."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_disk import disk_of
from torch import Tensor

from diloco_comm.base import log as module
from diloco_comm.base.log import ChangedLog, DamagedLog, DoubtfulWrite, Log, sync_folder, truncate
from diloco_comm.base.service.folder_lock import FolderLock
from diloco_comm.elastic.registry.journal import Journal


def load(path: Path) -> list[tuple[bytes, int]]:
    log = Log(path, "test", is_writable=False)
    try:
        return [(record.head, record.body_bytes) for record in log.read()]
    finally:
        log.release()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log.create(tmp_path / "log", "test")
    log.append(b"first")
    yield log
    log.release()


def test_a_full_disk_changes_nothing_and_the_log_goes_on_with_room(log: Log) -> None:
    body = [torch.ones(3000)]
    for room in (0, 1, 31, 32, 40, 5000, 12_050):
        before = log.path.read_bytes()
        with disk_of(len(before) + room), pytest.raises(OSError, match="too large") as caught:
            log.append(b"second", body, 12_000)
        assert caught.value.filename == str(log.path)
        assert type(caught.value) is OSError
        assert log.path.read_bytes() == before
    log.append(b"second", body, 12_000)
    with disk_of(100), pytest.raises(OSError, match="too large") as caught:
        Log.create(log.path, "test", fill=lambda new: new.append(bytes(100)))
    assert caught.value.filename == str(log.path)
    assert [path.name for path in log.path.parent.iterdir()] == ["log"]
    # A log that cannot be closed as it should be is closed all the same.
    with disk_of(log.end):
        log.close()
    assert load(log.path) == [(b"first", 0), (b"second", 12_000)]


def test_what_cannot_be_cut_off_at_once_is_cut_off_before_the_next_record(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ftruncate(file: int, length: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, disk_of(log.end + 20):
        patch.setattr(module.os, "ftruncate", ftruncate)
        for reason in ("File too large", "Input/output error"):
            with pytest.raises(OSError, match=reason):
                log.append(b"second")
    assert log.path.stat().st_size == log.end + 20
    log.append(b"third")
    log.close()
    assert load(log.path) == [(b"first", 0), (b"third", 0)]


def test_a_failed_fsync_after_a_cut_is_doubt_too(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, disk_of(log.end + 20):
        patch.setattr(module.os, "fsync", fsync)
        with pytest.raises(OSError, match="File too large"):
            log.append(b"second")
    assert log.is_doubtful
    with pytest.raises(OSError, match="did not confirm an earlier fsync"):
        log.append(b"third")


def test_an_interrupted_append_is_none(log: Log) -> None:
    def interrupted() -> Iterator[Tensor]:
        yield torch.ones(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        log.append(b"second", interrupted(), 24)
    assert log.path.stat().st_size == log.end
    log.append(b"third", [torch.ones(3)], 12)
    log.close()
    assert load(log.path) == [(b"first", 0), (b"third", 12)]


def test_after_a_failed_fsync_the_log_takes_no_record_until_it_is_made_anew(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", fsync)
        with pytest.raises(DoubtfulWrite, match="Input/output error") as caught:
            log.append(b"second")
        assert caught.value.filename == str(log.path)
    with pytest.raises(OSError, match="did not confirm an earlier fsync"):
        log.append(b"third")
    log.close()
    fresh = Log.create(log.path, "test", fill=lambda new: new.append(b"fresh", is_durable=False))
    fresh.append(b"fourth")
    fresh.close()
    assert load(log.path) == [(b"fresh", 0), (b"fourth", 0)]


def _replace(path: Path) -> None:
    Log.create(path, "test").close()


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 1), r"has \d+ instead of \d+"),
    "emptied": (lambda path: os.truncate(path, 0), "has 0 instead of"),
    "continued": (lambda path: path.open("ab").write(b"x"), r"has \d+ instead of \d+ bytes"),
    "removed": (Path.unlink, "was replaced or removed"),
    "replaced": (_replace, "was replaced or removed"),
    "folder moved": (lambda path: path.parent.rename(f"{path.parent}-2"), "was replaced or remo"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_program_at_the_file_is_noticed(tmp_path: Path, change: str) -> None:
    (tmp_path / "folder").mkdir()
    log = Log.create(tmp_path / "folder" / "log", "test")
    log.append(b"first")
    act, sentence = CHANGES[change]
    act(log.path)
    left = {path: path.read_bytes() for path in tmp_path.rglob("log")}
    for _ in range(2):
        with pytest.raises(ChangedLog, match=sentence) as caught:
            log.append(b"second")
        assert caught.value.filename == str(log.path)
        assert "by another program while this one had it open" in str(caught.value)
    log.close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("log")} == left


def _symlink(path: Path) -> None:
    Log.create(path.with_name("victim"), "test").close()
    path.symlink_to("victim")


def _dangling(path: Path) -> None:
    path.symlink_to("nothing")


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (_symlink, "it is a symbolic link, which is not followed: put a regular file there"),
    "dangling": (_dangling, "it is a symbolic link, which is not followed"),
    "pipe": (os.mkfifo, "it is no regular file: put a regular file there, or none"),
    "folder": (Path.mkdir, "it is no regular file"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_links_pipes_and_folders_are_refused(tmp_path: Path, kind: str) -> None:
    make, sentence = NO_FILES[kind]
    path = tmp_path / "log"
    make(path)
    before = sorted(tmp_path.iterdir())
    contents = [each.read_bytes() for each in before if each.is_file()]
    for is_writable in (False, True):
        with pytest.raises(OSError, match=sentence) as caught:
            Log(path, "test", is_writable=is_writable)
        assert caught.value.filename == str(path)
    # A new file beside the log, and the lock of its folder, follow no link either.
    path.rename(tmp_path / "log.new")
    with pytest.raises(OSError, match=sentence):
        Log.create(path, "test")
    (tmp_path / "log.new").rename(tmp_path / "lock")
    with pytest.raises(OSError, match=sentence):
        FolderLock(tmp_path, "folder")
    (tmp_path / "lock").rename(path)
    assert sorted(tmp_path.iterdir()) == before
    assert [each.read_bytes() for each in before if each.is_file()] == contents


def test_a_folder_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    log = Log.create(tmp_path / "link" / "log", "test")
    log.append(b"first")
    log.close()
    assert load(tmp_path / "real" / "log") == [(b"first", 0)]


def test_a_half_written_new_file_is_replaced(log: Log) -> None:
    log.path.with_name("log.new").write_bytes(b"left by a process that was killed")
    Log.create(log.path, "test", fill=lambda new: new.append(b"new", is_durable=False)).close()
    assert load(log.path) == [(b"new", 0)]
    assert [path.name for path in log.path.parent.iterdir()] == ["log"]


def test_a_cut_on_a_full_disk_cuts_nothing(log: Log) -> None:
    log.append(b"second" * 100)
    log.close()
    data = bytearray(log.path.read_bytes())
    data[100] ^= 1
    log.path.write_bytes(data)
    with pytest.raises(DamagedLog) as caught:
        load(log.path)
    with disk_of(100), pytest.raises(OSError, match="too large") as full:
        truncate(caught.value)
    assert full.value.filename == str(log.path.with_name(f"log.cut-{caught.value.offset}-1"))
    assert log.path.read_bytes() == data
    assert [path.name for path in log.path.parent.iterdir()] == ["log"]


# ------------------------------------------------------------------------- the fsync of a folder


@pytest.fixture
def folders_answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``folders_answer(number)``: the fsync of a folder gives this error number from now on."""
    answers, fsync = [0], os.fsync

    def syncing(number: int) -> None:
        if answers[0] and stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(answers[0], os.strerror(answers[0]))
        fsync(number)

    monkeypatch.setattr(os, "fsync", syncing)
    return lambda number: answers.__setitem__(0, number)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.ENOSYS])
def test_a_folder_that_its_file_system_cannot_fsync_is_a_word_in_the_log_once(
    tmp_path: Path,
    folders_answer: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    folders_answer(number)
    for name in ("log", "another"):
        Log.create(tmp_path / name, "test").close()
    journal = Journal(tmp_path / "registry")
    journal.append([("a", b"1")])
    journal.close()
    assert Journal(tmp_path / "registry").records == {"a": b"1"}
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage().partition(" cannot fsync")[0] for record in said] == [
        f"the file system of the folder {folder}" for folder in (tmp_path, tmp_path / "registry")
    ]


def test_a_file_system_without_a_disk_is_such_a_one(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        sync_folder(Path("/proc"))
    assert caplog.text.count("the file system of the folder /proc cannot fsync a folder") == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO, errno.ENOLCK, errno.EBADF])
def test_only_a_file_system_without_locks_has_a_folder_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def lock(file: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", lock)
    if number in (errno.EINVAL, errno.EIO):
        with pytest.raises(OSError, match=os.strerror(number)):
            Journal(tmp_path)
        return
    Journal(tmp_path).close()
    assert f"the journal folder {tmp_path} cannot be locked" in caplog.text


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_does_not_take_the_names_in_a_folder_is_an_error(
    tmp_path: Path, folders_answer: Callable[[int], None], number: int
) -> None:
    folders_answer(number)
    with pytest.raises(OSError, match=os.strerror(number)):
        Log.create(tmp_path / "log", "test")
    with pytest.raises(OSError, match=os.strerror(number)):
        Journal(tmp_path / "registry")
