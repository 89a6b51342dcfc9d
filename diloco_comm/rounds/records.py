"""The record of each round: its metrics, applied or skipped; and one warning."""

from __future__ import annotations

import logging
import warnings

from ..exchange.exchange import Exchange
from ..exchange.work import Mean
from .flights import RoundInFlight
from .metrics import Recorder, SyncMetrics, overlap_fraction
from .synced import SyncedPart

logger = logging.getLogger(__name__)


class Records:
    """Write down the rounds of one replica."""

    def __init__(self, recorder: Recorder, exchange: Exchange) -> None:
        self._recorder, self._exchange = recorder, exchange
        self._has_warned_of_skips = False

    def skipped(
        self, part: SyncedPart, flight: RoundInFlight, inner_step: int, why: Exception
    ) -> None:
        """Record a round that no replica applies."""
        logger.warning("skipped: %s", why)
        metrics = SyncMetrics(
            round=flight.number,
            fragment=part.index,
            inner_step=inner_step,
            pseudo_gradient_norm=flight.measured_norm(),
            weight=flight.weight,
            is_applied=False,
            is_reset=flight.is_reset,
            reset_replicas=flight.reset_replicas(),
        )
        self._recorder.add(metrics)

    def applied(self, part: SyncedPart, flight: RoundInFlight, inner_step: int) -> None:
        """Record a round that was applied."""
        mean = flight.wait()
        # A round from a saved state was exchanged by another process: it took no seconds here.
        seconds = mean.seconds
        exchange_s = seconds.get("total", 0.0)
        metrics = SyncMetrics(
            round=flight.number,
            fragment=part.index,
            inner_step=inner_step,
            sent_bytes=mean.sent_bytes,
            received_bytes=mean.received_bytes,
            encode_s=seconds.get("encode", 0.0),
            exchange_s=exchange_s,
            reduce_s=seconds.get("reduce", 0.0),
            exposed_s=flight.exposed_s,
            outer_step_s=flight.outer_step_s,
            overlap_fraction=overlap_fraction(exchange_s, flight.exposed_s),
            pseudo_gradient_norm=flight.measured_norm(),
            weight=flight.weight,
            is_reset=flight.is_reset,
            reset_replicas=flight.reset_replicas(),
        )
        self._recorder.add(metrics)
        if metrics.reset_replicas:
            _log_reset(part, flight, metrics.reset_replicas)
        self._warn_of_skipped_steps(mean)

    def _warn_of_skipped_steps(self, mean: Mean) -> None:
        steps = [header.inner_step for header in mean.headers]
        if self._has_warned_of_skips or len(set(steps)) == 1:
            return
        self._has_warned_of_skips = True
        counts = dict(zip(self._exchange.members, steps, strict=True))
        warnings.warn(
            f"replicas have applied different numbers of inner steps ({counts} by replica): "
            "some of them skipped steps, as a GradScaler does after an overflow",
            stacklevel=2,
        )


def _log_reset(part: SyncedPart, flight: RoundInFlight, replicas: tuple[int, ...]) -> None:
    is_one = len(replicas) == 1
    logger.warning(
        "reset: fragment %d, round %d: replica%s %s had elements that are NaN, Inf or out of the "
        "wire's range, and %s; the others went on with their mean",
        part.index,
        flight.number,
        "" if is_one else "s",
        ", ".join(map(str, replicas)),
        f"took {'its' if is_one else 'their'} outer parameters"
        if part.has_outer
        else "took the mean of the others' buffers",
    )
