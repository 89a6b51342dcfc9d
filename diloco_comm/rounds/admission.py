"""Hands the shared outer state to replicas that join, while all members wait.

A newcomer may have copied fragments already while the members trained ("beside training"). Then it
takes only the rounds that it lacks, and is given only the fragments that still differ.
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
    """A newcomer's copy of the outer state, made while the members trained."""

    def catch_up(self, targets: Mapping[int, int]) -> None:
        """Take the rounds that the copy lacks, while the members wait.

        Args:
            targets: For each fragment, by index, the number of the members' next round.
        """
        ...


@dataclass(frozen=True)
class Shared:
    """The result of ``share``.

    Attributes:
        inner_step: The source's inner step.
        copied_bytes: Bytes of outer state given to newcomers, while all members waited.
        is_equal: All replicas have compared their outer states, which are the same.
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
    """Give newcomers the outer state of the source, the lowest replica that trains already.

    A collective call. A newcomer's local parameters become the outer ones, and it takes the outer
    learning rate of the source.

    Args:
        parts: All fragments, and the averaged buffers.
        inner_step: This replica's inner step.
        outer: The outer optimizer.
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
    """Let newcomers catch up, and compare all replicas' outer states.

    Returns:
        The parts in which a newcomer still differs from the source, and whether all replicas have
        the same outer state.
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

    No round may be under way. If outer parameters differ between replicas (``Eager``), a newcomer
    becomes a copy of the source, with the corrections that the source has yet to make to its own
    outer parameters (``Owed.corrections``). It does not get the values of lost rounds, which the
    source itself will send again.

    Args:
        copied: The parts whose tensors are given; for the others, only numbers are.
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
            # Members take part in the broadcast, but keep their own values.
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
    """Return this part's corrections, or zeros to receive the source's corrections into."""
    if part.buffers is None:
        return []
    layout = part.buffers.layout
    if len(part.owed.corrections) == len(coefficients) and not is_new:
        return part.owed.corrections
    room = {"dtype": torch.uint8, "device": part.buffers.device}
    empty = [torch.zeros(layout.payload_bytes, **room) for _ in coefficients]  # type: ignore[call-overload]
    return [Own(one, c, layout) for one, c in zip(empty, coefficients, strict=True)]
