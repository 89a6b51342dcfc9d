"""The follower: lets the training threads of a replica carry out the orders of the agreement.

The driver of the agreement runs at worker 0 of a replica. Worker 0 passes the driver's orders on,
and all workers carry them out together: they seal their rounds, connect to their peers at the
other replicas, and enter the next record.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from ... import _C
from ...base.checks import logger_of
from ...base.errors import NonFiniteError, SyncError
from ...group import state as st
from ...group.beats import MAX_BEAT_BYTES, Way, most_workers
from ...group.driver import Driver, Ended
from ...group.records import Attempt as AttemptName
from ...group.records import Key, Record
from ...group.signs import EXCHANGE
from ...group.streams import Positions
from ..waits import WaitLog
from .change import Agreed
from .member import Epoch
from .own_link import LinkShare

logger = logger_of(__name__)

T = TypeVar("T")
# A caller's function that takes part in an attempt to enter a record.
Attempt = Callable[["GroupChange"], T]
# A caller's function that ends the rounds of the present record for good; with the argument True,
# after the rounds under way have ended. It returns how far the rounds are, the inner step, and
# whether every round has all votes and these are yes.
Seal = Callable[[bool], tuple[Positions, int, bool]]
# Seconds between two calls in which the workers of a replica hear from worker 0.
HEAR_S = 1.0
# Most seconds to wait for the addresses of a member whose beat this process has not read yet, and
# seconds between two looks.
_PLACES_S, _POLL_S = 5.0, 0.02


_LISTEN_S, _REACH_AGAIN_S = 0.5, 3.0
# Messages of worker 0 to the others: break off the rounds of this epoch, or give up this attempt.
_EPOCH, _GIVEN_UP = struct.Struct("<q"), struct.Struct("<16sI")


class Workers(Protocol):
    """The workers of this replica."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers; a collective call."""
        ...

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether any worker has set it; a collective call."""
        ...

    def all_workers(self) -> AbstractContextManager[None]:
        """Return a context in which an error of one worker is raised on all."""
        ...


class Void(SyncError):
    """An attempt to change the group has failed before all members agreed: nothing has changed."""


class Chosen(NamedTuple):
    """An attempt to enter a record, as worker 0 announces it to the workers of its replica.

    Attributes:
        name: The name of the attempt.
        members: The members of the record.
        ways: For each member, the addresses of the links of its workers.
        stores: For each member, the address of its store; "" for none.
        record: The record, if the members have agreed on it; None before.
    """

    name: AttemptName
    members: tuple[Key, ...]
    ways: tuple[tuple[Way, ...], ...]
    stores: tuple[str, ...]
    record: Record | None


class GroupChange:
    """One attempt of this worker to enter a record; see ``change.Change``.

    Attributes:
        chosen: The attempt.
        record: The record; None before all members have agreed on it.
    """

    def __init__(
        self,
        group: Follower,
        chosen: Chosen,
        worker: int,
        store: dist.Store | None,
        failure: SyncError | None,
    ) -> None:
        self._group, self.chosen, self._worker = group, chosen, worker
        self._store, self._failure = store, failure
        self.record = chosen.record

    @property
    def store(self) -> dist.Store | None:
        if self._failure is not None:
            raise self._failure
        return self._store

    @property
    def members(self) -> tuple[int, ...]:
        return tuple([key.number for key in self.chosen.members])

    @property
    def token(self) -> str:
        return attempt_text(self.chosen.name)

    @property
    def ways(self) -> Sequence[Mapping[str, str]]:
        found = []
        for ways in self.chosen.ways:
            way = ways[self._worker] if self._worker < len(ways) else Way("", "", "", "")
            names = ("link", "address", "link key", "relay")
            found.append(dict(zip(names, way.words, strict=True)))
        return found

    @property
    def role(self) -> str:
        """The way in which this replica enters the record: "change", "join" or "broadcast".

        "change": it brings the outer state; "join": it copies the outer state from a member;
        "broadcast": all members copy the outer state of the record's source.
        """
        assert self.record is not None
        if self._group.replica not in self.record.joined:
            return "change"
        return "join" if self.record.source is None else "broadcast"

    @property
    def source_rank(self) -> int:
        """Rank of the member whose outer state all copy; 0 if the record has no source."""
        assert self.record is not None
        source = self.record.source
        return 0 if source is None else self.record.numbers.index(source)

    def guard(self, seal: Callable[[], None], epoch: Callable[[], int]) -> None:
        """Call ``seal`` when rounds under way are to fail; see ``Change``."""
        self._group.guard(seal, epoch)

    def is_void(self) -> bool:
        """Whether a further order has ended this attempt; see ``Change``."""
        return self._group.is_void(self.chosen.name)

    def entered(self, failure: SyncError | None) -> Agreed:
        """Wait until the members have agreed; see ``Change``."""
        self.record = self._group.wait_until_entered(self.chosen, failure)
        return self._group.agreed(self.record)


class Follower:
    """Takes one worker of a replica from record to record; a base class.

    Args:
        workers: The workers of this replica; None if this one is alone.
        share: This object's share of the link of this process.
        name: The name of this object's messages on the link, equal on all replicas.
        uses_store: Gloo groups, and NCCL, connect at a store.

    Attributes:
        replica: This replica's number; -1 before it is known.
        view: The record in which this replica trains; None before the first.

    Raises:
        ValueError: If the replica has too many workers.
    """

    def __init__(
        self, workers: Workers | None, share: LinkShare, name: str, *, uses_store: bool
    ) -> None:
        self._workers, self._share, self._name = workers, share, name
        self._uses_store = uses_store
        self.view: Record | None = None
        self.replica = -1
        # The last record that was agreed on, while its decision has yet to be applied here.
        self._unsettled: Record | None = None
        # When the training thread began to wait for the next record.
        self._began = 0.0
        # An order that came during an attempt and ended the attempt: it is carried out next.
        self._next: tuple[Any, Chosen | None] | None = None
        # The attempt that this worker has tried last.
        self._tried: AttemptName | None = None
        self._driver: Driver | None = None
        ways = self._of_workers(way_of(share))
        self._ways = [way.to_text() for way in ways]
        most = most_workers(self._ways)
        if len(ways) > most:
            raise ValueError(
                f"this replica has {len(ways)} workers, and at most {most} are possible: its beat "
                f"names the link of each, and has at most {MAX_BEAT_BYTES} bytes"
            )
        self._mates: Mates | None = None
        if workers is not None and workers.size > 1:
            service = f"{name}/workers of {ways[0].nonce}"
            self._mates = Mates(share.link.link, ways, workers.rank, service)

    @property
    def _rank(self) -> int:
        return 0 if self._workers is None else self._workers.rank

    @property
    def _speaks(self) -> bool:
        return self._rank == 0

    def _from_worker_0(self, value: Any) -> Any:
        return value if self._workers is None else self._workers.gather(value)[0]

    def _of_workers(self, value: T) -> list[T]:
        """Return the values of all workers; a collective call."""
        return [value] if self._workers is None else self._workers.gather(value)

    def _tell(self, event: st.Event) -> None:
        if self._driver is not None:
            self._driver.tell(event)

    def guard(self, seal: Callable[[], None], epoch: Callable[[], int]) -> None:
        """Call ``seal`` when rounds of the present epoch are to fail."""
        driver, mates = self._driver, self._mates

        def break_off() -> None:
            if mates is not None and driver is not None:
                mates.break_off(driver.state.number)
            seal()

        if driver is not None:
            driver.on_break(break_off)
        elif mates is not None:
            mates.guard(seal, epoch)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Run a block in which the training thread may wait for the other members."""
        yield

    @contextlib.contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Run a block during which the others see this replica in a phase, see ``DiLoCo.doing``."""
        driver = self._driver
        before = "" if driver is None else driver.phase
        self._note(phase)
        try:
            yield
        finally:
            self._note(before)
            if driver is not None and driver.waits_since and phase != EXCHANGE:
                # In the block this replica waited for nobody: count its wait from now on.
                driver.waits_since = time.monotonic()

    def _note(self, phase: str) -> None:
        """Tell the others the phase of this replica."""
        driver = self._driver
        if driver is not None:
            driver.signs.set_progress(driver.inner_step, phase)
            driver.phase = phase

    # ------------------------------------------------------------------- from record to record

    def _attempt_until_done(self, attempt: Attempt[T], seal: Seal, began: float) -> list[T]:
        """Carry out orders until an attempt succeeds; return its result in a list.

        The list is empty if this replica has left its group.

        Args:
            attempt: Called for each attempt.
            seal: Called for each order to stop.
            began: Monotonic time at which the caller began to wait.
        """
        self._began = began
        while True:
            order, chosen = self._next_order(began)
            if order is None:
                return []
            if isinstance(order, st.Seal):
                positions, step, _ = self._sealed(seal, is_patient=order.is_patient)
                self._tell(st.Sealed(order.number, positions, step))
                continue
            if chosen is None:
                continue
            if chosen.record is None and chosen.name == self._tried:
                # This attempt has failed here, and its proposer has yet to hear so: wait.
                continue
            self._tried = chosen.name
            # The decision of a record holds even if this replica fails to connect for it.
            self._unsettled = chosen.record or self._unsettled
            results, unreported = [], None
            change = self._change_of(chosen)
            try:
                with self.waiting():
                    results.append(attempt(change))
            except NonFiniteError as error:
                unreported = error
            except Void as error:
                logger.info("an attempt to change the group has failed: %s", error)
                self._has_failed(error)
                continue
            except SyncError as error:
                self._broke(change.record, error)
                if not self._goes_on_after(error):
                    raise
                if change.record is None:
                    logger.warning("an attempt to change the group has failed: %s", error)
                else:
                    logger.warning("view %d could not begin: %s", change.record.number, error)
                continue
            except BaseException:
                if change.record is None:
                    # A Ctrl-C, for example. Groups of this attempt may exist, and cannot be made
                    # twice: the attempt has failed.
                    self._is_interrupted(chosen)
                self._broke(change.record, None)
                raise
            assert change.record is not None
            self.view, before = change.record, self.view
            self._unsettled = None
            self._begun(change.record, before, began)
            if unreported is not None:
                raise unreported
            return results

    def _sealed(self, seal: Seal, *, is_patient: bool) -> tuple[Positions, int, bool]:
        """Call ``seal`` on all workers; return the replica's result, see ``Seal``."""
        try:
            own: Any = seal(is_patient)
        except Exception as error:
            if self._workers is None:
                raise
            own = f"{type(error).__name__}: {error}"
        ends = self._of_workers(own)
        for end in ends:
            if isinstance(end, str):
                raise SyncError(end, stage="seal")
        positions = tuple([one for each, _, _ in ends for one in each])
        return positions, ends[0][1], all(has_votes for _, _, has_votes in ends)

    def _broke(self, record: Record | None, error: SyncError | None) -> None:
        """Tell the agreement that a round of ``record`` has failed, and which members are lost."""
        if self._driver is None or record is None:
            return
        cuts, dead = lost_members(error, self.replica)
        self._driver.lost(dead)
        nonces = [key.nonce for key in record.members if key.number in cuts]
        self._driver.tell(st.Broke(record.number, tuple(nonces)))

    # ------------------------------------------------------------------------------- orders

    def _next_order(self, began: float) -> tuple[Any, Chosen | None]:
        """Wait for the next order of the agreement; return it, and the attempt that it names.

        Returns:
            None, None if this replica has left.

        Raises:
            SyncError: If this replica's part in the group has ended, or its caller waits no longer.
        """
        log = WaitLog()
        while True:
            order, chosen, waiting = self._hear(began)
            if isinstance(order, Ended):
                if order.kind == "drained":
                    return None, None
                raise self._error_of(order) from None
            if order is not None:
                return order, chosen
            log.tick(lambda waiting=waiting: self._awaited(waiting))  # type: ignore[misc]

    def _hear(self, began: float | None = None) -> tuple[Any, Chosen | None, str]:
        """Return the next order if one comes soon; a collective call of all workers.

        Returns:
            The order or None, the attempt that it names or None, and the reason why worker 0 waits.
        """
        if self._next is not None:
            (order, chosen), self._next = self._next, None
            return order, chosen, ""
        driver = self._driver
        own: Any = (None, None, "", -1)
        if driver is not None:
            order = self._wait_for_order(driver)
            if order is None and began is not None:
                order = self._end_of_wait(driver, began)
            chosen = None
            if isinstance(order, st.Connect | st.Enter):
                chosen = self._chosen(driver, order)
            own = (order, chosen, driver.waits, driver.state.key.number)
        order, chosen, waits, self.replica = self._from_worker_0(own)
        return order, chosen, waits

    def _wait_for_order(self, driver: Driver) -> Any:
        """Return the driver's next order; None if none comes within ``HEAR_S``."""
        return driver.next_order(HEAR_S)

    def _chosen(self, driver: Driver, order: st.Connect | st.Enter) -> Chosen:
        """Return the attempt of an order, with the addresses of its members."""
        record = order.record if isinstance(order, st.Enter) else None
        name, members = (
            (order.attempt, order.members)
            if isinstance(order, st.Connect)
            else (order.record.attempt, order.record.members)
        )
        until = time.monotonic() + _PLACES_S
        while time.monotonic() < until:
            if all(driver.ways_of(key) for key in members):
                break
            driver.look()
            time.sleep(_POLL_S)
        ways = tuple([tuple(driver.ways_of(key) or ()) for key in members])
        stores = tuple([driver.store_of(key) for key in members])
        return Chosen(name, members, ways, stores, record)

    def _change_of(self, chosen: Chosen) -> GroupChange:
        """Return an attempt for this worker, connected to the attempt's store if one is needed."""
        store: dist.Store | None = None
        failure: SyncError | None = None
        if self._uses_store and len(chosen.members) > 1:
            try:
                store = self._meeting_place(chosen)
            except SyncError as error:
                failure = error
        return GroupChange(self, chosen, self._rank, store, failure)

    # -------------------------------------------------------------------------- an attempt

    def wait_until_entered(self, chosen: Chosen, failure: SyncError | None) -> Record:
        """Report whether all workers are connected; return the record once all members agree.

        Args:
            chosen: The attempt.
            failure: Why this worker is not connected; None if it is.

        Raises:
            Void: If the attempt fails.
            ReplicaMismatch: If this newcomer does not let in the key of a member.
            SyncError: If the members have agreed, but a worker of this replica is not connected.
        """
        cut = self._cut_off(chosen, failure)
        is_over = self._driver is not None and self._driver.has_order
        own_text = "" if failure is None else str(failure)
        told = self._of_workers((cut, own_text, are_keys_refused(failure, self.replica), is_over))
        text = next((text for _, text, _, _ in told if text), "")
        if self._driver is not None and chosen.record is None:
            nonces = tuple(sorted({nonce for cut, _, _, _ in told for nonce in cut}))
            refusal = next((text for _, text, is_refusal, _ in told if is_refusal), "")
            if not (text and is_over):
                self._driver.tell(st.Connected(chosen.name, nonces, text, refusal))
        if text:
            self._refuse(text, failure)
        if text and chosen.record is None:
            stage = "view" if any(is_over for *_, is_over in told) else "connect"
            raise Void(text, stage=stage, cuts=() if failure is None else failure.cuts)
        if chosen.record is not None:
            if text:
                raise SyncError(text, stage="connect")
            return chosen.record
        return self._wait_for_record(chosen)

    def _refuse(self, text: str, failure: SyncError | None) -> None:
        """Raise if this failure to connect ends all attempts; an elastic group overrides this."""

    def is_void(self, name: AttemptName) -> bool:
        """Whether a further order has replaced the attempt of this name, which is under way."""
        driver, mates = self._driver, self._mates
        if driver is None:
            return mates is not None and mates.given_up == name
        if driver.has_order and mates is not None:
            mates.give_up(name)
        return driver.has_order

    def _wait_for_record(self, chosen: Chosen) -> Record:
        log = WaitLog()
        while True:
            order, other, waiting = self._hear(self._began)
            if isinstance(order, st.Enter) and order.record.attempt == chosen.name:
                return order.record
            if order is not None:
                self._next = order, other
                raise Void("another attempt has begun", stage="view")
            log.tick(lambda waiting=waiting: f"the other members, {waiting}")  # type: ignore[misc]

    def _cut_off(self, chosen: Chosen, failure: SyncError | None) -> list[bytes]:
        """Return the nonces of the members that this worker cannot reach."""
        if failure is None:
            return []
        cuts, _ = lost_members(failure, self.replica)
        found = [key.nonce for key in chosen.members if key.number in cuts]
        if found or self._uses_store:
            return found
        lives = self._share.link.life()
        for key, ways in zip(chosen.members, chosen.ways, strict=True):
            way = ways[self._rank].nonce if self._rank < len(ways) else ""
            is_there = way in lives and lives[way].is_connected
            if key.number != self.replica and not is_there:
                found.append(key.nonce)
        return found

    def agreed(self, record: Record) -> Agreed:
        """Return the epoch of a record, and which of this worker's rounds count."""
        self._unsettled = record
        epoch = self._epoch_of(record)
        if self.replica in record.joined or not record.decision:
            return Agreed(epoch)
        num_workers = 1 if self._workers is None else self._workers.size
        each = len(record.decision) // num_workers
        return Agreed(epoch, record.decision[self._rank * each : (self._rank + 1) * each])

    def _epoch_of(self, record: Record) -> Epoch:
        is_begin = record.source is not None
        step = -1 if is_begin else record.inner_step
        return Epoch(record.number, record.numbers, joined=record.joined, agreed_step=step)

    @property
    def unsettled(self) -> Agreed | None:
        """The last agreement, while its decision has yet to be applied here; else None."""
        return None if self._unsettled is None else self.agreed(self._unsettled)

    def has_settled(self) -> None:
        """Note that the decision of the last agreement is applied."""
        self._unsettled = None

    # --------------------------------------------------------------------- hooks of subclasses

    def _awaited(self, waiting: str) -> str:
        """Return words for the log about this wait; "" to log nothing.

        Args:
            waiting: The reason that the agreement gives.
        """
        return waiting

    def _end_of_wait(self, driver: Driver, began: float) -> Ended | None:
        """Return why this replica waits no longer; None while it waits. Called at worker 0."""
        return None

    def _error_of(self, end: Ended) -> SyncError:
        """Return the error to raise after this end of this replica's part in the group."""
        return SyncError(end.reason)

    def _goes_on_after(self, error: SyncError) -> bool:
        """Whether this replica can try again after the error of an attempt."""
        return False

    def _is_interrupted(self, chosen: Chosen) -> None:
        """Called when a Ctrl-C, or an error of the program, has ended an attempt."""

    def _has_failed(self, error: Void) -> None:
        """Called when an attempt has failed; may raise, to end all attempts."""

    def _meeting_place(self, chosen: Chosen) -> dist.Store:
        """Return the store at which the members of an attempt connect, with its prefix."""
        raise NotImplementedError

    def _begun(self, record: Record, before: Record | None, began: float) -> None:
        """Called when this replica trains in a record.

        Args:
            record: The record.
            before: The record before; None for the first.
            began: Monotonic time at which the wait for the record began.
        """


