"""A fixed group: its members change only when their callers demand so by ``change_group``.

The driver of the agreement runs at worker 0 of each replica; its table is on the replicas' store.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ...base import extension
from ...base.background import batch_threads
from ...base.checks import logger_of
from ...base.errors import LeftBehind, NonFiniteError, ReplicaMismatch, SyncError, difference, named
from ...group import driver as group
from ...group import state as st
from ...group.driver import Driver, Ended
from ...group.plans import Roster
from ...group.reach import largest_group
from ...group.records import Key, Record
from ...group.signs import Signs
from ...group.state import Settings, Stage, State
from ...group.table import Seen, Table
from ..waits import ANOTHER_STORE, describe_store
from .follower import Attempt, Chosen, Follower, Seal, T, Void, Workers, attempt_text, way_of
from .member import Epoch, Member
from .own_link import LinkShare
from .stores import Names, StoreTable
from .verdict import Verdict, judge, with_told_cuts, words_of

logger = logger_of(__name__)

# Seconds between two polls of the driver.
PERIOD_S = 0.25
# A change fails if the store is silent for so many seconds, or for the timeout if that is shorter;
# stores answer in milliseconds.
STORE_LIMIT_S = 10.0
# Callers that demand different members are an error only after so many seconds: callers that try
# again with other members do so one after the other.
_MISMATCH_PATIENCE_S = 3.0
# Seconds for which a replica that is about to raise still tells the others its demand, or waits to
# hear whether the others went on without this replica.
_LINGER_S = 1.0
# At most so many seconds count between two polls: in longer ones this process was suspended.
_LONGEST_LOOK_S = 2.0
# Seconds for which the connection to the store is broken before that is logged.
_LOST_S = 1.0
# Most seconds beyond ``report_patience`` to wait for other members that also fail to connect, and
# may know why.
_CONNECT_S = 12.0
# Cut pairs are reported once they have stayed the same for so many seconds: members may find more.
_CUTS_S = 2.0
# For so many seconds after a failure to connect, only dead processes are called missing: a
# suspected one may have come just now.
_BEATS_S = 1.0
# Advice in the error of a replica that was left behind.
WAY_BACK = 'may come back as a newcomer: close this DiLoCo, then make a new one with init="join"'
_VERSION = "diloco_comm"
Wait = Callable[[], tuple[float, tuple[int, ...]]]


class FixedDriver(group.Driver):
    """Carry out the decisions of the core (``group.agreement``) for a member of a fixed group.

    Args:
        arguments, options: As for ``group.driver.Driver``.
        is_busy: Returns whether rounds of the training thread are under way.
        wait: See ``Member.wait``.
        suspect_after: Seconds of silence after which a member is suspected.
    """

    def __init__(
        self,
        *arguments: Any,
        is_busy: Callable[[], bool],
        wait: Wait,
        suspect_after: float,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._suspect_after, self._wait = suspect_after, wait
        self._is_busy, self._busy_since, self._logged_epoch = is_busy, 0.0, -1
        # Seconds for which this process has run without the time in which it was suspended; and
        # their number when the table has answered last.
        self._ran_s = self._answered_s = 0.0
        self._demanded_at = time.monotonic()
        # The store's address, for the log.
        self.place = ""
        # Why the rounds of the present record were broken off.
        self.cause = ""

    @property
    def table_silence(self) -> float:
        """Seconds since the last answer of the table, or since ``move`` to it."""
        return self._ran_s - self._answered_s

    @property
    def fence(self) -> Ended | None:
        """The end of this process's part in the group; None while it takes part."""
        return self._ended

    def wait(self) -> tuple[float, tuple[int, ...]]:
        state, since = self.state, self._demanded_at
        if state.demand is not None:
            missing = set(state.demand) - _living(state) - {state.key.number}
            return time.monotonic() - since, tuple(sorted(missing))
        (waited, late), gone = self._wait(), state.life.suspected | state.life.dead
        silent = tuple([number for number, nonce in self._base() if nonce in gone])
        return waited, (silent or late) if waited else ()

    def again(self, members: tuple[int, ...], *, may_found: bool) -> None:
        """Demand a group with these members, for this caller; () for all that live."""
        self._demanded_at = time.monotonic()
        self.tell(st.Demanded(members, may_found))

    def move(self, table: Table) -> None:
        self._answered_s = self._ran_s
        super().move(table)

    def _see(self, seen: Seen) -> None:
        self._answered_s = self._ran_s
        super()._see(seen)

    def _poll(self) -> None:
        # Time in which this process was suspended hardly counts: the table was not asked then.
        self._ran_s += min(time.monotonic() - self._last_poll, _LONGEST_LOOK_S)
        super()._poll()
        self._note_cuts()

    def _note_cuts(self) -> None:
        """Publish which members this process cannot reach, while the group changes.

        The training thread cannot do this: it may still be trying to connect to them.
        """
        state, lost = self.state, self.state.life.dead | self.state.life.suspected
        is_changing = state.demand is not None or state.stage in (Stage.SEALING, Stage.SEALED)
        if is_changing and state.record is not None:
            away = self.signs.unreachable(state.record.members)
            there = [key.nonce for key in away if self.signs.beats(key)]
            if cut := tuple([nonce for nonce in there if nonce not in lost]):
                self._step(st.Broke(state.number, cut))

    def _break_off_silent_round(self) -> None:
        """Let rounds under way fail if a member has ended, or is not heard or reached any more."""
        self._tell_of_lost_store()
        if not self._is_busy():
            self._busy_since = 0.0
            return
        now, life = time.monotonic(), self.state.life
        self._busy_since = self._busy_since or now
        members = {key.nonce for key in self._base()}
        lost = (life.suspected | life.dead) & members - self.signs.left().keys()
        cut = [key for key in self.signs.unreachable(self._base()) if key.nonce not in lost]
        is_inside = self.state.stage in (Stage.TRAINING, Stage.SEALING)
        if (lost or cut) and is_inside and now - self._busy_since > 2 * self._period_s:
            # A member that is only cut off from this process still beats in the table; a hanging
            # member does not.
            away = {key.nonce for key in cut if self.signs.beats(key)}
            quiet = lost - life.dead | {key.nonce for key in cut} - away
            silent = [key.number for key in self._base() if key.nonce in quiet]
            limit = f"{self._suspect_after:g} s"
            self.cause = f"nothing was heard of {named(silent)} for {limit}" if silent else ""
            if away and not (silent or lost):
                numbers = [key.number for key in cut]
                self.cause = f"{named(numbers)} could not be reached for {limit}"
            self._break_off()

    def _tell_of_lost_store(self) -> None:
        """Log once in an epoch that the connection to its store has broken, if training goes on."""
        is_lost = self.loss is not None and self.loss.is_lost
        if not is_lost or self.table_silence < _LOST_S or self._logged_epoch == self.state.number:
            return
        self._logged_epoch = self.state.number
        logger.warning(
            "this replica's connection to the store at %s has broken, and the store is not asked "
            "again: rounds go on without a store, but nobody can come or go until all replicas "
            "call change_group(members, store=...) with another store",
            self.place,
        )

    @property
    def _waited(self) -> float:
        since = self._busy_since
        return time.monotonic() - since if since else 0.0

    def _note_loss(self, error: Any) -> None:
        """Note that the store does not answer; ``change_group`` raises if that matters."""
        self.loss = error
        self._say_whether_cut_off()

    def _difference_of_links(self, other: Key) -> str:
        way, values = self.signs.way_to(other.nonce), dict[str, list[int]]()
        own = self.state.key.number, self.signs.way.key
        for number, key in (own, (other.number, way and way.key)):
            values.setdefault(json.dumps("given" if key else "none"), []).append(number)
        return difference("Link(keys=)", values) if len(values) > 1 else ""

    def _words_of_difference(self, other: int, shown: str) -> str:
        own, theirs = _texts_of(self._shown), dict[str, str]()
        # A peer may send a text that is no JSON object.
        with suppress(ValueError, TypeError, AttributeError, RecursionError):
            theirs = _texts_of(shown or "{}")
        number = self.state.key.number
        spoken = own[extension.HANDSHAKE_NAME], theirs.get(extension.HANDSHAKE_NAME)
        for name in (_VERSION, *own, *theirs):
            values: dict[str, list[int]] = {}
            for replica, each in sorted([(number, own), (other, theirs)]):
                values.setdefault(each.get(name, "null"), []).append(replica)
            if len(values) > 1 and (name != _VERSION or spoken[0] != spoken[1]):
                cure = ": install the same version on all replicas" if name == _VERSION else ""
                return difference(name, values) + cure
        return f"replicas {sorted([number, other])} have other settings"


