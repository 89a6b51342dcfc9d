"""How long a worker trains, and on which data: DyLU, grace periods, shard sampling and schedules.

The methods are those of arXiv 2401.09135. The code reads no clock: times are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random


def dylu_steps(
    speed: float | None, speeds: Sequence[float], sync_every: int, *, minimum: int = 1
) -> int:
    """Return the inner steps of a worker's next round: floor(speed / fastest * sync_every) (Eq. 6).

    Args:
        speed: This worker's inner steps per second; None if not measured yet.
        speeds: Speeds of all workers that have been measured.
        sync_every: Steps of the fastest worker (H).
        minimum: Least number of steps.
    """
    if minimum < 1:
        raise ValueError(f"minimum must be at least 1, got {minimum}")
    fastest = max(speeds, default=0.0)
    if speed is None or fastest <= 0:
        return max(minimum, sync_every)
    # Speeds come from divisions: the quotient of two equal speeds may be just below 1.
    return max(minimum, min(sync_every, math.floor(speed / fastest * sync_every * (1 + 1e-12))))


class GracePeriod:
    """Let workers that finish shortly after one another continue from the same model (Alg. 2, 4).

    The first arrival opens a window of ``seconds``. Workers that arrive up to the window's end wait
    for that end. The window closes early when no worker is training any more.

    Args:
        seconds: Length of the window; with 0 every worker continues at once.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        if not 0 <= seconds:
            raise ValueError(f"grace must be a number of seconds of at least 0, got {seconds!r}")
        self.seconds = seconds
        self._opened_at: float | None = None
        self._arrived: list[Hashable] = []

    @property
    def closes_at(self) -> float | None:
        """When the open window closes; None if none is open."""
        return None if self._opened_at is None else self._opened_at + self.seconds

    def arrive(self, worker: Hashable, now: float) -> None:
        """Note that a worker's update is finished and that the worker waits."""
        if worker not in self._arrived:
            self._arrived.append(worker)
        if self._opened_at is None:
            self._opened_at = now

    def is_waiting(self, worker: Hashable) -> bool:
        """Whether the worker waits for the window to close."""
        return worker in self._arrived

    def leave(self, worker: Hashable) -> None:
        """Forget a worker that has stopped waiting."""
        if worker in self._arrived:
            self._arrived.remove(worker)
        if not self._arrived:
            self._opened_at = None

    def release(self, now: float, *, is_anyone_training: bool) -> list[Hashable]:
        """Return the workers that continue now, by arrival; none while the window is open."""
        closes_at = self.closes_at
        if closes_at is None or (now < closes_at and is_anyone_training):
            return []
        released, self._arrived, self._opened_at = self._arrived, [], None
        return released


class ShardSampler:
    """Choose the shard that a worker trains on next; shards that are behind are likelier (Eq. 2).

    Args:
        sizes: Data points of each shard.
        seed: Seed of the random draws.
    """

    def __init__(self, sizes: Sequence[int], seed: int = 0) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"every shard must hold at least 1 data point, got {list(sizes)}")
        self.sizes = tuple(sizes)
        self.learned = [0] * len(sizes)
        self._random = Random(seed)

    def probabilities(self) -> list[float]:
        """Return p_i, proportional to max(share of the data - share of the learned points, 0).

        Uniform if all are zero: at the start, and if every shard has had exactly its share.
        """
        total, learned = sum(self.sizes), sum(self.learned)
        if learned == 0:
            return [1 / len(self.sizes)] * len(self.sizes)
        pairs = zip(self.sizes, self.learned, strict=True)
        behind = [max(size / total - seen / learned, 0.0) for size, seen in pairs]
        weight = sum(behind)
        if weight <= 0:
            return [1 / len(behind)] * len(behind)
        return [p / weight for p in behind]

    def draw(self) -> int:
        """Return the index of a shard."""
        return self._random.choices(range(len(self.sizes)), self.probabilities())[0]

    def learn(self, shard: int, num_points: int) -> None:
        """Note that ``num_points`` data points of a shard have been learned."""
        self.learned[shard] += num_points


@dataclass(frozen=True)
class ShardSchedule:
    """Learning rate of a shard by the steps taken on it: warm-up, then a cosine (Eq. 3).

    Args:
        peak, floor: Largest and last rate. The floor is positive, since a shard may be trained
            for more than ``total`` steps.
        warmup, total: Steps of the warm-up, and steps until the last rate.
    """

    peak: float
    floor: float
    warmup: int
    total: int

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.peak:
            raise ValueError(
                f"floor must lie in (0, peak = {self.peak}], got {self.floor}: a shard may be "
                "trained on after its last planned step"
            )
        if self.warmup < 0 or self.total < 1:
            raise ValueError(
                f"warmup must not be negative and total at least 1, got {self.warmup} and "
                f"{self.total}"
            )

    def at(self, step: int) -> float:
        """Return the rate of a step, counted from 0."""
        if step < self.warmup:
            return self.peak * step / self.warmup
        span = max(0, self.total - self.warmup)
        ratio = min(1.0, max(0.0, (step - self.warmup) / span)) if span else 1.0
        return self.floor + 0.5 * (self.peak - self.floor) * (1 + math.cos(math.pi * ratio))


@dataclass
class Speeds:
    """Measured speeds of the workers, in inner steps per second."""

    by_worker: dict[Hashable, float] = field(default_factory=dict)

    def measure(self, worker: Hashable, steps: int, seconds: float) -> None:
        """Keep the speed of a worker's last round; a round of no duration is ignored."""
        if steps > 0 and 0 < seconds < math.inf:
            self.by_worker[worker] = steps / seconds

    def forget(self, worker: Hashable) -> None:
        self.by_worker.pop(worker, None)

    def steps(
        self, worker: Hashable, sync_every: int, *, minimum: int = 1, use_dylu: bool = True
    ) -> int:
        """Return the inner steps of the worker's next round."""
        if not use_dylu:
            return sync_every
        known: Mapping[Hashable, float] = self.by_worker
        return dylu_steps(known.get(worker), list(known.values()), sync_every, minimum=minimum)
