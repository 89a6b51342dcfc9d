"""Files of servers that are damaged, crafted, or of another version: read whole or refused."""

from __future__ import annotations

import copy
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from async_helpers import PLAIN, attach, serving
from cli_helpers import run_cli
from decoupled_processes import attach as attach_learner
from decoupled_processes import make_server
from log_files import at, leaves, others, put, read_rows, write_rows

from diloco_comm import HeavyBall
from diloco_comm.asynchronous import snapshots
from diloco_comm.asynchronous.decoupled.tape import replay
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.state import ServerState
from diloco_comm.base.log import DamagedLog

DATA = Path(__file__).parents[1] / "data" / "server-files-0.2.tar.xz"
RESTORED = [-0.7496, -0.7496, -0.7496, -0.7496, -0.7496, -0.7496, -0.7496]


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """The folders of two servers that were killed, as 0.2.0 left them."""
    with tarfile.open(DATA) as archive:
        archive.extractall(tmp_path / "released", filter="data")
    return tmp_path / "released"


def test_the_files_of_0_2_are_read(released: Path) -> None:
    folder = released / "asynchronous"
    server = AsyncServer(PLAIN, snapshot=folder)
    assert torch.allclose(server.parameters()[0], torch.tensor(RESTORED), atol=1e-4)
    assert server.state.coordinator.ledger()["a"]["seq"] == 3
    server.stop()
    assert {path.name for path in folder.iterdir()} == {"lock", "snapshot", "journal-3"}


def test_a_tape_of_0_2_goes_on(released: Path) -> None:
    folder = released / "decoupled"
    before = replay(folder)
    assert (before.last, before.is_compared) == (8, True)
    server = make_server(
        {"wire": "int4", "wire_down": "int4", "merge": "rda", "receipt": "carry", "sync_every": 2},
        outer=HeavyBall(0.5, 0.8), snapshot=folder, keep_tape=True,
    )  # fmt: skip
    with server:
        model, learner = attach_learner(server.address, "a", 9)
        for _ in range(3):
            model.descend(torch.ones(9))
            learner.step()
            assert learner.flush(20.0)
        learner.close()
    after = replay(folder)
    assert after.first == 0 and after.last > 8 and after.is_compared


def test_a_snapshot_from_before_0_2_is_named(tmp_path: Path) -> None:
    (tmp_path / "snapshot").write_bytes(b"DCASv1\0\0" + bytes(100))
    for place in (AsyncServer, lambda rule, snapshot: replay(snapshot)):
        with pytest.raises(DamagedLog, match="has the format of a version before"):
            place(PLAIN, snapshot=tmp_path)


# ---------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server that was killed after four updates."""
    place = tmp_path_factory.mktemp("killed")
    with serving(snapshot=place / "s", snapshot_every=1000) as server:
        # Payloads without padding: a sector of zeros in a changed record would pass for a lost one.
        model, worker = attach(server.address, "a", 4096, wire="int8")
        for value in (1.0, 0.5, 0.25, 2.0):
            model.descend(torch.full((4096,), value))
            worker.step()
        shutil.copytree(place / "s", place / "copy")
        worker.close()
    return place / "copy"


@pytest.fixture
def folder(killed: Path, tmp_path: Path) -> Path:
    shutil.copytree(killed, tmp_path / "s")
    return tmp_path / "s"


