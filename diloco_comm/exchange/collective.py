"""``all_reduce``: the exchange engine as a quantised all-reduce of one tensor."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from datetime import timedelta
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import checks
from ..base.errors import SyncError
from ..base.interrupts import deferred_interrupts
from ..ops.implementations import obstacle
from ..ops.wire import WireFormat, parse
from ..ops.wire_options import check_options
from .buffers import ExchangeBuffers
from .exchange import DEFAULT_TIMEOUT, Exchange
from .round import Header, Mean, Round, decode_terms

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Idle buffers kept for each group; the least recently used ones go first.
_MAX_IDLE_BUFFERS = 64


# Held only while ``_engines`` or an engine's idle buffers change, never while waiting for a peer.
# Reentrant, as a signal's handler may call shutdown() meanwhile.
_lock = threading.RLock()


class _GroupEngine:
    """The exchange of one process group, and idle buffers for the sizes seen so far.

    Attributes:
        turn: A lock of the call that connects or starts an exchange, so that calls are numbered in
            the order in which they are started.
        exchange: None before the first call.
        idle: Buffers that no call uses, by number of elements, wire and device.
    """

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self.exchange: Exchange | None = None
        self.idle: OrderedDict[tuple[int, WireFormat, torch.device], list[ExchangeBuffers]] = (
            OrderedDict()
        )
        self.num_calls = 0
        self.is_closed = False

    def connect(self, group: dist.ProcessGroup, lanes: int, timeout: timedelta | float) -> Exchange:
        if self.exchange is None and not self.is_closed:
            self.exchange = Exchange.from_group(group, lanes=lanes, timeout=timeout)
        if self.exchange is None or self.is_closed:
            self.close()
            raise RuntimeError("all_reduce: shutdown() closed the engine of this group meanwhile")
        return self.exchange

    def take(
        self, exchange: Exchange, num_elements: int, wire: WireFormat, device: torch.device
    ) -> ExchangeBuffers:
        with _lock:
            all_buffers = self.idle.get((num_elements, wire, device))
            if all_buffers:
                return all_buffers.pop()
        return exchange.buffers(num_elements, wire, device=device)

    def give_back(self, buffers: ExchangeBuffers) -> None:
        key = (buffers.num_elements, buffers.wire, buffers.device)
        with _lock:
            self.idle.setdefault(key, []).append(buffers)
            self.idle.move_to_end(key)
            while sum(map(len, self.idle.values())) > _MAX_IDLE_BUFFERS:
                oldest = next(iter(self.idle))
                self.idle[oldest].pop()
                if not self.idle[oldest]:
                    del self.idle[oldest]

    def close(self) -> None:
        self.is_closed = True
        if self.exchange is not None:
            self.exchange.close()


_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, _GroupEngine]] = (
    weakref.WeakKeyDictionary()
)


class AllReduceWork:
    """An ``all_reduce`` under way; the mean is written inside ``wait()`` only."""

    def __init__(
        self,
        engine: _GroupEngine,
        buffers: ExchangeBuffers,
        work: Round,
        tensor: Tensor,
        out: Tensor | None,
    ) -> None:
        self._engine = engine
        self._buffers = buffers
        self._work = work
        self._tensor = tensor
        self._out = out
        self._is_applied = False
        self._is_given_back = False

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not block."""
        return self._work.done()

    def wait(self, timeout: timedelta | float | None = None) -> Tensor:
        """Write the weighted mean into ``out``, or the tensor, and return it.

        Args:
            timeout: Seconds, or a timedelta; None waits as long as the exchange may take.

        Raises:
            SyncError: Or one of its kinds; the tensor is as it was, an ``out`` is undefined.
            TimeoutError: After ``timeout`` seconds, and perhaps the decoding of one part; the
                exchange goes on, and the next call waits again.
        """
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        result = self._tensor if self._out is None else self._out
        try:
            if self._is_applied or not result.numel():
                self._work.wait(timeout)
            elif self._out is None:
                self._write(self._work.wait(timeout))
            else:
                self._work.collect(self._out.detach(), timeout)
        except SyncError:
            self._give_back()
            raise
        if not self._is_applied:
            self._is_applied = True
            self._buffers.commit()
            self._give_back()
        return result

    def _write(self, mean: Mean) -> None:
        target = self._tensor.detach()
        dense = target if _is_dense(target) else target.contiguous()
        mean.decode([dense])
        if dense is not target:
            target.copy_(dense)

    def sent(self, out: Tensor) -> Tensor:
        """Write this rank's values, as the wire has rounded them, into ``out``; before ``wait()``.

        Args:
            out: Contiguous, with as many elements as the tensor; fp32, bf16 or fp16.

        Raises:
            RuntimeError: After ``wait()``, when another call may have the buffers.
        """
        if self._is_given_back:
            raise RuntimeError("sent() must be called before wait(), and it was called after it")
        if self._tensor.numel():
            decode_terms([(self._work.own.tensor, 1.0)], self._work.layout, [out])
        return out

    def _give_back(self) -> None:
        with _lock:
            if not self._is_given_back:
                self._engine.give_back(self._buffers)
            self._is_given_back = True


