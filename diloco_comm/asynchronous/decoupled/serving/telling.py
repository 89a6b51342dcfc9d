"""What learners are told: calls and commits, and the versions that learners fetch.

Nothing is queued for a learner. The syncer remembers what each connection was told, and tells the
newest version of a fragment and the call that is open. So a slow learner skips versions.
"""

from __future__ import annotations

import time

from torch import Tensor

from ....ops.wire import Layout
from ...protocol.messages import Kind, Message, ProtocolError
from ...protocol.window import bodies, is_within
from ...server.sessions import Session
from ...server.transfer.receiving import Send
from .model import Published
from .state import SyncerState, Told


class Teller:
    """Tell learners of calls and commits, and send the versions that they ask for.

    Args:
        state: The syncer's state.
        send: Sends a message to a connection; returns False if that fails.
    """

    def __init__(self, state: SyncerState, send: Send) -> None:
        self.state, self._send = state, send

    def tell_all(self) -> None:
        """Tell every learner what is new; what cannot be sent now is told later."""
        if not self.state.is_news or self.state.model is None:
            return
        self.state.is_news = False
        for session in self.state.sessions.all():
            told = self.state.told.get(session.peer)
            if told is not None and not self._tell(session, told):
                self.state.is_news = True

    def _tell(self, session: Session, told: Told) -> bool:
        """Tell one learner what is new; False if a message could not be sent."""
        model = self.state.model
        assert model is not None
        for p, newest in enumerate(model.published):
            if told.commits[p] != newest.version:
                number, is_coded = newest.merged.get(session.worker, 0), newest.coded is not None
                message = Message(Kind.COMMIT, number, newest.version, p, count=int(is_coded))
                if not self._send(session.peer, message):
                    return False
                told.commits[p], told.at[p] = newest.version, time.monotonic()
            here = model.syncer.rounds[p]
            is_called = here.is_open and here.version == newest.version
            if is_called and told.calls[p] != here.version:
                if not self._send(session.peer, Message(Kind.CALL, 0, here.version, p)):
                    return False
                told.calls[p] = here.version
        return True

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
