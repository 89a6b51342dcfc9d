"""What an error or an end says about a replica and its elastic group."""

from __future__ import annotations

from ..base.errors import LeftBehind, NonFiniteError, ReplicaMismatch, RunEnded, SyncError
from ..elastic.exits import Ended
from ..replica.workers import WORKMATE_STAGE

# Stages of the errors for which a replica waits in vain, by the kind of its driver's end.
_STAGES = {"waited": "quorum", "failed": "registry"}


def error_of(end: Ended) -> SyncError:
    """Return the error with which a replica ends that has not left by its own will."""
    if end.kind == "fenced":
        advice = "start this replica again, and it joins as a newcomer"
        return LeftBehind(f"{end.reason}: {advice}", stage="view")
    if end.kind == "refused":
        return ReplicaMismatch(end.reason, stage="view")
    if end.kind == "over":
        return RunEnded(end.reason, stage="view")
    return SyncError(end.reason, stage=_STAGES[end.kind])


def is_about_group(error: SyncError) -> bool:
    """Whether this replica can go on with other members after this error."""
    is_own = isinstance(error, ReplicaMismatch | NonFiniteError) or error.stage == WORKMATE_STAGE
    return not is_own


def lost_members(error: SyncError | None, replica: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the members to which ``replica`` has no way, and those that seem dead."""
    if error is None:
        return (), ()
    cuts = {one for pair in error.cuts if replica in pair for one in pair}
    return tuple(sorted(cuts - {replica})), tuple(error.missing)


def without_advice(error: SyncError) -> str:
    """Return the message without what it says of ``change_group``."""
    return str(error).split(": call change_group")[0]
