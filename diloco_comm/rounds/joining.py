"""Hand the shared outer state to replicas that join."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch

from ..base.errors import SyncError
from ..exchange.exchange import Exchange
from ..methods.outer import OuterOptimizer
from ..methods.overlap import Own
from .checkpoint.save import numbers_of, set_numbers
from .synced import SyncedFragment, SyncedPart


def share(
    exchange: Exchange,
    parts: Sequence[SyncedPart],
    inner_step: int,
    outer: OuterOptimizer,
    impl: str,
) -> int:
    """Give newcomers the state of the source: the lowest replica that trains already.

    A collective call. A newcomer's local parameters become the outer ones, and its outer learning
    rate that of the source.

    Returns:
        The inner step of the source.

    Raises:
        SyncError: If all members are newcomers.
    """
    sources = [r for r in exchange.members if r not in exchange.joined]
    if not sources:
        raise SyncError(
            f'init="join": all members {list(exchange.members)} came to join and none trains '
            'yet: start with init="broadcast", and join replicas that call change_group'
        )
    lr = outer.lr if isinstance(outer.lr, (int, float)) else None
    source_rank = exchange.members.index(sources[0])
    inner_step, outer_lr = send_or_receive(exchange, parts, inner_step, lr, source_rank)
    if exchange.replica in exchange.joined:
        if outer_lr is not None:
            outer.lr = outer_lr
        for part in parts:
            if isinstance(part, SyncedFragment):
                part.write_local(impl)
    return inner_step


def send_or_receive(
    exchange: Exchange,
    parts: Sequence[SyncedPart],
    inner_step: int,
    outer_lr: float | None,
    source_rank: int,
) -> tuple[int, float | None]:
    """Give the newcomers the source's outer state, exactly; a collective call.

    No round is under way. Where outer parameters differ between replicas (``Eager``) a newcomer
    becomes a copy of the source, with the corrections that the source still owes to its own outer
    parameters. Values that the source owes to the other replicas stay with the source.

    Returns:
        Inner step and outer learning rate of the source; None for a rate that is a function.
    """
    numbers = {
        str(part.index): {
            **numbers_of(part),
            "history": part.history,
            "corrections": [own.coefficient for own in part.corrections],
        }
        for part in parts
    }
    file = io.BytesIO()
    torch.save({"inner_step": inner_step, "outer_lr": outer_lr, "parts": numbers}, file)
    blobs = exchange.exchange_objects(file.getvalue())
    meta = torch.load(io.BytesIO(blobs[source_rank]), weights_only=True)
    is_new = exchange.replica in exchange.joined
    for part in parts:
        own = meta["parts"][str(part.index)]
        tensors, flats = part.tensors(), {}
        if isinstance(part, SyncedFragment):
            flats = part.state.tensors()
            tensors = [part.outer, *flats.values()]
        corrections = _corrections(part, own["corrections"], is_new)
        tensors += [one.payload for one in corrections]
        if not is_new and exchange.rank != source_rank:
            # Replicas that train already keep their own values.
            tensors = [tensor.clone() for tensor in tensors]
        exchange.broadcast(tensors, source_rank)
        if not is_new:
            continue
        set_numbers(part, own)
        part.history = own["history"]
        part.corrections = corrections
        if isinstance(part, SyncedFragment):
            part.state.load(flats, own["extra"])
    return int(meta["inner_step"]), meta["outer_lr"]


def _corrections(part: SyncedPart, coefficients: Sequence[float], is_new: bool) -> list[Own]:
    """Return this part's corrections, or room for the corrections of the source."""
    if part.buffers is None:
        return []
    layout = part.buffers.layout
    if len(part.corrections) == len(coefficients) and not is_new:
        return part.corrections
    room = {"dtype": torch.uint8, "device": part.buffers.device}
    empty = [torch.zeros(layout.payload_bytes, **room) for _ in coefficients]  # type: ignore[call-overload]
    return [Own(one, c, layout) for one, c in zip(empty, coefficients, strict=True)]
