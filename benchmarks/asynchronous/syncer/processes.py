"""A syncer and learners in processes of their own, told by lines of JSON what to do."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from benchmarks.support import common
from diloco_comm import Link
from diloco_comm.asynchronous.decoupled.attached import DecoupledDiLoCo
from diloco_comm.asynchronous.decoupled.server import DecoupledServer
from diloco_comm.asynchronous.decoupled.settings import DecoupledSettings
from diloco_comm.asynchronous.link import ServerLost
from diloco_comm.asynchronous.messages import Kind

# Seconds that a process may take to start, or to answer.
_PATIENCE_S = 120.0


class Blocks(nn.Module):
    """A model of equal tensors: one a fragment."""

    def __init__(self, num_elements: int, num_fragments: int) -> None:
        super().__init__()
        size = num_elements // num_fragments
        names = [f"t{i:04d}" for i in range(num_fragments)]
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))


def names_of(num_fragments: int) -> list[str]:
    """Return the fragments of ``Blocks``, for the settings."""
    return [f"t{i:04d}" for i in range(num_fragments)]


# ------------------------------------------------------------------------------------ the syncer


def serve(given: str) -> None:
    """Serve until SIGTERM; print the address first."""
    torch.set_num_threads(1)
    options = json.loads(given)
    with tempfile.TemporaryDirectory(dir=options.pop("folder", None)) as folder:
        if options.pop("is_kept", False):
            options["snapshot"] = Path(folder) / "state"
        server = DecoupledServer(DecoupledSettings(**options.pop("settings")), **options)
        signal.signal(signal.SIGTERM, lambda number, frame: server.stop_soon())
        print(json.dumps({"address": server.address}), flush=True)
        server.serve()


# ------------------------------------------------------------------------------------ a learner


class Loop:
    """A training loop whose inner step is a sleep and an addition, and what happened in it.

    Attributes:
        steps: When each step ended, its seconds, and those of them in the hook.
        pushes, commits, arrivals: When a report was made (fragment, version it starts from), a
            COMMIT came, and its values were all here (fragment, version).
        num_messages: Messages to and from the syncer.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._model = Blocks(options["elements"], options["fragments"])
        generator = torch.Generator().manual_seed(int(options["name"].removeprefix("w")))
        self._params = list(self._model.parameters())
        self._changes = [
            1e-3 * torch.randn(each.shape, generator=generator) for each in self._params
        ]
        self._learner: DecoupledDiLoCo | None = None
        self.pace_s = options["step_s"]
        self.steps: list[tuple[float, float, float]] = []
        self.pushes: list[tuple[int, int, float]] = []
        self.commits: list[tuple[int, int, float]] = []
        self.arrivals: list[tuple[int, int, float]] = []
        self.num_messages = 0

    def join(self) -> None:
        """Attach a learner, and note what it says and hears."""
        options = self._options
        self._learner = DecoupledDiLoCo(
            self._model,
            torch.optim.SGD(self._model.parameters(), lr=1.0),
            server=options["address"],
            name=options["name"],
            link=Link(timeout=_PATIENCE_S),
            attach=False,
        )
        courier = self._learner._shards[0].carrier
        send, hear, report = courier._link.send, courier._receive, courier.report
        has_arrived = courier._take_run

        def sending(message):
            is_sent = send(message)
            self.num_messages += is_sent
            return is_sent

        def hearing(message):
            self.num_messages += 1
            if message.kind == Kind.COMMIT:
                self.commits.append((message.fragment, message.version, time.monotonic()))
            hear(message)

        def reporting(fragment, report_of, payloads):
            self.pushes.append((fragment, report_of.base, time.monotonic()))
            report(fragment, report_of, payloads)

        def arriving(message):
            fetch = courier._fetch
            has_arrived(message)
            if fetch is not None and courier._fetch is not fetch:
                self.arrivals.append((fetch.fragment, fetch.version, time.monotonic()))

        courier._link.send, courier._receive = sending, hearing  # type: ignore[method-assign]
        courier.report, courier._take_run = reporting, arriving  # type: ignore[method-assign]

    def leave(self) -> None:
        """Train without a syncer from now on."""
        if self._learner is not None:
            self._learner.close()
            self._learner = None

    def step(self) -> None:
        """Take an inner step, with the hook where a learner is attached."""
        begin = time.monotonic()
        if self.pace_s:
            time.sleep(self.pace_s)
        with torch.no_grad():
            torch._foreach_add_(self._params, self._changes)
        hook_s = 0.0
        if self._learner is not None:
            before = self._learner._hook_s
            try:
                self._learner.step()
            except ServerLost as error:
                print(error, file=sys.stderr)
            hook_s = self._learner._hook_s - before
        end = time.monotonic()
        self.steps.append((end, end - begin, hook_s))


