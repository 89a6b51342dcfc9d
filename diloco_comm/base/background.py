"""How the kernel schedules the threads that exchange in the background."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def batch_threads() -> Iterator[None]:
    """Make the threads that are created in this block batch threads (Linux: SCHED_BATCH).

    A batch thread that wakes up waits for its turn. An ordinary thread that wakes up takes the core
    at once from a thread that computes. On few cores an exchange in the background would so
    interrupt the training thread in the middle of an outer step. Both kinds of threads get the same
    share of a core.

    Nothing changes if the calling thread does not have the ordinary policy, or if the policy cannot
    be set.
    """
    # 0 is the calling thread. A new thread inherits the policy of its creator.
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
