"""Small messages between the workers of a replica, which travel in host memory.

A device is not waited for: a group that serves no host memory, as one of NCCL alone, gets a gloo
group of its own beside it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange.membership import regroup, rendezvous


class WorkerMessages:
    """What the workers of a replica tell each other; every method is a collective call.

    Args:
        group: Of the workers. Its own gloo part carries the messages where it has one.
        timeout: Seconds that an exchange may take. Where the group has no such part, one is made,
            which is a collective call, and waits twice as long: a workmate may come to a message
            only after it has waited that long for a peer that hangs.

    Raises:
        SyncError: If that group could not be connected.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group: Any = group
        self.is_closed = False
        if all(device.type != "cpu" for device in group._device_types):
            store, rank, size = regroup.store_of_group(group)
            self._group = rendezvous.connect(store, rank, size, 2 * timeout, "a replica's workers")

    def largest(self, value: int) -> int:
        """Return the largest of the workers' values."""
        values = torch.tensor([value], device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._group.allreduce([values], options).wait()
        return int(values)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Say of each flag whether it is set on any worker; all give as many."""
        values = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._group.allreduce([values], options).wait()
        return [bool(value) for value in values]

    def gather(self, value: Any) -> list[Any]:
        """Return every worker's value, in their order."""
        own = _as_bytes(value)
        num_bytes = self.largest(own.numel())
        everyone = torch.empty(self.size, num_bytes, dtype=torch.uint8, device="cpu")
        padded = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        padded[: own.numel()] = own
        self._group.allgather([list(everyone.unbind())], [padded]).wait()
        # What follows a pickled value is not read.
        return [pickle.loads(received.numpy().tobytes()) for received in everyone]

    def broadcast(self, value: Any, source: int) -> Any:
        """Return the value of one worker."""
        own = _as_bytes(value)
        num_bytes = self.largest(own.numel() if self.rank == source else 0)
        room = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        given = own if self.rank == source else room
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([given], options).wait()
        return pickle.loads(given.numpy().tobytes())

    def close(self) -> None:
        """Let go of the group; nothing may be sent any more."""
        self._group, self.is_closed = None, True


def _as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
