"""Why the training of a process has ended, and the exit status that tells its launcher."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType

from ..base.errors import LeftBehind, ReplicaMismatch, SyncError

# All steps are taken.
DONE = 0
# Too few replicas, or no answer of the registry, for ``quorum_wait`` seconds.
UNAVAILABLE = 69
# The others went on without this replica, or a worker of it was lost: start the replica again.
RESTART = 75
# Model or settings are not those of the run: starting the replica again does not help.
MISFIT = 78
# The replica has left, as it was asked to.
LEFT = 143

# Stages of a SyncError for which waiting was in vain.
_WAITED = ("quorum", "registry")
LEFT_STAGE = "left"


@dataclass(frozen=True)
class Ended:
    """Why the driver takes no further part.

    Attributes:
        kind: "fenced", "refused", "drained" or "failed".
    """

    kind: str
    reason: str


def status_of(error: BaseException) -> int | None:
    """Return the exit status for an error that ended the training; None for any other error."""
    if not isinstance(error, SyncError):
        return None
    if isinstance(error, ReplicaMismatch):
        return MISFIT
    if isinstance(error, LeftBehind):
        return RESTART
    if error.stage == LEFT_STAGE:
        return LEFT
    return UNAVAILABLE if error.stage in _WAITED else RESTART


def end_with_status() -> None:
    """Let an error that nobody catches end this process with its exit status; idempotent."""
    before = sys.excepthook
    if getattr(before, "ends_with_status", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        status = status_of(error)
        if status is not None:
            sys.exit(status)

    hook.ends_with_status = True  # type: ignore[attr-defined]
    sys.excepthook = hook
