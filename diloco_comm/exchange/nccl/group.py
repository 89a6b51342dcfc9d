"""An NCCL process group without torch's watchdog: its user ends collectives that fail."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Thread blocks of a collective: enough to keep a link busy, and few enough for the training.
MAX_CTAS = 4
GROUP_DESCRIPTION = "diloco_comm.replica"
# Torch's own timeout of a collective is so many times this package's, which then ends it first.
_TORCH_TIMEOUTS = 4
# Environment variables that ProcessGroupNCCL reads only in its constructor. By default it starts a
# watchdog thread that ends the process when a collective fails or is late. Even a watchdog that may
# only log asks the default group's monitor for a dump, which ends the process minutes later.
READ_BY_CONSTRUCTOR = {
    # No watchdog. ``Work.wait`` then makes the host wait; ``Work.synchronize`` does not.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    # If a version of torch starts a watchdog all the same, it only logs.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


def make_group(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: float
) -> dist.ProcessGroup:
    """Return an NCCL group, outside torch's registry, with few CTAs and a name for the profiler.

    Call ``synchronize`` on its works: ``wait`` would make the host wait. As there is no watchdog,
    the user finds out which collectives fail or do not end, and calls ``abort``.

    Args:
        store: The store at which the ranks meet.
        rank, size: Rank of this process, and number of ranks.
        device: The device of this process.
        timeout: Seconds after which the user aborts a collective.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_TORCH_TIMEOUTS * timeout)
    options.config.max_ctas = MAX_CTAS
    with environment(READ_BY_CONSTRUCTOR):
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
    return group_of(backend, store, rank, size, device)


def group_of(
    backend: dist.ProcessGroupNCCL, store: dist.Store, rank: int, size: int, device: torch.device
) -> dist.ProcessGroup:
    """Return a process group with this backend as its only one."""
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._set_group_desc(GROUP_DESCRIPTION)
    group.bound_device_id = device
    return group


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables during a block, and restore them after it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Call:
    """A call that a ``HelperThread`` makes.

    Attributes:
        result: The result of the call, valid if ``join`` has returned True and ``error`` is None.
        error: The error that the call has raised.
    """

    result: Any = None
    error: Exception | None = None

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function: Callable[[], Any] | None = function
        self._ended = threading.Event()

    def run(self, device: torch.device) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            # The current device is a setting of each thread.
            torch.get_device_module(device).set_device(device)
            self.result = function()
        except Exception as error:
            self.error = error
        del function
        self._ended.set()

    def join(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds at most for the call; return whether it has ended."""
        return self._ended.wait(timeout)


class HelperThread:
    """A thread for calls of NCCL, which may never return; the thread is abandoned then.

    The constructor starts the thread, not the first call: Python 3.12 starts no thread once the
    interpreter shuts down, and groups are closed as late as that.
    """

    def __init__(self, device: torch.device) -> None:
        calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        arguments = calls, device
        self._calls = calls
        self._thread = threading.Thread(
            target=_make_calls, args=arguments, name="diloco-nccl", daemon=True
        )
        self._thread.start()
        # Not at exit: groups that are closed then still need the thread.
        weakref.finalize(self, calls.put, None).atexit = False

    def begin(self, function: Callable[[], Any]) -> Call:
        """Let the thread call a function, after the functions given before; return the call.

        In a forked process the thread does not exist: there the call ends at once with an error.
        """
        call = Call(function)
        if self._thread.is_alive():
            self._calls.put(call)
        else:
            call.error = RuntimeError("the thread for calls of NCCL is not in this process")
            call._ended.set()
        return call


def _make_calls(calls: queue.SimpleQueue[Call | None], device: torch.device) -> None:
    while (call := calls.get()) is not None:
        call.run(device)
        del call
