"""The journal of a registry: torn and damaged files, an older format, full disks, failed fsyncs."""

from __future__ import annotations

import errno
import os
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from registries import Host
from small_disk import disk_of

from diloco_comm.base.log import DamagedLog, DoubtfulWrite, Log
from diloco_comm.base.service.folder_lock import FolderInUse
from diloco_comm.elastic.registry import RegistryUnavailable, connect
from diloco_comm.elastic.registry import journal as module
from diloco_comm.elastic.registry.journal import Journal, changes, load

# Two runs, then one of them again, then a removal and a record of bytes that are no text.
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


def test_a_torn_end_is_cut_off_and_damage_before_it_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    with opened(tmp_path) as journal:
        for group in GROUPS[:2]:
            journal.append(group)
        end = path.stat().st_size
        journal.append(GROUPS[2])
        # The server is killed here.
        data = path.read_bytes()
    path.write_bytes(data[: end + 5])
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "journal").write_bytes(path.read_bytes())
    torn = Journal(copy, truncates=True)
    assert torn.cut == f"{copy}/journal had a torn end: its last 5 bytes are cut off"
    torn.close()
    caplog.clear()
    with opened(tmp_path) as journal:
        assert f"{path} ends at byte {end} with 5 bytes that are no whole record" in caplog.text
        assert journal.records == {"a": b"22", "b": b"x" * 20}
        journal.append([("c", b"new")])
    assert load(path)[1] == {"a": b"22", "b": b"x" * 20, "c": b"new"}
    path.write_bytes(data)
    caplog.clear()
    assert load(path)[1] == {"a": b"22", "é": b"DCRE\x01\0\0\0"}
    assert f"{path} was not closed: its last server was killed after record 3" in caplog.text
    path.write_bytes(damaged := data[: end - 7] + b"?" + data[end - 6 :])
    sentence = (
        "is damaged at byte [0-9]+: the record there is not valid; a cut there loses the last "
        "[0-9]+ bytes, with 1 whole records behind the damage; restore the file from a backup, or "
        f"cut it there with `diloco-comm registry --journal {tmp_path} --truncate`$"
    )
    with pytest.raises(DamagedLog, match=sentence):
        Journal(tmp_path)
    assert path.read_bytes() == damaged
    journal = Journal(tmp_path, truncates=True)
    assert "1 whole records behind the damage, are kept in" in journal.cut
    assert journal.records == {"a": b"1", "b": b"x" * 20}
    journal.close()
    (kept,) = tmp_path.glob("journal.cut-*")
    assert damaged.endswith(kept.read_bytes())
    with opened(tmp_path) as journal:
        assert journal.records == {"a": b"1", "b": b"x" * 20} and not journal.cut
    # A file that is no journal is left alone.
    path.write_text("hello")
    with pytest.raises(DamagedLog, match="at byte 0"):
        Journal(tmp_path, truncates=True)
    assert path.read_text() == "hello"


