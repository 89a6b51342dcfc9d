"""Threads, processes and references: nothing is left behind, nothing crashes on the way out."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fault_replicas import Replica, Setup, connect, wait_for
from workers import Pool

from diloco_comm import SyncError
from diloco_comm.handshake import connected_store

H = 4
TESTS = str(Path(__file__).parent)


def engine_threads() -> list[str]:
    """Names of this process's engine threads."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except FileNotFoundError:
            continue
        if name.startswith("diloco"):
            names.append(name)
    return names


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


# --------------------------------------------------------------------------- threads and memory


def close_in_every_way(rank: int, world: int, address: tuple[str, int], setup: Setup) -> None:
    assert engine_threads() == []
    replica = Replica(address, rank, range(world), setup)
    before_first = num_threads()
    assert engine_threads() != []
    replica.train_to(H)
    replica.diloco.close()
    replica.diloco.close()
    assert engine_threads() == []
    with pytest.raises(RuntimeError, match="closed"):
        replica.diloco.exchange.exchange_objects(b"")
    # The hooks are off: training goes on without exchanges.
    for _ in range(H):
        replica.step()
    assert replica.diloco.inner_step == H
    again = Replica(address, rank, range(world), setup)
    with again.diloco:
        again.train_to(H)
    assert engine_threads() == []
    assert num_threads() < before_first


def test_no_thread_is_left_after_close(workers: Callable[[int], Pool]) -> None:
    workers(3).run(close_in_every_way, workers(3).store, Setup(options={"lanes": 3}), timeout=30)


def drop_everything(
    rank: int, world: int, address: tuple[str, int], setup: Setup, mid_exchange: bool
) -> None:
    """Forget a DiLoCo without closing it; its threads and buffers go with it."""
    gc.collect()
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(H)
    diloco, exchange = weakref.ref(replica.diloco), weakref.ref(replica.diloco.exchange)
    model = weakref.ref(replica.model)
    if mid_exchange:
        # Nobody else comes to this round, so it is under way when the engine is dropped.
        part = replica.diloco.parts[0]
        if rank == 0:
            replica.diloco._rounds.send(part, replica.diloco.inner_step, 0, 1.0)
    del replica
    if mid_exchange and rank == 0:
        del part
    part = None
    gc.collect()
    assert (diloco(), exchange(), model()) == (None, None, None)
    assert engine_threads() == []


@pytest.mark.parametrize("mid_exchange", [False, True], ids=["idle", "mid-exchange"])
def test_dropped_diloco_is_collected_with_its_threads(
    workers: Callable[[int], Pool], mid_exchange: bool
) -> None:
    pool = workers(2)
    # Who waits for the exchange's timeout does not end within the test's.
    pool.run(drop_everything, pool.store, Setup(timeout=300.0), mid_exchange, timeout=30)


# ------------------------------------------------------------------------------------- forking


def fork_and_use(rank: int, world: int, address: tuple[str, int], setup: Setup) -> list[str]:
    """Try to use a parent's engine in a forked child; the parent goes on as before."""
    replica = Replica(address, rank, range(world), setup)
    replica.train_to(H)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        texts = []
        for use in (
            lambda: replica.diloco._rounds.send(replica.diloco.parts[0], 0, 0, 1.0),
            lambda: replica.diloco.exchange.exchange_objects(b"x"),
            lambda: replica.diloco.change_group(range(world)),
            replica.diloco.close,
        ):
            try:
                use()
                texts.append("")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}".splitlines()[0])
        os.write(write, "\n".join(texts).encode())
        del replica
        gc.collect()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        texts = pipe.read().split("\n")
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    replica.train_to(2 * H)
    replica.diloco.close()
    return texts


def test_forked_child_is_told_and_does_no_harm(workers: Callable[[int], Pool]) -> None:
    pool = workers(2)
    for texts in pool.run(fork_and_use, pool.store, Setup(), timeout=30):
        for text in texts[:3]:
            assert "forked child" in text and "create a new" in text, texts
        assert texts[3] == ""


