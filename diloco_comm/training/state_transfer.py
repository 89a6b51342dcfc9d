"""Joining beside training: a replica serves its outer state, and as a newcomer copies others'."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _C
from ..base.checks import logger_of
from ..base.errors import ReplicaMismatch
from ..elastic.driver import Driver
from ..elastic.events import JoinProgress
from ..elastic.options import Elastic
from ..elastic.transfer.newcomer import Newcomer
from ..exchange.membership.own_link import LinkShare
from ..group import state as st
from ..group.beats import Way
from ..group.records import NO_RECORD
from ..ops.wire import Layout
from ..rounds.load import restore_outer
from ..rounds.part import SyncedFragment
from ..rounds.round_log import RoundLog, Standing, state_tensors
from ..rounds.state_dict import set_numbers

logger = logger_of(__name__)

# Bytes of the round log for each parameter. That is enough for seven int8 rounds among three
# replicas or more, with one payload each, and for three rounds among two, with two payloads each.
_LOG_BYTES = 8
_TURN_S = 0.05
# Seconds between two ``JoinProgress`` events.
_REPORT_S = 1.0
# After so many seconds without any progress, a newcomer asks to be let in with what it has.
_PATIENCE_S = 30.0


def default_log_bytes(parts: Sequence[SyncedFragment]) -> int:
    """Return the default size of the round log, in bytes.

    It is ``_LOG_BYTES`` for each parameter, and at least two rounds of two replicas, of two
    payloads each, with an eighth more for padding.
    """
    round_bytes = sum(
        2 * Layout.plan(part.num_elements, 2, 1, part.wire).payload_bytes for part in parts
    )
    num_elements = sum(part.num_elements for part in parts)
    return max(_LOG_BYTES * num_elements, 2 * round_bytes + round_bytes // 4)


class StateTransfer:
    """Serves the outer state of this replica; before it joins a group, copies the group's.

    Args:
        elastic: The options.
        parts: All fragments, by index.
        layout: See ``Plan.saved_layout``; a checkpoint must have the same.
        share: This object's share of the link of this process.
        name: The name of this object, equal on all replicas.

    Raises:
        ValueError, TypeError: If the checkpoint does not fit the model.

    Attributes:
        log: The rounds that this replica has applied.
        saved_step: Inner step of the checkpoint; -1 without one.
        is_pulling: This replica still copies the state, and has not asked to be let in.
        caught_up_bytes: Bytes that this newcomer received while all members waited for it.
    """

    def __init__(
        self,
        elastic: Elastic,
        parts: Sequence[SyncedFragment],
        layout: int,
        share: LinkShare,
        name: str,
    ) -> None:
        self._elastic, self._parts = elastic, list(parts)
        self._load_saved: Callable[[], None] | None = None
        self.saved_step = -1
        if elastic.checkpoint is not None:
            self._load_saved = restore_outer(parts, elastic.checkpoint, layout)
            self.saved_step = _step_of(elastic.checkpoint)
        limit = elastic.round_log_bytes
        self.share, self._service = share, f"{elastic.run}/{name}"
        self._link = share.link.link
        self._source = _C.StateSource([state_tensors(part) for part in parts])
        self.log = RoundLog(default_log_bytes(parts) if limit is None else limit, self._source)
        self._link.serve(self._service, self._source)
        self.is_pulling = True
        self.caught_up_bytes = 0
        self._driver: Driver | None = None
        self._newcomer: Newcomer | None = None
        self._report: Callable[[JoinProgress], None] = lambda progress: None
        self._reported_at = self._moved_at = time.monotonic()
        self._mark = -1

    @property
    def served_bytes(self) -> int:
        """Bytes of state and of logged rounds that were sent to newcomers."""
        return self._source.served_bytes

    def attach(self, driver: Driver, report: Callable[[JoinProgress], None]) -> None:
        """Use this driver, and publish in its beats that this process serves its outer state.

        Args:
            report: Called with each ``JoinProgress``.
        """
        self._driver, self._report = driver, report
        driver.serves = True

    def close(self) -> None:
        """End copying and serving, but not the share of the link; idempotent."""
        # In a forked child the link does not work.
        with contextlib.suppress(RuntimeError):
            self._end_copy()
            self._link.serve(self._service, None)
        self._source.close()

    # --------------------------------------------------------------------------- the newcomer

    def turn(self, driver: Driver) -> None:
        """Copy for a moment; ask to be let in when the copy is at most one round behind."""
        # Wait for the first look at the table: the agreement has yet to know its record.
        if not driver.state.table:
            time.sleep(_TURN_S)
            return
        # Ask this before ``donors``: a beat that comes in between may name a donor.
        awaits_beats = driver.awaits_beats
        if self._newcomer is None and not driver.donors():
            # There is no group yet, or none of its members serves. A member that has just entered
            # the group may serve, too: its next beat says so.
            if not awaits_beats:
                self._be_ready(driver, "")
            time.sleep(_TURN_S)
            return
        newcomer = self._newcomer
        if newcomer is None:
            limit = self._elastic.join_bandwidth
            newcomer = Newcomer(self._link, self._service, self._parts, self._donors, limit)
            self._newcomer, self._moved_at = newcomer, time.monotonic()
            if self._load_saved is not None:
                self._load_saved()
                newcomer.use_saved()
        newcomer.turn(_TURN_S)
        self._look(driver, newcomer)

    def _look(self, driver: Driver, newcomer: Newcomer) -> None:
        now = time.monotonic()
        if newcomer.received_bytes != self._mark:
            self._mark, self._moved_at = newcomer.received_bytes, now
        if now - self._reported_at > _REPORT_S and self.is_pulling:
            self._reported_at = now
            self._report(self._progress(newcomer))
        limit = self._elastic.suspect_after + (_PATIENCE_S if newcomer.has_donor else 0.0)
        if now - self._moved_at > limit:
            newcomer.refuse_if_behind()
        if newcomer.refusal:
            raise ReplicaMismatch(newcomer.refusal, stage="checkpoint")
        if newcomer.is_ready:
            self._be_ready(driver, "")
        elif newcomer.gave_up:
            self._be_ready(driver, newcomer.gave_up)
        elif now - self._moved_at > limit:
            is_alone = not driver.donors()
            trouble = newcomer.trouble and f" ({newcomer.trouble})"
            self._be_ready(
                driver, "" if is_alone else f"no donor has sent anything for {limit:g} s{trouble}"
            )

    def _progress(self, newcomer: Newcomer) -> JoinProgress:
        return JoinProgress(
            newcomer.received_bytes,
            newcomer.total_bytes,
            newcomer.rounds_behind,
            not self.is_pulling,
        )

    def _be_ready(self, driver: Driver, trouble: str) -> None:
        """Ask to be let in, with the part of the state that is copied so far.

        Args:
            trouble: Why the copy is not complete; "" if it is, or if there is nothing to copy.
        """
        if not self.is_pulling:
            return
        self.is_pulling = False
        if trouble:
            logger.warning("the members will wait while this replica copies the state: %s", trouble)
        if self._newcomer is not None:
            self._report(self._progress(self._newcomer))
        driver.tell(st.JoinerReady(NO_RECORD))

    def catch_up(self, targets: Mapping[int, int]) -> None:
        """Take the rounds that the copy lacks, while the members wait."""
        newcomer = self._newcomer
        if newcomer is not None:
            before = newcomer.received_bytes
            newcomer.catch_up(targets)
            newcomer.refuse_if_behind()
            if newcomer.refusal:
                raise ReplicaMismatch(newcomer.refusal, stage="checkpoint")
            self.caught_up_bytes += newcomer.received_bytes - before

    def forget(self) -> None:
        """Drop the copy, and set the fragments' buffers and numbers to their initial values."""
        self._end_copy()
        for part in self._parts:
            for tensor in state_tensors(part)[1:]:
                tensor.zero_()
            set_numbers(part, {"round": 0, "last_sent": 0})
            part.history = 0

    def load_saved(self) -> None:
        """Put the outer state of the checkpoint into the fragments."""
        assert self._load_saved is not None
        self._load_saved()

    def has_begun(self) -> None:
        """Serve from now on: this replica holds the state of the group."""
        self._end_copy()
        self.is_pulling = False
        self._source.open([Standing.of(part).numbers() for part in self._parts])

    def _end_copy(self) -> None:
        if self._newcomer is not None:
            self._newcomer.close()
            self._newcomer = None

    # ------------------------------------------------------------------------- other processes

    def _donors(self) -> dict[str, Way]:
        assert self._driver is not None
        found = {name: Way.from_text(text) for name, text in self._driver.donors().items()}
        return {name: way for name, way in found.items() if way is not None}


def _step_of(checkpoint: Mapping[str, Any]) -> int:
    step = checkpoint.get("inner_step")
    if type(step) is not int or step < 0:
        raise ValueError(
            f"the saved state has the inner step {step!r}, a number from 0 on expected"
        )
    return step