class FixedGroup(Follower):
    """Takes one worker of a replica through the groups that its callers demand.

    Args:
        member: The exchange.
        share: A share of the link that carries the driver's messages.
        workers: The workers of this replica; None if this one is alone.
        store: The store of the exchange; the table is on the store of worker 0.
        board: See ``Exchange``.
        is_busy: Returns whether rounds of the exchange are under way; from any thread.
        wait: See ``Member.wait``.
        is_dead: Returns whether the epoch of the exchange has failed; from any thread.
        figures: See ``Driver``.
    """

    def __init__(
        self,
        member: Member,
        share: LinkShare,
        workers: Workers | None,
        store: dist.Store,
        board: dist.Store | None,
        is_busy: Callable[[], bool],
        wait: Wait,
        is_dead: Callable[[], bool],
        *,
        figures: Callable[[Driver], bytes] | None,
    ) -> None:
        self._line_name = member.line_name
        name = f"fixed/{self._line_name}"
        super().__init__(workers, share, name, uses_store=member.tcp is None)
        self.replica, self._store = member.replica, store
        self._joins, self._shown = member.joins, _shown(member)
        self._timeout, self._join_timeout = member.timeout, member.join_timeout
        self._suspect_after, self._patience = member.suspect_after, member.report_patience
        self._board, self._name_of_object = board, member.name
        self._names: Names | None = None
        self._is_busy, self._wait = is_busy, wait
        self._is_dead, self._figures = is_dead, figures
        self._demand: tuple[int, ...] = ()
        self._conflict_since = self._runs_since = 0.0
        # The pairs of members that cannot reach each other, when these were found, and a sentence
        # if the reason is a refused key.
        self._cuts: list[tuple[int, int]] = []
        self._cuts_since, self._refusal = 0.0, ""
        self._attendance = Attendance(())
        # For each other process with this replica's number: the counter in the first of its beats
        # that this process has read.
        self._first_counters: dict[bytes, int] = {}
        # The peers of this worker in the present record: process, and nonce of its link.
        self._peers: tuple[tuple[Key, str], ...] = ()
        self._verdict: Verdict | None = None
        self._driver: FixedDriver | None = None

    @property
    def driver(self) -> FixedDriver | None:
        """The driver of the agreement; None at workers but 0, and before the first ``change``."""
        return self._driver

    # ------------------------------------------------------------------------------ changing

    def change(self, members: Sequence[int] | None, attempt: Attempt[T], seal: Seal) -> T:
        """Form a group with these members, as the caller demands; return ``attempt``'s result.

        Args:
            members: Numbers of the replicas; None for all that live.
            attempt: Takes part in an attempt; called until one succeeds.
            seal: Ends the rounds of the present group, see ``Seal``.

        Raises:
            ReplicaMismatch: If a member has other settings, or its caller demands other members.
            LeftBehind: If the others went on without this replica.
            SyncError: If a member did not come in time or cannot be reached, or the store does not
                answer.
        """
        began = time.monotonic()
        self._demand = tuple(members or ())
        self._conflict_since, self._cuts = 0.0, []
        is_first = self.view is None and not self._joins
        unheard = self._timeout if is_first else min(self._join_timeout, self._timeout)
        silence = min(self._suspect_after, unheard)
        self._attendance = Attendance(self._demand, self._timeout, unheard, silence, self.replica)
        if is_first and self._board is not None:
            self._names = Names(self._board, self.replica, self._demand, self._name_of_object)
        if self._speaks and self._driver is None:
            self._driver = self._open()
            self._driver.again(self._demand, may_found=not self._joins)
            with batch_threads():
                self._driver.start()
        elif self._driver is not None:
            self._driver.again(self._demand, may_found=not self._joins)
        try:
            return self._attempt_until_done(attempt, seal, began)[0]
        except BaseException as error:
            self._tell(st.GivenUp())
            if isinstance(error, SyncError):
                self._find_missing(error)
                error.seconds = time.monotonic() - began
            raise

    def _open(self) -> FixedDriver:
        link, way = self._share.link.link, way_of(self._share)
        digest = hashlib.blake2b(_alike(self._shown).encode(), digest_size=16).digest()
        polls = max(2, round(self._suspect_after / PERIOD_S))
        settings = Settings(self._name_of_object, digest, suspect_after=polls, is_fixed=True)
        nonce = uuid.uuid4().bytes
        limits = self._suspect_after, self._timeout
        driver = FixedDriver(
            self._table_at(self._store),
            State(settings, Key(self.replica, nonce)),
            Signs(nonce, link, way, f"{self._name}/members", *limits),
            period_s=min(PERIOD_S, self._suspect_after / 4),
            shown=self._shown,
            is_busy=self._is_busy,
            wait=self._wait,
            suspect_after=self._suspect_after,
        )
        driver.ways, driver.store = self._ways, own_place()
        driver.place, driver.figures = describe_store(self._store), self._figures
        return driver

    def _table_at(self, store: dist.Store) -> StoreTable:
        return StoreTable(store, self._line_name)

    def left_out(self) -> LeftBehind | None:
        """Return the error to raise if the others went on without this replica, else None.

        A collective call of the replica's workers.
        """
        driver, until = self._driver, time.monotonic() + _LINGER_S
        while driver is not None and driver.fence is None and time.monotonic() < until:
            driver.look()
            time.sleep(PERIOD_S)
        fence = self._from_worker_0(None if driver is None else driver.fence)
        is_fenced = fence is not None and fence.kind == "fenced"
        return self._left_behind(fence) if is_fenced else None

    def move(self, store: dist.Store) -> None:
        """Use another store, with a table of its own, from now on."""
        self._store = store
        if self._driver is not None:
            self._driver.move(self._table_at(store))
            self._driver.place = describe_store(store)

    def close(self, inner_step: int, patience_s: float) -> None:
        """Tell the others that this replica has left, at this inner step; idempotent."""
        if self._driver is not None:
            self._driver.inner_step = max(inner_step, -1)
            self._driver.close(patience_s)
        if self._mates is not None:
            self._mates.close()

    def _find_missing(self, error: SyncError) -> None:
        """Add the missing members to the error of a failed attempt to connect, if they are found.

        Waits for a while, unless the error names them already.
        """
        driver = self._driver
        if driver is None or error.stage != "connect" or error.cuts or error.missing:
            return
        # Another member may fail to connect later, and may know why.
        more = _CONNECT_S if self._uses_store else min(self._suspect_after, _CONNECT_S)
        began = time.monotonic()
        wanted = set(self._demand) or _living(driver.state)
        while time.monotonic() - began < self._patience + more:
            apart = self._apart(driver)
            if apart is not None:
                error.args = (f"{error}; {words_of(apart.cuts)}",)
                error.missing, error.survivors = apart.missing, apart.survivors
                error.cuts = apart.cuts
                return
            life = driver.state.life
            is_early = time.monotonic() - began < _BEATS_S
            gone = life.dead if is_early else life.dead | life.suspected
            places = [place.key for place in driver.state.places]
            missing = {key.number for key in places if key.nonce in gone} & wanted
            missing -= _living(driver.state)
            if missing and not self._cuts:
                base = driver.state.record
                stay = wanted & set(wanted if base is None else base.numbers)
                error.missing = tuple(sorted(missing))
                error.survivors = tuple(sorted(stay - missing))
                return
            time.sleep(PERIOD_S / 4)
        error.survivors = tuple(sorted(wanted & _living(driver.state)))

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which an error of one worker of this replica is raised on all."""
        return nullcontext() if self._workers is None else self._workers.all_workers()

    def has_state(self) -> None:
        """Tell the agreement that this replica now holds the outer state of its group."""
        if self.view is not None:
            self._tell(st.Started(self.view.number))

    # --------------------------------------------------------------------------------- orders

    def _wait_for_order(self, driver: Driver) -> Any:
        assert isinstance(driver, FixedDriver)
        order = driver.next_order(self._attendance.look_s)
        if not isinstance(order, st.Fail):
            return order
        now = time.monotonic()
        self._conflict_since = self._conflict_since or now
        is_over = order.other is not None or now - self._conflict_since >= _MISMATCH_PATIENCE_S
        # The others may raise later: demand again for a while, so that they hear this demand, too.
        for _ in range(round(_LINGER_S / PERIOD_S) if is_over else 1):
            time.sleep(PERIOD_S)
            driver.again(self._demand, may_found=not self._joins)
        return Ended("mismatch", order.reason) if is_over else None

    def _end_of_wait(self, driver: Driver, began: float) -> Ended | None:
        assert isinstance(driver, FixedDriver)
        if self._names is not None:
            try:
                self._names.look()
            except ReplicaMismatch as error:
                return Ended("mismatch", str(error))
        lost = driver.loss is not None and driver.loss.is_lost
        if lost or driver.table_silence > min(STORE_LIMIT_S, self._timeout):
            return self._store_is_away(driver)
        if driver.state.failure:
            return Ended(
                "connect", f"{self._subject()} cannot form a group: {driver.state.failure}"
            )
        ends = self._is_taken(driver) or self._runs_already(driver)
        ends = ends or self._apart(driver)
        ends = ends or self._none_trains(driver, time.monotonic() - began)
        if ends is not None:
            return ends
        late = self._attendance.end(driver, self._subject())
        if late is None:
            return None
        why = self._key_refused(driver) or (self._training_has_ended(driver) if self._joins else "")
        text = f"{self._subject()} cannot form a group: {why}" if why else late.reason
        return replace(late, reason=text)

    def _training_has_ended(self, driver: FixedDriver) -> str:
        """Return the text of an error if all members of the last group have ended; else ""."""
        record = driver.state.in_table
        gone = {key for key, beat in (driver.beats or {}).items() if beat.is_gone}
        if record is None or not {*record.members} <= gone:
            return ""
        return (
            f"the training of replicas {list(record.numbers)} has ended, and no process has its "
            "state: start all replicas without joining, on another store, from a checkpoint"
        )

    def _store_is_away(self, driver: FixedDriver) -> Ended:
        loss = driver.loss
        why = "no answer in time" if loss is None else str(loss)
        cure = ANOTHER_STORE
        if loss is None or not loss.is_lost:
            cure = f"call again; if the store stays silent, {ANOTHER_STORE}"
        text = f"the store did not answer while {self._subject()} were to form a group: {why}"
        return Ended("store", f"{text}; {cure}")

    def _subject(self) -> str:
        members = self._demand
        if not members and self._driver is not None:
            members = tuple(sorted(_living(self._driver.state)))
        return f"replicas {list(members)}"

    def _is_taken(self, driver: FixedDriver) -> Ended | None:
        """Return the end of this process if another living process has its number; else None."""
        if self.view is not None or driver.beats is None:
            return None
        own, counters = driver.state.key, driver.signs.counters()
        for beat in driver.beats.values():
            number, nonce = beat.key
            if number != own.number or nonce == own.nonce or beat.is_gone:
                continue
            place = next((one for one in driver.state.places if one.key == beat.key), None)
            gone = driver.state.life.dead | driver.state.life.suspected
            if place is None or not place.is_fresh or nonce in gone or nonce not in counters:
                continue
            first = self._first_counters.setdefault(nonce, counters[nonce])
            if counters[nonce] < first + 2:
                # One beat may be the last of a process that has died: wait for two more.
                continue
            is_older = beat.place.entered or counters[nonce] > driver._counter
            if is_older or (counters[nonce] == driver._counter and nonce < own.nonce):
                return Ended("taken", _number_is_taken(number, beat.store, beat.place.entered))
        return None

    def _runs_already(self, driver: FixedDriver) -> Ended | None:
        """Return the end of a founder's wait if its group trains already; else None."""
        why, now = driver.waiting_for, time.monotonic()
        if self.view is not None or self._joins or "runs already" not in why:
            self._runs_since = 0.0
            return None
        self._runs_since = self._runs_since or now
        if now - self._runs_since < min(self._suspect_after, self._timeout / 2):
            return None
        return Ended("runs", re.sub(r"^until (.*) has ended, which (runs already)", r"\1 \2", why))

    def _apart(self, driver: FixedDriver) -> Ended | None:
        """Return the end of the wait if living members cannot reach each other; else None."""
        roster = Roster(driver.state)
        living = [key for key in roster.base if roster.lives(key)]
        known = {key.number: key for key in (*roster.newcomers, *living)}
        keys = [known[number] for number in self._demand if number in known]
        names = {key.nonce: key.number for key in keys}
        told = [(names[a], names[b]) for a, b in roster.cuts() if a in names and b in names]
        found = {(min(pair), max(pair)) for pair in told}
        # A member that has left since may have raised this same error: keep the pairs with it.
        left = {key.number for key, beat in (driver.beats or {}).items() if beat.is_gone}
        left &= set(self._demand) - known.keys()
        pairs = [pair for pair in self._cuts if left & set(pair)]
        kept = {pair for pair in pairs if set(pair) <= left | known.keys()}
        now, cuts = time.monotonic(), sorted(found | kept)
        if cuts != self._cuts:
            self._cuts, self._cuts_since = cuts, now
            self._refusal = self._key_refused(driver)
        if not kept and (not cuts or now - self._cuts_since < _CUTS_S):
            return None
        members = sorted({*names.values(), *(left if kept else ())})
        whole = largest_group(members, cuts)
        can = f"{words_of(cuts)}; replicas {whole} can"
        text = f"{self._subject()} cannot form a group: {self._refusal or can}"
        missing = tuple([number for number in self._demand if number not in whole])
        return Ended("connect", text, missing, tuple(whole), tuple(cuts))

    def _key_refused(self, driver: FixedDriver) -> str:
        """Return a sentence if this replica does not let in the keys of members; else ""."""
        gone, keys = driver.state.life.dead, dict[int, str]()
        for key in driver.beats or {}:
            is_there = driver.signs.is_fresh(key.nonce) and key.nonce not in gone
            if key.number in self._demand and is_there and (ways := driver.ways_of(key)):
                keys[key.number] = ways[0].key
        return self._share.link.refusal_of(self.replica, list(keys), list(keys.values()))[0]

    def _none_trains(self, driver: FixedDriver, seconds: float) -> Ended | None:
        """Return the end of a newcomer's wait if all members have come to join; else None."""
        state = driver.state
        limit = min(self._join_timeout, self._timeout) if len(self._demand) > 1 else 0.0
        if not self._joins or self.view is not None or state.is_blind or seconds < limit:
            return None
        found = {key.number for key in Roster(state).newcomers}
        if state.recorded or not set(self._demand) <= found:
            return None
        return Ended("runs", none_trains(self._demand))

    def _awaited(self, waiting: str) -> str:
        after = "" if self.view is None else f" after epoch {self.view.number}"
        place = describe_store(self._store)
        where = f"at the rendezvous of {self._subject()}{after} on {place}"
        who = "" if self._driver is None else self._attendance.describe(self._driver)
        return f"{who or waiting} {where}" if who or waiting else ""

    def _error_of(self, end: Ended) -> SyncError:
        if end.kind in ("mismatch", "refused"):
            return ReplicaMismatch(end.reason, stage="rendezvous")
        if end.kind == "fenced":
            return self._left_behind(end)
        stage = "connect" if end.kind == "connect" else "rendezvous"
        missing, survivors = end.missing, end.survivors
        return SyncError(
            end.reason, stage=stage, missing=missing, survivors=survivors, cuts=end.cuts
        )

    def _left_behind(self, end: Ended) -> LeftBehind:
        record = None if self._driver is None else self._driver.state.in_table
        survivors = () if record is None else record.numbers
        before = () if self.view is None else self.view.numbers
        return LeftBehind(
            f"{end.reason}, which {WAY_BACK}",
            stage="rendezvous",
            missing=sorted({self.replica, *before} - set(survivors)),
            survivors=survivors,
            went_on_in=None if record is None else record.number,
        )

    def _has_failed(self, error: Void) -> None:
        if error.stage == "connect":
            # The replica that failed first knows the reason; the others only miss a connection.
            agreed = "" if self._driver is None or error.cuts else self._driver.state.failure
            raise SyncError(agreed or str(error), stage="connect", cuts=error.cuts)

    def _meeting_place(self, chosen: Chosen) -> dist.Store:
        return dist.PrefixStore(f"groups/{attempt_text(chosen.name)}", self._store)

    def _epoch_of(self, record: Record) -> Epoch:
        # Founders copy no outer state, as there is none yet: name none of them as joined.
        epoch = super()._epoch_of(record)
        if record.source is None or self._joins:
            return epoch
        return Epoch(epoch.number, epoch.members, agreed_step=epoch.agreed_step)

    def entered(self, chosen: Chosen) -> None:
        """Note the peers of this worker in the record of an attempt on which all have agreed."""
        nonces = [ways[self._rank].nonce if self._rank < len(ways) else "" for ways in chosen.ways]
        self._peers = tuple(zip(chosen.members, nonces, strict=True))
        self._verdict = None
        if self._driver is not None:
            self._driver.cause = ""
        elif not self._speaks:
            threading.Thread(target=self._reach, args=(chosen,), daemon=True).start()

    def _reach(self, chosen: Chosen) -> None:
        """Connect this worker's link to its peers; on a thread, as name servers may be slow."""
        ways = [ways[self._rank].words for ways in chosen.ways if self._rank < len(ways)]
        peers = [words for words in ways if words[0] != self._share.link.nonce]
        with suppress(RuntimeError):  # The link was closed.
            self._share.link.link.reach(f"{self._name}/worker {self._rank}", peers)

    def _begun(self, record: Record, before: Record | None, began: float) -> None:
        self._names = None
        if record.source is not None and not self._joins:
            self._tell(st.Started(record.number))

    # ---------------------------------------------------------------------------------- errors

    def blame(self, error: SyncError) -> SyncError:
        """Return the error of a failed round with the missing and the living replicas.

        The verdict is found for the first error of an epoch; later errors repeat it.
        """
        is_own = isinstance(error, NonFiniteError | ReplicaMismatch | LeftBehind)
        if is_own or not self._peers or not self._is_dead():
            return error
        if self._verdict is None:
            driver = self._driver
            who = self._peers, self.replica, self._share.link
            found = judge(*who, driver, error, self._patience)
            found = replace(found, cause="" if driver is None else driver.cause)
            if driver is not None and self.view is not None:
                driver.signs.give_up(found.unheard)
                self._broke(self.view, found.told(error))
                if found.cuts:
                    found = with_told_cuts(found, self._peers, driver)
            self._verdict = found
        fence = None if self._driver is None else self._driver.fence
        if fence is not None and fence.kind == "fenced":
            left = self._left_behind(fence)
            left.fragment, left.round, left.seconds = error.fragment, error.round, error.seconds
            left.cuts = self._verdict.cuts
            return left
        return self._verdict.told(error)

    @property
    def nobody_is_missing(self) -> bool:
        """Whether all members of the present record live, as far as this replica knows."""
        driver = self._driver
        if driver is None or driver.state.record is None:
            return True
        return set(driver.state.record.numbers) <= _living(driver.state)


