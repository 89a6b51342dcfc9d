"""Exchanges on streams that are encoded, and sent when the caller has looked at what is encoded.

The host waits for the encoding, and for the others' weights, which depend on it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .. import _C
from ..base.errors import NonFiniteError, SyncError
from ..base.memory import Ballot
from .buffers import ExchangeBuffers
from .headers import Header
from .nccl.streams import Sending, StreamDriver
from .work import ExchangeWork, Round

if TYPE_CHECKING:
    from .exchange import Exchange


class HeldJob:
    """What ``ExchangeWork`` asks of an exchange that has not begun.

    Attributes:
        headers: Every rank's, in rank order, as far as they are known when it cannot begin.
    """

    failure = None
    is_done = False

    def __init__(self, encoded: torch.Event, ballot: Ballot, sending: Sending) -> None:
        self.encoded, self.ballot, self.sending = encoded, ballot, sending
        self.headers: list[Header] = []

    @property
    def num_bad_encoded(self) -> int | None:
        return int(self.ballot.host_bad) if self.encoded.query() else None


def start(
    driver: StreamDriver, buffers: ExchangeBuffers, round: Round, sending: Sending
) -> ExchangeWork:
    """Enqueue the encoding alone."""
    assert round.own.ballot is not None
    job: Any = HeldJob(driver.encode(buffers, round, sending), round.own.ballot, sending)
    work = ExchangeWork(buffers, round, job)
    buffers.add_round(round, work)
    return work


def ship(exchange: Exchange, driver: StreamDriver, work: ExchangeWork) -> None:
    """Agree on the weights, then enqueue the rest; ``ExchangeWork.wait`` tells what failed."""
    job: Any = work._job
    assert isinstance(job, HeldJob)
    buffers, round, header = work._buffers, work._round, work._round.header
    try:
        if driver.failure:
            raise _error(SyncError, header, f"was not sent: {driver.failure}", "start")
        job.sending.offered = _agree_on_weights(exchange, job, header)
        control = exchange.submit_header(buffers, header, job.sending.stochastic)
    except SyncError as error:
        work.fail(error)
        return
    events = driver.post(buffers, round, job.sending, driver.mark(buffers))
    work._job = exchange.stream_job(buffers, round, job.sending, control, events)


def _agree_on_weights(exchange: Exchange, job: HeldJob, header: Header) -> list[float]:
    """Return the weights of all ranks; a collective call.

    Raises:
        NonFiniteError: None is left, as those that had one were reset.
        SyncError: They are not finite or all zero, or the group fails.
    """
    own = json.dumps([header.weight, header.is_reset]).encode()
    views = [json.loads(view) for view in exchange.exchange_objects(own)]
    weights = [float(weight) for weight, _ in views]
    total = sum(weights)
    if total > 0:
        return weights
    job.headers = [replace(header, weight=weight, is_reset=reset) for weight, reset in views]
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
