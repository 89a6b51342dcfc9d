"""Threads, processes and references: nothing is left behind, nothing crashes on the way out."""

from __future__ import annotations

import gc
import os
import signal
import textwrap
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from fault_replicas import (
    Replica,
    Setup,
    engine_threads,
    lasting_engine_threads,
    least_resources,
)
from workers import Pool
from zygote import Job, Zygote

H = 4


# --------------------------------------------------------------------------- threads and memory


def close_in_every_way(rank: int, world: int, address: tuple[str, int], setup: Setup) -> None:
    assert lasting_engine_threads() == []
    replica = Replica(address, rank, range(world), setup)
    _, with_engine = least_resources()
    assert engine_threads() != []
    replica.train_to(H)
    replica.diloco.close()
    replica.diloco.close()
    assert lasting_engine_threads() == []
    with pytest.raises(RuntimeError, match="closed"):
        replica.diloco.exchange.exchange_objects(b"")
    # The hooks are off: training goes on without exchanges.
    for _ in range(H):
        replica.step()
    assert replica.diloco.inner_step == H
    again = Replica(address, rank, range(world), setup)
    with again.diloco:
        again.train_to(H)
    assert lasting_engine_threads() == []
    assert least_resources()[1] < with_engine


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
            replica.diloco._rounds.send(part, replica.diloco.inner_step, 0, 1.0, "sync")
    del replica
    if mid_exchange and rank == 0:
        del part
    part = None
    gc.collect()
    assert (diloco(), exchange(), model()) == (None, None, None)
    assert lasting_engine_threads() == []


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
            lambda: replica.diloco._rounds.send(replica.diloco.parts[0], 0, 0, 1.0, "sync"),
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
            replica.diloco._rounds.send(replica.diloco.parts[0], 4, 0, 1.0, "sync")
        """,
        0,
        "",
    ),
    "slow-link": (
        """
        replica.diloco.emulate_link(1e-4)
        replica.diloco._rounds.send(replica.diloco.parts[0], 4, 0, 1.0, "sync")
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


@pytest.mark.nightly(
    "4 s each; an exchange under way is the most difficult case", but=["mid-exchange"]
)
@pytest.mark.parametrize("name", EXITS)
def test_interpreter_ends_without_close(zygote: Zygote, port: int, name: str) -> None:
    body, code, text = EXITS[name]
    script = PRELUDE + textwrap.dedent(body)
    jobs = [Job(zygote, script, port, rank) for rank in range(2)]
    outputs = [job.finish() for job in jobs]
    for returned, output in outputs:
        assert returned == code, output
        assert text in output, output
        for bad in ("terminate called", "Segmentation", "Fatal Python", "core dumped"):
            assert bad not in output, output


def test_control_c_ends_a_replica_that_waits(zygote: Zygote, port: int) -> None:
    body = """
    if rank == 1:
        time.sleep(60)
    replica.train_to(7)
    replica.before_exchange = lambda: print("waiting", flush=True)
    replica.train_to(8)
    """
    script = PRELUDE + textwrap.dedent(body)
    first, second = (Job(zygote, script, port, rank) for rank in range(2))
    assert "waiting" in first.output.readline()
    first.send_signal(signal.SIGINT)
    returned, output = first.finish()
    assert returned == -signal.SIGINT and "KeyboardInterrupt" in output, output
    assert "terminate called" not in output
    second.send_signal(signal.SIGTERM)
    assert second.finish()[0] == -signal.SIGTERM
