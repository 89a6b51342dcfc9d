"""A server's decisions: which update is applied, when a worker starts its next round, how long.

The server (``server.py``) and the virtual clock (``virtual.py``) use the same code: times and
encoded payloads are arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .... import ops
from ....base.checks import MOST_INT32, integer
from ....ops.wire import Layout
from ...model.shared import SharedModel
from ...model.versions import KeptVersions
from ...protocol.garbage import find_garbage
from ...protocol.messages import UNCOUNTED
from ...protocol.payloads import Payload
from .scheduling import GracePeriod, Speeds


@dataclass(frozen=True)
class Update:
    """An update: what a worker has learned in a round, encoded.

    Attributes:
        worker: Name of the worker, the same in all of its updates.
        seq: Sequence number: 1 for the worker's first update, then one more each.
        version: Version of the parameters that the round started from.
        steps, seconds: Inner steps of the round and how long they took.
        payloads, layouts: For each fragment the encoded pseudo-gradient, and how it is laid out.
        garbage: What is wrong with the payloads, "" if nothing is; None: ``arrive`` still checks.
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
            was refused.
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
        last: Outcome of the worker's newest update.
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
        """Return the outcome of an update that was sent before, or None for a new update."""
        last = self.join(worker).last
        if seq > last.seq:
            return None
        self.counts.duplicates += 1
        if seq == last.seq:
            return last
        return Outcome(seq, self.model.version, -1)

    def refusal(self, worker: str, seq: int, version: int) -> Outcome | None:
        """Return why an update would be refused, before its payload is sent; None if it is not."""
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
        """Refuse an update whose payload was lost; the worker continues with its next update."""
        outcome = self._refused(seq, "disk", reason)
        self.finish(worker, outcome, now)
        return outcome

    def arrive(
        self, update: Update, now: float, release: Callable[[], None] = lambda: None
    ) -> Outcome:
        """Apply a complete update once, or refuse the update.

        Args:
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
            name: {
                "seq": m.last.seq,
                "version": m.last.version,
                "staleness": m.last.staleness,
                "refusal": m.last.refusal,
                "reason": m.last.reason,
                "num_applied": m.num_applied,
            }
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


def encode(values: Tensor, layout: Layout, *, base: Tensor | None = None, impl: str = "") -> Tensor:
    """Return values, or base - values, encoded as the layout says: uint8 [payload_bytes]."""
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    wire = (layout.wire.name, layout.wire.block_size)
    numbers = (0, layout.num_elements, layout.run_elements)
    ops.encode(base, [values], payload, *numbers, *wire, impl=impl)
    return payload
