"""Elastic training: takes a ``DiLoCo`` from view to view, and repeats there what has failed.

This module is imported only with ``peers=Elastic(...)``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ..base import extension
from ..base.errors import NonFiniteError, SyncError
from ..base.service.addresses import check_link, name_of_place, proxy_of
from ..base.service.keys import link_keys
from ..elastic.options import Elastic
from ..elastic.phases import FLUSHES, Event, Loop, Phase, Repetition, Report
from ..exchange.exchange import Exchange
from ..exchange.membership.change import Agreed, positions_of, seal
from ..exchange.membership.follower import GroupChange
from ..exchange.membership.own_link import LinkShare, OwnLink
from ..group.records import Record
from ..group.streams import Positions
from ..methods.settings import Settings
from ..replica.model_watch import ModelWatch
from ..rounds.handshake import gather_json
from ..rounds.metrics import Recorder
from ..rounds.part import SyncedPart
from ..rounds.round_log import can_replay
from ..rounds.runner import RoundRunner
from ..rounds.step_timed import StepTimed
from .elastic_group import ElasticGroup, is_about_group
from .group import Agreement, Joined, Place, Replica, join
from .inner_state import InnerStates, warn_of_schedules
from .leases import Leasing
from .plan import Plan
from .state_transfer import StateTransfer

# Seconds between two checks whether the rounds under way have ended.
_POLL_S = 0.001
# A repeated flush may fail so many times, each in another view, before the error is raised.
_MOST_REPEATS = 10


class Trained(Protocol):
    """The attributes of a ``DiLoCo`` that elastic training needs."""

    inner_step: int
    exchange: Exchange
    _rounds: RoundRunner
    _plan: Plan
    _agreement: Agreement
    _saved_writes: Mapping[int, set[int]]
    _recorder: Recorder
    _watch: ModelWatch

    def _refuse_changes(self, parts: Sequence[SyncedPart]) -> None: ...

    def _take_step(
        self, *, is_skipped: bool = False, again: Collection[int] | None = None
    ) -> None: ...

    def _flush(self, *, is_final: bool | None) -> None: ...


class ElasticTraining:
    """Takes a ``DiLoCo`` from view to view.

    Attributes:
        leasing: Agrees on the leases of each view.
        transfer: Copies and serves the outer state beside training; None if newcomers copy it at a
            boundary, while all wait.
        group: Follows the agreement of the group.

    Raises:
        SyncError: If the registry cannot be asked.
    """

    def __init__(self, elastic: Elastic, replica: Replica, place: Place) -> None:
        plan, settings, workers = replica.plan, replica.settings, replica.workers
        spoken = {"handshake": extension.HANDSHAKE, "transfer": extension.TRANSFER}
        # If replicas differ, the error names the first difference in this order.
        shown: dict[str, Any] = {
            "versions of diloco_comm's protocols": spoken,
            "model": plan.description,
        }
        shown |= {"settings": _alike(settings), "of": plan.num_fragments}
        shown["total_steps"] = elastic.total_steps
        shown["inner_state"] = elastic.inner_state
        if elastic.store is not None and place.backend != "tcp":
            shown["shares_store"] = True
        shown["workers"] = 1 if workers is None else workers.size
        shown["backend"] = place.backend or "default"
        self._total_steps = elastic.total_steps
        self._inner = InnerStates(plan.named(), replica.optimizers) if elastic.inner_state else None
        if self._inner is not None:
            shown["inner_optimizer"] = self._inner.describe()
        self.leasing = Leasing(workers)
        self._share = LinkShare(_own_link(elastic, place), place.name)
        try:
            self.transfer = _transfer(elastic, replica, self._share, place.name)
        except BaseException:
            self._leave_link()
            raise
        # The others wait no longer than this for a replica that cannot connect.
        connect_s = min(replica.timeout_s, elastic.suspect_after, 10.0)
        try:
            self.group = ElasticGroup(
                elastic,
                shown,
                workers,
                connect_s,
                self._share,
                place.name,
                uses_store=place.backend != "tcp",
                transfer=self.transfer,
                figures=replica.figures,
            )
        except BaseException:
            if self.transfer is not None:
                self.transfer.close()
            self._leave_link()
            raise
        # Errors of skipped rounds that no call has raised yet.
        self._unreported: list[NonFiniteError] = []
        # The optimizers whose schedules are checked at the first step; [] after it.
        self._optimizers = list(replica.optimizers)
        self._replica, self._workers = replica, workers
        self._loop = Loop()
        self._repetition = Repetition()
        # The flush that this replica's program has called, until it ends.
        self._own_flush: Callable[[], None] | None = None
        # The inner step at which a failed send was repeated last; -1 for none.
        self._again_at = -1
        # Part and number of the round whose failure ended the view.
        self._failed: list[tuple[SyncedPart, int]] = []
        # Whether the last step may have applied the last round of this view.
        self._may_be_boundary = False
        # Whether the step before has raised, as by a Ctrl-C; always False with several workers.
        self._is_late = False

    @property
    def is_done(self) -> bool:
        """Whether this replica has left the group, or has taken and shared all steps."""
        return self._loop.is_done

    def close(self, exchange: Exchange, *, is_finished: bool) -> None:
        """Tell the others that this replica has ended, and end its exchange; idempotent."""
        has_all_steps = is_finished and self._loop.phase is Phase.FINISHED
        self.group.close(is_finished=is_finished, has_all_steps=has_all_steps)
        exchange.close()
        self._leave_link()

    def _leave_link(self) -> None:
        """Give up this object's share of the link; call this after the exchange's end."""
        self._share.end()

    def enter(self, place: Place) -> Joined:
        """Enter the group, as a founder or a newcomer."""
        try:
            joined = self.group.enter(partial(self._join, place))
        except BaseException:
            self._forget_inner()
            self.group.close(is_finished=False)
            self._leave_link()
            raise
        if self._inner is not None:
            self._inner.keep()
        self._loop.take(self._repetition.event)
        return joined

    def begin(self, diloco: Trained) -> None:
        """Begin to train in the group; first take part in what all members repeat."""
        self._repeat(diloco)
        self._pass_boundary(diloco)
        self._end_after_last_step(diloco)

    def _forget_inner(self) -> None:
        if self._inner is not None:
            self._inner.forget()

    def _join(self, place: Place, change: GroupChange) -> Joined:
        """Take part, with a new exchange, in an attempt to begin a view with this replica."""
        self._repetition = Repetition()
        group = self.group
        group.first_step = -1
        # A failed earlier attempt may have given the optimizers another replica's inner state.
        self._forget_inner()
        there = replace(
            place,
            store=None,
            replica=group.replica,
            members=change.members,
            init="join",
            change=JoinChange(change, self.transfer),
            beside=NothingBeside() if self.transfer is None else self.transfer,
            link_share=self._share,
            inner=self._inner,
        )
        joined = join(self._replica, there)
        rounds, agreement = joined.rounds, joined.agreement
        try:
            view = change.record
            assert view is not None
            group.copied_bytes = agreement.copied_bytes
            if change.role == "broadcast":
                joined = self._begin_from_saved(joined, view)
            if self.transfer is not None and isinstance(rounds, StepTimed):
                rounds.log = self.transfer.log
            if change.role == "join":
                self._ask_what_broke_off(rounds, joined.inner_step, view)
        except BaseException:
            rounds.exchange.close()
            raise
        return joined

    def _begin_from_saved(self, joined: Joined, view: Record) -> Joined:
        """Give all members the checkpoint of the view's source, if that member has one."""
        exchange, agreement = joined.rounds.exchange, joined.agreement
        own = -1 if self.transfer is None else self.transfer.saved_step
        assert view.source is not None
        rank = view.numbers.index(view.source)
        first_step = self.group.first_step = gather_json(exchange, own)[rank]
        if first_step < 0:
            return joined
        if exchange.rank == rank and self.transfer is not None:
            self.transfer.load_saved()
        return joined._replace(inner_step=agreement.begin_from(first_step, rank))

    @property
    def has_group_state(self) -> bool:
        """Whether this view goes on from an earlier view, or from a member's checkpoint."""
        view = self.group.view
        is_begin = view is not None and view.source is not None
        return not is_begin or self.group.first_step >= 0

    def refuse_to_load(self) -> None:
        """Raise RuntimeError if this replica has the group's state, and must load no other."""
        if self.has_group_state:
            raise RuntimeError(
                "this replica has the state of a group that trains already: load a state only "
                "where a run begins (diloco.view is 1 and diloco.inner_step is 0)"
            )

    def leave_schedules(self) -> None:
        """Do not check learning rate schedules at the first step: a trainer has set them."""
        self._optimizers = []

    def take_step(self, diloco: Trained, *, is_skipped: bool) -> None:
        """Go to the next view if the present one has ended, then take an inner step."""
        if self._optimizers:
            optimizers, self._optimizers = self._optimizers, []
            warn_of_schedules(optimizers, diloco.inner_step)
        rounds = diloco._rounds
        # Make up for a last step that a Ctrl-C or an error has cut short: repeat a failed send, and
        # go to the next view if the last round was at a boundary.
        self._repeat(diloco)
        self._pass_boundary(diloco)
        if self.is_done:
            return
        if self.group.before_step(rounds, diloco.inner_step):
            self._go_on(diloco, SyncError("another member has stopped", stage="view"))
        if self.is_done:
            return
        step, plan = diloco.inner_step + 1, diloco._plan
        takes_part = plan.sent_at(step) or plan.written_at(step, diloco._saved_writes)
        # This depends on the step's number alone, so all workers of a replica agree, even if the
        # step fails on one.
        self._may_be_boundary = bool(takes_part) or self._is_late
        # If a Ctrl-C interrupts this step, the next one applies its round.
        self._is_late = self._workers is None
        self._unless_broken(diloco, partial(diloco._take_step, is_skipped=is_skipped))
        self._is_late = False
        # Now, before the inner optimizer steps again: a newcomer may copy the optimizer's state.
        self._pass_boundary(diloco)
        self._end_after_last_step(diloco)

    def _pass_boundary(self, diloco: Trained) -> None:
        """Go to the next view if the round just applied was the last of the present one."""
        # A send that is repeated in the next view may end that one too.
        while self._may_be_boundary and not self.is_done:
            if self.group.is_boundary(diloco._rounds):
                self._go_on(diloco, None)
            else:
                self._may_be_boundary = False

    def _unless_broken(self, diloco: Trained, call: Callable[[], None]) -> None:
        """Call a function that waits for the others; if the view ends in it, go to the next."""
        broken = self._broken_off(call)
        if broken is not None:
            self._go_on(diloco, *broken)

    def _broken_off(self, call: Callable[[], None]) -> tuple[SyncError, float] | None:
        """Call a function that waits for the others.

        Returns:
            If the view has ended in the call: the error, and the monotonic time of the call.
        """
        began = time.monotonic()
        try:
            with self.group.waiting():
                call()
        except SyncError as error:
            if not is_about_group(error):
                raise
            return error, began
        return None

    def _end_after_last_step(self, diloco: Trained) -> None:
        """If all steps are taken, flush, and end training."""
        if self.is_done or not self._has_all_steps(diloco):
            return
        self.flush(diloco, is_final=True)
        # If the flush failed, all go on from the step of the slowest replica, which may be earlier.
        if self._has_all_steps(diloco) and not self.is_done:
            self._loop.take(Event.ALL_SHARED)

    def _has_all_steps(self, diloco: Trained) -> bool:
        return self._total_steps is not None and diloco.inner_step >= self._total_steps

    def flush(self, diloco: Trained, *, is_final: bool) -> None:
        """Flush; if the view ends before all is shared, repeat the flush in the next view."""
        self._own_flush = partial(diloco._flush, is_final=is_final)
        # If a Ctrl-C has interrupted the repetition of a flush, this call is that repetition.
        is_repetition = self._loop.phase is Phase.FLUSHING_AGAIN
        try:
            self._repeat(diloco)
            if not is_repetition and not self.is_done:
                self._loop.take(Event.FLUSH_CALLED)
                self._unless_broken(diloco, self._own_flush)
        finally:
            self._own_flush = None
            self._loop.leave_flush()

    def _go_on(self, diloco: Trained, error: SyncError | None, began: float | None = None) -> None:
        """Go to the next view, and repeat there what has failed, if necessary in one more view."""
        self._to_next_view(diloco, error, time.monotonic() if began is None else began)
        self._repeat(diloco)

    def _to_next_view(self, diloco: Trained, error: SyncError | None, began: float) -> None:
        if error is not None and error.round >= 0:
            parts = [part for part in diloco._rounds.parts if part.index == error.fragment]
            self._failed = [(part, error.round) for part in parts]
        self._loop.take(Event.VIEW_ENDED)
        try:
            change, seal = partial(self._change, diloco), partial(self._seal, diloco)
            self.group.go_on(change, seal, error, began)
        except NonFiniteError:
            # The error is of a round that was skipped earlier: the view has begun.
            self._loop.take(Event.VIEW_BEGUN)
            raise
        self._loop.take(Event.ASKED_TO_LEAVE if self.group.is_done else self._repetition.event)

    def _repeat(self, diloco: Trained) -> None:
        """Repeat, together with all members, the send or flush that failed as the last view ended.

        Raises:
            SyncError: If this fails again and again, which deaths of members do not explain.
        """
        num_broken = 0
        while self._loop.repeats:
            try:
                broken = self._broken_off(partial(self._repeat_once, diloco))
            except BaseException:
                if not self._loop.repeats:
                    # The repetition has failed for good: nothing of it counts as shared.
                    self._repetition = Repetition()
                raise
            if broken is None:
                break
            num_broken += 1
            if num_broken > _MOST_REPEATS:
                self._repetition = Repetition()
                self._loop.take(Event.ENDED)
                raise broken[0]
            self._to_next_view(diloco, *broken)
        # If a member's final flush had failed, all members have completed it here.
        has_flushed = self._loop.phase is Phase.TRAINING and self._repetition.is_of_flush
        if has_flushed and self._has_all_steps(diloco):
            self._loop.take(Event.ALL_SHARED)
        self._repetition = Repetition()

    def _repeat_once(self, diloco: Trained) -> None:
        is_over, is_flush = True, self._loop.phase is Phase.FLUSHING_AGAIN
        try:
            if is_flush:
                # A member that was not in a flush takes part, and ends training if the others do.
                (self._own_flush or partial(diloco._flush, is_final=None))()
            else:
                self._send_again(diloco)
        except KeyboardInterrupt:
            # After a Ctrl-C the next call repeats a flush, or a send that had not begun.
            is_over = not is_flush and diloco._rounds.uninterruptible.has_begun
            raise
        except SyncError as error:
            is_over = not is_about_group(error)
            raise
        finally:
            if is_over:
                self._loop.take(Event.ENDED)

    def _send_again(self, diloco: Trained) -> None:
        """Send again the parts whose rounds failed as the last view ended, without a new step."""
        diloco._rounds.uninterruptible.has_begun = False
        before, self._again_at = self._again_at, diloco.inner_step
        self._may_be_boundary = True
        try:
            diloco._take_step(again=self._repetition.parts)
        except KeyboardInterrupt:
            if not diloco._rounds.uninterruptible.has_begun:
                self._again_at = before
            raise

    def _seal(self, diloco: Trained, is_patient: bool) -> tuple[Positions, int, bool]:
        """End the rounds of the present view for good; see ``follower.Seal``."""
        exchange, rounds = diloco.exchange, diloco._rounds
        unsettled = self.group.unsettled
        if unsettled is not None:
            self._settle(diloco, unsettled)
        while is_patient and not (exchange.is_dead or exchange.is_idle):
            time.sleep(_POLL_S)
        is_whole = not exchange.is_dead
        seal(exchange)
        last_rounds = rounds.last_rounds(diloco.inner_step, self._unreported)
        held = [one for each in exchange.all_buffers for one in each.standings().values()]
        is_whole = is_whole and all(one.state != "voted" for one in held)
        return positions_of(exchange, last_rounds), diloco.inner_step, is_whole

    def _settle(self, diloco: Trained, agreed: Agreed) -> None:
        """Apply the rounds of the last view that count, and give up the others."""
        rounds, exchange = diloco._rounds, diloco.exchange
        before = diloco.inner_step
        sent = [(part, flight.number) for part in rounds.parts for flight in part.in_flight]
        sent += self._failed
        with rounds.uninterruptible():
            fragments = sorted(part.index for part in rounds.parts)
            repairs = exchange.settle(agreed, fragments)
            rounds.settle(repairs, before, agreed.epoch.agreed_step)
            diloco.inner_step = agreed.epoch.agreed_step
            # All members go on from the inner step of the slowest.
            self.leasing.set_back(before - diloco.inner_step)
            self.group.has_settled()
        # All rounds that count are applied by now, so the later ones are discarded.
        self.group.meter.discarded(len({(part.index, n) for part, n in sent if n >= part.round}))
        self._failed = []

    def _change(self, diloco: Trained, change: GroupChange) -> None:
        self._repetition = Repetition()
        rounds, exchange = diloco._rounds, diloco.exchange
        rounds.is_change_due = rounds.announces_change = self._may_be_boundary = False
        diloco._watch.forget_writes()
        with rounds.all_workers(rounds.parts):
            diloco._refuse_changes(rounds.parts)
            if not exchange.is_dead:
                self._seal(diloco, False)
        agreed, groups = exchange.meet(change)
        view = change.record
        assert view is not None
        if change.role != "change":
            raise RuntimeError(
                f"view {view.number} begins anew, and this replica has the state of an earlier "
                "view: start this replica again"
            )
        with diloco._recorder.deferred_callbacks(), rounds.all_workers(rounds.parts):
            self._settle(diloco, agreed)
            exchange.begin(agreed, groups)
            del groups
            diloco.inner_step = diloco._agreement.renew(diloco.inner_step)
        self.group.copied_bytes = diloco._agreement.copied_bytes
        self._ask_what_broke_off(rounds, diloco.inner_step, view)
        if self._unreported:
            raise self._unreported.pop()

    def _ask_what_broke_off(self, rounds: RoundRunner, step: int, view: Record) -> None:
        """Agree whether a flush, or a send at this step, is to be repeated; a collective call.

        The same call agrees on the leases, which saves a round trip. A member whose flush had ended
        before the view did takes part in the flush again. A send that was repeated once, and failed
        again, is left to the next send of the schedule.
        """
        unsent = [] if step == self._again_at else _unsent_at(rounds, self._replica.plan, step)
        is_open = self._own_flush is not None and not rounds.has_ended()
        has_unsent = is_open or rounds.has_unsent(step)
        own = Report(self._loop.before in FLUSHES, has_unsent, unsent)
        told = self.leasing.change(rounds.exchange, rounds.parts, view.number, own)
        reports = [Report(*report) for report in told]
        found = Repetition.agreed(reports, has_newcomers=bool(view.joined))
        if self._workers is not None:
            found = Repetition.of_workers(self._workers.gather(found))
        self._repetition = found


