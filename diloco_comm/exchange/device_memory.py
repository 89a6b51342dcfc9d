"""Exchanges on streams that are encoded, and sent when the caller has looked at what is encoded.

The host waits for the encoding, and for the others' weights, which depend on it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import _C
from ..base.errors import NonFiniteError, SyncError
from .buffers import ExchangeBuffers
from .headers import Header
from .nccl.streams import Sending, StreamDriver
from .nccl.work import StreamWork
from .round import Round

if TYPE_CHECKING:
    from .exchange import Exchange


def start(
    driver: StreamDriver, buffers: ExchangeBuffers, round: Round, sending: Sending
) -> StreamWork:
    """Enqueue the encoding alone."""
    work = StreamWork(buffers, round, driver.encode(buffers, round, sending), sending)
    buffers.add_round(round)
    return work


def ship(exchange: Exchange, driver: StreamDriver, work: StreamWork) -> None:
    """Agree on the weights, then enqueue the rest; ``ExchangeWork.wait`` tells what failed."""
    buffers, round, sending = work.buffers, work.round, work.sending
    header = round.header
    try:
        if driver.failure:
            raise _error(SyncError, header, f"was not sent: {driver.failure}", "start")
        sending.offered = _agree_on_weights(exchange, round)
        control = exchange.submit_header(buffers, header, sending.stochastic)
    except SyncError as error:
        work.fail(error)
        return
    events = driver.post(buffers, round, sending, driver.mark(buffers))
    round.job = exchange.stream_job(buffers, round, sending, control, events)


def _agree_on_weights(exchange: Exchange, round: Round) -> list[float]:
    """Return the weights of all ranks; a collective call.

    What all ranks have said stays as the round's headers where the round cannot be sent.

    Raises:
        NonFiniteError: None is left, as those that had one were reset.
        SyncError: They are not finite or all zero, or the group fails.
    """
    header = round.header
    own = json.dumps([header.weight, header.is_reset]).encode()
    views = [json.loads(view) for view in exchange.exchange_objects(own)]
    weights = [float(weight) for weight, _ in views]
    total = sum(weights)
    if total > 0:
        return weights
    round.headers = [replace(header, weight=weight, is_reset=reset) for weight, reset in views]
    reset = [m for m, (_, is_reset) in zip(exchange.members, views, strict=True) if is_reset]
    if total == 0 and reset:
        raise _nothing_to_average(header, reset)
    text = f"weights must be finite and not all zero, got {weights}"
    raise _error(SyncError, header, text, "header")


def _nothing_to_average(header: Header, reset: Sequence[int]) -> NonFiniteError:
    error = _error(NonFiniteError, header, _C.nothing_to_average(list(reset)), "header")
    assert isinstance(error, NonFiniteError)
    error.replicas = tuple(reset)
    return error


def _error(kind: type[SyncError], header: Header, why: str, stage: str) -> SyncError:
    message = f"{header.kind} of fragment {header.fragment}, round {header.round}: {why}"
    return kind(message, fragment=header.fragment, round=header.round, stage=stage)
