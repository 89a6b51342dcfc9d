"""Start Python programs by a fork of a process that has imported torch, through ``subprocess``.

The fixture ``forked_programs`` puts ``Popen`` in the place of ``subprocess.Popen``. A command of
this Python and a script, ``-m module`` or ``-c text`` then runs in a fork of the zygote, which
saves the seconds in which an interpreter imports torch. The program has its own folder,
environment, streams, signals and exit status, and its interpreter ends as any other does. Programs
that it starts are forked too. What differs from a fresh interpreter: modules that the program
does not ask for are loaded, all forks share the seed of ``hash``, the parent is the zygote, and the
process group is the program's own; after the handlers of ``atexit``, nothing that the interpreter
may still say is shown. Every other command, and one with ``executable=``, is executed.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, ClassVar

# What an interpreter or its libraries read while they are loaded. A program with another value than
# the zygote's is executed. OMP_NUM_THREADS is set in the fork.
_READ_AT_LOAD = (
    *("PYTHON", "LD_", "MALLOC_", "MKL_", "KMP_", "GOMP_", "OMP_", "TORCH_", "TRITON_"),
)
_READ_LATER = ("OMP_NUM_THREADS", "PYTHON_EXEC", "TORCH_NCCL_", "TORCH_ELASTIC_")


@dataclass(frozen=True)
class Program:
    """What the new process is to do.

    Attributes:
        words: As behind ``python``: a script, ``-m module`` or ``-c text``, and arguments.
        folder: The current folder.
        environment: All variables.
        path: Folders to import from, before those of every interpreter.
        fds: The numbers that the descriptors sent along have in the new process.
        is_unbuffered, is_session: As ``python -u``; whether the process begins a session.
        is_thorough: The interpreter's end looks at all objects of the modules that the zygote has
            loaded, which takes a second, and not at the program's alone.
    """

    words: list[str]
    folder: str
    environment: dict[str, str]
    path: list[str] = field(default_factory=list)
    fds: tuple[int, ...] = (0, 1, 2)
    is_unbuffered: bool = False
    is_session: bool = False
    is_thorough: bool = False


class Line:
    """A connection to the zygote, which the threads of a process use in turn.

    Attributes:
        environment: The variables with which the zygote has imported its modules.
    """

    def __init__(self, control: Connection, environment: Mapping[str, str]) -> None:
        self.control, self.environment = control, environment
        self._turn = threading.Lock()

    def fork(self, request: str, argument: Any, fds: Sequence[int]) -> int:
        """Fork a "worker" or a "program", which gets the descriptors; return its process."""
        with self._turn:
            self.control.send((request, argument, len(fds)))
            for fd in fds:
                send_handle(self.control, fd, 0)
            return self.control.recv()

    def exit_code(self, pid: int) -> int:
        """Wait for the end of a process that was forked; negative for a signal."""
        # The zygote itself must not wait: it serves others.
        end = os.pidfd_open(pid)
        wait([end])
        os.close(end)
        with self._turn:
            self.control.send(("exit_code", pid, 0))
            return self.control.recv()


# ----------------------------------------------------------------------------- in the new process

# Holds True where nothing is shown after the handlers of ``atexit``.
_is_silent_at_end: list[bool] = []


def be_silent_at_end() -> None:
    """Show nothing after the handlers of ``atexit`` that are registered after this call.

    A library lists all of its objects that still live, and a fork keeps those of the zygote.
    """
    atexit.register(lambda: _is_silent_at_end and os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


def begin(program: Program, fds: Sequence[int], line: Line, path: list[str]) -> None:
    """Make this fork of the zygote the process of the program.

    Args:
        fds: What ``program.fds`` are to be; they are closed.
        line: This process's own connection to the zygote.
        path: ``sys.path`` of an interpreter, without the folder of its script.
    """
    if program.is_thorough:
        gc.unfreeze()
    else:
        _is_silent_at_end.append(True)
    _take(fds, program.fds)
    if program.is_session:
        os.setsid()
    else:
        os.setpgid(0, 0)  # a signal to the own group must not reach the zygote
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(program.folder)
    _set_environment(program.environment)
    _open_streams(program.is_unbuffered)
    _draw_seeds()
    sys.path[:] = [*program.path, *path]
    sys.orig_argv = [sys.executable, *["-u"] * program.is_unbuffered, *program.words]
    Popen.line, Popen.owner = line, os.getpid()
    _fork_from_everywhere()


def _fork_from_everywhere() -> None:
    """Put ``Popen`` also where a module has imported the class by its name, as torchrun's has."""
    executing = Popen.__base__
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("Popen") is executing:
            names["Popen"] = Popen


