"""A group of replicas whose membership changes by itself: from view to view."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..base.errors import LeftBehind, NonFiniteError, ReplicaMismatch, RunEnded, SyncError
from ..elastic.driver import Driver
from ..elastic.exits import LEFT_STAGE, end_with_status, forget_sigterm, heed_sigterm
from ..elastic.happenings import ViewChanged, Waiting
from ..elastic.hosting import Place, meeting_place
from ..elastic.options import PERIOD_S, Elastic
from ..elastic.registry.table import RegistryTable
from ..elastic.totals import Meter
from ..exchange.membership.change import Agreed
from ..exchange.membership.member import Epoch
from ..exchange.membership.own_link import LinkShare
from ..exchange.waiting import WaitLog
from ..group import state as st
from ..group.beats import Way
from ..group.driver import Ended
from ..group.records import Attempt as AttemptName
from ..group.records import Key, Record, cause_of
from ..group.signs import Signs
from ..group.streams import Positions
from ..replica.workers import WORKMATE_STAGE, ReplicaWorkers
from ..rounds.runner import RoundRunner
from .mates import Mates

if TYPE_CHECKING:
    from .state_transfer import StateTransfer

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Takes part in an attempt to begin a view.
Attempt = Callable[["ViewChange"], T]
# Ends the rounds of the present view for good, once those under way have ended where the argument
# says so. Returns how far they are, the inner step, and whether all have all votes and good ones.
Seal = Callable[[bool], tuple[Positions, int, bool]]
# How often the workers of a replica hear from worker 0, which speaks for the replica.
_HEAR_S = 1.0
# Seconds to wait for the place of a member whose beat this process has not read yet.
_PLACES_S, _POLL_S = 5.0, 0.05
# Stages of the errors for which a replica waits in vain, by the kind of its driver's end.
_STAGES = {"waited": "quorum", "failed": "registry"}


class Void(SyncError):
    """An attempt has come to nothing, and nothing has changed."""


class Chosen(NamedTuple):
    """An attempt that is to begin a view, as worker 0 tells all workers of its replica.

    Attributes:
        ways: Of each member's workers, in the order of the members.
        stores: The store at which each member is found.
        record: None where the members have yet to agree.
        has_state: This replica holds the state of the view before.
    """

    name: AttemptName
    members: tuple[Key, ...]
    ways: tuple[tuple[Way, ...], ...]
    stores: tuple[str, ...]
    record: Record | None
    has_state: bool


class ViewChange:
    """One attempt of this worker to begin a view; see ``exchange.membership.change.Change``.

    Attributes:
        record: The view; None before all members have agreed.
    """

    def __init__(
        self,
        group: ElasticGroup,
        chosen: Chosen,
        worker: int,
        store: dist.Store | None,
        failure: SyncError | None,
    ) -> None:
        self._group, self.chosen, self._worker = group, chosen, worker
        self.store, self._failure = store, failure
        self.record: Record | None = None

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
        """What this replica does in the view: "change", "join" or "broadcast".

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

    def entered(self, failure: SyncError | None) -> Agreed:
        """Wait until the members have agreed; see ``Change``."""
        self.record = self._group.wait_until_entered(self.chosen, self._failure or failure)
        return self._group.agreed(self.record)


def attempt_text(name: AttemptName) -> str:
    """Return the name of an attempt as text, of letters, digits and a point."""
    return f"{name.proposer.hex()}.{name.counter}"


