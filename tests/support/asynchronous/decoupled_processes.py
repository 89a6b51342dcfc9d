"""A syncer and its learners in separate processes, and what the learners saw.

Learner w subtracts 1 from element w in each inner step. Each learner logs the hash of every version
that it took, so two learners with different bytes of one version are found.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from async_helpers import Flat, wait_until
from async_processes import Child, read_log
from torch import Tensor

from diloco_comm import SGD
from diloco_comm.asynchronous import DecoupledDiLoCo, DecoupledServer
from diloco_comm.asynchronous.decoupled.settings import DecoupledSettings
from diloco_comm.asynchronous.worker.link import ServerLost, read_status

SIZE = 2001
# Two fragments of one piece each.
BASIC = {"fragments": ["a", "b"], "sync_every": 4, "merge": "mean", "wire": "fp32"}
FOREVER = 10**9


def make_server(settings: dict[str, Any] | None = None, **options: Any) -> DecoupledServer:
    given = DecoupledSettings(**{**BASIC, **(settings or {})})
    return DecoupledServer(given, **{"outer": SGD(1.0), **options})


def attach(address: str | list[str], name: str, size: int = SIZE, **options: Any):
    """Return a model that a test moves by hand, and its learner."""
    model = Flat(size, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"timeout": 20.0, "attach": False, **options}
    return model, DecoupledDiLoCo(model, optimizer, server=address, name=name, **options)


def hash_of(values: list[Tensor]) -> int:
    number = 0
    for each in values:
        number = zlib.crc32(each.numpy().data, number)
    return number


def syncer_main(options: argparse.Namespace) -> None:
    """Serve until SIGTERM; print the address."""
    torch.set_num_threads(1)
    server = make_server(
        options.settings, address=options.address, snapshot=options.folder, **options.server
    )
    signal.signal(signal.SIGTERM, lambda number, frame: server.stop_soon())
    print(server.address, flush=True)
    server.serve()


def learner_main(options: argparse.Namespace) -> None:
    """Train until killed or for ``updates`` steps; log steps, and each version with its hash."""
    torch.set_num_threads(1)
    log = Path(options.log).open("a", buffering=1)
    model, learner = attach(options.address, f"w{options.index}", timeout=60.0)
    g = torch.zeros(SIZE)
    g[options.index] = 1.0
    seen = [-1, -1]
    print("attached", flush=True)
    while learner.metrics.steps < options.updates:
        parts = learner._learner.fragments
        versions = []
        for p, part in enumerate(parts):
            if part.version != seen[p]:
                seen[p] = part.version
                versions.append([p, part.version, hash_of([q.base for q in part.pieces])])
        figures = learner.metrics
        books = [vars(ledger) for ledger in figures.step_ledgers]
        log.write(json.dumps([figures.steps, figures.merged, versions, books]) + "\n")
        time.sleep(options.pause)
        model.descend(g)
        try:
            learner.step()
        except ServerLost as error:
            log.write(json.dumps(["lost", str(error), [], []]) + "\n")
    learner.flush(30.0)
    learner.close()


class Play:
    """One syncer's folder, address and processes.

    Args:
        folder: For the syncer's state and the learners' logs.
        settings: Of the run, beside ``BASIC``.
        server: Further arguments of ``DecoupledServer``.
    """

    def __init__(self, folder: Path, settings: dict[str, Any] | None = None, **server: Any) -> None:
        self.folder, self.settings = folder, settings
        self.options = {"keep_tape": True, "snapshot_every": 10, **server}
        self.processes: list[Child] = []
        self.address = "tcp://127.0.0.1:0"
        self.start_syncer()

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def start_syncer(self) -> None:
        self.syncer = Child(
            syncer_main, folder=self.state, address=self.address, server=self.options,
            settings=self.settings,
        )  # fmt: skip
        self.processes.append(self.syncer)
        self.address = self.syncer.stdout.readline().strip()
        assert self.address

    def learner(self, index: int, updates: int = FOREVER, pause: float = 0.005) -> Child:
        process = Child(
            learner_main, address=self.address, index=index, updates=updates, pause=pause,
            log=self.folder / f"learner-{index}.log",
        )  # fmt: skip
        self.processes.append(process)
        return process

    def rows(self, index: int) -> list[list[Any]]:
        return read_log(self.folder / f"learner-{index}.log")

    def steps(self, index: int) -> int:
        rows = [row for row in self.rows(index) if row[0] != "lost"]
        return rows[-1][0] if rows else 0

    def merged(self, index: int) -> int:
        """Merged reports of a learner's present process."""
        rows = [row for row in self.rows(index) if row[0] != "lost"]
        return rows[-1][1] if rows else 0

    def status(self) -> dict[str, Any]:
        return read_status(self.address, timeout=20.0)

    def wait_for(self, index: int, *, merged: int) -> None:
        """Wait until so many more reports of a learner are merged."""
        before = self.merged(index)
        wait_until(lambda: self.merged(index) >= before + merged, 60)

    def versions(self, *learners: int) -> dict[tuple[int, int], int]:
        """Return the hash of each version; fail if two learners saw different bytes of one."""
        found: dict[tuple[int, int], int] = {}
        for index in learners:
            for row in self.rows(index):
                for p, version, number in row[2]:
                    assert found.setdefault((p, version), number) == number, (index, p, version)
        return found

    def check_books(self, *learners: int) -> None:
        """No learner has lost a step, and none has been merged twice."""
        for index in learners:
            for row in self.rows(index):
                for book in row[3]:
                    kept = book["applied"] + book["under_way"] + book["kept"] + book["lost"]
                    assert book["learned"] == kept == row[0], row

    def end(self) -> None:
        """End the learners by SIGKILL and the syncer by SIGTERM."""
        for process in self.processes:
            if process is not self.syncer:
                process.kill()
                process.wait(60)
        self.syncer.send_signal(signal.SIGTERM)
        assert self.syncer.wait(60) == 0

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            if process._process.exitcode is None:
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait(60)
