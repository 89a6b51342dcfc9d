"""The workers of one replica; if one worker fails, all raise.

The workers take the same steps. So each block that sends or applies something ends with the same
few small collectives, even if rounds failed on one worker. Their messages are in host memory, so
that the host does not wait for a device. If a group carries no host memory, such as one with NCCL
alone, a gloo group is made beside it.

Workers that hold the same parameters (DDP, ZeRO-1/2) share the outer state of their replica. Worker
s of S owns the s-th range of each fragment's elements. It exchanges that range with worker s of the
other replicas, and keeps outer parameters and momentum only for that range. After an outer step it
sends the parameters of its range to the other workers of its replica.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import ERRORS, NonFiniteError, ReplicaMismatch, SyncError
from ..base.memory import memory_order
from ..exchange.membership import change, stores
from . import sharding
from .fragments import Fragment

# The ``stage`` of a worker's SyncError if another worker of its replica is lost.
WORKMATE_STAGE = "replica"


class ReplicaWorkers:
    """The workers of one replica, as a process group.

    Args:
        group: This worker and the replica's other workers; carries tensors on the device.
        timeout: Seconds; see ``WorkerMessages``.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._control = WorkerMessages(group, timeout)

    @classmethod
    def of(cls, params: Sequence[Tensor], timeout: float) -> ReplicaWorkers | None:
        """Return the workers that hold the shards of DTensors; None when this worker is alone."""
        group = sharding.workers_group(params, timeout)
        return None if group is None or group.size() == 1 else cls(group, timeout)

    @classmethod
    def with_same_parameters(cls, group: Any, timeout: float) -> ReplicaWorkers:
        """Return the workers of a process group, or of a one-dimensional DeviceMesh.

        Raises:
            TypeError: If ``group`` is neither, or this process is not in the group.
        """
        group = group.get_group() if hasattr(group, "get_group") else group
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "shard_group must be a ProcessGroup or a one-dimensional DeviceMesh that has this "
                f"worker as a member, got {group!r}"
            )
        return cls(group, timeout)

    @property
    def worker(self) -> str:
        """This worker's name among the replica's workers, see ``sharding.worker``."""
        return f"{self.rank}of{self.size}" if self.size > 1 else ""

    def close(self) -> None:
        """Close the group that was made for the messages of these workers; idempotent."""
        self._control.close()

    # ------------------------------------------------------------------------ at construction

    def check_alike(self, views: dict[str, Any]) -> None:
        """Compare model and settings of all workers.

        Raises:
            ReplicaMismatch: Naming the first one that differs.
        """
        everyone = self._control.gather(views)
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                if theirs[name] != value:
                    raise ReplicaMismatch(
                        f"{name} differs between the workers of a replica: {value!r} on its "
                        f"worker 0, {theirs[name]!r} on worker {rank}"
                    )

    def gather(self, value: Any) -> list[Any]:
        """Return every worker's value, in the order of the workers.

        Raises:
            SyncError: If another worker is gone.
        """
        with self._while_all_live():
            return self._control.gather(value)

    def counted(self, params: Sequence[Tensor]) -> list[bool]:
        """Return for each parameter whether this worker counts its elements in norms.

        It does if no worker of a lower rank holds the same elements.
        """
        keys = [sharding.held_part(param) for param in params]
        before = self._control.gather(keys)[: self.rank]
        return [all(keys[i] != theirs[i] for theirs in before) for i in range(len(params))]

    def least(self, number: int) -> int:
        """Return the least of all workers' numbers; a collective call."""
        with self._while_all_live():
            return -self._control.largest(-number)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether any worker has set it; a collective call."""
        with self._while_all_live():
            return self._control.any(flags)

    # ------------------------------------------------------------------------ the same parameters

    def share(self, fragment: Fragment, block_size: int) -> SharedFragment:
        """Return a fragment with only this worker's range of the elements.

        Raises:
            ValueError: If its parameters are sharded already.
        """
        if any(sharding.is_sharded(param) for param in fragment.params):
            raise ValueError(
                "shard_group is for workers that hold the same parameters, but these are DTensors: "
                "leave it away, their shards are exchanged as they are"
            )
        return SharedFragment(
            fragment.index,
            fragment.names,
            fragment.params,
            alignment=fragment.alignment,
            group=self,
            block_size=block_size,
        )

    def broadcast(self, tensors: Sequence[Tensor], owner: int) -> None:
        """Copy the 1-D tensors of worker ``owner`` to all, in place; one message for each dtype."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = same[0] if len(same) == 1 else torch.cat(same)
            dist.broadcast(flat, group=self.group, group_src=owner)
            if len(same) > 1 and owner != self.rank:
                torch._foreach_copy_(same, list(flat.split([t.numel() for t in same])))

    def hand_out(self, fragments: Sequence[Fragment]) -> None:
        """Send each worker's range of the parameters to the others; a collective call."""
        for fragment in fragments:
            if isinstance(fragment, SharedFragment):
                fragment.give()

    # --------------------------------------------------------------------------- failures

    @contextmanager
    def all_workers(self, fragments: Sequence[Fragment] = ()) -> Iterator[None]:
        """Run a block that all workers enter; if one worker fails, all raise.

        If several fail, the worst failure is raised: a NonFiniteError is the least, as training may
        go on after it.

        Args:
            fragments: Fragments whose parameters are written in the block.

        Raises:
            SyncError: The error of the worker that failed: its class and its attributes.
            RuntimeError: After ``close``.
        """
        if self._control.is_closed:
            raise RuntimeError("this DiLoCo is closed")
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            # The other workers wait for the parameters that were written before the failure.
            failure = error
        try:
            others = self._hear(failure)
            self.hand_out(fragments)
        except SyncError:
            raise
        except RuntimeError as error:
            raise self._gone(error) from (failure or error)
        if others is not None:
            raise others from failure
        if failure is not None:
            raise failure

    def _hear(self, failure: Exception | None) -> SyncError | None:
        """Tell the other workers of a failure; return the worst one if another worker has it."""
        own = _severity(failure)
        worst = self._control.largest(own * self.size + self.rank)
        severity, worker = divmod(worst, self.size)
        if severity == 0:
            return None
        report = self._control.broadcast(_report(failure), worker)
        return None if own == severity else _error_of(worker, *report)

    @contextmanager
    def _while_all_live(self) -> Iterator[None]:
        try:
            yield
        except SyncError:
            raise
        except RuntimeError as error:
            raise self._gone(error) from error

    def _gone(self, error: RuntimeError) -> SyncError:
        # The text of gloo without the source line before it and the advice after it.
        text = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).split(". ")[0].split("\n")[0]
        return SyncError(
            "another worker of this replica is gone, and the replica cannot go on without it: "
            f"{text or type(error).__name__}",
            stage=WORKMATE_STAGE,
        )


