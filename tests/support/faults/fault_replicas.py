"""Small real replicas for fault tests.

A replica's model, data and inner optimizer are a function of its number and of how many steps it
has taken, so that a run with failures can be repeated without processes, by ``fault_simulation``.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from choice_groups import grouped
from torch import Tensor, nn
from workers import GRACE_S, Pool, deadline_after

from diloco_comm import DiLoCo, Nesterov, SyncError
from diloco_comm.exchange import waits
from diloco_comm.ops.digests import digest_of
from diloco_comm.replica.fragments import Schedule

LR, MOMENTUM = 0.7, 0.9
BLOCK = 32
# Long enough for survivors on a loaded machine to report, short enough for a whole suite.
REPORT_S = 2.0
# What ends without being waited for has ended after this, however loaded the machine is.
SETTLE_S = 10.0


@dataclass(frozen=True)
class Setup:
    """What all replicas of a run share."""

    wire: str = "fp32"
    fragments: int = 1
    sync_every: int = 4
    timeout: float = 30.0
    chunk_bytes: int = 512
    name: str = "run"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def schedule(self) -> Schedule:
        return Schedule.plan(self.sync_every, self.fragments)


def make_model() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16)
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def take_inner_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, step: int
) -> None:
    """Train on the batch that belongs to this replica and step."""
    generator = torch.Generator().manual_seed(1000 * number + step)
    inputs = torch.randn(8, 32, generator=generator)
    targets = torch.randint(0, 16, (8,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


@contextmanager
def default_handler() -> Iterator[None]:
    """Handle Ctrl-C as Python does; the workers of tests ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def connect(address: tuple[str, int]) -> dist.Store:
    """Reach the store in the test process, which outlives the replicas."""
    return dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=30))


def wait_for(pool: Pool, keys: list[str], timeout: float = 30.0) -> None:
    """Wait until the workers have set ``keys`` on the store.

    A worker may end once it has set its own. If one ends without, it has failed: the others then
    have ten seconds.
    """
    deadline = deadline_after(timeout)
    while not pool.crew.store.check(keys):
        time.sleep(0.01)
        if wait([pool.workers[rank].connection for rank in pool.busy], 0):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            pool.collect(timeout=1.0)
            raise AssertionError(f"the workers ended without {keys}")


@dataclass
class State:
    """Bytes of everything that a failed exchange of a fragment must leave alone."""

    round: int
    tensors: list[Tensor]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, State)
        return self.round == other.round and all(
            torch.equal(a.view(torch.int32), b.view(torch.int32))
            for a, b in zip(self.tensors, other.tensors, strict=True)
        )


@dataclass
class Failure:
    """What a replica saw of one failed exchange."""

    kind: str
    message: str
    fragment: int
    round: int
    stage: str
    seconds: float
    missing: tuple[int, ...]
    elapsed_s: float
    inner_step: int
    is_state_kept: bool
    details: dict[str, Any]


class Replica:
    """A replica in training; snapshots its state between inner step and exchange."""

    def __init__(
        self,
        address: tuple[str, int],
        number: int,
        members: Sequence[int],
        setup: Setup,
        **options: Any,
    ) -> None:
        os.environ["DILOCO_COMM_REPORT_S"] = str(REPORT_S)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.address, self.setup, self.number, self.step_count = address, setup, number, 0
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)
        self.before_exchange: Callable[[], None] = lambda: None
        self.before: list[State] = []
        self.optimizer.register_step_post_hook(self._remember)
        self.store = connect(address)
        self.diloco = DiLoCo(
            self.model,
            self.optimizer,
            sync_every=setup.sync_every,
            fragments=setup.fragments,
            **grouped(
                {
                    "store": dist.PrefixStore(setup.name, self.store),
                    "replica": number,
                    "members": members,
                    "wire": setup.wire,
                    "block_size": BLOCK,
                    "chunk_bytes": setup.chunk_bytes,
                    "timeout": setup.timeout,
                    "outer": Nesterov(lr=LR, momentum=MOMENTUM),
                    **setup.options,
                    **options,
                }
            ),
        )

    def _remember(self, *_: Any) -> None:
        self.before_exchange()
        self.before = self.state()

    def state(self) -> list[State]:
        """Copy what each fragment has: outer parameters, momentum and local parameters."""
        return [
            State(
                part.round,
                [
                    tensor.detach().clone()
                    for tensor in (part.state.outer, part.state.momentum, *part.tensors())
                ],
            )
            for part in self.diloco._plan.parameter_parts()
        ]

    def is_state_kept(self, failed: int) -> bool:
        """Whether the failed fragment is as before this step, and each other one or a round on."""
        return all(
            now == before or (part != failed and now.round == before.round + 1)
            for part, (before, now) in enumerate(zip(self.before, self.state(), strict=True))
        )

    def step(self) -> None:
        self.step_count += 1
        take_inner_step(self.model, self.optimizer, self.number, self.step_count)

    def train_to(self, inner_step: int) -> None:
        """Train until DiLoCo has counted ``inner_step`` steps; every exchange must succeed."""
        while self.diloco.inner_step < inner_step:
            self.step()

    def failing_step(self) -> Failure | None:
        """Take one step; return what went wrong, or None."""
        begin = time.monotonic()
        try:
            self.step()
        except SyncError as error:
            return describe(error, self, time.monotonic() - begin)
        return None

    def train_until_failure(self, limit: int) -> Failure:
        """Train until an exchange fails, at most ``limit`` steps."""
        for _ in range(limit):
            failure = self.failing_step()
            if failure is not None:
                return failure
        raise AssertionError(f"replica {self.number} saw no failure in {limit} steps")

    def fault(self, action: str, stage: str, **options: Any) -> None:
        """Do something to ourselves when the next exchange reaches a stage."""
        self.diloco.exchange.inject_fault(action=action, stage=stage, **options)

    def result(self, failures: Iterable[Failure] = ()) -> Result:
        diloco = self.diloco
        return Result(
            diloco.outer_hash(),
            hash_of(list(self.model.parameters())),
            hash_of([part.state.momentum for part in diloco._plan.parameter_parts()]),
            [part.round for part in diloco.parts],
            diloco.inner_step,
            diloco.exchange.epoch,
            list(failures),
        )


