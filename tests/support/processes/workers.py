"""Worker processes for tests: forked once from a process that has imported torch, then reused.

    results = workers(2).run(fn, argument)      # fn(rank, world, argument) on two processes

Worker ``r`` of every pool is the same process; a pool of ``n`` uses the first ``n`` with a gloo
default group of exactly that size over loopback. ``fresh_workers(n)`` gives processes of the
test's own, which it may kill.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from zygote import Zygote

GROUP_TIMEOUT = timedelta(seconds=60)
# Peers of a worker that raised may wait for it; after this they are dumped and killed.
GRACE_S = 10.0
# Tests allow what a quiet machine needs several times over; one that others load gets more of it,
# as long as pytest's own limit of two minutes leaves time to dump the stacks.
LOADED, MOST_S = 3.0, 100.0


class WorkerError(RuntimeError):
    """A worker died, hung, or raised what cannot be pickled."""


# --------------------------------------------------------------------------------- in the workers


def worker_main(connection: Connection, log: str) -> None:
    """Serve jobs until the connection closes; never returns."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    import torch

    torch.set_num_threads(1)
    world = _World()
    environment, test = dict(os.environ), ""
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        if job["test"] != test:  # A test sees no variable that another test has set here.
            test = job["test"]
            os.environ.clear()
            os.environ.update(environment)
        connection.send_bytes(_run_job(world, job))


def _run_job(world: _World, job: dict[str, Any]) -> bytes:
    sys.path[:] = job["sys_path"]
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if job["init_group"]:
            world.enter(job["world"], job["rank"], job["generation"], job["store"])
        fn, args, kwargs = pickle.loads(job["call"])
        value = fn(job["rank"], job["world"], *args, **kwargs)
        return pickle.dumps(("ok", value, ""))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            reply = pickle.dumps(("error", error, text))
            pickle.loads(reply)
        except Exception:
            reply = pickle.dumps(("error", WorkerError(f"{type(error).__name__}: {error}"), text))
        return reply
    finally:
        _save_coverage()
        gc.collect()


def _save_coverage() -> None:
    """Write what `make coverage` has counted here, because a worker ends by a signal."""
    coverage = sys.modules.get("coverage")
    counted = coverage and coverage.Coverage.current()
    if counted:
        counted.save()


class _World:
    """The default process group of a worker; rebuilt when size or generation changes."""

    def __init__(self) -> None:
        self.key: tuple[int, int] | None = None

    def enter(self, size: int, rank: int, generation: int, address: tuple[str, int]) -> None:
        import torch.distributed as dist

        if self.key == (size, generation):
            return
        if self.key is not None:
            self.leave()
        store = dist.TCPStore(*address, is_master=False, timeout=GROUP_TIMEOUT)
        self.key = (size, generation)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"world/{size}/{generation}", store),
            rank=rank,
            world_size=size,
            timeout=GROUP_TIMEOUT,
        )

    def leave(self) -> None:
        import torch.distributed as dist

        self.key = None
        package = sys.modules.get("diloco_comm")
        with contextlib.suppress(Exception):
            package.shutdown()  # type: ignore[union-attr]
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:
            # torch keeps the results of operators on DTensors by the shape of their mesh, and would
            # give a later test a mesh whose groups are gone.
            # Newer than torch 2.6.
            forget = "_clear_DTensor_sharding_propagator_cache"
            getattr(sys.modules["torch"]._C, forget, lambda: None)()


# ---------------------------------------------------------------------------- in the test process


def deadline_after(seconds: float) -> float:
    """Return when to give up what takes less than ``seconds`` on a quiet machine."""
    return time.monotonic() + max(seconds, min(LOADED * seconds, MOST_S))


class Worker:
    """One process that runs one job at a time."""

    def __init__(self, zygote: Zygote, log: str) -> None:
        Path(log).touch()
        self.log = Path(log)
        self.zygote = zygote
        self.pid, ours = zygote.fork("worker", log)
        self.connection = Connection(ours.detach())
        self.code: int | None = None

    def kill(self, sig: int = signal.SIGKILL) -> None:
        if self.code is None:
            os.kill(self.pid, sig)

    def exit_code(self) -> int:
        """Wait for the end of the process; negative for a signal, as in subprocess."""
        if self.code is None:
            self.code = self.zygote.exit_code(self.pid)
            self.connection.close()
        return self.code

    def stop(self) -> None:
        self.kill()
        self.exit_code()

    def output(self, limit: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-limit:]


