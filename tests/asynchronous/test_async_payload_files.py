"""Updates that are kept in files: on full disks, and on disks that fail."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from async_disk import SIZE, Disk, train
from async_helpers import PLAIN, attach, status, wait_until

from diloco_comm.asynchronous.link import ServerLost
from diloco_comm.asynchronous.model import RUN_ELEMENTS
from diloco_comm.asynchronous.payloads import Upload, payload_files
from diloco_comm.asynchronous.server import AsyncServer


def test_an_update_that_needs_a_file_gets_one_elsewhere(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_comm.asynchronous.state.SMALL_BYTES", 0)
    folder, made = disk.root / "state", []
    monkeypatch.setattr(
        "diloco_comm.asynchronous.state.payload_files",
        lambda *arguments: made.append(arguments) or payload_files(*arguments),
    )
    server = AsyncServer(PLAIN, snapshot=folder, parameters=[torch.ones(SIZE)], sync_every=1)
    with server:
        model, worker = attach(server.address, "a", size=SIZE)
        train(model, worker, 1)
        disk.fill()
        train(model, worker, 1)
        assert [place for place, _ in made] == [folder, folder, None]
        disk.empty()
        wait_until(lambda: not status(server)["storage"]["problem"], 60)
        worker.close()
    assert torch.equal(server.parameters()[0], model.values())


def test_an_update_waits_for_room_on_a_full_disk(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither beside the snapshot nor in the folder of temporary files is any room."""
    monkeypatch.setattr("diloco_comm.asynchronous.state.SMALL_BYTES", 0)
    monkeypatch.setattr("diloco_comm.asynchronous.link.PATIENCE_S", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", str(disk.root))
    folder = disk.root / "state"
    with AsyncServer(PLAIN, snapshot=folder, parameters=[torch.ones(SIZE)], sync_every=1) as server:
        model, worker = attach(server.address, "a", size=SIZE)
        train(model, worker, 1)
        disk.fill()
        thread = threading.Thread(target=train, args=(model, worker, 1))
        thread.start()
        wait_until(lambda: status(server)["problem"] != "", 60)
        said = status(server)["problem"]
        assert f"waits for room in {folder} or {disk.root}: No space left on device" in said
        wait_until(lambda: "has had no room for update 2 of worker a" in caplog.text, 60)
        disk.empty()
        thread.join()
        assert status(server)["updates"] == 2 and status(server)["problem"] == ""
        assert status(server)["refused"] == {}
        worker.close()
    assert torch.equal(server.parameters()[0], model.values())


@pytest.mark.parametrize("call", ["pwrite", "fsync", "preadv"])
def test_a_file_that_fails_costs_one_update(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk fails for one update of a worker: neither the model nor other workers see it."""
    monkeypatch.setattr("diloco_comm.asynchronous.state.SMALL_BYTES", 0)
    is_broken = [False]

    def fail(*arguments: object) -> int:
        if is_broken[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)  # type: ignore[arg-type]

    real = getattr(os, call)
    monkeypatch.setattr(f"diloco_comm.asynchronous.payloads.os.{call}", fail)
    with AsyncServer(PLAIN, parameters=[torch.ones(SIZE)], sync_every=1) as server:
        model, worker = attach(server.address, "a", size=SIZE)
        other_model, other = attach(server.address, "b", size=SIZE)
        train(model, worker, 1)
        is_broken[0] = True
        train(model, worker, 1)
        is_broken[0] = False
        said = status(server)
        assert said["updates"] == 1 and said["refused"] == {"disk": 1}
        assert "update 2 of worker a is lost" in said["problem"]
        assert "Input/output error" in said["problem"] and "update 2 of worker a" in caplog.text
        train(other_model, other, 1)
        train(model, worker, 1)
        assert status(server)["updates"] == 3 and status(server)["problem"] == ""
        assert status(server)["payload_bytes"] == 0
        worker.close()
        other.close()
    assert torch.equal(server.parameters()[0], torch.full((SIZE,), 1 - 1.5))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_file_that_fails_while_it_is_applied_spoils_no_snapshot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model in memory then holds a part of the update: the folder keeps the version before."""
    monkeypatch.setattr("diloco_comm.asynchronous.state.SMALL_BYTES", 0)
    real, is_checked = os.preadv, [False]
    run_bytes = 4 * RUN_ELEMENTS

    def fail_in_the_second_run(number: int, buffers: list[memoryview], offset: int) -> int:
        if is_checked[0] and offset >= run_bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(number, buffers, offset)

    size, folder = RUN_ELEMENTS + 1, tmp_path / "state"
    options = {"snapshot": folder, "sync_every": 1}
    server = AsyncServer(PLAIN, parameters=[torch.ones(size)], **options).start()
    model, worker = attach(server.address, "a", size=size, timeout=2.0)
    model.descend(torch.full((size,), 0.5))
    worker.step()
    monkeypatch.setattr("diloco_comm.asynchronous.payloads.os.preadv", fail_in_the_second_run)
    read_through = Upload.read_through

    def check_and_break(upload: Upload) -> None:
        read_through(upload)
        is_checked[0] = True

    monkeypatch.setattr(Upload, "read_through", check_and_break)
    model.descend(torch.full((size,), 0.5))
    with pytest.raises(ServerLost):
        worker.step()
    with pytest.raises(
        OSError, match="the update to version 2 cannot be read from its file: Input/output error"
    ):
        server.stop()
    worker.close()
    monkeypatch.undo()
    with AsyncServer(PLAIN, **options) as restarted:
        assert status(restarted)["updates"] == 1
    assert torch.equal(restarted.parameters()[0], torch.full((size,), 0.5))
