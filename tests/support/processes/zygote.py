"""A process that has imported torch and forks others: workers for tests, and whole programs.

    job = Job(zygote, script, 3, "words")       # as python -c script 3 words, without the imports
    status, output = job.finish()

A program's interpreter begins in a fork, and ends as any other does.
"""

from __future__ import annotations

import atexit
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
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from support_paths import FOLDERS, SUPPORT

PRELOAD = (
    "numpy",
    "pytest",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.optim",
    "diloco_comm",
)


# --------------------------------------------------------------------------------- in the zygote


def die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def look_up_names_in_files_only() -> None:
    """Ask no name server: torch asks one for 127.0.0.1 with every connection to a store.

    Many tests connect at once, and a server that limits their rate answers after five seconds.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # of glibc
    if configure is not None:
        configure(b"hosts", b"files")


def serve(fd: int, preload: Sequence[str]) -> str | None:
    """Import torch once, then fork at every request; returns in a child that is a program."""
    die_with_parent()
    look_up_names_in_files_only()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in (*PRELOAD, *preload):
        importlib.import_module(name)
    # A collection in a worker would look at a million objects of torch's, and copy their pages.
    gc.collect()
    gc.freeze()
    control = Connection(fd)
    while True:
        try:
            request, argument = control.recv()
        except EOFError:
            return None
        if request == "exit_code":
            _, status = os.waitpid(argument, 0)
            control.send(os.waitstatus_to_exitcode(status))
            continue
        handle = recv_handle(control)
        pid = os.fork()
        if pid == 0:
            control.close()
            if request == "program":
                return _begin(handle, *argument)
            importlib.import_module("workers").worker_main(Connection(handle), argument)
        os.close(handle)
        control.send(pid)


def _begin(handle: int, script: str, arguments: list[str]) -> str:
    die_with_parent()
    gc.unfreeze()  # the end of the interpreter is that of any other
    for stream in (0, 1, 2):
        os.dup2(handle, stream)
    os.close(handle)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(SUPPORT)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv = ["-c", *arguments]
    return script


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
        self.control = Connection(ours.detach())
        atexit.register(self.close)

    def fork(self, request: str, argument: Any) -> tuple[int, socket.socket]:
        """Fork a "worker" or a "program"; its process and our end of what it was given."""
        ours, theirs = socket.socketpair()
        self.control.send((request, argument))
        send_handle(self.control, theirs.fileno(), self.process.pid)
        theirs.close()
        return self.control.recv(), ours

    def exit_code(self, pid: int) -> int:
        self.control.send(("exit_code", pid))
        return self.control.recv()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.control.close()


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
        program = (textwrap.dedent(script), [str(argument) for argument in arguments])
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
    # Functions are pickled under their modules' real names.
    sys.path[:0] = FOLDERS
    program = importlib.import_module("zygote").serve(int(sys.argv[1]), sys.argv[2:])
    if program is not None:
        exec(compile(program, "<program>", "exec"))
