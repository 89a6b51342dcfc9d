"""The end of an exchange: no thread, no file descriptor, no crash, no hang is left behind."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import run_python
from exchange_helpers import CHUNK_BYTES, exchange, sync, values
from torch import nn
from workers import Pool

from diloco_comm import DiLoCo, Link, NonFiniteError
from diloco_comm.base.memory import empty_pages
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.round import Header
from diloco_comm.ops.wire import WireFormat

Workers = Callable[[int], Pool]
ROOT = Path(__file__).resolve().parents[2]


def _alone(**kwargs: object) -> Exchange:
    return Exchange(dist.HashStore(), 0, [0], chunk_bytes=CHUNK_BYTES, **kwargs)  # type: ignore[arg-type]


def _closed_and_held(rank: int, world: int) -> list[int]:
    """Count the descriptors around an exchange that is closed, and that this process still has."""
    held, counts = [], [len(os.listdir("/proc/self/fd"))]
    for _ in range(3):
        with exchange(rank, world) as ex:
            sync(ex, ex.buffers(3000, WireFormat("int8")), [values(0, rank, 3000)])
            dist.barrier()
        held.append(ex)
        deadline = time.monotonic() + 5.0
        while len(os.listdir("/proc/self/fd")) > counts[-1] and time.monotonic() < deadline:
            time.sleep(0.01)
        counts.append(len(os.listdir("/proc/self/fd")))
        dist.barrier()
    return counts


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")
def test_a_closed_exchange_has_no_descriptor_before_it_is_collected(workers: Workers) -> None:
    for counts in workers(2).run(_closed_and_held):
        assert counts[-1] <= counts[1], counts


def _run_script(body: str) -> subprocess.CompletedProcess[str]:
    return run_python(
        "-c",
        textwrap.dedent(body),
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "GLOO_SOCKET_IFNAME": "lo"},
    )


_CALLS_IN_THREADS = """
import sys, threading, time
import torch.distributed as dist
from diloco_comm import _C
from diloco_comm.exchange.exchange import Exchange

kind = sys.argv[1]
if kind == "link":
    call = _C.Link("127.0.0.1:0", "127.0.0.1:0").counters
else:
    engine = Exchange(dist.HashStore(), 0, [0]).engine
    job = engine.submit(_C.Header("exchange_objects"))
    call = {"engine": lambda: engine.reserve_staging(0), "job": lambda: job.wait(0.0)}[kind]

def repeat():
    while True:
        call()

