"""What can go wrong in an exchange between replicas."""

from __future__ import annotations

from collections.abc import Sequence


class SyncError(RuntimeError):
    """An exchange has no result; outer and local parameters are as before it.

    Where a message was lost, ``__cause__`` has what the transport said of it.

    Attributes:
        fragment: Index of the fragment, -1 when the exchange was of none.
        round: Outer round of that fragment, -1 likewise.
        stage: Where it failed: "header", a step of the exchange, or "vote".
        seconds: From the start of the exchange to the failure.
        missing: Replicas that did not report afterwards: dead, hanging, or cut off.
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
    ) -> None:
        super().__init__(message)
        self.fragment = fragment
        self.round = round
        self.stage = stage
        self.seconds = seconds
        self.missing = tuple(missing)

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


class NonFiniteError(SyncError):
    """Some replica's values were NaN, Inf or out of the wire's range; no replica applies the round.

    Attributes:
        replicas: Whose values; all when it is their mean that the wire cannot carry.
    """

    replicas: tuple[int, ...] = ()


ERRORS: dict[str, type[SyncError]] = {
    error.__name__: error for error in (SyncError, ReplicaMismatch, PeerLeft, NonFiniteError)
}


def _rebuild(
    cls: type[SyncError], args: tuple[object, ...], attributes: dict[str, object]
) -> SyncError:
    error = cls(*map(str, args))
    error.__dict__.update(attributes)
    return error