def attempt_text(name: AttemptName) -> str:
    """Return the name of an attempt as text, of letters, digits and a point."""
    return f"{name.proposer.hex()}.{name.counter}"


def way_of(share: LinkShare) -> Way:
    """Return the address of the link of a share."""
    ways = share.link.ways()
    return Way(*[ways[name] for name in ("link", "address", "link key", "relay")])


def are_keys_refused(error: SyncError | None, replica: int) -> bool:
    """Whether connecting failed because ``replica`` does not let in the key of a member."""
    if error is None or error.stage != "connect":
        return False
    return any(replica in pair for pair in error.cuts)


def lost_members(error: SyncError | None, replica: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the members to which an error names a cut from ``replica``, and ``error.missing``.

    Without an error both are empty.
    """
    if error is None:
        return (), ()
    cuts = {one for pair in error.cuts if replica in pair for one in pair}
    return tuple(sorted(cuts - {replica})), tuple(error.missing)


class Mates:
    """Messages of worker 0 to the other workers of its replica, over their links.

    Only worker 0 runs the agreement. When a replica has died, rounds of the other workers may wait
    for it, and worker 0 lets these rounds fail.

    Args:
        link: The link of this worker.
        ways: The addresses of the links of all workers, by rank.
        rank: The rank of this worker.
        service: The name of these messages on the link; no other replica has the same.

    Attributes:
        given_up: The attempt that worker 0 has given up last.
    """

    def __init__(self, link: _C.Link, ways: Sequence[Way], rank: int, service: str) -> None:
        self._link, self._service = link, service
        self._others = [way for way in ways[1:] if way != ways[0]] if rank == 0 else [ways[0]]
        self._seal: Callable[[], None] = lambda: None
        self._epoch: Callable[[], int] = lambda: 0
        self._is_closed = False
        self.given_up: AttemptName | None = None
        link.told(service, 0.0)
        run = self._reach if rank == 0 else self._listen
        self._thread = threading.Thread(target=run, daemon=True, name="diloco_comm mates")
        self._thread.start()

    def guard(self, seal: Callable[[], None], epoch: Callable[[], int]) -> None:
        """Call ``seal`` when worker 0 breaks off the rounds of the present epoch, ``epoch()``."""
        self._seal, self._epoch = seal, epoch

    def break_off(self, epoch: int) -> None:
        """Let worker 0 break off the rounds of the other workers in an epoch."""
        self._tell(_EPOCH.pack(epoch))

    def give_up(self, name: AttemptName) -> None:
        """Let worker 0 make the other workers give up an attempt."""
        self._tell(_GIVEN_UP.pack(*name))

    def _tell(self, message: bytes) -> None:
        for way in self._others:
            self._link.tell(way.nonce, self._service, message)

    def close(self) -> None:
        """End the thread soon; idempotent."""
        self._is_closed = True

    def _reach(self) -> None:
        wait = threading.Event()
        with contextlib.suppress(RuntimeError):  # The link was closed.
            while not self._is_closed:
                self._link.reach(self._service, [way.words for way in self._others])
                wait.wait(_REACH_AGAIN_S)
            self._link.reach(self._service, [])

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):  # The link was closed.
            self._link.reach(self._service, [way.words for way in self._others])
            while not self._is_closed:
                for nonce, message in self._link.told(self._service, _LISTEN_S):
                    if nonce == self._others[0].nonce:
                        self._take(message)
            self._link.reach(self._service, [])

    def _take(self, message: bytes) -> None:
        """Carry out a message of worker 0; one about a former epoch has no effect."""
        if len(message) == _GIVEN_UP.size:
            self.given_up = AttemptName(*_GIVEN_UP.unpack(message))
        elif len(message) == _EPOCH.size and _EPOCH.unpack(message)[0] == self._epoch():
            try:
                self._seal()
            except RuntimeError as error:
                # Go on listening: a later message may be about other rounds.
                logger.warning("a round could not be broken off: %s", error)
