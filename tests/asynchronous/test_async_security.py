"""CURVE keys, and addresses that other machines reach."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from async_helpers import (
    PLAIN,
    attach,
    serving,
)
from descriptors import silent_strangers

from diloco_comm.asynchronous.link import ServerLost, ServerRefused, read_status
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.base.service.keys import make_keys


def test_keys_let_in_the_allowed_and_nobody_else(tmp_path: Path) -> None:
    make_keys(tmp_path, ["one", "two"])
    (tmp_path / "allowed" / "two.key").unlink()
    with serving(keys=tmp_path, parameters=[torch.ones(7)]) as server:
        model, worker = attach(server.address, "a", keys=tmp_path, key_name="one")
        model.descend(torch.ones(7))
        worker.step()
        assert torch.equal(model.values(), torch.zeros(7))
        with pytest.raises(ServerLost):
            attach(server.address, "b", keys=tmp_path, key_name="two", timeout=1.0)
        with pytest.raises(ServerLost):
            attach(server.address, "c", timeout=1.0)
        report = read_status(server.address, keys=tmp_path, key_name="one", timeout=20.0)
        assert list(report["workers"]) == ["a"]
        worker.close()


def test_a_worker_whose_key_is_removed_is_out(tmp_path: Path) -> None:
    make_keys(tmp_path, ["one", "two"])
    with serving(keys=tmp_path, parameters=[torch.ones(7)]) as server:
        _, kept = attach(server.address, "a", keys=tmp_path, key_name="one")
        model, worker = attach(server.address, "b", keys=tmp_path, key_name="two")
        (tmp_path / "allowed" / "two.key").unlink()
        time.sleep(2.0)
        model.descend(torch.ones(7))
        with pytest.raises(ServerRefused, match="the key of this client is not among"):
            worker.step()
            worker.flush()
        report = read_status(server.address, keys=tmp_path, key_name="one", timeout=20.0)
        present = {name for name, one in report["workers"].items() if one["connected"]}
        assert present == {"a"}
        kept.close()


def test_strangers_that_use_up_the_descriptors_end_no_server(tmp_path: Path) -> None:
    """Honest workers go on, and a key that is removed meanwhile counts."""
    make_keys(tmp_path, ["one", "two"])
    with serving(keys=tmp_path, parameters=[torch.ones(7)]) as server, ExitStack() as stack:
        model, kept = attach(server.address, "a", keys=tmp_path, key_name="one")
        stack.callback(kept.close)
        other, removed = attach(server.address, "b", keys=tmp_path, key_name="two")
        with silent_strangers(server.address):
            time.sleep(1.5)
            (tmp_path / "allowed" / "two.key").unlink()
            end = time.monotonic() + 4.0
            while time.monotonic() < end:
                model.descend(torch.ones(7))
                kept.step()
            with pytest.raises(ServerRefused, match="the key of this client is not among"):
                while time.monotonic() < end + 60.0:
                    other.descend(torch.ones(7))
                    removed.step()
                    removed.flush()
        kept.flush()


def test_keys_are_private_files(tmp_path: Path) -> None:
    written = make_keys(tmp_path / "keys")
    names = sorted(path.relative_to(tmp_path / "keys").as_posix() for path in written)
    assert names == [
        "allowed/worker.key", "server.key", "server.key_secret", "worker.key", "worker.key_secret",
    ]  # fmt: skip
    for path in written:
        if path.name.endswith("_secret"):
            assert os.stat(path).st_mode & 0o077 == 0
    with pytest.raises(ValueError, match="exists: remove it"):
        make_keys(tmp_path / "keys")
    for name in ("../x", "server", ""):
        with pytest.raises(ValueError, match="plain name"):
            make_keys(tmp_path / "keys", [name])


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:5"])
def test_an_open_address_needs_keys_or_a_word(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can be reached from other machines"):
        AsyncServer(PLAIN, listen=address)
    with pytest.raises(ValueError, match="there is no key"):
        AsyncServer(PLAIN, listen="0.0.0.0:0", keys=tmp_path)
    AsyncServer(PLAIN, listen="0.0.0.0:0", insecure=True).stop()
