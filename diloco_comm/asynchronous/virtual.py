"""The server's code on a virtual clock: workers of any speed in one process, deterministic.

    run = VirtualRun(coordinator, workers)
    run.until(num_updates=100, on_update=lambda now, worker, outcome: ...)

Only ``seconds_per_step`` and ``latency`` decide which worker arrives when. Encoding, the rule,
staleness, DyLU and grace periods are those of a real server. A run depends on nothing but the
models, the data and the seeds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from .coordinator import Coordinator, Outcome, Update
from .local import LocalModel

OnUpdate = Callable[[float, int, Outcome], None]


@dataclass
class VirtualWorker:
    """A worker with its own speed.

    Args:
        local: The worker's model.
        train_step: Takes one inner step on that model.
        seconds_per_step: Virtual seconds of one inner step.
        latency: Virtual seconds from the end of a round to its update's arrival at the server.
        begin_round: Called with the number of a round's steps before the first one.
    """

    local: LocalModel
    train_step: Callable[[], None]
    seconds_per_step: float
    latency: float = 0.0
    begin_round: Callable[[int], None] | None = None
    seq: int = field(default=0, init=False)
    version: int = field(default=0, init=False)
    round_steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.seconds_per_step <= 0 or self.latency < 0:
            raise ValueError(
                "seconds_per_step must be positive and latency not negative, got "
                f"{self.seconds_per_step} and {self.latency}"
            )


class VirtualRun:
    """Workers around one coordinator, whose model begins with the first worker's parameters.

    Attributes:
        now: The virtual time in seconds, 0 at first.
        num_updates: Updates that arrived, refused ones included.
        num_steps: Inner steps of these updates.
    """

    def __init__(self, coordinator: Coordinator, workers: list[VirtualWorker]) -> None:
        if not workers:
            raise ValueError("a run needs at least one worker")
        self.coordinator, self.workers = coordinator, workers
        self.now = 0.0
        self.num_updates = self.num_steps = 0
        self._arrivals: list[tuple[float, int]] = []
        if not coordinator.model.is_initialised:
            workers[0].local.read()
            coordinator.model.initialise(workers[0].local.outer)
        for index in range(len(workers)):
            self._begin(index, coordinator.start(self._name(index)))

    def _name(self, index: int) -> str:
        return str(index)

    def _begin(self, index: int, steps: int) -> None:
        """Give a worker the newest parameters and train the worker's round."""
        worker, model = self.workers[index], self.coordinator.model
        worker.version, worker.round_steps = model.version, steps
        for target, source in zip(worker.local.outer, model.read_all(), strict=True):
            target.copy_(source)
        worker.local.write()
        if worker.begin_round is not None:
            worker.begin_round(steps)
        for _ in range(steps):
            worker.train_step()
        finished_at = self.now + steps * worker.seconds_per_step + worker.latency
        heapq.heappush(self._arrivals, (finished_at, index))

    def until(
        self,
        *,
        num_updates: int | None = None,
        seconds: float | None = None,
        num_steps: int | None = None,
        on_update: OnUpdate | None = None,
    ) -> None:
        """Run until one of the limits is reached.

        Args:
            num_updates: Stop when so many updates have arrived since the run was made.
            seconds: Stop before the first arrival that is later than this virtual time.
            num_steps: Stop when the updates that have arrived took so many inner steps together.
            on_update: Called after each arrival with the time, the worker's index and the outcome.
        """
        if num_updates is None and seconds is None and num_steps is None:
            raise ValueError("until needs num_updates, num_steps or seconds")
        while not (
            (num_updates is not None and self.num_updates >= num_updates)
            or (num_steps is not None and self.num_steps >= num_steps)
        ):
            if self._release():
                continue
            if seconds is not None and self._arrivals[0][0] > seconds:
                return
            self._arrive(on_update)

    def _arrive(self, on_update: OnUpdate | None) -> None:
        self.now, index = heapq.heappop(self._arrivals)
        worker = self.workers[index]
        worker.seq += 1
        worker.local.encode(worker.seq)
        update = Update(
            self._name(index),
            worker.seq,
            worker.version,
            worker.round_steps,
            worker.round_steps * worker.seconds_per_step,
            [payload.clone() for payload in worker.local.payloads],
            worker.local.layouts,
        )
        outcome = self.coordinator.arrive(update, self.now)
        if not outcome.refusal:
            worker.local.update_applied()
        self.num_updates += 1
        self.num_steps += worker.round_steps
        if on_update is not None:
            on_update(self.now, index, outcome)

    def _release(self) -> bool:
        """Start the workers that wait in a grace period, unless another arrives before its end."""
        closes_at = self.coordinator.grace.closes_at
        if closes_at is None or (self._arrivals and self._arrivals[0][0] <= closes_at):
            return False
        # The grace period ends at once when no worker is training.
        self.now = max(self.now, closes_at) if self._arrivals else self.now
        for name, steps in self.coordinator.released(self.now):
            self._begin(int(name), steps)
        return True
