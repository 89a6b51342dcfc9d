"""Hand the shared outer state to replicas that join.

A newcomer may have copied the state of fragments before, beside training. Then it takes the rounds
that it lacks, and is given only the fragments that still differ.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..base.errors import SyncError
from ..exchange.exchange import Exchange
from ..methods.outer import OuterOptimizer
from ..methods.overlap import Own
from .handshake import gather_json
from .history import digest_of_state
from .part import SyncedFragment, SyncedPart
from .state_dict import numbers_of, set_numbers


class CopyBeside(Protocol):
    """A copy of the state that a newcomer has made beside training."""

    def catch_up(self, targets: Mapping[int, int]) -> None:
        """Take the rounds that the copy lacks, while the members wait.

        Args:
            targets: Number of the next round, by fragment.
        """
        ...


@dataclass(frozen=True)
class Shared:
    """The result of ``share``.

    Attributes:
        inner_step: The source's inner step.
        copied_bytes: Bytes of outer state given to newcomers, while all members waited.
        is_equal: All replicas were seen to have the same outer state.
    """

    inner_step: int
    copied_bytes: int
    is_equal: bool


def share(
    exchange: Exchange,
    parts: Sequence[SyncedPart],
    inner_step: int,
    outer: OuterOptimizer,
    impl: str,
    beside: CopyBeside | None = None,
) -> Shared:
    """Give newcomers the state of the source: the lowest replica that trains already.

    A collective call. A newcomer's local parameters become the outer ones, and it takes the outer
    learning rate of the source.

    Args:
        beside: The newcomer's copy; given on all replicas or on none. None where outer parameters
            differ between replicas.

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
    copied, is_equal = list(parts), False
    if beside is not None:
        copied, is_equal = _different_parts(exchange, parts, source_rank, beside)
    is_new = exchange.replica in exchange.joined
    inner_step, outer_lr = send_or_receive(
        exchange, parts, inner_step, lr, source_rank, copied, is_new=is_new
    )
    if is_new:
        if outer_lr is not None:
            outer.lr = outer_lr
        _write_local(parts, impl)
    copied_bytes = sum(tensor.nbytes for part in copied for tensor in _state_of(part))
    return Shared(inner_step, copied_bytes, is_equal)


def begin_from(
    exchange: Exchange, parts: Sequence[SyncedPart], inner_step: int, impl: str, source_rank: int
) -> int:
    """Begin a group with the outer state of one replica; a collective call.

    The local parameters of all replicas become the outer ones. Learning rates stay as they are.

    Returns:
        The inner step of that replica.
    """
    fragments = [part for part in parts if isinstance(part, SyncedFragment)]
    is_new = exchange.rank != source_rank
    given = send_or_receive(
        exchange, parts, inner_step, None, source_rank, fragments, is_new=is_new
    )
    _write_local(parts, impl)
    return given[0]


def _write_local(parts: Sequence[SyncedPart], impl: str) -> None:
    for part in parts:
        if isinstance(part, SyncedFragment):
            part.write_local(impl)


def _different_parts(
    exchange: Exchange, parts: Sequence[SyncedPart], source_rank: int, beside: CopyBeside
) -> tuple[list[SyncedPart], bool]:
    """Let newcomers catch up; return the parts in which one differs from the source all the same.

    Returns:
        These parts, and whether all replicas have the same outer state.
    """
    rounds = gather_json(exchange, [part.round for part in parts])
    if exchange.replica in exchange.joined:
        fragments = [part.index for part in parts if isinstance(part, SyncedFragment)]
        beside.catch_up({index: rounds[source_rank][index] for index in fragments})
    own = [[part.round, part.history, digest_of_state(part)] for part in parts]
    views = gather_json(exchange, own)
    newcomers = [exchange.members.index(replica) for replica in exchange.joined]
    different = [
        part
        for part in parts
        if not isinstance(part, SyncedFragment)
        or any(views[rank][part.index] != views[source_rank][part.index] for rank in newcomers)
    ]
    return different, all(view == views[0] for view in views)


def send_or_receive(
    exchange: Exchange,
    parts: Sequence[SyncedPart],
    inner_step: int,
    outer_lr: float | None,
    source_rank: int,
    copied: Sequence[SyncedPart],
    *,
    is_new: bool,
) -> tuple[int, float | None]:
    """Give the newcomers the source's outer state, exactly; a collective call.

    No round is under way. Where outer parameters differ between replicas (``Eager``) a newcomer
    becomes a copy of the source, with the corrections that the source still owes to its own outer
    parameters. Values that the source owes to the other replicas stay with the source.

    Args:
        copied: The parts whose tensors are given; of the others, only the numbers.
        is_new: This replica is a newcomer.

    Returns:
        Inner step and outer learning rate of the source; None for a rate that is a function.
    """
    numbers = {
        str(part.index): {
            **numbers_of(part),
            "history": part.history,
            "corrections": [own.coefficient for own in part.owed.corrections],
        }
        for part in parts
    }
    file = io.BytesIO()
    torch.save({"inner_step": inner_step, "outer_lr": outer_lr, "parts": numbers}, file)
    blobs = exchange.exchange_objects(file.getvalue())
    meta = torch.load(io.BytesIO(blobs[source_rank]), weights_only=True)
    for part in parts:
        own = meta["parts"][str(part.index)]
        if part not in copied:
            if is_new:
                set_numbers(part, own)
                part.history = own["history"]
            continue
        tensors = _state_of(part)
        flats = part.state.tensors() if isinstance(part, SyncedFragment) else {}
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
        part.owed.corrections = corrections
        if isinstance(part, SyncedFragment):
            part.state.load(flats, own["extra"])
            part.state.last_update = None
    return int(meta["inner_step"]), meta["outer_lr"]


def _state_of(part: SyncedPart) -> list[Tensor]:
    if isinstance(part, SyncedFragment):
        return [part.outer, *part.state.tensors().values()]
    return part.tensors()


def _corrections(part: SyncedPart, coefficients: Sequence[float], is_new: bool) -> list[Own]:
    """Return this part's corrections, or room for the corrections of the source."""
    if part.buffers is None:
        return []
    layout = part.buffers.layout
    if len(part.owed.corrections) == len(coefficients) and not is_new:
        return part.owed.corrections
    room = {"dtype": torch.uint8, "device": part.buffers.device}
    empty = [torch.zeros(layout.payload_bytes, **room) for _ in coefficients]  # type: ignore[call-overload]
    return [Own(one, c, layout) for one, c in zip(empty, coefficients, strict=True)]
