"""How one replica, or one worker of it, follows the agreement of its group.

The driver of the agreement runs at worker 0 of a replica. The training threads of all workers hear
its orders together: they seal their rounds, connect to their peers, and enter the next record.
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
# Takes part in an attempt to enter a record.
Attempt = Callable[["GroupChange"], T]
# Ends the rounds of the present record for good, once those under way have ended where the argument
# says so. Returns how far they are, the inner step, and whether all have all votes and good ones.
Seal = Callable[[bool], tuple[Positions, int, bool]]
# How often the workers of a replica hear from worker 0, which speaks for the replica.
HEAR_S = 1.0
# Seconds to wait for the place of a member whose beat this process has not read yet.
_PLACES_S, _POLL_S = 5.0, 0.02


_LISTEN_S, _REACH_AGAIN_S = 0.5, 3.0
# Messages of worker 0: the epoch whose rounds are broken off, or the attempt that is given up.
_EPOCH, _GIVEN_UP = struct.Struct("<q"), struct.Struct("<16sI")


class Workers(Protocol):
    """The workers of this replica."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers; a collective call."""
        ...

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Say for each flag whether any worker has set the flag; a collective call."""
        ...

    def all_workers(self) -> AbstractContextManager[None]:
        """Return a context in which an error of one worker is raised on all."""
        ...


class Void(SyncError):
    """An attempt has come to nothing, and nothing has changed."""


class Chosen(NamedTuple):
    """An attempt that is to enter a record, as worker 0 tells all workers of its replica.

    Attributes:
        ways: The ways to each member's workers, in the order of the members.
        stores: The store at which each member is found; "" for none.
        record: None where the members have yet to agree.
    """

    name: AttemptName
    members: tuple[Key, ...]
    ways: tuple[tuple[Way, ...], ...]
    stores: tuple[str, ...]
    record: Record | None


class GroupChange:
    """One attempt of this worker to enter a record; see ``change.Change``.

    Attributes:
        record: None before all members have agreed.
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
        """The part of this replica in the record: "change", "join" or "broadcast".

        "join": it takes the state of a member that has the state; "broadcast": all take the state
        of the record's source.
        """
        assert self.record is not None
        if self._group.replica not in self.record.joined:
            return "change"
        return "join" if self.record.source is None else "broadcast"

    @property
    def source_rank(self) -> int:
        """Rank of the member whose state all take; 0 where there is none."""
        assert self.record is not None
        source = self.record.source
        return 0 if source is None else self.record.numbers.index(source)

    def guard(self, seal: Callable[[], None], epoch: Callable[[], int]) -> None:
        """Call ``seal`` when rounds under way are to fail; see ``Change``."""
        self._group.guard(seal, epoch)

    def is_void(self) -> bool:
        """Whether another attempt has begun; see ``Change``."""
        return self._group.is_void(self.chosen.name)

    def entered(self, failure: SyncError | None) -> Agreed:
        """Wait until the members have agreed; see ``Change``."""
        self.record = self._group.wait_until_entered(self.chosen, failure)
        return self._group.agreed(self.record)


