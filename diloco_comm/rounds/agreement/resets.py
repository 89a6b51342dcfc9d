"""``on_nonfinite="reset"``: a replica with values that no wire carries takes the outer parameters.

A fragment is encoded whole before any of it is sent, and its bad elements are counted. A replica
with bad elements sends zeros of weight 0, says so in the header, and sets the local parameters of
all its fragments to the outer ones: a bad value in one fragment would be in all fragments after the
next inner step. The round is then applied as if that replica were not there. The replica has been
reset even if the round fails.

Averaged buffers have no outer values: bad buffers are overwritten with the mean of the other
replicas, when that mean arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ...exchange.exchange import Exchange
from ...methods.settings import Settings
from ...replica.workers import ReplicaWorkers
from ..flights import RoundInFlight
from ..synced import SyncedFragment, SyncedPart

OnReset = Callable[[list[nn.Parameter]], None]
LeaveLocal = Callable[[SyncedFragment, RoundInFlight | None], None]


def check_on_reset(on_reset: OnReset | None, settings: Settings) -> None:
    """Check the argument ``on_reset``.

    Raises:
        TypeError: If it is not a function.
        ValueError: If it would never be called.
    """
    if on_reset is None:
        return
    if not callable(on_reset):
        raise TypeError(f"on_reset must be a function of a list of parameters, got {on_reset!r}")
    if settings.on_nonfinite != "reset":
        raise ValueError(
            f'on_reset is called with nonfinite="reset" alone, got {settings.on_nonfinite!r}'
        )


class Resets:
    """Check what a replica has encoded, before it is sent.

    The workers of one replica decide alike, in one small collective in each of their blocks.

    Args:
        on_reset: Called with all exchanged parameters when they have been written.

    Attributes:
        is_on: Rounds are held until ``ship``; otherwise all methods here do nothing.
        has_taken_outer: The last ``ship`` has set the local parameters to the outer ones.
    """

    def __init__(
        self,
        exchange: Exchange,
        parts: Sequence[SyncedPart],
        settings: Settings,
        impl: str,
        *,
        workers: ReplicaWorkers | None,
        on_reset: OnReset | None,
    ) -> None:
        self._exchange, self._parts, self._impl = exchange, parts, impl
        self._workers, self._on_reset = workers, on_reset
        self.is_on = settings.on_nonfinite == "reset"
        self.has_taken_outer = self._is_decided = False

    @property
    def is_undecided(self) -> bool:
        """Whether the workers of the replica have still to decide in this block."""
        return self.is_on and self._workers is not None and not self._is_decided

    def ship(
        self, sent: Sequence[tuple[SyncedPart, RoundInFlight]], leave_local: LeaveLocal
    ) -> None:
        """Send the rounds that are held, those with bad values as zeros of weight 0.

        Args:
            leave_local: Called with each part, before its local parameters are overwritten, and
                with the round of that part among ``sent``.

        Raises:
            Exception: The error of ``on_reset``; all rounds are sent and all parameters written.
            RuntimeError: Another worker of this replica is gone; all rounds are sent, and all
                parameters but those of that worker are written.
        """
        self.has_taken_outer = False
        if not self.is_on:
            return
        try:
            bad = self._agree([part for part, flight in sent if _has_bad_values(flight)])
            for part, flight in sent:
                if bad[part.index]:
                    _forgo(part, flight)
            is_bad = any(
                bad[part.index] for part in self._parts if isinstance(part, SyncedFragment)
            )
            if is_bad:
                self._take_outer(dict(sent), leave_local)
        finally:
            for _, flight in sent:
                assert flight.work is not None
                self._exchange.ship(flight.work)
        if is_bad and self._on_reset is not None:
            self._on_reset([p for part in self._parameter_parts() for p in part.fragment.params])

    def finish(self, leave_local: LeaveLocal) -> None:
        """End the workers' block; a worker that sent nothing takes part in the decision here."""
        if self.is_undecided:
            self.ship([], leave_local)
        self._is_decided = False

    def _agree(self, own: Sequence[SyncedPart]) -> list[bool]:
        """Say for each part whether any worker of the replica has bad values in it."""
        bad = [part in own for part in self._parts]
        self._is_decided = True
        return bad if self._workers is None else self._workers.any(bad)

    def _take_outer(self, sent: dict[SyncedPart, RoundInFlight], leave_local: LeaveLocal) -> None:
        self.has_taken_outer = True
        for part in self._parameter_parts():
            leave_local(part, sent.get(part))
            if part.num_elements:
                part.write_local(self._impl)
        if self._workers is not None:
            self._workers.hand_out([part.fragment for part in self._parameter_parts()])

    def _parameter_parts(self) -> list[SyncedFragment]:
        return [part for part in self._parts if isinstance(part, SyncedFragment)]


def _has_bad_values(flight: RoundInFlight) -> bool:
    assert flight.work is not None
    return flight.work.has_bad_values()


def _forgo(part: SyncedPart, flight: RoundInFlight) -> None:
    assert flight.work is not None
    flight.is_reset, flight.weight = True, 0.0
    flight.work.forgo()