for _ in range(3):
    threading.Thread(target=repeat, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.fresh_interpreter
@pytest.mark.parametrize("kind", ["engine", "job", "link"])
def test_a_program_ends_while_its_threads_are_in_calls(kind: str) -> None:
    """The threads want the GIL back after the interpreter has begun to end."""
    ended = run_python("-c", _CALLS_IN_THREADS, kind)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.nightly("3 s; the first tier has room for the thread")
def test_no_room_for_the_engine_thread() -> None:
    # A thread started now gets a stack of 64 MB.
    done = _run_script(
        """
        import os, re, resource, sys
        if len(sys.argv) == 1:
            resource.setrlimit(resource.RLIMIT_STACK, (64 << 20, resource.RLIM_INFINITY))
            os.execv(sys.executable, [*sys.orig_argv, "again"])
        from diloco_comm import _C
        kilobytes = int(re.search(r"VmSize:\\s*(\\d+)", open("/proc/self/status").read())[1])
        resource.setrlimit(resource.RLIMIT_AS, ((kilobytes << 10) + (32 << 20),) * 2)
        threads = os.listdir("/proc/self/task")
        try:
            _C.Engine(10.0)
        except RuntimeError as error:
            print(error, os.listdir("/proc/self/task") == threads)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Resource temporarily unavailable True\n"


def test_a_forked_child_is_told() -> None:
    ex = _alone()
    buffers = ex.buffers(100, WireFormat("int8"))
    work = ex.start(buffers, outer=None, params=[torch.ones(100)], header=Header())
    calls: list[Callable[[], object]] = [
        lambda: ex.start(buffers, outer=None, params=[torch.ones(100)], header=Header()),
        work.wait, work.done, lambda: work.headers,
    ]  # fmt: skip
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for call in calls:
            try:
                call()
                text = "no error"
            except RuntimeError as error:
                text = str(error)
            os.write(writing, text.encode() + b"\n")
        ex.close()
        del ex, work, calls
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        texts = answers.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    assert len(texts) == len(calls)
    assert all("forked child" in text and "create a new DiLoCo" in text for text in texts)
    work.wait(40)
    buffers.commit()
    sync(ex, buffers, [torch.ones(100)])
    ex.close()


def test_arguments_are_checked() -> None:
    store = dist.HashStore()
    with pytest.raises(ValueError, match="replica 5 is not one of the members"):
        Exchange(store, 5, [0, 1])
    with pytest.raises(ValueError, match="sorted, unique"):
        Exchange(store, 0, [1, 0])
    with pytest.raises(ValueError, match="lanes must be at least 1"):
        Exchange(store, 0, [0], lanes=0)
    with pytest.raises(ValueError, match="timeout must be positive"):
        Exchange(store, 0, [0], timeout=0.0)
    for patience in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"report_patience must be positive, got {patience}"):
            Exchange(store, 0, [0], report_patience=patience)
    with pytest.raises(ValueError, match="members must be at most 1024 replicas, got 1025"):
        Exchange(store, 0, range(1025))
    with _alone() as ex:
        with pytest.raises(ValueError, match="emulate_link needs"):
            ex.emulate_link(-1.0)
        with pytest.raises(ValueError, match="at least one element"):
            ex.buffers(0, WireFormat("int8"))
        with pytest.raises(ValueError, match="at most 1024 replicas, got 1025"):
            ex.change_group(range(1025), last_rounds={})
        buffers = ex.buffers(100, WireFormat("int8"))
        # A wrong argument surfaces before any peer hears of the exchange.
        with pytest.raises((ValueError, RuntimeError)):
            ex.start(buffers, outer=None, params=[torch.ones(99)], header=Header())
        sync(ex, buffers, [torch.ones(100)])


def test_more_chunks_than_tags() -> None:
    with Exchange(dist.HashStore(), 0, [0], chunk_bytes=16) as ex:
        with pytest.raises(
            ValueError, match=r"at most 524288 chunks, got 6\d+: chunk_bytes is too"
        ):
            ex.buffers(20_000_000, WireFormat("int8", 32))


def test_empty_pages_are_aligned_and_zero() -> None:
    for shape in [(0,), (1,), (1000,), (3, 5), (3 << 20,)]:
        tensor = empty_pages(shape)
        assert tensor.shape == shape and not tensor.any()
        assert tensor.data_ptr() % 64 == 0
    assert empty_pages(7, torch.int64).dtype == torch.int64


def _emulated(rank: int, world: int, gbps: float, rtt_ms: float, n: int) -> float:
    with exchange(rank, world, chunk_bytes=64 << 10) as ex:
        ex.emulate_link(gbps, rtt_ms)
        assert ex.link == f"emulated {gbps:g} Gbit/s, {rtt_ms:g} ms round trip"
        buffers = ex.buffers(n, WireFormat("int8"))
        params = [values(0, rank, n)]
        sync(ex, buffers, params, round=0)
        buffers.commit()
        outcome = sync(ex, buffers, params, round=1)
        return outcome.seconds["total"] - outcome.sent_bytes * 8 / gbps / 1e9


@pytest.mark.parametrize("world", [2, 4])
def test_an_emulated_link_is_never_faster_than_it_says(workers: Workers, world: int) -> None:
    for excess in workers(world).run(_emulated, 0.1, 20.0, 1 << 20):
        # At least the bytes, and half a round trip each for the header and the vote.
        assert excess > 0.018


def _steady(rank: int, world: int) -> list[int]:
    faults = []
    with exchange(rank, world, chunk_bytes=1 << 20) as ex:
        buffers = ex.buffers(4 << 20, WireFormat("int8"))
        outer, params = empty_pages(4 << 20), [empty_pages(4 << 20)]
        for round in range(12):
            header = Header(round=round)
            outcome = ex.start(buffers, outer=outer, params=params, header=header).wait(40)
            buffers.commit()
            faults.append(sum(outcome.counters.values()))
    return faults


@pytest.mark.parametrize("world", [2, 4])
def test_a_steady_exchange_faults_no_page(workers: Workers, world: int) -> None:
    for faults in workers(world).run(_steady):
        # The allocator's small arenas settle in the first rounds.
        assert sorted(faults[4:])[4] <= 1


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="batch threads are Linux's")
def test_threads_of_an_exchange_leave_the_core_to_threads_that_compute() -> None:
    before = set(os.listdir("/proc/self/task"))
    ex = _alone()
    threads: dict[str, int] = {}
    deadline = time.monotonic() + 30
    # A thread gives itself its name, and another one may be gone when it is looked at.
    while "diloco-engine" not in threads and time.monotonic() < deadline:
        for tid in set(os.listdir("/proc/self/task")) - before:
            with contextlib.suppress(OSError):
                name = Path(f"/proc/self/task/{tid}/comm").read_text().strip()
                threads[name] = os.sched_getscheduler(int(tid))
    assert "diloco-engine" in threads
    assert set(threads.values()) == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    ex.close()


_Ends = dict[tuple[object, object], tuple[int, ...]]


def _keepalive(connection: socket.socket) -> tuple[int, ...]:
    """Whether the kernel probes, and the idle seconds, the interval and the number of probes."""
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    numbers = [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    return (connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *numbers)


def _connections() -> _Ends:
    """The keepalive options of this process's TCP connections, by own address and peer's."""
    found: _Ends = {}
    for name in os.listdir("/proc/self/fd"):
        # The descriptor may be closed meanwhile, or its socket have no peer.
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family != socket.AF_UNIX and one.type == socket.SOCK_STREAM:
                    found[one.getsockname(), one.getpeername()] = _keepalive(one)
    return found


def _new_connections(rank: int, world: int, lanes: int) -> tuple[_Ends, list[tuple[int, ...]]]:
    """The connections since a group was formed, and the options of sockets from before."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        before = _connections()
        with exchange(rank, world, lanes=lanes) as ex:
            sync(ex, ex.buffers(3000, WireFormat("int8")), [values(0, rank, 3000)])
            after = _connections()
            # No peer closes its ends while they are read.
            dist.barrier()
        new = {ends: after[ends] for ends in after.keys() - before.keys()}
        return new, [_keepalive(one) for one in (server, client, accepted)]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")
def test_the_kernel_probes_idle_connections_of_a_group(workers: Workers) -> None:
    world, lanes = 3, 2
    results = workers(world).run(_new_connections, lanes)
    ends_of_all = {ends for new, _ in results for ends in new}
    for new, from_before in results:
        to_peers = [options for (own, peer), options in new.items() if (peer, own) in ends_of_all]
        # Two groups for each lane; the link beside them probes its connections, too.
        assert all(options[:3] == (1, 30, 30) for options in to_peers), new
        assert to_peers.count((1, 30, 30, 127)) == 2 * lanes * (world - 1), new
        assert [probed for probed, *_ in from_before] == [0, 0, 0]


# ------------------------------------------ The engine thread waits for the encoder before it votes


def make(num_elements: int) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    param = nn.Parameter(torch.zeros(num_elements))
    param.grad = torch.ones_like(param)
    return param, torch.optim.SGD([param], lr=0.5)


class Holder(nn.Module):
    def __init__(self, param: nn.Parameter) -> None:
        super().__init__()
        self.param = param


def test_single_replica_votes_after_its_last_chunk() -> None:
    param, optimizer = make(3_000_000)
    with DiLoCo(Holder(param), optimizer, sync_every=1, link=Link(chunk_bytes=1 << 18)) as diloco:
        with torch.no_grad():
            param[-1] = float("nan")
        with pytest.raises(NonFiniteError, match="1 on replica 0"):
            optimizer.step()
        assert diloco.totals().num_syncs == 0