class ElasticGroup:
    """Lead one replica, or one worker of it, from view to view.

    Args:
        shown: What must be equal on all replicas, as JSON types.
        workers: The workers of this replica; worker 0 speaks for the replica.
        connect_s: Seconds in which the store of a view must answer.
        share: The part of this object in the link of this process.
        uses_store: Groups of gloo or of devices connect at a store.
        name: The name of this object, equal on all replicas.
        transfer: Serves the state, and copies the state of a group before this replica joins.

    Attributes:
        replica: This replica's number; -1 before the first view.
        view: In which this replica trains; None before the first.
        is_done: This replica has left the group.
        meter: Takes the times of this replica.
        copied_bytes: Of state that newcomers of the view were given while all waited.
        first_step: Inner step of the checkpoint with which the view begins the run, or goes on with
            the run after all its members have died; -1 if there is none.
    """

    def __init__(
        self,
        elastic: Elastic,
        shown: Any,
        workers: ReplicaWorkers | None,
        connect_s: float,
        share: LinkShare,
        name: str,
        *,
        uses_store: bool,
        transfer: StateTransfer | None = None,
    ) -> None:
        self.elastic, self._workers = elastic, workers
        self._connect_s = connect_s
        self._share, self._name = share, name
        self.view: Record | None = None
        self.is_done = False
        self.replica = -1
        self.copied_bytes = 0
        self.first_step = -1
        # How far this replica was when it stopped last.
        self.last_positions: Positions = ()
        self._transfer = transfer
        # The record that was agreed on last, until its decision is applied.
        self._unsettled: Record | None = None
        # An order that was heard during an attempt, and ends it.
        self._next: tuple[Any, Chosen | None] | None = None
        self._shown = json.dumps(shown)
        self.meter = Meter(time.monotonic())
        self._uses_store = uses_store
        self._registry_id = ""
        self._driver: Driver | None = None
        self._place: Place | None = None
        ways = self._of_workers(Way(*_words(share)))
        self._ways = [way.to_text() for way in ways]
        self._mates: Mates | None = None
        if workers is not None:
            service = f"{elastic.run}/{name}/workers of {ways[0].nonce}"
            self._mates = Mates(share.link.link, ways, workers.rank, service)
        failure, is_misfit, stage = "", False, "registry"
        folder = elastic.folder()
        end_with_status(has_launcher=folder is not None)
        heed_sigterm(self, folder, has_mates=workers is not None)
        if self._speaks:
            try:
                self._open(shown)
            except Exception as error:
                if workers is None:
                    raise
                failure = f"{type(error).__name__}: {error}"
                is_misfit = isinstance(error, ReplicaMismatch)
                stage = error.stage if isinstance(error, SyncError) else stage
        failure, is_misfit, stage = self._from_worker_0((failure, is_misfit, stage))
        if failure:
            kind = ReplicaMismatch if is_misfit else SyncError
            raise kind(f"worker 0 of this replica failed: {failure}", stage=stage)

    def _open(self, shown: Any) -> None:
        elastic = self.elastic
        if self._uses_store:
            self._place = elastic.place(self._connect_s)
        registry = elastic.connect()
        try:
            folder = elastic.folder()
            saved_step = -1 if self._transfer is None else self._transfer.saved_step
            state = elastic.begin(shown=shown, folder=folder, saved_step=saved_step)
            assert elastic.run is not None
            link, way = self._share.link.link, Way(*_words(self._share))
            service = f"{elastic.run}/{self._name}/members"
            limits = elastic.suspect_after, elastic.busy_after
            driver = Driver(
                RegistryTable(registry),
                state,
                Signs(state.nonce, link, way, service, *limits),
                period_s=PERIOD_S,
                shown=self._shown,
                say=self._emit,
                registry_id=registry.registry_id,
                chooses_number=elastic.replica is None,
                folder=folder,
            )
            driver.ways = self._ways
            driver.store = "" if self._place is None else self._place.address
            if self._transfer is not None:
                self._transfer.attach(driver, self._emit)
            else:
                driver.tell(st.JoinerReady())
            driver.start()
        except BaseException:
            registry.close()
            raise
        self._registry_id = registry.registry_id
        self._driver = driver

    @property
    def _speaks(self) -> bool:
        return self._workers is None or self._workers.rank == 0

    def _from_worker_0(self, value: Any) -> Any:
        return value if self._workers is None else self._workers.gather(value)[0]

    def _of_workers(self, value: T) -> list[T]:
        """Return the values of all workers; a collective call."""
        return [value] if self._workers is None else self._workers.gather(value)

    def close(self, *, is_finished: bool = True, has_all_steps: bool = False) -> None:
        """Tell the others that this replica has ended; idempotent.

        Args:
            is_finished: It has taken all its steps.
            has_all_steps: All steps of the run are taken and shared.
        """
        forget_sigterm(self)
        if is_finished and not self.is_done:
            self.elastic.remember("")
        if self._driver is not None:
            if is_finished:
                self._driver.tell(self._finished(has_all_steps))
            self._driver.close()
        if self._transfer is not None:
            self._transfer.close()
        if self._mates is not None:
            self._mates.close()

    def _finished(self, has_all_steps: bool) -> st.Finished:
        step = 0 if self._driver is None else self._driver.inner_step
        return st.Finished(has_all_steps, self.last_positions, step)

    def leave(self) -> None:
        """Leave the group at the next boundary."""
        if self._driver is not None:
            self._driver.tell(st.Leave())

    # ----------------------------------------------------------------------- while training

    def before_step(self, rounds: RoundRunner, inner_step: int) -> bool:
        """Pass on what the driver knows; return whether this replica must stop at once."""
        driver = self._driver
        if driver is None:
            return False
        driver.warn_if_ended()
        driver.inner_step = inner_step
        self._note("steps")
        rounds.announces_change = driver.is_change_wanted
        # Several workers could not stop at the same step without a message in each step.
        return driver.is_broken and self._workers is None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Run a block in which the training thread may wait for the other members."""
        if self._driver is None:
            yield
            return
        self._driver.waits_since = time.monotonic()
        try:
            with self.doing("exchange"):
                yield
        finally:
            self._driver.waits_since = 0.0

    @contextlib.contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Run a block in which this replica is in a phase, see ``DiLoCo.doing``."""
        before = "" if self._driver is None else self._driver.phase
        self._note(phase)
        try:
            yield
        finally:
            self._note(before)

    def _note(self, phase: str) -> None:
        """Let the others know what this replica does."""
        driver = self._driver
        if driver is not None:
            driver.signs.set_progress(driver.inner_step, phase)
            driver.phase = phase

    def is_boundary(self, rounds: RoundRunner) -> bool:
        """Whether the round just applied was the last of this view; all workers call this."""
        if self._workers is None:
            return rounds.is_change_due
        return self._workers.any([rounds.is_change_due])[0]

    # ------------------------------------------------------------------- from view to view

    def enter(self, attempt: Attempt[T]) -> T:
        """Enter the group, as a founder or a newcomer; return the result of ``attempt``.

        ``attempt`` is called again after each failure that concerns the group.

        Raises:
            ReplicaMismatch: If the members do not let in the key of this newcomer.
            SyncError: If this replica was asked to leave first.
        """
        results = self._attempt_until_done(attempt, lambda _: ((), 0, False), time.monotonic())
        if not results:
            raise SyncError(
                "this replica was asked to leave before it had joined its group", stage=LEFT_STAGE
            )
        return results[0]

    def go_on(
        self,
        attempt: Attempt[None],
        seal: Seal,
        error: SyncError | None,
        began: float,
    ) -> None:
        """Go from the present view to the next.

        Args:
            seal: Ends the rounds of the present view; called once at least.
            error: Why; None at a boundary.
            began: When training stood still.
        """
        assert self.view is not None
        if error is None:
            self._tell(st.Boundary(self.view.number, *self._sealed(seal, is_patient=True)))
        else:
            logger.warning("view %d has ended: %s", self.view.number, without_advice(error))
            self._broke(self.view, error)
        self._attempt_until_done(attempt, seal, began)

    def _attempt_until_done(self, attempt: Attempt[T], seal: Seal, began: float) -> list[T]:
        """Return what the attempt that succeeds has returned; nothing if this replica has left."""
        while True:
            order, chosen = self._next_order(began)
            if order is None:
                return []
            if isinstance(order, st.Seal):
                positions, step, _ = self._sealed(seal, is_patient=order.is_patient)
                self._tell(st.Sealed(order.number, positions, step))
                continue
            assert chosen is not None
            results, unreported = [], None
            change = self._change_of(chosen)
            try:
                with self.waiting():
                    results.append(attempt(change))
            except NonFiniteError as error:
                unreported = error
            except Void as error:
                logger.info("an attempt to change the view has failed: %s", error)
                continue
            except SyncError as error:
                self._broke(change.record, error)
                if not is_about_group(error):
                    raise
                logger.warning("view %s could not begin: %s", _number_of(change.record), error)
                continue
            except BaseException:
                self._broke(change.record, None)
                raise
            assert change.record is not None
            self._begun(change.record, began)
            if unreported is not None:
                raise unreported
            return results

    def _sealed(self, seal: Seal, *, is_patient: bool) -> tuple[Positions, int, bool]:
        """End the rounds of all workers for good; see ``Seal``."""
        try:
            own: Any = seal(is_patient)
        except SyncError as error:
            own = str(error)
        ends = self._of_workers(own)
        for end in ends:
            if isinstance(end, str):
                raise SyncError(end, stage="seal")
        positions = tuple([one for each, _, _ in ends for one in each])
        self.last_positions = positions
        return positions, ends[0][1], all(has_votes for _, _, has_votes in ends)

    def _broke(self, record: Record | None, error: SyncError | None) -> None:
        """Tell the others that this replica has stopped in a view."""
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
            LeftBehind: The others go on without this replica.
            SyncError: There are too few replicas, or no answer of the registry, for too long.
        """
        log, limit = WaitLog(), self.elastic.quorum_wait
        while True:
            if self._transfer is not None and self._transfer.is_pulling:
                began = time.monotonic()
            is_late = limit is not None and time.monotonic() - began > limit
            order, chosen, waiting = self._hear(is_late=is_late)
            if isinstance(order, Ended):
                if order.kind == "drained":
                    self.is_done = True
                    return None, None
                raise error_of(order) from None
            if order is not None:
                return order, chosen
            log.tick(lambda waiting=waiting: f"a view, {waiting}" if waiting else "a view")  # type: ignore[misc]

    def _hear(self, *, is_late: bool = False) -> tuple[Any, Chosen | None, str]:
        """Return the next order, what it chooses, and what worker 0 waits for; all workers call."""
        if self._next is not None:
            (order, chosen), self._next = self._next, None
            return order, chosen, ""
        driver = self._driver
        own: Any = (None, None, "", -1)
        if driver is not None:
            order = self._wait_for_order(driver)
            waits, limit = driver.waits, self.elastic.quorum_wait
            if order is None and is_late:
                order = Ended("waited", f"waited {limit:g} s {waits}")
            chosen = None
            if isinstance(order, st.Connect | st.Enter):
                chosen = self._chosen(driver, order)
            own = (order, chosen, waits, driver.state.key.number)
        order, chosen, waits, self.replica = self._from_worker_0(own)
        return order, chosen, waits

    def _wait_for_order(self, driver: Driver) -> Any:
        """Wait a moment for an order; a newcomer copies the state meanwhile."""
        if self._transfer is None or self.view is not None:
            return driver.next_order(_HEAR_S)
        self._note("copying")
        until = time.monotonic() + _HEAR_S
        while not driver.has_order and time.monotonic() < until:
            self._transfer.turn(driver)
        return driver.next_order(0.0)

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
        return Chosen(name, members, ways, stores, record, driver.state.has_state)

    def _change_of(self, chosen: Chosen) -> ViewChange:
        """Connect this worker to the store of an attempt, where one is needed."""
        store: dist.Store | None = None
        failure: SyncError | None = None
        if self._uses_store and len(chosen.members) > 1:
            address = self.elastic.store or chosen.stores[0]
            assert self.elastic.run is not None
            text = attempt_text(chosen.name)
            try:
                store = meeting_place(self.elastic.run, text, address, self._connect_s)
            except dist.DistError as error:
                failure = self._silent_store(chosen, address, error)
        worker = 0 if self._workers is None else self._workers.rank
        return ViewChange(self, chosen, worker, store, failure)

    def _silent_store(self, chosen: Chosen, address: str, error: Exception) -> SyncError:
        host, is_shared = chosen.members[0], self.elastic.store is not None
        place = "" if is_shared else f" on replica {host.number}"
        has_no_way = not is_shared and host.number != self.replica
        return SyncError(
            f"the store of the view{place}, at {address}, did not answer: {error}",
            stage="rendezvous",
            cuts=[(self.replica, host.number)] if has_no_way else [],
        )

    # -------------------------------------------------------------------------- an attempt

    def wait_until_entered(self, chosen: Chosen, failure: SyncError | None) -> Record:
        """Say how connecting went at all workers; return the view once all members have agreed.

        Raises:
            Void: If the attempt comes to nothing.
            ReplicaMismatch: If a member does not let in the key of this newcomer.
            SyncError: If the members have agreed, and a worker of this replica is not connected.
        """
        cut = self._cut_off(chosen, failure)
        told = self._of_workers((cut, "" if failure is None else str(failure)))
        text = next((text for _, text in told if text), "")
        if self._driver is not None and chosen.record is None:
            nonces = tuple(sorted({nonce for cut, _ in told for nonce in cut}))
            error = "" if nonces else text
            self._driver.tell(st.Connected(chosen.name, nonces, error))
        if text and self.view is None and is_refused(failure, self.replica):
            raise ReplicaMismatch(text, stage="connect")
        if text:
            kind = Void if chosen.record is None else SyncError
            raise kind(text, stage="connect")
        if chosen.record is not None:
            return chosen.record
        return self._wait_for_record(chosen)

    def _wait_for_record(self, chosen: Chosen) -> Record:
        log = WaitLog()
        while True:
            order, other, waiting = self._hear()
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
        worker = 0 if self._workers is None else self._workers.rank
        for key, ways in zip(chosen.members, chosen.ways, strict=True):
            way = ways[worker].nonce if worker < len(ways) else ""
            is_there = way in lives and lives[way].is_connected
            if key.number != self.replica and not is_there:
                found.append(key.nonce)
        return found

    def agreed(self, record: Record) -> Agreed:
        """Return the epoch of a view, and what counts of this worker's rounds."""
        self._unsettled = record
        is_begin = record.source is not None
        epoch = Epoch(
            record.number,
            record.numbers,
            joined=record.joined,
            agreed_step=-1 if is_begin else record.inner_step,
        )
        if self.replica in record.joined or not record.decision:
            return Agreed(epoch)
        num_workers = 1 if self._workers is None else self._workers.size
        rank = 0 if self._workers is None else self._workers.rank
        each = len(record.decision) // num_workers
        return Agreed(epoch, record.decision[rank * each : (rank + 1) * each])

    @property
    def unsettled(self) -> Agreed | None:
        """The agreement whose decision is still to be applied; None for none."""
        return None if self._unsettled is None else self.agreed(self._unsettled)

    def has_settled(self) -> None:
        """Note that the decision of the last agreement is applied."""
        self._unsettled = None

    def _begun(self, view: Record, began: float) -> None:
        before, self.view = self.view, view
        self._unsettled = None
        self.meter.entered(time.monotonic(), time.monotonic() - began)
        self._tell(st.Started(view.number))
        self.elastic.remember(self._registry_id)
        if self._place is not None:
            is_lowest = view.members[0].number == self.replica
            self._place.tidy(attempt_text(view.attempt), is_lowest=is_lowest)
        if self._transfer is not None:
            self._transfer.has_begun()
        if self._driver is not None:
            seconds = time.monotonic() - began
            step = max(view.inner_step, self.first_step) if before is None else view.inner_step
            self._driver.inner_step = step
            self._note("steps")
            who = view.number, view.numbers, view.joined, view.left_out
            self._emit(ViewChanged(*who, cause_of(view), seconds, step, self.copied_bytes))

    # --------------------------------------------------------------------------------- words

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

    def _emit(self, happening: Any) -> None:
        if isinstance(happening, Waiting):
            self.meter.waits(time.monotonic(), bool(happening.reason))
        logger.info("%s", happening)
        if self.elastic.on_event is not None:
            try:
                self.elastic.on_event(happening)
            except Exception:
                logger.exception("on_event has failed")


