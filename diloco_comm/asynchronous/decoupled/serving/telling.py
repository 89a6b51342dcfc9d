"""What learners are told: calls and commits, and the versions that learners fetch.

Nothing is queued for a learner. The syncer remembers what each connection was told, and tells the
newest version of a fragment and the call that is open. So a slow learner skips versions. A learner
is told of a window of fragments at a time, since a connection's queue holds few messages.
"""

from __future__ import annotations

import time

from torch import Tensor

from ....ops.wire import Layout
from ...protocol.messages import Kind, Message, ProtocolError
from ...protocol.window import WINDOW_FRAGMENTS, bodies, is_within
from ...server.sessions import Session
from ...server.transfer.receiving import Send
from .model import Published
from .state import SyncerState, Told

# Seconds after which a message has left the queue of a connection whose learner reads.
LEFT_S = 0.05


class Teller:
    """Tell learners of calls and commits, and send the versions that they ask for.

    Args:
        state: The syncer's state.
        send: Sends a message to a connection; returns False if that fails.

    Attributes:
        due_at: When there is room for what could not be told, on the monotonic clock; None if all
            was told.
    """

    def __init__(self, state: SyncerState, send: Send) -> None:
        self.state, self._send = state, send
        self.due_at: float | None = None

    def tell(self) -> None:
        """Tell every learner what is new; what finds no room now is told later."""
        self.due_at = None
        for peer in list(self.state.with_news):
            session, told = self.state.sessions.get(peer), self.state.told.get(peer)
            if session is None or told is None or self._tell(session, told):
                self.state.with_news.discard(peer)

    def _tell(self, session: Session, told: Told) -> bool:
        """Tell one learner what is new; False if there is more to tell later."""
        while told.news:
            now = time.monotonic()
            while len(told.on_way) >= WINDOW_FRAGMENTS:
                oldest, at = next(iter(told.on_way.items()))
                if now < at + LEFT_S:
                    return self._tell_at(at + LEFT_S)
                # No answer is due to some messages; the oldest one has left by now.
                del told.on_way[oldest]
            p = next(iter(told.news))
            if not self._tell_of(p, session, told):
                return self._tell_at(now + LEFT_S)
            told.news.pop(p, None)
        return True

    def _tell_at(self, due_at: float) -> bool:
        self.due_at = due_at if self.due_at is None else min(due_at, self.due_at)
        return False

    def _tell_of(self, p: int, session: Session, told: Told) -> bool:
        """Tell one learner what is new of a fragment; False if a message could not be sent."""
        model = self.state.model
        assert model is not None
        newest, here = model.published[p], model.syncer.rounds[p]
        if told.commits[p] != newest.version:
            number, is_coded = newest.merged.get(session.worker, 0), newest.coded is not None
            message = Message(Kind.COMMIT, number, newest.version, p, count=int(is_coded))
            if not self._send(session.peer, message):
                return False
            told.commits[p], told.at[p] = newest.version, time.monotonic()
            told.on_way.pop(p, None)  # The oldest message of the window is the first one.
            told.on_way[p] = told.at[p]
        is_called = here.is_open and here.version == newest.version
        if is_called and told.calls[p] != here.version:
            if not self._send(session.peer, Message(Kind.CALL, 0, here.version, p)):
                return False
            told.calls[p] = here.version
            told.on_way.pop(p, None)
            told.on_way[p] = time.monotonic()
        return True

    def answered(self, peer: bytes, p: int) -> None:
        """Note that a learner has read what it was told of a fragment: it asks or reports."""
        told = self.state.told.get(peer)
        if told is not None:
            told.on_way.pop(p, None)

    def get(self, session: Session, message: Message) -> None:
        """Send runs of a version: its parameters (number 0), or the coded difference (1)."""
        model, number = self.state.model, message.fragment
        told = self.state.told.get(session.peer)
        if model is None or told is None:
            self._send(session.peer, Message(Kind.UNKNOWN))
            return
        if number >= len(model.places):
            raise ProtocolError(f"there is no piece {number}")
        p, i = model.places[number]
        self.answered(session.peer, p)
        found = self._version(told, p, message.version)
        if found is None or (message.number and found.coded is None):
            self._send(session.peer, Message(Kind.GONE, 0, message.version, p))
            return
        told.reading[p] = found
        layout, data = model.whole[number], found.values[i]
        if message.number and found.coded is not None:
            layout, data = model.down[number], found.coded[i]
        if not is_within(layout, message.run, message.count):
            raise ProtocolError(f"piece {number} has {layout.num_runs} runs of {layout.run_bytes}")
        for run, count in bodies(layout, message.run, message.count):
            place = (message.number, message.version, number, run)
            body = _body(layout, data, run, count, is_coded=bool(message.number))
            if not self._send(session.peer, Message(Kind.DATA, *place, body=body)):
                return

    def _version(self, told: Told, p: int, version: int) -> Published | None:
        """Return a version of a fragment if it is kept."""
        assert self.state.model is not None
        for found in (self.state.model.published[p], told.reading.get(p)):
            if found is not None and found.version == version:
                return found
        return None

    def done(self, session: Session, message: Message) -> None:
        """Note that a learner has all of a version."""
        told, model = self.state.told.get(session.peer), self.state.model
        if told is None or model is None or message.fragment >= len(model.published):
            return
        told.reading.pop(message.fragment, None)
        if told.commits[message.fragment] == message.version:
            told.sync_s = time.monotonic() - told.at[message.fragment]
            known = [each.sync_s for each in self.state.told.values() if each.sync_s]
            model.syncer.sync_s = sum(known) / len(known) if known else 0.0


def _body(layout: Layout, data: Tensor, run: int, count: int, *, is_coded: bool) -> memoryview:
    """Return the bytes of consecutive runs: of a payload, or of values in fp32."""
    begin, end = layout.run_range(run)[0], layout.run_range(run + count - 1)[1]
    if is_coded:
        begin, end = run * layout.run_bytes, (run + count) * layout.run_bytes
    return data[begin:end].numpy().data.cast("B")
