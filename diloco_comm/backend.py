"""The backend "diloco": gloo or NCCL, with large fp32 all-reduces quantised.

    import diloco_comm.backend
    dist.init_process_group("diloco")       # or "cpu:diloco"

For a loop that cannot be edited: every ``all_reduce`` (sum or mean) of an fp32 tensor in CPU memory
with ``DILOCO_COMM_BACKEND_MIN_BYTES`` or more travels as ``DILOCO_COMM_BACKEND_WIRE``; such are
DDP's gradients. Everything else is handed to gloo, or NCCL for CUDA tensors, as it is. The result
has the same bits on all ranks. Tensors with NaN or Inf are reduced exactly: they spread as usual.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import env, recording
from .base.errors import NonFiniteError
from .base.futures import Finisher, for_native
from .exchange import collective
from .ops.wire import WireFormat, parse

NAME = "diloco"

# What torch lets a Python class override, it calls with the GIL held, also where nothing is
# overridden (PyProcessGroup.hpp). A thread of gloo that waits for the GIL to free a tensor, and
# holds the lock that a new operation needs, would wait for ever. Some of the names exist in newer
# versions of torch alone.
_CALLED_WITH_GIL = (
    "allgather",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "all_gather_single",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "end_coalescing",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "recv",
    "recvAnysource",
    "scatter",
    "send",
)
# Their names in Python, where these differ from the names that torch looks up.
_IN_PYTHON = {"end_coalescing": "_end_coalescing", "recvAnysource": "recv_anysource"}


def _without_gil(cls: type[DilocoProcessGroup]) -> type[DilocoProcessGroup]:
    """Hand the operations above to ``_native``: the bindings of its class give up the GIL."""

    def forward(name: str) -> Callable[..., Any]:
        def method(self: DilocoProcessGroup, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._native, name)(*args, **kwargs)

        return method

    for name in _CALLED_WITH_GIL:
        known = _IN_PYTHON.get(name, name)
        if hasattr(dist.ProcessGroup, known):
            setattr(cls, name, forward(known))
    return cls


def _wire() -> WireFormat:
    wire = parse(env.backend_wire())
    if wire.is_sparse:
        raise ValueError(
            f"DILOCO_COMM_BACKEND_WIRE={wire.name} needs error feedback, which the backend "
            f"{NAME!r} does not keep: take another wire"
        )
    return wire


@_without_gil
class DilocoProcessGroup(dist.ProcessGroup):
    """What ``init_process_group("diloco")`` and ``new_group(backend="diloco")`` make."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._wire = _wire()
        self._min_bytes = env.backend_min_bytes()
        recording.start_if_asked()
        self._store, self._timeout = store, timeout
        self._finisher = Finisher()
        self._exact: Any = None
        self._native = dist.ProcessGroup(store, rank, size)
        self._add("cpu", dist.ProcessGroup.BackendType.GLOO, self._make_gloo("gloo"))
        if torch.cuda.is_available() and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
            self._add("cuda", dist.ProcessGroup.BackendType.NCCL, nccl)
        # From version 2.15 on torch asks the default backend for the name of the group.
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def _make_gloo(self, name: str) -> Any:
        store = dist.PrefixStore(name, self._store)
        return dist.ProcessGroupGloo(store, self.rank(), self.size(), self._timeout)

    def _add(self, device: str, kind: Any, backend: Any) -> None:
        for group in (self, self._native):
            group._register_backend(torch.device(device), kind, backend)

    def getBackendName(self) -> str:
        """Return the name for messages."""
        return NAME

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce in place; quantised when it is one large fp32 tensor, exactly otherwise."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if opts is None or isinstance(opts, dist.ReduceOp | dist.ReduceOp.RedOpType):
            op = dist.ReduceOp.SUM if opts is None else opts
            opts = dist.AllreduceOptions()
            opts.reduceOp = op
        if not self._is_quantised(tensors, opts):
            return self._native.allreduce(tensors, opts)
        tensor, is_sum = tensors[0], opts.reduceOp == dist.ReduceOp.SUM
        work = collective.all_reduce(tensor, self, self._wire, timeout=self._timeout, async_op=True)
        return _Work(self._finisher.finish(lambda: [self._end(work, tensor, is_sum)]))

    def _is_quantised(self, tensors: list[Tensor], opts: Any) -> bool:
        tensor = tensors[0]
        return (
            len(tensors) == 1
            and self.size() > 1
            and tensor.dtype == torch.float32
            and tensor.device.type == "cpu"
            and tensor.layout == torch.strided
            and tensor.numel() * 4 >= self._min_bytes
            # A RedOpType does not equal a ReduceOp, only the other way round.
            and (opts.reduceOp == dist.ReduceOp.SUM or opts.reduceOp == dist.ReduceOp.AVG)
        )

    def _end(self, work: collective.AllReduceWork, tensor: Tensor, is_sum: bool) -> Tensor:
        """Wait for the mean; on the finisher's thread, in the same order on all ranks."""
        try:
            work.wait()
        except NonFiniteError:
            self._reduce_exactly(tensor)
            if not is_sum:
                tensor.div_(self.size())
            return tensor
        return tensor.mul_(self.size()) if is_sum else tensor

    def _reduce_exactly(self, tensor: Tensor) -> None:
        """Sum through a group of its own: other threads use the gloo group meanwhile."""
        if self._exact is None:
            self._exact = self._make_gloo("exact")
        self._exact.allreduce([tensor], dist.AllreduceOptions()).wait()

    def shutdown(self) -> None:
        """End the thread and the engine; ``destroy_process_group`` calls it."""
        self._finisher.close()
        collective.shutdown(self)
        super().shutdown()


class _Work(dist.Work):
    def __init__(self, future: torch.futures.Future[list[Tensor]]) -> None:
        super().__init__()
        self._future = future
        self._is_done = threading.Event()
        future.add_done_callback(lambda done: self._is_done.set())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the tensor is written; DistBackendError after ``timeout``, if positive."""
        limit = timeout.total_seconds() if timeout is not None else 0.0
        if limit > 0 and not self._is_done.wait(limit):
            raise dist.DistBackendError(f"all_reduce is not done after {limit} s")
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        if not self._future.done():
            return False
        try:
            self._future.value()
        except Exception:
            return False
        return True

    def result(self) -> list[Tensor]:
        return self._future.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return for_native(self._future)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> DilocoProcessGroup:
    return DilocoProcessGroup(store, rank, size, timeout)


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
