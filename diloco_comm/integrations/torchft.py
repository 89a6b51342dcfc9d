"""The wires and the exchange of this package under the ``Manager`` of torchft, in one line::

    manager = Manager(pg=ProcessGroupDiLoCo(wire="int8"), use_async_quorum=False, ...)

torchft keeps everything else: its lighthouse, its quorums, its commits, its ``DiLoCo`` and
``LocalSGD``. A lost replica makes the round fail, torchft's manager discards that round, and the
next quorum makes a new group.
Source: torchft-nightly 2026.10.26, ``process_group.py`` (``ProcessGroupWrapper``), ``manager.py``
(``allreduce``, ``should_commit``) and ``local_sgd.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.futures import Finisher
from ..exchange.collective import AllReduceWork, all_reduce, shutdown
from ..ops.implementations import obstacle
from ..ops.wire import WireFormat, parse
from ..ops.wire_options import check_training

try:
    from torchft.process_group import ProcessGroupGloo
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"ProcessGroupDiLoCo needs torchft, and {error.name} is not installed: "
        "pip install torchft-nightly"
    ) from error

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OPERATORS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


class ProcessGroupDiLoCo(ProcessGroupGloo):
    """A process group of torchft whose ``allreduce`` sends tensors of floats encoded.

    ``allreduce`` with the operator SUM or AVG of one tensor in fp32, bf16 or fp16 goes through
    ``diloco_comm.all_reduce``. Everything else, and everything while the quorum has one replica,
    goes through torchft's gloo group unchanged. The result has equal bits on all replicas. With
    wire fp32 and two replicas the result has the bits of torchft's gloo group; with more replicas
    the order and the weights of the additions differ in the last bits.

    The tensor is written when the exchange has ended, and not at all after an error. A value that
    is not finite is an error on all replicas. The first error of a group stays in ``errored()``
    until the next quorum makes a new group.

    ``should_quantize=True`` of torchft does not go with this group: that option encodes to fp8 and
    sends the codes by collectives of bytes. Without ``use_bucketization=True``
    each parameter is an exchange of its own.

    Args:
        timeout: Timeout of one exchange, and of the making of a group.
        wire, block_size: Wire format, see ``diloco_comm.wire.WIRES``. The sparse wires need
            error feedback, and this group has none.

    Raises:
        ValueError: For a wire that is unknown, or sparse.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        wire: str | WireFormat = "int8",
        block_size: int | None = None,
    ) -> None:
        super().__init__(timeout)
        self.wire = parse(wire, block_size)
        check_training(self.wire, rounding="nearest", error_feedback=False)
        self._finisher = Finisher()
        # Guards ``_error``, which several threads set.
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Start to add or average one tensor over the replicas of this quorum."""
        operator = getattr(opts, "reduceOp", opts)
        group = self.parent
        if group.size() == 1 or not _is_encoded(tensors, operator):
            return super().allreduce(tensors, opts)
        (tensor,) = tensors
        try:
            work = all_reduce(tensor, group, self.wire, timeout=self._timeout, async_op=True)
        except Exception as error:
            self._keep(group, error)
            raise
        factor = group.size() if operator == dist.ReduceOp.SUM else 1
        end = self._end_of(work, group, tensors, factor)
        return _ExchangeWork(self._finisher.finish(end, tensor.device))

    def errored(self) -> Exception | None:
        """Return the first error of the present group, or None."""
        return self._error

    def abort(self, errored: bool = True) -> None:
        """End the exchanges under way with an error, and leave the group.

        ``Manager`` forms the next group itself, at the next quorum. Between the two any call fails.
        """
        self._close_exchange()
        super().abort(errored)

    def shutdown(self) -> None:
        """Take leave of the other replicas, and end the threads of this group; idempotent."""
        self._close_exchange()
        self._finisher.close()
        super().shutdown()

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        group = super()._create_pg(store, rank, world_size)
        with self._lock:
            self._error = None
        return group

    def _close_exchange(self) -> None:
        group = self._pg
        if group is not None:
            shutdown(group)

    def _end_of(
        self, work: AllReduceWork, group: dist.ProcessGroup, tensors: list[Tensor], factor: int
    ) -> Callable[[], list[Tensor]]:
        """Return the function that waits for an exchange and writes the sum or the mean."""

        def end() -> list[Tensor]:
            try:
                mean = work.wait()
            except Exception as error:
                self._keep(group, error)
                raise
            if factor != 1:
                # A sum is asked for: torchft itself divides by the number of replicas that take
                # part, and spare replicas add zeros.
                mean.mul_(factor)
            return tensors

        return end

    def _keep(self, group: dist.ProcessGroup, error: Exception) -> None:
        """Keep the first error, unless the next quorum has replaced the group meanwhile."""
        with self._lock:
            if self._error is None and self._pg in (group, None):
                self._error = error


class _ExchangeWork(dist.Work):
    """The work object of one exchange, whose future the thread of the finisher sets."""

    def __init__(self, future: torch.futures.Future[list[Tensor]]) -> None:
        super().__init__()
        self._future = future

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor is written; the exchange ends by itself at the group's timeout.

        Raises:
            SyncError: If the exchange failed.
        """
        self._future.wait()
        return True

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


def _is_encoded(tensors: list[Tensor], operator: Any) -> bool:
    """Whether an all-reduce of these tensors goes through the wire."""
    # On the left, since ``ReduceOp.SUM == options.reduceOp`` is False in torch 2.13.
    if len(tensors) != 1 or not any(operator == known for known in _OPERATORS):
        return False
    (tensor,) = tensors
    return tensor.dtype in _DTYPES and not obstacle(tensor.device)