def _severity(failure: Exception | None) -> int:
    if failure is None:
        return 0
    return 1 if isinstance(failure, NonFiniteError) else 2


def _report(failure: Exception | None) -> tuple[str, str, dict[str, Any]]:
    """Return the class name, message and attributes of an error, as values to pickle."""
    if isinstance(failure, SyncError):
        return type(failure).__name__, str(failure), dict(vars(failure))
    return "SyncError", f"{type(failure).__name__}: {failure}", {}


def _error_of(worker: int, kind: str, message: str, attributes: dict[str, Any]) -> SyncError:
    error = ERRORS[kind](f"worker {worker} of this replica failed: {message}")
    vars(error).update(attributes)
    return error


# ----------------------------------------------------------------------------- shared outer state


@dataclass(frozen=True)
class SharedFragment(Fragment):
    """A fragment that the workers of a replica divide: each exchanges one range of its elements.

    A range begins at the start of a block; a range may be empty.
    """

    group: ReplicaWorkers = None  # type: ignore[assignment]
    block_size: int = 256

    def _needs_filler(self) -> bool:
        begin, end = self.range_of(self.group.rank)
        return begin == end and self.whole_elements > 0

    @property
    def whole_elements(self) -> int:
        gaps = sum(gap.numel() for gap in self.gaps.values())
        return gaps + sum(param.numel() for param in self.params)

    @property
    def placement(self) -> str:
        begin, end = self.range_of(self.group.rank)
        return f"elements {begin} to {end} of {self.whole_elements}"

    def range_of(self, worker: int) -> tuple[int, int]:
        """Return the first element that a worker owns, and the one after its last."""
        num_blocks = -(-self.whole_elements // self.block_size)
        share = -(-num_blocks // self.group.size) * self.block_size
        begin = min(worker * share, self.whole_elements)
        return begin, min(begin + share, self.whole_elements)

    def named(self) -> dict[str, Tensor]:
        return {name: piece for name, piece in self.pieces() if name}

    def pieces(self) -> list[tuple[str, Tensor]]:
        return self._cut(super().named(), self.group.rank)

    def local(self) -> list[Tensor]:
        return list(super().named().values())

    def _cut(self, tensors: Mapping[str, Tensor], worker: int) -> list[tuple[str, Tensor]]:
        """Return a worker's pieces of tensors like the parameters, 1-D, in memory order."""
        begin, end = self.range_of(worker)
        pieces, offset = [], 0
        for name, tensor in self._padded(tensors):
            first, last = max(begin - offset, 0), min(end - offset, tensor.numel())
            if first < last:
                pieces.append((name, memory_order(tensor)[first:last]))
            offset += tensor.numel()
        return pieces

    def give(self) -> None:
        """Give each worker's ranges of the parameters to all; a collective call."""
        whole = super().named()
        for worker in range(self.group.size):
            pieces = [piece for name, piece in self._cut(whole, worker) if name]
            self.group.broadcast(pieces, worker)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Gather all workers' ``flat``, and cut it like the parameters; a collective call."""
        whole = flat.new_empty(self.whole_elements)
        begin, end = self.range_of(self.group.rank)
        whole[begin:end].copy_(flat[: end - begin])
        for worker in range(self.group.size):
            begin, end = self.range_of(worker)
            if begin < end:
                self.group.broadcast([whole[begin:end]], worker)
        return super().views(whole)

    def load(self, flat: Tensor, saved: Mapping[str, Tensor]) -> None:
        laid_out = {
            name: torch.empty_like(param, dtype=flat.dtype).copy_(saved[name])
            for name, param in zip(self.names, self.params, strict=True)
        }
        offset = 0
        for _, piece in self._cut(laid_out, self.group.rank):
            flat[offset : offset + piece.numel()].copy_(piece)
            offset += piece.numel()

    # Each worker saves its own values (residuals) for its range alone: ``views`` would gather them
    # in a collective call, and other workers may have none.

    def own_views(self, flat: Tensor) -> dict[str, Tensor]:
        return {self._own_key: flat}

    def has_own(self, saved: Mapping[str, Any]) -> bool:
        return self._own_key in saved

    def check_own(self, saved: Any) -> None:
        key, count = self._own_key, self.num_elements
        if not isinstance(saved, Mapping) or key not in saved or saved[key].numel() != count:
            raise ValueError(
                f"the saved state lacks what worker {self.group.worker} of the replica had for "
                "itself: it was saved by another number of workers"
            )

    def load_own(self, flat: Tensor, saved: Mapping[str, Tensor]) -> None:
        flat.copy_(saved[self._own_key])

    @property
    def _own_key(self) -> str:
        return f"{self.index}@{self.group.rank}of{self.group.size}"


# --------------------------------------------------------------------------------------- messages


class WorkerMessages:
    """Small messages between the workers of a replica; every method is a collective call.

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
            store, rank, size = stores.store_of_group(group)
            self._group = change.connect_gloo(store, rank, size, 2 * timeout, "a replica's workers")

    def largest(self, value: int) -> int:
        """Return the largest of the workers' values."""
        values = torch.tensor([value], device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._group.allreduce([values], options).wait()
        return int(values)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether any worker has set it; all give the same number of flags."""
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