@overload
def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = ...,
    wire: str | WireFormat = ...,
    *,
    out: Tensor | None = ...,
    block_size: int | None = ...,
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
    block_size: int | None = ...,
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
    block_size: int | None = None,
    weight: float = 1.0,
    async_op: bool = False,
    rounding: str = "nearest",
    seed: int = 0,
    lanes: int = 1,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
) -> Tensor | AllReduceWork:
    """Average ``tensor`` over the group, weighted; the mean is bit-identical on all ranks.

    The mean replaces ``tensor`` once all ranks have all of it; after an error ``tensor`` is
    unchanged. With an ``out``, the mean is decoded while it arrives, which is faster, but leaves
    undefined values in ``out`` after an error.

    Ranks call this in the same order with the same sizes and options; several calls may be under
    way. The engine, with connections of its own, is made in the first call for a group and lives
    until ``shutdown()`` or the group's end.

    Args:
        tensor: fp32, bf16 or fp16, any shape; may differ in dtype between ranks.
        group: The process group; default: all ranks of torch.distributed.
        wire: The wire format in which values travel; ``block_size`` elements share a scale.
        out: Contiguous, with the shape and device of ``tensor``, fp32, bf16 or fp16; may be
            ``tensor`` itself, which else keeps its values. After an error it is undefined.
        weight: This rank's weight in the mean, not negative; normalised over the ranks.
        async_op: Return a work object; its ``wait()`` writes the mean.
        rounding: "nearest", or "stochastic".
        seed: With the number of the call, the key of stochastic rounding and of random signs.
        lanes: Connections to each peer in each direction. More fill a link of high bandwidth and
            long delay that one TCP connection leaves idle; each costs two process groups.
        timeout: Longest time of one exchange, in seconds; the value of the first call for a group
            holds for all.

    Raises:
        TypeError, ValueError: For a tensor or an option that is not one of the above.
        ReplicaMismatch: If the ranks' sizes or options differ; nothing is written.
        SyncError: If the group failed, in this or an earlier call; ``shutdown()`` on all ranks lets
            the next call connect anew.
        NonFiniteError: If a rank's tensor holds NaN, Inf or values out of range; call
            ``shutdown()`` likewise.
    """
    _check(tensor, is_written=out is None)
    if out is not None:
        _check_out(out, tensor)
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    wire = parse(wire, block_size)
    check_options(wire, rounding=rounding)
    seed, lanes = (
        checks.integer("seed", seed),
        checks.integer("lanes", lanes, 1, most=checks.MOST_INT32),
    )
    weight = checks.not_negative("weight", weight)
    group = _group_of(group)
    with _lock:
        engine = _engines.setdefault(group, {}).setdefault(lanes, _GroupEngine())
    with engine.turn:
        exchange = engine.connect(group, lanes, timeout)
        buffers = engine.take(exchange, max(tensor.numel(), 1), wire, tensor.device)
        # An empty tensor takes part with one zero: the others must not wait for it.
        source = tensor.detach()
        if not tensor.numel():
            source = torch.zeros(1, dtype=torch.float32, device=tensor.device)
        header = Header(
            "all_reduce", layout_hash=tensor.numel(), round=engine.num_calls + 1, weight=weight
        )
        # A Ctrl-C must not fall between the start of the exchange and the count.
        with deferred_interrupts():
            work = _start(
                exchange,
                buffers,
                outer=None,
                params=[source if _is_dense(source) else source.contiguous()],
                header=header,
                stochastic=rounding == "stochastic",
                seed=seed,
            )
            engine.num_calls += 1
    handle = AllReduceWork(engine, buffers, work, tensor, out)
    return handle if async_op else handle.wait()


def _check(tensor: Tensor, is_written: bool) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"all_reduce takes a tensor, got {checks.class_of(tensor)}")
    if tensor.layout != torch.strided:
        raise TypeError(f"all_reduce takes strided tensors, got one with layout {tensor.layout}")
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"all_reduce takes fp32, bf16 and fp16 tensors, got {tensor.dtype}")
    if reason := obstacle(tensor.device):
        raise TypeError(f"the tensor of all_reduce is {reason}")
    if is_written and _is_expanded(tensor):
        raise ValueError(
            "all_reduce writes the mean into the tensor, whose elements must not share memory, got "
            f"shape {tuple(tensor.shape)} with strides {tensor.stride()}: give out= or a clone"
        )


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


def _start(exchange: Exchange, buffers: ExchangeBuffers, **arguments: Any) -> Round:
    try:
        return exchange.start(buffers, **arguments)
    except RuntimeError as error:
        if not exchange.is_dead:
            raise
        text = (
            f"all_reduce: an earlier one of this group failed ({error}); call "
            "diloco_comm.shutdown() on all ranks, and the next all_reduce connects them anew"
        )
        if isinstance(error, SyncError):
            raise error.saying(text) from error
        raise SyncError(text, stage="start") from error


def shutdown(group: dist.ProcessGroup | None = None) -> None:
    """Close the engines that ``all_reduce`` made for ``group``; None: for all groups.

    Exchanges under way end with a SyncError, and a first call that is about to connect with a
    RuntimeError.

    Raises:
        TypeError: For anything else than a process group.
    """
    with _lock:
        groups = list(_engines) if group is None else [_group_of(group)]
        engines = [engine for g in groups for engine in _engines.pop(g, {}).values()]
    for engine in engines:
        engine.close()


def _group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("all_reduce needs a group, or torch.distributed to be initialised")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not a member of the group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group of torch.distributed, got {group!r}")
    return group


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements lie in memory in order and without gaps."""
    return tensor.is_contiguous()


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements of the tensor share memory."""
    return any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
