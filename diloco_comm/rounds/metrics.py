"""The costs of one outer step, and the sums over all outer steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

NUM_KEPT = 4096


@dataclass(frozen=True)
class SyncMetrics:
    """One exchange of one fragment.

    Attributes:
        round: Outer round of the fragment, from 0.
        fragment: Index of the fragment.
        inner_step: Inner steps done when the result was applied.
        sent_bytes, received_bytes: Payload and control bytes to and from the peers.
        encode_s: The training loop encoded the pseudo-gradient.
        exchange_s: From the first byte sent to the last one received.
        reduce_s: Decoding, averaging and encoding the own shard.
        exposed_s: The training loop waited for the result, doing nothing else.
        outer_step_s: The training loop decoded, stepped and wrote the parameters.
        overlap_fraction: Part of the exchange during which the training loop went on.
        pseudo_gradient_norm: L2 norm of this replica's pseudo-gradient; NaN unless
            ``norms=True``, since it takes one more pass over the parameters.
        weight: This replica's weight in the mean.
        is_applied: False when the round was voted down and skipped.
        is_reset: No wire carries this replica's values: the replica has taken the outer parameters,
            and its weight was 0.
        reset_replicas: All replicas that were reset in the round.
    """

    round: int
    fragment: int
    inner_step: int
    sent_bytes: int = 0
    received_bytes: int = 0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    reduce_s: float = 0.0
    exposed_s: float = 0.0
    outer_step_s: float = 0.0
    overlap_fraction: float = 0.0
    pseudo_gradient_norm: float = math.nan
    weight: float = 1.0
    is_applied: bool = True
    is_reset: bool = False
    reset_replicas: tuple[int, ...] = ()


@dataclass
class SyncTotals:
    """Sums over all exchanges since the start; in ``num_reset`` of them this replica was reset."""

    num_syncs: int = 0
    num_skipped: int = 0
    num_reset: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    reduce_s: float = 0.0
    exposed_s: float = 0.0
    outer_step_s: float = 0.0

    @property
    def overlap_fraction(self) -> float:
        """Part of all exchange time during which the training loop went on."""
        return overlap_fraction(self.exchange_s, self.exposed_s)

    def add(self, metrics: SyncMetrics) -> None:
        """Count one more exchange."""
        self.num_syncs += 1
        self.num_skipped += not metrics.is_applied
        self.num_reset += metrics.is_reset
        for field in fields(self):
            if hasattr(metrics, field.name):
                total = getattr(self, field.name) + getattr(metrics, field.name)
                setattr(self, field.name, total)


def overlap_fraction(exchange_s: float, exposed_s: float) -> float:
    """Return the hidden part of an exchange, between 0 and 1; 0 when nothing was exchanged."""
    if exchange_s <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - exposed_s / exchange_s))


class Recorder:
    """Keep the latest metrics and all sums, and tell the callbacks."""

    def __init__(self) -> None:
        self.latest: deque[SyncMetrics] = deque(maxlen=NUM_KEPT)
        self.totals = SyncTotals()
        self.callbacks: list[Callable[[SyncMetrics], None]] = []
        self._untold: deque[SyncMetrics] = deque()
        self._is_telling = False

    def add(self, metrics: SyncMetrics) -> None:
        """Take in one exchange, applied or skipped."""
        self.latest.append(metrics)
        self.totals.add(metrics)
        self._untold.append(metrics)

    @contextmanager
    def deferred_callbacks(self) -> Iterator[None]:
        """Call the callbacks after the block, when this replica's state is consistent again.

        The first error of a callback is raised when all callbacks have been called; if the block
        has failed too, the callback's error is the cause of the block's error. After an interrupt,
        the next such block calls the callbacks.
        """
        try:
            yield
        except Exception as failure:
            error = self._tell()
            if error is not None:
                raise failure from error
            raise
        error = self._tell()
        if error is not None:
            raise error

    def _tell(self) -> Exception | None:
        """Call the callbacks; an exchange that ends during a callback is told after it."""
        if self._is_telling:
            return None
        try:
            try:
                return self._call_all()
            finally:
                self._is_telling = False
        finally:
            # A Ctrl-C may come just before the same line in the inner ``finally``.
            self._is_telling = False

    def _call_all(self) -> Exception | None:
        # Set here: Python 3.11 runs no ``finally`` after a Ctrl-C at the line of an inner ``try``.
        self._is_telling = True
        first: Exception | None = None
        while self._untold:
            metrics = self._untold.popleft()
            for callback in list(self.callbacks):
                try:
                    callback(metrics)
                except Exception as error:
                    first = first or error
        return first

    def refuse_in_callback(self) -> None:
        """Raise RuntimeError inside a callback."""
        if self._is_telling:
            raise RuntimeError(
                "an on_sync callback cannot call what needs the other replicas, which may call "
                "theirs at another step: do it in the training loop"
            )
