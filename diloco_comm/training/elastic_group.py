"""A group of replicas whose membership changes by itself: from view to view."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ..base.errors import LeftBehind, NonFiniteError, ReplicaMismatch, RunEnded, SyncError
from ..base.service.keys import LinkKeys
from ..elastic.core import events as ev
from ..elastic.differences import found_difference
from ..elastic.driver import Driver, Signs
from ..elastic.exits import LEFT_STAGE, Ended, end_with_status, forget_sigterm, heed_sigterm
from ..elastic.happenings import Fenced, Suspected, ViewChanged, Waiting
from ..elastic.hosting import Place, meeting_place, place_of_workers
from ..elastic.options import PERIOD_S, Elastic
from ..elastic.totals import Meter
from ..elastic.views import Member, View
from ..exchange.membership.own_link import LinkShare
from ..exchange.waiting import WaitLog
from ..replica.workers import WORKMATE_STAGE, ReplicaWorkers
from ..rounds.runner import RoundRunner

if TYPE_CHECKING:
    from .state_transfer import StateTransfer

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Takes part in an attempt: members, the store at which they meet, and the form that asks for it.
Attempt = Callable[[tuple[int, ...], dist.Store, ev.Form], T]
# How often the workers of a replica hear from worker 0, which speaks for the replica.
_HEAR_S = 1.0
_POLL_S = 0.05
# Key of the store of a view that begins: the inner step of the checkpoint of its source.
_FIRST_STEP = "first step"
# Stages of the errors for which a replica waits in vain, by the kind of its driver's end.
_STAGES = {"waited": "quorum", "failed": "registry"}


class ElasticGroup:
    """Lead one replica, or one worker of it, from view to view.

    Args:
        shown: What must be equal on all replicas, as JSON types.
        workers: The workers of this replica; worker 0 speaks for the replica.
        connect_s: Seconds in which the store of a view must answer.
        share: The part of this object in the link of this process; None at workers but the first.
        name: The name of this object, equal on all replicas.
        keys: The link's keys, which protect the stores of the views as well.
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
        share: LinkShare | None,
        name: str,
        keys: LinkKeys | None = None,
        transfer: StateTransfer | None = None,
    ) -> None:
        self.elastic, self._workers = elastic, workers
        self._connect_s, self._keys = connect_s, keys
        self._share, self._name = share, name
        self.view: View | None = None
        self.is_done = False
        self.replica = -1
        self.copied_bytes = 0
        self.first_step = -1
        self._transfer = transfer
        self._form: ev.Form | None = None
        self._shown = json.dumps(shown)
        self.meter = Meter(time.monotonic())
        # At worker 0 of this replica, for what it tells the replica's other workers.
        self._own_store: dist.Store | None = None
        self._store: dist.Store | None = None
        self._registry_id = ""
        self._driver: Driver | None = None
        self._place: Place | None = None
        failure, is_misfit, stage = "", False, "registry"
        folder = elastic.folder()
        end_with_status(has_launcher=folder is not None)
        heed_sigterm(self, folder, has_mates=workers is not None)
        if self._speaks:
            try:
                self._open(shown, 1 if workers is None else workers.size)
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

    def _open(self, shown: Any, num_workers: int) -> None:
        elastic = self.elastic
        place = self._place = elastic.place(self._connect_s, self._keys)
        registry = elastic.connect()
        try:
            folder = elastic.folder()
            state = elastic.begin(
                registry,
                address=place.address,
                workers=num_workers,
                shown=shown,
                folder=folder,
                is_pulling=self._transfer is not None,
            )
            place.publish(state.member.nonce, self._shown)
            assert self._share is not None and elastic.run is not None
            service = f"{elastic.run}/{self._name}/members"
            driver = Driver(
                registry,
                state,
                period_s=PERIOD_S,
                say=self._say,
                signs=Signs(self._share.link, service, elastic.suspect_after),
                chooses_number=elastic.replica is None,
                folder=folder,
            )
            if self._transfer is not None:
                self._transfer.attach(driver, self._emit)
            driver.start()
        except BaseException:
            registry.close()
            place.withdraw()
            self._place = None
            raise
        self._registry_id = registry.registry_id
        self._driver = driver

    @property
    def _speaks(self) -> bool:
        return self._workers is None or self._workers.rank == 0

    def _from_worker_0(self, value: Any) -> Any:
        return value if self._workers is None else self._workers.gather(value)[0]

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
                self._driver.tell(ev.Finished(has_all_steps))
            self._driver.close()
        if self._transfer is not None:
            self._transfer.close()
        if self._place is not None:
            self._place.withdraw()

    def leave(self) -> None:
        """Leave the group at the next boundary."""
        if self._driver is not None:
            self._driver.tell(ev.Leave())

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
        results = self._attempt_until_done(attempt, time.monotonic())
        if not results:
            raise SyncError(
                "this replica was asked to leave before it had joined its group", stage=LEFT_STAGE
            )
        return results[0]

    def go_on(self, attempt: Attempt[None], error: SyncError | None, began: float) -> None:
        """Go from the present view to the next.

        Args:
            error: Why; None at a boundary.
            began: When training stood still.
        """
        assert self.view is not None
        number = self.view.number if self._driver is None else self._driver.state.epoch
        if error is None:
            self._tell(ev.Boundary(number))
        else:
            logger.warning("view %d has ended: %s", number, without_advice(error))
            self._tell(ev.Broke(number, *lost_members(error, self.replica)))
        self._attempt_until_done(attempt, began)

    def _attempt_until_done(self, attempt: Attempt[T], began: float) -> list[T]:
        """Return what the attempt that succeeds has returned; nothing if this replica has left."""
        while True:
            form = self._next_form(began)
            if form is None:
                return []
            results, unreported = [], None
            try:
                with self.waiting():
                    results.append(attempt(form.view.ids, self._meeting_place(form), form))
            except NonFiniteError as error:
                unreported = error
            except SyncError as error:
                self._failed(form, error)
                if not is_about_group(error):
                    raise
                if form.role == "join" and is_refused(error, self.replica):
                    # Each further attempt would hold the members up.
                    raise ReplicaMismatch(str(error), stage=error.stage) from error
                logger.warning("view %d could not begin: %s", form.view.number, error)
                continue
            except BaseException:
                self._failed(form, None)
                raise
            self._begun(form.view, began)
            if unreported is not None:
                raise unreported
            return results

    def _meeting_place(self, form: ev.Form) -> dist.Store:
        """Connect all workers to the store of a view."""
        # All workers have come here, so that none waits for the marks of an earlier attempt.
        self._clear_marks()
        self._form, self._own_store = form, None
        self.first_step = -1
        with nullcontext() if self._workers is None else self._workers.all_workers():
            try:
                if self._workers is not None:
                    own = next(one for one in form.view.members if one.id == self.replica)
                    self._own_store = place_of_workers(
                        form.view, own.id, self._address(own), self._connect_s, self._keys
                    )
                address = self._address(form.view.lowest)
                store = meeting_place(form.view, address, self._connect_s, self._keys)
                self._store = store
                if form.view.source == self.replica and self._driver is not None:
                    step = -1 if self._transfer is None else self._transfer.saved_step
                    store.set(_FIRST_STEP, str(step))
                return store
            except dist.DistError as error:
                raise self._silent_store(form.view, error) from error

    def _address(self, member: Member) -> str:
        """Return where this process finds a member's store."""
        return self.elastic.store or member.address

    def _silent_store(self, view: View, error: dist.DistError) -> SyncError:
        host, is_shared = view.lowest, self.elastic.store is not None
        place = "" if is_shared else f" on replica {host.id}"
        has_no_way = not is_shared and host.id != self.replica
        address = self._address(host)
        return SyncError(
            f"the store of view {view.number}{place}, at {address}, did not answer: {error}",
            stage="rendezvous",
            cuts=[(self.replica, host.id)] if has_no_way else [],
        )

    def _next_form(self, began: float) -> ev.Form | None:
        """Wait for an attempt that asks for this replica; None when it has left.

        Raises:
            LeftBehind: The others go on without this replica.
            SyncError: There are too few replicas, or no answer of the registry, for too long.
        """
        log, limit = WaitLog(), self.elastic.quorum_wait
        while True:
            driver = self._driver
            order: Any = None if driver is None else self._next_order(driver)
            waiting = "" if driver is None else driver.waits
            if self._transfer is not None and self._transfer.is_pulling:
                began = time.monotonic()
            if order is None and limit is not None and time.monotonic() - began > limit:
                order = Ended("waited", f"waited {limit:g} s {waiting}")
            if isinstance(order, Ended) and order.kind == "refused":
                order = Ended("refused", order.reason + self._found_difference())
            number = -1 if driver is None else driver.state.member.id
            order, waiting, self.replica = self._from_worker_0((order, waiting, number))
            if isinstance(order, Ended):
                self._ended(order)
                return None
            if order is not None:
                assert isinstance(order, ev.Form)
                return order
            log.tick(lambda waiting=waiting: f"a view, {waiting}" if waiting else "a view")  # type: ignore[misc]

    def _found_difference(self) -> str:
        view = None if self._driver is None else self._driver.state.recorded
        if view is None:
            return ""
        address = self._address(view.lowest)
        return found_difference(view, address, self._shown, self._connect_s, self._keys)

    def _next_order(self, driver: Driver) -> ev.Form | Ended | None:
        """Wait a moment for an order; a newcomer copies the state meanwhile."""
        if self._transfer is None or self.view is not None:
            return driver.next_form(_HEAR_S)
        self._note("copying")
        until = time.monotonic() + _HEAR_S
        while not driver.has_order and time.monotonic() < until:
            self._transfer.turn(driver)
        return driver.next_form(0.0)

    def _ended(self, order: Ended) -> None:
        if order.kind == "drained":
            self.is_done = True
            return
        raise error_of(order) from None

    def _failed(self, form: ev.Form, error: SyncError | None) -> None:
        number = form.view.number
        self._mark("failed")
        cuts, dead = lost_members(error, self.replica)
        is_open = self._driver is not None and self._driver.state.epoch == number
        if is_open:
            self._tell(ev.Broke(number, cuts, dead))
        else:
            self._tell(ev.Failed(number, cuts, unheard=dead))

    def _begun(self, view: View, began: float) -> None:
        self.view = view
        self.meter.entered(time.monotonic(), time.monotonic() - began)
        self._tell(ev.Started(view.number))
        self.elastic.remember(self._registry_id)
        if self._place is not None:
            self._place.tidy(view)
        if self._transfer is not None:
            self._transfer.has_begun()
        if self._driver is not None:
            entered = self._driver.state.recorded or view
            seconds = time.monotonic() - began
            step = entered.inner_step if entered.number == view.number else view.inner_step
            self._driver.inner_step = step
            self._note("steps")
            who = view.number, view.ids, view.joined, view.left
            self._emit(ViewChanged(*who, view.reason, seconds, step, self.copied_bytes))

    # ------------------------------------------------------------- the view must be open first

    def is_given_up(self) -> bool:
        """Whether the attempt under way is to fail before its members have met."""
        assert self._form is not None
        if self._driver is not None:
            return self._driver.is_given_up(self._form.view.number)
        assert self._own_store is not None
        try:
            return self._own_store.check(["failed"])
        except dist.DistError:
            return True

    def admit(self, inner_step: int) -> None:
        """Wait until the registry says that the view is open, or raise SyncError."""
        assert self._form is not None
        number = self._form.view.number
        if self._driver is None:
            self._hear_of_opening(number)
            return
        if self._form.role == "broadcast":
            inner_step = self.first_step = self._hear_first_step()
        self._driver.tell(ev.Formed(number, max(0, inner_step)))
        log, began, limit = WaitLog(), time.monotonic(), self.elastic.quorum_wait
        while not self._driver.is_given_up(number):
            if isinstance(self._driver.wait_until_open(number, _HEAR_S), View):
                self._mark("open")
                return
            if limit is not None and time.monotonic() - began > limit:
                break
            log.tick(lambda: f"the registry to open view {number}")
        raise self._given_up(number)

    def _hear_first_step(self) -> int:
        assert self._store is not None
        try:
            return int(self._store.get(_FIRST_STEP))
        except dist.DistError as error:
            raise SyncError(
                f"the store of the view has not told its first inner step: {error}", stage="view"
            ) from error

    def _mark(self, what: str) -> None:
        """Tell this replica's other workers what became of the attempt."""
        if self._driver is not None and self._own_store is not None:
            with contextlib.suppress(dist.DistError):
                self._own_store.set(what, "1")

    def _clear_marks(self) -> None:
        if self._driver is not None and self._own_store is not None:
            with contextlib.suppress(dist.DistError):
                for what in ("open", "failed"):
                    self._own_store.delete_key(what)

    def _hear_of_opening(self, number: int) -> None:
        assert self._own_store is not None
        try:
            while not self._own_store.check(["open"]):
                if self._own_store.check(["failed"]):
                    raise self._given_up(number)
                time.sleep(_POLL_S)
        except dist.DistError as error:
            raise self._given_up(number) from error

    def _given_up(self, number: int) -> SyncError:
        return SyncError(f"view {number} was given up before it was open", stage="view")

    # --------------------------------------------------------------------------------- words

    def _tell(self, event: ev.Event) -> None:
        if self._driver is not None:
            self._driver.tell(event)

    def guard(self, seal: Callable[[], None]) -> None:
        """Call ``seal`` when what the training thread waits for is to fail."""
        if self._driver is not None:
            self._driver.on_break(seal)

    def _say(self, action: ev.Action) -> None:
        if isinstance(action, ev.Suspect):
            self._emit(Suspected(action.ids))
        elif isinstance(action, ev.Wait):
            self.meter.waits(time.monotonic(), bool(action.reason))
            self._emit(Waiting(action.reason))
        elif isinstance(action, ev.Fence):
            self._emit(Fenced(action.reason))

    def _emit(self, happening: Any) -> None:
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


def is_refused(error: SyncError, replica: int) -> bool:
    """Whether a member does not let in the key of ``replica``, or ``replica`` a member's key."""
    return error.stage == "connect" and any(replica in pair for pair in error.cuts)


def lost_members(error: SyncError | None, replica: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the members to which ``replica`` has no way, and those that seem dead."""
    if error is None:
        return (), ()
    cuts = {one for pair in error.cuts if replica in pair for one in pair}
    return tuple(sorted(cuts - {replica})), tuple(error.missing)


def without_advice(error: SyncError) -> str:
    """Return the message without what it says of ``change_group``."""
    return str(error).split(": call change_group")[0]
