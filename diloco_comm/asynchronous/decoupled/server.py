"""The server of decoupled training: the syncer behind one ROUTER socket, in one thread."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ...methods.outer import Nesterov, OuterOptimizer
from ..keeper import Keeper
from ..messages import Kind, Message
from ..server import Service
from ..sessions import Session
from .merges import numbers_of
from .model import KEPT_MODELS
from .settings import DecoupledSettings
from .state import KeptStatus, SyncerState
from .transfer import ReportReceiver, Teller


class DecoupledServer(Service):
    """Merge what learners report; learners attach with ``DecoupledDiLoCo``.

    The first learner that attaches gives its parameters.

    Args:
        settings: The settings that all learners share.
        outer: SGD, HeavyBall or Nesterov; Nesterov(0.7, 0.9) by default.
        listen: ``host:port``; port 0 picks a free one, see ``address`` afterwards.
        snapshot: Folder of the snapshot and the journal; None keeps nothing on disk. With a folder
            a merge is on the disk (fsync) before any learner gets it.
        snapshot_every: Merges between two snapshots.
        keep_tape: Keep all journals, so that the whole run can be repeated.
        drop_tape: Without ``keep_tape``: remove a tape that is in the folder, at the next snapshot.
            Else such a folder is refused.
        keys: Folder of CURVE keys (``diloco-comm serve keygen``).
        insecure: Allow an address that other machines reach, without keys.
        model_sizes: Memory in fp32 models. The server keeps up to five; reports on their way take
            the rest, 8 MiB at least. Reports of a quorum get memory even beyond that.
        lost_after: Seconds of silence after which a learner that was suspended, or lost power or
            network, counts as lost. A learner that was killed counts as lost at once.
        max_parameters: Larger models are refused.
        impl: Force an implementation of the operators.

    Raises:
        ValueError: For invalid arguments, for an address that is open to the network without keys,
            for a snapshot of other settings or of another format, and for a tape that is neither
            kept nor dropped.
        DamagedLog: If a file in the snapshot folder is damaged.
        OSError: If the socket cannot listen on the address, or the snapshot folder cannot be
            written or belongs to another server.
    """

    greeting = Kind.JOIN
    wrong_greeting = (
        "this server hosts decoupled training: attach with DecoupledDiLoCo, or host it with "
        "`diloco-comm serve`"
    )

    def __init__(
        self,
        settings: DecoupledSettings,
        *,
        outer: OuterOptimizer | None = None,
        listen: str = "127.0.0.1:0",
        snapshot: str | Path | None = None,
        snapshot_every: int = 100,
        keep_tape: bool = False,
        drop_tape: bool = False,
        keys: str | Path | None = None,
        insecure: bool = False,
        model_sizes: float = KEPT_MODELS + 1.0,
        lost_after: float = 30.0,
        max_parameters: int = 4_000_000_000,
        impl: str = "",
    ) -> None:
        if snapshot_every < 1:
            raise ValueError(f"snapshot_every must be at least 1, got {snapshot_every}")
        if keep_tape and drop_tape:
            raise ValueError("keep_tape and drop_tape exclude each other")
        if model_sizes < KEPT_MODELS:
            raise ValueError(f"model_sizes must be at least {KEPT_MODELS}, got {model_sizes:g}")
        open_files = None
        if snapshot is not None:
            open_files = partial(
                Keeper, Path(snapshot), snapshot_every, waits=True, keeps_journals=keep_tape
            )
        elif keep_tape or drop_tape:
            raise ValueError(f"{'keep_tape' if keep_tape else 'drop_tape'} needs a snapshot folder")
        outer = Nesterov(0.7, 0.9) if outer is None else outer
        numbers_of(outer)
        self.state = SyncerState(
            settings,
            outer,
            open_files=open_files,
            drops_tape=drop_tape,
            model_sizes=model_sizes,
            impl=impl,
        )
        super().__init__(
            self.state,
            listen,
            keys,
            insecure=insecure,
            lost_after=lost_after,
            max_parameters=max_parameters,
            begin=self.state.begin,
        )
        self._kept_status = KeptStatus(self.report)
        self._receiver = ReportReceiver(self.state, self._send)
        self._teller = Teller(self.state, self._send)
        self._handlers = {
            Kind.STEP: self._step,
            Kind.REST: self._step,
            Kind.OFFER: self._offer,
            Kind.RUN: self._receiver.receive_run,
            Kind.START: self._receiver.start,
            Kind.GET: self._teller.get,
            Kind.DONE: self._teller.done,
            Kind.LEAVE: self._leave,
        }

    def parameters(self) -> list[list[Tensor]]:
        """Return copies of the shared parameters: for each fragment one flat tensor a piece.

        A piece is the tensors of a fragment that are merged together.

        Raises:
            RuntimeError: If the server runs, or has no parameters yet.
        """
        if self.is_running:
            raise RuntimeError("the server runs: stop() it first, or attach a learner")
        if self.state.model is None:
            raise RuntimeError("the server has no parameters yet: no learner has attached")
        return [fragment.copy_values() for fragment in self.state.model.syncer.fragments]

    def _forget(self, worker: str) -> None:
        self._receiver.forget(worker)

    def _status(self) -> dict[str, Any]:
        return self._kept_status.get()

    def _answer_stranger(self, message: Message) -> Message | None:
        if message.kind != Kind.SETTINGS:
            return None
        return Message(Kind.SET, meta={"settings": self.state.settings.to_json()})

    def _step(self, session: Session, message: Message) -> None:
        """Note a learner's inner steps, and answer if the learner wants to know when they count."""
        if self.state.model is None:
            self._send(session.peer, Message(Kind.UNKNOWN))
            return
        self.state.stepped(session, message.number, message.version / 1e6)
        if message.kind == Kind.REST:
            self.state.rest(session, message.meta["progress"])
        if message.run:
            self._after_messages()
            self._send(session.peer, Message(Kind.NOTED, run=message.run))

    def _offer(self, session: Session, message: Message) -> None:
        self._teller.answered(session.peer, message.fragment)
        self._receiver.offer(session, message)

    def _due_at(self) -> float | None:
        times = [at for at in (self.state.due_at, self._teller.due_at) if at is not None]
        return min(times, default=None)

    def _after_messages(self) -> None:
        """Merge and call what is due, and tell the learners."""
        self.state.advance(time.monotonic())
        self._teller.tell()

    def _housekeeping(self) -> None:
        self._receiver.drop_stalled(time.monotonic())
        self.state.save_if_due()
