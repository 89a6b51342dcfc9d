"""Rounds with values that cannot be encoded (NaN, Inf, too large): skips, resets and their limit.

Every replica sees the same votes and headers, so all replicas count the same. Counting begins when
the group is formed, and begins anew in a resumed run, in a changed group, and after the error at
the limit: the program that catches the error may have cured the replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from ..base.errors import NonFiniteError
from ..exchange.exchange import Exchange
from ..methods.settings import Settings
from ..replica.workers import ReplicaWorkers
from .part import RoundInFlight, SyncedFragment, SyncedPart


class Streaks:
    """Counts, for each fragment, the skipped rounds in a row and each replica's resets in a row."""

    def __init__(self, settings: Settings) -> None:
        self._limit, self._is_reset = settings.max_skipped, settings.on_nonfinite == "reset"
        self._skips: Counter[int] = Counter()
        self._resets: dict[int, Counter[int]] = {}
        self._unshared: dict[int, NonFiniteError] | None = None
        # Whether a round that is applied without a reset would end a count here.
        self.is_counting = False

    def forget(self) -> None:
        """Begin anew: the group has changed."""
        self._skips.clear()
        self._resets.clear()
        self.is_counting = False

    def skipped(self, part: SyncedPart, error: NonFiniteError, reset: Sequence[int]) -> None:
        """Count a round that no replica applies.

        Args:
            error: Why the round was voted down.
            reset: Replicas that were reset in the round.

        Raises:
            NonFiniteError: If the limit is passed, and no flush is under way.
        """
        self.is_counting = True
        self._count_resets(part, reset)
        self._skips[part.index] += 1
        if self._unshared is not None:
            self._unshared[part.index] = error
        elif self._limit is not None and self._skips[part.index] > self._limit:
            worse = error.saying(self._too_many_skips(part, error))
            self._skips[part.index] = 0
            raise worse

    def applied(self, part: SyncedPart, number: int, reset: Sequence[int]) -> None:
        """Count a round that was applied.

        Args:
            number: The number of the round.
            reset: As in ``skipped``.

        Raises:
            NonFiniteError: If a replica was reset once too often, and no flush is under way.
        """
        self._count_resets(part, reset)
        del self._skips[part.index]
        self.is_counting = bool(self._skips or any(self._resets.values()) or self._unshared)
        if self._unshared is not None:
            if not part.owed.is_lost:
                self._unshared.pop(part.index, None)
            return
        counts, limit = self._resets[part.index], self._limit
        tired = [replica for replica in reset if limit is not None and counts[replica] > limit]
        if tired:
            text = self._too_many_resets(part, number, tired)
            error = NonFiniteError(text, fragment=part.index, round=number, stage="reset")
            # The group can go on without these: at least one replica was not reset, as the round
            # was applied.
            error.replicas = error.missing = tuple(tired)
            for replica in tired:
                del counts[replica]
            raise error

    def _count_resets(self, part: SyncedPart, reset: Sequence[int]) -> None:
        before = self._resets.get(part.index, Counter())
        self._resets[part.index] = Counter({replica: before[replica] + 1 for replica in reset})

    def _too_many_skips(self, part: SyncedPart, error: NonFiniteError) -> str:
        cure = f"restore {_names(error.replicas)} from a checkpoint"
        if not self._is_reset:
            cure += ', or give DiLoCo nonfinite="reset", which takes the outer parameters there'
        before = self._before(self._skips[part.index] - 1)
        return f"{error}; this round is skipped, as {before}: {cure}"

    def _too_many_resets(self, part: SyncedPart, number: int, tired: Sequence[int]) -> str:
        names = _names(tired)
        before = self._before(min(self._resets[part.index][replica] for replica in tired) - 1)
        return (
            f"fragment {part.index}, round {number}: elements that are NaN, Inf or out of the "
            f"wire's range: on {names}, reset in this round, as {before}: clear the state of "
            f"the inner optimizer in on_reset=, or restore {names} from a checkpoint"
        )

    def _before(self, count: int) -> str:
        rounds = "was 1 round" if count == 1 else f"were {count} rounds in a row"
        return f"{rounds} before it (max_skipped={self._limit})"

    @contextmanager
    def flushing(self, members: Sequence[int]) -> Iterator[None]:
        """Run a flush: the limit does not count in the block, but any skip left at its end raises.

        Args:
            members: All replicas of the group.

        Raises:
            NonFiniteError: At the end, naming all fragments that were skipped and not applied
                later in the block.
        """
        self._unshared = {}
        try:
            yield
        finally:
            unshared, self._unshared = self._unshared, None
        if unshared:
            raise _unshared_error([unshared[index] for index in sorted(unshared)], members)


