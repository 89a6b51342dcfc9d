"""A server and workers in separate processes, for the tests of faults.

The rule is plain descent with rate one, and every update changes the element of its worker by one.
So the parameters show exactly which updates were applied, and are compared with the workers' logs.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from async_helpers import Flat, attach

from diloco_comm import SGD, Link
from diloco_comm.asynchronous.link import ServerLost
from diloco_comm.asynchronous.rules import Immediate
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.snapshots import Storage
from diloco_comm.asynchronous.worker import AsyncDiLoCo, RoundMetrics
from diloco_comm_tools.common.workers import free_port


def server_main(options: argparse.Namespace) -> None:
    """Serve until SIGTERM; print the address. With size 0 a worker gives the first parameters."""
    torch.set_num_threads(1)
    if options.user is not None:
        os.setuid(options.user)
    server = AsyncServer(
        Immediate(outer=SGD(1.0)),
        listen=options.address,
        snapshot=options.folder,
        snapshot_every=options.snapshot_every,
        parameters=[torch.zeros(options.size - 1), torch.zeros(1)] if options.size else None,
        **options.server,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: server.stop_soon())
    print(server.address, flush=True)
    server.serve()


def worker_main(
    options: argparse.Namespace, is_done: Callable[[AsyncDiLoCo], bool] | None = None
) -> None:
    """Send ``updates`` updates, or until ``is_done``; log each one that the server answered for.

    Worker w adds 1 to element w with each update, so element w of the model ends at minus the
    number of its updates. Each inner step sleeps for ``pause`` seconds.
    """
    torch.set_num_threads(1)
    log = Path(options.log).open("a", buffering=1)

    def note(metrics: RoundMetrics) -> None:
        row = [metrics.seq, metrics.version, metrics.refusal, metrics.steps]
        log.write(json.dumps(row) + "\n")

    model = Flat(options.size, 0.0)
    worker = AsyncDiLoCo(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        server=options.address,
        name=f"w{options.index}" if options.name == "" else options.name,
        # Both wires represent 1 exactly.
        wire="bf16" if options.fetch == "updates" else "fp32",
        fetch=options.fetch,
        fragments=["a", "b"],
        link=Link(timeout=60.0),
        attach=False,
        on_round=note,
    )
    g = torch.zeros(options.size)
    g[options.index] = 1.0
    print("attached", flush=True)
    while not (is_done(worker) if is_done else worker.seq >= options.updates):
        time.sleep(options.pause)
        if worker.seq == options.busy_at:
            hold_the_interpreter(options.busy)
        if worker.due_in == 1:
            model.descend(g)
        try:
            worker.step()
        except ServerLost as error:
            log.write(json.dumps(["lost", str(error), ""]) + "\n")
            raise SystemExit(3) from None
    worker.close()


def dropper_main(options: argparse.Namespace) -> None:
    """Attach a worker and make a server; drop both without closing either."""
    _, worker = attach(options.address, "dropped", options.size, fragments=["a", "b"])
    worker.itself = worker  # type: ignore[attr-defined]
    server = AsyncServer(Immediate(outer=SGD(1.0)))
    server.itself = server  # type: ignore[attr-defined]
    del worker, server
    gc.collect()


def hold_the_interpreter(seconds: float) -> None:
    """Let no other Python thread of this process run for so long."""
    sys.setswitchinterval(1e4)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1_000_000))


DEFAULTS = {
    "address": "tcp://127.0.0.1:0", "folder": None, "snapshot_every": 10, "size": 1000,
    "fetch": "parameters", "index": 0, "updates": 5, "pause": 0.0, "log": None,
    "busy_at": -1, "busy": 0.0, "server": {"sync_every": 1}, "user": None,
    "name": "", "environ": {},
}  # fmt: skip

# Children are forked from a process that has imported torch, which takes seconds. The first
# optimizer of a process imports ``torch._dynamo``, which takes seconds too.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "diloco_comm.asynchronous.server",
        "diloco_comm.asynchronous.worker",
        "diloco_comm.asynchronous.decoupled.server",
        "diloco_comm.asynchronous.decoupled.attached",
        "torch._dynamo",
        "pytest",
    ]
)


class Child:
    """A server or a worker in its own process, used like a ``Popen``.

    Args:
        role: A name of ``_child_main``, or a function of a module, called with the options.
    """

    def __init__(self, role: str | Callable[[argparse.Namespace], None], **options: Any) -> None:
        ours, theirs = _forks.Pipe(duplex=False)
        arguments = argparse.Namespace(**{**DEFAULTS, **options})
        self._process = _forks.Process(target=_child_main, args=(role, arguments, theirs))
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()))
        ours.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"it still runs after {timeout} s"
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self.stdout.close()


def _child_main(
    role: str | Callable[[argparse.Namespace], None],
    options: argparse.Namespace,
    out: Connection,
) -> None:
    sys.stdout = os.fdopen(os.dup(out.fileno()), "w", buffering=1)
    out.close()
    os.environ.update(options.environ)
    mains = {"server": server_main, "worker": worker_main, "dropper": dropper_main}
    (role if callable(role) else mains[role])(options)


class Scene:
    """One server's folder, address and processes.

    Args:
        folder: For the server's state and the workers' logs.
        size: Elements of the model.
        server: Further arguments of ``AsyncServer``.
    """

    def __init__(self, folder: Path, size: int, **server: Any) -> None:
        self.folder, self.size = folder, size
        self.options = {"sync_every": 1, **server}
        self.processes: list[Child] = []
        self.logs: dict[int, Path] = {}
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.server = self.start_server()

    def start_server(self) -> Child:
        self.server = Child(
            "server", folder=self.folder / "state", address=self.address, size=self.size,
            snapshot_every=10, server=self.options,
        )  # fmt: skip
        self.processes.append(self.server)
        self.address = self.server.stdout.readline().strip()
        assert self.address
        return self.server

    def worker(self, index: int, updates: int, pause: float = 0.0, **options: Any) -> Child:
        self.logs[index] = self.folder / f"worker-{index}.log"
        fetch = "updates" if index % 2 else "parameters"
        given = {"address": self.address, "index": index, "size": self.size, "fetch": fetch}
        process = Child(
            "worker", **{**given, **options}, updates=updates, pause=pause, log=self.logs[index]
        )
        self.processes.append(process)
        return process

    def finish(self) -> dict[str, Any]:
        """End the server with SIGTERM, and compare its ledger with the workers' logs."""
        self.server.send_signal(signal.SIGTERM)
        assert self.server.wait(60) == 0
        return check_ledger(self.folder / "state", self.logs, self.size)

    def told(self, index: int) -> int:
        return len(read_log(self.logs[index]))

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def read_log(path: Path) -> list[list[Any]]:
    """Return the whole lines of a worker's log; a killed worker may leave a torn one."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def check_ledger(folder: Path, logs: dict[int, Path], size: int) -> dict[str, Any]:
    """Compare the server's ledger and parameters with the workers' logs: nothing lost or doubled.

    The server has ended and written its snapshot.
    """
    header, tensors = Storage(folder).load()
    values = torch.cat([tensors["0/outer"], tensors["1/outer"]])
    ledger = header["ledger"]
    applied = {name: row["num_applied"] for name, row in ledger.items()}
    assert header["model"]["version"] == sum(applied.values())
    for index, path in logs.items():
        rows = [row[:3] for row in read_log(path)]
        told = [seq for seq, _, refusal in rows if seq != "lost" and not refusal]
        mine = applied.get(f"w{index}", 0)
        # The server told each outcome once, in order; the last may be applied and not told.
        assert told == sorted(set(told)), f"worker {index} was told twice: {told}"
        assert len(told) <= mine, f"worker {index} was told of {len(told)}, {mine} were applied"
        assert max(told, default=0) <= mine
        assert values[index].item() == -float(mine)
    assert values.sum().item() == -float(sum(applied.values()))
    assert values.numel() == size
    return header
