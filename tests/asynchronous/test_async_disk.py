"""Disks that are full and folders that cannot be written: the server goes on and says so."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from async_disk import SIZE, Disk, train
from async_helpers import PLAIN, attach, status, wait_until
from async_processes import Child
from cli_helpers import run_cli

from diloco_comm.asynchronous.rules import Buffered
from diloco_comm.asynchronous.server import AsyncServer

pytestmark = pytest.mark.usefixtures("forked_programs")

UPDATE_BYTES = 4 * SIZE


class Hosted:
    """``diloco-comm serve`` as a process."""

    def __init__(self, folder: Path, log: Path, every: int) -> None:
        command = [
            sys.executable, "-m", "diloco_comm_tools.cli", "serve", "--rule", "sgd", "--lr", "1",
            "--listen", "127.0.0.1:0", "--sync-every", "1", "--snapshot", str(folder),
            "--snapshot-every", str(every),
        ]  # fmt: skip
        self._log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    @property
    def storage(self) -> dict:
        return status(self.address)["storage"]

    @property
    def said(self) -> str:
        return self._log.read_text()

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Hosted]]:
    """``host(folder, every=5)``: a server with snapshots in that folder."""
    hosted: list[Hosted] = []

    def make(folder: Path, every: int = 5) -> Hosted:
        hosted.append(Hosted(folder, tmp_path / f"log-{len(hosted)}", every))
        return hosted[-1]

    yield make
    for one in hosted:
        one.process.kill()
        one.process.wait()


@contextmanager
def copied(folder: Path, place: Path) -> Iterator[AsyncServer]:
    """A server that comes back with the folder as a kill would leave the folder now."""
    shutil.copytree(folder, place)
    server = AsyncServer(PLAIN, snapshot=place)
    yield server
    server.stop()


def test_a_server_goes_on_while_the_disk_is_full(
    disk: Disk, host: Callable[..., Hosted], tmp_path: Path
) -> None:
    folder = disk.root / "state"
    server = host(folder)
    model, worker = attach(server.address, "a", size=SIZE)
    train(model, worker, 7)
    # The server saves between two updates: after the fifth, or a little later when it is busy.
    wait_until(lambda: server.storage["snapshot_version"] >= 5, 60)
    assert server.storage["problem"] == "" and server.storage["unsaved_updates"] == 0
    journal = f"journal-{server.storage['snapshot_version']}"
    disk.fill()
    train(model, worker, 6)
    assert worker.seq == 13 and torch.equal(model.values(), torch.full((SIZE,), 1 - 6.5))
    said = server.storage
    assert "No space left on device" in said["problem"] and str(folder) in said["problem"]
    assert "a crash loses the updates after version 7" in said["problem"]
    assert said["unsaved_updates"] == 6 and said["folder"] == str(folder)
    shown = run_cli("serve", "status", server.address).out
    assert "No space left on device" in " ".join(shown.split())
    # The files are whole, and end with the last update that fitted.
    assert {path.name for path in folder.iterdir()} == {"lock", "snapshot", journal}
    with copied(folder, tmp_path / "copy") as back:
        assert torch.equal(back.parameters()[0], torch.full((SIZE,), 1 - 3.5))
    disk.empty()
    wait_until(lambda: not server.storage["problem"], 60)
    assert server.storage["unsaved_updates"] == 0 and server.storage["snapshot_version"] == 13
    train(model, worker, 1)
    server.end(signal.SIGKILL)
    lines = server.said.splitlines()
    assert len(lines) == 2, lines
    assert f"{journal} cannot be written: No space left on device" in lines[0]
    assert "can be written again after" in lines[1] and "version 13 is saved" in lines[1]
    # The journal goes on after the new snapshot, and the worker after a restart.
    with copied(folder, tmp_path / "again") as back:
        assert torch.equal(back.parameters()[0], model.values())
        assert back.state.coordinator.ledger()["a"]["seq"] == 14
    worker._link.close()


@pytest.mark.nightly("4 s; the first tier has a full disk and a killed server apart")
def test_a_server_that_is_killed_beside_a_full_disk_comes_back_there(
    disk: Disk, host: Callable[..., Hosted]
) -> None:
    folder = disk.root / "state"
    server = host(folder)
    model, worker = attach(server.address, "a", size=SIZE)
    train(model, worker, 6)
    disk.fill()
    train(model, worker, 3)
    server.end(signal.SIGKILL)
    worker._link.close()
    # A kill during the writing of a snapshot leaves this file.
    (folder / "snapshot.new").write_bytes(b"")
    server = host(folder)
    model, worker = attach(server.address, "a", size=SIZE)
    assert worker.seq == 6 and torch.equal(model.values(), torch.full((SIZE,), 1 - 3.0))
    assert not (folder / "snapshot.new").exists()
    train(model, worker, 2)
    assert "No space left" in server.storage["problem"]
    disk.empty()
    wait_until(lambda: not server.storage["problem"], 60)
    worker.close()
    assert server.end() == 0
    server = host(folder)
    model, worker = attach(server.address, "b", size=SIZE)
    assert torch.equal(model.values(), torch.full((SIZE,), 1 - 4.0))
    worker.close()


@pytest.mark.nightly("1 s each; they differ in the bytes that fit", but=["0.1"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_an_update_that_does_not_fit_wholly_is_not_in_the_journal(
    share: float, disk: Disk, host: Callable[..., Hosted], tmp_path: Path
) -> None:
    """Room for a part of the next record: the system takes that part without an error."""
    folder = disk.root / "state"
    server = host(folder, every=1000)
    model, worker = attach(server.address, "a", size=SIZE)
    train(model, worker, 3)
    (journal,) = folder.glob("journal-*")
    whole = journal.stat().st_size
    disk.fill(leave=int(share * UPDATE_BYTES))
    train(model, worker, 1)
    assert journal.stat().st_size == whole
    # A smaller record would fit, and leave a gap in the journal.
    disk.empty()
    disk.fill(leave=UPDATE_BYTES // 2)
    train(model, worker, 1)
    assert journal.stat().st_size == whole
    with copied(folder, tmp_path / "copy") as back:
        assert torch.equal(back.parameters()[0], torch.full((SIZE,), 1 - 1.5))
    assert server.end() == 1
    said = server.said.splitlines()[-1]
    assert "version 5 of the model is lost, and version 3 is kept" in said
    assert "No space left on device" in said
    worker._link.close()


@pytest.mark.nightly("2 s; the first tier has a journal that does not fit")
def test_a_snapshot_that_does_not_fit_costs_nothing_while_the_journal_does(
    disk: Disk, host: Callable[..., Hosted]
) -> None:
    folder = disk.root / "state"
    server = host(folder, every=3)
    model, worker = attach(server.address, "a", size=SIZE, wire="int4")
    # Updates of 50 kB fit, a snapshot of 400 kB does not.
    disk.fill(leave=UPDATE_BYTES * 9 // 10)
    train(model, worker, 4)
    wait_until(lambda: server.storage["problem"] != "")
    assert "snapshot" in server.storage["problem"]
    assert "a crash loses nothing" in server.storage["problem"]
    assert server.storage["unsaved_updates"] == 0
    assert {path.name for path in folder.iterdir()} == {"lock", "snapshot", "journal-0"}
    # Nothing is lost, so this is no failure.
    assert server.end() == 0
    worker._link.close()
    disk.empty()
    server = host(folder)
    again, worker = attach(server.address, "a", size=SIZE, wire="int4")
    assert worker.seq == 4 and torch.equal(again.values(), model.values())
    worker.close()


def test_a_folder_belongs_to_one_server(host: Callable[..., Hosted], tmp_path: Path) -> None:
    folder = tmp_path / "state"
    server = host(folder)
    model, worker = attach(server.address, "a", size=SIZE)
    train(model, worker, 1)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    ended = run_cli("serve", "--listen", "127.0.0.1:0", "--snapshot", folder)
    assert ended.status == 1 and ended.err.count("\n") == 1
    assert f"the snapshot folder {folder} belongs to another server, process " in ended.err
    assert f" {server.process.pid} on {socket.gethostname()}: each server needs" in ended.err
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == files
    train(model, worker, 1)
    worker._link.close()
    # The lock ends with the process, however that ends, and with stop().
    server.end(signal.SIGKILL)
    with AsyncServer(PLAIN, snapshot=folder) as back:
        assert status(back)["updates"] == 2
        with pytest.raises(OSError, match=f"another server, process {os.getpid()} on"):
            AsyncServer(PLAIN, snapshot=folder)
    AsyncServer(PLAIN, snapshot=folder).stop()


def test_a_server_that_cannot_begin_leaves_the_folder_to_another(tmp_path: Path) -> None:
    start = {"parameters": [torch.ones(7)]}
    AsyncServer(PLAIN, snapshot=tmp_path / "old", **start).stop()
    with pytest.raises(ValueError, match="was made with the rule"):
        AsyncServer(Buffered(period=2), snapshot=tmp_path / "old")
    AsyncServer(PLAIN, snapshot=tmp_path / "old").stop()


def test_a_server_whose_address_is_taken_changes_nothing_on_the_disk(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    AsyncServer(PLAIN, snapshot=old, parameters=[torch.ones(7)]).stop()
    # Files of a killed server are removed by its successor, not by other servers.
    (old / "snapshot.new").write_bytes(b"half")
    files = {path.name: path.read_bytes() for path in old.iterdir()}
    with AsyncServer(PLAIN) as server:
        for folder in (new, old):
            with pytest.raises(OSError, match="cannot listen on"):
                AsyncServer(
                    PLAIN, listen=server.address, snapshot=folder, parameters=[torch.ones(7)]
                )
    assert not new.exists()
    assert {path.name: path.read_bytes() for path in old.iterdir()} == files
    AsyncServer(PLAIN, snapshot=old).stop()


def test_a_server_does_not_begin_on_a_full_disk(disk: Disk) -> None:
    disk.fill()
    ended = run_cli("serve", "--listen", "127.0.0.1:0", "--snapshot", disk.root / "state")
    assert ended.status == 1 and ended.err.count("\n") == 1
    assert f"{disk.root}/state" in ended.err and "No space left on device" in ended.err
    disk.empty()
    disk.fill(leave=UPDATE_BYTES // 2)
    with pytest.raises(OSError, match=r"snapshot cannot be written: No space left on device"):
        AsyncServer(PLAIN, snapshot=disk.root / "state", parameters=[torch.ones(SIZE)])
    assert not (disk.root / "state" / "snapshot.new").exists()


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A folder that a user other than root can reach."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        yield Path(place)


def test_a_folder_that_becomes_read_only(everybodys: Path) -> None:
    """The open journal can still be written, a snapshot beside it cannot be begun."""
    # Root may write everywhere.
    user = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None
    server = Child(
        "server", folder=everybodys / "state", size=7, snapshot_every=2, user=user,
        server={"sync_every": 1},
    )  # fmt: skip
    try:
        address = server.stdout.readline().strip()

        def storage() -> dict:
            return status(address)["storage"]

        os.chmod(everybodys / "state", 0o555)
        model, worker = attach(address, "a", fragments=["a", "b"])
        for _ in range(5):
            model.descend(torch.ones(7))
            worker.step()
        wait_until(lambda: storage()["problem"] != "")
        assert "cannot be written: Permission denied" in storage()["problem"]
        assert "a crash loses nothing" in storage()["problem"]
        os.chmod(everybodys / "state", 0o755)
        wait_until(lambda: not storage()["problem"], 60)
        assert storage()["snapshot_version"] == 5
        worker.close()
    finally:
        server.kill()
        server.wait()


def test_the_status_of_a_server_that_keeps_nothing() -> None:
    with AsyncServer(PLAIN, parameters=[torch.ones(7)]) as server:
        assert json.loads(json.dumps(status(server)))["storage"] is None
        shown = run_cli("serve", "status", server.address)
        assert "nothing is kept on disk" in shown.out