# --------------------------------------------------------------------- the end of the process


class Job:
    """A Python process of its own that runs one replica's script against the given store."""

    def __init__(self, script: str, *arguments: Any) -> None:
        path = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=TESTS,
            env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
            # A job that a shell runs in the background ignores Ctrl-C, and so do its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def finish(self, timeout: float = 30.0) -> tuple[int, str]:
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            raise AssertionError(f"did not end within {timeout} s:\n{output}") from None
        return self.process.returncode, output


PRELUDE = """
import os, sys, threading, time
import torch
from fault_replicas import Replica, Setup
torch.set_num_threads(1)
port, rank = int(sys.argv[1]), int(sys.argv[2])
replica = Replica(("127.0.0.1", port), rank, [0, 1], Setup(sync_every=4, timeout=300.0))
replica.train_to(4)
"""

EXITS = {
    # The other replica never comes to the second round.
    "mid-exchange": (
        """
        if rank == 0:
            replica.diloco._rounds.send(replica.diloco.parts[0], 4, 0, 1.0)
        """,
        0,
        "",
    ),
    "slow-link": (
        """
        replica.diloco.emulate_link(1e-4)
        replica.diloco._rounds.send(replica.diloco.parts[0], 4, 0, 1.0)
        """,
        0,
        "",
    ),
    "idle": ("", 0, ""),
    "exception": ("raise KeyError('the user made a mistake')", 1, "the user made a mistake"),
    "reference-cycle": (
        """
        sys.modules["keep"] = replica
        replica.me = replica
        """,
        0,
        "",
    ),
    "from-a-thread": (
        """
        def wait():
            try:
                for _ in range(4):
                    replica.step()
            except Exception:
                pass
        if rank == 0:
            begins = threading.Event()
            replica.before_exchange = begins.set
            threading.Thread(target=wait, daemon=True).start()
            begins.wait()
        """,
        0,
        "",
    ),
}


@pytest.fixture
def port() -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@pytest.mark.parametrize("name", EXITS)
def test_interpreter_ends_without_close(port: int, name: str) -> None:
    body, code, text = EXITS[name]
    script = PRELUDE + textwrap.dedent(body)
    jobs = [Job(script, port, rank) for rank in range(2)]
    outputs = [job.finish() for job in jobs]
    for returned, output in outputs:
        assert returned == code, output
        assert text in output, output
        for bad in ("terminate called", "Segmentation", "Fatal Python", "core dumped"):
            assert bad not in output, output


def test_control_c_ends_a_replica_that_waits(port: int) -> None:
    body = """
    if rank == 1:
        time.sleep(60)
    replica.train_to(7)
    replica.before_exchange = lambda: print("waiting", flush=True)
    replica.train_to(8)
    """
    script = PRELUDE + textwrap.dedent(body)
    first, second = (Job(script, port, rank) for rank in range(2))
    assert first.process.stdout is not None
    assert "waiting" in first.process.stdout.readline()
    first.process.send_signal(signal.SIGINT)
    returned, output = first.finish()
    assert returned == -signal.SIGINT and "KeyboardInterrupt" in output, output
    assert "terminate called" not in output
    second.process.send_signal(signal.SIGTERM)
    assert second.finish()[0] == -signal.SIGTERM


# --------------------------------------------------------------------------- jobs, dying stores


def test_separate_jobs_meet_at_a_store(port: int) -> None:
    script = """
    import sys
    import torch
    import torch.distributed as dist
    from fault_replicas import make_model, make_optimizer, take_inner_step
    from diloco_comm import DiLoCo
    torch.set_num_threads(1)
    port, replica = map(int, sys.argv[1:])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    model = make_model()
    optimizer = make_optimizer(model)
    with DiLoCo(model, optimizer, sync_every=4, store=store, replica=replica, num_replicas=3) as d:
        for step in range(12):
            take_inner_step(model, optimizer, replica, step)
        assert not dist.is_initialized()
        print(d.outer_hash(), d.parts[0].round)
    """
    outputs = [job.finish() for job in [Job(script, port, replica) for replica in range(3)]]
    assert all(code == 0 for code, _ in outputs), outputs
    assert len({output for _, output in outputs}) == 1, outputs
    assert outputs[0][1].split()[1] == "3"


