"""The command line: the rendezvous store, and errors that say what to do."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cli_helpers import check_misuse, help_examples, run_cli
from commands import CLI, run_python, running, serving_command
from workers import Pool
from zygote import Job, Zygote

from diloco_comm import SGD, DiLoCo, Link, StorePeers, __version__, connect_store

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def store() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running ``diloco-comm store`` and the address that it printed."""
    # The first example of the help, but for the port.
    example = help_examples("store")["store"][0]
    command = [*CLI, *example.split()[1:], "--listen", "127.0.0.1:0", "--json"]
    with serving_command(command, stderr=subprocess.PIPE) as (process, line):
        yield process, json.loads(line)["address"]


def train_one_round(rank: int, world: int, address: str) -> list[float]:
    """One replica as a separate job, which knows only the store and its number."""
    assert not dist.is_initialized()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCo(
        model,
        optimizer,
        sync_every=1,
        outer=SGD(lr=1.0),
        wire="fp32",
        peers=StorePeers(address, replica=rank, of=world),
        link=Link(timeout=20),
    ):
        model.weight.grad = torch.full((1, 1), float(rank + 1))
        optimizer.step()
    return model.weight.flatten().tolist()


@pytest.mark.fresh_interpreter
def test_replicas_meet_at_the_store(
    store: tuple[subprocess.Popen[str], str], fresh_workers: Callable[..., Pool]
) -> None:
    pool = fresh_workers(2, init_group=False)
    # The replicas go from 1 to 0 and to -1; their mean is exact.
    assert pool.run(train_one_round, store[1]) == [[-0.5], [-0.5]]
    assert store[0].poll() is None


@pytest.mark.parametrize(
    "address", ["localhost", "tcp://localhost", "tcp://host:port", "http://localhost:29400", ""]
)
def test_wrong_store_address_is_one_sentence(address: str) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"store must be tcp://host:port .*, such as .*, got '"):
        DiLoCo(model, optimizer, sync_every=1, peers=StorePeers(address, replica=0, of=1))


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_store_closes_on_signal(
    store: tuple[subprocess.Popen[str], str], sig: signal.Signals
) -> None:
    process, address = store
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", address)
    process.send_signal(sig)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0
    assert errors == f"closed by {sig.name}\n"


def test_store_listens_on_its_address_alone(store: tuple[subprocess.Popen[str], str]) -> None:
    port = int(store[1].rsplit(":", 1)[1])
    client = connect_store(store[1], timeout=20.0)
    client.set("key", "value")
    assert client.get("key") == b"value"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_taken_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_cli("store", "--listen", f"127.0.0.1:{port}")
    assert ended.status == 1
    assert ended.err == f"diloco-comm: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing"], "'nothing'"),
        (["store", "--colour"], "--colour"),
        (["store", "--listen", "x"], "--listen must be host:port"),
        (["relay", "--listen", "h:99999999"], 'to 65535, such as "0.0.0.0:29700", got \'h:99'),
    ],
)
def test_wrong_command_line_is_one_sentence(arguments: list[str], named: str) -> None:
    check_misuse(run_cli(*arguments), named)


def test_a_relay_fits_the_open_files_that_its_process_may_have() -> None:
    relay = [*CLI, "relay", "--listen", "127.0.0.1:0", "--connections", "1000"]
    command = ["sh", "-c", 'ulimit -n 400; exec "$@"', "sh", *relay]
    with running(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
    assert said == (
        "diloco-comm: the relay takes 100 connections, because this process may have 400 open "
        "files\n"
    )


def test_version() -> None:
    ended = run_cli("--version")
    assert (ended.status, ended.out) == (0, f"{__version__}\n")


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_missing_extra_is_one_sentence(module: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None; import diloco_comm_tools.cli as c; c.main()"
    )
    ended = run_python("-c", code, "demo")
    assert ended.returncode == 1
    assert f"diloco-comm needs {module}" in ended.stderr
    assert "pip install 'diloco_comm[cli]'" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.fresh_interpreter
def test_version_and_help_load_no_library() -> None:
    code = """
    import sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name in ("torch", "numpy", "zmq", "matplotlib"):
                sys.exit(f"{sys.argv} imports {name}")

    sys.meta_path.insert(0, Absent())
    commands = sys.argv[1:]
    from diloco_comm_tools.app import app
    for command in commands:
        sys.argv = ["diloco-comm", *command.split()]
        app(standalone_mode=False)
        print("ended:", command)
    """
    commands = ["--version", "--help", *(f"{name} --help" for name in help_examples())]
    ended = run_python("-c", textwrap.dedent(code), *commands)
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout.splitlines()
    assert printed[0] == __version__
    assert [line[7:] for line in printed if line.startswith("ended: ")] == commands


def test_every_command_has_examples() -> None:
    """Run the examples of the help. Tests of bench, doctor, plan and profile run their own."""
    found = help_examples()
    assert found.keys() >= {"bench tune", "demo", "doctor", "plan", "profile run", "serve", "store"}
    assert [name for name, lines in found.items() if not lines] == []


@pytest.mark.nightly("7 s; test_async_serve_cli starts the same servers")
def test_examples_of_serve_run(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = help_examples("serve")
    (keygen,) = lines["serve keygen"]
    made = run_cli(*keygen.split()[1:])
    assert made.status == 0 and (tmp_path / "keys/allowed/tokyo.key").exists()
    commands = ("serve", "serve decoupled", "serve status")
    *hosts, status = (lines[command][0].split()[1:] for command in commands)
    for words, counted in zip(hosts, ("updates", "commits"), strict=True):
        words = ["diloco-comm", *words, "--listen", "127.0.0.1:0", "--json"]
        program = "import os, sys; from diloco_comm_tools import cli; os.chdir(sys.argv[1]); "
        job = Job(zygote, f"{program} sys.argv = {words}; cli.main()", tmp_path)
        announced = json.loads(job.output.readline())
        address = announced["address"]
        assert announced == {"schema": 1, "address": address}
        shown = run_cli(*status[:-2], address, "--json")
        assert (shown.status, shown.err) == (0, "")
        assert json.loads(shown.out)[counted] == 0
        job.send_signal(signal.SIGTERM)
        assert job.finish() == (0, "closed by SIGTERM\n")
    again = run_cli("serve", "keygen", "others", "--json")
    assert set(json.loads(again.out)["keys"]) == {str(p) for p in Path("others").rglob("*.key*")}
