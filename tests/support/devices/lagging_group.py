"""A group whose collectives run on a stream of their own, as NCCL's do, on the stand-in device."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diloco_comm.base.memory import current

# The device may still be in one of them when its group is gone.
_CALLBACKS: list[Any] = []
_GIVEN_UP: list[dist.ProcessGroupGloo] = []


class StreamWork:
    """As of a group without a watchdog, whose ``wait`` would make the host wait: there is none."""

    def __init__(self, done: torch.Event, device: torch.device) -> None:
        self.done, self.device = done, device

    def is_completed(self) -> bool:
        return self.done.query()

    def synchronize(self) -> None:
        """Make the current stream wait; the host goes on."""
        torch.accelerator.current_stream(self.device).wait_event(self.done)


class UsersWork(StreamWork):
    """As of a group that a user has made."""

    wait = StreamWork.synchronize


class LaggingStream:
    """Collectives on a stream of their own; one that cannot be ends only by ``abort``."""

    calls: list[str]
    # The bytes of exchanges do not come, and all that is enqueued later goes on after an abort, as
    # kernels of NCCL do that find what they wait for within their first thousands of looks.
    is_cut = False
    work_type: type[StreamWork] = StreamWork

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.Stream(device)
        self.is_aborted = False
        self.calls = []

    def enqueue(
        self,
        name: str,
        function: Callable[[], None],
        leave: Callable[[], None] = lambda: None,
    ) -> StreamWork:
        """Enqueue a collective; ``leave`` writes what an aborted one leaves behind."""

        def run() -> None:
            if self.is_cut or not self.is_aborted:
                try:
                    function()
                    return
                except RuntimeError:
                    pass
            while not self.is_aborted:
                time.sleep(0.01)
            leave()

        self.calls.append(name)
        callback = ctypes.CFUNCTYPE(None)(run)
        _CALLBACKS.append(callback)
        before, after = torch.Event(self.device), torch.Event(self.device)
        before.record(torch.accelerator.current_stream(self.device))
        self.stream.wait_event(before)
        with current(self.stream):
            torch.ops.lagging.host_function(ctypes.cast(callback, ctypes.c_void_p).value)
        after.record(self.stream)
        return self.work_type(after, self.device)


class LaggingGroup(LaggingStream):
    """What ``nccl_group.make_group`` returns; gloo carries the bytes.

    As with NCCL, a collective that cannot be ends only by ``abort``, and the stream then goes on.
    An aborted all-gather has written the bytes of an earlier one into the rows of the others, or
    zeros: NCCL's LL protocols store whatever their buffers hold when they break off.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, timeout: float
    ) -> None:
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        self.rank, self.size = rank, size
        # The newest rows of each size that an all-gather has brought.
        self.stale: dict[int, Tensor] = {}
        super().__init__(device)

    def alltoall_base(
        self, out: Tensor, given: Tensor, out_splits: list[int], in_splits: list[int]
    ) -> StreamWork:
        there, here = torch.ops.lagging.on_host(out), torch.ops.lagging.on_host(given)

        def exchange() -> None:
            fresh = torch.empty_like(there)
            self.finish(self.gloo.alltoall_base(fresh, here, out_splits, in_splits))
            if self.is_cut:
                raise RuntimeError("cut")
            there.copy_(fresh)

        return self.enqueue("alltoall", exchange)

    def alltoall(self, outs: list[Tensor], given: list[Tensor]) -> StreamWork:
        there, here = ([torch.ops.lagging.on_host(t) for t in ts] for ts in (outs, given))
        sizes = [[t.numel() for t in ts] for ts in (there, here)]

        def exchange() -> None:
            fresh = torch.empty(sum(sizes[0]), dtype=torch.uint8)
            self.finish(self.gloo.alltoall_base(fresh, torch.cat(here), *sizes))
            if self.is_cut:
                raise RuntimeError("cut")
            for target, values in zip(there, fresh.split(sizes[0]), strict=True):
                target.copy_(values)

        return self.enqueue("alltoall", exchange)

    def _allgather_base(self, out: Tensor, given: Tensor) -> StreamWork:
        there, here = torch.ops.lagging.on_host(out), torch.ops.lagging.on_host(given)
        rows = list(there.view(self.size, -1).unbind())

        def gather() -> None:
            fresh = [torch.empty_like(row) for row in rows]
            self.finish(self.gloo.allgather([fresh], [here.clone()]))
            torch.stack(fresh, out=there.view(self.size, -1))
            self.stale[there.numel()] = there.clone()

        def leave() -> None:
            own = here.clone()
            there.copy_(self.stale.get(there.numel(), torch.zeros_like(there)))
            rows[self.rank].copy_(own.view(-1))

        return self.enqueue("allgather", gather, leave)

    def finish(self, work: dist.Work) -> None:
        while not work.is_completed():
            if self.is_aborted and not self.is_cut:
                raise RuntimeError("aborted")
            time.sleep(1e-4)
        work.wait()

    def abort(self) -> None:
        self.is_aborted = True
        # Its destructor would wait for what was given up.
        _GIVEN_UP.append(self.gloo)

    def shutdown(self) -> None:
        self.is_aborted = True


class WorkersOnDevice(dist.ProcessGroup):
    """A group of a replica's workers that serves the device alone, as NCCL's do."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.store, self.device = store, device
        limit = timedelta(seconds=60)
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("device", store), rank, size, limit)
        self.on_stream = LaggingStream(device)
        self.on_stream.work_type = UsersWork

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self.device.type)]

    def get_group_store(self) -> dist.Store:
        return self.store

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> StreamWork:
        there = _bytes_on_host(tensors[0])
        return self.on_stream.enqueue(
            "broadcast", lambda: self.gloo.broadcast([there], opts).wait()
        )

    def allgather(self, outs: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> Any:
        there, here = [_bytes_on_host(out) for out in outs[0]], _bytes_on_host(given[0])
        return self.on_stream.enqueue(
            "allgather", lambda: self.gloo.allgather([there], [here]).wait()
        )


def _bytes_on_host(tensor: Tensor) -> Tensor:
    # What is in host memory is none of such a group's: this raises for it.
    return torch.ops.lagging.on_host(tensor).view(-1).view(torch.uint8)
