"""Updates on their way to the server, and parameters on their way to workers, run by run.

An update is applied when it is complete, and then answered. A version is held while a worker reads
it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..base.trace import span
from ..ops.wire import Layout, WireFormat
from .coordinator import Outcome, Update
from .messages import Kind, Message, ProtocolError
from .model import decode
from .payloads import Payload, Upload
from .rules import FusedState
from .sessions import BEGIN_S, NOTHING, Host, Send, Session
from .state import ServerState
from .window import Position, bodies, is_within

# A worker that sends nothing for so many seconds loses the memory that the server keeps for it.
STALL_S = 20.0


class Uploads(ABC):
    """Receives payloads at a server, which asks for them run by run.

    Args:
        host: The server's state.
        send: Sends a message to a connection; returns False if that fails.

    Attributes:
        sender: The word for a process that sends payloads, for sentences.
    """

    sender = "worker"

    def __init__(self, host: Host, send: Send) -> None:
        self._host, self._send = host, send
        # The uploads under way, by worker and by the place that ``_place`` returns.
        self._uploads: dict[tuple[str, int], Upload] = {}

    @abstractmethod
    def _place(self, message: Message) -> int | None:
        """Return which of the worker's uploads a message brings runs of, as a number; or None."""

    @abstractmethod
    def _refuse_run(self, session: Session, upload: Upload, place: int, wrong: str) -> None:
        """Refuse runs that the server has not asked for, or of a wrong size; ``wrong`` says why."""

    @abstractmethod
    def _complete(self, session: Session, upload: Upload, place: int) -> None:
        """Called when all runs of an upload have arrived."""

    def _lose(self, session: Session, upload: Upload, error: OSError) -> None:
        """Give up an upload whose file cannot be written or read."""
        raise error

    def forget(self, worker: str) -> None:
        """Drop what a worker has begun to send."""
        for key in [key for key in self._uploads if key[0] == worker]:
            self._drop(*key)

    def drop_stalled(self, now: float) -> list[str]:
        """Drop the uploads that got nothing for ``STALL_S``; return their workers."""
        stalled = [key for key, each in self._uploads.items() if now - each.last_seen > STALL_S]
        for key in stalled:
            self._drop(*key)
            self._host.status.count_refusal("stalled")
        return [worker for worker, _ in stalled]

    def _drop(self, worker: str, place: int) -> None:
        upload = self._uploads.pop((worker, place), None)
        if upload is not None:
            self._host.memory.give_back(upload.payloads)

    def _begin(
        self,
        session: Session,
        place: int,
        question: Message,
        layouts: list[Layout],
        payloads: list[Payload],
        first: int = 0,
        last_seen: float | None = None,
    ) -> None:
        """Begin an upload that a worker has offered: ask for its first runs."""
        last_seen = time.monotonic() if last_seen is None else last_seen
        upload = Upload(session.worker, question, layouts, payloads, last_seen, first)
        self._uploads[session.worker, place] = upload
        self._want(session, upload, upload.window.ask())

    def _want(self, session: Session, upload: Upload, requests: list[tuple[Position, int]]) -> None:
        for (_, fragment, run), count in requests:
            place = (upload.seq, 0, upload.first + fragment, run)
            self._send(session.peer, Message(Kind.WANT, *place, count=count))

    def receive_run(self, session: Session, message: Message) -> None:
        """Take runs that the server has asked for, and ask for the next ones."""
        place = self._place(message)
        upload = None if place is None else self._uploads.get((session.worker, place))
        if place is None or upload is None or upload.seq != message.number:
            return
        fragment = message.fragment - upload.first
        if Position(0, fragment, message.run) not in upload.window.asked:
            return  # This run has arrived before, after two requests; or nobody asked for it.
        try:
            wrong = upload.put(fragment, message.run, message.body, time.monotonic())
            if upload.window.is_empty:
                upload.read_through()
        except OSError as error:
            self._lose(session, upload, error)
            return
        if wrong:
            self._refuse_run(session, upload, place, wrong)
            return
        self._want(session, upload, upload.window.ask())
        if upload.window.is_empty:
            del self._uploads[session.worker, place]
            self._complete(session, upload, place)

    def _refuse(self, session: Session, reason: str, kind: str = "") -> None:
        """Send a worker REFUSED, with a reason, for its last message."""
        if kind:
            self._host.status.count_refusal(kind)
        self._send(session.peer, Message(Kind.REFUSED, meta={"reason": reason}))

    def _parameters(self, session: Session, upload: Upload) -> list[Tensor] | None:
        """Return the parameters to start from, fp32; refuse them if they are not finite."""
        flats, payloads = [], upload.payloads[::-1]
        upload.payloads = []
        if not upload.garbage:
            # Give each payload back as soon as it is decoded, to save memory.
            for layout in upload.layouts:
                flats.append(decode(payloads[-1][:], layout))
                self._host.memory.give_back([payloads.pop()])
        self._host.memory.give_back(payloads)
        if upload.garbage or not all(bool(flat.isfinite().all()) for flat in flats):
            self._refuse(session, f"the {self.sender}'s parameters are not finite", "non-finite")
            return None
        return flats


