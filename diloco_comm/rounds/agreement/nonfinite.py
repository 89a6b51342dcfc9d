"""How often rounds with values that no wire carries may follow each other.

Every replica sees the same votes and headers, so all replicas count alike. Counting begins when the
group is formed: a resumed run and a changed group begin anew, newcomers included. After the error
counting begins anew too: the program that catches the error may have cured the replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...base.errors import NonFiniteError
from ...methods.settings import Settings
from ..synced import SyncedPart


class Streaks:
    """Count for each fragment the skipped rounds in a row, and each replica's resets in a row."""

    def __init__(self, settings: Settings) -> None:
        self._limit, self._is_reset = settings.max_skipped, settings.on_nonfinite == "reset"
        self._skips: Counter[int] = Counter()
        self._resets: dict[int, Counter[int]] = {}
        self._unshared: dict[int, NonFiniteError] | None = None

    def forget(self) -> None:
        """Begin anew: the group has changed."""
        self._skips.clear()
        self._resets.clear()

    def skipped(self, part: SyncedPart, error: NonFiniteError, reset: Sequence[int]) -> None:
        """Count a round that no replica applies.

        Args:
            reset: Replicas that have taken the outer parameters in the round.

        Raises:
            NonFiniteError: The limit is passed, and no flush is under way.
        """
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
            number: Of the round.
            reset: As in ``skipped``.

        Raises:
            NonFiniteError: A replica was reset once too often, and no flush is under way.
        """
        self._count_resets(part, reset)
        self._skips[part.index] = 0
        if self._unshared is not None:
            if not part.owes:
                self._unshared.pop(part.index, None)
            return
        counts, limit = self._resets[part.index], self._limit
        tired = [replica for replica in reset if limit is not None and counts[replica] > limit]
        if tired:
            text = self._too_many_resets(part, number, tired)
            error = NonFiniteError(text, fragment=part.index, round=number, stage="reset")
            # Since the round was applied, at least one replica was not reset.
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
        """Run a flush, in which no number of skips raises, but at the end any fragment does.

        Args:
            members: All replicas of the group.

        Raises:
            NonFiniteError: Naming all fragments that were skipped and not applied after that.
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
    # A bad mean is no replica's fault, and a group cannot go on without all its members.
    is_of_some = all(error.missing for error in errors) and len(replicas) < len(members)
    whole.missing = tuple(replicas) if is_of_some else ()
    return whole


def _names(replicas: Sequence[int]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"
