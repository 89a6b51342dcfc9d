"""A group over NCCL whose user, and not torch, ends a collective that fails."""

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

# Enough to keep a link busy; the rest of the device stays with the training.
MAX_CTAS = 4
GROUP_DESCRIPTION = "diloco_comm.replica"
# Torch's own limit of a collective, in limits of this package, which always ends first.
_TORCH_TIMEOUTS = 4
# What ProcessGroupNCCL reads while it is constructed, and never again. By default it starts a
# watchdog thread that ends the process when a collective fails or is late; also one that may only
# log asks the default group's monitor for a dump, which ends the process minutes later.
READ_BY_CONSTRUCTOR = {
    # No watchdog. ``Work.wait`` then makes the host wait; ``Work.synchronize`` does not.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    # A torch that starts one all the same lets it log, and end nothing.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


def make_group(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: float
) -> dist.ProcessGroup:
    """Build an NCCL group from a store alone, with few CTAs, named for the profiler.

    Wait for its works by ``synchronize``: there is no watchdog, and ``wait`` would make the host
    wait. The user finds out what fails or does not end, and calls ``abort``.

    Args:
        timeout: Seconds after which the user gives a collective up.
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
    """Make a group of which the backend is the only one."""
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._set_group_desc(GROUP_DESCRIPTION)
    group.bound_device_id = device
    return group


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and put them back as they were."""
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
        result: What the call has returned, once ``join`` returned True and ``error`` is None.
        error: What the call has raised.
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
            # A new thread begins on the first device.
            torch.get_device_module(device).set_device(device)
            self.result = function()
        except Exception as error:
            self.error = error
        del function
        self._ended.set()

    def join(self, timeout: float) -> bool:
        """Wait for the call; return whether the call has ended."""
        return self._ended.wait(timeout)


class HelperThread:
    """A thread for calls of NCCL that may take for ever, which is left behind in such a call.

    The thread starts here and not with a call: Python 3.12 starts no thread once the interpreter
    ends, when groups are closed too.
    """

    def __init__(self, device: torch.device) -> None:
        calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        arguments = calls, device
        self._calls = calls
        self._thread = threading.Thread(
            target=_make_calls, args=arguments, name="diloco-nccl", daemon=True
        )
        self._thread.start()
        # At exit the thread is still needed, and ends with the process.
        weakref.finalize(self, calls.put, None).atexit = False

    def begin(self, function: Callable[[], Any]) -> Call:
        """Have a function called after the functions that were given before.

        A process that was forked lacks the thread: there nothing is called, which is an error.
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