class Follower:
    """Lead one replica, or one worker of it, from record to record.

    Args:
        workers: The workers of this replica; worker 0 speaks for the replica.
        share: The part of this object in the link of this process.
        uses_store: Groups of gloo or of devices connect at a store.
        name: The name of this object's messages, equal on all replicas.

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
        # The record that was agreed on last, until its decision is applied.
        self._unsettled: Record | None = None
        # Since when the training thread waits for the next record.
        self._began = 0.0
        # An order that was heard during an attempt, and ends it.
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
        """Run a block in which this replica is in a phase, see ``DiLoCo.doing``."""
        driver = self._driver
        before = "" if driver is None else driver.phase
        self._note(phase)
        try:
            yield
        finally:
            self._note(before)
            if driver is not None and driver.waits_since and phase != EXCHANGE:
                # It has waited for nobody meanwhile.
                driver.waits_since = time.monotonic()

    def _note(self, phase: str) -> None:
        """Let the others know what this replica does."""
        driver = self._driver
        if driver is not None:
            driver.signs.set_progress(driver.inner_step, phase)
            driver.phase = phase

    # ------------------------------------------------------------------- from record to record

    def _attempt_until_done(self, attempt: Attempt[T], seal: Seal, began: float) -> list[T]:
        """Return what the attempt that succeeds has returned; nothing if this replica has left."""
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
                # Its proposer has yet to hear that it has failed.
                continue
            self._tried = chosen.name
            # The decision of a record counts also where this replica does not connect.
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
                    # A Ctrl-C: groups of this attempt may be there, and are not made again.
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
        """End the rounds of all workers for good; see ``Seal``."""
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
        """Tell the others that this replica has stopped in a record."""
        if self._driver is None or record is None:
            return
        cuts, dead = lost_members(error, self.replica)
        self._driver.lost(dead)
        nonces = [key.nonce for key in record.members if key.number in cuts]
        self._driver.tell(st.Broke(record.number, tuple(nonces)))

    # ------------------------------------------------------------------------------- orders

    def _next_order(self, began: float) -> tuple[Any, Chosen | None]:
        """Wait for what this replica is to do next; None when it has left.

        Raises:
            SyncError: This replica's part in the group ends, or its caller waits no longer.
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
        """Return the next order, what it chooses, and what worker 0 waits for; all workers call."""
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
        """Wait a moment for an order."""
        return driver.next_order(HEAR_S)

    def _chosen(self, driver: Driver, order: st.Connect | st.Enter) -> Chosen:
        """Return an attempt with the places of its members."""
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
        """Connect this worker to the store of an attempt, where one is needed."""
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
        """Say how connecting went at all workers; return the record once all members have agreed.

        Raises:
            Void: If the attempt comes to nothing.
            ReplicaMismatch: If a member does not let in the key of this newcomer.
            SyncError: If the members have agreed, and a worker of this replica is not connected.
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
        """Raise where an attempt is to end all attempts."""

    def is_void(self, name: AttemptName) -> bool:
        """Whether the attempt of this name, which is under way, comes to nothing."""
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
        """Return the nonces of members to which this worker has no way."""
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
        """Return the epoch of a record, and what counts of this worker's rounds."""
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
        """The agreement whose decision is still to be applied; None for none."""
        return None if self._unsettled is None else self.agreed(self._unsettled)

    def has_settled(self) -> None:
        """Note that the decision of the last agreement is applied."""
        self._unsettled = None

    # --------------------------------------------------- for groups whose membership changes so

    def _awaited(self, waiting: str) -> str:
        """Return words for the log: the thing that is waited for; "" for nothing."""
        return waiting

    def _end_of_wait(self, driver: Driver, began: float) -> Ended | None:
        """Return the reason for which this replica waits no longer; at worker 0."""
        return None

    def _error_of(self, end: Ended) -> SyncError:
        """Return the error to raise on this replica, whose part in the group has ended so."""
        return SyncError(end.reason)

    def _goes_on_after(self, error: SyncError) -> bool:
        """Whether this replica can try again after the error of an attempt."""
        return False

    def _is_interrupted(self, chosen: Chosen) -> None:
        """Note an attempt that an error of the program has ended."""

    def _has_failed(self, error: Void) -> None:
        """Note an attempt that came to nothing, which may end all attempts."""

    def _meeting_place(self, chosen: Chosen) -> dist.Store:
        """Return the store at which the members of an attempt connect, under its prefix."""
        raise NotImplementedError

    def _begun(self, record: Record, before: Record | None, began: float) -> None:
        """Note that this replica trains in a record."""


def attempt_text(name: AttemptName) -> str:
    """Return the name of an attempt as text, of letters, digits and a point."""
    return f"{name.proposer.hex()}.{name.counter}"


def way_of(share: LinkShare) -> Way:
    """Return the way to the link of a share."""
    ways = share.link.ways()
    return Way(*[ways[name] for name in ("link", "address", "link key", "relay")])


def are_keys_refused(error: SyncError | None, replica: int) -> bool:
    """Whether ``replica`` does not let in a member's key, or a member the key of ``replica``."""
    if error is None or error.stage != "connect":
        return False
    return any(replica in pair for pair in error.cuts)


def lost_members(error: SyncError | None, replica: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the members to which ``replica`` has no way, and those that seem dead."""
    if error is None:
        return (), ()
    cuts = {one for pair in error.cuts if replica in pair for one in pair}
    return tuple(sorted(cuts - {replica})), tuple(error.missing)


class Mates:
    """The workers of one replica, over their links; worker 0 speaks, and the others listen.

    A round of another worker may wait for a replica that has stopped. The agreement of the group,
    at worker 0, finds that out.

    Args:
        link: The link of this worker.
        ways: To the links of all workers.
        rank: The rank of this worker.
        service: Names the messages, equal on all workers of this replica, and on no other.

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
        """Call ``seal`` when worker 0 breaks the rounds of ``epoch`` off."""
        self._seal, self._epoch = seal, epoch

    def break_off(self, epoch: int) -> None:
        """Break off the rounds of the other workers in an epoch; at worker 0."""
        self._tell(_EPOCH.pack(epoch))

    def give_up(self, name: AttemptName) -> None:
        """Let the other workers give up an attempt; at worker 0."""
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
        """Do what worker 0 says; a word about another epoch or attempt than the present is late."""
        if len(message) == _GIVEN_UP.size:
            self.given_up = AttemptName(*_GIVEN_UP.unpack(message))
        elif len(message) == _EPOCH.size and _EPOCH.unpack(message)[0] == self._epoch():
            try:
                self._seal()
            except RuntimeError as error:
                # Later words are of other rounds.
                logger.warning("a round could not be broken off: %s", error)
