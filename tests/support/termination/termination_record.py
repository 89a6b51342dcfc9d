"""What a process of the model keeps of its rounds and says of them, by the package's own code.

Rounds are kept by a real ``ExchangeBuffers``; what is said is ``sealing.ack_of``, put into text and
out of it again: so the model forgets and tells what a replica forgets and tells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from diloco_comm.exchange.buffers import ExchangeBuffers
from diloco_comm.exchange.membership.sealing import ack_of, from_json, to_json
from diloco_comm.exchange.membership.termination import Ack, Decision, decide
from diloco_comm.exchange.round import Header, Round, Standing
from diloco_comm.ops.wire import WireFormat

# (number, epoch, state) of rounds.
Standings = tuple[tuple[int, int, str], ...]


class Code(NamedTuple):
    """What of the package the model goes through."""

    decide: Callable[[Mapping[int, Ack], int], Decision] = decide
    ack_of: Callable[[Any, Mapping[int, int]], Ack] = ack_of
    buffers: type[ExchangeBuffers] = ExchangeBuffers


CODE = Code()


class Record(NamedTuple):
    """What a slot remembers of rounds that have ended; ``ended``: the oldest first."""

    ended: Standings = ()
    applied_epoch: int = 0


@cache
def after_start(code: Code, record: Record, number: int) -> Record:
    buffers = _buffers(code, record, 1)
    (round,) = _rounds(((number, 0, "started"),))
    buffers.add_round(round)
    return _record(buffers)


@cache
def after_apply(code: Code, record: Record, number: int, epoch: int, num_under_way: int) -> Record:
    buffers = _buffers(code, record, num_under_way, ((number, epoch, "agreed"),))
    buffers.commit()
    return _record(buffers)


@cache
def after_rejection(
    code: Code, record: Record, number: int, epoch: int, num_under_way: int
) -> Record:
    buffers = _buffers(code, record, num_under_way, ((number, epoch, "started"),))
    buffers.rounds[0].advance("rejected")
    buffers.standings()
    return _record(buffers)


@cache
def after_change(code: Code, record: Record, applied: Standings, num_under_way: int) -> Record:
    """Enter a group with rounds that were not applied before."""
    buffers = _buffers(code, record, num_under_way, applied)
    buffers.settle(list(buffers.rounds))
    return _record(buffers)


@cache
def ack_by(
    code: Code,
    record: Record,
    held: Standings,
    last: int,
    lineage: int,
    newest_group: tuple[int, tuple[int, ...]],
    group: tuple[int, tuple[int, ...]],
) -> Ack:
    """Return what a replica says that holds these rounds and has applied round ``last``.

    Args:
        newest_group, group: Epoch and members of the newest one that it has agreed to enter, and of
            the one that it is in.
    """
    exchange = SimpleNamespace(
        all_buffers=[_buffers(code, record, 1, held)],
        lineage=lineage,
        newest_group=newest_group,
        epoch=group[0],
        members=group[1],
    )
    return from_json(json.loads(json.dumps(to_json(code.ack_of(exchange, {0: last})))))


def _buffers(
    code: Code, record: Record, num_under_way: int, rounds: Standings = ()
) -> ExchangeBuffers:
    buffers = code.buffers(1, WireFormat("fp32"), num_under_way=num_under_way)
    buffers._ended = {(0, n): Standing(state, epoch) for n, epoch, state in record.ended}  # type: ignore[arg-type]
    buffers.applied_epoch = record.applied_epoch
    buffers.rounds = _rounds(rounds)
    return buffers


def _rounds(rounds: Sequence[tuple[int, int, str]]) -> list[Round]:
    nothing: Any = None
    headers = [Header("sync", fragment=0, round=n) for n, _, _ in rounds]
    return [
        Round(header, nothing, nothing, 0, nothing, None, nothing, state, epoch=epoch)  # type: ignore[arg-type]
        for header, (_, epoch, state) in zip(headers, rounds, strict=True)
    ]


def _record(buffers: ExchangeBuffers) -> Record:
    ended = tuple((n, one.epoch, str(one.state)) for (_, n), one in buffers._ended.items())
    return Record(ended, buffers.applied_epoch)
