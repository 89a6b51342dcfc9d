"""``diloco-comm serve`` as a process: training through it, status, keys, refusals, signals."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from async_helpers import attach
from cli_helpers import check_documented, check_misuse, run_cli

pytestmark = pytest.mark.usefixtures("forked_programs")

CLI = [sys.executable, "-m", "diloco_comm_tools.cli", "serve"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=100)


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [*CLI, "--listen", "127.0.0.1:0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


@pytest.mark.nightly("15 s; the server's parts have tests of their own")
@pytest.mark.fresh_interpreter
def test_train_look_stop_and_go_on(tmp_path: Path) -> None:
    options = (
        "--rule", "delayed", "--period", "2", "--lr", "0.5", "--sync-every", "1",
        "--snapshot", str(tmp_path / "s"),
    )  # fmt: skip
    with serving(*options) as (process, address):
        model, worker = attach(address, "w1")
        for _ in range(3):
            model.descend(torch.ones(7))
            worker.step()
        report = json.loads(run("status", address, "--json").stdout)
        assert report["schema"] == 1
        check_documented(report, "explanation/asynchronous.md")
        assert report["updates"] == 3 and report["workers"]["w1"]["applied"] == 3
        shown = run_cli("serve", "status", address)
        assert "w1" in shown.out and "3 updates" in shown.out and shown.status == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 and "closed by SIGTERM" in process.stderr.read()
    with serving(*options) as (_, other):
        again, second = attach(other, "w2")
        assert torch.equal(again.values(), model.values()) and second.version == 3
        second.close()
    worker.close()


def test_misuse_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    for arguments, sentence in (
        (("--listen", "0.0.0.0:0"), "can be reached from other machines"),
        (("--listen", "0.0.0.0:0"), "give --keys (made by `diloco-comm serve keygen`), or"),
        (("--listen", "0.0.0.0:0"), "or --insecure to let in whoever finds the port"),
        (("--rule", "magic"), "--rule must be one of delayed"),
        (("--activation", "0.5"), "--activation must lie in [0, 1/period]"),
        (("--model-sizes", "3"), "--model-sizes is 3, and the rule DelayedNesterov keeps 3 models"),
        (("--listen", "here"), ": --listen must be host:port with a port from 0 to 65535, such as"),
        (("status", "here"), ": address must be tcp://host:port with a port from 1 to 65535, "),
        (("--sync-every", "0"), ": --sync-every must be an integer of at least 1, got 0"),
        (("--snapshot-every", "0"), ": --snapshot-every must be at least 1, got 0"),
        (("--max-staleness", "-1"), ": --max-staleness must not be negative, got -1"),
        (("--lr", "nan"), ": --lr must be finite and not negative, got nan"),
        (("--watch",), "No such option: --watch"),
        (("status", "h:1", "--json", "--watch"), ": --watch and --json exclude each other"),
        (("--momentum", "1"), ": --momentum must be at least 0 and below 1, got 1.0"),
    ):
        check_misuse(run_cli("serve", *arguments), sentence)


def test_status_of_a_server_that_is_not_there_speaks_of_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    ended = run_cli("serve", "status", address, "--timeout", "0.3")
    assert (ended.status, ended.out) == (1, "")
    told = rf"diloco-comm: the server {address} has not answered for \d+\.\d s: is it running, "
    assert re.fullmatch(told + r"and does it want --keys\?\n", ended.err)


def test_keygen_and_a_protected_server(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    made = run("keygen", str(keys), "--worker", "w1")
    assert made.returncode == 0 and str(keys / "allowed" / "w1.key") in made.stdout
    check_misuse(run_cli("serve", "keygen", keys, "--worker", "w1"), "exists")
    with serving("--keys", str(keys), "--sync-every", "1", "--rule", "sgd", "--lr", "1") as (
        _,
        address,
    ):
        model, worker = attach(address, "w1", keys=keys, key_name="w1")
        model.descend(torch.ones(7))
        worker.step()
        assert torch.equal(model.values(), torch.zeros(7))
        silent = run_cli("serve", "status", address, "--timeout", "1")
        assert silent.status == 1 and "has not answered" in silent.err
        worker.close()


@pytest.mark.parametrize("arguments", [["--help"], ["keygen", "--help"]])
def test_help(arguments: list[str]) -> None:
    done = run_cli("serve", *arguments)
    assert done.status == 0 and "Usage" in done.out
