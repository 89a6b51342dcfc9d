"""A server's decisions: which update is applied, and when and how long each worker trains next.

The server (``server.py``) and the virtual clock (``virtual.py``) use the same code: times and
encoded payloads are arguments.

The methods of arXiv 2401.09135 are here: DyLU, grace periods, shard sampling and schedules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ..base.checks import MOST_INT32, integer
from ..ops.wire import Layout
from .messages import UNCOUNTED
from .model import KeptVersions, SharedModel
from .payloads import Payload, find_garbage


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
    # Rounding may make two equal speeds differ in the last bit: without the last factor the slower
    # one would lose a step.
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
        """The time at which the open window closes; None if no window is open."""
        return None if self._opened_at is None else self._opened_at + self.seconds

    def arrive(self, worker: Hashable, now: float) -> None:
        """Note that the server has finished a worker's update, and that the worker waits now."""
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
        """Return the workers that continue now, first come first; [] while the window is open."""
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
        """Return the probability p_i with which each shard is drawn.

        It is proportional to max(share of the data - share of the learned points, 0). If all of
        these are zero, at the start or if every shard has had exactly its share, it is uniform.
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


@dataclass(frozen=True)
class Update:
    """An update: the encoded pseudo-gradient of one round of a worker.

    Attributes:
        worker: Name of the worker, the same in all of its updates.
        seq: Sequence number: 1 for the worker's first update, then one more each.
        version: Version of the parameters that the round started from.
        steps, seconds: Inner steps of the round and how long they took.
        payloads, layouts: For each fragment the encoded pseudo-gradient, and how it is laid out.
        garbage: A sentence if the payloads are invalid, "" if they are valid; None if ``arrive`` is
            to check them.
    """

    worker: str
    seq: int
    version: int
    steps: int
    seconds: float
    payloads: Sequence[Payload] = field(repr=False)
    layouts: Sequence[Layout] = field(repr=False)
    garbage: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Whether an update was applied, and why not.

    Attributes:
        seq: Sequence number of the update.
        version: Version of the shared model afterwards.
        staleness: Versions made since the update's worker fetched its parameters; -1 if the update
            was refused, or is older than the worker's newest one.
        refusal: "" if it was applied, else "stale", "non-finite", "disk", "out of order" or "from
            the future".
        reason: One sentence for the worker if the update was refused, else "".
    """

    seq: int
    version: int
    staleness: int
    refusal: str = ""
    reason: str = ""


@dataclass
class Member:
    """A worker as the server remembers it, also while the worker is not connected.

    Attributes:
        last: Outcome of the worker's newest update that has used up its sequence number.
        num_applied: Number of the worker's updates that were applied.
        is_training: The worker has parameters and has not sent its update yet.
        started: Version that the worker trains from, kept for delay compensation; else None.
        instance: Random number of the newest process with this name; 0 if it sent none.
    """

    last: Outcome = field(default_factory=lambda: Outcome(0, 0, -1))
    num_applied: int = 0
    is_training: bool = False
    started: int | None = None
    instance: int = 0


@dataclass
class Counts:
    """Counters for the status."""

    staleness: Counter[int] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0


