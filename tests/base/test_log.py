"""A log of records: what is read back after cuts, flipped bits, and crafted bytes."""

from __future__ import annotations

import logging
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_comm.base import log as module
from diloco_comm.base.log import MAX_HEAD, DamagedLog, Log, truncate

Row = tuple[bytes, bytes]
REFUSED = "refused", 0
TORN = "that are no whole record: they will be cut off at the next write"
UNCLOSED = "was not closed: its last server"

# Heads alone, a body over several sectors that ends in zeros, an empty record, a body alone.
ROWS: list[Row] = [
    (b"first", b""),
    (b"\xa5DCL" * 9, b""),
    (b"body", bytes(range(256)) + bytes(1100)),
    (b"", b""),
    (b"x" * 300, b"odd length"),
    (b"", b"y" * 250),
]


def add(log: Log, row: Row, *, is_durable: bool = False) -> None:
    head, body = row
    # Parts of a body may have any length.
    parts = [body[:13], body[13:14], body[14:]]
    tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]
    log.append(head, tensors, len(body), is_durable=is_durable)


def create(path: Path, rows: list[Row]) -> Log:
    def fill(log: Log) -> None:
        for row in rows:
            add(log, row)

    return Log.create(path, "test", b"meta", fill)


@contextmanager
def opened(path: Path, *, is_writable: bool = False) -> Iterator[Log]:
    log = Log(path, "test", is_writable=is_writable)
    try:
        yield log
    finally:
        log.release()


def rows_of(log: Log) -> list[Row]:
    return [(r.head, os.pread(log.fileno(), r.body_bytes, r.body)) for r in log.read()]


def load(path: Path) -> list[Row]:
    with opened(path) as log:
        return rows_of(log)


def ends_of(path: Path) -> list[int]:
    """Return where the first record begins, and where each ends."""
    with opened(path) as log:
        return [log.end, *(record.end for record in log.read())]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create(tmp_path / "log", ROWS).close()
    return tmp_path / "log"


