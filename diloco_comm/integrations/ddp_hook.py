"""A hook of ``DistributedDataParallel`` that sends gradients encoded, at every step::

    model = DistributedDataParallel(model)
    model.register_comm_hook(QuantizedAllReduce(wire="int8"), quantized_allreduce_hook)

The hook is for links that are fast enough for an average at every step, but too slow for gradients
in fp32. The exchange of a bucket overlaps with the backward pass of earlier layers.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes.

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.checks import refuse_copy
from ..base.futures import Finisher, for_native
from ..exchange.collective import AllReduceWork, all_reduce
from ..exchange.exchange import DEFAULT_TIMEOUT
from ..ops.wire import WireFormat, parse
from ..ops.wire_options import check_training


class QuantizedAllReduce:
    """The state of the hook.

    Args:
        group: Process group of the model; the default is the world.
        wire, block_size: Wire format, see ``diloco_comm.wire.WIRES``.
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
        # One residual for each bucket, with its elements in the order of the bucket's gradients.
        # The key lists the ids of the bucket's parameters, since DDP makes new buckets after the
        # first step.
        self._residuals: dict[tuple[int, ...], Tensor] = {}
        # Each parameter's place among all parameters, in the order of the first buckets.
        self._places: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        # Residuals of single parameters, by the parameters' places, until a bucket with the
        # parameter is reduced.
        self._waiting: dict[int, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of this rank; every rank must save its own.

        Returns:
            ``{"residuals": {place: 1-D tensor}}`` by a parameter's place in the order in which
            DDP first reduced the parameters; the tensors are copies.
        """
        found = dict(self._waiting)
        for key, residual in self._residuals.items():
            found |= self._cut(key, residual)
        return {"residuals": {place: found[place].clone() for place in sorted(found)}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with saved residuals; call this before the first ``backward()``.

        A residual that does not fit its parameter makes the next ``backward()`` raise ValueError.

        Raises:
            ValueError: If this is no state of such a hook, or without ``error_feedback=True``.
        """
        residuals = state_dict.get("residuals") if isinstance(state_dict, Mapping) else None
        if not isinstance(residuals, Mapping):
            raise ValueError("the saved state has no 'residuals': it is not from state_dict()")
        if residuals and not self.error_feedback:
            raise ValueError("the saved state has residuals: construct with error_feedback=True")
        self._residuals.clear()
        self._waiting = {int(place): tensor.clone() for place, tensor in residuals.items()}

    def __getstate__(self) -> NoReturn:
        refuse_copy(self, "save its state_dict() on every rank")

    def start(self, bucket: dist.GradBucket) -> AllReduceWork:
        """Start to average a bucket, with the residual of the bucket's last encoding."""
        gradients = bucket.buffer()
        if not self.error_feedback:
            return self._all_reduce(gradients)
        params = bucket.parameters()
        key = tuple(id(param) for param in params)
        if bucket.index() == 0 and key not in self._residuals:
            self._take_apart()
        residual = self._residuals.get(key)
        if residual is None:
            residual = self._residuals[key] = self._put_together(params, gradients)
        gradients.add_(residual)
        work = self._all_reduce(gradients)
        # ``work.sent`` decodes the payload into the residual's memory, which then takes gradients
        # minus decoded payload: the rounding errors.
        # A value that is not finite makes the exchange fail, and must not stay in the residual.
        torch.sub(gradients, work.sent(residual), out=residual)
        torch.nan_to_num_(residual, 0.0, 0.0, 0.0)
        if self.wire.feedback_decay != 1.0:
            residual.mul_(self.wire.feedback_decay)
        return work

    def _all_reduce(self, gradients: Tensor) -> AllReduceWork:
        return all_reduce(gradients, self.group, self.wire, timeout=self.timeout, async_op=True)

    def _take_apart(self) -> None:
        """Cut the old buckets' residuals by parameter, for the new buckets of these parameters."""
        for key, residual in self._residuals.items():
            self._waiting |= self._cut(key, residual)
        self._residuals.clear()

    def _cut(self, key: tuple[int, ...], residual: Tensor) -> dict[int, Tensor]:
        """Return views of a bucket's residual by the places of the bucket's parameters."""
        sizes = [self._sizes[param] for param in key]
        places = [self._places[param] for param in key]
        return dict(zip(places, residual[: sum(sizes)].split(sizes), strict=True))

    def _put_together(self, params: Sequence[Tensor], gradients: Tensor) -> Tensor:
        """Join the waiting residuals of a new bucket's parameters; zero where none waits."""
        residual, begin = torch.zeros_like(gradients), 0
        for param in params:
            place = self._places.setdefault(id(param), len(self._places))
            self._sizes[id(param)] = size = param.numel()
            waiting = self._waiting.pop(place, None)
            if waiting is not None:
                if waiting.numel() != size:
                    raise ValueError(
                        f"the saved residual {place} has {waiting.numel()} elements, its parameter "
                        f"of shape {list(param.shape)} has {size}: the state is of another model"
                    )
                residual[begin : begin + size].copy_(waiting)
            begin += size
        return residual


def quantized_allreduce_hook(
    state: QuantizedAllReduce, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the group; the result is bit-identical on all ranks.

    If the exchange fails (a dead peer, values that are not finite), ``backward()`` raises.
    """
    work = state.start(bucket)
    return for_native(state.finisher.finish(work.wait, bucket.buffer().device))
