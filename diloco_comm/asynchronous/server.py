"""The server: one thread, one ROUTER socket, one shared model.

Everything large is asked for run by run by the side that receives it, so no peer can make the
other hold what it did not ask for. Requests are repeated until they are answered and answering
one twice changes nothing, so lost connections and restarts need no special case.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from torch import Tensor

from ..trace import span
from ..wire import WireFormat
from . import keys as curve
from .coordinator import Coordinator, Outcome, Update, decode
from .garbage import find_garbage
from .keys import is_loopback
from .link import WINDOW
from .messages import MAX_BODY, MAX_JSON, Kind, Message, ProtocolError, pack, parse
from .model import SharedModel
from .rules import ServerRule
from .sessions import Session, Sessions
from .status import Status
from .storage import Storage
from .uploads import PayloadMemory, Upload

logger = logging.getLogger(__name__)

# Who neither sends nor fetches for so long while memory is kept for it loses that memory.
STALL_S = 20.0
# A whole download may keep others waiting for so long, if memory is short, this many times.
PATIENCE_S, MAX_EVICTIONS = 30.0, 2
# A reader that asks for nothing for so long makes room for others that wait, as often.
PAUSE_S = 3.0
MAX_READERS = 8
# What a process with sockets and threads takes beside its tensors.
OVERHEAD_BYTES = 32 * 2**20
# Updates on their way get at least this much, and replies twice as much: beside a small model the
# process itself is large.
SMALL_BYTES = 8 * 2**20
_POLL_MS = 100


class AsyncServer:
    """Own the outer parameters; workers attach with ``AsyncDiLoCo``.

    Args:
        rule: What an arriving update does.
        address: ``tcp://host:port``; port 0 picks a free one, see ``address`` afterwards.
        sync_every, dylu, min_steps, grace: See ``Coordinator``.
        parameters: Initial parameters, fp32 [num_elements] for each fragment; without them, and
            without a snapshot, those of the first worker are taken.
        snapshot: Folder of the snapshot and the journal; None keeps nothing.
        snapshot_every: Updates between two snapshots.
        keys: Folder of CURVE keys (``diloco-comm serve keygen``).
        insecure: Allow an address that other machines reach, without keys.
        model_sizes: Memory of the server in fp32 models: of the rule's buffers, and of updates
            that are on their way. One update always fits.
        max_parameters: Larger models are refused.
        impl: Force an implementation of the operators.

    Raises:
        ValueError: For arguments that cannot be, and for an address that is open to the network
            without keys.
        OSError: If the address cannot be listened on.
    """

    def __init__(
        self,
        rule: ServerRule,
        *,
        address: str = "tcp://127.0.0.1:0",
        sync_every: int = 50,
        dylu: bool = False,
        min_steps: int = 1,
        grace: float = 0.0,
        parameters: Sequence[Tensor] | None = None,
        snapshot: str | Path | None = None,
        snapshot_every: int = 100,
        keys: str | Path | None = None,
        insecure: bool = False,
        model_sizes: float = 4.0,
        max_parameters: int = 4_000_000_000,
        impl: str = "",
    ) -> None:
        if keys is None and not insecure and not is_loopback(address):
            raise ValueError(
                f"{address} can be reached from other machines: give keys= (made by `diloco-comm "
                "serve keygen`), or insecure=True to let in whoever finds the port"
            )
        if snapshot_every < 1:
            raise ValueError(f"snapshot_every must be at least 1, got {snapshot_every}")
        if snapshot is not None and rule.compensation:
            raise ValueError("delay compensation cannot be restarted: give no snapshot with it")
        self.rule, self.impl = rule, impl
        self.snapshot_every, self.max_parameters = snapshot_every, max_parameters
        self._model_sizes = model_sizes
        self._numbers = {
            "sync_every": sync_every,
            "dylu": dylu,
            "min_steps": min_steps,
            "grace": grace,
        }
        Coordinator(SharedModel([1], rule), **self._numbers)  # type: ignore[arg-type]
        self.coordinator: Coordinator | None = None
        self._layout: int | None = None
        self._memory = PayloadMemory(0)
        self._max_readers = MAX_READERS
        self._uploads: dict[str, Upload] = {}
        self._queue: dict[str, Message] = {}
        self._sessions = Sessions()
        self.status = Status()
        self._storage = None if snapshot is None else Storage(Path(snapshot))
        self._saved_version = -1
        if self._storage is not None and self._storage.exists:
            self._restore(self._storage)
        elif parameters is not None:
            flats = [p.detach().flatten().float() for p in parameters]
            self._open_model([flat.numel() for flat in flats], None)
            self._model.initialise(flats)
            self._save()
        self._context = zmq.Context()
        self._socket = self._listen(address, keys)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._has_served = False

    def _listen(self, address: str, keys: str | Path | None) -> zmq.Socket:
        socket = self._context.socket(zmq.ROUTER)
        self._guard = None
        socket.linger = 0
        socket.router_mandatory = True
        socket.maxmsgsize = max(MAX_BODY, MAX_JSON)
        # Room for a window of runs twice: ZeroMQ learns late of what has been read.
        socket.sndhwm = socket.rcvhwm = 4 * WINDOW
        socket.heartbeat_ivl, socket.heartbeat_timeout = 5_000, 30_000
        socket.handshake_ivl = 5_000
        socket.setsockopt(zmq.BACKLOG, 1024)
        try:
            if keys is not None:
                self._guard = curve.protect_server(self._context, socket, Path(keys))
            socket.bind(address)
        except zmq.ZMQError as error:
            self._close_socket(socket)
            raise OSError(error.errno, f"cannot listen on {address}: {error}") from None
        except ValueError:
            self._close_socket(socket)
            raise
        return socket

    def _close_socket(self, socket: zmq.Socket) -> None:
        socket.close(0)
        if self._guard is not None:
            self._guard.stop()
        self._context.term()

    # --------------------------------------------------------------------------------- the model

    def _open_model(
        self, sizes: Sequence[int], layout: int | None, outers: Sequence[Tensor] | None = None
    ) -> None:
        model = SharedModel(sizes, self.rule, outers=outers, impl=self.impl)
        self.coordinator = Coordinator(model, **self._numbers)  # type: ignore[arg-type]
        self._layout = layout
        model_bytes = 4 * model.num_elements
        # A reader has one window of runs on their way; all together take a quarter of a model.
        window = min(WINDOW * MAX_BODY, max(1, model_bytes))
        quarter = max(model_bytes // 4, 2 * SMALL_BYTES)
        self._max_readers = min(MAX_READERS, max(1, quarter // window))
        room = int(self._model_sizes * model_bytes) - model.buffer_bytes - OVERHEAD_BYTES
        room -= self._max_readers * window
        self._memory.budget_bytes = max(SMALL_BYTES, room)

    @property
    def _model(self) -> SharedModel:
        assert self.coordinator is not None
        return self.coordinator.model

    def _restore(self, storage: Storage) -> None:
        header, tensors = storage.load()
        if header["rule"] != self.rule.config():
            raise ValueError(
                f"the snapshot was made with the rule {header['rule']}, this one is "
                f"{self.rule.config()}"
            )
        self._open_model(header["sizes"], header["layout"])
        assert self.coordinator is not None
        self.coordinator.model.load(tensors, header["model"])
        self.coordinator.load_ledger(header["ledger"])
        self._saved_version = self.coordinator.model.version
        for record, body in storage.replay(self._saved_version):
            self._replay(record, body)
        logger.info("restored version %d", self.coordinator.model.version)

    def _replay(self, record: dict[str, Any], body: Tensor) -> None:
        assert self.coordinator is not None
        outcome = Outcome(**record["outcome"])
        if outcome.refusal:
            self.coordinator.finish(record["worker"], outcome, 0.0)
        else:
            layouts = self.coordinator.model.layouts(
                WireFormat(record["wire"], record["block_size"])
            )
            payloads = list(body.split([layout.payload_bytes for layout in layouts]))
            update = Update(
                record["worker"],
                outcome.seq,
                record["version"],
                record["steps"],
                record["seconds"],
                payloads,
                layouts,
            )
            self.coordinator.arrive(update, 0.0)
        self.coordinator.leave(record["worker"])

    def _save(self) -> None:
        if self._storage is None or self.coordinator is None:
            return
        model = self.coordinator.model
        header = {
            "rule": self.rule.config(),
            "sizes": list(model.sizes),
            "layout": self._layout,
            "model": model.scalars(),
            "ledger": self.coordinator.ledger(),
        }
        self._storage.save(model.version, header, model.tensors())
        self._saved_version = model.version

    def parameters(self) -> list[Tensor]:
        """Return copies of the shared parameters; only while the server does not run."""
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("the server runs: stop() it first, or attach a worker")
        if self.coordinator is None:
            raise RuntimeError("the server has no parameters yet: no worker has attached")
        return self.coordinator.model.read_all()

    # ---------------------------------------------------------------------------------- running

    def start(self) -> AsyncServer:
        """Serve in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="diloco-server", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self.serve()
        except BaseException as error:
            self._error = error
            raise

    def serve(self, on_idle: Callable[[], None] = lambda: None) -> None:
        """Serve in this thread until ``stop``, then write a snapshot and close the socket.

        Args:
            on_idle: Called several times a second.
        """
        self._has_served = True
        try:
            idle_at = 0.0
            while not self._stop.is_set():
                self._turn()
                if time.monotonic() >= idle_at:
                    self._housekeeping()
                    on_idle()
                    idle_at = time.monotonic() + _POLL_MS / 1000
        finally:
            self._close()

    def _close(self) -> None:
        self._sessions.let_go_all(self.coordinator)
        if self._saved_version != self._version:
            self._save()
        if self._storage is not None:
            self._storage.close()
        self._close_socket(self._socket)

    @property
    def _version(self) -> int:
        return 0 if self.coordinator is None else self.coordinator.model.version

    def stop_soon(self) -> None:
        """Make ``serve`` return; also from a signal handler."""
        self._stop.set()

    def stop(self) -> None:
        """End ``serve``; a server that runs in its own thread has ended when this returns.

        Raises:
            BaseException: What ended the server's thread, if something did.
        """
        self._stop.set()
        if self._thread is None and not self._has_served:
            self._has_served = True
            self._close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def __enter__(self) -> AsyncServer:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _turn(self) -> None:
        """Deal with what has come, at most some messages, and let go on who may."""
        timeout = _POLL_MS
        closes_at = None if self.coordinator is None else self.coordinator.grace.closes_at
        if closes_at is not None:
            timeout = min(timeout, max(0, int(1000 * (closes_at - time.monotonic())) + 1))
        if self._socket.poll(timeout):
            for _ in range(64):
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._receive(frames)
        self._release()

    def _receive(self, frames: list[zmq.Frame]) -> None:
        peer = frames[0].bytes
        self.status.received_bytes += sum(len(frame) for frame in frames[1:])
        try:
            message = parse([frame.buffer for frame in frames[1:]])
            session = self._sessions.get(peer)
            if message.kind in (Kind.HELLO, Kind.STATUS):
                self._greet(peer, message)
            elif session is None:
                self._send(peer, Message(Kind.UNKNOWN))
            else:
                session.seen_at = time.monotonic()
                self._serve(session, message)
        except ProtocolError as error:
            self.status.count_refusal("garbage")
            self._send(peer, Message(Kind.REFUSED, meta={"reason": str(error)}))

    def _send(self, peer: bytes, message: Message) -> bool:
        frames = pack(message)
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=len(frames) < 2)
        except zmq.ZMQError as error:
            # The peer is gone, or does not read: it will ask again if it comes back.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if error.errno == zmq.EHOSTUNREACH:
                self._lose(peer)
            return False
        self.status.sent_bytes += sum(len(frame) for frame in frames)
        return True

    def _lose(self, peer: bytes) -> None:
        session = self._sessions.drop(peer)
        if session is not None:
            session.let_go(self.coordinator)
            if self.coordinator is not None and self._sessions.of(session.worker) is None:
                self.coordinator.leave(session.worker)

    # -------------------------------------------------------------------------------- messages

    def _greet(self, peer: bytes, message: Message) -> None:
        if message.kind == Kind.STATUS:
            report = self.status.report(self.coordinator, self._sessions, self._memory, self.rule)
            self._send(peer, Message(Kind.REPORT, meta={"status": report}))
            return
        worker, sizes = message.meta["worker"], message.meta["sizes"]
        if sum(sizes) > self.max_parameters:
            raise ProtocolError(
                f"the model has {sum(sizes)} parameters, this server takes {self.max_parameters}"
            )
        if self.coordinator is not None:
            self._check_layout(sizes, message.meta["layout"])
        older = self._sessions.of(worker)
        if older is not None and older.peer != peer:
            self._sessions.drop(older.peer)
            older.let_go(self.coordinator)
        if older is None or older.peer != peer:
            # A successor of the same name may send other bytes under the same number.
            self._drop_upload(worker)
            self._queue.pop(worker, None)
        self._sessions.add(Session(peer, worker, sizes, message.meta["layout"], time.monotonic()))
        last = 0
        if self.coordinator is not None:
            last = self.coordinator.join(worker).last.seq
        meta = {
            "needs_start": self.coordinator is None,
            "rule": self.rule.config(),
            "sync_every": self._numbers["sync_every"],
        }
        self._send(peer, Message(Kind.WELCOME, last, self._version, meta=meta))

    def _drop_upload(self, worker: str) -> None:
        upload = self._uploads.pop(worker, None)
        if upload is not None:
            self._memory.give_back(upload.payloads)

    def _check_layout(self, sizes: list[int], layout: int) -> None:
        assert self.coordinator is not None
        own = list(self.coordinator.model.sizes)
        if sizes != own:
            self.status.count_refusal("layout")
            raise ProtocolError(
                f"the model has {sum(sizes)} parameters in fragments of {_shown(sizes)}, the "
                f"server's has {sum(own)} in {_shown(own)}"
            )
        if self._layout is None:
            self._layout = layout
        if layout != self._layout:
            self.status.count_refusal("layout")
            raise ProtocolError(
                "the model has as many parameters as the server's, but other names, shapes or "
                "dtypes"
            )

    def _serve(self, session: Session, message: Message) -> None:
        handle = {
            Kind.PUSH: self._push,
            Kind.RUN: self._run_came,
            Kind.PULL: self._pull,
            Kind.GET: self._get,
            Kind.DONE: self._done,
            Kind.LEAVE: self._leave,
        }.get(message.kind)
        if handle is None:
            raise ProtocolError(f"{message.kind.name} is not for a server")
        handle(session, message)

    def _push(self, session: Session, message: Message) -> None:
        """A worker has an update, or says so again."""
        worker, meta = session.worker, message.meta
        upload = self._uploads.get(worker)
        if upload is not None and upload.seq == message.number:
            for fragment, run in list(upload.asked):
                self._want(session, upload, fragment, run)
            return
        if meta["is_start"]:
            if self.coordinator is not None:
                self._tell(session, Outcome(message.number, self._version, 0))
            elif any(u.is_start for u in self._uploads.values()):
                self._send(session.peer, Message(Kind.WAIT))
            else:
                self._admit(session, message)
            return
        if self.coordinator is None:
            self._send(session.peer, Message(Kind.UNKNOWN))
            return
        known = self.coordinator.outcome_of(worker, message.number)
        if known is None:
            known = self.coordinator.refusal(worker, message.number, message.version)
            if known is not None:
                self._refuse(session, message, known)
                return
        if known is not None:
            self._tell(session, known)
        elif not self._admit(session, message):
            self._queue[worker] = message
            self._send(session.peer, Message(Kind.WAIT))

    def _refuse(self, session: Session, message: Message, outcome: Outcome) -> None:
        assert self.coordinator is not None
        self.coordinator.finish(session.worker, outcome, time.monotonic())
        self._log_update(session.worker, message.version, message.meta, outcome, [])
        self._tell(session, outcome)

    def _admit(self, session: Session, message: Message) -> bool:
        """Ask for an update if there is memory for it."""
        meta = message.meta
        try:
            wire = WireFormat(meta["wire"], meta["block_size"])
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if meta["is_start"] and wire.name != "fp32":
            raise ProtocolError(f"parameters are sent as fp32, got {wire.name}")
        layouts = session.layouts(wire)
        self._drop_upload(session.worker)
        payloads = self._memory.take(layout.payload_bytes for layout in layouts)
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
        for fragment, run in upload.ask():
            self._want(session, upload, fragment, run)
        return True

    def _want(self, session: Session, upload: Upload, fragment: int, run: int) -> None:
        self._send(session.peer, Message(Kind.WANT, upload.seq, 0, fragment, run))

    def _run_came(self, session: Session, message: Message) -> None:
        upload = self._uploads.get(session.worker)
        if upload is None or upload.seq != message.number:
            return
        position = (message.fragment, message.run)
        if position not in upload.asked:
            return  # It was asked for twice.
        wrong = upload.put(*position, message.body, time.monotonic())
        if wrong:
            self.status.count_refusal("size")
            self._send(session.peer, Message(Kind.REFUSED, meta={"reason": wrong}))
            return
        for fragment, run in upload.ask():
            self._want(session, upload, fragment, run)
        if upload.is_complete:
            del self._uploads[session.worker]
            self._complete(session, upload)

    def _complete(self, session: Session, upload: Upload) -> None:
        if upload.is_start:
            self._take_start(session, upload)
            return
        assert self.coordinator is not None
        update = Update(
            upload.worker,
            upload.seq,
            upload.version,
            upload.steps,
            upload.seconds,
            upload.payloads,
            upload.layouts,
        )
        begin = time.perf_counter()
        with span("arrive", 0, self._version):
            outcome = self.coordinator.arrive(
                update, time.monotonic(), lambda: self._memory.give_back(upload.payloads)
            )
        self.status.apply_s += time.perf_counter() - begin
        wire = upload.layouts[0].wire
        meta = {
            "wire": wire.name,
            "block_size": wire.block_size,
            "steps": upload.steps,
            "seconds": upload.seconds,
        }
        # The buffers are untouched until the next update is asked for, whoever has them.
        self._log_update(upload.worker, upload.version, meta, outcome, upload.payloads)
        self._tell(session, outcome)
        self._admit_waiting()

    def _take_start(self, session: Session, upload: Upload) -> None:
        pairs = list(zip(upload.payloads, upload.layouts, strict=True))
        if self.coordinator is None:
            if any(find_garbage(payload, layout) for payload, layout in pairs):
                self.status.count_refusal("non-finite")
                reason = "the worker's parameters are not finite"
                self._send(session.peer, Message(Kind.REFUSED, meta={"reason": reason}))
                self._memory.give_back(upload.payloads)
                return
            outers = [decode(payload, layout) for payload, layout in pairs]
            # The rule's buffers take the place of what was sent.
            self._memory.give_back(upload.payloads)
            pairs.clear()
            upload.payloads.clear()
            self._open_model(session.sizes, session.layout, outers)
            self._save()
        self._memory.give_back(upload.payloads)
        self._tell(session, Outcome(upload.seq, self._version, 0))

    def _log_update(
        self,
        worker: str,
        version: int,
        meta: dict[str, Any],
        outcome: Outcome,
        payloads: Sequence[Tensor],
    ) -> None:
        """Write an update down before its worker learns of it."""
        if self._storage is None or outcome.refusal in ("out of order", "from the future"):
            return
        record = {
            "worker": worker,
            "version": version,
            "outcome": outcome.__dict__,
            **{name: meta[name] for name in ("wire", "block_size", "steps", "seconds")},
        }
        self._storage.append(record, [] if outcome.refusal else payloads)

    def _tell(self, session: Session, outcome: Outcome) -> None:
        meta = {
            "staleness": outcome.staleness,
            "refusal": outcome.refusal,
            "reason": outcome.reason,
        }
        self._send(session.peer, Message(Kind.OUTCOME, outcome.seq, outcome.version, meta=meta))

    # ------------------------------------------------------------------------------- downloads

    def _pull(self, session: Session, message: Message) -> None:
        """A worker asks for parameters; who waits in a grace period goes on waiting."""
        if self.coordinator is None:
            self._send(session.peer, Message(Kind.UNKNOWN))
        elif session.held is not None:
            self._ready(session)
        elif not self.coordinator.grace.is_waiting(session.worker):
            session.hold(self.coordinator, self.coordinator.start(session.worker))
            self._ready(session)
        if session.held is None or not session.is_reading:
            self._send(session.peer, Message(Kind.WAIT))

    def _release(self) -> None:
        if self.coordinator is None:
            return
        for worker, steps in self.coordinator.released(time.monotonic()):
            session = self._sessions.of(worker)
            if session is not None:
                session.hold(self.coordinator, steps)
                self._ready(session)

    def _ready(self, session: Session) -> None:
        assert session.held is not None
        readers = [s for s in self._sessions.all() if s.is_reading]
        if session.is_reading or len(readers) < self._max_readers:
            session.is_reading = True
            meta = {"steps": session.steps}
            self._send(session.peer, Message(Kind.READY, 0, session.held, meta=meta))

    def _get(self, session: Session, message: Message) -> None:
        if session.held is None or session.held != message.version or not session.is_reading:
            self._send(session.peer, Message(Kind.GONE, 0, message.version))
            return
        assert self.coordinator is not None
        model = self.coordinator.model
        layouts = session.layouts(WireFormat("fp32"))
        if message.fragment >= len(layouts) or message.run >= layouts[message.fragment].num_runs:
            raise ProtocolError(f"there is no run {message.run} of fragment {message.fragment}")
        values = model.read(message.version, message.fragment, message.run)
        body = values.numpy().data.cast("B")
        self._send(
            session.peer,
            Message(Kind.DATA, 0, message.version, message.fragment, message.run, body=body),
        )

    def _done(self, session: Session, message: Message) -> None:
        if session.held == message.version:
            session.let_go(self.coordinator)
            self._after_reading()

    def _after_reading(self) -> None:
        for session in self._sessions.all():
            if session.held is not None and not session.is_reading:
                self._ready(session)
        self._admit_waiting()

    def _leave(self, session: Session, message: Message) -> None:
        if self.coordinator is not None:
            self.coordinator.leave(session.worker)
        self._lose(session.peer)
        self._after_reading()

    # ----------------------------------------------------------------------------- housekeeping

    def _admit_waiting(self) -> None:
        for worker, message in list(self._queue.items()):
            session = self._sessions.of(worker)
            if session is None:
                del self._queue[worker]
            elif not self._admit(session, message):
                return

    def _housekeeping(self) -> None:
        now = time.monotonic()
        for upload in list(self._uploads.values()):
            if now - upload.last_seen > STALL_S:
                self._drop_upload(upload.worker)
                self.status.count_refusal("stalled")
        holders = [session for session in self._sessions.all() if session.held is not None]
        is_full = any(not session.is_reading for session in holders)
        for session in holders:
            silent_s = now - max(session.seen_at, session.held_at)
            is_in_the_way = bool(self._queue) or (is_full and session.is_reading)
            is_slow = bool(self._queue) and now - session.held_at > PATIENCE_S
            is_slow |= is_in_the_way and silent_s > PAUSE_S
            is_slow &= session.evictions < MAX_EVICTIONS
            if silent_s > STALL_S or is_slow:
                session.evictions += is_slow
                session.let_go(self.coordinator)
        self._sessions.forget_silent(now)
        self._after_reading()
        is_due = self._storage is not None and (
            self._version - max(0, self._saved_version) >= self.snapshot_every
        )
        if is_due and self.coordinator is not None and self.coordinator.model.is_folded:
            self._save()


def _shown(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:4]))
    return f"[{shown}, ...]" if len(sizes) > 4 else f"[{shown}]"
