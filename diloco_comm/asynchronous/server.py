"""The server of asynchronous training: one thread, one ROUTER socket, one shared model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..base.service.addresses import address_to_bind
from .messages import Kind, Message
from .rules import ServerRule
from .service import Service
from .sessions import Attendance, Session, check_lost_after
from .state import ServerState
from .transfer import Receiver, Sender


class AsyncServer(Service):
    """Own the outer parameters; workers attach with ``AsyncDiLoCo``.

    Args:
        rule: How an arriving update changes the model.
        listen: ``host:port``; port 0 picks a free one, see ``address`` afterwards.
        sync_every, dylu, min_steps, grace: See ``Coordinator``.
        parameters: Initial parameters, fp32 [num_elements] for each fragment. Without parameters
            and without a snapshot, the first worker sends its own.
        snapshot: Folder of the snapshot and the journal; None keeps nothing on disk.
        snapshot_every: Updates between two snapshots.
        keys: Folder of CURVE keys (``diloco-comm serve keygen``).
        insecure: Allow an address that other machines reach, without keys.
        model_sizes: Memory of the server in fp32 models, for the rule's buffers and for updates on
            their way. One update always fits.
        lost_after: Seconds of silence after which a worker that was stopped, or lost power or
            network, counts as lost. A worker that was killed counts as lost at once, and a worker
            that trains never does.
        max_parameters: Larger models are refused.
        impl: Force an implementation of the operators.

    Raises:
        ValueError: For invalid arguments, and for an address that is open to the network without
            keys.
        DamagedLog: If a file in the snapshot folder is damaged.
        OSError: If the socket cannot listen on the address, or the snapshot folder cannot be
            written or belongs to another server. If the folder cannot be written later, the server
            goes on and its status says so.
    """

    greeting = Kind.HELLO
    wrong_greeting = (
        "this server hosts asynchronous training: attach with AsyncDiLoCo, or host it with "
        "`diloco-comm serve decoupled`"
    )

    def __init__(
        self,
        rule: ServerRule,
        *,
        listen: str = "127.0.0.1:0",
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
        lost_after: float = 30.0,
        max_parameters: int = 4_000_000_000,
        impl: str = "",
    ) -> None:
        address = address_to_bind(listen, keys, insecure, maker="diloco-comm serve keygen")
        lost_after = check_lost_after(lost_after)
        numbers = {
            "sync_every": sync_every,
            "dylu": dylu,
            "min_steps": min_steps,
            "grace": grace,
        }
        self.state = ServerState(
            rule,
            numbers,
            snapshot=snapshot,
            snapshot_every=snapshot_every,
            model_sizes=model_sizes,
            impl=impl,
        )
        super().__init__(
            self.state, address, keys, lost_after, lambda: self.state.begin(parameters)
        )
        self._connect_parts(max_parameters, lost_after)

    def _connect_parts(self, max_parameters: int, lost_after: float) -> None:
        """Make the parts that handle messages, and say which part handles which kind."""
        self._receiver = Receiver(self.state, self._send)
        self._attendance = Attendance(
            self.state,
            self._listener.connections,
            self._send,
            self._receiver.forget,
            max_parameters=max_parameters,
            lost_after=lost_after,
        )
        self._sender = Sender(self.state, self._send, self._receiver.admit_waiting)
        self._handlers = {
            Kind.PUSH: self._receiver.push,
            Kind.RUN: self._receiver.receive_run,
            Kind.PULL: self._sender.pull,
            Kind.FOLLOW: self._sender.pull,
            Kind.GET: self._sender.get,
            Kind.GET_UPDATE: self._sender.get,
            Kind.DONE: self._sender.done,
            Kind.LEAVE: self._leave,
        }

    def parameters(self) -> list[Tensor]:
        """Return copies of the shared parameters; the server must not be running."""
        if self.is_running:
            raise RuntimeError("the server runs: stop() it first, or attach a worker")
        if self.state.coordinator is None:
            raise RuntimeError("the server has no parameters yet: no worker has attached")
        return self.state.coordinator.model.read_all()

    def report(self) -> dict[str, Any]:
        """Return the status as JSON types."""
        return self.state.report()

    def _due_at(self) -> float | None:
        coordinator = self.state.coordinator
        return None if coordinator is None else coordinator.grace.closes_at

    def _after_messages(self) -> None:
        """Start the workers whose grace period has ended."""
        self._sender.start_released()

    def _end(self) -> None:
        self.state.end()

    def _leave(self, session: Session, message: Message) -> None:
        self._attendance.leave(session, message)
        self._sender.after_reading()

    def _housekeeping(self) -> None:
        now = time.monotonic()
        self._receiver.drop_stalled(now)
        self._sender.evict(now, is_memory_short=self._receiver.is_anyone_waiting)
        self.state.keep_for_followers()
        self._sender.after_reading()
        self.state.save_if_due()
