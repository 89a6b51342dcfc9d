"""The exchange engine alone: a quantised all-reduce of one tensor."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from datetime import timedelta
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import SyncError
from .exchange import DEFAULT_TIMEOUT, Exchange, Header, Pending, Slot
from .fragments import is_served
from .pending import Outcome, decode_terms
from .wire import WireFormat, parse

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Idle buffers kept for each group; the least recently used ones go first.
_MAX_IDLE_SLOTS = 64


class _GroupEngine:
    """The exchange of one process group, and buffers for the sizes seen so far."""

    def __init__(self, group: dist.ProcessGroup, lanes: int, timeout: timedelta | float) -> None:
        self.exchange = Exchange.from_group(group, lanes=lanes, timeout=timeout)
        self.idle: OrderedDict[tuple[int, WireFormat, torch.device], list[Slot]] = OrderedDict()
        self.num_calls = 0

    def take(self, num_elements: int, wire: WireFormat, device: torch.device) -> Slot:
        slots = self.idle.get((num_elements, wire, device))
        return slots.pop() if slots else self.exchange.slot(num_elements, wire, device=device)

    def give_back(self, slot: Slot) -> None:
        key = (slot.num_elements, slot.wire, slot.device)
        self.idle.setdefault(key, []).append(slot)
        self.idle.move_to_end(key)
        while sum(map(len, self.idle.values())) > _MAX_IDLE_SLOTS:
            oldest = next(iter(self.idle))
            self.idle[oldest].pop()
            if not self.idle[oldest]:
                del self.idle[oldest]


_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, _GroupEngine]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


class AllReduceWork:
    """An ``all_reduce`` under way; the mean is written inside ``wait()`` only."""

    def __init__(
        self,
        engine: _GroupEngine,
        slot: Slot,
        pending: Pending,
        tensor: Tensor,
        out: Tensor | None,
    ) -> None:
        self._engine = engine
        self._slot = slot
        self._pending = pending
        self._tensor = tensor
        self._out = out
        self._is_applied = False
        self._is_given_back = False

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not block."""
        return self._pending.done()

    def wait(self, timeout: float | None = None) -> Tensor:
        """Write the weighted mean into ``out``, or the tensor, and return it.

        Raises:
            SyncError: Or one of its kinds; the tensor is as it was, an ``out`` is undefined.
            TimeoutError: After ``timeout`` seconds, and perhaps the decoding of one part; the
                exchange goes on, and the next call, too.
        """
        result = self._tensor if self._out is None else self._out
        try:
            if self._is_applied or not result.numel():
                self._pending.wait(timeout)
            elif self._out is None:
                self._write(self._pending.wait(timeout))
            else:
                self._pending.collect(self._out.detach(), timeout)
        except SyncError:
            self._give_back()
            raise
        if not self._is_applied:
            self._is_applied = True
            self._slot.commit()
            self._give_back()
        return result

    def _write(self, outcome: Outcome) -> None:
        target = self._tensor.detach()
        dense = target if _is_dense(target) else target.contiguous()
        outcome.decode([dense])
        if dense is not target:
            target.copy_(dense)

    def sent(self, out: Tensor) -> Tensor:
        """Write what this rank's values became on the wire into ``out``; before ``wait()``.

        Args:
            out: Contiguous, with as many elements as the tensor; fp32, bf16 or fp16.
        """
        if self._tensor.numel():
            decode_terms([(self._pending.payload, 1.0)], self._pending.layout, [out])
        return out

    def _give_back(self) -> None:
        with _lock:
            if not self._is_given_back:
                self._engine.give_back(self._slot)
            self._is_given_back = True


@overload
def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = ...,
    wire: str | WireFormat = ...,
    *,
    out: Tensor | None = ...,
    block_size: int = ...,
    weight: float = ...,
    async_op: Literal[False] = ...,
    rounding: str = ...,
    seed: int = ...,
    lanes: int = ...,
    timeout: timedelta | float = ...,
) -> Tensor: ...


