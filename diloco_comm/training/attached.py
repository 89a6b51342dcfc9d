"""What a DiLoCo is from its constructor to ``close()``: its group, its metrics, its guards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ..base.checks import integer, refuse_copy
from ..base.errors import SyncError
from ..exchange.exchange import Exchange
from ..methods.outer import OuterOptimizer
from ..methods.settings import Settings
from ..ops.digests import digest_of
from ..replica.hooks import StepHooks
from ..replica.model_watch import ModelWatch
from ..replica.workers import ReplicaWorkers
from ..rounds.agreement.consensus import mean_state
from ..rounds.agreement.handshake import gather_json
from ..rounds.metrics import Recorder, SyncMetrics, SyncTotals
from ..rounds.runner import RoundRunner
from ..rounds.synced import SyncedFragment, SyncedPart
from . import spelling
from .planning import Plan

if TYPE_CHECKING:
    from ..elastic.totals import ElasticTotals
    from .views import ElasticTraining


class Attached:
    """A model attached to its replicas: what can be read of it, and what guards each call.

    Attributes:
        exchange: The connection to the other replicas.
        parts: Fragments, and averaged buffers after them.
        schedule: When each part is sent.
        inner_step: Inner steps taken.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        settings: Settings,
        plan: Plan,
        exchange: Exchange,
        rounds: RoundRunner,
        recorder: Recorder,
        workers: ReplicaWorkers | None,
    ) -> None:
        self.settings, self.exchange, self.impl = settings, exchange, rounds.impl
        self.parts, self.schedule, self.device = plan.parts, plan.schedule, plan.device
        self.inner_step = 0
        self._plan, self._rounds, self._recorder, self._workers = plan, rounds, recorder, workers
        self._model, self._optimizers = model, optimizers
        self._hooks: StepHooks | None = None
        self._is_swapped = self._is_closed = False

    # None where the user changes the group, or nobody.
    _elastic: ElasticTraining | None = None
    # Batches that a trainer takes from a loader to give each worker one; None if it divides none.
    _batches_at_once: int | None = None
    # The inner steps before this one send nothing, apply nothing, and are only counted.
    _next_due = 0
    # None until the constructor has ended.
    _watch: ModelWatch | None = None

    def close(self) -> None:
        """Tell the peers, end the engine's threads and take the hooks off; idempotent.

        What this replica has may still be looked at: parameters, metrics, ``state_dict``. A warning
        says so if inner steps were not shared.
        """
        try:
            self._warn_of_unshared_steps()
        finally:
            self._close(is_finished=True)

    def _warn_of_unshared_steps(self) -> None:
        """Warn when training ends in good order, and without a flush."""
        is_alone = self._elastic is not None or self.exchange.size == 1
        is_open = not self._is_closed and self.exchange.last_error is None and not is_alone
        if is_open and self._watch is not None and self._rounds.has_unsent(self.inner_step):
            name = f"replica {self.exchange.replica}"
            self._watch.warn_of_unshared_steps(name, self.inner_step)

    def _close(self, *, is_finished: bool) -> None:
        """As ``close``; ``is_finished`` if this replica has taken all its steps."""
        self._is_closed, self._next_due = True, 0
        if self._hooks is not None:
            self._hooks.remove()
        if self._watch is not None:
            self._watch.close()
        self.exchange.inner_step = self.inner_step
        if self._elastic is not None:
            self._elastic.close(is_finished=is_finished)
        self.exchange.close()
        if self._workers is not None:
            self._workers.close()

    def __reduce__(self) -> NoReturn:
        refuse_copy(
            self, "save diloco.state_dict(), and give it to load_state_dict() of a new DiLoCo"
        )

    def __repr__(self) -> str:
        if not hasattr(self, "exchange"):  # An error came out of the constructor.
            return "DiLoCo(not attached)"
        return spelling.describe(
            self.exchange,
            self.settings,
            self.parts,
            num_fragments=self._plan.num_fragments,
            inner_step=self.inner_step,
            is_closed=self._is_closed,
        )

    # ---------------------------------------------------------------------------- reading

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the replicas of the present group, in order."""
        return self.exchange.members

    @property
    def epoch(self) -> int:
        """Number of the present group; each change makes a higher one, equal on its members."""
        return self.exchange.epoch

    @property
    def is_done(self) -> bool:
        """Whether to end the training loop, with ``Elastic``.

        True when this replica has left the group, and when ``Elastic.total_steps`` are taken and
        shared; then on all replicas at the same inner step.
        """
        return self._elastic is not None and self._elastic.is_done

    @property
    def view(self) -> int:
        """Number of the present view with ``Elastic``; -1 without."""
        view = None if self._elastic is None else self._elastic.group.view
        return -1 if view is None else view.number

    def elastic_totals(self) -> ElasticTotals:
        """Return what changes of the group have cost this replica: seconds, views, lost rounds.

        With several workers, worker 0 of a replica knows the seconds of waiting; the others do not.

        Raises:
            RuntimeError: Without ``Elastic``.
        """
        if self._elastic is None:
            raise RuntimeError("elastic_totals() needs peers=Elastic(...)")
        return self._elastic.group.meter.totals(time.monotonic())

    @property
    def replica_index(self) -> int:
        """Place of this replica among the members, from 0."""
        return self.exchange.rank

    @property
    def num_replicas(self) -> int:
        """Number of replicas that train."""
        return self.exchange.size

    def leave(self) -> None:
        """Leave the group after the next round; then ``is_done`` is true.

        The others go on without this replica. Rounds that are under way then may be given up: what
        this replica sent in them is lost. May be called from a signal handler, or another thread.

        Raises:
            RuntimeError: Without ``Elastic``.
        """
        if self._elastic is None:
            raise RuntimeError("leave() needs peers=Elastic(...): in a fixed group, call close()")
        self._elastic.group.leave()

    def agree_on_steps(self, num_steps: int) -> int:
        """Return the least ``num_steps`` of all replicas; every replica calls this at one point.

        Each exchange needs all replicas, so that all must take the same number of inner steps,
        also when their data do not last equally long: stop after what this returns, then flush.

        Args:
            num_steps: Inner steps that this replica could take from here on.

        Raises:
            ValueError: If it is not an integer of at least 0.
            SyncError: If the group fails.
            RuntimeError: With ``Elastic``: replicas join at different steps.
        """
        if self._elastic is not None:
            raise RuntimeError(
                "replicas join at different steps: end the loop by diloco.inner_step, which is the "
                "same on all of them, instead of agree_on_steps"
            )
        num_steps = integer("num_steps", num_steps, 0)
        self._refuse_if_alone()
        self.exchange.inner_step = self.inner_step
        with self._all_workers(()):
            if self._workers is not None:
                num_steps = self._workers.least(num_steps)
            return min(gather_json(self.exchange, num_steps))

    @property
    def outer(self) -> OuterOptimizer:
        """The outer optimizer; assign ``outer.lr`` on every replica to change it from now on."""
        return self.settings.outer

    def config(self) -> dict[str, Any]:
        """Return the arguments that replicas share, as JSON types, for ``config=``."""
        return self.settings.as_json()

    def metrics(self) -> list[SyncMetrics]:
        """Return the latest exchanges, oldest first (4096 at most)."""
        return list(self._recorder.latest)

    def totals(self) -> SyncTotals:
        """Return the sums over all exchanges since the start."""
        return self._recorder.totals

    def on_sync(self, callback: Callable[[SyncMetrics], None]) -> None:
        """Call ``callback`` after every exchange, applied or skipped.

        It is called when a step, or another method here, has done all its work: it may read the
        metrics, save ``state_dict()`` and look at ``outer_parameters()``. What needs the other
        replicas (``step``, ``flush``, ``consensus``, ``change_group``; with ``shard_group`` also
        ``state_dict`` and ``outer_parameters``) it cannot call: a RuntimeError.

        An error that it raises comes out of that method, after the other callbacks have been
        called; what was exchanged stays applied.

        Raises:
            TypeError: If it is not a function.
        """
        if not callable(callback):
            raise TypeError(f"on_sync takes a function of a SyncMetrics, got {callback!r}")
        self._recorder.callbacks.append(callback)

    def consensus(self) -> dict[str, Any]:
        """Return the mean over the replicas of outer parameters and momenta; a collective call.

        Under ``Eager`` they differ between replicas by what is under way; ``flush()`` makes them
        equal. Nothing of this replica is changed.

        Returns:
            ``{"outer": {name: fp32 tensor}, "buffers": {"momentum": {...}}}``, the same bits on all
            replicas.

        Raises:
            SyncError: If the group fails.
        """
        self._refuse_if_alone()
        self._look_at_parts()
        return mean_state(self.exchange, self.parts, self.impl)

    def outer_hash(self) -> str:
        """Return a hash of all outer parameters, equal on replicas that agree bit by bit."""
        return f"{digest_of([part.outer for part in self._parameter_parts()]):016x}"

    def emulate_link(self, gbps: float, rtt_ms: float = 0.0) -> None:
        """Throttle the engine to a slow link, for tests and demonstrations."""
        self.exchange.emulate_link(gbps, rtt_ms)

    # ----------------------------------------------------------------------------- guards

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("this DiLoCo is closed")

    def _refuse_if_alone(self) -> None:
        """Raise if the other replicas, or workers, may not make the same call now."""
        self._refuse_if_closed()
        self._recorder.refuse_in_callback()

    def _refuse_if_unfit(self) -> None:
        """Raise if the model does not hold its local parameters.

        After any call that asks this, the next inner step looks at everything.
        """
        self._next_due = 0
        self._rounds.uninterruptible.refuse_if_broken()
        if self._is_swapped:
            raise RuntimeError("the model holds the outer parameters: leave outer_parameters()")

    def _refuse_changes(self, parts: Iterable[SyncedPart], *, is_sending: bool = False) -> None:
        """Raise if tensors do not lie in memory as when this was attached.

        Args:
            is_sending: Raise too if the optimizers train parameters that were not there, or
                frozen, or if the model has other parameters under their names.
        """
        if self._watch is not None:
            self._watch.read_late(is_last=is_sending)
            if is_sending:
                self._watch.before_send()
        for part in parts:
            part.refuse_changes()

    def _watched_writes(self, parts: Sequence[SyncedPart]) -> AbstractContextManager[None]:
        """Return a block in which an exchange may write parameters of these parts."""
        return nullcontext() if self._watch is None or not parts else self._watch.writing()

    def _forget_writes(self) -> None:
        """Measure nothing of the last write: parameters are written again, beside the rounds."""
        if self._watch is not None:
            self._watch.forget_writes()

    def _parameter_parts(self) -> list[SyncedFragment]:
        return self._plan.parameter_parts()

    def _look_at_parts(self) -> list[SyncedFragment]:
        """Return the parts with parameters as they are after all rounds that were applied."""
        self._refuse_changes(self.parts)
        with self._recorder.deferred_callbacks():
            self._rounds.settle_verdicts(self.inner_step)
        return self._parameter_parts()

    @contextmanager
    def _all_workers(self, parts: Iterable[SyncedPart], *, is_idle: bool = False) -> Iterator[None]:
        """Run a block that writes local parameters of these parts, on all workers of the replica.

        If one worker fails, all raise. The exchange keeps the error of the last block.

        Args:
            is_idle: Nothing is sent in the block; without parts the workers need not meet.
        """
        fragments = [part.fragment for part in parts if isinstance(part, SyncedFragment)]
        try:
            if self._workers is None or (is_idle and not fragments):
                yield
            else:
                # An interrupt of this worker alone would leave the others with one vote too few.
                with self._rounds.uninterruptible(), self._workers.all_workers(fragments):
                    try:
                        yield
                    finally:
                        self._rounds.post_norms()
        except SyncError as error:
            # A copy: the frames of the error itself would live as long as the exchange.
            self.exchange.last_error = type(error)(str(error))
            raise
        if not is_idle:
            self.exchange.last_error = None
