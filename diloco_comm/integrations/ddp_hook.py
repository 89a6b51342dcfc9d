"""A hook of ``DistributedDataParallel`` that sends gradients encoded, at every step::

    model = DistributedDataParallel(model)
    model.register_comm_hook(QuantizedAllReduce(wire="int8"), quantized_allreduce_hook)

For links that are fast enough for an average at every step, but too slow for fp32. The exchange of
a bucket overlaps with the backward pass of earlier layers.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes.

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.futures import Finisher, for_native
from ..exchange.collective import AllReduceWork, all_reduce
from ..exchange.exchange import DEFAULT_TIMEOUT
from ..ops.wire import WireFormat, parse
from ..ops.wire_options import check_training


class QuantizedAllReduce:
    """The state of the hook.

    Args:
        group: Process group of the model; the default is the world.
        wire, block_size: Wire format, see ``diloco_comm.ops.wire.WIRES``.
        error_feedback: Add the rounding errors of a bucket's encoding to the next encoding; useful
            at 4 bits, and needed by the sparse wires. Costs one more pass over the gradients, and
            as much memory as the gradients.
        timeout: Timeout of one exchange, in seconds or as a timedelta.
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
        if error_feedback and self.wire.is_rotated:
            raise ValueError(
                f"error_feedback=True does not go with wire {self.wire.name!r} in this hook, which "
                "takes the scale for encodings without it: leave it out, or take wire 'int4'"
            )
        check_training(self.wire, rounding="nearest", error_feedback=error_feedback)
        self.error_feedback = error_feedback
        self.timeout = timeout
        self.finisher = Finisher()
        # Keys are the parameters of a bucket: DDP makes new buckets after the first step.
        self._residuals: dict[tuple[int, ...], Tensor] = {}

    def start(self, bucket: dist.GradBucket) -> AllReduceWork:
        """Start to average a bucket, with the residual of the bucket's last encoding."""
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
        # ``work.sent`` decodes the payload into the residual's memory; the difference replaces it.
        # A value that is not finite makes the exchange fail, and must not stay in the residual.
        torch.sub(gradients, work.sent(residual), out=residual)
        torch.nan_to_num_(residual, 0.0, 0.0, 0.0)
        if self.wire.feedback_decay != 1.0:
            residual.mul_(self.wire.feedback_decay)
        return work

    def _all_reduce(self, gradients: Tensor) -> AllReduceWork:
        return all_reduce(gradients, self.group, self.wire, timeout=self.timeout, async_op=True)

    def _forget_old_buckets(self, first: tuple[int, ...]) -> None:
        if self._residuals and first not in self._residuals:
            self._residuals.clear()


def quantized_allreduce_hook(
    state: QuantizedAllReduce, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the group; the result is bit-identical on all ranks.

    If the exchange fails (a dead peer, values that are not finite), ``backward()`` raises.
    """
    work = state.start(bucket)
    return for_native(state.finisher.finish(work.wait))