def _take(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the descriptors their numbers, whichever of these are in use among the former."""
    import fcntl

    above = max(*fds, *numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd in set(fds):
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _set_environment(variables: Mapping[str, str]) -> None:
    threads = variables.get("OMP_NUM_THREADS")
    if threads != os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads or len(os.sched_getaffinity(0))))
    os.environ.clear()
    os.environ.update(variables)


def _draw_seeds() -> None:
    """Give the process random numbers of its own; those of ``random`` are new after each fork."""
    import numpy
    import torch

    torch.default_generator.seed()
    numpy.random.seed()


def _open_streams(is_unbuffered: bool) -> None:
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, f"__{name}__")
        stream = open(
            fd, "w" if fd else "r", encoding=old.encoding, errors=old.errors, closefd=False
        )
        if fd:
            is_prompt = fd == 2 or stream.isatty()
            stream.reconfigure(line_buffering=is_prompt, write_through=is_unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run_as_main(words: Sequence[str]) -> None:
    """Run a script, ``-m module`` or ``-c text`` as an interpreter with these arguments does."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    first, *rest = words
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(first).resolve().parent))
        main.__file__ = os.path.abspath(first)
        code = compile(Path(first).read_bytes(), main.__file__, "exec")
    exec(code, vars(main))


# ---------------------------------------------------------------------------- in the test process


class Popen(subprocess.Popen):
    """``subprocess.Popen`` that forks the zygote where the command is a Python program."""

    # The connection to the zygote, and the process that may use it.
    line: ClassVar[Line]
    owner: ClassVar[int]
    # False in a test that is marked with ``fresh_interpreter``.
    is_forking: ClassVar[bool] = True
    _pid_fd: int | None = None

    def _execute_child(self, *everything: Any) -> None:
        given = _PARAMETERS.bind(self, *everything).arguments
        program = _program_of(given)
        if program is None or not self.is_forking or os.getpid() != self.owner:
            super()._execute_child(*everything)  # type: ignore[misc]
            return
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if end == -1 else end for number, end in enumerate(ends)]
        try:
            self.pid = self.line.fork("program", program, [*streams, *given["pass_fds"]])
            self._pid_fd = os.pidfd_open(self.pid)
            self._child_created = True
        finally:
            names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._pid_fd is None:
            return super()._internal_poll(*arguments, **options)  # type: ignore[misc]
        self._look(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._pid_fd is None:
            return super()._wait(timeout)  # type: ignore[misc]
        self._look(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _look(self, timeout: float | None) -> None:
        """Wait so long for the end, unless it has been seen, and take the exit status."""
        if self.returncode is not None:
            return
        assert self._pid_fd is not None
        end = select.poll()
        end.register(self._pid_fd, select.POLLIN)
        if not end.poll(None if timeout is None else 1000 * timeout):
            return
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                self.returncode = self.line.exit_code(self.pid)
                os.close(self._pid_fd)


_PARAMETERS = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
# Arguments of Popen for which a command is executed, unless they are these.
_PLAIN = {
    **dict.fromkeys(("executable", "preexec_fn", "startupinfo", "gid", "gids", "uid")),
    **{"shell": False, "close_fds": True, "umask": -1, "process_group": -1},
}


def _program_of(given: Mapping[str, Any]) -> Program | None:
    """Return what a fork does in the place of a command, or None if a fork would differ."""
    words = _words_behind_python(given["args"])
    is_unbuffered = words[:1] == ["-u"]
    words = words[is_unbuffered:]
    folder = os.path.abspath(given["cwd"] or ".")
    environment = dict(os.environ if given["env"] is None else given["env"])
    if (
        any(given.get(name, value) != value for name, value in _PLAIN.items())
        or not _is_program(words, folder)
        or _at_load(environment) != _at_load(Popen.line.environment)
    ):
        return None
    fds = (0, 1, 2, *given["pass_fds"])
    is_session = given["start_new_session"]
    return Program(words, folder, environment, [], fds, is_unbuffered, is_session)


def _words_behind_python(command: Any) -> list[str]:
    """Return a script and its arguments also for a command that pip has written as a script."""
    if isinstance(command, (str, bytes, os.PathLike)):
        return []
    first, *rest = map(os.fspath, command)
    if first == sys.executable:
        return rest
    if Path(first).parent == Path(sys.executable).parent and Path(first).is_file():
        with open(first, "rb") as file:
            if file.readline().split() == [f"#!{sys.executable}".encode()]:
                return [first, *rest]
    return []


def _is_program(words: list[str], folder: str) -> bool:
    if not os.path.isdir(folder) or not words:
        return False
    return (words[0] in ("-m", "-c") and len(words) > 1) or Path(folder, words[0]).is_file()


def _at_load(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_LOAD) and not name.startswith(_READ_LATER)
    }