class Receiver(Uploads):
    """Receive the updates of workers; a worker sends one at a time."""

    def __init__(self, state: ServerState, send: Send) -> None:
        super().__init__(state, send)
        self.state = state
        self._queue: dict[str, Message] = {}

    def _place(self, message: Message) -> int:
        return 0

    @property
    def is_anyone_waiting(self) -> bool:
        """Whether an update waits for memory whose worker is not barred at present."""
        sessions = [self.state.sessions.of(worker) for worker in self._queue]
        now = time.monotonic()
        return any(session is not None and now >= session.barred_until for session in sessions)

    def forget(self, worker: str) -> None:
        """Drop the update that a worker has begun to send, or waits to send."""
        super().forget(worker)
        self._queue.pop(worker, None)

    def drop_stalled(self, now: float) -> list[str]:
        """Drop stalled uploads; if others wait for memory, bar their workers for a while."""
        stalled = super().drop_stalled(now)
        for session in map(self.state.sessions.of, stalled):
            if session is not None and self.is_anyone_waiting:
                session.barred_until = now + STALL_S
        return stalled

    def push(self, session: Session, message: Message) -> None:
        """Answer a worker that has an update, or that repeats its PUSH."""
        worker, coordinator = session.worker, self.state.coordinator
        if message.fragment and session.follows != message.version:
            # After a restart the server learns here which workers follow the versions.
            session.follows = message.version
            self.state.keep_for_followers()
        upload = self._uploads.get((worker, 0))
        if upload is not None and upload.seq == message.number:
            self._want(session, upload, upload.window.ask_again())
            return
        if message.meta["is_start"]:
            self._push_start(session, message)
            return
        if coordinator is None:
            self._send(session.peer, Message(Kind.UNKNOWN))
            return
        known = coordinator.outcome_of(worker, message.number)
        if known is None:
            known = coordinator.refusal(worker, message.number, message.version)
            if known is not None:
                coordinator.finish(worker, known, time.monotonic())
                self.state.log_update(worker, message, known)
        if known is not None:
            self._send_outcome(session, known)
        elif time.monotonic() < session.barred_until or not self._admit(session, message):
            self._queue[worker] = message
            self._send(session.peer, Message(Kind.WAIT))

    def _push_start(self, session: Session, message: Message) -> None:
        if self.state.coordinator is not None:
            self._send_outcome(session, Outcome(message.number, self.state.version, 0))
        elif any(upload.question.meta["is_start"] for upload in self._uploads.values()):
            self._send(session.peer, Message(Kind.WAIT))
        else:
            self._admit(session, message)

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
        self._drop(session.worker, 0)
        sizes = [layout.payload_bytes for layout in layouts]
        try:
            # Parameters to start from go to memory, as the server has no model there yet.
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
        self._begin(session, 0, message, layouts, payloads)
        return True

    def _refuse_run(self, session: Session, upload: Upload, place: int, wrong: str) -> None:
        self._refuse(session, wrong, "size")

    def _lose(self, session: Session, upload: Upload, error: OSError) -> None:
        """Refuse an update whose file cannot be written or read; no part of it is applied."""
        assert self.state.coordinator is not None
        self._drop(upload.worker, 0)
        self.state.report_lost_file(upload.worker, upload.seq, error)
        reason = f"its file on the server cannot be written or read: {error.strerror or error}"
        outcome = self.state.coordinator.lose(upload.worker, upload.seq, reason, time.monotonic())
        self.state.log_update(upload.worker, upload.question, outcome)
        self._send_outcome(session, outcome)
        self.admit_waiting()

    def _complete(self, session: Session, upload: Upload, place: int) -> None:
        push = upload.question
        if push.meta["is_start"]:
            self._take_start(session, upload)
            return
        assert self.state.coordinator is not None
        update = Update(
            upload.worker,
            upload.seq,
            push.version,
            push.meta["steps"],
            push.meta["seconds"],
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
        self.state.log_update(upload.worker, push, outcome, upload.payloads)
        self._send_outcome(session, outcome)
        self.admit_waiting()

    def _take_start(self, session: Session, upload: Upload) -> None:
        if self.state.coordinator is None:
            outers = self._parameters(session, upload)
            if outers is None:
                return
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
            self._refuse(session, str(error))
            return True


def _model_of(session: Session) -> tuple[list[int], int, list[int] | None]:
    """Return the values that are equal for two workers with the same model."""
    return session.sizes, session.layout, session.unexchanged


_FP32 = WireFormat("fp32")
# While memory is short, a download is ended after ``PATIENCE_S``. This rule and ``PAUSE_S``,
# together, end at most ``MAX_EVICTIONS`` downloads of a worker.
PATIENCE_S, MAX_EVICTIONS = 30.0, 2
# Seconds that a new reader waits for readers of an older version to end. While an older version is
# read, the server computes the newer one anew for each reader.
TURN_S = 0.1
# If others wait, a download is also ended after so many seconds without a new request.
PAUSE_S = 3.0
# A worker that has not begun to fetch an older version within ``Session.patience_s`` must wait this
# many times as long before it gets another. Its patience is doubled, as its link may be slow.
_WAITS = 4.0


class Sender:
    """Lets workers fetch the version from which their next round starts.

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
                # Asking in another way is no progress, so the worker's times go on.
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
            # For a reader, only requests for new runs are progress; repeated questions are not.
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