def lose_the_store(
    rank: int, world: int, addresses: list[tuple[str, int]], setup: Setup
) -> list[tuple[str, bool, str]]:
    """The store's host dies or hangs; rounds go on, and a failure then is still a clear one."""
    replica = Replica(addresses[0], rank, range(world), setup)
    other = connect(addresses[1])
    replica.train_to(H)
    other.set(f"ready/{rank}", "")
    other.wait(["store is gone"])
    replica.train_to(2 * H)
    hashes = [(replica.diloco.outer_hash(), True, "")]
    if rank == 0:
        replica.fault("kill", "reduce")
    failure = replica.train_until_failure(H)
    hashes.append((failure.kind, failure.is_state_kept, failure.message))
    try:
        replica.diloco.change_group([1, 2])
    except SyncError as error:
        hashes.append((type(error).__name__, True, str(error)))
    replica.diloco.change_group([1, 2], store=dist.PrefixStore("new", other))
    replica.train_to(5 * H)
    hashes.append((replica.diloco.outer_hash(), True, ""))
    replica.diloco.close()
    return hashes


STORE = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host() -> Any:
    """A process that hosts a store, to be killed or stopped, with its address."""
    job = Job(STORE)
    assert job.process.stdout is not None
    yield job.process, ("127.0.0.1", int(job.process.stdout.readline()))
    job.process.kill()
    job.finish()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_store_that_is_lost_is_replaced(
    fresh_workers: Callable[..., Pool], host: Any, sig: int
) -> None:
    pool = fresh_workers(3, init_group=False)
    process, address = host
    pool.submit(lose_the_store, [address, pool.store], Setup("int8", 1, H, timeout=3.0))
    wait_for(pool, [f"ready/{rank}" for rank in range(3)])
    process.send_signal(sig)
    pool.crew.store.set("store is gone", "")
    results: list[Any] = pool.collect(timeout=60, expect_exit={0})
    for result in results[1:]:
        kind, is_kept, text = result[1]
        assert kind == "SyncError" and is_kept, result
        assert "fragment 0, round 2" in text and "\n" not in text, result
        assert "because the store does not answer" in text, result
        assert result[2][0] == "SyncError" and "\n" not in result[2][2], result
        assert "the store did not answer" in result[2][2], result
    assert results[1][0] == results[2][0]
    assert results[1][-1] == results[2][-1]


def close_on_a_store_that_hangs(
    rank: int, world: int, addresses: list[tuple[str, int]], setup: Setup
) -> None:
    other = connect(addresses[1])
    replica = Replica(addresses[0], rank, range(world), setup)
    replica.train_to(H)
    other.set(f"ready/{rank}", "")
    other.wait(["store is gone"])
    with pytest.raises(dist.DistError, match="no store answered"):
        connected_store("tcp://{}:{}".format(*addresses[0]), 0.5)
    replica.diloco.close()
    assert set(engine_threads()) <= {"diloco-store"}
    other.set(f"closed/{rank}", "")
    # The calls that nobody waits for any more end with the store's next answers.
    while engine_threads():
        time.sleep(0.01)


def test_close_does_not_wait_for_a_store_that_hangs(
    fresh_workers: Callable[..., Pool], host: Any
) -> None:
    pool = fresh_workers(2, init_group=False)
    process, address = host
    pool.submit(close_on_a_store_that_hangs, [address, pool.store], Setup(timeout=300.0))
    wait_for(pool, [f"ready/{rank}" for rank in range(2)])
    process.send_signal(signal.SIGSTOP)
    pool.crew.store.set("store is gone", "")
    wait_for(pool, [f"closed/{rank}" for rank in range(2)])
    process.send_signal(signal.SIGCONT)
    pool.collect(timeout=30)