def learn(given: str) -> None:
    """Train until standard input ends; every line is a method of ``Loop`` or a new pace."""
    torch.set_num_threads(1)
    loop, tasks = Loop(json.loads(given)), []
    over = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            tasks.append(line.split())
        over.set()

    threading.Thread(target=read, daemon=True).start()
    is_training = False
    while not over.is_set() or tasks:
        while tasks:
            what, *more = tasks.pop(0)
            if what == "pace":
                loop.pace_s = float(more[0])
            elif what in ("join", "leave"):
                getattr(loop, what)()
            is_training = what != "rest"
            print(json.dumps({"done": what, "num_messages": loop.num_messages}), flush=True)
        if is_training:
            loop.step()
        else:
            time.sleep(0.01)
    figures = {name: getattr(loop, name) for name in ("steps", "pushes", "commits", "arrivals")}
    print(json.dumps(figures), flush=True)
    loop.leave()


ROLES: dict[str, Callable[[str], None]] = {"serve": serve, "learn": learn}


# ------------------------------------------------------------------- as the measurement sees them


class Process:
    """A process of this benchmark.

    Attributes:
        address: Of a syncer.
    """

    address = ""

    def __init__(self, role: str, given: dict[str, Any]) -> None:
        command = common.benchmark_command("asynchronous.syncer", role, "--given")
        self._process = subprocess.Popen(
            [*command, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.pid = self._process.pid

    @property
    def _out(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def answer(self) -> dict[str, Any]:
        """Return the next line of the process.

        Raises:
            RuntimeError: If the process has ended, or says nothing.
        """
        ready, _, _ = select.select([self._out], [], [], _PATIENCE_S)
        line = self._out.readline() if ready else ""
        if not line:
            raise RuntimeError(f"process {self.pid} of the benchmark has ended or hangs")
        return json.loads(line)

    def tell(self, *words: object) -> int:
        """Tell a learner what to do, and wait until it is done; returns its messages so far."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self.answer()["num_messages"]

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def figures(self) -> dict[str, Any]:
        """End a learner, and return what it has noted."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        figures = self.answer()
        self._process.wait(_PATIENCE_S)
        return figures

    def end(self) -> None:
        """End the process, whatever it does; idempotent."""
        if self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@contextmanager
def running(
    num_learners: int,
    settings: dict[str, Any],
    *,
    elements: int,
    step_s: float,
    **server: Any,
) -> Iterator[tuple[Process, list[Process]]]:
    """Start a syncer and learners that rest; at the end none of them is left."""
    fragments = settings["fragments"]
    given = {**settings, "fragments": names_of(fragments)}
    processes = [Process("serve", {"settings": given, **server})]
    try:
        processes[0].address = address = processes[0].answer()["address"]
        for index in range(num_learners):
            options = {
                "address": address, "name": f"w{index}", "elements": elements,
                "fragments": fragments, "step_s": step_s,
            }  # fmt: skip
            processes.append(Process("learn", options))
        yield processes[0], processes[1:]
    finally:
        for process in reversed(processes):
            process.end()