def hash_of(tensors: list[Tensor]) -> str:
    """Say what ``outer_hash()`` would of these tensors."""
    return f"{digest_of(tensors):016x}"


@dataclass
class Result:
    """Where a replica ended."""

    outer: str
    local: str
    momentum: str
    rounds: list[int]
    inner_step: int
    epoch: int
    failures: list[Failure]


def describe(error: SyncError, replica: Replica, elapsed_s: float) -> Failure:
    known = ("fragment", "round", "stage", "seconds", "missing")
    return Failure(
        type(error).__name__,
        str(error),
        **{name: getattr(error, name) for name in known},
        elapsed_s=elapsed_s,
        inner_step=replica.diloco.inner_step,
        is_state_kept=replica.is_state_kept(error.fragment),
        details={k: v for k, v in vars(error).items() if k not in known},
    )


def check_sentence(failure: Failure, missing: Iterable[int]) -> None:
    """One sentence that names fragment, round, stage, seconds and who did not report."""
    text = failure.message
    assert "\n" not in text and "Traceback" not in text, text
    assert f"fragment {failure.fragment}, round {failure.round}" in text, text
    assert failure.stage and failure.stage in text, text
    assert re.search(r"after \d+\.\d s", text), text
    assert failure.missing == tuple(missing), text
    for number in missing:
        assert re.search(rf"replicas? [\d, ]*\b{number}\b", text), text


def engine_threads() -> list[str]:
    """Names of this process's engine threads."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name.startswith("diloco"):
            names.append(name)
    return names


def lasting_engine_threads(allowed: Iterable[str] = ()) -> list[str]:
    """Names of the engine threads that do not end; one that was joined is seen a moment longer."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        names = [name for name in engine_threads() if name not in allowed]
        if not names or time.monotonic() > deadline:
            return names
        time.sleep(0.01)


def least_resources(num_readings: int = 10) -> tuple[int, int]:
    """Open file descriptors and threads of this process, the least of several readings.

    Threads that are about to end, and calls on the store, come and go.
    """
    readings = []
    for _ in range(num_readings):
        readings.append((num_files(), num_threads()))
        time.sleep(0.01)
    files, threads = zip(*readings, strict=True)
    return min(files), min(threads)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def check_agreement(results: Iterable[Result | None]) -> None:
    """All survivors hold the same outer parameters, momentum and rounds."""
    ends = [(r.outer, r.momentum, r.rounds, r.inner_step) for r in results if r is not None]
    assert ends and all(end == ends[0] for end in ends), ends


# ---------------- How a replica of a test of agreement ended: what it saw, and with whom it went on


H = 4
# Nobody waits for it: each test ends by what it tests, or by its own deadline.
HALF_AN_HOUR = Setup("int8", 1, 4, timeout=1800.0)
Address = tuple[str, int]
Fresh = Callable[..., Pool]


@dataclass
class End:
    """What a replica saw, and where it ended."""

    missing: tuple[int, ...]
    survivors: tuple[int, ...]
    members: tuple[int, ...]
    epoch: int
    result: Result
    errors: list[str]


def end(replica: Replica, failure: Failure, errors: Sequence[str] = ()) -> End:
    diloco = replica.diloco
    ended = End(
        failure.missing,
        failure.details["survivors"],
        diloco.members,
        diloco.epoch,
        replica.result([failure]),
        list(errors),
    )
    diloco.close()
    return ended


def finish(replica: Replica, last_step: int, failures: Sequence[Failure] = ()) -> Result:
    """Train to a step, and close."""
    replica.train_to(last_step)
    result = replica.result(failures)
    replica.diloco.close()
    return result


def listen_to_the_log() -> list[str]:
    """Return the list of this package's messages to come; waiting is logged after a second."""
    waits.FIRST_S = 1.0
    return lines_of_the_log()


def lines_of_the_log() -> list[str]:
    """Return the list of this package's messages to come."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("diloco_comm").addHandler(handler)
    return lines
