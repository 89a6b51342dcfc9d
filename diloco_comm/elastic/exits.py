"""How a process ends: the exit status that tells its launcher why; SIGTERM asks it to leave."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType

from ..base.errors import LeftBehind, ReplicaMismatch, RunEnded, SyncError
from .state_folder import StateFolder

# The exit statuses. All steps of the run are taken, by this process or before it came.
DONE = 0
# Too few replicas, or no answer of the registry, for ``quorum_wait`` seconds.
UNAVAILABLE = 69
# The others went on without this replica, or another SyncError ended it, as when one of its workers
# is lost: start the replica again.
RESTART = 75
# Model, settings, registry or key do not fit the run: starting the replica again does not help.
MISFIT = 78
# The replica has left, as it was asked to.
LEFT = 143

# A SyncError of these stages says that this process has waited in vain.
_WAITED = ("quorum", "registry")
LEFT_STAGE = "left"
# For so many seconds a worker that gets SIGTERM waits for the launcher's wish to leave, a file in
# the state folder.
_LAUNCHER_S = 2.0


@dataclass(frozen=True)
class Ended:
    """Why this process takes no further part in its group.

    Attributes:
        kind: "fenced", "refused", "over", "drained" or "failed".
        reason: One sentence for people.
    """

    kind: str
    reason: str


def status_of(error: BaseException) -> int | None:
    """Return the exit status for an error that ended the training; None for any other error."""
    if not isinstance(error, SyncError):
        return None
    if isinstance(error, RunEnded):
        return DONE
    if isinstance(error, ReplicaMismatch):
        return MISFIT
    if isinstance(error, LeftBehind):
        return RESTART
    if error.stage == LEFT_STAGE:
        return LEFT
    return UNAVAILABLE if error.stage in _WAITED else RESTART


def end_with_status(*, has_launcher: bool = True) -> None:
    """Let an error that nobody catches end this process with its exit status; idempotent.

    Args:
        has_launcher: Without a launcher only the end of the run and a wish to leave have a status.
    """
    before = sys.excepthook
    if getattr(before, "ends_with_status", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        status = status_of(error)
        if status in (DONE, LEFT):
            # The run has ended, or a signal asked for this end: that is no failure.
            print(f"diloco_comm: {error}", file=sys.stderr)
            sys.exit(status)
        before(kind, error, traceback)
        _advise(error)
        if status is not None and has_launcher:
            sys.exit(status)

    hook.ends_with_status = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _advise(error: BaseException | None) -> None:
    """Print once why ``error`` may have ended a program that SIGTERM had asked to leave."""
    global _is_advised
    if error is None or not _is_asked or _is_advised or status_of(error) is not None:
        return
    _is_advised = True
    print(
        "diloco_comm: SIGTERM asked this replica to leave, and its program failed before "
        "the boundary: if the signal has ended a worker of a DataLoader, let SIGTERM reach "
        "the launcher alone (systemd: KillMode=mixed)",
        file=sys.stderr,
    )


def _advise_at_end(earlier: BaseException | None) -> None:
    """Print the advice of ``_advise`` at exit, if ``sys.excepthook`` did not come to print it.

    Torch's handler of SIGCHLD may have interrupted that hook.

    Args:
        earlier: ``sys.last_value`` when the replica was asked to leave.
    """
    error = getattr(sys, "last_value", None)
    if error is not earlier:
        _advise(error)


# ------------------------------------------------------------------------------------- SIGTERM

# The groups of this process that leave at SIGTERM.
_heeding: weakref.WeakSet[object] = weakref.WeakSet()
_is_asked = _is_advised = False


def is_asked_to_leave() -> bool:
    """Whether a SIGTERM has asked this process to leave its group."""
    return _is_asked


def heed_sigterm(group: object, folder: StateFolder | None, *, has_mates: bool) -> None:
    """Let the first SIGTERM ask this replica to leave, and the second one end the process.

    If the program has a handler of its own, that handler stays. In a thread other than the main
    one, this function does nothing.

    Args:
        group: The group that leaves at the signal, until ``forget_sigterm(group)``.
        folder: The launcher's state folder; None without a launcher.
        has_mates: The replica has further workers. torchrun sends them SIGTERM when one has
            failed, so the signal counts only if the launcher's wish is in ``folder``; without a
            launcher this function does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or (has_mates and folder is None):
        return
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        _handle_sigterm(folder, has_mates=has_mates)
    _heeding.add(group)


def forget_sigterm(group: object) -> None:
    """Let SIGTERM ask this group no more to leave; idempotent."""
    _heeding.discard(group)


def _handle_sigterm(folder: StateFolder | None, *, has_mates: bool) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        global _is_asked
        is_ours = len(_heeding) > 0 and not _is_asked
        if is_ours and has_mates and folder is not None:
            is_ours = _launcher_asks(folder)
        if not is_ours:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        _is_asked = True
        atexit.register(_advise_at_end, getattr(sys, "last_value", None))
        if folder is not None:
            # The launcher shall see the wish even if this process dies first.
            with suppress(OSError):
                folder.ask_to_leave()

    handle.asks_to_leave = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, handle)


def _is_handled() -> bool:
    return hasattr(signal.getsignal(signal.SIGTERM), "asks_to_leave")


def _launcher_asks(folder: StateFolder) -> bool:
    until = time.monotonic() + _LAUNCHER_S
    while time.monotonic() < until and not folder.is_asked_to_leave:
        time.sleep(0.05)
    return folder.is_asked_to_leave


# ---------------------------------------------------------------------------- forked children

# For each thread that forks: the signals that it had blocked before.
_blocked = threading.local()


def _before_fork() -> None:
    """Block SIGTERM during a fork, so that the signal reaches the child once it can end by it.

    Python forgets the signals that a child, such as a worker of a DataLoader, gets before the fork
    has returned.
    """
    if _is_handled():
        _blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def _after_fork() -> None:
    before = vars(_blocked).pop("before", None)
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_fork_in_child() -> None:
    """Give SIGTERM its default effect in a forked child, which is no replica."""
    global _is_asked
    _is_asked = False
    _heeding.clear()
    if _is_handled():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
