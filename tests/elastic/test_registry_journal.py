"""The journal of a registry: torn ends, damaged files, full disks, failed fsyncs."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco_comm.base.service.folder_lock import FolderInUse
from diloco_comm.elastic.registry import journal as module
from diloco_comm.elastic.registry.journal import (
    HEADER_BYTES,
    CorruptJournal,
    DoubtfulWrite,
    Journal,
    load,
)

# Three entries: two runs, then a run twice, then a record that looks like an entry and a removal.
GROUPS = [
    [("a", b"1"), ("b", b"x" * 20)],
    [("a", b"22")],
    [("b", b""), ("é", b"DCRE\x01\0\0\0")],
]


@contextmanager
def opened(folder: Path) -> Iterator[Journal]:
    journal = Journal(folder)
    yield journal
    journal.close()


@contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def written(tmp_path: Path) -> tuple[bytes, list[int], list[dict[str, bytes]], bytes]:
    """The bytes of a journal, the ends of its entries, the records at each end, and the id."""
    with opened(tmp_path / "j") as journal:
        ends, states = [journal.path.stat().st_size], [{}]
        for group in GROUPS:
            journal.append(group)
            ends.append(journal.path.stat().st_size)
            states.append(dict(journal.records))
        return journal.path.read_bytes(), ends, states, journal.registry_id


def test_records_and_id_survive(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        for group in GROUPS:
            journal.append(group)
        registry_id, records = journal.registry_id, dict(journal.records)
        size = journal.path.stat().st_size
    assert records == {"a": b"22", "é": b"DCRE\x01\0\0\0"}
    for _ in range(2):
        with opened(tmp_path) as journal:
            assert (journal.registry_id, journal.records) == (registry_id, records)
            assert journal.path.stat().st_size < size  # compacted
            assert os.stat(journal.path).st_mode & 0o077 == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "lock"]
    with opened(tmp_path / "other") as other:
        assert other.registry_id != registry_id and other.records == {}


def test_an_end_torn_at_any_byte_loses_the_torn_entry_only(tmp_path: Path, written) -> None:
    data, ends, states, registry_id = written
    for length in range(HEADER_BYTES, len(data) + 1):
        path = tmp_path / "journal"
        path.write_bytes(data[:length])
        whole = max(i for i, end in enumerate(ends) if end <= length)
        assert load(path) == (registry_id, states[whole]), length
    # The server goes on behind the last whole entry.
    path.write_bytes(data[: ends[2] + 5])
    with opened(tmp_path) as journal:
        journal.append([("c", b"new")])
    assert load(path)[1] == {**states[2], "c": b"new"}


@pytest.mark.parametrize("junk", [bytes(100), b"\xff" * 100, b"DCRE" * 25])
def test_an_end_of_junk_is_cut_off(
    tmp_path: Path, written, junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    data, _, states, _ = written
    (tmp_path / "journal").write_bytes(data + junk)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path / "journal")[1] == states[-1]
    assert "ends with 100 bytes that are no whole entry: they are cut off" in caplog.text


def test_damage_before_the_end_is_an_error_that_names_file_and_offset(
    tmp_path: Path, written
) -> None:
    data, ends, states, registry_id = written
    path = tmp_path / "journal"
    for place in range(len(data)):
        for flipped in (data[place] ^ 1, data[place] ^ 0xFF):
            path.write_bytes(data[:place] + bytes([flipped]) + data[place + 1 :])
            if place >= ends[2]:
                # Nothing follows the last entry, so it may as well have been torn.
                assert load(path) == (registry_id, states[2])
                continue
            entry = 0 if place < HEADER_BYTES else max(end for end in ends if end <= place)
            with pytest.raises(CorruptJournal, match=f"^{path} is damaged at byte {entry}\\b"):
                load(path)
    # A file that is no journal is left alone.
    path.write_text("hello")
    with pytest.raises(CorruptJournal, match="at byte 0"):
        Journal(tmp_path)
    assert path.read_text() == "hello"


def test_two_servers_cannot_have_one_folder(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(FolderInUse, match=f"the journal folder {tmp_path} bel"):
        Journal(tmp_path)


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.append([("a", b"1" * 50)])
        for room in (0, 1, 11, 12, 13, 40):
            before = journal.path.read_bytes()
            with disk_of(len(before) + room), pytest.raises(OSError, match="too large") as caught:
                journal.append([("a", b"2" * 50)])
            assert caught.value.filename == str(journal.path)
            assert not isinstance(caught.value, DoubtfulWrite)
            assert journal.path.read_bytes() == before and journal.records == {"a": b"1" * 50}
        journal.append([("a", b"3" * 50)])
        assert load(journal.path)[1] == journal.records == {"a": b"3" * 50}


def test_a_full_disk_at_the_start(tmp_path: Path) -> None:
    with disk_of(10), pytest.raises(OSError, match="too large"):
        Journal(tmp_path)
    with opened(tmp_path) as journal:
        journal.append([("a", b"1" * 50)])
    with disk_of(10):
        # The records can be read; swaps are refused until there is room.
        journal = Journal(tmp_path)
        assert journal.records == {"a": b"1" * 50}
        with pytest.raises(OSError, match="too large"):
            journal.append([("a", b"2")])
    journal.append([("a", b"3")])
    journal.close()
    assert load(journal.path)[1] == {"a": b"3"}


def test_after_a_failed_fsync_the_file_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as journal:
        journal.append([("a", b"1")])
        real, failing = os.fsync, [True]

        def fsync(file: int) -> None:
            if failing[0]:
                raise OSError(errno.EIO, "Input/output error")
            real(file)

        monkeypatch.setattr(module.os, "fsync", fsync)
        with pytest.raises(DoubtfulWrite, match="Input/output error"):
            journal.append([("a", b"2")])
        assert journal.records == {"a": b"1"}
        # As long as the new file cannot be confirmed, nothing is written behind the doubtful one.
        with pytest.raises(OSError, match="Input/output error") as caught:
            journal.append([("a", b"3")])
        assert not isinstance(caught.value, DoubtfulWrite)
        failing[0] = False
        journal.append([("b", b"4")])
        assert load(journal.path)[1] == journal.records == {"a": b"1", "b": b"4"}


def test_each_entry_is_fsynced_and_a_long_journal_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(file: int) -> None:
        real(file)
        synced.append(os.fstat(file).st_size)

    with opened(tmp_path) as journal:
        monkeypatch.setattr(module.os, "fsync", fsync)
        monkeypatch.setattr(module, "_COMPACT_BYTES", 5000)
        sizes = []
        for i in range(100):
            journal.append([("a", b"%d" % i * 100)])
            sizes.append(journal.path.stat().st_size)
            assert synced[-1] == sizes[-1]
        assert max(sizes) < 5500 and len(synced) > 100
        assert load(journal.path)[1] == {"a": b"99" * 100}
