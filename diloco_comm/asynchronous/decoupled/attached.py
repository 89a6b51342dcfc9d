"""A learner of decoupled training, attached to an ordinary training loop."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...base import env, recording
from ...base.checks import choice, integer, logger_of, timeout_seconds, warn
from ...base.errors import NonFiniteError
from ...base.interrupts import deferred_interrupts
from ...ops.wire import WireName
from ...options import Link, Wire, choices_among, closed
from ...replica.fragments import FragmentSpec, make_fragments, trainable_parameters
from ...replica.hooks import StepHooks, hookable
from ...replica.model_watch import CHECKS, Checks, ModelWatch, server_has_weights, warn_at_exit
from ..link import RETRY_S, ServerLost
from ..local import Attachment, WorkerPiece, beside_layout
from .courier import Arrival, Courier
from .learner import Learner, Ledger
from .shards import Shard, addresses_of, check_shards, describe, open_shard, parameters_of
from .syncer import Commit, Merge


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


logger = logger_of(__name__)

# The choices of the groups of options that a learner has, and their defaults.
_CHOICES = {"wire": None, "rounding": "nearest", "seed": 0, "timeout": None}
# Seconds between two looks while the training thread waits on purpose, in ``flush``.
_LOOK_S = 0.2


def _close(shards: list[Shard]) -> None:
    for shard in shards:
        shard.close()


class DecoupledDiLoCo(Attachment):
    """Report when the syncer calls, and take its commits, without ever waiting for either.

    A thread of its own, the *courier*, owns the connection. Parameters are read and written by the
    training thread alone: after an optimizer step, and in ``poll`` and ``flush``.

    Args:
        model, optimizer: As in ``DiLoCo``; parameters are written in place, in host memory.
        server: ``tcp://host:port`` of a ``diloco-comm serve decoupled`` or a ``DecoupledServer``;
            of a sharded syncer the addresses of all shards.
        name: Name of this learner, unique; as in ``AsyncDiLoCo``.
        tokens: Tokens of an inner step, or a function that returns those of the step just taken.
            Reports count by tokens^2 / steps.
        fragments, wire, sync_every: The server decides these. If they are given, the server's must
            be the same. ``Wire(rounding=..., seed=...)`` is this learner's own.
        link: ``Link(timeout=...)``, as in ``AsyncDiLoCo``.
        keys, key_name: Folder of CURVE keys, and the name of this learner's pair.
        impl: Force an implementation of the operators.
        attach: With False the user calls ``step()`` after each optimizer step, and the optimizer
            may be any object with ``param_groups``.
        checks: As in ``AsyncDiLoCo``.

    Attributes:
        settings: The settings of the run, from the server.

    Raises:
        ValueError, TypeError: For invalid arguments.
        ServerRefused: If the server refuses this learner: its model differs, or its name is taken.
        ServerLost: If no server answers.
    """

    @closed
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        server: str | Sequence[str],
        name: str | None = None,
        tokens: int | Callable[[], int] = 1,
        fragments: FragmentSpec | None = None,
        wire: WireName | Wire | None = None,
        link: Link | None = None,
        sync_every: int | None = None,
        keys: str | Path | None = None,
        key_name: str = "worker",
        impl: str = "",
        attach: bool = True,
        checks: Checks = "raise",
    ) -> None:
        choices = choices_among("DecoupledDiLoCo", {"wire": wire, "link": link}, _CHOICES)
        wire, timeout = choices["wire"], choices["timeout"]
        rounding, seed = choices["rounding"], choices["seed"]
        choice("checks", checks, CHECKS)
        choice("rounding", rounding, ("nearest", "stochastic"))
        self._tokens = tokens if callable(tokens) else integer("tokens", tokens, 1)
        seconds = timeout_seconds(env.timeout_s() if timeout is None else timeout)
        recording.start_if_asked()
        optimizers = hookable(optimizer, attach=attach)
        named = trainable_parameters(model, list(optimizers))
        if named[0][1].device.type != "cpu":
            raise TypeError(
                f"decoupled training takes parameters in host memory, got {named[0][0]!r} on "
                f"{named[0][1].device}"
            )
        self._timeout = seconds
        self._shards: list[Shard] = []
        # The courier's thread would otherwise outlive this object.
        self._end = weakref.finalize(self, _close, self._shards)
        try:
            for address in addresses_of(server):
                shard = open_shard(address, name, timeout=seconds, keys=keys, key_name=key_name)
                self._shards.append(shard)
            self._shards[:] = check_shards(self._shards)
            self.settings = self._shards[0].settings
            self._check(fragments=fragments, wire=wire, sync_every=sync_every)
            spec = self.settings.fragments
            self._fragments = [f for f in make_fragments(model, named, spec) if f.num_elements]
            beside = beside_layout(model, self._fragments, checks)
            self._learner = self._make_learner(rounding, seed, impl, beside)
            self._reports = self._merged = self._refused = self._commits = 0
            self._hook_s, self._ended_at = 0.0, time.monotonic()
            self._attach(impl)
        except BaseException:
            self._end()
            raise
        self._watch = ModelWatch(
            model,
            optimizers,
            self._fragments,
            server_has_weights,
            checks,
            sync_every=self.settings.sync_every,
            is_hooked=attach,
        )
        if attach:
            self._hooks = StepHooks(optimizers, self.step)
        warn_at_exit(self)

    # ----------------------------------------------------------------------------------- attach

    def _check(self, **given: object) -> None:
        for name, value in given.items():
            served = getattr(self.settings, name)
            if value is not None and value != served:
                raise ValueError(
                    f"the server {self._shards[0].link.address} has {name}={served!r}, this "
                    f"learner was given {name}={value!r}: leave it out, or start the server with it"
                )

    def _make_learner(self, rounding: str, seed: int, impl: str, beside: dict[str, Any]) -> Learner:
        parts = [fragment.pieces() for fragment in self._fragments]
        pieces = self.settings.pieces(
            [[name for name, _ in each] for each in parts],
            [[tensor.shape for _, tensor in each] for each in parts],
        )
        for shard in self._shards:
            describe(shard, self._fragments, pieces, beside)
        self._pieces = pieces
        return Learner(
            self.name,
            [fragment.tensors() for fragment in self._fragments],
            pieces,
            wire=self.settings.up,
            receipt=self.settings.how_received,
            error_feedback=self.settings.error_feedback,
            is_stochastic=rounding == "stochastic",
            seed=seed,
            impl=impl,
        )

    def _attach(self, impl: str) -> None:
        """Join, and take the shared model."""
        gives = True
        for shard in self._shards:
            pieces = [self._pieces[p] for p in shard.fragments]
            parts = [self._learner.fragments[p] for p in shard.fragments]
            start = partial(parameters_of, parts) if gives else None
            shard.courier = Courier(shard.link, shard.settings, pieces, start, impl)
            while not shard.carrier.is_complete:
                shard.carrier.wait(_LOOK_S)
                shard.carrier.raise_error()
            # All fragments begin with the parameters of one learner.
            if shard is self._shards[0]:
                gives = shard.courier.has_given
            elif gives and not shard.courier.has_given:
                raise ServerLost(
                    f"the server {shard.link.address} has parameters of an earlier run, and the "
                    f"server {self._shards[0].link.address} had none: start all servers with their "
                    "snapshots, or all without",
                    stage="decoupled",
                )
        for warning in {shard.carrier.warning for shard in self._shards} - {""}:
            warn(warning, RuntimeWarning)
        # The syncer may have asked for another name.
        self._learner.rename(self.name)
        self._take()
        self._wake()

    # ---------------------------------------------------------------------------------- training

    @property
    def name(self) -> str:
        """The learner's name; a default name changes if another learner takes it."""
        return self._shards[0].link.worker

    def step(self) -> None:
        """Count one inner step, take what has arrived, and report what the syncer called for.

        Raises:
            ServerLost: The server was silent for ``timeout``; training may go on, and the courier
                goes on trying.
            NonFiniteError: This learner's values are not finite; nothing was sent.
        """
        begin = time.monotonic()
        tokens = self._tokens
        if callable(tokens):
            tokens = integer("tokens", tokens(), 1)
        if self._watch is not None:
            self._watch.stepped()
        self._learner.stepped(tokens)
        try:
            self._exchange()
        finally:
            for shard in self._shards:
                shard.carrier.stepped(self._learner.num_steps, begin - self._ended_at)
            self._ended_at = time.monotonic()
            self._hook_s += self._ended_at - begin

    def poll(self) -> None:
        """Take what has arrived and report what is called for, between two inner steps.

        Call this method in long pauses of training; errors are those of ``step``.
        """
        try:
            self._exchange()
        finally:
            self._wake()

    def _wake(self) -> None:
        """Let the couriers see what was taken and reported; ``stepped`` does that too."""
        for shard in self._shards:
            shard.carrier.ring()

    def _exchange(self) -> None:
        for shard in self._shards:
            shard.carrier.raise_error()
        self._take()
        self._answer_calls()

    # A Ctrl-C in the middle could let a difference be added twice. The method never waits.
    @deferred_interrupts()
    def _take(self) -> None:
        """Write the versions that have arrived into the model."""
        for shard in self._shards:
            for fragment, seq, reason in shard.carrier.refusals():
                index = shard.fragments[fragment]
                if self._learner.fragments[index].seq == seq:
                    logger.debug("report %d on fragment %d was refused: %s", seq, index, reason)
                    self._learner.withdraw(index)
                    self._refused += 1
            arrivals = shard.carrier.arrivals()
            if arrivals:
                with self._watched_writes():
                    self._take_arrivals(shard, arrivals)

    def _take_arrivals(self, shard: Shard, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            index = shard.fragments[arrival.fragment]
            self._fragments[index].refuse_changes()
            self._write(index, arrival)
            self._commits += 1
            shard.carrier.taken(arrival)

    def _write(self, index: int, arrival: Arrival) -> None:
        part = self._learner.fragments[index]
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

    # A Ctrl-C in the middle could leave a report that is never sent. The method never waits.
    @deferred_interrupts()
    def _answer_calls(self) -> None:
        for shard in self._shards:
            for p, version in shard.carrier.calls():
                part = self._learner.fragments[shard.fragments[p]]
                if version == part.version and not part.is_under_way:
                    self._learner.call(shard.fragments[p], version)
                if version < part.version or part.is_called:
                    shard.carrier.answered(p, version)
        if not any(part.is_called for part in self._learner.fragments):
            return
        if self._watch is not None:
            self._watch.before_send()
        for fragment in self._fragments:
            fragment.refuse_changes()
        try:
            reports = self._learner.reports()
        except ValueError as error:
            raise NonFiniteError(f"{error}; nothing was sent") from None
        owners: dict[int, tuple[Courier, int]] = {}
        for shard in self._shards:
            owners |= {index: (shard.carrier, p) for p, index in enumerate(shard.fragments)}
        for index, report, payloads in reports:
            self._reports += 1
            courier, p = owners[index]
            courier.report(p, report, payloads)

    def flush(self, timeout: float | None = None, *, remainder: bool = True) -> bool:
        """Share the steps since the last report, and wait until all steps are merged.

        Call this method at the end of training, and before a pause. With ``remainder`` the syncer
        waits, until this learner's next step, for no step of this learner, and for no report on a
        fragment without progress.

        Args:
            timeout: Seconds to wait at most; the default is the ``timeout`` of ``link``.
            remainder: With False wait until the syncer counts all steps and each report is merged
                or refused; steps that the syncer has not called for stay with this learner.

        Returns:
            False if the time was over, or if a commit has replaced steps of this learner meanwhile,
            which the receipt ``overwrite`` allows. The ledgers in ``metrics`` say how many.
        """
        end = time.monotonic() + (self._timeout if timeout is None else timeout)
        parts, told, again_at = self._learner.fragments, list[int](), 0.0
        lost = sum(part.steps.lost for part in parts)
        tokens = [] if remainder else [shard.carrier.note() for shard in self._shards]
        while True:
            # After the syncer's answer, its earlier calls are here, for poll(); only calls beyond a
            # window of messages may come later.
            late = list(self._shards)
            if tokens:
                pairs = zip(self._shards, tokens, strict=True)
                late = [s for s, token in pairs if not s.carrier.is_settled_after(token)]
            self.poll()
            has_more = remainder and any(part.steps.kept for part in parts)
            progress, now = self._learner.progress(), time.monotonic()
            # After a refusal the progress is the same, and the syncer is asked for another call.
            if remainder and (progress != told or (has_more and now >= again_at)):
                tokens = [s.carrier.rest([progress[p] for p in s.fragments]) for s in self._shards]
                told, again_at, late = progress, now + RETRY_S, list(self._shards)
            waiting = {i for i, p in enumerate(parts) if p.is_busy or (has_more and p.steps.kept)}
            late += [s for s in self._shards if waiting.intersection(s.fragments)]
            if not late:
                return lost == sum(part.steps.lost for part in parts)
            if now >= end:
                logger.warning(
                    "flush() has waited in vain, and not all steps of learner %s are in the shared "
                    "model: with a quorum of more than one learner, each of them must train or "
                    "call flush()",
                    self.name,
                )
                return False
            late[0].carrier.wait(min(_LOOK_S, max(0.0, end - now)))

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
            sum(shard.link.sent_bytes for shard in self._shards),
            sum(shard.link.received_bytes for shard in self._shards),
        )

    def __repr__(self) -> str:
        versions = [part.version for part in self._learner.fragments]
        servers = ", ".join(shard.link.address for shard in self._shards)
        return (
            f"DecoupledDiLoCo({self.name!r}, server={servers!r}, "
            f"steps={self._learner.num_steps}, versions={versions})"
        )

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put the newest shared parameters that are here into the model, for evaluation."""
        try:
            self._take()
        finally:
            self._wake()
        with super().outer_parameters():
            yield

    def _shared_pieces(self) -> list[WorkerPiece]:
        return [piece for part in self._learner.fragments for piece in part.pieces]

    def _unshared(self) -> tuple[str, int] | None:
        kept = any(part.steps.kept for part in self._learner.fragments)
        return (f"learner {self.name}", self._learner.num_steps) if kept else None

    def _leave(self) -> None:
        self._end()