@overload
def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = ...,
    wire: str | WireFormat = ...,
    *,
    out: Tensor | None = ...,
    block_size: int = ...,
    weight: float = ...,
    async_op: Literal[True],
    rounding: str = ...,
    seed: int = ...,
    lanes: int = ...,
    timeout: timedelta | float = ...,
) -> AllReduceWork: ...


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    wire: str | WireFormat = "int8",
    *,
    out: Tensor | None = None,
    block_size: int = 256,
    weight: float = 1.0,
    async_op: bool = False,
    rounding: str = "nearest",
    seed: int = 0,
    lanes: int = 1,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
) -> Tensor | AllReduceWork:
    """Average ``tensor`` over the group, weighted; the mean is bit-identical on all ranks.

    The mean replaces ``tensor`` when all ranks have all of it, and not at all after an error. Into
    an ``out`` it is decoded while the rest arrives, which hides most of the decoding from a caller
    who can do without what ``out`` held.

    Ranks call this in the same order with the same sizes and options; several calls may be under
    way. The engine, with connections of its own, is made in the first call for a group and lives
    until ``shutdown()`` or the group's end.

    Args:
        tensor: fp32, bf16 or fp16, any shape; may differ in dtype between ranks.
        group: Default: the world.
        wire: What travels; ``block_size`` elements share a scale.
        out: Contiguous, with the shape and device of ``tensor``, fp32, bf16 or fp16; may be
            ``tensor`` itself, which else keeps its values. After an error it is undefined.
        weight: Not negative; normalised over the ranks.
        async_op: Return a work object; its ``wait()`` writes the mean.
        rounding: "nearest", or "stochastic" keyed by ``seed`` and the number of the call.
        lanes: Connections to each peer.
        timeout: Of one exchange; that of the first call for a group counts.

    Raises:
        TypeError, ValueError: For a tensor or an option that is not one of the above.
        ReplicaMismatch: If the ranks' sizes or options differ; nothing is written.
        SyncError: If the group failed, in this or an earlier call; ``shutdown()`` on all ranks lets
            the next call connect anew.
        NonFiniteError: If a rank's tensor holds NaN, Inf or values out of range; likewise.
    """
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"all_reduce takes fp32, bf16 and fp16 tensors, got {tensor.dtype}")
    if not is_served(tensor.device):
        raise TypeError(
            f"all_reduce takes tensors on a GPU or in CPU memory, got one on {tensor.device}"
        )
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if out is not None:
        _check_out(out, tensor)
    wire = parse(wire, block_size)
    with _lock:
        engine = _engine_of(group, lanes, timeout)
        slot = engine.take(max(tensor.numel(), 1), wire, tensor.device)
        engine.num_calls += 1
        # An empty tensor takes part with one zero: the others must not wait for it.
        source = tensor.detach() if tensor.numel() else torch.zeros(1, device=tensor.device)
        header = Header(
            "all_reduce", layout_hash=tensor.numel(), round=engine.num_calls, weight=weight
        )
        pending = _start(
            engine,
            slot,
            outer=None,
            params=[source if _is_dense(source) else source.contiguous()],
            header=header,
            stochastic=rounding == "stochastic",
            seed=seed,
        )
    work = AllReduceWork(engine, slot, pending, tensor, out)
    return work if async_op else work.wait()


def _check_out(out: Tensor, tensor: Tensor) -> None:
    if out.dtype not in _DTYPES:
        raise TypeError(f"out must be fp32, bf16 or fp16, got {out.dtype}")
    if out.shape != tensor.shape or out.device != tensor.device:
        raise ValueError(
            f"out must have the shape and device of the tensor, {tuple(tensor.shape)} on "
            f"{tensor.device}, got {tuple(out.shape)} on {out.device}"
        )
    if not _is_dense(out):
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")


def _start(engine: _GroupEngine, slot: Slot, **arguments: Any) -> Pending:
    try:
        return engine.exchange.start(slot, **arguments)
    except RuntimeError as error:
        engine.give_back(slot)
        if not engine.exchange.is_dead:
            raise
        raise SyncError(
            f"all_reduce: an earlier one of this group failed ({error}); call "
            "diloco_comm.shutdown() on all ranks, and the next all_reduce connects them anew",
            stage="start",
        ) from error


def shutdown(group: dist.ProcessGroup | None = None) -> None:
    """Close the engines that ``all_reduce`` made: those of ``group``, or all."""
    with _lock:
        groups = list(_engines) if group is None else [group]
        engines = [engine for g in groups for engine in _engines.pop(g, {}).values()]
    for engine in engines:
        engine.exchange.close()


def _engine_of(
    group: dist.ProcessGroup | None, lanes: int, timeout: timedelta | float
) -> _GroupEngine:
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("all_reduce needs a group, or torch.distributed to be initialised")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this process is not a member of the group")
    by_lanes = _engines.setdefault(group, {})
    if lanes not in by_lanes:
        by_lanes[lanes] = _GroupEngine(group, lanes, timeout)
    return by_lanes[lanes]


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements in order are one piece of memory."""
    return tensor.is_contiguous()
