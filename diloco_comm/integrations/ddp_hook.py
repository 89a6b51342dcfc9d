"""Quantised gradients for ``DistributedDataParallel``, at every step::

    model = DistributedDataParallel(model)
    model.register_comm_hook(QuantizedAllReduce(wire="int8"), quantized_allreduce_hook)

For workers that are close enough to average at every step, but not close enough for fp32. The
exchange of a bucket runs while the backward pass of the layers before it goes on.
"""

# DDP compares the hook's annotations with the classes: they must not be strings here.

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.futures import Finisher, for_native
from ..exchange.collective import AllReduceWork, all_reduce
from ..exchange.exchange import DEFAULT_TIMEOUT
from ..ops.wire import WireFormat, parse


class QuantizedAllReduce:
    """What the hook keeps from step to step.

    Args:
        group: That of the model; default: the world.
        wire, block_size: What travels, see ``diloco_comm.ops.wire.WIRES``.
        error_feedback: Add what the last encoding lost to the next one, for each bucket; worth it
            at 4 bits. One more pass over the gradients, and as much memory as they take.
        timeout: Of one exchange.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        wire: str | WireFormat = "int8",
        block_size: int | None = None,
        error_feedback: bool = False,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self.group = group
        self.wire = parse(wire, block_size)
        self.error_feedback = error_feedback
        self.timeout = timeout
        self.finisher = Finisher()
        # By the parameters of a bucket: DDP makes other buckets after the first step.
        self._residuals: dict[tuple[int, ...], Tensor] = {}

    def start(self, bucket: dist.GradBucket) -> AllReduceWork:
        """Begin to average a bucket, with what was lost of it the last time."""
        gradients = bucket.buffer()
        if not self.error_feedback:
            return self._all_reduce(gradients)
        key = tuple(id(param) for param in bucket.parameters())
        if bucket.index() == 0:
            self._forget_old_buckets(key)
        residual = self._residuals.get(key)
        if residual is None:
            residual = self._residuals[key] = torch.zeros_like(gradients)
        gradients.add_(residual)
        work = self._all_reduce(gradients)
        # In the residual's memory: what was sent, then what was not. A value that is not finite
        # makes the exchange fail, and must not stay.
        torch.sub(gradients, work.sent(residual), out=residual)
        torch.nan_to_num_(residual, 0.0, 0.0, 0.0)
        return work

    def _all_reduce(self, gradients: Tensor) -> AllReduceWork:
        return all_reduce(gradients, self.group, self.wire, timeout=self.timeout, async_op=True)

    def _forget_old_buckets(self, first: tuple[int, ...]) -> None:
        if self._residuals and first not in self._residuals:
            self._residuals.clear()


def quantized_allreduce_hook(
    state: QuantizedAllReduce, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the group, quantised; bit-identical on all ranks.

    A failed exchange (a dead peer, values that are not finite) is an error of ``backward()``.
    """
    work = state.start(bucket)
    return for_native(state.finisher.finish(work.wait))
