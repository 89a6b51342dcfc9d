"""The exchange engine of one replica: averages a fragment's payloads over all replicas.

The work is done by a C++ thread (``csrc/exchange``) on process groups of its own; this class checks
arguments, owns the buffers and turns failures into exceptions.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..base import env
from ..base.background import batch_threads
from ..base.checks import timeout_seconds
from ..base.errors import LeftBehind, SyncError
from ..base.memory import empty_pages
from ..ops.dispatch import resolve_impl
from ..ops.wire import STAGE_ENCODE, STAGE_REDUCE, WireFormat, rng_key
from . import device_memory
from .buffers import ExchangeBuffers
from .headers import Header, error_from, from_native, to_native, verdict_of
from .membership import regroup
from .membership.regroup import Repair
from .membership.sealing import LastRounds
from .nccl import group as nccl_group
from .nccl.jobs import StreamJob
from .nccl.streams import Sending, StreamDriver
from .waiting import describe_store, wait_for_job
from .work import ExchangeWork, Round, Terms

__all__ = [
    "Exchange",
    "ExchangeBuffers",
    "ExchangeWork",
    "Header",
    "Repair",
    "Terms",
    "empty_pages",
    "error_from",
    "from_native",
]

_log = logging.getLogger(__name__)
DEFAULT_TIMEOUT = timedelta(minutes=30)
DEFAULT_WINDOW = 2
# The least that NCCL has to connect a changed group, however short the ``join_timeout``.
_CONNECT_S = 30.0
_open: weakref.WeakSet[Exchange] = weakref.WeakSet()


class Exchange:
    """Exchange payloads with the other replicas, in an epoch of fixed membership.

    Args:
        store: Shared by all replicas; it must outlive those that may fail.
        replica: Our id.
        members: Sorted ids of all replicas of this epoch, ours among them.
        lanes: Data connections to each peer.
        chunk_bytes: Payload bytes of a chunk, equal on all replicas; None chooses by size.
        timeout: Of one exchange, from its turn on the engine thread to its vote.
        device: Of the fragments by default, such as "cuda:0". Only encoded bytes are copied to host
            memory, where they travel and are averaged.
        impl: Implementation of the operators; "" is the default one.
        epoch: The first epoch is above this.
        name: Distinguishes several exchanges on one store.
        line_name: Equal for the exchanges of a replica's workers, which go on together when the
            group changes; default: ``name``.
        join: We come to replicas that call ``change_group`` with us among the members.
        window: Chunks under way in each phase and lane, with more than two replicas.
        num_under_way: Rounds of one fragment that may be agreed on and not yet applied.
        collectives: "gloo", or "nccl": fragments on the device are exchanged there, on streams;
            small messages travel over gloo all the same.
        report_patience: Seconds that a failed exchange waits for the reports of the others;
            default: the environment's, 3.
        join_timeout: Seconds that ``change_group``, and one that joins, wait for members of which
            nothing is heard; ``timeout`` is for those that live, and for the first meeting. In
            ``change_group``, and for one that joins, also the seconds in which NCCL must connect
            the members once they have met, 30 at least; a first group has ``timeout`` for that.
            Default: the environment's, 60.
        suspect_after: Seconds without a sign of life, or without a way to it, after which a peer
            that is waited for is given up; default: the environment's, 30.

    Attributes:
        rank, size: In the current epoch.
        members, epoch: Of the current epoch.
        joined: Members that came new in this epoch.
        agreed_rounds: Last applied round of each fragment in this epoch's members, after repair.
        agreed_step: The least of the inner steps that members came with, newcomers aside.
        link: Description of the emulated link, or None.

    Raises:
        ValueError: If an argument is out of range.
        ReplicaMismatch, SyncError: If the replicas do not come together.
    """

    def __init__(
        self,
        store: dist.Store,
        replica: int,
        members: Sequence[int],
        *,
        lanes: int = 1,
        chunk_bytes: int | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        device: torch.device | str = "cpu",
        impl: str = "",
        epoch: int = 0,
        name: str = "default",
        line_name: str | None = None,
        join: bool = False,
        window: int = DEFAULT_WINDOW,
        num_under_way: int = 1,
        collectives: str = "gloo",
        report_patience: float | None = None,
        join_timeout: timedelta | float | None = None,
        suspect_after: timedelta | float | None = None,
    ) -> None:
        self.timeout = timeout_seconds(timeout)
        for what, value in (("lanes", lanes), ("window", window), ("chunk_bytes", chunk_bytes)):
            if value is not None and value < 1:
                raise ValueError(f"{what} must be at least 1, got {value}")
        patience = env.report_s() if report_patience is None else report_patience
        if not patience > 0:
            raise ValueError(f"report_patience must be positive, got {patience}")
        self.join_timeout = timeout_seconds(
            env.join_timeout_s() if join_timeout is None else join_timeout, "join_timeout"
        )
        self.suspect_after = timeout_seconds(
            env.suspect_after_s() if suspect_after is None else suspect_after, "suspect_after"
        )
        self.device = torch.device(device)
        self._check_collectives(collectives, lanes)
        self.collectives = collectives
        self.fixed_weights: list[float] | None = None
        self._driver: StreamDriver | None = None
        self._joins = join
        self.replica, self.name = replica, name
        self.line_name = name if line_name is None else line_name
        self.members = _checked_members(members, replica)
        self.epoch = epoch
        self.lanes, self.window, self.impl = lanes, window, impl
        self.chunk_bytes = chunk_bytes
        self.num_under_way = num_under_way
        self.link: str | None = None
        self.inner_step = -1
        self.joined: tuple[int, ...] = ()
        self.agreed_rounds: dict[int, int] = {}
        self.agreed_step = -1
        self.lineage = 0  # the newest epoch whose rounds are in our state
        # The newest epoch that we have agreed to enter, and its members.
        self.newest_group: tuple[int, tuple[int, ...]] = (0, ())
        self._all_buffers: weakref.WeakSet[ExchangeBuffers] = weakref.WeakSet()
        self._queues: dict[torch.device, _C.DeviceQueue] = {}
        self._closed = False
        self.last_error: SyncError | None = None  # of this epoch, until an exchange succeeds
        self._told_epoch = -1  # the last epoch whose store was logged as lost
        self.store = self._users_store = store
        with batch_threads():
            self._engine = _C.Engine(
                replica, self.timeout, patience, self.suspect_after, env.gloo_interface()
            )
        _open.add(self)
        try:
            regroup.enter(self, self.members, store, last_rounds=None, join=join)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | None = None, **kwargs: Any) -> Exchange:
        """Make an exchange among the ranks of a process group; a collective call.

        Our groups are our own: nothing interleaves with the collectives of ``group``.
        """
        store, rank, size = regroup.store_of_group(group)
        return cls(store, rank, range(size), **kwargs)

    def _check_collectives(self, collectives: str, lanes: int) -> None:
        if collectives not in ("gloo", "nccl"):
            raise ValueError(f"collectives must be gloo or nccl, got {collectives!r}")
        if collectives == "nccl" and self.device.type == "cpu":
            raise ValueError("collectives nccl need parameters on a GPU, these are in CPU memory")
        if collectives == "nccl" and lanes > 1:
            raise ValueError(
                f"lanes are connections of gloo: with nccl leave them at 1, got {lanes}"
            )

    @property
    def address(self) -> str:
        """Where peers may try to reach this replica; empty where that is not known."""
        return self._engine.address

    @property
    def rank(self) -> int:
        return self.members.index(self.replica)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def is_dead(self) -> bool:
        """Whether this epoch failed, so that only ``change_group`` or ``close`` is left."""
        return bool(self._engine.dead_reason or (self._driver and self._driver.failure))

    def tell_of_lost_store(self) -> None:
        """Log once in an epoch that the connection to its store has broken."""
        if self._told_epoch == self.epoch or not self._engine.is_store_lost:
            return
        self._told_epoch = self.epoch
        _log.warning(
            "this replica's connection to the store at %s has broken, and the store is not asked "
            "again: rounds go on without a store, but this replica cannot agree with others on who "
            "has failed, and nobody can join, until all replicas call change_group(members, "
            "store=...) with another store",
            describe_store(self.store),
        )

    @property
    def is_idle(self) -> bool:
        """Whether every exchange of a fragment that was started has ended."""
        return all(buffers.is_idle for buffers in self._all_buffers)

    def seal(self) -> None:
        """End this epoch for good, whatever is under way, before the group changes; idempotent.

        Afterwards no vote of ours leaves and we hear none. Waits for no peer. Only ``change_group``
        or ``close`` is left.
        """
        if self._driver is not None:
            self._driver.seal("a change of the group has begun")
        self._engine.seal()

    def buffers(
        self,
        num_elements: int,
        wire: WireFormat,
        *,
        error_feedback: bool = False,
        residual_dtype: torch.dtype = torch.float32,
        carries: bool = False,
        device: torch.device | None = None,
    ) -> ExchangeBuffers:
        """Allocate the persistent buffers of one fragment.

        Args:
            num_elements: Elements of the fragment, at least 1.
            wire: What travels.
            error_feedback: Keep what encoding loses, and add it to the next round.
            residual_dtype: Of what is kept, fp32 or bf16.
            carries: The caller moves the parameters at each send; see ``residuals``.
            device: Of the fragment; default: that of this exchange.

        Raises:
            ValueError: If there is no element, or chunk_bytes would cut it into more chunks than an
                exchange may have.
        """
        device = self.device if device is None else device
        buffers = ExchangeBuffers(
            num_elements,
            wire,
            error_feedback=error_feedback,
            residual_dtype=residual_dtype,
            carries=carries,
            num_under_way=self.num_under_way,
            device=device,
            is_streamed=self.collectives == "nccl" and device.type != "cpu",
        )
        self.plan_buffers(buffers)
        self._all_buffers.add(buffers)
        return buffers

    def plan_buffers(self, buffers: ExchangeBuffers) -> None:
        """Lay a slot out for the current group."""
        # What was asked for is an implementation for tensors of our device.
        impl = self.impl if buffers.device.type == self.device.type else ""
        if buffers.device.type == "cuda":
            # The engine calls encode, past the function that would choose for the operator.
            impl = resolve_impl(impl, "cuda", "encode")
        buffers.plan(self.rank, self.size, self.chunk_bytes, self.lanes, self.window, impl)
        if buffers.is_streamed:
            assert self._driver is not None
            self._driver.reserve(buffers.staging_bytes, buffers.num_chunks)
        else:
            self._engine.reserve_staging(buffers.staging_bytes)

    @property
    def all_buffers(self) -> list[ExchangeBuffers]:
        return list(self._all_buffers)

    def start(
        self,
        buffers: ExchangeBuffers,
        *,
        outer: Tensor | None,
        params: list[Tensor],
        header: Header,
        stochastic: bool = False,
        seed: int = 0,
        loader: _C.ChunkLoader | None = None,
        overlapped: bool = False,
        is_held: bool = False,
    ) -> ExchangeWork:
        """Encode a fragment and begin its exchange; return when everything is encoded.

        The first chunk travels while the second is encoded, unless ``overlapped``. ``params`` and
        ``outer`` may change as soon as this returns: on a device, in the caller's stream, where the
        encoding is enqueued.

        Args:
            buffers: The fragment's buffers.
            outer: fp32 [num_elements]; None encodes the parameters themselves.
            params: The fragment's tensors, num_elements in all.
            header: What the other replicas are told and compare.
            stochastic: Round stochastically, keyed by ``seed``, replica, round and fragment.
            loader: Brings ``outer``, which is in page-locked memory then, to the device.
            overlapped: The caller computes before it waits. What is in host memory is encoded
                whole before any of it is sent, which would hold the caller up where cores are few.
            is_held: Only encode: ``ship`` sends it, when the caller has looked at it.

        Raises:
            SyncError: If the epoch is dead.
            RuntimeError: If the exchange is closed, or the process was forked.
        """
        self._engine.check_process()
        self.inner_step = header.inner_step
        round = buffers.open_round(header)
        round.epoch = self.epoch
        keys = [
            rng_key(seed, self.replica, stage, header.round, header.fragment) if stochastic else 0
            for stage in (STAGE_ENCODE, STAGE_REDUCE)
        ]
        if buffers.is_streamed:
            sending = Sending(outer, params, [], stochastic, keys[0], keys[1], loader)
            return self._start_on_streams(buffers, round, sending, is_held)
        residuals = buffers.residuals
        reduce_residual, new_reduce_residual = residuals.reduction(header.round)
        job = self._begin(
            self._engine.start,
            of=header,
            plan=buffers.native,
            header=to_native(header, buffers, stochastic),
            payload=round.own.host,
            result=None if round.result is None else round.result.host,
            outer=outer,
            params=params,
            encode_key=keys[0],
            reduce_key=keys[1],
            residual=residuals.added,
            new_residual=residuals.new,
            reduce_residual=reduce_residual,
            new_reduce_residual=new_reduce_residual,
            bad=round.own.bad_host,
            staging=self._staging(buffers, round, loader),
            is_overlapped=overlapped,
            is_held=is_held,
        )
        work = ExchangeWork(buffers, round, job)
        buffers.add_round(round, work)
        return work

    def ship(self, work: ExchangeWork) -> None:
        """Send what ``start`` was told to hold; what cannot be sent fails like any exchange."""
        if isinstance(work._job, _C.Job):
            self._engine.ship(work._job, work._round.header.is_reset)
        else:
            assert self._driver is not None
            device_memory.ship(self, self._driver, work)

    def use_store(self, store: dist.Store) -> None:
        """Meet on this store from now on, under this exchange's name."""
        self._users_store = store
        self.store = self.store_of(self.name)

    def store_of(self, name: str) -> dist.Store:
        """Return the part of the store that an exchange of this name has."""
        return dist.PrefixStore(f"diloco_comm/{name}", self._users_store)

    def leave_streams(self, reason: str) -> None:
        """End the streams of an epoch that does not begin."""
        if self._driver is not None:
            self._driver.abort(reason)

    def streams_limit(self) -> float:
        """Return the seconds in which the devices of the next group must have connected."""
        # A first group may start NCCL cold, on many hosts; a changed group holds up survivors.
        is_first = self._driver is None and not self._joins
        return self.timeout if is_first else min(self.timeout, max(self.join_timeout, _CONNECT_S))

    def enter_streams(self, store: dist.Store, epoch: int, rank: int, size: int) -> None:
        """Leave the streams of the last epoch for those of the next one."""
        if self.collectives != "nccl":
            return
        limit = self.streams_limit()
        if self._driver is not None:
            self._driver.abort("the group has changed")
        group = None
        if size > 1:
            store = dist.PrefixStore(f"{epoch}/streams", store)
            group = nccl_group.make_group(store, rank, size, self.device, self.timeout)
        self._driver = StreamDriver(
            self.device, group, rank, size, self.timeout, self.impl, self._engine
        )
        self._driver.connect(limit)
        self.fixed_weights = None

    def fix_weight(self, weight: float | None) -> None:
        """Agree on weights that stay as they are; a collective call.

        On streams the host then need not ask for the others' at each send. None: ours may change.
        """
        if self.collectives != "nccl":
            return
        weights = [json.loads(blob) for blob in self.exchange_objects(json.dumps(weight).encode())]
        self.fixed_weights = None if None in weights else weights

    def _start_on_streams(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, is_held: bool
    ) -> ExchangeWork:
        driver, header = self._driver, round.header
        assert driver is not None
        if driver.failure:
            raise self._refusal(
                f"epoch {self.epoch} of this replica's group is dead: {driver.failure}. Call "
                "change_group() with the replicas that live",
                header,
            )
        if is_held:
            return device_memory.start(driver, buffers, round, sending)
        weights = self.fixed_weights if header.kind != "all_reduce" else [1.0] * self.size
        if weights is None:
            own = json.dumps(header.weight).encode()
            weights = [json.loads(blob) for blob in self.exchange_objects(own)]
        if not sum(weights) > 0:
            raise ValueError(f"weights must be finite and not all zero, got {weights}")
        sending.offered = weights
        control = self.submit_header(buffers, header, sending.stochastic)
        events = driver.enqueue(buffers, round, sending)
        work = ExchangeWork(
            buffers, round, self.stream_job(buffers, round, sending, control, events)
        )
        buffers.add_round(round, work)
        return work

    def submit_header(self, buffers: ExchangeBuffers, header: Header, stochastic: bool) -> _C.Job:
        """Begin to exchange and compare headers of a round whose payload travels on streams."""
        return self._begin(self._engine.submit, to_native(header, buffers, stochastic), of=header)

    def stream_job(
        self,
        buffers: ExchangeBuffers,
        round: Round,
        sending: Sending,
        control: _C.Job,
        events: tuple[torch.Event, ...],
    ) -> StreamJob:
        """Watch over an exchange that is enqueued."""
        assert self._driver is not None
        sent = (self.size - 1) * buffers.layout.payload_bytes // (self.size if self.size > 2 else 1)
        presumed = [
            to_native(replace(round.header, weight=weight), buffers, sending.stochastic)
            for weight in sending.offered
        ]
        return StreamJob(self._driver, control, round, events, presumed, self.members, sent * 2)

    def _staging(
        self, buffers: ExchangeBuffers, round: Round, loader: _C.ChunkLoader | None
    ) -> _C.Staging | None:
        """Return the device's buffers of a round; None when the fragment is in host memory."""
        if round.own.bad is None:
            return None
        if buffers.device not in self._queues:
            self._queues[buffers.device] = _C.DeviceQueue(buffers.device)
        result = None if round.result is None else round.result.tensor
        return self._queues[buffers.device], round.own.tensor, result, round.own.bad, loader

    def emulate_link(self, gbps: float, rtt_ms: float = 0.0) -> None:
        """Send over an emulated link from now on: this rank's egress at ``gbps`` Gbit/s, with half
        of ``rtt_ms`` before anything arrives. 0 Gbit/s removes it."""
        if gbps < 0 or rtt_ms < 0:
            raise ValueError(f"emulate_link needs gbps >= 0 and rtt_ms >= 0, got {gbps}, {rtt_ms}")
        self._engine.emulate_link(gbps, rtt_ms)
        self.link = f"emulated {gbps:g} Gbit/s, {rtt_ms:g} ms round trip" if gbps else None

    def exchange_objects(self, blob: bytes) -> list[bytes]:
        """Give ``blob`` to every replica and return all of theirs, in rank order."""
        if self.size == 1:
            self._engine.check_process()
            return [bytes(blob)]
        job = self._submit_blob(blob)
        _finish(job)
        return [received.numpy().tobytes() for received in job.blobs]

    def _submit_blob(self, blob: bytes) -> _C.Job:
        tensor = (
            torch.frombuffer(bytearray(blob), dtype=torch.uint8)
            if blob
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        header = _C.Header("exchange_objects")
        header.blob_bytes, header.inner_step = len(blob), self.inner_step
        return self._begin(self._engine.submit, header, blob=tensor)

    def broadcast(self, tensors: list[Tensor], source_rank: int) -> None:
        """Copy the tensors of rank ``source_rank`` to all, exactly and in place; any dtype.

        Raises:
            ReplicaMismatch: If the numbers of bytes or the sources differ; nothing is changed.
        """
        if not 0 <= source_rank < self.size:
            raise ValueError(f"source_rank must be in [0, {self.size}), got {source_rank}")
        buffers = [_as_bytes(tensor) for tensor in tensors]
        header = _C.Header("broadcast")
        header.source_rank = source_rank
        header.num_elements = sum(buffer.numel() for buffer in buffers)
        header.layout_hash = _hash_sizes([buffer.numel() for buffer in buffers])
        if self.size == 1:
            self._engine.check_process()
            return
        is_source = self.rank == source_rank
        peers = [rank for rank in range(self.size) if rank != source_rank]
        sends = [(peer, b) for b in buffers for peer in peers if b.numel()] if is_source else []
        recvs = [] if is_source else [(source_rank, b) for b in buffers if b.numel()]
        _finish(self._begin(self._engine.submit, header, sends=sends, recvs=recvs))
        if not is_source:
            for tensor, buffer in zip(tensors, buffers, strict=True):
                _write_back(tensor, buffer)

    def _begin(
        self,
        begin: Callable[..., _C.Job],
        *arguments: Any,
        of: Header | None = None,
        **named: Any,
    ) -> _C.Job:
        """Hand a job to the engine; that the epoch died before is a SyncError, too."""
        self.tell_of_lost_store()
        try:
            return begin(*arguments, **named)
        except RuntimeError as error:
            if not self.is_dead:
                raise
            raise self._refusal(str(error), of) from error

    def _refusal(self, message: str, of: Header | None) -> SyncError:
        """Make the error of an exchange in a dead epoch; it names whom the first one did."""
        fragment, round = (-1, -1) if of is None else (of.fragment, of.round)
        failure = self._engine.dead_failure if self._engine.dead_reason else None
        more = {} if failure is None else verdict_of(failure)
        kind = LeftBehind if "went_on_in" in more else SyncError
        return kind(message, fragment=fragment, round=round, stage="start", **more)

    def change_group(
        self,
        members: Sequence[int],
        *,
        store: dist.Store | None = None,
        last_rounds: LastRounds,
        inner_step: int = -1,
    ) -> list[Repair]:
        """Go on in a new epoch with ``members``: the survivors, or joiners too.

        Called by every replica of the new epoch (a joiner constructs its Exchange with
        ``join=True``), also after an attempt that failed. Slots are laid out anew. Once the members
        have met the old epoch is at an end, whether this succeeds or not.

        Args:
            members: Ids of the replicas, ours among them.
            store: A new store when the old one died.
            last_rounds: The last applied round of every fragment on this replica, or what returns
                that: it is called when no round of the old epoch can end any more.
            inner_step: Inner steps that this replica has counted.

        Returns:
            The rounds that count and that this replica must still apply; see ``termination``.

        Raises:
            ValueError: If the members are not ids that an exchange may have.
            SyncError: If somebody does not come, or a replica lacks a round that counts.
        """
        self._engine.check_process()
        members = _checked_members(members, self.replica)
        self.inner_step = inner_step
        return regroup.enter(self, members, store, last_rounds=last_rounds, join=False)

    def inject_fault(self, **fault: Any) -> None:
        """For tests: delay, stop or kill this replica; see csrc/exchange/failure/faults.h."""
        self._engine.inject_fault(**fault)

    def close(self) -> None:
        """Finish what is under way, tell the peers, and end the engine thread; idempotent.

        A peer that then starts an exchange gets ``PeerLeft``. All of this takes ten seconds (or the
        timeout) at most: what cannot finish in that time is broken off. Over NCCL the last quarter
        of that time stays for ending the group, which goes on without us after that.
        """
        self._close(patience_s=10.0)

    def _close(self, patience_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        deadline = time.monotonic() + min(self.timeout, patience_s)
        if self._driver is not None:
            self._driver.close(deadline - time.monotonic())
        self._engine.close(max(0.0, deadline - time.monotonic()), self.inner_step)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@atexit.register
def _close_all() -> None:
    for exchange in list(_open):
        with contextlib.suppress(Exception):
            # A process that ends must not wait for peers that may never come.
            exchange._close(patience_s=1.0)


def _checked_members(members: Sequence[int], replica: int) -> tuple[int, ...]:
    result = tuple(members)
    if list(result) != sorted(set(result)) or not result or result[0] < 0:
        raise ValueError(f"members must be sorted, unique ids from 0, got {list(result)}")
    if replica not in result:
        raise ValueError(f"replica {replica} is not one of the members {list(result)}")
    if len(result) > _C.MAX_REPLICAS:
        raise ValueError(f"members must be at most {_C.MAX_REPLICAS} replicas, got {len(result)}")
    return result


def _finish(job: _C.Job) -> None:
    while not wait_for_job(job, 3600.0):
        pass
    if job.failure is not None:
        raise error_from(job.failure, headers=job.headers)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as uint8, or a copy of it when it is not contiguous CPU memory."""
    source = tensor.detach()
    if source.device.type != "cpu" or not source.is_contiguous():
        source = source.contiguous().cpu()
    return source.reshape(-1).view(torch.uint8)


def _write_back(tensor: Tensor, buffer: Tensor) -> None:
    target = tensor.detach()
    if buffer.numel() and buffer.data_ptr() != target.data_ptr():
        target.copy_(buffer.view(target.dtype).view(target.shape))


def _hash_sizes(sizes: list[int]) -> int:
    digest = 1469598103934665603
    for size in sizes:
        digest = ((digest ^ size) * 1099511628211) & ((1 << 64) - 1)
    return digest
