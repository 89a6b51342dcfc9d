"""Rounds of the parts: send, wait, apply or skip, and write down what it cost."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from . import ops
from .errors import NonFiniteError, SyncError
from .exchange import Exchange, Header, Outcome, Pending, Repair, Slot
from .metrics import Recorder, SyncMetrics, overlap_fraction
from .parts import Flight, ParameterPart, Part
from .settings import Settings
from .trace import span

logger = logging.getLogger(__name__)

Kind = Literal["sync", "flush"]
Weight = float | Callable[[], float]


class Rounds:
    """Take the parts of one replica through their rounds on an exchange.

    Args:
        layout: Hash of names, shapes, fragments and schedule, equal on all replicas.
        weight: This replica's weight, or what returns it at each step that sends.
        norms: Measure each pseudo-gradient's norm.
    """

    def __init__(
        self,
        exchange: Exchange,
        parts: Sequence[Part],
        settings: Settings,
        recorder: Recorder,
        *,
        layout: int,
        weight: Weight,
        norms: bool,
        impl: str,
    ) -> None:
        self.exchange = exchange
        self.parts = parts
        self.settings = settings
        self.recorder = recorder
        self.layout = layout
        self.weight = weight
        self.norms = norms
        self.impl = impl
        self._has_warned_of_skips = False

    def current_weight(self) -> float:
        """Return this replica's weight for what is sent now; calls ``weight`` if it is callable.

        Raises:
            ValueError: If it is negative or not finite.
        """
        weight = float(self.weight() if callable(self.weight) else self.weight)
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight must be finite and not negative, got {weight}")
        return weight

    def send(
        self,
        part: Part,
        inner_step: int,
        num_skipped: int,
        weight: float,
        *,
        kind: Kind = "sync",
    ) -> None:
        """Encode a part and hand it to the engine; returns while it travels.

        Args:
            inner_step: Steps done.
            num_skipped: Those of them that left the weights unchanged.
            weight: This replica's, see ``current_weight``.
            kind: "sync" follows the overlap policy, "flush" is applied at once.

        Raises:
            SyncError: The group died before.
        """
        if part.slot is None:
            return
        header = Header(
            kind=kind,
            layout_hash=self.layout,
            fragment=part.index,
            round=part.round,
            sync_every=self.settings.sync_every,
            num_fragments=len(self.parts),
            weight=weight,
            outer_lr=self.lr(part),
            inner_step=inner_step - num_skipped,
        )
        norm = self._norm(part) if self.norms else math.nan
        with span("encode", part.index, part.round):
            pending = self._start(part, part.slot, header)
        delay = 0 if kind == "flush" else self.settings.overlap.delay(self.settings.sync_every)
        part.in_flight.append(Flight(pending, kind, inner_step, inner_step + delay, weight, norm))

    def _start(self, part: Part, slot: Slot, header: Header) -> Pending:
        return self.exchange.start(
            slot,
            outer=part.outer,
            params=part.tensors(),
            header=header,
            stochastic=self.settings.rounding == "stochastic",
            seed=self.settings.seed,
        )

    def receive(self, inner_step: int, *, everything: bool = False) -> None:
        """Wait for all exchanges due by now (or all), then apply those that were agreed on.

        A round that succeeded is applied by the other replicas, so it is applied here too when
        another one failed. An interrupted wait leaves all of them in flight, for the next call.

        Raises:
            SyncError: The first failure; nothing of that round was applied.
        """
        due = [
            (part, flight)
            for part in self.parts
            for flight in part.in_flight
            if everything or flight.apply_step <= inner_step
        ]
        arrivals = [self._wait(part, flight) for part, flight in due]
        first: Exception | None = None
        for (part, flight), (arrival, exposed_s) in zip(due, arrivals, strict=True):
            assert part.in_flight[0] is flight
            part.in_flight.popleft()
            try:
                if isinstance(arrival, SyncError):
                    self._fail(part, flight, inner_step, arrival)
                else:
                    self._succeed(part, flight, inner_step, arrival, exposed_s)
            except Exception as error:
                # What a callback or a warning filter raises must not cost another part its round.
                first = first or error
        if first is not None:
            raise first

    def _wait(self, part: Part, flight: Flight) -> tuple[Outcome | SyncError, float]:
        begin = time.perf_counter()
        arrival: Outcome | SyncError
        try:
            with span("wait", part.index, part.round):
                arrival = flight.pending.wait()
        except SyncError as error:
            arrival = error
        return arrival, time.perf_counter() - begin

    def _succeed(
        self, part: Part, flight: Flight, inner_step: int, outcome: Outcome, exposed_s: float
    ) -> None:
        begin = time.perf_counter()
        with span("outer_step", part.index, part.round):
            self._apply(part, flight, outcome)
        outer_step_s = time.perf_counter() - begin
        self._record(part, flight, inner_step, outcome, exposed_s, outer_step_s)
        self._warn_of_skipped_steps(outcome)

    def forget(self) -> None:
        """Drop what was in flight when the group died; ``repair`` brings what others applied."""
        for part in self.parts:
            part.in_flight.clear()

    def repair(self, repair: Repair, inner_step: int) -> None:
        """Apply a round that the other survivors have applied and this replica has not."""
        part = self.parts[repair.fragment]
        assert part.round == repair.round
        lr = self.lr(part)
        part.apply(repair.terms, repair.layout, lr=lr, alpha=0.0, impl=self.impl)
        part.last_sent = inner_step
        part.round += 1

    def lr(self, part: Part) -> float:
        """Return the outer learning rate of the part's next round."""
        if not isinstance(part, ParameterPart):
            return 0.0
        return self.settings.outer.lr_at(part.round, part.state)

    def _apply(self, part: Part, flight: Flight, outcome: Outcome) -> None:
        assert part.slot is not None
        part.apply(
            self.settings.overlap.terms(outcome),
            outcome.layout,
            lr=outcome.headers[0].outer_lr,
            alpha=0.0 if flight.kind == "flush" else self.settings.overlap.alpha,
            impl=self.impl,
        )
        part.slot.commit()
        part.last_sent = flight.sent_step
        part.round += 1

    def _fail(self, part: Part, flight: Flight, inner_step: int, error: SyncError) -> None:
        """Leave out a round that no replica applies; the next attempt has its number."""
        if not isinstance(error, NonFiniteError) or self.settings.on_nonfinite == "raise":
            raise error
        logger.warning("skipped: %s", error)
        metrics = SyncMetrics(
            round=part.round,
            fragment=part.index,
            inner_step=inner_step,
            pseudo_gradient_norm=flight.norm,
            weight=flight.weight,
            is_applied=False,
        )
        self.recorder.add(metrics)

    def _record(
        self,
        part: Part,
        flight: Flight,
        inner_step: int,
        outcome: Outcome,
        exposed_s: float,
        outer_step_s: float,
    ) -> None:
        seconds = outcome.seconds
        exchange_s = seconds.get("header", 0.0) + seconds.get("exchange", 0.0)
        metrics = SyncMetrics(
            round=part.round - 1,
            fragment=part.index,
            inner_step=inner_step,
            sent_bytes=outcome.sent_bytes,
            received_bytes=outcome.received_bytes,
            encode_s=seconds["encode"],
            exchange_s=exchange_s,
            reduce_s=seconds.get("reduce", 0.0),
            exposed_s=exposed_s,
            outer_step_s=outer_step_s,
            overlap_fraction=overlap_fraction(exchange_s, exposed_s),
            pseudo_gradient_norm=flight.norm,
            weight=flight.weight,
        )
        self.recorder.add(metrics)

    def _norm(self, part: Part) -> float:
        squared = torch.zeros(2, dtype=torch.float64)
        ops.norms(part.outer, part.tensors(), squared, impl=self.impl)
        return math.sqrt(squared[0].item())

    def _warn_of_skipped_steps(self, outcome: Outcome) -> None:
        steps = [header.inner_step for header in outcome.headers]
        if self._has_warned_of_skips or len(set(steps)) == 1:
            return
        self._has_warned_of_skips = True
        counts = dict(zip(self.exchange.members, steps, strict=True))
        warnings.warn(
            f"replicas have applied different numbers of inner steps ({counts} by replica): "
            "some of them skipped steps, as a GradScaler does after an overflow",
            stacklevel=2,
        )
