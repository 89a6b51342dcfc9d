"""Start the ranks of a measurement, and join their group inside each rank."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch.distributed as dist

from diloco_comm.base import launch

_PR_SET_PDEATHSIG = 1
# This file has the first and the last port that the kernel gives to outgoing connections.
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_EPHEMERAL_PORT = 32_768


class WorkerError(RuntimeError):
    """A worker failed, with its exit status, or None if it ran out of time."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


def die_with_launcher() -> None:
    """Let the kernel kill this process when the process that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_parent() -> None:
    """End this process, which a fork server has made, with the parent process of that server.

    The kernel kills a process whose fork server ends, also a suspended one. A fork server ends when
    nobody holds its pipe any more. A forked process inherits the pipe, so this one closes it.
    """
    die_with_launcher()
    alive = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)


def init_workers(timeout_s: float = 120.0, backend: str = "gloo") -> tuple[int, int]:
    """Join the group that `run_workers`, torchrun or srun prepared; one thread a process.

    The process dies with its launcher, so that a killed benchmark leaves nothing behind.

    Raises:
        ConnectionError: If rank 0, or another rank, is not there in time.
    """
    die_with_launcher()
    # Import before the group exists. Some modules of torch, imported late by the first optimizer,
    # bind the default group as a default argument. The group would then outlive
    # destroy_process_group, and gloo's threads would run into the interpreter's end.
    import torch.distributed.nn

    torch.set_num_threads(1)
    found = launch.find()
    if found is not None:
        os.environ.update(found.variables())
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(backend, init_method="env://", timeout=timeout)
    except dist.DistError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConnectionError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} did not get through to the "
            f"others: {reason}"
        ) from None
    return dist.get_rank(), dist.get_world_size()


def leave_workers() -> None:
    """Leave the group after all ranks are done: rank 0 hosts the store."""
    dist.barrier()
    dist.destroy_process_group()


def is_worker() -> bool:
    """Whether this process is one rank of a group, started by `run_workers`, torchrun or srun."""
    return launch.find() is not None


def free_port() -> int:
    """Return a free port on which a process that starts later can listen.

    The port lies below the kernel's ephemeral range. The kernel gives ports of that range to any
    connection, so such a port could be taken before the process starts.
    """
    for port in random.SystemRandom().sample(_ports_below_ephemeral(), k=100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _ports_below_ephemeral() -> range:
    try:
        first = int(_EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError):
        first = _FIRST_EPHEMERAL_PORT
    return range(10_000, first) if first >= 12_000 else range(first, 1 << 16)


def run_workers(
    command: Sequence[str],
    world: int,
    *,
    prefixes: Sequence[Sequence[str]] | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    preload: Sequence[str] | None = None,
    stdout: int | None = None,
) -> None:
    """Start `command` once for each rank, with torchrun's environment, and wait for all ranks.

    Args:
        command: Program and arguments; rank 0's output is the benchmark's output.
        world: Number of ranks.
        prefixes: Words before the command, one list for each rank (``ip netns exec NAME``).
        env: Variables beside RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
        timeout_s: Seconds for all ranks together.
        preload: Modules to import, beside torch, in one process that then forks the ranks. The
            command must then be this Python with a script or ``-m``. None: each rank is a fresh
            process.
        stdout: As in subprocess.Popen.

    Raises:
        WorkerError: If a rank fails or the time is over, after the other ranks are killed.
    """
    base = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    base |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    # A variable of torch: tensors on huge pages, for a fair comparison of methods.
    base["THP_MEM_ALLOC_ENABLE"] = "1"
    base |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)} | dict(env or {})
    deadline = time.monotonic() + timeout_s
    if preload is not None:
        assert command[0] == sys.executable and not prefixes
        _run_forked(command[1:], world, preload, deadline, {"env": base, "stdout": stdout})
        return
    with _killed_at_the_end() as workers:
        for rank in range(world):
            words = [*(prefixes[rank] if prefixes else []), *command]
            rank_env = base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            workers.append(
                subprocess.Popen(words, env=rank_env, stdout=stdout, start_new_session=True)
            )
        _wait(workers, deadline)


def _run_forked(
    program: Sequence[str],
    world: int,
    preload: Sequence[str],
    deadline: float,
    options: Mapping[str, Any],
) -> None:
    read, write = os.pipe()
    words = [sys.executable, "-m", f"{__package__}.ranks", str(write), str(world)]
    words += [",".join(preload), *program]
    with os.fdopen(read) as report, _killed_at_the_end() as workers:
        workers.append(subprocess.Popen(words, start_new_session=True, pass_fds=[write], **options))
        os.close(write)
        try:
            _wait(workers, deadline)
        except WorkerError as error:
            told = "" if error.status is None else report.read()
            if not told:
                raise
            rank, code = map(int, told.split())
            raise WorkerError(_ended(rank, code), code) from None


@contextlib.contextmanager
def _killed_at_the_end() -> Iterator[list[subprocess.Popen[bytes]]]:
    """At the end kill the processes in the list that still run, and their children."""
    workers: list[subprocess.Popen[bytes]] = []
    try:
        yield workers
    finally:
        for worker in workers:
            if worker.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()


def _wait(workers: list[subprocess.Popen[bytes]], deadline: float) -> None:
    running = dict(enumerate(workers))
    while running:
        for rank, worker in list(running.items()):
            code = worker.poll()
            if code is None:
                continue
            del running[rank]
            if code != 0:
                raise WorkerError(_ended(rank, code), code)
        if time.monotonic() > deadline:
            raise WorkerError("benchmark workers did not end in time", None)
        time.sleep(0.02)


def _ended(rank: int, code: int) -> str:
    return f"benchmark worker {rank} ended with status {code}"