class Coordinator:
    """Apply each update once and in order, and decide when workers train and for how many steps.

    Args:
        model: The shared model.
        sync_every: Inner steps of a round (H); with DyLU those of the fastest worker.
        dylu: Dynamic local updates: give slower workers fewer steps, by their measured speeds.
        min_steps: Least inner steps of a round under DyLU.
        grace: Seconds of the grace period, see ``GracePeriod``.
        check: Refuse updates with values that are not finite.
    """

    def __init__(
        self,
        model: SharedModel,
        *,
        sync_every: int = 50,
        dylu: bool = False,
        min_steps: int = 1,
        grace: float = 0.0,
        check: bool = True,
    ) -> None:
        sync_every = integer("sync_every", sync_every, 1, most=MOST_INT32)
        if min_steps < 1:
            raise ValueError(f"min_steps must be at least 1, got {min_steps}")
        self.model = model
        self.sync_every, self.dylu, self.min_steps = sync_every, dylu, min_steps
        self.check = check
        self.grace = GracePeriod(grace)
        self.members: dict[str, Member] = {}
        self.speeds = Speeds()
        self.counts = Counts()
        self.versions = KeptVersions(model)

    def join(self, worker: str) -> Member:
        """Return the member of this name, new or known."""
        return self.members.setdefault(worker, Member())

    def leave(self, worker: str) -> None:
        """Stop waiting for a worker. Its applied updates stay, and it may come back."""
        self.grace.leave(worker)
        self.speeds.forget(worker)
        if worker in self.members:
            self.members[worker].is_training = False
            self._forget_start(self.members[worker])

    def _forget_start(self, member: Member) -> None:
        if member.started is not None:
            self.versions.drop(member.started)
            member.started = None

    # -------------------------------------------------------------------------------- updates

    def outcome_of(self, worker: str, seq: int) -> Outcome | None:
        """Return the outcome of an update that has come before; None for a new update.

        Only the newest outcome is kept: for an older update the staleness is -1.
        """
        last = self.join(worker).last
        if seq > last.seq:
            return None
        self.counts.duplicates += 1
        if seq == last.seq:
            return last
        return Outcome(seq, self.model.version, -1)

    def refusal(self, worker: str, seq: int, version: int) -> Outcome | None:
        """Return the refusal of an update by its number and version; None to take its payload."""
        last = self.join(worker).last
        staleness = self.model.version - version
        if seq != last.seq + 1:
            reason = f"update {seq} came where {last.seq + 1} was expected"
            return self._refused(seq, "out of order", reason)
        if staleness < 0:
            reason = f"it starts from version {version}, and the newest is {self.model.version}"
            return self._refused(seq, "from the future", reason)
        bound = self.model.rule.max_staleness
        if bound is not None and staleness > bound:
            reason = f"its staleness is {staleness}, and at most {bound} is allowed"
            return self._refused(seq, "stale", reason)
        return None

    def _refused(self, seq: int, refusal: str, reason: str) -> Outcome:
        return Outcome(seq, self.model.version, -1, refusal, f"update {seq} was refused: {reason}")

    def lose(self, worker: str, seq: int, reason: str, now: float) -> Outcome:
        """Refuse an update whose payload the server has lost; the worker sends its next one."""
        outcome = self._refused(seq, "disk", reason)
        self.finish(worker, outcome, now)
        return outcome

    def arrive(
        self, update: Update, now: float, release: Callable[[], None] = lambda: None
    ) -> Outcome:
        """Apply a complete update, or refuse it; if it has come before, return its outcome alone.

        Args:
            update: The update.
            now: Seconds on any monotonic clock.
            release: Called when the payloads are needed no more.
        """
        again = self.outcome_of(update.worker, update.seq)
        if again is not None:
            release()
            return again
        outcome = self.refusal(update.worker, update.seq, update.version)
        if outcome is None and self.check:
            outcome = self._garbage(update)
        if outcome is None:
            outcome = self._apply(update, release)
        else:
            release()
        self.finish(update.worker, outcome, now)
        self.speeds.measure(update.worker, update.steps, update.seconds)
        return outcome

    def finish(self, worker: str, outcome: Outcome, now: float) -> None:
        """Note the outcome of a worker's update; the worker then waits for its next round."""
        member = self.join(worker)
        if outcome.refusal not in UNCOUNTED:
            member.last = outcome
        if outcome.refusal:
            self.counts.refused[outcome.refusal] += 1
        member.is_training = False
        self.grace.arrive(worker, now)

    def _garbage(self, update: Update) -> Outcome | None:
        found = update.garbage
        if found is None:
            pairs = zip(update.payloads, update.layouts, strict=True)
            found = next(filter(None, (find_garbage(*pair) for pair in pairs)), "")
        return self._refused(update.seq, "non-finite", found) if found else None

    def _apply(self, update: Update, release: Callable[[], None]) -> Outcome:
        staleness = self.model.version - update.version
        weight = self.model.rule.weight(staleness)
        payloads, layouts = update.payloads, update.layouts
        started = self.join(update.worker).started
        if started is not None:
            factor = self.model.rule.compensation
            payloads, layouts = self.versions.compensate(payloads, layouts, started, factor)
            release()
            version = self.model.apply(payloads, layouts, weight)
        else:
            version = self.model.apply(payloads, layouts, weight, release)
        self.counts.staleness[staleness] += 1
        self.join(update.worker).num_applied += 1
        return Outcome(update.seq, version, staleness)

    # ------------------------------------------------------------------------------ going on

    def released(self, now: float) -> list[tuple[str, int]]:
        """Return the workers whose grace period has ended, with the inner steps of their rounds."""
        is_anyone_training = any(member.is_training for member in self.members.values())
        names = self.grace.release(now, is_anyone_training=is_anyone_training)
        return [(str(name), self.start(str(name))) for name in names]

    def start(self, worker: str) -> int:
        """Start a worker's round from the newest version, and return the round's inner steps."""
        member = self.join(worker)
        member.is_training = True
        if self.model.rule.compensation:
            self._forget_start(member)
            member.started = self.versions.keep()
        return self.speeds.steps(
            worker, self.sync_every, minimum=self.min_steps, use_dylu=self.dylu
        )

    # ---------------------------------------------------------------------------------- saving

    def ledger(self) -> dict[str, Any]:
        """Return the newest outcome of each worker, as JSON types."""
        return {
            name: {**vars(m.last), "num_applied": m.num_applied}
            for name, m in self.members.items()
            if m.last.seq
        }

    def load_ledger(self, ledger: dict[str, Any]) -> None:
        """Restore what ``ledger`` returned."""
        for name, row in ledger.items():
            last = Outcome(
                int(row["seq"]),
                int(row["version"]),
                int(row["staleness"]),
                str(row["refusal"]),
                str(row["reason"]),
            )
            self.members[name] = Member(last, int(row["num_applied"]))
