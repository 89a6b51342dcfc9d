"""How the kernel schedules the threads that exchange in the background."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def batch_threads() -> Iterator[None]:
    """Make the threads that are created in this block batch threads (Linux: SCHED_BATCH).

    A batch thread that wakes up waits for its turn; an ordinary one takes the core at once from a
    thread that computes. Where replicas have few cores, the training thread would otherwise lose
    its core in the middle of an outer step to an exchange that nobody waits for yet. Both kinds
    get the same share of a core.

    Nothing changes where the caller's own policy is not the ordinary one, or cannot be set.
    """
    # 0: the calling thread; a thread inherits the policy of its creator.
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    priority = os.sched_param(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, priority)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, priority)
