"""A process that has imported torch and forks others: workers for tests, and whole programs.

    job = Job(zygote, script, 3, "words")       # as python -c script 3 words, without the imports
    status, output = job.finish()

A program's interpreter begins in a fork, and ends as any other does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import programs
from support_paths import FOLDERS, SUPPORT

PRELOAD = (
    "numpy",
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.optim",
    "diloco_comm.training.presets",
)


# --------------------------------------------------------------------------------- in the zygote


def die_with_parent(parent: int) -> None:
    """Let SIGKILL end this process when the process ``parent`` ends, or at once if that is gone."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def look_up_names_in_files_only() -> None:
    """Ask no name server: torch asks one for 127.0.0.1 with every connection to a store.

    Many tests connect at once, and a server that limits their rate answers after five seconds.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # of glibc
    if configure is not None:
        configure(b"hosts", b"files")


def serve(fd: int, preload: Sequence[str], path: list[str]) -> list[str] | None:
    """Import torch once, then fork at every request; returns in a child that is a program.

    Args:
        fd: Of the connection to the test process, with which the zygote ends.
        path: ``sys.path`` of an interpreter, without the folder of its script.

    Returns:
        The words of the program, or None.
    """
    die_with_parent(os.getppid())
    programs.be_silent_at_end()
    look_up_names_in_files_only()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment = dict(os.environ)  # before the modules change it
    zygote = os.getpid()
    for name in (*PRELOAD, *preload):
        importlib.import_module(name)
    # A collection in a worker would look at a million objects of torch's, and copy their pages.
    gc.collect()
    gc.freeze()
    # The test process, then the programs, which may start others.
    clients = [Connection(fd)]
    while True:
        for client in wait(clients):
            assert isinstance(client, Connection)
            try:
                request, argument, num_fds = client.recv()
                fds = [recv_handle(client) for _ in range(num_fds)]
            except (EOFError, OSError):
                if client is clients[0]:
                    return None
                clients.remove(client)
                client.close()
                continue
            if request == "exit_code":
                _, status = os.waitpid(argument, 0)
                answer = os.waitstatus_to_exitcode(status)
            else:
                ours, theirs = socket.socketpair()
                answer = os.fork()
                if answer == 0:
                    die_with_parent(zygote)
                    for other in (ours, *clients):
                        other.close()
                    line = programs.Line(Connection(theirs.detach()), environment)
                    return _begin(request, argument, fds, line, path)
                theirs.close()
                clients.append(Connection(ours.detach()))
                for handle in fds:
                    os.close(handle)
            with contextlib.suppress(BrokenPipeError):
                client.send(answer)


def _begin(
    request: str, argument: Any, fds: list[int], line: programs.Line, path: list[str]
) -> list[str]:
    """Go on as a worker, or return the words of a program."""
    if request == "worker":
        line.control.close()
        importlib.import_module("workers").worker_main(Connection(fds[0]), argument)
    programs.begin(argument, fds, line, path)
    return argument.words


# ---------------------------------------------------------------------------- in the test process


class Zygote:
    """The process that all workers are forked from; they die with it, and it with us.

    ``preload`` names further modules that it imports for all of them.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno()), *preload],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.line = programs.Line(Connection(ours.detach()), dict(os.environ))
        atexit.register(self.close)

    def fork(self, request: str, argument: Any) -> tuple[int, socket.socket]:
        """Fork a "worker" or a "program"; its process and our end of what it was given."""
        ours, theirs = socket.socketpair()
        with theirs:
            num_fds = 1 if request == "worker" else 3
            return self.line.fork(request, argument, [theirs.fileno()] * num_fds), ours

    def exit_code(self, pid: int) -> int:
        return self.line.exit_code(pid)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.line.control.close()


def wait_until_stopped(pid: int, timeout: float = 60.0) -> None:
    """Wait for all threads of a process that was sent SIGSTOP.

    One of them has to come to a processor first; on a loaded machine the others answer meanwhile.
    """
    deadline = time.monotonic() + timeout
    while {_state(task) for task in Path(f"/proc/{pid}/task").iterdir()} != {"T"}:
        if time.monotonic() > deadline:
            raise AssertionError(f"process {pid} did not stop within {timeout} s")
        time.sleep(0.005)


def _state(task: Path) -> str:
    """The letter behind the name, which may hold spaces and brackets; "" of a thread that ended."""
    try:
        return (task / "stat").read_text().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Job:
    """A Python program in a process of its own; input and output are ours to write and read."""

    def __init__(self, zygote: Zygote, script: str, *arguments: Any) -> None:
        self.zygote = zygote
        words = ["-c", textwrap.dedent(script), *map(str, arguments)]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        program = programs.Program(words, str(SUPPORT), environment, path=FOLDERS, is_thorough=True)
        self.pid, self.stream = zygote.fork("program", program)
        self.output = self.stream.makefile("r")

    def send_signal(self, sig: int) -> None:
        """Send a signal; after SIGSTOP the program stands still."""
        os.kill(self.pid, sig)
        if sig == signal.SIGSTOP:
            wait_until_stopped(self.pid)

    def finish(self, timeout: float = 90.0) -> tuple[int, str]:
        """Wait for the end; the exit status, negative for a signal, and the rest of the output."""
        self.stream.settimeout(timeout)
        try:
            text = self.output.read()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            raise AssertionError(f"did not end within {timeout} s") from None
        finally:
            self.stream.close()
            self.output.close()
        return self.zygote.exit_code(self.pid), text


if __name__ == "__main__":
    path = sys.path[1:]
    # Functions are pickled under their modules' real names.
    sys.path[:0] = FOLDERS
    words = importlib.import_module("zygote").serve(int(sys.argv[1]), sys.argv[2:], path)
    if words is not None:
        programs.run_as_main(words)
