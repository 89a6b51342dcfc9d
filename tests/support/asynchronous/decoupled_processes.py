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
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from async_helpers import Flat, wait_until
from async_processes import Child
from torch import Tensor

from diloco_comm import SGD, Link
from diloco_comm.asynchronous import DecoupledDiLoCo, DecoupledServer
from diloco_comm.asynchronous.decoupled.settings import DecoupledSettings
from diloco_comm.asynchronous.decoupled.tape import replay
from diloco_comm.asynchronous.link import ServerLost, read_status
from diloco_comm_tools.common.workers import free_port

SIZE = 2001
# Two fragments of one piece each.
BASIC = {"fragments": ["a", "b"], "sync_every": 4, "merge": "mean", "wire": "fp32"}
FOREVER = 10**9


def make_server(settings: dict[str, Any] | None = None, **options: Any) -> DecoupledServer:
    given = DecoupledSettings(**{**BASIC, **(settings or {})})
    return DecoupledServer(given, **{"outer": SGD(1.0), **options})


def attach(
    address: str | list[str], name: str, size: int = SIZE, timeout: float = 20.0, **options: Any
):
    """Return a model that a test moves by hand, and its learner."""
    model = Flat(size, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"link": Link(timeout=timeout), "attach": False, **options}
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
        options.settings, listen=options.address, snapshot=options.folder, **options.server
    )
    signal.signal(signal.SIGTERM, lambda number, frame: server.stop_soon())
    print(server.address, flush=True)
    server.serve()


def learner_main(options: argparse.Namespace) -> None:
    """Train until killed, until SIGTERM or for ``updates`` steps.

    Every row of the log has the steps, the merged reports, each new version with its hash, the
    books of the steps, and the seconds of the step before.
    """
    torch.set_num_threads(1)
    log = Path(options.log).open("a", buffering=1)
    ends: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ends.append(number))
    model, learner = attach(options.address, f"w{options.index}", timeout=60.0)
    g = torch.zeros(SIZE)
    g[options.index] = 1.0
    seen, step_s = [-1, -1], 0.0
    print("attached", flush=True)

    def note() -> None:
        versions = []
        for p, part in enumerate(learner._learner.fragments):
            if part.version != seen[p]:
                seen[p] = part.version
                versions.append([p, part.version, hash_of([q.base for q in part.pieces])])
        figures = learner.metrics
        books = [vars(ledger) for ledger in figures.step_ledgers]
        log.write(json.dumps([figures.steps, figures.merged, versions, books, step_s]) + "\n")

    while learner.metrics.steps < options.updates and not ends:
        note()
        begin = time.monotonic()
        time.sleep(options.pause)
        model.descend(g)
        try:
            learner.step()
        except ServerLost as error:
            log.write(json.dumps(["lost", str(error), [], [], 0.0]) + "\n")
        step_s = time.monotonic() - begin
    learner.flush(30.0)
    note()
    learner.close()