class Attendance:
    """Decides when a caller has waited long enough for the members that it demands.

    Args:
        members: Numbers of the demanded members.
        timeout: Most seconds of the whole wait.
        unheard: Seconds for a member that was never heard.
        silence: Seconds for a member that was heard, and has fallen silent.
        replica: Number of this replica.
    """

    def __init__(
        self,
        members: Sequence[int],
        timeout: float = 0.0,
        unheard: float = 0.0,
        silence: float = 0.0,
        replica: int = -1,
    ) -> None:
        self.timeout, self.unheard, self.silence = timeout, unheard, silence
        self.look_s = min(1.0, max(0.05, min(timeout, unheard) / 4))
        self._away = {member: 0.0 for member in members if member != replica}
        self._came: set[int] = set()
        self._replica = replica
        self._total, self._last = 0.0, time.monotonic()

    def end(self, driver: FixedDriver, subject: str) -> Ended | None:
        """Return the end of the wait if it has been long enough; else None.

        Args:
            driver: Knows which members live.
            subject: How the error names the demanded members.
        """
        now = time.monotonic()
        # Time in which this process was suspended hardly counts.
        passed, self._last = min(now - self._last, _LONGEST_LOOK_S), now
        self._total += passed
        here = _living(driver.state)
        for member in self._away:
            self._away[member] = 0.0 if member in here else self._away[member] + passed
        self._came |= here
        reasons: dict[str, list[int]] = {}
        is_over = self._total > self.timeout
        for member, away in self._away.items():
            has_come = member in self._came
            limit = self.silence if has_come else self.unheard
            if away and (is_over or away >= limit):
                text = f"came, and was silent for {limit:g} s then" if has_come else ""
                text = text or f"did not come within {min(limit, self.timeout):g} s"
                reasons.setdefault(text, []).append(member)
        if not (reasons or is_over):
            return None
        missing = sorted(member for members in reasons.values() for member in members)
        why = ", ".join(f"{members} {text}" for text, members in reasons.items())
        why = why or f"did not agree in time: {driver.waiting_for or 'no answer'}"
        base = () if driver.state.record is None else driver.state.record.numbers
        wanted = set(self._away) | {self._replica} if self._away else here
        survivors = tuple(sorted((set(base) or wanted) & wanted - set(missing)))
        return Ended(
            "late", f"{subject} were to form a group, but {why}", tuple(missing), survivors
        )

    def describe(self, driver: FixedDriver) -> str:
        """Return words for the log that name the members for which the caller waits."""
        here, parts = _living(driver.state), []
        for member, away in self._away.items():
            if member not in here:
                is_known = member in self._came
                state = f"last heard of {away:.0f} s ago" if is_known else "never heard of"
                parts.append(f"replica {member} ({state})")
            elif re.search(rf"until replicas \[[\d, ]*\b{member}\b", driver.waiting_for):
                parts.append(f"replica {member} (it lives, and has not come yet)")
        return ", ".join(parts)


