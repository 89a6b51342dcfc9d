"""What replicas say to each other before an exchange, and the errors of the engine's failures."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from .. import _C
from ..base.errors import ERRORS, NonFiniteError, PeerLeft, ReplicaMismatch, SyncError
from ..ops.wire import WireFormat
from .sentences import named

Kind = Literal["sync", "flush", "all_reduce"]
# What the members agree on after a failure.
_VERDICT = ("missing", "survivors", "cuts")
# What a user's call is named where replicas that have attached differ in the kind of exchange.
_CALLS = {
    "exchange_objects": "start of flush",
    "an agreement among all replicas": "start of flush",
    "all_reduce": "consensus",
}
# The gap in the header of small messages that only a replica in ``flush`` sends.
END = -1.0
# What cures a difference of a header's field.
_ADVICE = {
    "round": "load the same checkpoint on every replica",
    "outer_lr": "assign the same outer.lr on every replica",
    "protocol version": "install the same version of diloco_comm on every replica",
}
STATE_ADVICE = (
    "outer parameters, momentum or the rounds applied so far are not the same. Load the same "
    'checkpoint on every replica, or let the odd ones join anew (init="join")'
)


@dataclass
class Header:
    """What a replica says to the others before an exchange.

    ``weight``, ``inner_step``, ``gap``, ``is_reset``, ``is_change_due`` and ``digest`` may differ
    between replicas; everything else, and the fragment's wire, block size and number of elements,
    must be equal on all of them.

    Attributes:
        history: Of the fragment's outer state (see ``history``), 0 without one.
        is_reset: No wire carries the replica's values, so its payload is zeros of weight 0.
        is_change_due: The replica knows of a change of the group that is due after this round.
        digest: A digest of the local parameters, below 2^32; 0 where none is needed.
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
    history: int = 0
    is_reset: bool = False
    is_change_due: bool = False
    digest: int = 0


def shares(weights: Sequence[float]) -> list[float]:
    """Return weights over their sum, each rounded to fp32 as the engine rounds those in headers.

    A coefficient that is computed from the same weights then cancels one of these to the bit.
    """
    total = sum(weights)
    return array("f", (weight / total for weight in weights)).tolist()


def to_native(
    header: Header, *, wire: WireFormat, num_elements: int, num_chunks: int, stochastic: bool
) -> _C.Header:
    native = _C.Header(header.kind)
    for name in ("fragment", "round", "sync_every", "num_fragments", "inner_step"):
        setattr(native, name, getattr(header, name))
    native.layout_hash = header.layout_hash & (1 << 64) - 1
    native.history = header.history
    native.weight, native.outer_lr = float(header.weight), float(header.outer_lr)
    native.gap = float(header.gap)
    native.wire, native.block_size = wire.name, wire.block_size
    native.num_elements, native.num_chunks = num_elements, num_chunks
    native.flags = int(stochastic) | (_C.RESET if header.is_reset else 0)
    native.flags |= _C.CHANGE if header.is_change_due else 0
    # A round has no blob: the length's place is free.
    native.blob_bytes = header.digest
    return native


def from_native(native: _C.Header) -> Header:
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
        history=native.history,
        is_reset=native.is_reset,
        is_change_due=native.is_change_due,
        digest=native.blob_bytes,
    )


def error_from(
    failure: _C.Failure, header: Header | None = None, headers: Sequence[_C.Header] = ()
) -> SyncError:
    """Make the exception that a failed job stands for.

    Args:
        header: Of the round, if the job was one.
        headers: Of all ranks, if they have come.
    """
    message = _explained(failure.message, headers)
    error = ERRORS[failure.kind](
        message,
        fragment=-1 if header is None or header.kind == "all_reduce" else header.fragment,
        round=-1 if header is None or header.kind == "all_reduce" else header.round,
        stage=failure.stage,
        seconds=failure.seconds,
        **verdict_of(failure),
    )
    if failure.cause:
        error.__cause__ = RuntimeError(failure.cause)
    if isinstance(error, PeerLeft | NonFiniteError):
        error.replicas = tuple(failure.replicas)
    if isinstance(error, PeerLeft):
        error.inner_steps = tuple(failure.inner_steps)
    if isinstance(error, ReplicaMismatch):
        training, ended = _kinds(headers)
        is_end = bool(ended) and all(header.gap == END for header in ended)
        if is_end and _are_near(training, ended):
            error.ended = tuple(header.replica for header in ended)
            error.fragment = training[0].fragment
    return error


def verdict_of(failure: _C.Failure) -> dict[str, Any]:
    """Return what an exception says of the other replicas, as its arguments."""
    names: dict[str, Any] = {name: getattr(failure, name) for name in _VERDICT}
    if failure.kind == "LeftBehind":
        names["went_on_in"] = failure.went_on_in if failure.went_on_in >= 0 else None
    return names


def _explained(message: str, headers: Sequence[_C.Header]) -> str:
    """Say in a user's words what the engine has found to differ."""
    if "outer state differs" in message:
        return f"{message}: {STATE_ADVICE}"
    for field, advice in _ADVICE.items():
        if f"{field} differs" in message:
            return f"{message}: {advice}"
    if "kind differs" not in message:
        return message
    training, ended = _kinds(headers)
    if ended:
        message = message[: message.index("kind differs")] + _uneven_steps(training, ended)
    for kind, call in _CALLS.items():
        message = message.replace(kind, call)
    return message


def _kinds(headers: Sequence[_C.Header]) -> tuple[list[_C.Header], list[_C.Header]]:
    """Return the headers of rounds, and of calls for all replicas; [] if there are others."""
    training = [header for header in headers if header.kind == "sync"]
    ended = [header for header in headers if header.kind == "exchange_objects"]
    is_all = training and len(training) + len(ended) == len(headers)
    return (training, ended) if is_all else ([], [])


def _are_near(training: Sequence[_C.Header], ended: Sequence[_C.Header]) -> bool:
    """Whether no replica has trained a whole round longer than another."""
    latest = max(header.inner_step for header in training)
    return latest - min(header.inner_step for header in ended) < training[0].sync_every


def _uneven_steps(training: Sequence[_C.Header], ended: Sequence[_C.Header]) -> str:
    """Return the sentence for replicas of which some have called ``flush`` and others train."""
    steps = ", ".join(map(str, sorted({header.inner_step for header in ended})))
    has = "has" if len(ended) == 1 else "have"
    train = "trains" if len(training) == 1 else "train"
    return (
        f"{named([header.replica for header in ended])} {has} ended at inner step {steps} (flush, "
        "or another call for all replicas), while "
        f"{named([header.replica for header in training])} still {train}, at inner step "
        f"{training[0].inner_step}: "
        "give all replicas the same number of steps, see DiLoCo.agree_on_steps; one that a "
        "GradScaler skips counts if the optimizer is fused, or with attach=False and diloco.step() "
        "after each batch"
    )