class Pool:
    """``world`` workers that run the same function; a thin view on the processes.

    ``store`` is the (host, port) of a TCPStore in the test process, which outlives the workers.
    """

    def __init__(self, crew: Crew, world: int, init_group: bool) -> None:
        self.crew, self.world, self.init_group = crew, world, init_group
        self.workers: list[Worker] = []
        self.busy: set[int] = set()
        self.failures: list[tuple[int, BaseException, str]] = []

    @property
    def store(self) -> tuple[str, int]:
        return self.crew.store_address

    def pid(self, rank: int) -> int:
        return self.workers[rank].pid

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        self.workers[rank].kill(sig)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        expect_exit: set[int] | frozenset[int] = frozenset(),
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(rank, world, *args, **kwargs)`` on every worker and return the results.

        Args:
            fn: A module-level function.
            timeout: Seconds for all on a quiet machine; see ``deadline_after`` for a loaded one.
                Then stacks are dumped and the processes killed.
            expect_exit: Ranks that must die during the call; their result is None.

        Raises:
            The first exception of a worker, caused by a WorkerError with its traceback.
        """
        self.submit(fn, *args, **kwargs)
        return self.collect(timeout=timeout, expect_exit=expect_exit)

    def submit(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Start the call on ``ranks`` (default all) and return at once."""
        assert not self.busy, "collect() the last call first"
        self.workers = self.crew.first(self.world)
        self.crew.begin_world(self.world, self.init_group)
        self.failures = []
        call = pickle.dumps((fn, args, kwargs))
        for rank in range(self.world) if ranks is None else ranks:
            job = {
                "sys_path": sys.path,
                "test": os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0],
                "rank": rank,
                "world": self.world,
                "generation": self.crew.generation,
                "store": self.store,
                "init_group": self.init_group,
                "call": call,
            }
            self.workers[rank].connection.send_bytes(pickle.dumps(job))
            self.busy.add(rank)

    def collect(
        self, *, timeout: float = 60, expect_exit: set[int] | frozenset[int] = frozenset()
    ) -> list[Any]:
        """Wait for the submitted call; see ``run``."""
        results: list[Any] = [None] * self.world
        exited: dict[int, int] = {}
        deadline = deadline_after(timeout)
        while self.busy and time.monotonic() < deadline:
            by_connection = {self.workers[rank].connection: rank for rank in self.busy}
            for ready in wait(list(by_connection), deadline - time.monotonic()):
                rank = by_connection[ready]  # type: ignore[index]
                self.busy.discard(rank)
                self._receive(rank, results, exited)
            if self.failures or exited.keys() - expect_exit:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        stuck = sorted(self.busy)
        stacks = self._dump(stuck) if stuck else ""
        if stuck or exited or self.failures:
            self.crew.after_failure(self.workers if stuck or exited else [])
        self.busy.clear()
        self._raise_for(stuck, stacks, exited, expect_exit, timeout)
        return results

    def _receive(self, rank: int, results: list[Any], exited: dict[int, int]) -> None:
        try:
            kind, value, text = pickle.loads(self.workers[rank].connection.recv_bytes())
        except (EOFError, ConnectionError):
            exited[rank] = self.workers[rank].exit_code()
            return
        if kind == "ok":
            results[rank] = value
        else:
            self.failures.append((rank, value, text))

    def _dump(self, stuck: list[int]) -> str:
        for rank in stuck:
            self.workers[rank].kill(signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"worker {rank}:\n{self.workers[rank].output()}" for rank in stuck)

    def _raise_for(
        self,
        stuck: list[int],
        stacks: str,
        exited: dict[int, int],
        expect_exit: set[int] | frozenset[int],
        timeout: float,
    ) -> None:
        if self.failures:
            rank, error, text = self.failures[0]
            others = "".join(f"\nworker {r} too: {e!r}" for r, e, _ in self.failures[1:])
            raise error from WorkerError(f"worker {rank}:\n{text}{others}\n{stacks}")
        for rank in sorted(exited.keys() - expect_exit):
            log = self.workers[rank].output()
            raise WorkerError(f"worker {rank} died with {exited[rank]}:\n{log}\n{stacks}")
        if stuck:
            raise WorkerError(f"workers {stuck} did not finish in {timeout} s:\n{stacks}")
        if expect_exit - exited.keys():
            raise WorkerError(f"workers {sorted(expect_exit - exited.keys())} should have died")


class Crew:
    """A list of processes that grows on demand, and the store they meet at."""

    def __init__(self, zygote: Zygote) -> None:
        import torch.distributed as dist

        self.zygote = zygote
        self.workers: list[Worker] = []
        self.generation = 0
        self.logs = tempfile.TemporaryDirectory(prefix="diloco-workers-")
        self.num_forked = 0
        self.last_size = 0
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store_address = ("127.0.0.1", self.store.port)

    def first(self, num_workers: int) -> list[Worker]:
        while len(self.workers) < num_workers:
            log = f"{self.logs.name}/{self.num_forked}"
            self.num_forked += 1
            self.workers.append(Worker(self.zygote, log))
        return self.workers[:num_workers]

    def begin_world(self, size: int, init_group: bool) -> None:
        """Give a group of another size a new name: gloo would find its predecessor's addresses."""
        if init_group and size != self.last_size:
            self.last_size = size
            self.generation += 1

    def after_failure(self, discard: list[Worker]) -> None:
        """Make later calls start from a new default group, without the given processes."""
        self.generation += 1
        for worker in discard:
            worker.stop()
        self.workers = [worker for worker in self.workers if worker not in discard]

    def pool(self, world: int, *, init_group: bool = True) -> Pool:
        return Pool(self, world, init_group)

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.workers = []
        self.logs.cleanup()
