"""What can go wrong in an exchange between replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

E = TypeVar("E", bound="SyncError")


class SyncError(RuntimeError):
    """An exchange has no result; outer and local parameters are as before it.

    Where a message was lost, ``__cause__`` has what the transport said of it.

    Attributes:
        fragment: Index of the fragment, -1 when the exchange was of none.
        round: Outer round of that fragment, -1 likewise.
        stage: Where it failed: "header", a step of the exchange, or "vote".
        seconds: From the start of the exchange to the failure.
        missing: Replicas that the others go on without: dead, hanging, cut off, or gone. Decided
            once, on the store, and the same on all members. Where the store does not answer, those
            alone whose connection is lost.
        survivors: Members that live and reach each other, the same on all; empty where nobody could
            decide. ``change_group("survivors")`` goes on with them.
        cuts: Pairs of replicas that live and cannot reach each other.
    """

    decision = ""  # the name of what a meeting decided, where one could not form a group

    def __init__(
        self,
        message: str,
        *,
        fragment: int = -1,
        round: int = -1,
        stage: str = "",
        seconds: float = 0.0,
        missing: Sequence[int] = (),
        survivors: Sequence[int] = (),
        cuts: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(message)
        self.fragment = fragment
        self.round = round
        self.stage = stage
        self.seconds = seconds
        self.missing = tuple(missing)
        self.survivors = tuple(survivors)
        self.cuts = tuple((a, b) for a, b in cuts)

    def saying(self: E, message: str) -> E:
        """Return an error of the same kind, with the same attributes, that says something else."""
        other = type(self)(message)
        vars(other).update(vars(self))
        other.__cause__ = self
        return other

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class ReplicaMismatch(SyncError):
    """The replicas do not agree on what they exchange; the message names values and replicas."""


class PeerLeft(SyncError):
    """A replica closed its side.

    Attributes:
        replicas: Who left.
        inner_steps: The inner step at which each of them did, -1 when unknown.
    """

    replicas: tuple[int, ...] = ()
    inner_steps: tuple[int, ...] = ()


class LeftBehind(SyncError):
    """The others have decided to go on without this replica, which lives all the same.

    It was stopped, slow, or cut off when they asked. It may come back as a newcomer, with
    ``init="join"``, when they call ``change_group`` with it.

    Attributes:
        went_on_in: The epoch in which they went on; None while they have not begun it.
    """

    def __init__(self, message: str, *, went_on_in: int | None = None, **known: Any) -> None:
        super().__init__(message, **known)
        self.went_on_in = went_on_in


class NonFiniteError(SyncError):
    """Some replica's values were NaN, Inf or out of the wire's range; no replica applies the round.

    The group lives, and training may go on with all replicas; ``missing`` is who to leave out of a
    group that shall go on without such values.

    Attributes:
        replicas: Whose values, as in ``missing``; all, and nobody is missing, when it is their mean
            that the wire cannot carry. Where a replica was reset once too often the round is
            applied, and the error comes after it.
    """

    replicas: tuple[int, ...] = ()


ERRORS: dict[str, type[SyncError]] = {
    error.__name__: error
    for error in (SyncError, ReplicaMismatch, PeerLeft, LeftBehind, NonFiniteError)
}


def _rebuild(
    cls: type[SyncError], args: tuple[object, ...], attributes: dict[str, object]
) -> SyncError:
    error = cls(*map(str, args))
    error.__dict__.update(attributes)
    return error