class Log:
    """The rows of a learner's log, read as they come."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rows = path, 0, list[list[Any]]()

    def rows(self) -> list[list[Any]]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self._offset += len(new)
            for line in new.splitlines():
                # A process that was killed may leave a torn row.
                with suppress(ValueError):
                    self._rows.append(json.loads(line))
        return self._rows


class Play:
    """The folders, addresses and processes of one or several syncers and their learners.

    Args:
        folder: For the syncers' states and the learners' logs.
        settings: Of the run, beside ``BASIC``.
        shards: Number of syncers.
        server: Further arguments of ``DecoupledServer``.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any] | None = None, shards: int = 1, **server: Any
    ) -> None:
        self.folder, self.settings = folder, settings or {}
        self.options = {"keep_tape": True, "snapshot_every": 10, **server}
        self.processes: list[Child] = []
        self._logs: dict[int, Log] = {}
        self.addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(shards)]
        self.syncers: list[Child] = []
        for shard in range(shards):
            self.start_syncer(shard)

    @property
    def state(self) -> Path:
        """The folder of the first syncer."""
        return self.state_of(0)

    def state_of(self, shard: int) -> Path:
        return self.folder / f"state-{shard}"

    @property
    def syncer(self) -> Child:
        """The process of the first syncer."""
        return self.syncers[0]

    @property
    def address(self) -> str:
        """The address of the first syncer."""
        return self.addresses[0]

    def start_syncer(self, shard: int = 0) -> None:
        """Start a syncer, or start it again with its folder and address."""
        settings = {**self.settings, "shard": f"{shard}/{len(self.addresses)}"}
        syncer = Child(
            syncer_main, folder=self.state_of(shard), address=self.addresses[shard],
            server=self.options, settings=settings,
        )  # fmt: skip
        self.processes.append(syncer)
        self.syncers[shard : shard + 1] = [syncer]
        self.addresses[shard] = syncer.stdout.readline().strip()
        assert self.addresses[shard]

    def learner(self, index: int, updates: int = FOREVER, pause: float = 0.005) -> Child:
        process = Child(
            learner_main, address=self.addresses, index=index, updates=updates, pause=pause,
            log=self.folder / f"learner-{index}.log",
        )  # fmt: skip
        self.processes.append(process)
        return process

    def rows(self, index: int) -> list[list[Any]]:
        """Return the whole rows of a learner's log; each call reads what is new."""
        return self._logs.setdefault(index, Log(self.folder / f"learner-{index}.log")).rows()

    def last(self, index: int) -> list[Any]:
        """Return a learner's last row that has figures."""
        return next((row for row in reversed(self.rows(index)) if row[0] != "lost"), [0, 0, [], []])

    def steps(self, index: int) -> int:
        return self.last(index)[0]

    def merged(self, index: int) -> int:
        """Merged reports of a learner's present process."""
        return self.last(index)[1]

    def status(self) -> dict[str, Any]:
        return read_status(self.address, timeout=20.0)  # of the first syncer

    def wait_for(self, index: int, *, merged: int) -> None:
        """Wait until so many more reports of a learner are merged."""
        before = self.merged(index)
        wait_until(lambda: self.merged(index) >= before + merged, 60)

    def newest(self, index: int) -> list[int]:
        """Return the newest version of each fragment that a learner has."""
        found = [-1, -1]
        for row in reversed(self.rows(index)):
            for p, version, _ in row[2]:
                found[p] = max(found[p], version)
            if min(found) >= 0:
                break
        return found

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
        """End the learners by SIGKILL and the syncers by SIGTERM."""
        for process in self.processes:
            if process not in self.syncers:
                process.kill()
                process.wait(60)
        for syncer in self.syncers:
            syncer.send_signal(signal.SIGTERM)
            assert syncer.wait(60) == 0

    def check_tapes(self, *learners: int) -> dict[tuple[int, int], int]:
        """Replay the tapes of all syncers, and compare them with what the learners saw.

        A replay compares each merge with the tape, and the result with the syncer's last snapshot,
        to the bit. No report is merged twice.

        Returns:
            The inner steps that were merged, by learner and fragment.
        """
        published: dict[tuple[int, int], int] = {}
        merged: dict[tuple[int, int], int] = {}
        for shard in range(len(self.syncers)):
            reports: set[tuple[int, str, int]] = set()

            def note(record: dict, model: Any, shard: int = shard, reports: set = reports) -> None:
                p = shard + len(self.syncers) * record["fragment"]
                values = hash_of(model.published[record["fragment"]].values)
                assert published.setdefault((p, record["version"]), values) == values
                assert (p, record["version"] - 1) in published or record["version"] == 1
                for name, seq, _, steps, _ in record["reports"]:
                    assert (p, name, seq) not in reports, f"report {seq} of {name} is merged twice"
                    reports.add((p, name, seq))
                    key = (int(name.removeprefix("w")), p)
                    merged[key] = merged.get(key, 0) + steps

            done = replay(self.state_of(shard), note)
            assert done.is_compared and done.first == 0
        seen = {key: hashed for key, hashed in self.versions(*learners).items() if key[1] > 0}
        assert seen.items() <= published.items(), "a learner saw a version that is on no tape"
        for index in learners:
            self.check_order(index)
        return merged

    def check_order(self, index: int) -> None:
        """The versions of a learner only grow while its process lives."""
        newest: dict[int, int] = {}
        for row in self.rows(index):
            if row[0] == 0:
                newest = {}  # the first row of a process
            for p, version, _ in row[2]:
                assert version > newest.get(p, -1), (index, p, version)
                newest[p] = version

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            if process._process.exitcode is None:
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait(60)