def test_records_come_back_and_more_are_appended(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        with opened(path, is_writable=True) as log:
            assert log.meta == b"meta"
            assert rows_of(log) == ROWS + [(b"%d" % i, b"") for i in range(number)]
            log.append(b"%d" % number)
            log.close()
    assert not caplog.text
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["log"]


def test_a_body_is_any_tensors_bytes(tmp_path: Path) -> None:
    tensors = [
        torch.arange(5, dtype=torch.uint8),
        torch.randn(7, 300_000).t(),  # over several blocks, not contiguous
        torch.ones(3, dtype=torch.bfloat16),
        torch.empty(0),
        torch.arange(20, dtype=torch.uint8)[3:17],
    ]
    want = b"".join(bytes(t.contiguous().view(-1).view(torch.uint8).numpy()) for t in tensors)
    log = Log.create(tmp_path / "log", "test")
    log.append(b"head", tensors, len(want))
    for wrong in (len(want) - 1, len(want) + 1, 0):
        with pytest.raises(ValueError, match=f"a body of {wrong} bytes has {len(want)}"):
            log.append(b"wrong", tensors, wrong)
    with pytest.raises(ValueError, match="at most 16777216"):
        log.append(bytes(MAX_HEAD + 1))
    log.append(b"behind")
    log.close()
    assert load(tmp_path / "log") == [(b"head", want), (b"behind", b"")]


# ----------------------------------------------------------------------------------- cuts and flips


def outcome(path: Path, want: list[Row], caplog: pytest.LogCaptureFixture) -> tuple[str, int]:
    """Return "all", "refused", or the warning about missing records, and how many were read."""
    caplog.clear()
    try:
        found = load(path)
    except DamagedLog as error:
        assert str(error).startswith(f"{path} is damaged at byte ")
        return REFUSED
    assert found == want[: len(found)]
    for warning in (TORN, UNCLOSED):
        if warning in caplog.text:
            return warning, len(found)
    assert found == want
    return "all", len(found)


@contextmanager
def flipped(path: Path, place: int) -> Iterator[None]:
    """Flip one bit of a file in place, and flip it back."""
    with open(path, "r+b", buffering=0) as file:
        before = os.pread(file.fileno(), 1, place // 8)
        os.pwrite(file.fileno(), bytes([before[0] ^ 1 << place % 8]), place // 8)
        yield
        os.pwrite(file.fileno(), before, place // 8)


def test_a_cut_at_any_byte_loses_no_whole_record_and_is_said(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, ends = path.read_bytes(), ends_of(path)
    # The record of `close` is the last one.
    for length in reversed(range(ends[-5], len(data))):
        os.truncate(path, length)
        kept = sum(end <= length for end in ends[1:])
        assert outcome(path, ROWS, caplog) == (UNCLOSED if length in ends else TORN, kept), length


def test_lost_sectors_of_zeros_are_a_cut(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, ends = path.read_bytes(), ends_of(path)
    for lost in range(512, len(data), 512):
        path.write_bytes(data[:lost] + bytes(len(data) - lost))
        assert outcome(path, ROWS, caplog) == (TORN, sum(end <= lost for end in ends[1:]))
    # Zeros before a record that confirms the records there, and parts of a sector, are damage.
    for begin, end in ((300, 1536), (len(data) - 20, len(data))):
        path.write_bytes(data[:begin] + bytes(end - begin) + data[end:])
        assert outcome(path, ROWS, caplog) == REFUSED


def test_a_hole_behind_the_last_fsync_is_torn_and_one_before_is_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [(b"%d" % i, b"\xa5" * (90 * i + 700)) for i in range(9)]
    log = Log.create(path := tmp_path / "log", "test")
    ends = [log.end]
    for number, row in enumerate(rows):
        if number == 4:
            log.sync()
        add(log, row)
        ends.append(log.end)
    data = path.read_bytes()
    log.release()
    for begin in range(512, len(data) - 512, 512):
        path.write_bytes(data[:begin] + bytes(512) + data[begin + 512 :])
        bad = sum(end <= begin for end in ends) - 1
        # The fifth record says that four are on the disk, if it or one behind it is whole.
        assert outcome(path, rows, caplog) == ((TORN, bad) if bad >= 4 else REFUSED), begin
        behind = sum(at >= begin + 512 for at in ends[:-1])
        if bad >= 4:
            assert f"byte {ends[bad]} with {len(data) - ends[bad]} bytes" in caplog.text
            assert f"at the next write, with {behind} whole records behind" in caplog.text
        # Half a sector of zeros is not how a disk loses bytes.
        path.write_bytes(data[: begin + 100] + bytes(256) + data[begin + 356 :])
        assert outcome(path, rows, caplog) == REFUSED
    path.write_bytes(data[: ends[6]] + bytes(1024) + data[ends[6] + 1024 :])
    with opened(path, is_writable=True) as log:
        assert rows_of(log) == rows[:6] and log.torn_bytes == len(data) - ends[6]
        log.append(b"next")
        log.close()
    assert load(path) == [*rows[:6], (b"next", b"")]


def test_a_hole_in_the_record_whose_fsync_was_under_way_is_torn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [(b"%d" % i, b"\xa5" * 9000) for i in range(3)]
    log = Log.create(path := tmp_path / "log", "test")
    for row in rows:
        add(log, row, is_durable=True)
    data, ends = path.read_bytes(), ends_of(path)
    log.release()
    for bad in range(3):
        hole = -(-ends[bad] // 4096) * 4096
        path.write_bytes(data[:hole] + bytes(4096) + data[hole + 4096 :])
        assert outcome(path, rows, caplog) == ((TORN, 2) if bad == 2 else REFUSED)


def test_a_cut_to_where_the_log_was_closed_before_is_said(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, ends = path.read_bytes(), ends_of(path)
    with opened(path, is_writable=True) as log:
        rows = rows_of(log)
        log.append(b"more" * 30)
        log.close()
    os.truncate(path, len(data))
    assert outcome(path, [*rows, (b"more" * 30, b"")], caplog) == (TORN, len(rows))
    path.write_bytes(data + b"DCL")
    assert outcome(path, rows, caplog) == REFUSED
    # Nothing is written for a log that is closed as it was.
    path.write_bytes(data)
    with opened(path, is_writable=True) as log:
        assert rows_of(log) == rows and log.end == ends[-1]
        log.close()
    assert path.read_bytes() == data


def test_the_next_append_cuts_a_torn_record_off(path: Path) -> None:
    data, ends = path.read_bytes(), ends_of(path)
    for length in (ends[2] + 5, ends[3] - 1, ends[5] + 40, len(data) - 1):
        path.write_bytes(data[:length])
        with opened(path, is_writable=True) as log:
            before = rows_of(log)
            assert path.stat().st_size == length
            log.append(b"next")
            log.close()
        assert load(path) == [*before, (b"next", b"")]


def test_no_flipped_bit_is_taken_for_a_torn_record(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, random_ = path.read_bytes(), random.Random(3)
    places = random_.sample(range(8 * len(data)), 2000)
    places += range(8 * (len(data) - 60), 8 * len(data))
    for place in places:
        with flipped(path, place):
            assert outcome(path, ROWS, caplog) == REFUSED, place
    assert path.read_bytes() == data and outcome(path, ROWS, caplog) == ("all", len(ROWS))


def test_a_bit_flipped_under_an_open_log_is_found_when_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, random_ = tmp_path / "log", random.Random(4)
    log = create(path, ROWS)
    size = path.stat().st_size
    for i in range(150):
        place = random_.randrange(8 * size)
        with flipped(path, place):
            add(log, (b"%d" % i, b"z" * (i % 9)))
            assert outcome(path, ROWS, caplog) == REFUSED, place
    log.close()
    assert load(path) == [*ROWS, *((b"%d" % i, b"z" * (i % 9)) for i in range(150))]


def test_missing_repeated_moved_and_foreign_records_are_damage(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, ends = path.read_bytes(), ends_of(path)
    create(path.with_name("other"), ROWS).close()
    other = path.with_name("other").read_bytes()
    first, rest = data[: ends[0]], [data[a:b] for a, b in pairwise(ends)]
    for records in (
        [*rest[:2], *rest[3:]],
        [rest[0], *rest],
        [rest[1], rest[0], *rest[2:]],
        [*rest[:-1], other[ends[-2] : ends[-1]]],
        [*rest, rest[-1]],
        [*rest, b"x" * 100],
        [*rest, b"x"],
        [*rest[:-1], rest[-1][:-1] + b"x"],
        [*rest, bytes(3), b"x"],
    ):
        path.write_bytes(first + b"".join(records))
        assert outcome(path, ROWS, caplog) == REFUSED
    # A record of this log's last run, before it was created anew.
    path.write_bytes(other[: ends[0]] + data[ends[0] :])
    assert outcome(path, ROWS, caplog) == REFUSED


def test_the_sentence_names_the_place_and_the_loss_and_a_cut_keeps_the_rest(path: Path) -> None:
    data, ends = path.read_bytes(), ends_of(path)
    path.write_bytes(data[: ends[1] + 20] + b"?" + data[ends[1] + 21 :])
    sentence = (
        f"{path} is damaged at byte {ends[1]}: the record there is not valid; a cut there loses "
        f"the last {len(data) - ends[1]} bytes, with 4 whole records behind the damage; restore "
        "the file from a backup"
    )
    for number in (1, 2):
        damaged = path.read_bytes()
        with pytest.raises(DamagedLog) as caught:
            load(path)
        assert str(caught.value) == sentence and caught.value.lost == 4
        kept = path.with_name(f"log.cut-{ends[1]}-{number}")
        assert str(kept) in (said := truncate(caught.value))
        assert "4 whole records" in said and f"{len(data) - ends[1]} bytes" in said
        assert path.read_bytes() + kept.read_bytes() == damaged
        assert load(path) == ROWS[:1]
        path.write_bytes(damaged)
    # Nothing is whole before the first record.
    path.write_bytes(b"?" + data[1:])
    with pytest.raises(DamagedLog, match="at byte 0, or is no log of diloco_comm") as caught:
        load(path)
    with pytest.raises(DamagedLog):
        truncate(caught.value)
    assert path.read_bytes() == b"?" + data[1:]


# ----------------------------------------------------------------------------------- crafted files


def crafted(path: Path, head: int, body: int, sequence: int = 0, magic: bytes = b"DCL\xa5") -> None:
    """Write a log with one record, whose header is valid and gives these numbers."""
    Log.create(path, "test").release()
    data = path.read_bytes()
    numbers = struct.pack("<4sQQIQ", magic, sequence, 0, head, body)
    checksum = module._hash(data[32:48], numbers, 8)
    path.write_bytes(data + numbers + checksum + b"content" * 10)


@pytest.mark.parametrize("head", [0, 7, MAX_HEAD, MAX_HEAD + 1, 2**32 - 1])
@pytest.mark.parametrize("body", [0, 7, 2**40, 2**63, 2**64 - 1])
def test_lengths_beyond_the_file_allocate_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, head: int, body: int
) -> None:
    crafted(tmp_path / "log", head, body)
    fits = head < 70 and body < 70
    found = outcome(tmp_path / "log", [], caplog)
    assert found == (REFUSED if fits or head > MAX_HEAD else (TORN, 0))


def test_other_files_are_refused(path: Path) -> None:
    with pytest.raises(DamagedLog, match=f"^{path} is a log of kind 'test' and version 1, expecte"):
        Log(path, "other")
    for content in (b"", b"x", b"DCLOG\r\n\x1a", bytes(1000), path.read_bytes()[:60]):
        path.write_bytes(content)
        with pytest.raises(DamagedLog, match="at byte 0, or is no log of diloco_comm"):
            Log(path, "test")
        assert path.read_bytes() == content
    crafted(path, 0, 0, sequence=1)
    with pytest.raises(DamagedLog, match="with 0 whole records behind the damage"):
        load(path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=1100)), max_size=6),
    reopened=st.sets(st.integers(0, 5)),
    damage=st.sampled_from(["cut", "flip", "zeros", "insert", "remove"]),
    at=st.floats(0, 1, exclude_max=True),
    size=st.integers(1, 40),
)
def test_no_record_changes_and_none_is_missing_in_silence(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    rows: list[Row],
    reopened: set[int],
    damage: str,
    at: float,
    size: int,
) -> None:
    log = Log.create(path := tmp_path / "log", "test")
    for number, row in enumerate(rows):
        if number in reopened:
            log.close()
            log = Log(path, "test")
            assert rows_of(log) == rows[:number]
        add(log, row)
    log.close()
    caplog.set_level(logging.WARNING)
    assert outcome(path, rows, caplog) == ("all", len(rows))
    data = path.read_bytes()
    place = int(at * len(data))
    head, tail = data[:place], data[place:]
    changed = {
        "cut": head,
        "flip": head + bytes(byte ^ 0xFF for byte in tail[:size]) + tail[size:],
        "zeros": head + bytes(min(size, len(tail))) + tail[size:],
        "insert": head + data[:size] + tail,
        "remove": head + tail[size:],
    }[damage]
    path.write_bytes(changed)
    found, _ = outcome(path, rows, caplog)
    assert found != "all" or changed == data
    # A changed record that holds zeros of its own may pass for a torn one.
    is_told = damage in ("cut", "zeros", "remove") or bytes(512) in changed
    assert found == "refused" or changed == data or is_told
