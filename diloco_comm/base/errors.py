"""Errors of an exchange between replicas, and words about replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

E = TypeVar("E", bound="SyncError")


class SyncError(RuntimeError):
    """An exchange has no result; outer and local parameters are as before the exchange.

    If a message was lost, ``__cause__`` is the transport's error.

    Attributes:
        fragment: Index of the fragment, -1 if the exchange had no fragment.
        round: Outer round of the fragment, -1 if the exchange had no fragment.
        stage: Stage that failed: "header", a step of the exchange, "vote"; or the work outside of
            an exchange, such as "connect" or "registry".
        seconds: Seconds from the start of the exchange to the failure.
        missing: Replicas that are dead, silent, cut off, or gone, as far as this replica knew when
            the error was made. Other members may know of other ones.
        survivors: Members that live and reach each other, as far as this replica knew when the
            error was made; empty if it did not know. ``change_group("survivors")`` forms a group of
            all living members, on which these agree.
        cuts: Pairs of replicas that live and cannot reach each other. With the stage "connect":
            the first replica of a pair does not let in the key of the second.
    """

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
        """Return an error of the same class and attributes with another message."""
        other = type(self)(message)
        vars(other).update(vars(self))
        other.__cause__ = self
        return other

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class ReplicaMismatch(SyncError):
    """The replicas' layouts or settings differ; the message names values and replicas.

    Attributes:
        ended: Replicas that wait in ``flush`` while the others have trained on, by less than a
            round, and have sent ``fragment``; empty for any other difference.
    """

    ended: tuple[int, ...] = ()


class PeerLeft(SyncError):
    """A replica left the group.

    Attributes:
        replicas: The replicas that left.
        inner_steps: The inner step at which each of these replicas left, -1 if unknown.
    """

    replicas: tuple[int, ...] = ()
    inner_steps: tuple[int, ...] = ()


class LeftBehind(SyncError):
    """The other replicas decided to go on without this replica, although this replica lives.

    This replica was stopped, slow, or cut off when the others formed their group. It may come back
    as a newcomer, with ``init="join"``, when the others call ``change_group`` with it.

    Attributes:
        went_on_in: The epoch of the others' group; None while that epoch has not begun.
    """

    def __init__(self, message: str, *, went_on_in: int | None = None, **known: Any) -> None:
        super().__init__(message, **known)
        self.went_on_in = went_on_in


class RunEnded(SyncError):
    """The replicas of an elastic run had taken all its steps before this process could join.

    A program that does not catch this error ends with status 0 and the message.
    """


class NonFiniteError(SyncError):
    """Some replica's values were NaN, Inf or out of the wire's range; no replica applies the round.

    The group still works, and training may go on with all replicas. To go on without such values,
    leave the replicas in ``missing`` out of the group.

    With ``nonfinite="reset"`` this error says that a replica was reset too often. That round is
    applied, and the error is raised after it.

    Attributes:
        replicas: The replicas with such values, as in ``missing``. If only the mean is out of the
            wire's range, ``replicas`` has all replicas and ``missing`` is empty.
    """

    replicas: tuple[int, ...] = ()


ERRORS: dict[str, type[SyncError]] = {
    error.__name__: error
    for error in (SyncError, ReplicaMismatch, PeerLeft, LeftBehind, RunEnded, NonFiniteError)
}


def _rebuild(
    cls: type[SyncError], args: tuple[object, ...], attributes: dict[str, object]
) -> SyncError:
    error = cls(*map(str, args))
    error.__dict__.update(attributes)
    return error


def named(replicas: Sequence[int]) -> str:
    """Name replicas by their numbers: "replica 1", or "replicas 0, 2".

    The engine words its sentences alike (``find_mismatch``).
    """
    numbers = ", ".join(map(str, replicas))
    return f"replica {numbers}" if len(replicas) == 1 else f"replicas {numbers}"


def difference(name: str, values: Mapping[str, Sequence[int]]) -> str:
    """Say that something is not equal on all replicas; ``values`` has the replicas of each value.

    Headers of exchanges are compared and named by the engine alone.
    """
    shown = "; ".join(f"{value} on {named(replicas)}" for value, replicas in values.items())
    return f"{name} differs between replicas: {shown}"


def way_on(last: SyncError | None) -> str:
    """Return advice for a program that called ``change_group("survivors")`` with nobody missing.

    Args:
        last: The error of the last exchange; None if it did not fail.
    """
    if last is None:
        return "train on without change_group, or give change_group the members themselves"
    kind = type(last).__name__
    cure = "train on without change_group"
    if isinstance(last, ReplicaMismatch):
        cure = "make that equal on all replicas, and train on without change_group"
    elif isinstance(last, NonFiniteError):
        cure += ", or give change_group the members whose values are good"
    return f"the last exchange ended with {kind} ({last}): {cure}"
