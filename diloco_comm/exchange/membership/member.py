"""``Member``: this replica's epoch, store and engine, and its small messages to the others."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C
from ...base import env
from ...base.checks import logger_of, timeout_seconds
from ...base.errors import NonFiniteError, SyncError
from ...base.memory import memory_order
from ...base.service import keys
from ...base.service.addresses import Proxy, check_link, proxy_of
from ..buffers import ExchangeBuffers
from ..round import END, TO_BEGIN, Header, error_from, wait_for_job
from .own_link import OwnLink

_log = logger_of(__name__)


@dataclass(frozen=True)
class Options:
    """The arguments of an ``Exchange`` after ``checked``; times are in seconds."""

    lanes: int
    window: int
    chunk_bytes: int | None
    num_under_way: int
    device: torch.device
    impl: str
    joins: bool
    collectives: str
    timeout: float
    join_timeout: float
    suspect_after: float
    report_patience: float
    listen: str | None
    advertise: str | None
    link_keys: keys.LinkKeys | None
    relay: str | None
    proxy: Proxy | None

    @classmethod
    def checked(
        cls,
        *,
        lanes: int,
        window: int,
        chunk_bytes: int | None,
        num_under_way: int,
        device: torch.device | str,
        impl: str,
        joins: bool,
        collectives: str,
        timeout: timedelta | float,
        join_timeout: timedelta | float | None,
        suspect_after: timedelta | float | None,
        report_patience: float | None,
        listen: str | None,
        advertise: str | None,
        link_keys: str | Path | None,
        relay: str | None,
        proxy: str | None,
    ) -> Options:
        """Return the checked options; an option that is None gets its value from the environment.

        Raises:
            ValueError, TypeError: If an option is out of range.
        """
        timeout_s = timeout_seconds(timeout)
        check_link(collectives, listen, advertise, link_keys, relay, proxy)
        for what, value in (("lanes", lanes), ("window", window), ("chunk_bytes", chunk_bytes)):
            if value is not None and value < 1:
                raise ValueError(f"{what} must be at least 1, got {value}")
        patience = env.report_s() if report_patience is None else report_patience
        if not patience > 0:
            raise ValueError(f"report_patience must be positive, got {patience}")
        join_s = env.join_timeout_s() if join_timeout is None else join_timeout
        suspect_s = env.suspect_after_s() if suspect_after is None else suspect_after
        options = cls(
            lanes=lanes,
            window=window,
            chunk_bytes=chunk_bytes,
            num_under_way=num_under_way,
            device=torch.device(device),
            impl=impl,
            joins=joins,
            collectives=collectives,
            timeout=timeout_s,
            join_timeout=timeout_seconds(join_s, "join_timeout"),
            suspect_after=timeout_seconds(suspect_s, "suspect_after"),
            report_patience=patience,
            listen=listen,
            advertise=advertise,
            link_keys=keys.link_keys(link_keys),
            relay=relay,
            proxy=proxy_of(proxy),
        )
        options._check_collectives()
        return options

    def make_link(self, name: str) -> OwnLink | None:
        """Begin to listen for the peers of the exchange of this name; None over gloo and NCCL.

        Raises:
            ValueError: If another exchange listens at that port, and its link cannot be shared.
            RuntimeError: If this process cannot listen at that port, cannot encrypt, or cannot
                reach the relay.
        """
        if self.collectives != "tcp":
            return None
        place = self.listen, self.advertise, self.link_keys, self.relay, self.proxy
        return OwnLink.of_exchange(name, *place)

    def _check_collectives(self) -> None:
        if self.collectives not in ("gloo", "tcp", "nccl"):
            raise ValueError(f"collectives must be gloo, tcp or nccl, got {self.collectives!r}")
        if self.collectives == "nccl" and self.device.type == "cpu":
            raise ValueError("collectives nccl need parameters on a GPU, these are in CPU memory")
        if self.collectives == "nccl" and self.lanes > 1:
            raise ValueError(
                "lanes are connections of gloo and tcp: with nccl leave them at 1, got "
                f"{self.lanes}"
            )


@dataclass(frozen=True)
class Epoch:
    """A time in which a group has the same members.

    Attributes:
        number: The number of the epoch.
        members: The numbers of the replicas, rising.
        joined: Numbers of the members that are new in this epoch.
        agreed_step: The least inner step of the members that are not new; -1 without any.
    """

    number: int
    members: tuple[int, ...]
    joined: tuple[int, ...] = ()
    agreed_step: int = -1


class Member:
    """The base of ``Exchange``: this replica's epoch, store and engine, and its small messages.

    Attributes:
        epoch, members: Number of the present epoch, and its replicas in rank order.
        rank, size: This replica's place among the members, and how many members there are.
        joined, agreed_step: See ``Epoch``.
        store: The part of the user's store that belongs to the exchanges of this name.
        board: See ``Exchange``.
        impl: Implementation of the operators.
        joins: This replica joins, or has joined, a group that existed before.
        inner_step: The inner step of this replica's newest exchange; -1 before the first.
        last_error: The last error in this epoch; None once an exchange has succeeded.
        tcp: The link that has all connections to the peers; None over gloo and NCCL.
    """

    def __init__(
        self,
        engine: _C.Engine,
        store: dist.Store,
        replica: int,
        current: Epoch,
        options: Options,
        name: str,
        line_name: str | None,
        tcp: OwnLink | None,
    ) -> None:
        self.engine, self.tcp = engine, tcp
        self.store = self._users_store = store
        self.board: dist.Store | None = None
        self.replica, self.name = replica, name
        self.line_name = name if line_name is None else line_name
        self.lanes, self.window = options.lanes, options.window
        self.chunk_bytes, self.num_under_way = options.chunk_bytes, options.num_under_way
        self.collectives, self.device = options.collectives, options.device
        self.impl, self.joins = options.impl, options.joins
        self.timeout, self.join_timeout = options.timeout, options.join_timeout
        self.suspect_after, self.report_patience = options.suspect_after, options.report_patience
        self.link_keys, self.proxy = options.link_keys, options.proxy
        self.inner_step = -1
        self.last_error: SyncError | None = None
        self._all_buffers: weakref.WeakSet[ExchangeBuffers] = weakref.WeakSet()
        self._is_sending_blob = False
        self._enter_epoch(current)

    # --------------------------------------------------------------------------- the epoch

    def _enter_group(self, number: int, members: tuple[int, ...]) -> None:
        self.epoch, self.members = number, members
        self.rank, self.size = members.index(self.replica), len(members)

    def _enter_epoch(self, epoch: Epoch) -> None:
        self._enter_group(epoch.number, epoch.members)
        self.joined, self.agreed_step = epoch.joined, epoch.agreed_step

    def blame(self, error: SyncError) -> SyncError:
        """Return an error with the missing and the living replicas; overridden in ``Exchange``."""
        return error

    @property
    def is_dead(self) -> bool:
        """Whether this epoch has failed, so that only ``change_group`` or ``close`` can follow."""
        return bool(self.engine.dead_reason)

    @property
    def has_failed(self) -> bool:
        """Whether the last exchange failed; not after a NonFiniteError, as the group goes on."""
        return not isinstance(self.last_error, NonFiniteError | None)

    @property
    def all_buffers(self) -> list[ExchangeBuffers]:
        return list(self._all_buffers)

    def is_busy(self) -> bool:
        """Whether exchanges are under way; from any thread."""
        try:
            return self._is_sending_blob or not self.is_idle
        except RuntimeError:  # Another thread made buffers meanwhile: the set has changed.
            return True

    def wait(self) -> tuple[float, tuple[int, ...]]:
        """Return for how long the caller has waited for a round, and for which replicas to begin.

        May be called from any thread.

        Returns:
            Seconds, 0 without a wait; and the numbers of the replicas, () if these are not known.
        """
        with suppress(RuntimeError):  # Another thread made buffers meanwhile: the set has changed.
            for round in [round for buffers in self._all_buffers for round in buffers.rounds]:
                since, job = round.waits_since, round.job
                if since and job is not None:
                    found = TO_BEGIN.findall(job.waiting)
                    return time.monotonic() - since, tuple(map(int, found))
        return 0.0, ()

    @property
    def is_idle(self) -> bool:
        """Whether every exchange of a fragment that was started has ended."""
        return all(buffers.is_idle for buffers in self._all_buffers)

    def seal(self) -> None:
        """End this epoch for good, whatever is under way, before the group changes; idempotent.

        From now on no vote of this replica is sent, and no vote is received. Waits for no peer.
        Only ``change_group`` or ``close`` can follow.
        """
        self.engine.seal()

    # --------------------------------------------------------------------------- the store

    def use_store(self, store: dist.Store) -> None:
        """Use another store from now on, with this exchange's prefix."""
        self._users_store = store
        self.store = self.store_of(self.name)

    def store_of(self, name: str) -> dist.Store:
        """Return the user's store with the prefix of the exchanges of this name."""
        return dist.PrefixStore(f"diloco_comm/{name}", self._users_store)

    # --------------------------------------------------------------------------- small messages

    def exchange_objects(self, blob: bytes, *, is_end: bool = False) -> list[bytes]:
        """Send ``blob`` to every replica and return the blobs of all, in rank order.

        Args:
            blob: Any bytes.
            is_end: This replica calls ``flush``. If other replicas train on, this one is in the
                ``ended`` of their ReplicaMismatch; see there.
        """
        if self.size == 1:
            self.engine.check_process()
            return [bytes(blob)]
        job = self._submit_blob(blob, is_end=is_end)
        self._finish(job)
        return [received.numpy().tobytes() for received in job.blobs]

    def _submit_blob(self, blob: bytes, *, is_end: bool = False) -> _C.Job:
        tensor = (
            torch.frombuffer(bytearray(blob), dtype=torch.uint8)
            if blob
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        header = _C.Header("exchange_objects")
        header.blob_bytes, header.inner_step = len(blob), self.inner_step
        header.gap = END if is_end else header.gap
        return self._begin(self.engine.submit, header, blob=tensor)

    def broadcast(self, tensors: list[Tensor], source_rank: int) -> None:
        """Copy the tensors of rank ``source_rank`` to all, exactly and in place; any dtype.

        Raises:
            ReplicaMismatch: If the numbers of bytes or the sources differ; nothing is changed.
        """
        peers = [rank for rank in range(self.size) if rank != source_rank]
        self.copy_to(tensors, source_rank, peers, [tensor.nbytes for tensor in tensors])

    def copy_to(
        self,
        tensors: Sequence[Tensor],
        source_rank: int,
        target_ranks: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """Copy the tensors of one rank to some others, exactly and in place; all ranks call this.

        Args:
            tensors: Tensors of any dtype; ignored on a rank that neither sends nor receives.
            source_rank: The rank that sends.
            target_ranks: The ranks that receive.
            sizes: Bytes of each tensor; all ranks give the same.

        Raises:
            ReplicaMismatch: If the sizes or the sources differ; nothing is changed.
        """
        if not 0 <= source_rank < self.size:
            raise ValueError(f"source_rank must be in [0, {self.size}), got {source_rank}")
        header = _C.Header("broadcast")
        header.source_rank = source_rank
        header.num_elements, header.layout_hash = sum(sizes), _hash_sizes(sizes)
        if self.size == 1:
            self.engine.check_process()
            return
        is_source, is_target = self.rank == source_rank, self.rank in target_ranks
        buffers = [_as_bytes(tensor) for tensor in tensors] if is_source or is_target else []
        sends = [(peer, b) for b in buffers for peer in target_ranks if b.numel()]
        recvs = [(source_rank, b) for b in buffers if b.numel()]
        job = self._begin(
            self.engine.submit,
            header,
            sends=sends if is_source else [],
            recvs=recvs if is_target else [],
        )
        self._finish(job)
        if is_target:
            for tensor, buffer in zip(tensors, buffers, strict=True):
                _write_back(tensor, buffer)

    def submit_header(self, buffers: ExchangeBuffers, header: Header, stochastic: bool) -> _C.Job:
        """Begin to exchange and compare the headers of a round on streams; return the job."""
        native = header.native(buffers.layout, buffers.num_chunks, stochastic)
        return self._begin(self.engine.submit, native, of=header)

    def _finish(self, job: _C.Job) -> None:
        self._is_sending_blob = True
        try:
            wait_for_job(job, inf)
        finally:
            self._is_sending_blob = False
        if job.failure is not None:
            raise self.blame(error_from(job.failure, headers=job.headers))

    def _begin(
        self,
        begin: Callable[..., _C.Job],
        *arguments: Any,
        of: Header | None = None,
        **named: Any,
    ) -> _C.Job:
        """Hand a job to the engine; if the epoch has failed before, raise a SyncError."""
        try:
            return begin(*arguments, **named)
        except RuntimeError as error:
            if not self.is_dead:
                raise
            raise self.refusal(str(error), of) from error

    def refusal(self, message: str, of: Header | None) -> SyncError:
        """Return the error of an exchange in an epoch that has failed before.

        The missing replicas are taken from the first error.
        """
        fragment, round = (-1, -1) if of is None else (of.fragment, of.round)
        failure = self.engine.dead_failure
        missing = () if failure is None else failure.missing
        error = SyncError(message, fragment=fragment, round=round, stage="start", missing=missing)
        return self.blame(error)


def checked_members(members: Sequence[int], replica: int) -> tuple[int, ...]:
    """Return the ids of the members of a group.

    Raises:
        ValueError: If the ids are not sorted and unique, lack ``replica``, or are too many.
    """
    result = tuple(members)
    if list(result) != sorted(set(result)) or not result or result[0] < 0:
        raise ValueError(f"members must be sorted, unique ids from 0, got {list(result)}")
    if replica not in result:
        raise ValueError(f"replica {replica} is not one of the members {list(result)}")
    if len(result) > _C.MAX_REPLICAS:
        raise ValueError(f"members must be at most {_C.MAX_REPLICAS} replicas, got {len(result)}")
    return result


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as uint8; a copy unless the tensor is contiguous, in CPU memory."""
    source = tensor.detach()
    if source.device.type != "cpu" or not source.is_contiguous():
        source = source.contiguous().cpu()
    return memory_order(source).view(torch.uint8)


def _write_back(tensor: Tensor, buffer: Tensor) -> None:
    target = tensor.detach()
    if buffer.numel() and buffer.data_ptr() != target.data_ptr():
        target.copy_(buffer.view(target.dtype).view(target.shape))


def _hash_sizes(sizes: Sequence[int]) -> int:
    digest = 1469598103934665603
    for size in sizes:
        digest = ((digest ^ size) * 1099511628211) & ((1 << 64) - 1)
    return digest