# --------------------------------------------------------------------------- errors and ends


def error_of(end: Ended) -> SyncError:
    """Return the error with which a replica ends that has not left by its own will."""
    if end.kind == "fenced":
        advice = "start this replica again, and it joins as a newcomer"
        return LeftBehind(f"{end.reason}: {advice}", stage="view")
    if end.kind == "refused":
        return ReplicaMismatch(end.reason, stage="view")
    if end.kind == "over":
        return RunEnded(end.reason, stage="view")
    return SyncError(end.reason, stage=_STAGES[end.kind])


def is_about_group(error: SyncError) -> bool:
    """Whether this replica can go on with other members after this error."""
    is_own = isinstance(error, ReplicaMismatch | NonFiniteError) or error.stage == WORKMATE_STAGE
    return not is_own


def is_refused(error: SyncError | None, replica: int) -> bool:
    """Whether a member does not let in the key of ``replica``, or ``replica`` a member's key."""
    return (
        error is not None
        and error.stage == "connect"
        and any(replica in pair for pair in error.cuts)
    )


def lost_members(error: SyncError | None, replica: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the members to which ``replica`` has no way, and those that seem dead."""
    if error is None:
        return (), ()
    cuts = {one for pair in error.cuts if replica in pair for one in pair}
    return tuple(sorted(cuts - {replica})), tuple(error.missing)


def without_advice(error: SyncError) -> str:
    """Return the message without what it says of ``change_group``."""
    return str(error).split(": call change_group")[0]


def _number_of(record: Record | None) -> str:
    return "?" if record is None else str(record.number)


def _words(share: LinkShare) -> tuple[str, ...]:
    ways = share.link.ways()
    return tuple([ways[name] for name in ("link", "address", "link key", "relay")])