def _living(state: st.State) -> set[int]:
    """Return the numbers of the members, and of newcomers, that live."""
    roster = Roster(state)
    living = {key.number for key in roster.base if roster.lives(key)}
    return living | {key.number for key in (*roster.newcomers, *roster.coming)}


def none_trains(members: Sequence[int]) -> str:
    """Return the error message for members that have all come to join: none trains."""
    return (
        f"all members {list(members)} came to join and none trains yet: start with "
        'init="broadcast", and join replicas that call change_group'
    )


def own_place() -> str:
    """Return where this process runs, as host:pid."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _number_is_taken(replica: int, place: str, epoch: int) -> str:
    where = f", which is in the group of epoch {epoch}" if epoch else ""
    who, cure = f"process {place} (host:pid)", "give each replica a number of its own"
    if place == own_place():
        who = f"this process, {place} (host:pid)"
        cure = "close the DiLoCo of this process first, or give the second one another name"
    return f"replica number {replica} is already taken by {who}{where}: {cure}"


def _shown(member: Member) -> str:
    settings: dict[str, Any] = {
        extension.HANDSHAKE_NAME: extension.HANDSHAKE,
        "collectives": member.collectives,
        "lanes": member.lanes,
        "chunk_bytes": member.chunk_bytes,
        "window": member.window,
    }
    if member.tcp is not None:
        settings["Link(keys=)"] = "given" if member.tcp.public_key else "none"
    version = f"{extension.package_version()} (handshake {extension.HANDSHAKE})"
    return json.dumps({**settings, _VERSION: version})


def _texts_of(shown: str) -> dict[str, str]:
    """Return each setting's value as text, by name, for error messages."""
    return {
        name: value if name == _VERSION and isinstance(value, str) else json.dumps(value)
        for name, value in json.loads(shown).items()
    }


def _alike(shown: str) -> str:
    """Return the settings that must be equal on all members, as sorted JSON."""
    settings = json.loads(shown)
    del settings[_VERSION]
    return json.dumps(settings, sort_keys=True)
