"""Parameters on their way to workers: a version is held while somebody reads it, run by run."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..wire import WireFormat
from .messages import Kind, Message, ProtocolError
from .receiving import STALL_S, Send
from .sessions import Session
from .state import ServerState

# A whole download may keep others waiting for so long, if memory is short, this many times.
PATIENCE_S, MAX_EVICTIONS = 30.0, 2
# A reader that asks for nothing for so long makes room for others that wait, as often.
PAUSE_S = 3.0


class Sender:
    """Let workers fetch what they go on from.

    Args:
        state: What the server knows.
        send: Sends a message to a connection; False if it could not.
        on_room: Called when memory may have become free.
    """

    def __init__(self, state: ServerState, send: Send, on_room: Callable[[], None]) -> None:
        self.state, self._send, self._on_room = state, send, on_room

    def pull(self, session: Session, message: Message) -> None:
        """A worker asks for parameters; who waits in a grace period goes on waiting."""
        if self.state.coordinator is None:
            self._send(session.peer, Message(Kind.UNKNOWN))
        elif session.held is not None:
            self._ready(session)
        elif not self.state.coordinator.grace.is_waiting(session.worker):
            session.hold(self.state.coordinator, self.state.coordinator.start(session.worker))
            self._ready(session)
        if session.held is None or not session.is_reading:
            self._send(session.peer, Message(Kind.WAIT))

    def release(self) -> None:
        if self.state.coordinator is None:
            return
        for worker, steps in self.state.coordinator.released(time.monotonic()):
            session = self.state.sessions.of(worker)
            if session is not None:
                session.hold(self.state.coordinator, steps)
                self._ready(session)

    def _ready(self, session: Session) -> None:
        assert session.held is not None
        readers = [s for s in self.state.sessions.all() if s.is_reading]
        if session.is_reading or len(readers) < self.state.max_readers:
            session.is_reading = True
            meta = {"steps": session.steps}
            self._send(session.peer, Message(Kind.READY, 0, session.held, meta=meta))

    def get(self, session: Session, message: Message) -> None:
        if session.held is None or session.held != message.version or not session.is_reading:
            self._send(session.peer, Message(Kind.GONE, 0, message.version))
            return
        assert self.state.coordinator is not None
        model = self.state.coordinator.model
        layouts = session.layouts(WireFormat("fp32"))
        if message.fragment >= len(layouts) or message.run >= layouts[message.fragment].num_runs:
            raise ProtocolError(f"there is no run {message.run} of fragment {message.fragment}")
        values = model.read(message.version, message.fragment, message.run)
        body = values.numpy().data.cast("B")
        self._send(
            session.peer,
            Message(Kind.DATA, 0, message.version, message.fragment, message.run, body=body),
        )

    def done(self, session: Session, message: Message) -> None:
        if session.held == message.version:
            session.let_go(self.state.coordinator)
            self.after_reading()

    def after_reading(self) -> None:
        for session in self.state.sessions.all():
            if session.held is not None and not session.is_reading:
                self._ready(session)
        self._on_room()

    def evict(self, now: float, *, is_memory_short: bool) -> None:
        """End the reading of those that hold others up."""
        holders = [session for session in self.state.sessions.all() if session.held is not None]
        is_full = any(not session.is_reading for session in holders)
        for session in holders:
            silent_s = now - max(session.seen_at, session.held_at)
            is_in_the_way = is_memory_short or (is_full and session.is_reading)
            is_slow = is_memory_short and now - session.held_at > PATIENCE_S
            is_slow |= is_in_the_way and silent_s > PAUSE_S
            is_slow &= session.evictions < MAX_EVICTIONS
            if silent_s > STALL_S or is_slow:
                session.evictions += is_slow
                session.let_go(self.state.coordinator)
