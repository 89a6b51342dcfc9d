"""Reports on their way to the syncer: fetched run by run, and taken when they are complete."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ....base.checks import logger_of
from ....ops.wire import Layout
from ...model.shared import decode, layout_of
from ...protocol.messages import Kind, Message, ProtocolError
from ...protocol.window import Position
from ...server.sessions import Session
from ...server.transfer.receiving import STALL_S, Send
from ...server.uploads import Upload
from ..fragment_round import Report
from ..settings import FP32
from .state import SyncerState

logger = logger_of(__name__)

# The upload of parameters to start from, in place of a fragment.
_START = -1


@dataclass
class Offer:
    """A report that is on its way.

    Attributes:
        first: Number of the first piece of the fragment.
    """

    upload: Upload
    report: Report
    first: int


class ReportReceiver:
    """Receive the reports of learners, and the parameters to start from.

    Args:
        state: The syncer's state.
        send: Sends a message to a connection; returns False if that fails.
    """

    def __init__(self, state: SyncerState, send: Send) -> None:
        self.state, self._send = state, send
        self._offers: dict[tuple[str, int], Offer] = {}
        self._refused: dict[tuple[str, int], tuple[int, str]] = {}

    def forget(self, learner: str) -> None:
        """Drop the reports that a learner has begun to send."""
        for name, fragment in [key for key in self._offers if key[0] == learner]:
            self._drop(name, fragment)

    def drop_stalled(self, now: float) -> None:
        """Drop the reports of which nothing has arrived for ``STALL_S``."""
        for (name, fragment), offer in list(self._offers.items()):
            if now - offer.upload.last_seen > STALL_S:
                self._drop(name, fragment)
                self.state.status.count_refusal("stalled")

    def _drop(self, name: str, fragment: int) -> None:
        offer = self._offers.pop((name, fragment), None)
        if offer is not None:
            self.state.memory.give_back(offer.upload.payloads)

    # -------------------------------------------------------------------------------- a report

    def offer(self, session: Session, message: Message) -> None:
        """Answer a learner that has a report, or that repeats its OFFER."""
        model, name, p, seq = self.state.model, session.worker, message.fragment, message.number
        if model is None:
            self._send(session.peer, Message(Kind.UNKNOWN))
            return
        if p >= len(model.pieces):
            raise ProtocolError(f"there is no fragment {p}")
        offer = self._offers.get((name, p))
        if offer is not None and offer.upload.seq == seq:
            self._want(session, offer, offer.upload.window.ask_again())
            return
        meta = message.meta
        report = Report(name, seq, message.version, meta["steps"], meta["tokens"])
        refusal = self._known(report, p)
        if refusal is None:
            refusal = model.syncer.rounds[p].refusal(report)
            if not refusal and not self._admit(session, report, p):
                refusal = "the server has no room for a report beyond the quorum"
            if refusal:
                self._note_refusal(p, report, refusal)
        if refusal is not None and (name, p) not in self._offers:
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

    def _admit(self, session: Session, report: Report, p: int) -> bool:
        """Ask for the runs of a report, if there is room or the report is one of the quorum's."""
        model = self.state.model
        assert model is not None
        begun = self._offers.get((report.learner, p))
        self._drop(report.learner, p)
        known = {name for name, fragment in self._offers if fragment == p}
        known |= model.syncer.rounds[p].reported
        is_needed = len(known) < model.syncer.rule.quorum
        layouts = model.reports(p)
        sizes = [layout.payload_bytes for layout in layouts]
        payloads = self.state.memory.take(sizes, may_use_file=False, must=is_needed)
        if payloads is None:
            return False
        self._begin(session, report, p, model.first[p], layouts, payloads)
        if begun is not None:
            # Another report in place of one that has not arrived is no sign of life.
            self._offers[report.learner, p].upload.last_seen = begun.upload.last_seen
        return True

    def _begin(
        self,
        session: Session,
        report: Report,
        p: int,
        first: int,
        layouts: list[Layout],
        payloads: list,
    ) -> None:
        upload = Upload(
            report.learner,
            report.seq,
            report.base,
            report.steps,
            0.0,
            p == _START,
            layouts,
            payloads,
            time.monotonic(),
        )
        offer = Offer(upload, report, first)
        self._offers[report.learner, p] = offer
        if p != _START:
            self._note_seq(report, p)
        self._want(session, offer, upload.window.ask())

    def _note_seq(self, report: Report, p: int) -> None:
        key = (report.learner, p)
        self.state.seqs[key] = max(report.seq, self.state.seqs.get(key, 0))

    def _want(
        self, session: Session, offer: Offer, requests: Iterable[tuple[Position, int]]
    ) -> None:
        for (_, i, run), count in requests:
            place = (offer.upload.seq, 0, offer.first + i, run)
            self._send(session.peer, Message(Kind.WANT, *place, count=count))

    def receive_run(self, session: Session, message: Message) -> None:
        """Take runs of a report, or of the parameters to start from."""
        p, i = _START, message.fragment
        if message.number:
            model = self.state.model
            if model is None or message.fragment >= len(model.places):
                return
            p, i = model.places[message.fragment]
        offer = self._offers.get((session.worker, p))
        if offer is None or offer.upload.seq != message.number:
            return
        if Position(0, i, message.run) not in offer.upload.window.asked:
            return  # This run was asked for twice, and has arrived before.
        wrong = offer.upload.put(i, message.run, message.body, time.monotonic())
        if wrong:
            self._refuse_run(session, offer, p, wrong)
            return
        self._want(session, offer, offer.upload.window.ask())
        if offer.upload.window.is_empty:
            del self._offers[session.worker, p]
            self._complete(session, offer, p)

    def _refuse_run(self, session: Session, offer: Offer, p: int, wrong: str) -> None:
        """Refuse a report for the size or the place of a run; its learner reports again later."""
        if not self.state.status.refused["size"]:
            logger.warning(
                "what learner %s sends is refused: %s; the status counts further refusals for size "
                "or place, which are not logged",
                session.worker,
                wrong,
            )
        self._drop(session.worker, p)
        if p == _START:
            self.state.status.count_refusal("size")
            self._send(session.peer, Message(Kind.REFUSED, meta={"reason": wrong}))
            return
        self._note_refusal(p, offer.report, wrong, kind="size")
        self._answer(session, p, offer.upload.seq, wrong)

    def _complete(self, session: Session, offer: Offer, p: int) -> None:
        if p == _START:
            self._start(session, offer.upload)
            return
        upload, refusal = offer.upload, offer.upload.garbage
        if not refusal:
            payloads = [payload for payload in upload.payloads if isinstance(payload, Tensor)]
            refusal = self.state.report(p, offer.report, payloads, time.monotonic())
        if refusal:
            self._note_refusal(p, offer.report, refusal)
            self.state.memory.give_back(upload.payloads)
        self._answer(session, p, upload.seq, refusal)

    def _note_refusal(self, p: int, report: Report, refusal: str, kind: str = "report") -> None:
        self._refused[report.learner, p] = (report.seq, refusal)
        # A learner that starts again under this name does not use the number of a refused report.
        self._note_seq(report, p)
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
        offer = self._offers.get((session.worker, _START))
        if offer is not None:
            self._want(session, offer, offer.upload.window.ask_again())
        elif self._offers:
            self._send(session.peer, Message(Kind.WAIT))
        else:
            layouts = [layout_of(size, FP32) for size in session.sizes]
            sizes = [layout.payload_bytes for layout in layouts]
            payloads = self.state.memory.take(sizes, may_use_file=False, must=True)
            report = Report(session.worker, 0, 0, 0, 0)
            self._begin(session, report, _START, 0, layouts, payloads or [])

    def _start(self, session: Session, upload: Upload) -> None:
        flats, payloads = [], upload.payloads[::-1]
        upload.payloads = []
        if not upload.garbage:
            # A payload is given back as soon as it is decoded: beside the model there is one piece.
            for layout in upload.layouts:
                flats.append(decode(payloads[-1][:], layout))
                self.state.memory.give_back([payloads.pop()])
        self.state.memory.give_back(payloads)
        if upload.garbage or not all(bool(torch.isfinite(flat).all()) for flat in flats):
            self.state.status.count_refusal("non-finite")
            reason = "the learner's parameters are not finite"
            self._send(session.peer, Message(Kind.REFUSED, meta={"reason": reason}))
            return
        peer = session.peer
        self.state.start(session, flats)
        self._send(peer, Message(Kind.UNKNOWN))
