"""A member of a group whose exchanges go over NCCL, on streams.

An exchange starts at once, or is *held* until the caller has checked the encoded values. In the
second case the host waits for the encoding, and then for the weights of the other replicas: a
replica with bad values has weight 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ... import _C
from ...base.errors import NonFiniteError, SyncError
from ..buffers import ExchangeBuffers
from ..membership.member import Member
from ..round import Header, Round, Sending
from . import group as nccl_group
from .streams import StreamDriver, StreamJob

# NCCL gets so many seconds to connect a changed group, even if ``join_timeout`` is shorter; but
# never more than ``timeout``.
_CONNECT_S = 30.0


class StreamMember(Member):
    """A member that, with collectives "nccl", exchanges fragments on their device.

    Attributes:
        fixed_weights: The weights of all ranks, if none of them changes; see ``fix_weight``.
    """

    fixed_weights: list[float] | None = None
    _driver: StreamDriver | None = None

    @property
    def is_dead(self) -> bool:
        return super().is_dead or bool(self._driver and self._driver.failure)

    def seal(self) -> None:
        if self._driver is not None:
            self._driver.seal("a change of the group has begun")
        super().seal()

    def _connect_streams(self, members: tuple[int, ...], store: dist.Store | None) -> None:
        """End the NCCL group of the last epoch; connect this device with the members' devices.

        Raises:
            SyncError: If a device does not connect.
        """
        if self.collectives != "nccl":
            return
        try:
            if store is not None:
                store = dist.PrefixStore(f"{self.name}/streams", store)
            self._open_streams(members, store, self._streams_limit())
        except Exception as error:
            if self._driver is not None:
                self._driver.abort(str(error))
            raise SyncError(f"the devices did not connect: {error}", stage="connect") from error

    def _streams_limit(self) -> float:
        """Return the most seconds that the devices may take to connect."""
        # A first group may be slow, as NCCL starts on many hosts; a changed group must not let the
        # survivors wait for long.
        is_first = self._driver is None and not self.joins
        changed_s = min(self.timeout, max(self.join_timeout, _CONNECT_S))
        return self.timeout if is_first else changed_s

    def _open_streams(
        self, members: tuple[int, ...], store: dist.Store | None, limit: float
    ) -> None:
        if self._driver is not None:
            self._driver.abort("the group has changed")
        group, rank, size = None, members.index(self.replica), len(members)
        if size > 1:
            assert store is not None
            group = nccl_group.make_group(store, rank, size, self.device, self.timeout)
        self._driver = StreamDriver(
            self.device, group, rank, size, self.timeout, self.impl, self.engine
        )
        self._driver.connect(limit)
        self.fixed_weights = None

    def fix_weight(self, weight: float | None) -> None:
        """Exchange weights that never change, if no rank's weight does; a collective call.

        Then the host need not exchange the weights before each round on streams.

        Args:
            weight: The weight of this rank; None: it may change.
        """
        if self.collectives != "nccl":
            return
        weights = [json.loads(blob) for blob in self.exchange_objects(json.dumps(weight).encode())]
        self.fixed_weights = None if None in weights else weights

    def _start_on_streams(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, is_held: bool
    ) -> Round:
        """Enqueue an exchange, or only its encoding if the exchange is held."""
        driver, header = self._driver, round.header
        assert driver is not None
        if driver.failure:
            raise self.refusal(
                f"epoch {self.epoch} of this replica's group is dead: {driver.failure}. Call "
                "change_group() with the replicas that live",
                header,
            )
        if is_held:
            round.encoded = driver.encode(buffers, round, sending)
        else:
            sending.offered = self._weights_of(header)
            control = self.submit_header(buffers, header, sending.stochastic)
            events = driver.enqueue(buffers, round, sending)
            round.job = self._watch(driver, buffers, round, sending, control, events)
        round.sending = sending
        buffers.add_round(round)
        return round

    def _weights_of(self, header: Header) -> list[float]:
        """Return the weights of all ranks in a round; exchange them unless they are fixed.

        In an ``all_reduce`` all weights are 1.
        """
        weights = self.fixed_weights if header.kind != "all_reduce" else [1.0] * self.size
        if weights is None:
            own = json.dumps(header.weight).encode()
            weights = [json.loads(blob) for blob in self.exchange_objects(own)]
        if not sum(weights) > 0:
            raise ValueError(f"weights must be finite and not all zero, got {weights}")
        return weights

    def _ship_on_streams(self, round: Round) -> None:
        """Agree on the weights, then enqueue the rest of a held exchange.

        If this fails, ``Round.wait`` raises the error.
        """
        driver, sending = self._driver, round.sending
        assert driver is not None and sending is not None and round.encoded is not None
        buffers = next(one for one in self._all_buffers if round in one.rounds)
        encoded, round.encoded = round.encoded, None
        try:
            if driver.failure:
                raise _error(SyncError, round.header, f"was not sent: {driver.failure}", "start")
            sending.offered = _agree_on_weights(self, round)
            control = self.submit_header(buffers, round.header, sending.stochastic)
        except SyncError as error:
            round.fail(error)
            return
        finally:
            driver.give_back((encoded,))
        events = driver.post(buffers, round, sending, driver.mark(buffers))
        round.job = self._watch(driver, buffers, round, sending, control, events)

    def _watch(
        self,
        driver: StreamDriver,
        buffers: ExchangeBuffers,
        round: Round,
        sending: Sending,
        control: _C.Job,
        events: tuple[torch.Event, ...],
    ) -> StreamJob:
        """Return the job for an exchange that is enqueued."""
        sent = (self.size - 1) * buffers.layout.payload_bytes
        if buffers.num_phases == 2:
            both = buffers.layout.payload_bytes + buffers.mean_layout.payload_bytes
            sent = (self.size - 1) * (both // self.size)
        presumed = [
            replace(round.header, weight=weight).native(
                buffers.layout, buffers.num_chunks, sending.stochastic
            )
            for weight in sending.offered
        ]
        return StreamJob(driver, control, round, events, presumed, self.members, sent)


def _agree_on_weights(member: Member, round: Round) -> list[float]:
    """Return the weights of all ranks; a collective call.

    If this raises because of the weights, the round's headers have all ranks' weights and resets.

    Raises:
        NonFiniteError: If all weights are 0 because every rank that had one was reset.
        SyncError: If the weights are not finite or all zero, or the group fails.
    """
    header = round.header
    own = json.dumps([header.weight, header.is_reset]).encode()
    views = [json.loads(view) for view in member.exchange_objects(own)]
    weights = [float(weight) for weight, _ in views]
    total = sum(weights)
    if total > 0:
        return weights
    round.headers = [replace(header, weight=weight, is_reset=reset) for weight, reset in views]
    reset = [r for r, (_, is_reset) in zip(member.members, views, strict=True) if is_reset]
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