def _unsent_at(rounds: RoundRunner, plan: Plan, inner_step: int) -> list[int]:
    """Return the indices of parts that were due after this step, but whose rounds are lost.

    Rounds that were voted down because of bad values are left out, as they would be again.
    """
    if not isinstance(rounds, StepTimed):
        # ``SendTimed`` adds the values of lost rounds to the next send by itself.
        return []
    return [
        part.index
        for part in plan.sent_at(inner_step)
        if part.last_sent < inner_step
        and not part.in_flight
        and rounds.voted_down.get(part.index) != inner_step
    ]


class JoinChange:
    """A change by which a replica without outer state enters; see ``group.ElasticChange``.

    If all members begin with one member's state, a copy of an earlier view's state is dropped.
    """

    def __init__(self, change: GroupChange, transfer: StateTransfer | None) -> None:
        self._change, self._transfer = change, transfer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._change, name)

    def entered(self, failure: SyncError | None) -> Agreed:
        """Wait until the members have agreed; see ``Change``."""
        agreed = self._change.entered(failure)
        if self._change.role == "change":
            number = agreed.epoch.number
            raise RuntimeError(f"view {number} asks for a state that this replica lacks")
        if self._change.role == "broadcast" and self._transfer is not None:
            self._transfer.forget()
        return agreed