def flip(path: Path, place: int) -> int:
    """Change a bit, and return the bytes of the file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)
    return len(data)


def serve(folder: Path, *options: str) -> Any:
    address = ("--listen", "127.0.0.1:0", "--rule", "sgd", "--lr", "1", "--sync-every", "1")
    return run_cli("serve", *address, "--snapshot", folder, *options)


def truncate(folder: Path) -> Any:
    return run_cli("serve", "truncate", "--snapshot", folder)


def records_of(folder: Path) -> list[Any]:
    log = snapshots.Log(folder / "journal-0", snapshots.JOURNAL, is_writable=False)
    records = list(log.read())
    log.release()
    return records


@pytest.mark.parametrize("where", ["head", "payload", "length"])
def test_a_flipped_bit_in_the_middle_is_refused_until_it_is_cut_by_hand(
    folder: Path, where: str
) -> None:
    journal, second = folder / "journal-0", records_of(folder)[1]
    place = {"head": second.body - 9, "payload": second.body + 500, "length": second.begin + 20}
    size = flip(journal, place[where])
    ended = serve(folder)
    assert ended.status == 1 and f"{journal} is damaged at byte {second.begin}: " in ended.err
    # The second record is lost, and two whole ones behind it.
    assert f"loses the last {size - second.begin} bytes, with 2 whole records" in ended.err
    assert journal.stat().st_size == size and "Traceback" not in ended.err
    cut = truncate(folder)
    assert cut.status == 0 and f"is cut off at byte {second.begin}: " in cut.out
    kept = folder / f"journal-0.cut-{second.begin}-1"
    assert kept.stat().st_size == size - second.begin and str(kept) in cut.out
    assert "is not damaged, and nothing was cut off" in truncate(folder).out
    back = AsyncServer(PLAIN, snapshot=folder)
    assert back.state.coordinator.ledger()["a"]["seq"] == 1
    back.stop()
    # The next snapshot removes the journal, and not the bytes that were cut off.
    assert {path.name for path in folder.iterdir()} == {"lock", "snapshot", "journal-1", kept.name}


def test_truncate_says_that_a_torn_end_is_cut_off_later(folder: Path) -> None:
    journal, last = folder / "journal-0", records_of(folder)[-1]
    os.truncate(journal, last.end - 3)
    said = snapshots.truncate_journal(folder)
    assert said.endswith(f"the next server cuts off its last {last.end - 3 - last.begin} bytes")
    assert journal.stat().st_size == last.end - 3


@pytest.mark.parametrize("place", [3, 150, -40])
def test_a_flipped_bit_in_a_snapshot_is_refused(folder: Path, place: int) -> None:
    flip(folder / "snapshot", place)
    ended = serve(folder)
    assert ended.status == 1 and f"{folder}/snapshot is damaged at byte " in ended.err
    assert "restore the file from a backup" in ended.err and "Traceback" not in ended.err


def test_truncate_needs_a_journal_that_no_server_has(folder: Path, tmp_path: Path) -> None:
    ended = run_cli("serve", "truncate")
    assert ended.status == 2 and "truncate needs --snapshot" in ended.err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no journal of a server" in truncate(empty).err
    with AsyncServer(PLAIN, snapshot=folder):
        ended = truncate(folder)
        assert ended.status == 1 and "belongs to another server" in ended.err


# ----------------------------------------------------------------------------------- crafted files


def test_links_and_fifos_are_not_followed(folder: Path, tmp_path: Path) -> None:
    for name in ("snapshot", "journal-0"):
        kept = tmp_path / name
        (folder / name).rename(kept)
        (folder / name).symlink_to(kept)
        ended = serve(folder)
        assert ended.status == 1 and ended.err.count("\n") == 1
        assert f"{folder}/{name}: it is a symbolic link, which is not followed" in ended.err
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert f"{folder}/{name}: it is no regular file" in serve(folder).err
        (folder / name).unlink()
        kept.rename(folder / name)


def begin(folder: Path) -> str:
    """Return the sentence with which a server refuses a folder; "" if it begins."""
    state = ServerState(
        PLAIN, {"sync_every": 1}, snapshot=folder, snapshot_every=100, model_sizes=4.0, impl=""
    )
    try:
        state.begin(None)
    except (ValueError, OSError, DamagedLog) as error:
        assert "\n" not in str(error)
        return str(error)
    assert state.keeper is not None
    state.keeper.release()
    return ""


@pytest.mark.parametrize("name", ["snapshot", "journal-0"])
def test_absurd_json_with_right_checksums_is_one_sentence(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)
    rows = read_rows(folder / name)
    head, body = rows[0]
    heads: list[Any] = [put(head, path, x) for path in leaves(head) for x in others(at(head, path))]
    heads += [{k: v for k, v in head.items() if k != key} for key in head]
    heads += [put(head, (key,), x) for key in head for x in (None, [], {}, 7, "x")]
    heads += [b"[]", b"3", b"{", b"[" * 100_000, b'{"a": NaN}', {}]
    said = []
    for each in heads:
        write_rows(folder / name, [(each, body), *rows[1:]])
        said.append(begin(folder))
    # Counts, digests of the model, and the speeds of workers may have other values.
    assert sum(map(bool, said)) > 0.7 * len(said)
    for each in (body[:-1], body + b"0"):
        write_rows(folder / name, [(copy.deepcopy(head), each), *rows[1:]])
        assert "bytes of" in begin(folder)


def test_a_journal_of_a_newer_snapshot_is_not_dropped(folder: Path) -> None:
    (folder / "journal-0").rename(folder / "journal-9")
    ended = serve(folder)
    assert ended.status == 2 and "journal-9 belongs to a newer snapshot than" in ended.err
    # One without records has nothing to lose.
    write_rows(folder / "journal-9", [])
    AsyncServer(PLAIN, snapshot=folder).stop()


def test_a_crafted_tensor_name_is_refused(folder: Path) -> None:
    [(head, body)] = read_rows(folder / "snapshot")
    head["tensors"] = {"../x": head["tensors"].pop("0/outer"), **head["tensors"]}
    write_rows(folder / "snapshot", [(head, body)])
    ended = serve(folder)
    assert ended.status == 2 and "the snapshot has tensors of other sizes than" in ended.err
