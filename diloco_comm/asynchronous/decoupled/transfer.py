"""Reports on their way to the syncer; calls, commits and versions on their way to learners.

A report is fetched run by run, and taken when it is complete.

Nothing is queued for a learner. The syncer remembers what each connection was told, and tells the
newest version of a fragment and the call that is open. So a slow learner skips versions. A learner
is told of a window of fragments at a time, since a connection's queue holds few messages.
"""

from __future__ import annotations

import time

from torch import Tensor

from ...base.checks import logger_of
from ..messages import Kind, Message, ProtocolError
from ..model import layout_of
from ..payloads import Upload
from ..sessions import Send, Session
from ..transfer import Uploads
from ..window import WINDOW_FRAGMENTS, bodies, is_within, view_of_runs
from .model import Published
from .settings import FP32
from .state import SyncerState, Told
from .syncer import Report

logger = logger_of(__name__)

# The upload of parameters to start from, in place of a fragment.
_START = -1


class ReportReceiver(Uploads):
    """Receive the reports of learners, and the parameters to start from; by fragment."""

    sender = "learner"

    def __init__(self, state: SyncerState, send: Send) -> None:
        super().__init__(state, send)
        self.state = state
        self._refused: dict[tuple[str, int], tuple[int, str]] = {}

    def _place(self, message: Message) -> int | None:
        model = self.state.model
        if not message.number:
            return _START
        if model is None or message.fragment >= len(model.places):
            return None
        return model.places[message.fragment][0]

    # -------------------------------------------------------------------------------- a report

    def offer(self, session: Session, message: Message) -> None:
        """Answer a learner that has a report, or that repeats its OFFER."""
        model, name, p, seq = self.state.model, session.worker, message.fragment, message.number
        if model is None:
            self._send(session.peer, Message(Kind.UNKNOWN))
            return
        if p >= len(model.pieces):
            raise ProtocolError(f"there is no fragment {p}")
        upload = self._uploads.get((name, p))
        if upload is not None and upload.seq == seq:
            self._want(session, upload, upload.window.ask_again())
            return
        report = _report(name, message)
        refusal = self._known(report, p)
        if refusal is None:
            refusal = model.syncer.rounds[p].refusal(report)
            if not refusal and not self._admit(session, message):
                refusal = "the server has no room for a report beyond the quorum"
            if refusal:
                self._note_refusal(p, report, refusal)
        if refusal is not None and (name, p) not in self._uploads:
            self._answer(session, p, seq, refusal)

    def _known(self, report: Report, p: int) -> str | None:
        """Return the verdict on a report that came before, or None for a new one."""
        assert self.state.model is not None
        merged = self.state.model.published[p].merged.get(report.learner, 0)
        if merged == report.seq or (p, report.learner, report.seq) in self.state.held:
            return ""
        if report.seq < merged:
            return f"report {report.seq} comes after report {merged}, which is merged"
        seq, refusal = self._refused.get((report.learner, p), (0, ""))
        return refusal if seq == report.seq else None

    def _admit(self, session: Session, offer: Message) -> bool:
        """Ask for the runs of a report, if there is room or the report is one of the quorum's."""
        model, key = self.state.model, (session.worker, offer.fragment)
        assert model is not None
        begun, p = self._uploads.get(key), offer.fragment
        self._drop(*key)
        known = {name for name, fragment in self._uploads if fragment == p}
        known |= model.syncer.rounds[p].reported
        is_needed = len(known) < model.syncer.rule.quorum
        layouts = model.reports(p)
        sizes = [layout.payload_bytes for layout in layouts]
        payloads = self.state.memory.take(sizes, may_use_file=False, must=is_needed)
        if payloads is None:
            return False
        self._note_seq(*key, offer.number)
        # A report in place of an unfinished one is no sign of life: ``drop_stalled`` counts on.
        last_seen = None if begun is None else begun.last_seen
        self._begin(session, p, offer, layouts, payloads, model.first[p], last_seen)
        return True

    def _note_seq(self, learner: str, p: int, seq: int) -> None:
        self.state.seqs[learner, p] = max(seq, self.state.seqs.get((learner, p), 0))

    def _refuse_run(self, session: Session, upload: Upload, place: int, wrong: str) -> None:
        """Refuse a report for the size or the place of a run; its learner reports again later."""
        if not self.state.status.refused["size"]:
            logger.warning(
                "what learner %s sends is refused: %s; the status counts further refusals for size "
                "or place, which are not logged",
                session.worker,
                wrong,
            )
        self._drop(session.worker, place)
        if place == _START:
            self._refuse(session, wrong, "size")
            return
        self._note_refusal(place, _report(session.worker, upload.question), wrong, kind="size")
        self._answer(session, place, upload.seq, wrong)

    def _complete(self, session: Session, upload: Upload, place: int) -> None:
        if place == _START:
            self._start(session, upload)
            return
        report, refusal = _report(session.worker, upload.question), upload.garbage
        if not refusal:
            payloads = [payload for payload in upload.payloads if isinstance(payload, Tensor)]
            refusal = self.state.take_report(place, report, payloads, time.monotonic())
        if refusal:
            self._note_refusal(place, report, refusal)
            self.state.memory.give_back(upload.payloads)
        self._answer(session, place, upload.seq, refusal)

    def _note_refusal(self, p: int, report: Report, refusal: str, kind: str = "report") -> None:
        self._refused[report.learner, p] = (report.seq, refusal)
        # A learner that starts again under this name does not use the number of a refused report.
        self._note_seq(report.learner, p, report.seq)
        self.state.status.count_refusal(kind)
        self.state.refused(p, report)

    def _answer(self, session: Session, p: int, seq: int, refusal: str) -> None:
        message = Message(Kind.VERDICT, seq, 0, p, meta={"refusal": refusal[:1024]})
        self._send(session.peer, message)

    # ------------------------------------------------------------------------------- the start

    def start(self, session: Session, message: Message) -> None:
        """Ask the first learner for its parameters; the others wait."""
        if self.state.model is not None:
            self._send(session.peer, Message(Kind.UNKNOWN))
            return
        upload = self._uploads.get((session.worker, _START))
        if upload is not None:
            self._want(session, upload, upload.window.ask_again())
        elif self._uploads:
            self._send(session.peer, Message(Kind.WAIT))
        else:
            layouts = [layout_of(size, FP32) for size in session.sizes]
            sizes = [layout.payload_bytes for layout in layouts]
            payloads = self.state.memory.take(sizes, may_use_file=False, must=True)
            self._begin(session, _START, Message(Kind.START), layouts, payloads or [])

    def _start(self, session: Session, upload: Upload) -> None:
        flats = self._parameters(session, upload)
        if flats is not None:
            peer = session.peer
            self.state.start(session, flats)
            self._send(peer, Message(Kind.UNKNOWN))


def _report(learner: str, offer: Message) -> Report:
    """Return what a learner says about the report that it offers."""
    return Report(learner, offer.number, offer.version, offer.meta["steps"], offer.meta["tokens"])


# Seconds after which a message is taken to have left the queue of a learner that reads.
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
            body = view_of_runs(data, layout, run, count)
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
