"""What a server decides: which update is applied, and when a worker goes on for how long.

The same code serves sockets (``server.py``) and the virtual clock (``virtual.py``): times are
arguments, and payloads are what travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .... import ops
from ....ops.wire import Layout
from ...model.shared import SharedModel
from ...model.versions import KeptVersions
from ...protocol.garbage import find_garbage
from ...protocol.messages import UNCOUNTED
from ...protocol.payloads import Payload
from .scheduling import GracePeriod, Speeds


@dataclass(frozen=True)
class Update:
    """What a worker sends after a round.

    Attributes:
        worker: Its name, the same for as long as it lives.
        seq: 1 for its first update, then one more each.
        version: Of the parameters that it started from.
        steps, seconds: Inner steps of the round and how long they took.
        payloads, layouts: The encoded pseudo-gradient of each fragment.
        garbage: What is wrong with the payloads, "" if nothing is; None if nobody has looked.
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
    """What became of an update.

    Attributes:
        version: Of the shared model afterwards.
        staleness: Updates of others that came between; -1 if the update was refused unseen.
        refusal: "" if it was applied, else "stale", "non-finite", "disk", "out of order" or "from
            the future".
        reason: One sentence for the worker, if it was refused.
    """

    seq: int
    version: int
    staleness: int
    refusal: str = ""
    reason: str = ""


@dataclass
class Member:
    """What is known of a worker; it outlives its connections.

    Attributes:
        last: Outcome of its newest update.
        num_applied: Of its updates.
        is_training: It holds parameters and has not sent its update yet.
        started: Version that it trains from, if the rule wants to know.
        instance: A random number of the newest worker of this name, if it has one.
    """

    last: Outcome = field(default_factory=lambda: Outcome(0, 0, -1))
    num_applied: int = 0
    is_training: bool = False
    started: int | None = None
    instance: int = 0


@dataclass
class Counts:
    """What has happened, for the status."""

    staleness: Counter[int] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0


class Coordinator:
    """Apply updates once and in order, and say who trains next for how many steps.

    Args:
        model: The shared model.
        sync_every: Inner steps of a round (H); with DyLU those of the fastest worker.
        dylu: Give slower workers fewer steps, by their measured speeds.
        min_steps: Never fewer than this.
        grace: Seconds of the grace period.
        check: Look for values that are not finite.
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
        if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
            raise ValueError(f"sync_every must be an integer of at least 1, got {sync_every!r}")
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
        """Take a worker in, or back."""
        return self.members.setdefault(worker, Member())

    def leave(self, worker: str) -> None:
        """Wait no longer for a worker; what it sent stays, and it may come back."""
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
        """Return what became of an update that was sent before, or None for a new one."""
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
        """Refuse an update whose payload was lost on the way; the worker goes on with its next."""
        outcome = self._refused(seq, "disk", reason)
        self.finish(worker, outcome, now)
        return outcome

    def arrive(
        self, update: Update, now: float, release: Callable[[], None] = lambda: None
    ) -> Outcome:
        """Deal with a whole update: apply it once, or refuse it.

        Args:
            now: Seconds on any clock that never turns back.
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
        """Write down what became of a worker's update; the worker waits to go on."""
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
        """Return the workers that go on now and the inner steps of their rounds."""
        is_anyone_training = any(member.is_training for member in self.members.values())
        names = self.grace.release(now, is_anyone_training=is_anyone_training)
        return [(str(name), self.start(str(name))) for name in names]

    def start(self, worker: str) -> int:
        """Let one worker go on from the present version and return its inner steps."""
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
        """Return who sent what, as JSON types."""
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
        """Take over what ``ledger`` gave."""
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
