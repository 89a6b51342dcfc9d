"""Parameters on their way to workers: a version is held while a worker reads it, run by run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ....ops.wire import Layout, WireFormat
from ...model.rule_states import FusedState
from ...protocol.messages import Kind, Message, ProtocolError
from ...protocol.window import bodies, is_within
from ..sessions import BEGIN_S, NOTHING, Session
from ..state import ServerState
from .receiving import STALL_S, Send

_FP32 = WireFormat("fp32")
# While memory is short, a download longer than this is ended, at most this many times a worker.
PATIENCE_S, MAX_EVICTIONS = 30.0, 2
# Seconds that a new reader waits for readers of an older version to end. While an older version is
# read, the server computes the newer one anew for each reader.
TURN_S = 0.1
# A reader that asks for nothing this long is ended too, if others wait, at most as many times.
PAUSE_S = 3.0
# A reader that has asked for none of an older version within its patience waits so many times as
# long before it is told to begin anew; its patience is doubled, since its answers may travel long.
_WAITS = 4.0


class Sender:
    """Let workers fetch the version that their next round starts from.

    Args:
        state: The server's state.
        send: Sends a message to a connection; returns False if that fails.
        on_room: Called when memory may have become free.
    """

    def __init__(self, state: ServerState, send: Send, on_room: Callable[[], None]) -> None:
        self.state, self._send, self._on_room = state, send, on_room

    def pull(self, session: Session, message: Message) -> None:
        """Answer a worker's PULL or FOLLOW, unless the worker waits in a grace period."""
        coordinator, follows = self.state.coordinator, None
        session.token = message.run
        if message.kind == Kind.FOLLOW:
            follows = message.version if message.number else NOTHING
        if coordinator is None:
            self._send(session.peer, Message(Kind.UNKNOWN))
            return
        # A worker that waits in a grace period gets the answer at the end of the period.
        is_other, session.follows = session.follows != follows, follows
        if session.held is not None:
            if is_other:
                # Another question is no progress: the reader keeps its place and its times.
                kept = session.is_reading, session.held_at, session.furthest
                session.hold(coordinator, session.steps)
                session.is_reading, session.held_at, session.furthest = kept
            self._ready(session)
        elif time.monotonic() < session.barred_until:
            pass
        elif not coordinator.grace.is_waiting(session.worker):
            session.hold(coordinator, coordinator.start(session.worker))
            self._ready(session)
        if session.held is None or not session.is_reading:
            self._send(session.peer, Message(Kind.WAIT))

    def start_released(self) -> None:
        """Send a version to the workers whose grace period has ended."""
        if self.state.coordinator is None:
            return
        for worker, steps in self.state.coordinator.released(time.monotonic()):
            session = self.state.sessions.of(worker)
            if session is not None:
                session.hold(self.state.coordinator, steps)
                self._ready(session)

    def _ready(self, session: Session) -> None:
        assert session.held is not None
        if session.is_reading or self._is_its_turn(session):
            if not session.is_reading:
                session.is_reading, session.read_at = True, time.monotonic()
            meta = self._answer_fields(session)
            self._send(
                session.peer, Message(session.answer, 0, session.held, 0, session.token, meta=meta)
            )

    def _is_its_turn(self, session: Session) -> bool:
        """Return whether a worker may begin to read the version that is held for it."""
        now, readers = time.monotonic(), [s for s in self.state.sessions.all() if s.is_reading]
        if session.answer != Kind.UPDATES and now - session.held_at < TURN_S:
            oldest = self.state.model.oldest_read
            older = (s.read_at for s in readers if s.held == oldest != session.held)
            if now - max(older, default=float("-inf")) < TURN_S:
                return False
        return len(readers) < self.state.max_readers

    def _answer_fields(self, session: Session) -> dict[str, Any]:
        """Return the JSON fields by which a worker gets the version that is held for it."""
        meta: dict[str, Any] = {"steps": session.steps}
        model, held = self.state.model, session.held
        state = model.states[0]
        if session.answer == Kind.READY or not isinstance(state, FusedState):
            return meta
        assert held is not None
        meta |= {"lr": state.lr_at(held)}
        if session.answer == Kind.STATE:
            return {**meta, "rule": state.config()}
        updates = model.updates_since(session.base)
        assert updates is not None
        rows = []
        for index in range(held - session.base):
            wire = updates[index].layouts[0].wire
            lr = state.lr_at(session.base + index)
            rows.append([wire.name, wire.block_size, updates[index].weight, lr])
        return {**meta, "updates": rows}

    def get(self, session: Session, message: Message) -> None:
        """Send a worker runs of the version that is held for it, or runs of an update."""
        is_update = message.kind == Kind.GET_UPDATE
        fits = session.held == message.version and session.is_reading
        # A worker that was answered UPDATES may ask for updates only, others for runs only.
        if not fits or is_update != (session.answer == Kind.UPDATES):
            self._send(session.peer, Message(Kind.GONE, 0, message.version))
            return
        layout = self._layout(session, message)
        if not is_within(layout, message.run, message.count):
            raise ProtocolError(
                f"there are no {message.count} runs from run {message.run} of fragment "
                f"{message.fragment}, or they are too many at a time"
            )
        # Runs that a worker asks for again are no progress. Workers ask in ascending order.
        asked = (message.number, message.fragment, message.run)
        if session.furthest is None or asked > session.furthest:
            session.furthest, session.read_at = asked, time.monotonic()
        for run, count in bodies(layout, message.run, message.count):
            body = self._read(message, run, count).numpy().data.cast("B")
            place = (message.number, message.version, message.fragment, run)
            if not self._send(session.peer, Message(Kind.DATA, *place, body=body)):
                # The worker is gone, and its version is released; or it does not read, and asks
                # again.
                return

    def _layout(self, session: Session, message: Message) -> Layout:
        """Return the layout of the fragment that a worker asks for."""
        model, number, fragment = self.state.model, message.number, message.fragment
        layouts: Sequence[Layout] = session.layouts(_FP32)
        if message.kind == Kind.GET_UPDATE:
            if not session.base < number <= message.version:
                raise ProtocolError(f"update {number} does not lead to version {message.version}")
            layouts = model.update(number).layouts
        if fragment >= len(layouts):
            raise ProtocolError(f"there is no fragment {fragment}")
        if message.kind == Kind.GET and number > 1 + len(model.states[fragment].tensors()):
            raise ProtocolError(f"there is no buffer {number}")
        return layouts[fragment]

    def _read(self, message: Message, run: int, count: int) -> Tensor:
        model, number, fragment = self.state.model, message.number, message.fragment
        if message.kind == Kind.GET_UPDATE:
            update = model.update(number)
            size = update.layouts[fragment].run_bytes
            return update.payloads[fragment][run * size : (run + count) * size]
        if number == 0:
            return model.read(message.version, fragment, run)
        return model.read_buffer(message.version, fragment, run, number - 1)

    def done(self, session: Session, message: Message) -> None:
        """Tell a worker that has all runs of a version whether the version was kept until now."""
        if session.held != message.version or not session.is_reading:
            self._send(session.peer, Message(Kind.GONE, 0, message.version))
            return
        session.patience_s = BEGIN_S
        session.follows = None if session.answer == Kind.READY else session.held
        session.release(self.state.coordinator)
        self._send(session.peer, Message(Kind.KEPT, 0, message.version))
        self.state.keep_for_followers()
        self.after_reading()

    def after_reading(self) -> None:
        """Let waiting workers read, and waiting updates in, after a reader has ended."""
        for session in self.state.sessions.all():
            if session.held is not None and not session.is_reading:
                self._ready(session)
        self._on_room()

    def _lend_updates(self, session: Session) -> None:
        """Keep the buffers of updates that may still be on their way to a worker from reuse."""
        if session.answer == Kind.UPDATES:
            for update in self.state.model.updates_since(session.base) or []:
                self.state.memory.lend(update.payloads)

    def evict(self, now: float, *, is_memory_short: bool) -> None:
        """End the downloads of workers that are silent, or slow while others wait."""
        holders = [session for session in self.state.sessions.all() if session.held is not None]
        is_full = any(not session.is_reading for session in holders)
        for session in holders:
            # A question without end is no progress of a reader.
            seen_at = session.read_at if session.is_reading else session.seen_at
            silent_s = now - max(seen_at, session.held_at)
            is_in_the_way = is_memory_short or (is_full and session.is_reading)
            is_slow = is_memory_short and now - session.held_at > PATIENCE_S
            is_slow |= is_in_the_way and silent_s > PAUSE_S
            is_slow &= session.evictions < MAX_EVICTIONS
            # The server computes all newer versions anew as long as it keeps an older one.
            is_old = session.is_reading and session.held != self.state.version
            is_idle = is_old and session.furthest is None and silent_s > session.patience_s
            if silent_s > STALL_S or is_slow or is_idle:
                session.evictions += is_slow
                if is_idle:
                    session.barred_until = now + _WAITS * silent_s
                    session.patience_s = min(2 * session.patience_s, STALL_S)
                self._lend_updates(session)
                session.release(self.state.coordinator)
