"""What a replica tells the others before an exchange, and what the engine tells it of a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from . import _C
from .errors import ERRORS, NonFiniteError, PeerLeft, SyncError

if TYPE_CHECKING:
    from .slot import Slot

Kind = Literal["sync", "flush", "all_reduce"]
# From which call of the user's they come, where replicas that have attached differ in the kind.
_CALLS = {"exchange_objects": "start of flush", "all_reduce": "consensus"}


@dataclass
class Header:
    """What a replica tells the others before an exchange.

    ``weight``, ``inner_step`` and ``gap`` may differ between replicas; everything else, and the
    slot's wire, block size and number of elements, must be equal on all of them.
    """

    kind: Kind = "sync"
    layout_hash: int = 0
    fragment: int = 0
    round: int = 0
    sync_every: int = 0
    num_fragments: int = 1
    weight: float = 1.0
    outer_lr: float = 0.0
    inner_step: int = 0
    gap: float = 1.0


def to_native(header: Header, slot: Slot, stochastic: bool) -> _C.Header:
    native = _C.Header(header.kind)
    for name in ("fragment", "round", "sync_every", "num_fragments", "inner_step"):
        setattr(native, name, getattr(header, name))
    native.layout_hash = header.layout_hash & (1 << 64) - 1
    native.weight, native.outer_lr = float(header.weight), float(header.outer_lr)
    native.gap = float(header.gap)
    native.wire, native.block_size = slot.wire.name, slot.wire.block_size
    native.num_elements, native.num_chunks = slot.num_elements, slot.num_chunks
    native.flags = int(stochastic)
    return native


def from_native(native: _C.Header | Header) -> Header:
    return Header(
        kind=cast(Kind, native.kind),
        layout_hash=native.layout_hash,
        fragment=native.fragment,
        round=native.round,
        sync_every=native.sync_every,
        num_fragments=native.num_fragments,
        weight=native.weight,
        outer_lr=native.outer_lr,
        inner_step=native.inner_step,
        gap=native.gap,
    )


def error_from(failure: _C.Failure, header: Header | None = None) -> SyncError:
    """Make the exception that a failed job stands for."""
    message = failure.message
    if "kind differs" in message:
        for kind, call in _CALLS.items():
            message = message.replace(kind, call)
    error = ERRORS[failure.kind](
        message,
        fragment=-1 if header is None or header.kind == "all_reduce" else header.fragment,
        round=-1 if header is None or header.kind == "all_reduce" else header.round,
        stage=failure.stage,
        seconds=failure.seconds,
        missing=failure.missing,
    )
    if failure.cause:
        error.__cause__ = RuntimeError(failure.cause)
    if isinstance(error, PeerLeft | NonFiniteError):
        error.replicas = tuple(failure.replicas)
    if isinstance(error, PeerLeft):
        error.inner_steps = tuple(failure.inner_steps)
    return error
