"""The record of each round: its metrics, applied or skipped; and two warnings."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..base.checks import warn
from ..base.errors import named
from ..base.memory import CPU
from ..exchange.exchange import Exchange
from ..exchange.round import Mean
from ..ops.digests import DigestReading, digest_of
from .flights import RoundInFlight
from .metrics import Recorder, SyncMetrics, overlap_fraction
from .synced import SyncedPart

logger = logging.getLogger(__name__)
# Rounds of a fragment: a replica whose parameters do not move, or whose device is late, sends no
# digest.
_MOST_LOOKS = 4


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
        warn(
            f"replicas have applied different numbers of inner steps ({counts} by replica): "
            "some of them skipped steps, as a GradScaler does after an overflow"
        )


class SameData:
    """Warn once if the first rounds show that replicas train on the same data.

    Replicas begin with equal parameters. After some steps on data of their own they differ, in the
    fragments that the data reach. The headers of the first rounds carry digests of the local
    parameters, until all fragments are compared or one of them differs on all replicas. The host
    does not wait for the digest of parameters on a device: the fragment's next round carries that
    digest.

    Attributes:
        is_wanted: Whether there is still something to find out; set by ``begin``.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.is_wanted = exchange, False
        self._first_step = 0
        self._first: dict[int, int] = {}
        self._readings: dict[int, DigestReading] = {}
        # By fragment: rounds looked at, and the replicas with equal parameters.
        self._num_looks: dict[int, int] = {}
        self._alike: dict[int, set[int]] = {}

    def begin(self, parts: Sequence[SyncedPart], inner_step: int) -> None:
        """Take digests of the parameters with which training begins, or goes on after a load."""
        self.is_wanted, self._first_step = True, inner_step
        indices = [part.index for part in parts if part.has_outer]
        self._num_looks, self._alike = dict.fromkeys(indices, 0), {}
        self._readings = {}
        if self._exchange.size > 1:
            self._first = {p.index: digest_of(p.tensors()) for p in parts if p.has_outer}

    def digest(self, part: SyncedPart, inner_step: int, *, waits: bool) -> int:
        """Return a digest of a part's local parameters, below 2^32; 0 if it would tell nothing.

        Args:
            waits: Wait for the part's device.
        """
        # A first step may depend on the signs of gradients alone, as under Adam.
        is_early = inner_step < self._first_step + 2 or self._exchange.size == 1
        if not self.is_wanted or is_early or not part.has_outer:
            return 0
        now = DigestReading(part.tensors())
        reading: DigestReading | None = now
        if part.device != CPU and not waits:
            reading, self._readings[part.index] = self._readings.get(part.index), now
            if reading is None or not reading.is_done:
                return 0
        assert reading is not None
        digest = reading.digest()
        # Parameters that have not moved are equal on all replicas.
        return 0 if digest == self._first.get(part.index) else digest % (2**32 - 1) + 1

    def look(self, part: SyncedPart, flight: RoundInFlight) -> None:
        """Compare the digests of a round that was applied."""
        headers = flight.wait().headers
        # The round of a saved state has one header, and is of an earlier process.
        if not self.is_wanted or not part.has_outer or len(headers) != len(flight.members):
            return
        owners: dict[int, set[int]] = {}
        for replica, header in zip(flight.members, headers, strict=True):
            if header.digest:
                owners.setdefault(header.digest, set()).add(replica)
        self._num_looks[part.index] += 1
        if len(owners) == len(headers) or self._num_looks[part.index] == _MOST_LOOKS:
            self.is_wanted = False
        elif owners:
            self._alike[part.index] = max(owners.values(), key=len)
        is_known = all(n > 1 or i in self._alike for i, n in self._num_looks.items())
        alike = sorted(set.intersection(*self._alike.values())) if self._alike else []
        if self.is_wanted and is_known and len(alike) > 1:
            self.is_wanted = False
            who = "all replicas" if len(alike) == len(headers) else named(alike)
            warn(
                f"{who} had equal parameters at a send up to inner step {headers[0].inner_step}: "
                "they train on the same data, and learn no more than one replica; give each "
                "replica its own part of the data, see DiLoCo.shard",
                RuntimeWarning,
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
