"""Small messages between the workers of a replica; they travel in host memory.

The host does not wait for a device: beside a group without host memory, as one of NCCL alone, a
gloo group is made.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange.membership import regroup
from ..exchange.membership.meeting import rendezvous


class WorkerMessages:
    """Messages that the workers of a replica send each other; every method is a collective call.

    Args:
        group: The workers. The gloo part of the group carries the messages, if the group has one.
        timeout: Seconds that an exchange may take. For a group without a gloo part one is made, in
            a collective call. The gloo group made here waits twice as long, because a worker may
            first wait for the whole timeout for a peer that hangs.

    Raises:
        SyncError: If the gloo group could not be connected.
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
        """Say for each flag whether any worker has set the flag; all workers give as many flags."""
        values = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._group.allreduce([values], options).wait()
        return [bool(value) for value in values]

    def gather(self, value: Any) -> list[Any]:
        """Return every worker's value, in the order of the workers."""
        own = _as_bytes(value)
        num_bytes = self.largest(own.numel())
        everyone = torch.empty(self.size, num_bytes, dtype=torch.uint8, device="cpu")
        padded = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        padded[: own.numel()] = own
        self._group.allgather([list(everyone.unbind())], [padded]).wait()
        # ``loads`` does not read the zeros behind a pickled value.
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
        """Forget the group; no message may be sent any more."""
        self._group, self.is_closed = None, True


def _as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
