"""Updates on their way to the server: fetched run by run, applied when complete, then answered."""

from __future__ import annotations

import time
from collections.abc import Callable

from ....base.trace import span
from ....ops.wire import WireFormat
from ...model.shared import decode
from ...protocol.messages import Kind, Message, ProtocolError
from ...protocol.window import Position
from ..decisions.coordinator import Outcome, Update
from ..sessions import Session
from ..state import ServerState
from ..uploads import Upload

# Seconds after which a silent worker loses the memory that the server keeps for it.
STALL_S = 20.0

Send = Callable[[bytes, Message], bool]


class Receiver:
    """Receive the updates of workers.

    Args:
        state: The server's state.
        send: Sends a message to a connection; returns False if that fails.
    """

    def __init__(self, state: ServerState, send: Send) -> None:
        self.state, self._send = state, send
        self._uploads: dict[str, Upload] = {}
        self._queue: dict[str, Message] = {}

    @property
    def is_anyone_waiting(self) -> bool:
        """An update waits for memory, and not for the end of a bar."""
        sessions = [self.state.sessions.of(worker) for worker in self._queue]
        now = time.monotonic()
        return any(session is not None and now >= session.barred_until for session in sessions)

    def forget(self, worker: str) -> None:
        """Drop the update that a worker has begun to send, or waits to send."""
        self._drop_upload(worker)
        self._queue.pop(worker, None)

    def drop_stalled(self, now: float) -> None:
        """Drop the uploads whose worker has been silent for ``STALL_S``, to free their memory."""
        for upload in list(self._uploads.values()):
            if now - upload.last_seen > STALL_S:
                self._drop_upload(upload.worker)
                self.state.status.count_refusal("stalled")
                session = self.state.sessions.of(upload.worker)
                if session is not None and self.is_anyone_waiting:
                    session.barred_until = now + STALL_S

    def push(self, session: Session, message: Message) -> None:
        """Answer a worker that has an update, or that repeats its PUSH."""
        worker, meta = session.worker, message.meta
        if message.fragment and session.follows != message.version:
            # After a restart the server learns here which workers follow the versions.
            session.follows = message.version
            self.state.keep_for_followers()
        upload = self._uploads.get(worker)
        if upload is not None and upload.seq == message.number:
            self._want(session, upload, upload.window.ask_again())
            return
        if meta["is_start"]:
            if self.state.coordinator is not None:
                self._send_outcome(session, Outcome(message.number, self.state.version, 0))
            elif any(u.is_start for u in self._uploads.values()):
                self._send(session.peer, Message(Kind.WAIT))
            else:
                self._admit(session, message)
            return
        if self.state.coordinator is None:
            self._send(session.peer, Message(Kind.UNKNOWN))
            return
        known = self.state.coordinator.outcome_of(worker, message.number)
        if known is None:
            known = self.state.coordinator.refusal(worker, message.number, message.version)
            if known is not None:
                self._refuse(session, message, known)
                return
        if known is not None:
            self._send_outcome(session, known)
        elif time.monotonic() < session.barred_until or not self._admit(session, message):
            self._queue[worker] = message
            self._send(session.peer, Message(Kind.WAIT))

    def _refuse(self, session: Session, message: Message, outcome: Outcome) -> None:
        assert self.state.coordinator is not None
        self.state.coordinator.finish(session.worker, outcome, time.monotonic())
        self.state.log_update(session.worker, message.version, message.meta, outcome, [])
        self._send_outcome(session, outcome)

    def _admit(self, session: Session, message: Message) -> bool:
        """Ask for the runs of an update if there is room; return whether there is.

        Raises:
            ProtocolError: If the server can never take this update.
        """
        meta = message.meta
        try:
            wire = WireFormat(meta["wire"], meta["block_size"])
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if meta["is_start"] and wire.name != "fp32":
            raise ProtocolError(f"parameters are sent as fp32, got {wire.name}")
        layouts = session.layouts(wire)
        self._drop_upload(session.worker)
        sizes = [layout.payload_bytes for layout in layouts]
        try:
            # Parameters to start from fit into memory: the server has no model yet.
            payloads = self.state.memory.take(sizes, may_use_file=not meta["is_start"])
            # Updates that are kept for followers make room.
            while payloads is None and self.state.forget_oldest():
                payloads = self.state.memory.take(sizes)
        except OSError as error:
            self.state.status.count_refusal("no room")
            raise ProtocolError(
                f"there is no file for an update of {sum(sizes)} bytes: {error.strerror}"
            ) from None
        if payloads is None:
            return False
        self._queue.pop(session.worker, None)
        upload = Upload(
            session.worker,
            message.number,
            message.version,
            meta["steps"],
            meta["seconds"],
            meta["is_start"],
            layouts,
            payloads,
            time.monotonic(),
        )
        self._uploads[session.worker] = upload
        self._want(session, upload, upload.window.ask())
        return True

    def _want(self, session: Session, upload: Upload, requests: list[tuple[Position, int]]) -> None:
        for (_, fragment, run), count in requests:
            self._send(session.peer, Message(Kind.WANT, upload.seq, 0, fragment, run, count=count))

    def receive_run(self, session: Session, message: Message) -> None:
        upload = self._uploads.get(session.worker)
        if upload is None or upload.seq != message.number:
            return
        if Position(0, message.fragment, message.run) not in upload.window.asked:
            return  # This run was asked for twice, and has arrived before.
        try:
            wrong = upload.put(message.fragment, message.run, message.body, time.monotonic())
            if upload.window.is_empty:
                upload.read_through()
        except OSError as error:
            self._lose(session, upload, error)
            return
        if wrong:
            self.state.status.count_refusal("size")
            self._send(session.peer, Message(Kind.REFUSED, meta={"reason": wrong}))
            return
        self._want(session, upload, upload.window.ask())
        if upload.window.is_empty:
            del self._uploads[session.worker]
            self._complete(session, upload)

    def _lose(self, session: Session, upload: Upload, error: OSError) -> None:
        """Refuse an update whose file cannot be written or read; no part of it is applied."""
        assert self.state.coordinator is not None
        self._drop_upload(upload.worker)
        self.state.report_lost_file(upload.worker, upload.seq, error)
        reason = f"its file on the server cannot be written or read: {error.strerror or error}"
        outcome = self.state.coordinator.lose(upload.worker, upload.seq, reason, time.monotonic())
        self.state.log_update(upload.worker, upload.version, upload.meta, outcome, [])
        self._send_outcome(session, outcome)
        self.admit_waiting()

    def _complete(self, session: Session, upload: Upload) -> None:
        if upload.is_start:
            self._take_start(session, upload)
            return
        assert self.state.coordinator is not None
        update = Update(
            upload.worker,
            upload.seq,
            upload.version,
            upload.steps,
            upload.seconds,
            upload.payloads,
            upload.layouts,
            upload.garbage,
        )
        begin = time.perf_counter()
        with span("arrive", 0, self.state.version):
            outcome = self.state.coordinator.arrive(
                update, time.monotonic(), lambda: self.state.memory.give_back(upload.payloads)
            )
        self.state.status.apply_s += time.perf_counter() - begin
        # Released payloads keep their bytes until the server asks for the next update.
        self.state.log_update(upload.worker, upload.version, upload.meta, outcome, upload.payloads)
        self._send_outcome(session, outcome)
        self.admit_waiting()

    def _take_start(self, session: Session, upload: Upload) -> None:
        pairs = list(zip(upload.payloads, upload.layouts, strict=True))
        if self.state.coordinator is None:
            if upload.garbage:
                self.state.status.count_refusal("non-finite")
                reason = "the worker's parameters are not finite"
                self._send(session.peer, Message(Kind.REFUSED, meta={"reason": reason}))
                self.state.memory.give_back(upload.payloads)
                return
            outers = [decode(payload[:], layout) for payload, layout in pairs]
            # Free the payloads first: the rule's buffers need the memory.
            self.state.memory.give_back(upload.payloads)
            pairs.clear()
            upload.payloads.clear()
            self.state.open_model(session.sizes, session.layout, outers)
            self.state.unexchanged = session.unexchanged
            # Workers with another model must say HELLO again, and are then refused.
            for other in self.state.sessions.all():
                if _model_of(other) != _model_of(session):
                    self.state.sessions.drop(other.peer)
            self.state.save()
        self.state.memory.give_back(upload.payloads)
        self._send_outcome(session, Outcome(upload.seq, self.state.version, 0))

    def _send_outcome(self, session: Session, outcome: Outcome) -> None:
        meta = {
            "staleness": outcome.staleness,
            "refusal": outcome.refusal,
            "reason": outcome.reason,
        }
        self._send(session.peer, Message(Kind.OUTCOME, outcome.seq, outcome.version, meta=meta))

    def _drop_upload(self, worker: str) -> None:
        upload = self._uploads.pop(worker, None)
        if upload is not None:
            self.state.memory.give_back(upload.payloads)

    def admit_waiting(self) -> None:
        """Ask for the updates that wait, while there is room; a refusal goes to its own worker."""
        if not self._queue:
            self.state.problem = ""
        for worker, message in list(self._queue.items()):
            session = self.state.sessions.of(worker)
            if session is None:
                self._queue.pop(worker, None)
            elif time.monotonic() < session.barred_until:
                continue
            elif not self._admit_or_refuse(session, message):
                return

    def _admit_or_refuse(self, session: Session, message: Message) -> bool:
        try:
            return self._admit(session, message)
        except ProtocolError as error:
            self._queue.pop(session.worker, None)
            self._send(session.peer, Message(Kind.REFUSED, meta={"reason": str(error)}))
            return True


def _model_of(session: Session) -> tuple[list[int], int, list[int] | None]:
    """Return what tells a worker's model from another worker's."""
    return session.sizes, session.layout, session.unexchanged
