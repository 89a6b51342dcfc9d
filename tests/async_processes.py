"""A server and workers that are processes of their own, for the tests of faults.

Every update is a vector that names its worker and number, and the rule is plain descent with rate
one: what was applied can be read off the parameters, exactly, and compared with the workers' logs.
"""

from __future__ import annotations

import argparse
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
from async_helpers import Flat

from diloco_comm import SGD
from diloco_comm.asynchronous.link import ServerLost
from diloco_comm.asynchronous.rules import Immediate
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.storage import Storage
from diloco_comm.asynchronous.worker import AsyncDiLoCo, RoundMetrics


def server_main(options: argparse.Namespace) -> None:
    """Serve until SIGTERM; print the address. With size 0 a worker gives the first parameters."""
    torch.set_num_threads(1)
    server = AsyncServer(
        Immediate(outer=SGD(1.0)),
        address=options.address,
        sync_every=1,
        snapshot=options.folder,
        snapshot_every=options.snapshot_every,
        parameters=[torch.zeros(options.size - 1), torch.zeros(1)] if options.size else None,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: server.stop_soon())
    print(server.address, flush=True)
    server.serve()


def worker_main(
    options: argparse.Namespace, is_done: Callable[[AsyncDiLoCo], bool] | None = None
) -> None:
    """Send ``updates`` updates, or until ``is_done``; log each one that the server answered for.

    Worker w adds 1 to element w with each update, so element w of the model ends at minus the
    number of its updates.
    """
    torch.set_num_threads(1)
    log = Path(options.log).open("a", buffering=1)

    def note(metrics: RoundMetrics) -> None:
        log.write(json.dumps([metrics.seq, metrics.version, metrics.refusal]) + "\n")

    model = Flat(options.size, 0.0)
    worker = AsyncDiLoCo(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        server=options.address,
        name=f"w{options.index}",
        # Both carry a one exactly.
        wire="bf16" if options.fetch == "updates" else "fp32",
        fetch=options.fetch,
        fragments=["a", "b"],
        timeout=60.0,
        attach=False,
        on_round=note,
    )
    g = torch.zeros(options.size)
    g[options.index] = 1.0
    print("attached", flush=True)
    while not (is_done(worker) if is_done else worker.seq >= options.updates):
        time.sleep(options.pause)
        model.descend(g)
        try:
            worker.step()
        except ServerLost as error:
            log.write(json.dumps(["lost", str(error), ""]) + "\n")
            raise SystemExit(3) from None
    worker.close()


DEFAULTS = {
    "address": "tcp://127.0.0.1:0", "folder": None, "snapshot_every": 10, "size": 1000,
    "fetch": "parameters", "index": 0, "updates": 5, "pause": 0.0, "log": None,
}  # fmt: skip

# Children are forked from a process that has imported what they need: torch takes seconds.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    ["diloco_comm.asynchronous.server", "diloco_comm.asynchronous.worker", "pytest"]
)


class Child:
    """A server or a worker in a process of its own, which is used like a ``Popen``."""

    def __init__(self, role: str, **options: Any) -> None:
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


def _child_main(role: str, options: argparse.Namespace, out: Connection) -> None:
    sys.stdout = os.fdopen(os.dup(out.fileno()), "w", buffering=1)
    out.close()
    server_main(options) if role == "server" else worker_main(options)


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
        told = [seq for seq, _, refusal in read_log(path) if seq != "lost" and not refusal]
        mine = applied.get(f"w{index}", 0)
        # Told once each, in order; the last one may have been applied and not told.
        assert told == sorted(set(told)), f"worker {index} was told twice: {told}"
        assert len(told) <= mine, f"worker {index} was told of {len(told)}, {mine} were applied"
        assert max(told, default=0) <= mine
        assert values[index].item() == -float(mine)
    assert values.sum().item() == -float(sum(applied.values()))
    assert values.numel() == size
    return header