# Contents whose checksums are right, but which no server has written.
CRAFTED = {
    "short": (b"\1\2\3", "its last change is not whole"),
    "beyond": (struct.pack("<HI", 3, 1 << 20) + b"abcXX", "its last change is not whole"),
    "huge": (struct.pack("<HI", 65535, 0xFFFFFFFF) + b"a", "its last change is not whole"),
    "nameless": (struct.pack("<HI", 0, 5) + b"hello", "the name of a run has 0 bytes, or a slash"),
    "slash": (
        struct.pack("<HI", 9, 1) + b"../../etcx",
        "the name of a run has 9 bytes, or a slash",
    ),
    "no text": (struct.pack("<HI", 2, 1) + b"\xff\xfex", "the name of a run is not UTF-8"),
    "long": (struct.pack("<HI", 1, 61441) + b"r" * 61442, "at most 61440 bytes, got 61441"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_contents_are_refused(tmp_path: Path, name: str) -> None:
    content, sentence = CRAFTED[name]
    good = struct.pack("<HI", 1, 1) + b"rx"
    Log.create(tmp_path / "journal", "registry", bytes(16), lambda log: log.append(good)).close()
    log = Log(tmp_path / "journal", "registry")
    assert list(changes(log)) == [("r", b"x")]
    log.append(content)
    log.close()
    with pytest.raises(DamagedLog, match=f"^{tmp_path}/journal is damaged at byte .*{sentence}"):
        Journal(tmp_path)
    journal = Journal(tmp_path, truncates=True)
    assert journal.records == {"r": b"x"}
    journal.close()


@pytest.mark.parametrize("truncates", [False, True])
def test_a_journal_from_before_logs_is_named_and_left_alone(
    tmp_path: Path, truncates: bool
) -> None:
    data = struct.pack("<8s16sII", b"DCREGv1\0", b"A" * 16, 7, 0)
    (tmp_path / "journal").write_bytes(data)
    with pytest.raises(DamagedLog) as caught:
        Journal(tmp_path, truncates=truncates)
    assert str(caught.value).startswith(
        f"{tmp_path}/journal has the format of a version before 0.2, and this version reads the "
        "format of 0.2: start the server of 0.2"
    )
    assert (tmp_path / "journal").read_bytes() == data


def test_swaps_are_refused_while_another_program_has_changed_the_file(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.append([("a", b"1")])
        os.truncate(journal.path, 100)
        with pytest.raises(OSError, match=r"has 100 instead of \d+ bytes by another program"):
            journal.append([("a", b"2")])
        assert journal.records == {"a": b"1"} and journal.path.stat().st_size == 100


def test_two_servers_cannot_have_one_folder(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(FolderInUse, match=f"the journal folder {tmp_path} bel"):
        Journal(tmp_path)


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.append([("a", b"1" * 50)])
        for room in (0, 1, 31, 32, 40, 90):
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


def test_a_server_of_its_own_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    host = Host(journal=tmp_path)
    try:
        registry = connect(host.address, run="r", timeout_s=20)
        assert registry.swap(b"", b"x")
        size = (tmp_path / "journal").stat().st_size
        limits = resource.prlimit(host.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(host.pid, resource.RLIMIT_FSIZE, (size + 9, limits[1]))
        for _ in range(2):
            with pytest.raises(RegistryUnavailable, match="journal cannot be written: File too l"):
                registry.swap(b"x", b"y")
        assert (tmp_path / "journal").stat().st_size == size
        resource.prlimit(host.pid, resource.RLIMIT_FSIZE, limits)
        assert registry.swap(b"x", b"z")
        host.kill()
        host.start()
        assert registry.read() == b"z"
        # Another journal is put in its place under the running server.
        (tmp_path / "journal").rename(tmp_path / "moved")
        with pytest.raises(RegistryUnavailable, match="was replaced or removed by another program"):
            registry.swap(b"z", b"lost")
        assert registry.read() == b"z" and not (tmp_path / "journal").exists()
        registry.close()
    finally:
        host.kill()


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
            assert sizes[-1] in synced
            synced.clear()
        assert max(sizes) < 5500
        assert load(journal.path)[1] == {"a": b"99" * 100}


def test_long_records_do_not_make_each_swap_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as journal:
        journal.append([("long", b"x" * 1400)])
        monkeypatch.setattr(module, "_COMPACT_BYTES", 1500)
        files = []
        for i in range(40):
            journal.append([("a", b"%d" % i)])
            files.append(journal.path.stat().st_ino)
        changes = sum(one != other for one, other in pairwise(files))
        assert 1 <= changes <= 5
        assert load(journal.path)[1] == {"long": b"x" * 1400, "a": b"39"}


def test_a_journal_that_cannot_be_compacted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as journal:
        for i in range(10):
            journal.append([(f"run{i}", b"x" * 150)])
        monkeypatch.setattr(module, "_COMPACT_BYTES", 1500)
        # A new file cannot be made here.
        journal.path.with_name("journal.new").mkdir()
        for i in range(2):
            journal.append([("a", b"%d" % i)])
        assert caplog.text.count("is long and cannot be written anew: ") == 1
        assert load(journal.path)[1] == journal.records and journal.records["a"] == b"1"
        journal.path.with_name("journal.new").rmdir()
        for _ in range(10):
            journal.append([("b", b"y" * 100)])
        assert load(journal.path)[1] == journal.records and journal.path.stat().st_size < 3300
