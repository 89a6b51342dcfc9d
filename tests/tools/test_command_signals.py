"""A command that waits ends by SIGTERM or Ctrl-C with one sentence and its status."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from registries import serving
from zygote import Job, Zygote

from diloco_comm.base.store_host import open_store
from diloco_comm_tools.common.workers import free_port

pytestmark = pytest.mark.usefixtures("forked_programs")

SCRIPT = """
import os, sys
from diloco_comm_tools import cli
variables, words = {variables}, {words}
os.environ |= variables
sys.argv = ["diloco-comm", *words]
cli.main()
"""
SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def command(zygote: Zygote, stack: ExitStack) -> Callable[..., Job]:
    def start(*words: object, **variables: object) -> Job:
        texts = {name: str(value) for name, value in variables.items()}
        job = Job(zygote, SCRIPT.format(variables=texts, words=list(map(str, words))))
        stack.callback(end, job)
        return job

    return start


def end(job: Job) -> None:
    with suppress(ProcessLookupError):
        job.send_signal(signal.SIGKILL)


def silent_server(stack: ExitStack) -> tuple[socket.socket, str]:
    """Return a server that answers nobody, and its address."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    server.settimeout(60)
    return server, f"tcp://127.0.0.1:{server.getsockname()[1]}"


def ended_by(job: Job, number: signal.Signals) -> tuple[int, str]:
    job.send_signal(number)
    return job.finish(60)


@pytest.mark.nightly("2 s each", but=["store-SIGTERM", "registry-SIGINT"])
@pytest.mark.parametrize("number", SIGNALS, ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    "words", [["store"], ["relay"], ["registry"], ["serve"], ["serve", "decoupled"]], ids=" ".join
)
def test_a_server_ends_with_status_0(
    command: Callable[..., Job], words: list[str], number: signal.Signals
) -> None:
    job = command(*words, "--listen", "127.0.0.1:0")
    lines = iter(job.output.readline, "")
    assert any(line.startswith("tcp://127.0.0.1:") for line in lines)
    assert ended_by(job, number) == (0, f"closed by {number.name}\n")


@pytest.mark.nightly("2 s each", but=["serve status-SIGTERM"])
@pytest.mark.parametrize("number", SIGNALS, ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    "words",
    [
        ["members", "--run", "r", "--registry"],
        ["members", "--run", "r", "--watch", "--registry"],
        ["serve", "status"],
        ["serve", "status", "--watch"],
        ["doctor", "--links", "--replica", "0", "--of", "2", "--store"],
    ],
    ids=" ".join,
)
def test_a_command_that_waits_for_a_server(
    command: Callable[..., Job], stack: ExitStack, words: list[str], number: signal.Signals
) -> None:
    server, address = silent_server(stack)
    job = command(*words, address, "--timeout", "50")
    stack.enter_context(server.accept()[0])
    assert ended_by(job, number) == (128 + number, f"diloco-comm: ended by {number.name}\n")


@pytest.mark.nightly("3 s each; they differ in the signal", but=["SIGINT"])
@pytest.mark.parametrize("number", SIGNALS, ids=["SIGTERM", "SIGINT"])
def test_a_command_that_shows_the_members(
    command: Callable[..., Job], stack: ExitStack, number: signal.Signals
) -> None:
    server = stack.enter_context(serving())
    job = command("members", "--run", "r", "--watch", "--registry", server.address)
    # Without a terminal the table comes at the end.
    time.sleep(4.0)
    status, said = ended_by(job, number)
    assert status == 128 + number
    assert said.endswith(f"diloco-comm: ended by {number.name}\n") and "Traceback" not in said


@pytest.mark.nightly("3 s each; they differ in the signal", but=["SIGTERM"])
@pytest.mark.parametrize("number", SIGNALS, ids=["SIGTERM", "SIGINT"])
def test_a_doctor_that_waits_for_another(
    command: Callable[..., Job], number: signal.Signals
) -> None:
    hosted = open_store("127.0.0.1", 0)
    job = command(
        *("doctor", "--links", "--store", hosted.address, "--replica", 0, "--of", 2),
        *("--listen", "127.0.0.1:0"),
    )
    assert job.output.readline() == "diloco-comm: waiting for replica 1\n"
    assert ended_by(job, number) == (128 + number, f"diloco-comm: ended by {number.name}\n")


@pytest.mark.nightly("3 s each; they differ in the signal", but=["SIGTERM"])
@pytest.mark.parametrize("number", SIGNALS, ids=["SIGTERM", "SIGINT"])
def test_a_doctor_that_waits_for_the_other_ranks_of_its_job(
    command: Callable[..., Job], number: signal.Signals
) -> None:
    """The wait is in C++, where no handler of Python runs."""
    port = free_port()
    job = command(
        "doctor", RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    until_listens(port)
    time.sleep(0.5)
    assert ended_by(job, number) == (128 + number, f"diloco-comm: ended by {number.name}\n")


def until_listens(port: int) -> None:
    while True:
        with suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.05)