class NothingBeside:
    """A ``CopyBeside`` for newcomers that copy nothing while the members train."""

    def catch_up(self, targets: Mapping[int, int]) -> None:
        """Do nothing: the newcomer gets all of the state while the members wait."""


def _transfer(
    elastic: Elastic, replica: Replica, share: LinkShare, name: str
) -> StateTransfer | None:
    """Return the object that copies the state beside training; None if that is not possible.

    Then newcomers copy it at a boundary, while all members wait.
    """
    plan, settings = replica.plan, replica.settings
    is_able = elastic.round_log_bytes != 0 and replica.workers is None
    is_able = is_able and settings.overlap.is_shared and not settings.overlap.rounds
    if is_able and can_replay(plan.parts):
        return StateTransfer(elastic, plan.parameter_parts(), plan.saved_layout, share, name)
    if elastic.checkpoint is not None:
        raise ValueError(
            "a checkpoint= of Elastic goes with Blocking and Streaming, an outer optimizer of this "
            "package, replicas of one worker, and no offload: leave it out, and the state is "
            "copied from the group"
        )
    return None


def _own_link(elastic: Elastic, place: Place) -> OwnLink:
    """Return the link of this process; over gloo, one that carries only the agreement."""
    check_link(
        place.backend, place.listen, place.advertise, place.link_keys, place.relay, place.proxy
    )
    if place.backend != "tcp":
        return OwnLink(name_of_place(elastic.interface(), 0), None, None)
    keys, proxy = link_keys(place.link_keys), proxy_of(place.proxy)
    where = place.listen, place.advertise, keys, place.relay, proxy
    return OwnLink.of_exchange(place.name, *where)


def _alike(settings: Settings) -> dict[str, Any]:
    """Return the settings that must be equal on all members; the outer lr may differ at first."""
    shared = settings.shared()
    return {**shared, "outer": {k: v for k, v in shared["outer"].items() if k != "lr"}}
