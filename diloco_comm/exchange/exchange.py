"""The exchange engine of one replica: averages a fragment's payloads over all replicas.

A C++ thread (``csrc/exchange``) works on process groups of its own; this class checks arguments.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..base.background import batch_threads
from ..base.errors import SyncError, way_on
from ..base.interrupts import deferred_interrupts
from ..group.driver import Driver
from ..group.streams import Positions, Rounds
from ..ops.implementations import resolve_impl
from ..ops.wire import WireFormat, encoding_keys
from .buffers import ExchangeBuffers
from .membership import change as changing
from .membership import stores
from .membership.change import Agreed, Change, Groups, Repair
from .membership.fixed_group import FixedGroup
from .membership.follower import GroupChange, Workers
from .membership.member import Epoch, Options, checked_members
from .membership.own_link import LinkShare, OwnLink
from .nccl.member import StreamMember
from .round import Header, Round, Sending

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_TIMEOUT = timedelta(minutes=30)
DEFAULT_WINDOW = 2
# The last applied round of every fragment, or a function that returns these numbers; it is called
# once no exchange is under way any more.
LastRounds = Mapping[int, int] | Callable[[], Mapping[int, int]]
_POLL_S = 0.001
_open: weakref.WeakSet[Exchange] = weakref.WeakSet()


class ExchangeOptions(TypedDict, total=False):
    """The options of an ``Exchange``, for functions that pass them on."""

    lanes: int
    chunk_bytes: int | None
    timeout: timedelta | float
    device: torch.device | str
    impl: str
    line_name: str | None
    join: bool
    window: int
    num_under_way: int
    collectives: str
    report_patience: float | None
    join_timeout: timedelta | float | None
    suspect_after: timedelta | float | None
    change: Change | None
    listen: str | None
    advertise: str | None
    link_keys: str | Path | None
    relay: str | None
    proxy: str | None
    link_share: LinkShare | None
    workers: Workers | None
    figures: Callable[[Driver], bytes] | None


class Exchange(StreamMember):
    """Exchange payloads with the other replicas, in an epoch of fixed membership.

    Args:
        store: Shared by all replicas; it must outlive the replicas that may fail.
        replica: Id of this replica.
        members: Sorted ids of all replicas of this epoch, this one among them.
        lanes: Data connections to each peer in each direction; each costs two process groups.
        chunk_bytes: Payload bytes of a chunk, equal on all replicas; None chooses by size.
        timeout: Seconds of one exchange, from its turn on the engine thread to its vote.
        device: The default device of fragments, such as "cuda:0". Except with "nccl", the encoded
            bytes, and only these, are copied to host memory, where they travel and are averaged.
        impl: Implementation of the operators; "" is the default one.
        name: Distinguishes several exchanges on one store.
        line_name: Equal for the exchanges of a replica's workers, which go on together when the
            group changes; default: ``name``.
        join: Join replicas that call ``change_group`` with this one among the members.
        window: Chunks under way in each phase and lane, with more than two replicas.
        num_under_way: Rounds of one fragment that may be agreed on and not yet applied.
        collectives: "gloo"; "tcp": everything travels over one port of this process; or "nccl":
            fragments on the device are exchanged there, on streams, and small messages travel over
            gloo.
        report_patience: Seconds for which a failed exchange waits for signs of life of the others;
            default: the environment's, 3.
        join_timeout: Seconds for which ``change_group``, and a replica that joins, wait for members
            of which nothing is heard; for live members, and for the first group, ``timeout``
            counts. NCCL has as long to connect the members, but at least 30, and at most
            ``timeout``; in a first group, ``timeout``. Default: the environment's, 60.
        suspect_after: Seconds without a sign of life of a peer, or without a connection to it,
            after which this replica waits for it no longer; default: the environment's, 30.
        change: The attempt that leads to the first epoch, from a caller that runs the agreement
            itself; None: this exchange runs the agreement, with its table on the store.
        listen, advertise, relay, proxy: With "tcp", see ``diloco_comm.Link``.
        link_keys: With "tcp", ``keys`` of ``diloco_comm.Link``.
        link_share: With "tcp", the caller's share of a link, which the caller ends after this
            exchange; default: a link of ``listen`` and the arguments beside it.
        board: A store where replicas write at which name they wait, see ``stores.Names``; None for
            a user's own store, which other runs may share.
        workers: The workers of this replica, which all call ``change_group``; worker 0 speaks for
            them. None: this one is alone.
        figures: Returns a text about this replica, which the host of the store keeps, see
            ``Driver``.

    Attributes:
        link: Description of the emulated link, or None.

    Raises:
        ValueError, TypeError: If an argument is out of range.
        RuntimeError: If this process cannot listen where ``listen`` says, cannot encrypt, or cannot
            reach the relay.
        ReplicaMismatch, SyncError: If the replicas do not form a group.
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
        name: str = "default",
        line_name: str | None = None,
        join: bool = False,
        window: int = DEFAULT_WINDOW,
        num_under_way: int = 1,
        collectives: str = "gloo",
        report_patience: float | None = None,
        join_timeout: timedelta | float | None = None,
        suspect_after: timedelta | float | None = None,
        change: Change | None = None,
        listen: str | None = None,
        advertise: str | None = None,
        link_keys: str | Path | None = None,
        relay: str | None = None,
        proxy: str | None = None,
        link_share: LinkShare | None = None,
        board: dist.Store | None = None,
        workers: Workers | None = None,
        figures: Callable[[Driver], bytes] | None = None,
    ) -> None:
        options = Options.checked(
            lanes=lanes,
            window=window,
            chunk_bytes=chunk_bytes,
            num_under_way=num_under_way,
            device=device,
            impl=impl,
            joins=join,
            collectives=collectives,
            timeout=timeout,
            join_timeout=join_timeout,
            suspect_after=suspect_after,
            report_patience=report_patience,
            listen=listen,
            advertise=advertise,
            link_keys=link_keys,
            relay=relay,
            proxy=proxy,
        )
        current = Epoch(0, checked_members(members, replica))
        with batch_threads():
            engine = _C.Engine(options.timeout)
            tcp = options.make_link(name) if link_share is None else link_share.link
        super().__init__(engine, store, replica, current, options, name, line_name, tcp)
        self.link: str | None = None
        self._queues: dict[torch.device, _C.DeviceQueue] = {}
        self._closed = False
        own = LinkShare(tcp, name) if tcp is not None and link_share is None else None
        self._own_share = own
        # If the exchange is dropped without ``close``, its share of the link ends after the engine.
        weakref.finalize(engine, _keep, own or link_share).atexit = False
        # Rounds that count, and that the caller has yet to apply.
        self._repairs: list[Repair] = []
        self._fragments: list[int] = []
        self._lacks_state = True
        self._group: FixedGroup | None = None
        self._plain: LinkShare | None = None
        _open.add(self)
        try:
            if change is None:
                self.use_store(store)
                self._group = self._found(link_share or own, workers, board, figures)
                self._change(current.members, {})
            else:
                change.guard(self.seal, lambda: self.epoch)
                self.begin(*self.meet(change))
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        name: str = "default",
        **options: Unpack[ExchangeOptions],
    ) -> Exchange:
        """Make an exchange among the ranks of a process group; a collective call.

        The exchange makes groups of its own: nothing interleaves with ``group``'s collectives.
        """
        store, rank, size = stores.store_of_group(group, name)
        board = stores.board_of_group(group)
        return cls(store, rank, range(size), name=name, board=board, **options)

    def buffers(
        self,
        num_elements: int,
        wire: WireFormat,
        *,
        error_feedback: bool = False,
        residual_dtype: torch.dtype = torch.float32,
        carries: bool = False,
        must_gather: bool = False,
        device: torch.device | None = None,
    ) -> ExchangeBuffers:
        """Allocate the persistent buffers of one fragment.

        Args:
            num_elements: Elements of the fragment, at least 1.
            wire: The format of the payloads.
            error_feedback: Keep what encoding loses, as fp32 or bf16, and add it to the next round.
            carries: See ``ops.residuals``.
            must_gather: See ``ops.wire.num_phases``.
            device: The fragment's device; default: the device of this exchange.

        Raises:
            ValueError: If there is no element, or chunk_bytes would make too many chunks.
        """
        device = self.device if device is None else device
        buffers = ExchangeBuffers(
            num_elements,
            wire,
            error_feedback=error_feedback,
            residual_dtype=residual_dtype,
            carries=carries,
            must_gather=must_gather,
            num_under_way=self.num_under_way,
            device=device,
            is_streamed=self.collectives == "nccl" and device.type != "cpu",
        )
        self.plan_buffers(buffers)
        self._all_buffers.add(buffers)
        return buffers

    def plan_buffers(self, buffers: ExchangeBuffers) -> None:
        """Lay the buffers of a fragment out for the current group."""
        # ``self.impl`` holds only for tensors on the device of this exchange.
        impl = self.impl if buffers.device.type == self.device.type else ""
        if buffers.device.type == "cuda":
            # The C++ engine calls encode without ``ops``, which else chooses the implementation.
            impl = resolve_impl(impl, "cuda", "encode", buffers.device.index)
        buffers.plan(self.rank, self.size, self.chunk_bytes, self.lanes, self.window, impl)
        if buffers.is_streamed:
            assert self._driver is not None
            self._driver.reserve(buffers)
        else:
            self.engine.reserve_staging(buffers.staging_bytes)

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
    ) -> Round:
        """Encode a fragment and begin its exchange; return when all of it is encoded.

        The first chunk travels while the second is encoded, unless ``overlapped``. ``params`` and
        ``outer`` may change as soon as this returns. On a device this returns when the encoding is
        enqueued on the caller's stream, and later work of that stream may change them.

        Args:
            buffers: The fragment's buffers.
            outer: The outer parameters, fp32 [num_elements]; None encodes the parameters
                themselves, not the pseudo-gradient.
            params: The fragment's tensors, num_elements in all.
            header: The header, which the other replicas get and compare with their own.
            stochastic: Round stochastically.
            seed: With replica, round and fragment, the key of stochastic rounding and of the signs
                of a rotated wire.
            loader: Copies ``outer`` from page-locked host memory to the device; None if ``outer``
                is on the device of the parameters.
            overlapped: The caller computes before it waits. So a fragment in host memory is encoded
                whole before any of it is sent, as sending would slow the caller on few cores.
            is_held: Only encode; ``ship`` sends later, after the caller has checked the payload.

        Raises:
            SyncError: If an exchange of this epoch has failed before.
            RuntimeError: If the exchange is closed, or the process was forked.
        """
        self.engine.check_process()
        self.inner_step = header.inner_step
        round = buffers.open_round(header)
        round.epoch = self.epoch
        if self._group is not None:
            round.blame = self._group.blame
        if self._lacks_state:
            self.has_state()
        keys = 0, 0
        if stochastic or buffers.wire.is_random:
            keys = encoding_keys(
                buffers.wire, stochastic, seed, self.replica, header.round, header.fragment
            )
        if buffers.is_streamed:
            sending = Sending(outer, params, [], stochastic, keys[0], keys[1], loader)
            return self._start_on_streams(buffers, round, sending, is_held)
        staging = None if round.own.bad is None else self._staging(buffers, round, loader)
        residuals = buffers.residuals
        of_encoding: tuple[Tensor | None, Tensor | None] = (None, None)
        of_reduction = of_encoding
        if residuals.is_kept:
            of_encoding = residuals.added, residuals.new
            of_reduction = residuals.reduction(header.round)
        try:
            round.job = self.engine.start(
                plan=buffers.native,
                header=header.native(buffers.layout, buffers.num_chunks, stochastic),
                payload=round.own.host,
                result=None if round.result is None else round.result.host,
                outer=outer,
                params=params,
                encode_key=keys[0],
                reduce_key=keys[1],
                residual=of_encoding[0],
                new_residual=of_encoding[1],
                reduce_residual=of_reduction[0],
                new_reduce_residual=of_reduction[1],
                bad=round.own.bad_host,
                staging=staging,
                is_overlapped=overlapped,
                is_held=is_held,
            )
        except RuntimeError as error:
            if not self.is_dead:
                raise
            raise self.refusal(str(error), header) from error
        buffers.add_round(round)
        return round

    def ship(self, round: Round) -> None:
        """Send a round that ``start`` has only encoded; if that fails, ``Round.wait`` raises."""
        if round.sending is not None:
            self._ship_on_streams(round)
            return
        assert isinstance(round.job, _C.Job)
        self.engine.ship(round.job, round.header.is_reset)

    def _staging(
        self, buffers: ExchangeBuffers, round: Round, loader: _C.ChunkLoader | None
    ) -> _C.Staging:
        """Return the objects with which the engine copies a round between device and host.

        Only for a fragment on a device: the device's queue, payload, result, flags and loader.
        """
        assert round.own.bad is not None
        if buffers.device not in self._queues:
            self._queues[buffers.device] = _C.DeviceQueue(buffers.device)
        result = None if round.result is None else round.result.tensor
        return self._queues[buffers.device], round.own.tensor, result, round.own.bad, loader

    def emulate_link(self, gbps: float, rtt_ms: float = 0.0) -> None:
        """Send over an emulated link from now on: this rank's egress at ``gbps`` Gbit/s, with half
        of ``rtt_ms`` before anything arrives. 0 Gbit/s removes it."""
        if gbps < 0 or rtt_ms < 0:
            raise ValueError(f"emulate_link needs gbps >= 0 and rtt_ms >= 0, got {gbps}, {rtt_ms}")
        self.engine.emulate_link(gbps, rtt_ms)
        self.link = f"emulated {gbps:g} Gbit/s, {rtt_ms:g} ms round trip" if gbps else None

    def chosen_members(
        self, members: Iterable[int] | str, workers: Workers | None
    ) -> list[int] | None:
        """Return the members that the argument of ``change_group`` names; None for all that live.

        Raises:
            ValueError: For a text other than "survivors", or if no loss is known.
        """
        if not isinstance(members, str):
            return sorted(members) if isinstance(members, Set) else list(members)
        if members != "survivors":
            raise ValueError(f'members must be replicas or "survivors", got {members!r}')
        knows = [self.knows_of_loss]
        if workers is not None:
            knows = workers.any(knows)
        if not knows[0]:
            raise ValueError(
                'change_group("survivors") follows the loss of a replica, but none is known in '
                f"epoch {self.epoch} of replicas {list(self.members)}: nobody is missing; "
                + way_on(self.last_error)
            )
        return None

    def change_group(
        self,
        members: Sequence[int] | None,
        *,
        store: dist.Store | None = None,
        last_rounds: LastRounds,
        inner_step: int = -1,
    ) -> None:
        """Go on in a new epoch with ``members``: survivors, and newcomers.

        Called by every replica of the new epoch (a newcomer constructs its Exchange with
        ``join=True``), also after an attempt that failed. Buffers are laid out anew. Once the
        agreement has made this replica seal the old epoch, that epoch has ended, whether this
        succeeds or not. After the return, ``take_repairs`` returns the rounds that this replica
        must still apply.

        If the others have completed an earlier attempt with this replica, it enters that epoch.
        Then ``self.members`` are not the members asked for, and the caller calls again.

        Args:
            members: Ids of the replicas, this one among them; None for all that live.
            store: A new store if the old one has died.
            last_rounds: The last applied round of every fragment on this replica; or a function
                that returns them, called when no round of the old epoch can end any more.
            inner_step: The number of inner steps that this replica has taken.

        Raises:
            ValueError: If the members are not ids that an exchange may have, or this replica's own
                folder of keys binds its key to other numbers.
            LeftBehind: If the others go on without this replica.
            SyncError: If a member does not come, or lacks a round that counts.
        """
        self.engine.check_process()
        assert self._group is not None
        if members is not None:
            left_out = None if self.replica in members else self._group.left_out()
            if left_out is not None:
                raise left_out
            members = checked_members(members, self.replica)
        self.inner_step = inner_step
        if store is not None:
            self.use_store(store)
            self._group.move(self.store_of(self.line_name))
        self._change(members, last_rounds)

    def take_repairs(self) -> list[Repair]:
        """Return the rounds that count and that this replica must still apply, and forget them.

        Call this where Ctrl-C is deferred until they are applied, so that none is lost.
        """
        repairs, self._repairs = self._repairs, []
        return repairs

    def _change(self, members: Sequence[int] | None, last_rounds: LastRounds) -> None:
        if self.tcp is not None:
            self.tcp.check_own_number(self.replica)
        group = self._group
        assert group is not None

        def seal(is_patient: bool) -> tuple[Positions, int, bool]:
            self._settle_old()
            while is_patient and not (self.is_dead or self.is_idle):
                time.sleep(_POLL_S)
            changing.seal(self)
            last = dict(last_rounds() if callable(last_rounds) else last_rounds)
            for repair in self._repairs:
                last[repair.fragment] = max(last.get(repair.fragment, -1), repair.round)
            self._fragments = changing.fragments_of(self, last)
            # () would say that this replica has no outer state. Without fragments, report on one
            # stream without rounds.
            positions = changing.positions_of(self, last) or (Rounds(0, 0, 0),)
            return positions, max(self.inner_step, 0), True

        def attempt(change: GroupChange) -> None:
            change.guard(*_weak_guards(self))
            agreed, groups = self.meet(change)
            group.entered(change.chosen)
            with group.together():
                self._settle_as(agreed)
                self.begin(agreed, groups)

        try:
            group.change(members, attempt, seal)
        except SyncError as error:
            # Keep a copy without traceback, as the traceback would keep this exchange alive.
            self.last_error = type(error)(str(error))
            raise

    def _settle_old(self) -> None:
        """Apply the decision about the last epoch that an interrupted change has left unapplied."""
        assert self._group is not None
        unsettled = self._group.unsettled
        if unsettled is not None:
            self._settle_as(unsettled)

    def _settle_as(self, agreed: Agreed) -> None:
        """Settle the rounds of the last epoch; a Ctrl-C cannot interrupt this."""
        assert self._group is not None
        with deferred_interrupts():
            self._repairs += self.settle(agreed, self._fragments)
            self._group.has_settled()

    def _found(
        self,
        share: LinkShare | None,
        workers: Workers | None,
        board: dist.Store | None,
        figures: Callable[[Driver], bytes] | None,
    ) -> FixedGroup:
        """Return the object that runs the agreement; over gloo and NCCL, make a link for it."""
        if share is None:
            with batch_threads():
                self._plain = share = LinkShare(OwnLink(None, None, None), self.name)
        held = weakref.ref(self)

        def is_busy() -> bool:
            found = held()
            return found is not None and found.is_busy()

        def wait() -> tuple[float, tuple[int, ...]]:
            found = held()
            return (0.0, ()) if found is None else found.wait()

        def is_dead() -> bool:
            found = held()
            return found is None or found.is_dead

        store = self.store_of(self.line_name)
        group = FixedGroup(
            self, share, workers, store, board, is_busy, wait, is_dead, figures=figures
        )
        # If the exchange is dropped without ``close``, this replica still leaves its group.
        weakref.finalize(self, group.close, -1, 1.0).atexit = False
        return group

    def has_state(self) -> None:
        """Note that this replica now holds the outer state of its group."""
        self._lacks_state = False
        if self._group is not None:
            self._group.has_state()

    @property
    def address(self) -> str:
        """``host:port`` at which peers reach the link of this process; "" if nobody can dial it."""
        link = self.tcp if self._plain is None else self._plain.link
        return "" if link is None else link.address

    def doing(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """See ``DiLoCo.doing``."""
        return contextlib.nullcontext() if self._group is None else self._group.doing(phase)

    def blame(self, error: SyncError) -> SyncError:
        return error if self._group is None else self._group.blame(error)

    @property
    def knows_of_loss(self) -> bool:
        """Whether this epoch has failed, or a member of it seems to be gone."""
        is_gone = self._group is not None and not self._group.nobody_is_missing
        return self.is_dead or is_gone

    def meet(self, change: Change) -> tuple[Agreed, Groups]:
        """Connect to the members of the next epoch, and wait until all have agreed on it.

        Returns:
            The agreement, and the connected groups.

        Raises:
            SyncError: If the attempt fails; the rounds of the last epoch are kept then.
        """
        groups: Groups = []
        failure: SyncError | None = None
        try:
            groups = changing.connect(self, change)
            self._connect_streams(change.members, change.store)
        except SyncError as error:
            failure = error
        return change.entered(failure), groups

    def settle(self, agreed: Agreed, fragments: Sequence[int]) -> list[Repair]:
        """End the rounds of the last epoch, as the members have decided.

        Args:
            agreed: The agreement with the decision.
            fragments: For each stream (``group.streams``) of the decision, the index of its
                fragment.

        Returns:
            The rounds that count and that this replica must still apply.
        """
        missed = changing.missed_in(self, fragments, agreed.decision)
        for buffers in self.all_buffers:
            buffers.settle(missed)
        return [Repair.of(round) for round in missed]

    def begin(self, agreed: Agreed, groups: Groups) -> None:
        """Go on in the next epoch, whose members are connected by ``groups``.

        Raises:
            SyncError: If the engine's exchanges of the last epoch do not end.
        """
        epoch = agreed.epoch
        try:
            self.engine.attach(
                epoch=epoch.number,
                rank=epoch.members.index(self.replica),
                replicas=list(epoch.members),
                groups=groups,
            )
        except RuntimeError as error:
            raise SyncError(str(error), stage="attach") from error
        self._enter_epoch(epoch)
        self.last_error, self._lacks_state = None, True
        for buffers in self.all_buffers:
            self.plan_buffers(buffers)

    def inject_fault(self, **fault: Any) -> None:
        """For tests: let this replica delay, stop or die; see csrc/exchange/engine/faults.h."""
        self.engine.inject_fault(**fault)

    def close(self) -> None:
        """Finish exchanges under way, tell the peers, end the engine thread; idempotent.

        A peer that then starts an exchange gets ``PeerLeft``. Closing takes about ten seconds, or
        the timeout if that is shorter, at most: an exchange that is not finished by then is broken
        off. Over NCCL the last quarter of that time is kept for ending NCCL's group; if it does not
        end, it is abandoned.
        """
        self._close(patience_s=10.0)

    def _close(self, patience_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        deadline = time.monotonic() + min(self.timeout, patience_s)
        try:
            if self._driver is not None:
                self._driver.close(deadline - time.monotonic())
            self.engine.close(max(0.0, deadline - time.monotonic()))
        finally:
            if self._group is not None:
                self._group.close(self.inner_step, max(0.5, deadline - time.monotonic()))
            if self._plain is not None:
                self._plain.end()
            if self._own_share is not None:
                self._own_share.end()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _weak_guards(exchange: Exchange) -> tuple[Callable[[], None], Callable[[], int]]:
    """Return ``exchange.seal`` and its epoch as functions that do not keep the exchange alive."""
    held = weakref.ref(exchange)

    def seal() -> None:
        found = held()
        if found is not None:
            found.seal()

    def epoch() -> int:
        found = held()
        return -1 if found is None else found.epoch

    return seal, epoch


def _keep(share: LinkShare | None) -> None:
    """Do nothing: a finalizer with this function keeps ``share`` alive until it runs."""


@atexit.register
def _close_all() -> None:
    for exchange in list(_open):
        with contextlib.suppress(Exception):
            # A process that ends must not wait for peers that may never come.
            exchange._close(patience_s=1.0)
