"""Processes of a training on this machine: replicas, and the registry where they meet.

Any of them can be killed, stopped and started again. The replicas talk to the parent process
through pipes. All processes end with the parent, also if it is killed.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from diloco_comm.base.errors import LeftBehind
from diloco_comm.elastic.registry.server import RegistryServer

from ..common.workers import die_with_parent, free_port

# One fresh process, the fork server, imports torch once and forks all other processes.
_forks = multiprocessing.get_context("forkserver")
JOIN_S, POLL_S = 10.0, 0.05
# How a replica ends.
DONE, LEFT, LEFT_BEHIND, FAILED, KILLED = "done", "left", "left behind", "failed", "killed"


class ReplicaError(RuntimeError):
    """A replica of a demo raised or died, or an event did not have its effect."""


@dataclass(frozen=True)
class Stepped:
    """The replica has taken an inner step at ``at``, by ``time.monotonic()``.

    Attributes:
        step: Number of the step; for a learner, the sum of its fragments' versions.
        loss: Mean loss of the step's batch, in nats a byte.
    """

    at: float
    step: int
    loss: float


@dataclass(frozen=True)
class Entered:
    """The replica has entered a view; see ``ViewChanged``."""

    at: float
    view: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]
    seconds: float
    copied_bytes: int


@dataclass(frozen=True)
class Ended:
    """The replica has ended.

    Attributes:
        how: DONE, LEFT, LEFT_BEHIND, FAILED, or KILLED by a signal (said by the parent process).
        detail: The error, or its traceback.
        outer_hash: Hash of the shared model, after DONE.
    """

    at: float
    how: str
    detail: str = ""
    inner_step: int = 0
    outer_hash: str = ""
    num_parameters: int = 0


@dataclass(frozen=True)
class Place:
    """The things that a replica's process is told.

    Attributes:
        number: Number of the replica.
        process: Number of this process, counted from 0 over all processes of the crew.
        registry: Address of the registry.
    """

    number: int
    process: int
    registry: str


# The program of a replica, called with its pipe, its place, and the argument ``given`` of the crew.
Program = Callable[[Connection, Place, Any], None]


@dataclass(eq=False)
class Replica:
    """One process of a replica.

    Attributes:
        started: When the process was started, as ``time.monotonic()``.
        has_ended: Whether the process has sent its ``Ended``, or its pipe is closed.
    """

    place: Place
    process: ForkServerProcess
    pipe: Connection
    started: float = field(default_factory=time.monotonic)
    is_killed: bool = False
    has_ended: bool = False

    @property
    def number(self) -> int:
        return self.place.number

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


class Crew:
    """Replicas by number, and their registry, which keeps a journal in ``folder``.

    A context manager: at its end no process is left.

    Args:
        program: The function of a module that each replica runs.
        given: Further argument of ``program``.
        folder: Holds the journal, and a log of each process.
        preload: Modules that are imported once for all processes.
        registry: Address of a registry that runs already. Such a crew, as one without a registry,
            is closed at the end, and not entered as a context manager: that starts a registry.
    """

    def __init__(
        self, program: Program, given: Any, folder: Path, preload: list[str], registry: str = ""
    ) -> None:
        self._program, self._given, self.folder = program, given, folder
        self.replicas: dict[int, Replica] = {}
        self.num_started = 0
        self._all: list[Replica] = []
        self._address = registry or f"tcp://127.0.0.1:{free_port()}"
        self._registry: ForkServerProcess | None = None
        _forks.set_forkserver_preload([__name__, *preload])

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    def __enter__(self) -> Crew:
        try:
            self.start_registry()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes and wait for their end; idempotent."""
        processes = [one.process for one in self._all]
        processes += [] if self._registry is None else [self._registry]
        for process in processes:
            process.kill()
        for process in processes:
            process.join()

    # ----------------------------------------------------------------------------- registry

    def start_registry(self) -> None:
        """Start the registry, first or again, at the crew's address with its journal."""
        ours, theirs = _forks.Pipe(duplex=False)
        self._registry = self._fork(_registry_main, theirs, self._address, self.folder)
        theirs.close()
        if not ours.poll(JOIN_S):
            raise RuntimeError(f"the registry does not listen on {self._address}")
        try:
            ours.recv()
        except EOFError:
            log = (self.folder / "registry.log").read_text()
            raise RuntimeError(f"the registry has ended: {log}") from None

    def kill_registry(self) -> None:
        assert self._registry is not None
        self._registry.kill()
        self._registry.join()

    @property
    def registry_pid(self) -> int:
        assert self._registry is not None and self._registry.pid is not None
        return self._registry.pid

    # ----------------------------------------------------------------------------- replicas

    def start(self, number: int) -> Replica:
        """Start a process for replica ``number``, which has none now."""
        place = Place(number, self.num_started, self._address)
        self.num_started += 1
        pipe, theirs = _forks.Pipe()
        log = self.folder / f"replica-{number}.log"
        process = self._fork(_replica_main, self._program, theirs, place, self._given, log)
        theirs.close()
        replica = self.replicas[number] = Replica(place, process, pipe)
        self._all.append(replica)
        return replica

    def _fork(self, main: Callable[..., None], *arguments: Any) -> ForkServerProcess:
        process = _forks.Process(target=main, args=arguments, daemon=True)
        with interrupts_blocked():
            process.start()
        return process

    def kill(self, number: int) -> None:
        """SIGKILL: the process ends at once."""
        self.replicas[number].is_killed = True
        self._signal(number, signal.SIGKILL)

    def stop(self, number: int) -> None:
        """SIGSTOP: the process stands still, and its connections stay open."""
        self._signal(number, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        """SIGCONT: the process goes on where it was stopped."""
        self._signal(number, signal.SIGCONT)

    def _signal(self, number: int, sign: signal.Signals) -> None:
        os.kill(self.replicas[number].pid, sign)

    def tell(self, number: int, order: Any) -> None:
        """Send an order to a replica; one that has just ended does not hear it."""
        try:
            self.replicas[number].pipe.send(order)
        except OSError:
            pass

    def messages(self, timeout_s: float) -> Iterator[tuple[Replica, Any]]:
        """Yield what the replicas have said, for ``timeout_s`` seconds if they say nothing.

        The last message of each process is an ``Ended``; a process that could not say so itself was
        killed.
        """
        pipes: dict[Any, Replica] = {one.pipe: one for one in self._all if not one.has_ended}
        for pipe in connection.wait(list(pipes), timeout_s):
            replica = pipes[pipe]
            while not replica.has_ended and replica.pipe.poll():
                message = self._receive(replica)
                replica.has_ended = isinstance(message, Ended)
                yield replica, message

    def hear(
        self,
        note: Callable[[Replica, Any], None],
        seconds: float,
        until: Callable[[], bool] | None = None,
        what: str = "",
        advance: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Pass on what the replicas say, for some seconds or until a condition holds.

        Args:
            note: Called with each message.
            until: The condition; None to wait for all the ``seconds``.
            what: Words for the condition, in the error.
            advance: Called with the seconds since the last call.

        Raises:
            ReplicaError: If a replica fails, or dies without ``kill``, or the condition does not
                hold in time.
        """
        last = time.monotonic()
        end = last + seconds
        while until is None or not until():
            before, last = last, time.monotonic()
            advance(last - before)
            if last >= end:
                if until is None:
                    return
                raise ReplicaError(f"waited {seconds:g} s in vain, until {what}")
            for replica, message in self.messages(min(end - last, POLL_S)):
                is_end = isinstance(message, Ended) and message.how not in (DONE, LEFT_BEHIND)
                if is_end and not replica.is_killed:
                    how = "failed" if message.how == FAILED else "died"
                    raise ReplicaError(f"replica {replica.number} {how}:\n{message.detail}")
                note(replica, message)

    def _receive(self, replica: Replica) -> Any:
        try:
            return replica.pipe.recv()
        except (EOFError, OSError):
            replica.process.join(JOIN_S)
            return Ended(time.monotonic(), KILLED, f"exit code {replica.process.exitcode}")


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C; processes started inside inherit the mask, and never get the signal."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


# ------------------------------------------------------------------------------ in the processes


def _replica_main(program: Program, pipe: Connection, place: Place, given: Any, log: Path) -> None:
    die_with_parent()
    _log_to(log)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        program(pipe, place, given)
    except LeftBehind as error:
        pipe.send(Ended(time.monotonic(), LEFT_BEHIND, str(error)))
    except BaseException:
        pipe.send(Ended(time.monotonic(), FAILED, traceback.format_exc()))


def _registry_main(pipe: Connection, address: str, folder: Path) -> None:
    die_with_parent()
    _log_to(folder / "registry.log")
    server = RegistryServer(address, journal=folder / "journal")
    pipe.send(server.address)
    server.serve()


def _log_to(path: Path) -> None:
    """Let logs and errors of this process go to a file: the terminal shows the demo."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)
    form = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, force=True)
