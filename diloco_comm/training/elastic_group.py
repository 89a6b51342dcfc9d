"""``ElasticGroup``: the follower of an elastic group, which takes a replica from view to view."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..base.checks import logger_of
from ..base.errors import LeftBehind, NonFiniteError, ReplicaMismatch, RunEnded, SyncError
from ..elastic.driver import Driver
from ..elastic.events import Meter, ViewChanged, Waiting
from ..elastic.exits import LEFT_STAGE, end_with_status, forget_sigterm, heed_sigterm
from ..elastic.options import PERIOD_S, Elastic, Place, meeting_place
from ..exchange.membership.follower import (
    HEAR_S,
    Attempt,
    Chosen,
    Follower,
    Seal,
    T,
    are_keys_refused,
    attempt_text,
    way_of,
)
from ..exchange.membership.own_link import LinkShare
from ..group import state as st
from ..group.driver import Driver as GroupDriver
from ..group.driver import Ended
from ..group.records import Record, cause_of
from ..group.signs import EXCHANGE, STEPS, Signs
from ..replica.workers import WORKMATE_STAGE, ReplicaWorkers
from ..rounds.runner import RoundRunner

if TYPE_CHECKING:
    from .state_transfer import StateTransfer

logger = logger_of(__name__)

# The ``stage`` of the SyncError for these kinds of ``Ended``.
_STAGES = {"waited": "quorum", "failed": "registry"}


class ElasticGroup(Follower):
    """Takes one worker of a replica from view to view.

    Args:
        elastic: The options.
        shown: The settings that must be equal on all replicas, as JSON types.
        workers: The workers of this replica; None if this one is alone.
        connect_s: Seconds in which the store of a view must answer.
        share: This object's share of the link of this process.
        name: The name of this object, equal on all replicas.
        uses_store: Gloo groups connect at a store.
        transfer: Serves the outer state, and copies it before this replica joins; None: neither.
        figures: See ``Driver``.

    Attributes:
        replica: This replica's number; -1 before the first view.
        view: The record of the view in which this replica trains; None before the first.
        is_done: This replica has left the group.
        meter: Measures the times for ``ElasticTotals``.
        copied_bytes: Bytes of state that newcomers of the view were given while all waited.
        first_step: Inner step of the checkpoint from which this view begins the run, or goes on
            after all members have died; -1 if there is none.
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
        figures: Callable[[GroupDriver], bytes] | None = None,
    ) -> None:
        super().__init__(workers, share, f"{elastic.run}/{name}", uses_store=uses_store)
        self.elastic, self._connect_s = elastic, connect_s
        self.is_done = False
        self.copied_bytes = 0
        self.first_step = -1
        self._transfer, self._figures = transfer, figures
        self._shown = json.dumps(shown)
        self.meter = Meter(time.monotonic())
        self._registry_id = ""
        self._place: Place | None = None
        # When this newcomer was last copying state: ``quorum_wait`` counts from then.
        self._copied_at = 0.0
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
            link, way = self._share.link.link, way_of(self._share)
            service = f"{self._name}/members"
            limits = elastic.suspect_after, elastic.busy_after
            driver = Driver(
                registry,
                state,
                Signs(state.nonce, link, way, service, *limits),
                period_s=PERIOD_S,
                shown=self._shown,
                say=self._emit,
                registry_id=registry.registry_id,
                chooses_number=elastic.replica is None,
                folder=folder,
            )
            driver.ways, driver.figures = self._ways, self._figures
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

    def close(self, *, is_finished: bool = True, has_all_steps: bool = False) -> None:
        """Tell the others that this replica has ended; idempotent.

        Args:
            is_finished: This replica has taken all its steps.
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
        # No round is under way, so the last record decides on none.
        return st.Finished(has_all_steps, (), step)

    def leave(self) -> None:
        """Leave the group at the next boundary."""
        if self._driver is not None:
            self._driver.tell(st.Leave())

    # ----------------------------------------------------------------------- while training

    def before_step(self, rounds: RoundRunner, inner_step: int) -> bool:
        """Tell the driver the step, and the rounds whether to ask for a boundary.

        Returns:
            Whether this replica must stop at once, as the view has ended.
        """
        driver = self._driver
        if driver is None:
            return False
        driver.warn_if_ended()
        driver.inner_step = inner_step
        self._note(STEPS)
        # Not while the registry does not answer, as the change would have to wait for it.
        rounds.announces_change = driver.is_change_wanted and driver.loss is None
        # Several workers would need a message in each step to stop at the same step: they go on
        # until a round fails.
        return driver.is_broken and self._workers is None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Run a block in which the training thread may wait for the other members."""
        driver = self._driver
        if driver is None:
            yield
            return
        before = driver.waits_since
        driver.waits_since = before or time.monotonic()
        try:
            with self.doing(EXCHANGE):
                yield
        finally:
            driver.waits_since = before

    def is_boundary(self, rounds: RoundRunner) -> bool:
        """Whether the round just applied was the view's last; a collective call of the workers."""
        if self._workers is None:
            return rounds.is_change_due
        return self._workers.any([rounds.is_change_due])[0]

    # ------------------------------------------------------------------- from view to view

    def enter(self, attempt: Attempt[T]) -> T:
        """Enter the group, as a founder or a newcomer; return the result of ``attempt``.

        ``attempt`` is called again after each failure that concerns the group.

        Raises:
            ReplicaMismatch: If settings differ, or if keys are not let in.
            SyncError: If this replica was asked to leave first.
        """
        results = self._attempt_until_done(attempt, lambda _: ((), 0, False), time.monotonic())
        self.is_done = not results
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
            attempt: Takes part in an attempt to begin the next view.
            seal: Ends the rounds of the present view; called at least once.
            error: Why the view has ended; None at a boundary.
            began: Monotonic time since when this replica has not trained.
        """
        assert self.view is not None
        with self.waiting():
            if error is None:
                self._tell(st.Boundary(self.view.number, *self._sealed(seal, is_patient=True)))
            else:
                logger.warning("view %d has ended: %s", self.view.number, without_advice(error))
                self._broke(self.view, error)
            self.is_done = not self._attempt_until_done(attempt, seal, began)

    # ------------------------------------------------------------------------------- orders

    def _is_interrupted(self, chosen: Chosen) -> None:
        if self._driver is not None:
            error = f"the program of replica {self.replica} was interrupted"
            self._driver.tell(st.Connected(chosen.name, (), error))

    def _awaited(self, waiting: str) -> str:
        return f"a view, {waiting}" if waiting else "a view"

    def _end_of_wait(self, driver: GroupDriver, began: float) -> Ended | None:
        if self._transfer is not None and self._transfer.is_pulling:
            self._copied_at = time.monotonic()
        limit = self.elastic.quorum_wait
        if limit is None or driver.is_ending:
            return None
        if time.monotonic() - max(began, self._copied_at) <= limit:
            return None
        return Ended("waited", f"waited {limit:g} s {driver.waits or 'for the other members'}")

    def _error_of(self, end: Ended) -> SyncError:
        return error_of(end)

    def _goes_on_after(self, error: SyncError) -> bool:
        return is_about_group(error)

    def _wait_for_order(self, driver: GroupDriver) -> Any:
        """Wait up to ``HEAR_S`` for an order; a newcomer copies the state meanwhile."""
        if self._transfer is None or self.view is not None:
            return driver.next_order(HEAR_S)
        self._note("copying")
        until = time.monotonic() + HEAR_S
        while not driver.has_order and time.monotonic() < until:
            assert isinstance(driver, Driver)
            self._transfer.turn(driver)
        return driver.next_order(0.0)

    def _meeting_place(self, chosen: Chosen) -> dist.Store:
        address = self.elastic.store or chosen.stores[0]
        assert self.elastic.run is not None
        text = attempt_text(chosen.name)
        try:
            return meeting_place(self.elastic.run, text, address, self._connect_s)
        except dist.DistError as error:
            raise self._silent_store(chosen, address, error) from error

    def _silent_store(self, chosen: Chosen, address: str, error: Exception) -> SyncError:
        host, is_shared = chosen.members[0], self.elastic.store is not None
        place = "" if is_shared else f" on replica {host.number}"
        has_no_way = not is_shared and host.number != self.replica
        return SyncError(
            f"the store of the view{place}, at {address}, did not answer: {error}",
            stage="rendezvous",
            cuts=[(self.replica, host.number)] if has_no_way else [],
        )

    def _refuse(self, text: str, failure: SyncError | None) -> None:
        if self.view is None and are_keys_refused(failure, self.replica):
            raise ReplicaMismatch(text, stage="connect")

    def _begun(self, view: Record, before: Record | None, began: float) -> None:
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
            self._note(STEPS)
            who = view.number, view.numbers, view.joined, view.left_out
            self._emit(ViewChanged(*who, cause_of(view), seconds, step, self.copied_bytes))

    # --------------------------------------------------------------------------------- words

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
    """Return the error to raise on a replica whose part in the group has ended against its will."""
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


def without_advice(error: SyncError) -> str:
    """Return an error's message without its advice to call ``change_group``."""
    return str(error).split(": call change_group")[0]
