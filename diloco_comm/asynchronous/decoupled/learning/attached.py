"""A learner of decoupled training, attached to an ordinary training loop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ....base import env
from ....base.checks import choice, integer
from ....base.errors import NonFiniteError
from ....ops.wire import Layout
from ....replica.fragments import FragmentSpec, make_fragments, trainable_parameters
from ....replica.hooks import StepHooks, hookable
from ...model.shared import layout_of
from ...protocol.messages import Kind, Message
from ...worker.link import Link
from ...worker.local import layout_hash
from ..fragment_round import Merge
from ..learner import Learner
from ..ledger import Ledger
from ..pieces import Piece
from ..serving.model import FP32
from ..settings import DecoupledSettings
from ..syncer import Commit
from .courier import Courier
from .postbox import Arrival

logger = logging.getLogger(__name__)

# Seconds between two looks while the training thread waits on purpose, in ``flush``.
_LOOK_S = 0.2


@dataclass(frozen=True)
class DecoupledMetrics:
    """The figures of a learner so far.

    Attributes:
        steps: Inner steps taken.
        versions: Version of each fragment in the model.
        reports, merged, refused: Reports made, merged, and refused by the server.
        commits: Versions that were written into the model.
        step_ledgers, token_ledgers: What became of the inner steps and tokens, by fragment.
        hook_s: Seconds that the hook took of the training thread, in all.
        sent_bytes, received_bytes: Bytes of messages.
    """

    steps: int
    versions: tuple[int, ...]
    reports: int
    merged: int
    refused: int
    commits: int
    step_ledgers: tuple[Ledger, ...]
    token_ledgers: tuple[Ledger, ...]
    hook_s: float
    sent_bytes: int
    received_bytes: int


class DecoupledDiLoCo:
    """Report when the syncer calls, and take its commits, without ever waiting for either.

    A thread of its own, the *courier*, owns the connection. Parameters are read and written after
    an optimizer step alone.

    Args:
        model, optimizer: As in ``DiLoCo``; parameters are written in place.
        server: ``tcp://host:port`` of a ``diloco-comm serve --decoupled`` or a ``DecoupledServer``.
        name: Name of this learner, unique; as in ``AsyncDiLoCo``.
        tokens: Tokens of an inner step, or a function that returns those of the step just taken.
            Reports count by tokens^2 / steps.
        rounding, seed: As in ``DiLoCo``.
        fragments, wire, sync_every: The server decides these. If they are given, the server's must
            be the same.
        timeout: Seconds of the server's silence after which ``ServerLost`` is raised. The default
            is ``DILOCO_COMM_TIMEOUT_S``, or 1800.
        keys, key_name: Folder of CURVE keys, and the name of this learner's pair.
        impl: Force an implementation of the operators.
        attach: With False the user calls ``step()`` after each optimizer step, and the optimizer
            may be any object with ``param_groups``.

    Attributes:
        settings: The settings of the run, from the server.

    Raises:
        ValueError, TypeError: For invalid arguments.
        ServerRefused: If the server refuses this learner, because its model differs.
        ServerLost: If no server answers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        server: str,
        name: str | None = None,
        tokens: int | Callable[[], int] = 1,
        rounding: str = "nearest",
        seed: int = 0,
        fragments: FragmentSpec | None = None,
        wire: str | None = None,
        sync_every: int | None = None,
        timeout: float | None = None,
        keys: str | Path | None = None,
        key_name: str = "worker",
        impl: str = "",
        attach: bool = True,
    ) -> None:
        choice("rounding", rounding, ("nearest", "stochastic"))
        self._tokens = tokens if callable(tokens) else integer("tokens", tokens, 1)
        seconds = env.timeout_s() if timeout is None else timeout
        if not 0 < seconds < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        optimizers = hookable(optimizer, attach=attach)
        named = trainable_parameters(model, list(optimizers))
        self._link = Link(server, name, [1], 0, timeout=seconds, keys=keys, key_name=key_name)
        self._hooks: StepHooks | None = None
        self._courier: Courier | None = None
        try:
            self.settings = self._ask_settings()
            self._check(fragments=fragments, wire=wire, sync_every=sync_every)
            spec = self.settings.fragments
            self._fragments = [f for f in make_fragments(model, named, spec) if f.num_elements]
            self._pieces = self._plan()
            self._learner = self._make_learner(rounding, seed, impl)
            self._reports = self._merged = self._refused = self._commits = 0
            self._hook_s, self._ended_at = 0.0, time.monotonic()
            self._attach(impl, seconds)
        except BaseException:
            if self._courier is not None:
                self._courier.close()
            self._link.close()
            raise
        if attach:
            self._hooks = StepHooks(optimizers, self.step)

    # ----------------------------------------------------------------------------------- attach

    def _ask_settings(self) -> DecoupledSettings:
        question = Message(Kind.SETTINGS)
        for message in self._link.converse(lambda: self._link.ask(question), "settings"):
            if message.kind == Kind.SET:
                return DecoupledSettings.from_json(message.meta["settings"])
        raise AssertionError

    def _check(self, **given: object) -> None:
        for name, value in given.items():
            served = getattr(self.settings, name)
            if value is not None and value != served:
                raise ValueError(
                    f"the server {self._link.address} has {name}={served!r}, this learner was "
                    f"given {name}={value!r}: leave it out, or start the server with it"
                )

    def _plan(self) -> list[list[Piece]]:
        """Divide the fragments into pieces, and describe them in the first message."""
        parts = [fragment.pieces() for fragment in self._fragments]
        pieces = self.settings.pieces(
            [[name for name, _ in each] for each in parts],
            [[tensor.shape for _, tensor in each] for each in parts],
        )
        identity = self._link.identity
        identity.greeting = Kind.JOIN
        identity.model = {
            "layout": layout_hash(self._fragments),
            "sizes": [piece.num_elements for each in pieces for piece in each],
            "pieces": [len(each) for each in pieces],
            "alone": [sum(piece.merge == "rda" for piece in each) for each in pieces],
        }
        return pieces

    def _make_learner(self, rounding: str, seed: int, impl: str) -> Learner:
        return Learner(
            self._link.worker,
            [fragment.tensors() for fragment in self._fragments],
            self._pieces,
            wire=self.settings.up,
            receipt=self.settings.how_received,
            error_feedback=self.settings.error_feedback,
            is_stochastic=rounding == "stochastic",
            seed=seed,
            impl=impl,
        )

    def _attach(self, impl: str, timeout: float) -> None:
        """Join, and take the shared model."""
        self._courier = courier = Courier(
            self._link, self.settings, self._pieces, self._start, impl
        )
        while not courier.is_complete:
            courier.wait(_LOOK_S)
            courier.raise_error()
        self._take()

    def _start(self) -> tuple[list[Tensor], list[Layout]]:
        """Return the parameters in fp32, for a server that has none."""
        payloads, layouts = [], []
        for part in self._learner.fragments:
            for piece in part.pieces:
                layout = layout_of(piece.layout.num_elements, FP32)
                payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
                payload.view(torch.float32)[: layout.num_elements] = piece.base
                payloads.append(payload)
                layouts.append(layout)
        return payloads, layouts

    # ---------------------------------------------------------------------------------- training

    @property
    def name(self) -> str:
        """The learner's name; a default name changes if another learner takes it."""
        return self._link.worker

    def step(self) -> None:
        """Count one inner step, take what has arrived, and report what the syncer called for.

        Raises:
            ServerLost: The server was silent for ``timeout``; training may go on, and the courier
                goes on trying.
            NonFiniteError: This learner's values are not finite; nothing was sent.
        """
        assert self._courier is not None
        begin = time.monotonic()
        tokens = self._tokens() if callable(self._tokens) else self._tokens
        self._learner.stepped(tokens)
        try:
            self._exchange()
        finally:
            self._courier.stepped(self._learner.num_steps, begin - self._ended_at)
            self._ended_at = time.monotonic()
            self._hook_s += self._ended_at - begin

    def poll(self) -> None:
        """Take what has arrived and report what is called for, between two inner steps.

        Call this method in long pauses of training; errors are those of ``step``.
        """
        self._exchange()

    def _exchange(self) -> None:
        assert self._courier is not None
        self._courier.raise_error()
        self._take()
        self._answer_calls()

    def _take(self) -> None:
        """Write the versions that have arrived into the model."""
        assert self._courier is not None
        for fragment, seq, reason in self._courier.refusals():
            if self._learner.fragments[fragment].seq == seq:
                logger.debug("report %d on fragment %d was refused: %s", seq, fragment, reason)
                self._learner.withdraw(fragment)
                self._refused += 1
        for arrival in self._courier.arrivals():
            self._fragments[arrival.fragment].refuse_changes()
            self._write(arrival)
            self._commits += 1
            self._courier.taken(arrival)

    def _write(self, arrival: Arrival) -> None:
        index, part = arrival.fragment, self._learner.fragments[arrival.fragment]
        if arrival.is_reset:
            self._learner.reset(index, arrival.version, arrival.values)
            part.seq = max(part.seq, arrival.seq)
            return
        values = arrival.values
        if arrival.is_difference:
            pairs = zip(part.pieces, values, strict=True)
            values = [piece.base + difference for piece, difference in pairs]
        merged = {self._learner.name: arrival.merged}
        self._merged += part.is_under_way and part.seq == arrival.merged
        commit = Commit(index, arrival.version, merged, values, Merge(0, (), ()), [])
        self._learner.receive(commit, may_skip=True)

    def _answer_calls(self) -> None:
        assert self._courier is not None
        for index, version in self._courier.calls():
            part = self._learner.fragments[index]
            if version == part.version and not part.is_under_way:
                self._learner.call(index, version)
            if version < part.version or part.is_called:
                self._courier.answered(index, version)
        if not any(part.is_called for part in self._learner.fragments):
            return
        for fragment in self._fragments:
            fragment.refuse_changes()
        try:
            reports = self._learner.reports()
        except ValueError as error:
            raise NonFiniteError(f"{error}; nothing was sent") from None
        for index, report, payloads in reports:
            self._reports += 1
            self._courier.report(index, report, payloads)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the syncer counts all steps and every report is merged or refused.

        Call this method where training may wait, such as at its end.

        Args:
            timeout: Seconds to wait at most; the default is that of the server's silence.

        Returns:
            False if the time was over.
        """
        assert self._courier is not None
        end = time.monotonic() + (self._link.timeout if timeout is None else timeout)
        token = self._courier.note()
        while True:
            self._exchange()
            is_waiting = any(p.is_under_way or p.is_called for p in self._learner.fragments)
            if self._courier.is_noted(token) and self._courier.is_settled and not is_waiting:
                return True
            if time.monotonic() >= end:
                return False
            self._courier.wait(min(_LOOK_S, max(0.0, end - time.monotonic())))

    # ------------------------------------------------------------------------------- the figures

    @property
    def metrics(self) -> DecoupledMetrics:
        """The figures of this learner so far."""
        parts = self._learner.fragments
        return DecoupledMetrics(
            self._learner.num_steps,
            tuple(part.version for part in parts),
            self._reports,
            self._merged,
            self._refused,
            self._commits,
            tuple(Ledger(**vars(part.steps)) for part in parts),
            tuple(Ledger(**vars(part.tokens)) for part in parts),
            self._hook_s,
            self._link.sent_bytes,
            self._link.received_bytes,
        )

    def __repr__(self) -> str:
        versions = [part.version for part in self._learner.fragments]
        return (
            f"DecoupledDiLoCo({self.name!r}, server={self._link.address!r}, "
            f"steps={self._learner.num_steps}, versions={versions})"
        )

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put the newest shared parameters that are here into the model, for evaluation."""
        self._take()
        tensors = [
            piece_t for p in self._learner.fragments for q in p.pieces for piece_t in q.tensors
        ]
        kept = [tensor.clone() for tensor in tensors]
        for part in self._learner.fragments:
            for piece in part.pieces:
                piece.write()
        try:
            yield
        finally:
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)

    def close(self) -> None:
        """Leave the server and remove the hooks; idempotent. Nothing more is sent."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self._courier is not None:
            self._courier.close()

    def __enter__(self) -> DecoupledDiLoCo:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
