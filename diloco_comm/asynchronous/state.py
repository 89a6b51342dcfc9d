"""``ServerState``: an ``AsyncServer`` without its socket, with its model, workers and snapshots."""

from __future__ import annotations

import errno
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..base.checks import logger_of
from ..ops.wire import WireFormat
from .coordinator import Coordinator, Outcome, Update
from .keeper import Keeper
from .messages import MAX_NUMBER, UNCOUNTED, Kind, Message
from .model import SharedModel
from .payloads import Payload, PayloadFile, PayloadMemory, payload_files
from .rules import ServerRule
from .sessions import MAX_WORKERS, NOTHING, Host, Session
from .window import WINDOW_BYTES

# The status counts updates of this staleness or more together.
MAX_STALENESS = 64

logger = logger_of(__name__)

MAX_READERS = 8
# Memory of a server's process without its tensors.
OVERHEAD_BYTES = 32 * 2**20
# The least memory for updates that arrive; answers get twice as much. Less would save little, as
# the process itself is larger.
SMALL_BYTES = 8 * 2**20
# The least room beside the rule's buffers for data to and from workers, in sizes of the model.
MIN_ROOM = 0.5
# Seconds between two attempts to make a file for an update.
FILE_RETRY_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class ServerState(Host):
    """A server without its socket.

    Args:
        rule, snapshot, snapshot_every, model_sizes, impl: See ``AsyncServer``.
        numbers: The further arguments of ``Coordinator``.

    Attributes:
        coordinator: Applies updates to the model; None until the server has parameters.
        max_readers: Number of workers that may fetch parameters at the same time.
        problem: One sentence while an update waits for room on a disk, or for a file descriptor;
            else "".
        began: Version that the server restored from disk; -1 if it restored none.
    """

    def __init__(
        self,
        rule: ServerRule,
        numbers: dict[str, Any],
        *,
        snapshot: str | Path | None,
        snapshot_every: int,
        model_sizes: float,
        impl: str,
    ) -> None:
        if snapshot_every < 1:
            raise ValueError(f"snapshot_every must be at least 1, got {snapshot_every}")
        if snapshot is not None and rule.compensation:
            raise ValueError("delay compensation cannot be restarted: give no snapshot with it")
        Coordinator(SharedModel([1], rule), **numbers)
        sizes = _sizes_of(rule)
        if sizes + MIN_ROOM > model_sizes:
            raise ValueError(
                f"model_sizes is {model_sizes:g}, and the rule {type(rule).__name__} keeps "
                f"{sizes:g} models: it must be at least {sizes + MIN_ROOM:g}"
            )
        folder = None if snapshot is None else Path(snapshot)
        files = None if folder is None else partial(Keeper, folder, snapshot_every)
        super().__init__(PayloadMemory(0, self._make_files), files)
        self.rule, self.impl, self.numbers = rule, impl, numbers
        self._model_sizes, self._folder = model_sizes, folder
        self.coordinator: Coordinator | None = None
        self.max_readers, self.began = MAX_READERS, -1
        self.problem, self._retry_at = "", 0.0
        self._lost_file = ""  # the last update that a disk error cost, until another gets a file

    @property
    def model(self) -> SharedModel:
        assert self.coordinator is not None
        return self.coordinator.model

    @property
    def version(self) -> int:
        return 0 if self.coordinator is None else self.coordinator.model.version

    def forget_oldest(self) -> bool:
        """Release an update that is only kept for followers; False if there is none."""
        return self.coordinator is not None and self.model.forget_oldest()

    def keep_for_followers(self) -> None:
        """Keep the updates that following workers have not fetched, while memory allows."""
        if self.coordinator is None:
            return
        versions = [s.follows for s in self.sessions.all() if s.follows is not None]
        versions = [version for version in versions if version != NOTHING]
        self.model.keep_from(min(versions, default=None))

    def _make_files(self, sizes: list[int]) -> list[PayloadFile] | None:
        """Return payloads of these sizes in a file: in the snapshot's folder, or a temporary one.

        Returns:
            None while the disk is full, or no descriptor is free; ``problem`` then says so, and a
            later call tries again.

        Raises:
            OSError: If a file cannot be made for another reason.
        """
        if self.problem and time.monotonic() < self._retry_at:
            return None
        errors = []
        for folder in dict.fromkeys((self._folder, None)):
            try:
                files = payload_files(folder, sizes)
            except OSError as error:
                errors.append(error)
            else:
                self.problem = self._lost_file = ""
                return files
        passing = (*_FULL, *_NO_DESCRIPTOR)
        reason = next((error for error in errors if error.errno in passing), None)
        if reason is None:
            raise errors[-1]
        self._wait_for_file(sum(sizes), reason)
        return None

    def _wait_for_file(self, num_bytes: int, error: OSError) -> None:
        is_new, self._retry_at = not self.problem, time.monotonic() + FILE_RETRY_S
        places = dict.fromkeys((self._folder or tempfile.gettempdir(), tempfile.gettempdir()))
        missing = f"room in {' or '.join(map(str, places))}"
        if error.errno in _NO_DESCRIPTOR:
            missing = "a free descriptor for its file"
        self.problem = (
            f"an update of {num_bytes:,} bytes waits for {missing}: {error.strerror or error}"
        )
        if is_new:
            logger.error("%s; the server goes on, and tries again", self.problem)

    def report_lost_file(self, worker: str, seq: int, error: OSError) -> None:
        """Report in the log and in the status that a disk error has lost an update."""
        self._lost_file = (
            f"update {seq} of worker {worker} is lost, because its file cannot be written or read: "
            f"{error.strerror or error}"
        )
        logger.error("%s; the server goes on", self._lost_file)

    def _begin_with(self, parameters: Sequence[Tensor]) -> None:
        flats = [p.detach().flatten().float() for p in parameters]
        self.open_model([flat.numel() for flat in flats], None)
        self.model.initialise(flats)
        self.save()
        if self.keeper is not None and self.keeper.problem:
            raise OSError(self.keeper.problem)

    def open_model(
        self, sizes: Sequence[int], layout: int | None, outers: Sequence[Tensor] | None = None
    ) -> None:
        model = SharedModel(sizes, self.rule, outers=outers, impl=self.impl)
        self.coordinator = Coordinator(model, **self.numbers)
        self.layout = layout
        model_bytes = 4 * model.num_elements
        # Each reader has one window of runs on its way; all windows take at most a quarter of a
        # model, or 16 MiB if that is more.
        window = min(WINDOW_BYTES, max(1, model_bytes))
        quarter = max(model_bytes // 4, 2 * SMALL_BYTES)
        self.max_readers = min(MAX_READERS, max(1, quarter // window))
        room = int(self._model_sizes * model_bytes) - model.buffer_bytes - OVERHEAD_BYTES
        room -= self.max_readers * window
        self.memory.budget_bytes = max(SMALL_BYTES, room)

    # --------------------------------------------------------------------------------- workers

    def check_model(self, meta: dict[str, Any]) -> None:
        """Raise ProtocolError if a worker has another model than the server, see ``Host``."""
        if self.coordinator is None:
            return
        sizes, layout = meta["sizes"], meta["layout"]
        own = list(self.coordinator.model.sizes)
        if sizes != own:
            self.refuse_layout(
                f"the model has {sum(sizes)} parameters in fragments of {_shown(sizes)}, the "
                f"server's has {sum(own)} in {_shown(own)}"
            )
        if self.layout is None:
            self.layout = layout
        self.check_layout(layout)

    def welcome(self, session: Session, message: Message) -> Message:
        """Take a worker in, and return its WELCOME."""
        last, is_anothers = 0, False
        if self.coordinator is not None:
            member = self.coordinator.join(session.worker)
            last, is_anothers = member.last.seq, member.instance not in (0, message.number)
            member.instance = message.number
            if self.unexchanged is None:
                self.unexchanged = session.unexchanged
        meta = {
            "needs_start": self.coordinator is None,
            "rule": self.rule.config(),
            "sync_every": self.numbers["sync_every"],
            "history": self.history,
            "began": self.began,
        }
        place = (last, self.version, int(is_anothers), message.run)
        return Message(Kind.WELCOME, *place, meta=meta)

    def release(self, session: Session) -> None:
        """Keep no version for a connection any more."""
        session.release(self.coordinator)

    def leave(self, worker: str) -> None:
        """Stop waiting for a worker that has no connection."""
        if self.coordinator is not None:
            self.coordinator.leave(worker)

    # ------------------------------------------------------------------------------------ disk

    def _restore(self, keeper: Keeper) -> None:
        header, tensors = keeper.storage.load(self._tensors_for)
        assert self.coordinator is not None
        self.model.load(tensors, header["model"])
        self.coordinator.load_ledger(header["ledger"])
        for record, body in keeper.replay(self.coordinator.model.version):
            self._replay(record, body)
        self.began = self.version
        logger.info("restored version %d", self.began)

    def _tensors_for(self, header: dict[str, Any]) -> dict[str, Tensor]:
        """Make the model for a snapshot; return its buffers, into which the snapshot is read."""
        if header["rule"] != self.rule.config():
            raise ValueError(
                f"the snapshot was made with the rule {header['rule']}, this one is "
                f"{self.rule.config()}"
            )
        sizes, layout, digests = header["sizes"], header["layout"], header["unexchanged"]
        if [header["tensors"].get(f"{i}/outer") for i in range(len(sizes))] != sizes:
            raise ValueError(f"the snapshot has tensors of other sizes than {_shown(sizes)}")
        model = header["model"]
        arrivals = (state["num_arrivals"] for state in model["states"])
        numbers = (layout or 0, *(digests or ()), model["version"], *arrivals)
        if not all(type(n) is int and 0 <= n < MAX_NUMBER for n in numbers):
            raise ValueError("the snapshot has counts or digests that are no numbers")
        self.open_model(sizes, layout)
        self.unexchanged = digests
        return self.model.tensors()

    def _replay(self, record: dict[str, Any], body: PayloadFile) -> None:
        assert self.coordinator is not None
        outcome = Outcome(**record["outcome"])
        found = outcome
        if outcome.refusal:
            self.coordinator.finish(record["worker"], outcome, 0.0)
        else:
            layouts = self.coordinator.model.layouts(
                WireFormat(record["wire"], record["block_size"])
            )
            payload_bytes = [layout.payload_bytes for layout in layouts]
            if body.nbytes != sum(payload_bytes):
                raise ValueError(
                    f"update {outcome.seq} of worker {record['worker']} has {body.nbytes} bytes of "
                    f"payloads in the journal, expected {sum(payload_bytes)}"
                )
            payloads = body.split(payload_bytes)
            update = Update(
                record["worker"],
                outcome.seq,
                record["version"],
                record["steps"],
                record["seconds"],
                payloads,
                layouts,
            )
            found = self.coordinator.arrive(update, 0.0)
        if found != outcome:
            raise ValueError(
                f"update {outcome.seq} of worker {record['worker']} gives version {found.version}, "
                f"and version {outcome.version} in the journal"
            )
        self.coordinator.leave(record["worker"])

    def save(self) -> None:
        """Write a snapshot, unless the buffers do not hold the newest version."""
        if self.keeper is None or self.coordinator is None or not self.model.is_folded:
            return
        model = self.coordinator.model
        header = {
            "rule": self.rule.config(),
            "sizes": list(model.sizes),
            "layout": self.layout,
            "unexchanged": self.unexchanged,
            "model": model.scalars(),
            "ledger": self.coordinator.ledger(),
        }
        self.keeper.save(model.version, header, model.tensors())

    def end(self) -> None:
        """Release what all workers hold, and write the last snapshot.

        Raises:
            OSError: If neither the snapshot nor the journal holds all updates.
        """
        self.sessions.release_all(self.coordinator)
        keeper = self.keeper
        if keeper is None:
            return
        try:
            if keeper.saved_version != self.version or keeper.problem:
                self.save()
        finally:
            keeper.close(self.version)

    def report(self) -> dict[str, Any]:
        """Return the status as JSON types, small enough for one message; any thread may ask."""
        report = self.status.report(self.sessions, self.memory) | {
            "rule": self.rule.config(),
            "updates": 0,
            "duplicates": 0,
            "staleness": {},
            "workers": {},
        }
        if self.coordinator is not None:
            report |= self._report_of(self.coordinator)
        storage = None if self.keeper is None else self.keeper.report(self.version)
        return {**report, "storage": storage, "problem": self.problem or self._lost_file}

    def _report_of(self, coordinator: Coordinator) -> dict[str, Any]:
        counts, sessions = coordinator.counts, self.sessions
        staleness: Counter[str] = Counter()
        # Copies: a worker may come, or send an update, while another thread asks.
        for value, number in list(counts.staleness.items()):
            staleness[str(value) if value < MAX_STALENESS else f"{MAX_STALENESS}+"] += number
        # All connected workers, and the newest of the workers that are not connected.
        order = sorted(coordinator.members, key=lambda name: sessions.of(name) is not None)
        shown = set(order[-MAX_WORKERS:])
        workers = {
            name: {
                "applied": member.num_applied,
                "seq": member.last.seq,
                "speed": coordinator.speeds.by_worker.get(name),
                "connected": sessions.of(name) is not None,
            }
            for name, member in list(coordinator.members.items())
            if name in shown
        }
        return {
            "updates": coordinator.model.version,
            "parameters": coordinator.model.num_elements,
            "buffer_bytes": coordinator.model.buffer_bytes,
            "refused": dict(self.status.refused.copy() + counts.refused.copy()),
            "duplicates": counts.duplicates,
            "staleness": dict(staleness),
            "workers": workers,
        }

    def log_update(
        self, worker: str, push: Message, outcome: Outcome, payloads: Sequence[Payload] = ()
    ) -> None:
        """Write an update to the journal, before its worker gets the outcome."""
        if self.keeper is None or outcome.refusal in UNCOUNTED:
            return
        record = {
            "worker": worker,
            "version": push.version,
            "outcome": outcome.__dict__,
            **{name: push.meta[name] for name in ("wire", "block_size", "steps", "seconds")},
        }
        self.keeper.record(record, [] if outcome.refusal else payloads, self.version)


def _sizes_of(rule: ServerRule) -> float:
    """Return the memory of a rule in models, the parameters included."""
    return SharedModel([1], rule).buffer_bytes / 4


def _shown(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:4]))
    return f"[{shown}, ...]" if len(sizes) > 4 else f"[{shown}]"