def _unshared_error(errors: Sequence[NonFiniteError], members: Sequence[int]) -> NonFiniteError:
    replicas = sorted({replica for error in errors for replica in error.replicas})
    whole = errors[0].saying(
        f"flush() could not share all that was trained: {'; '.join(map(str, errors))}; restore "
        f"{_names(replicas)} from a checkpoint, or repair the values and call flush() again",
    )
    whole.replicas = tuple(replicas)
    # ``missing`` proposes to go on without these replicas. There are none to leave out if the mean
    # was bad, or if all members had bad values.
    is_of_some = all(error.missing for error in errors) and len(replicas) < len(members)
    whole.missing = tuple(replicas) if is_of_some else ()
    return whole


def _names(replicas: Sequence[int]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"


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
    """``on_nonfinite="reset"``: a replica with bad values takes the outer parameters and goes on.

    Bad elements cannot be encoded: NaN, Inf or too large ones. A fragment is encoded whole, and its
    bad elements are counted, before any of it is sent. A replica with bad elements sends zeros of
    weight 0, with a flag in the header, and sets the local parameters of all its fragments to the
    outer ones: a bad value in one fragment would spread to all by the next inner step. The round is
    then applied as if that replica were not there. The replica has been reset even if the round
    fails.

    Averaged buffers have no outer values: bad buffers are overwritten with the mean of the other
    replicas, when that mean arrives.

    All workers of a replica decide the same, in one small collective in each of their blocks.

    Args:
        on_reset: Called with all exchanged parameters after these were set to the outer ones.

    Attributes:
        is_on: Whether resets are on: then rounds are held until ``ship``. If not, the methods do
            nothing.
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
        """Whether the replica's workers have yet to decide on a reset in this block."""
        return self.is_on and self._workers is not None and not self._is_decided

    def ship(self, sent: Sequence[RoundInFlight], leave_local: LeaveLocal) -> None:
        """Send the held rounds ``sent``; a round with bad values as zeros of weight 0.

        Args:
            leave_local: Called with each part, before its local parameters are overwritten, and
                with the round of that part among ``sent``, or None.

        Raises:
            Exception: The error of ``on_reset``; all rounds are sent and all parameters written.
            RuntimeError: If another worker of this replica is gone; all rounds are sent. The
                parameters are written if all workers had agreed on a reset before.
        """
        self.has_taken_outer = False
        if not self.is_on:
            return
        try:
            bad = self._agree([flight.part for flight in sent if _has_bad_values(flight)])
            for flight in sent:
                if bad[flight.part.index]:
                    _forgo(flight)
            is_bad = any(
                bad[part.index] for part in self._parts if isinstance(part, SyncedFragment)
            )
            if is_bad:
                self._take_outer({flight.part: flight for flight in sent}, leave_local)
        finally:
            for flight in sent:
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
        """Return for each part whether any worker of the replica has bad values in it.

        Args:
            own: The parts in which this worker has some.
        """
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


def _forgo(flight: RoundInFlight) -> None:
    assert flight.work is not None
    flight.is_reset, flight.weight = True, 0.0
    flight.work.forgo()
