"""DiLoCo attached to a training loop: from the step hook to the outer step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..base import recording
from ..base.checks import flag
from ..base.errors import NonFiniteError, PeerLeft
from ..exchange.membership import verdicts
from ..methods.outer import Factory, OuterOptimizer
from ..methods.overlap import Overlap
from ..methods.settings import Config, Settings
from ..ops.dispatch import resolve_engine_impl
from ..ops.wire import WireFormat
from ..options import Link, NonFinite, Wire, check_names, choices_of, in_groups
from ..replica.fragments import FragmentSpec
from ..replica.hooks import SkippedSteps, StepHooks, hookable
from ..replica.model_watch import ModelWatch
from ..replica.workers import ReplicaWorkers
from ..rounds.agreement import handshake
from ..rounds.agreement.resets import check_on_reset
from ..rounds.metrics import Recorder
from ..rounds.weighing import Weight
from .agreement import Agreement, meet_workers
from .arguments import Peers, check_arguments, seconds_of, settings_among, weight_of
from .connecting import connect, make_runner, shard_group_of, workers_of
from .planning import Plan, make_plan
from .saved import Saved

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class DiLoCo(Saved):
    """Train this replica on its own and share what it learned every ``sync_every`` steps.

    Args:
        model: Where names and layers come from.
        optimizer: The inner optimizer, or several that together make one step. The parameters in
            their groups that require gradients are exchanged; they are written in place only. With
            ``attach=False`` anything that has ``param_groups``.
        sync_every: Inner steps between two sends of the same fragment (H).
        fragments: A number (1), ``"layers:3"``, ``"sequential:3"`` or lists of name patterns.
        offsets: 1-based inner step of each fragment's first send, by default floor(H*(p+1)/P) and
            at least 1.
        overlap: When results are applied: ``Blocking()`` (default), ``Streaming``, ``Delayed``,
            ``Eager`` or ``CO2``.
        outer: ``SGD``, ``HeavyBall``, ``Nesterov`` (default), ``Adam``, or their names for the
            default of each; or a callable that makes a ``torch.optim.Optimizer`` from a list of
            parameters.
        peers: The replicas: a process group, a one-dimensional DeviceMesh, ``StorePeers`` (separate
            jobs that share a store), or ``Elastic`` (replicas come and go by themselves; without
            ``init``). "alone": a single replica. Default: the default group, or without one a
            single replica.
        shard_group: The workers of this replica, a ProcessGroup or one-dimensional DeviceMesh, when
            they hold the same parameters (DDP, ZeRO-1/2): exchange and outer state are split among
            them. ``peers`` then has this worker's peers alone.
        wire: What travels ("int8"): a name of ``wire.WIRES``, or ``Wire`` with a block size,
            stochastic rounding, error feedback. A mapping of regular expressions to names gives
            groups of parameters wires of their own.
        link: How payloads travel: "gloo", "nccl", or ``Link`` with lanes, chunks and timeouts.
        nonfinite: What becomes of a round in which a replica has NaN or infinities: "raise"
            (default), "skip", "reset", or ``NonFinite``.
        weight: This replica's weight in the mean, a number or a callable (tokens of the round),
            called once in each step that sends, whatever the number of fragments; what is sent
            again at this step has the same weight. When it raises, that comes out of the step,
            and the round fails on the other replicas too.
        init: "broadcast" (weights of the lowest replica), "check" (raise if they differ) or
            "join" (take over the state of replicas that train already; see ``change_group``).
        impl: Force an implementation of the operators.
        config: Saved arguments (``diloco.config()``), or a JSON file of them, for those that are
            not given here; default: the file that ``DILOCO_COMM_CONFIG`` names.
        average_buffers: Average floating-point buffers too, in fp32, at the end of each round
            (default: no); those that hold infinities or NaN from the start (masks) are left out.
        offload: "cpu" keeps outer parameters and momentum of a model on a GPU in page-locked host
            memory, and brings them to the device chunk by chunk when they are needed.
        norms: Measure the norm of the pseudo-gradient, one more pass over the parameters.
        attach: False leaves it to the user to call ``step()`` after each optimizer step.
        checks: "raise" (default) or "warn" when the program does with model or optimizer what no
            exchange survives, such as loading other weights in the middle of a run or stepping
            an optimizer that was not given; "off" looks at nothing. Weights loaded before the first
            step are taken over, on all replicas or on none. ``docs/explanation/checks.md`` has all.
        choices: The choices of ``wire``, ``link``, ``nonfinite`` and ``peers`` by their names of
            0.1, as ``options.HOMES`` has them, until 0.3. A DeprecationWarning shows the new line.

    Raises:
        ValueError, TypeError: For arguments that cannot be.
        RuntimeError: If the optimizer is attached to another DiLoCo that is not closed.
        ReplicaMismatch: On every replica, when models, arguments or (``init="check"``) weights
            differ between them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        sync_every: int | None = None,
        fragments: FragmentSpec | None = None,
        offsets: Sequence[int] | None = None,
        overlap: Overlap | str | None = None,
        outer: OuterOptimizer | Factory | str | None = None,
        wire: str | WireFormat | Mapping[str, str] | Wire | None = None,
        peers: Peers | None = None,
        link: str | Link | None = None,
        nonfinite: str | NonFinite | None = None,
        shard_group: Any = None,
        weight: Weight = 1.0,
        init: str = "broadcast",
        impl: str = "",
        config: Config | None = None,
        average_buffers: bool | None = None,
        norms: bool = False,
        attach: bool = True,
        checks: str = "raise",
        offload: str | None = None,
        **choices: Any,
    ) -> None:
        # By name, for the functions below that take many of them.
        given = dict(locals())
        check_names(DiLoCo, choices)
        told = {**given.pop("choices"), **given}
        arguments = choices_of(told)
        in_groups("DiLoCo", told)
        check_arguments(arguments)
        recording.start_if_asked()
        weight, seconds = weight_of(weight), seconds_of(arguments["timeout"])
        settings = settings_among(arguments, config)
        on_reset, membership = arguments["on_reset"], arguments["membership"]
        check_on_reset(on_reset, settings)
        optimizers = hookable(optimizer, attach=attach)
        self._skipped = SkippedSteps(optimizers)
        self._saved_writes: dict[int, set[int]] = {}

        shards = shard_group_of(shard_group, seconds)
        plan = make_plan(model, optimizers, settings, shard_group=shards, offload=offload)
        workers = workers_of(plan, seconds)
        if workers is not None:
            same = {"norms": norms, "replica": arguments["replica"]}
            meet_workers(workers, plan, settings, same)
        impl = resolve_engine_impl(impl, plan.device.type)
        measures = {"weight": weight, "norms": norms, "on_reset": on_reset}
        begin = partial(
            self._begin, model, optimizers, settings, plan, workers, impl, seconds, measures
        )
        if membership is None:
            store = handshake.connected_store(arguments["store"], seconds)
            named = arguments["group"], arguments["mesh"], store, arguments["num_replicas"]
            group = handshake.replica_group(*named)
            begin(arguments | {"group": group, "store": store})
        else:
            from .views import ElasticTraining

            self._elastic = ElasticTraining(
                membership, plan, settings, workers, seconds, optimizers
            )
            self._elastic.enter(self, begin, arguments)
        attached = [part.fragment for part in plan.parameter_parts()]
        self._watch = ModelWatch(
            model,
            optimizers,
            attached,
            self._take_loaded,
            checks,
            sync_every=settings.sync_every,
            is_hooked=attach,
        )
        if checks != "off":
            self._rounds.same_data.begin(self.parts, self.inner_step)
        if attach:
            self._hooks = StepHooks(optimizers, self._step)

    def _begin(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        settings: Settings,
        plan: Plan,
        workers: ReplicaWorkers | None,
        impl: str,
        timeout_s: float,
        measures: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> None:
        """Connect to the other replicas, and begin with the same state on all of them."""
        with nullcontext() if workers is None else workers.all_workers():
            exchange = connect(plan, settings, arguments, impl=impl, timeout_s=timeout_s)
        recorder = Recorder()
        rounds = make_runner(exchange, plan, settings, recorder, workers, impl, **measures)
        super().__init__(model, optimizers, settings, plan, exchange, rounds, recorder, workers)
        self._agreement = Agreement(
            exchange, plan, settings, measures["weight"], impl, rounds.end_like_others
        )
        self._agreement.beside, self._agreement.inner = map(arguments.get, ("beside", "inner"))
        try:
            with self._all_workers(self.parts):
                init, source = arguments["init"], arguments.get("source_rank", 0)
                start = partial(self._agreement.start, model, optimizers, arguments["group"])
                self.inner_step = start(init, source)
        except BaseException:
            if self._elastic is None:
                self.close()
            exchange.close()
            raise

    def __enter__(self) -> DiLoCo:
        self._refuse_if_closed()
        return self

    def __exit__(self, *exception: object) -> None:
        """End training: ``flush(final=True)``, which all replicas call, and ``close()``.

        After an error nothing is shared, nor with ``Elastic``, whose other replicas may train on.
        """
        is_finished = False
        try:
            if exception[:1] == (None,):
                self._share_rest()
                is_finished = True
        finally:
            self._close(is_finished=is_finished)

    def _share_rest(self) -> None:
        """Flush at the end of a block, unless it has ended already or its group is broken."""
        is_over = self._is_closed or self.exchange.last_error is not None
        if is_over or self._elastic is not None:
            return
        try:
            self.flush(final=True)
        except PeerLeft:
            # The flush before was the last one of the others.
            if self._rounds.has_unsent(self.inner_step):
                raise

    # -------------------------------------------------------------------- one inner step

    def step(self) -> None:
        """Count one inner step, send what is due and apply what has arrived.

        For the user with ``attach=False``; else each step of the optimizer does it.

        Raises:
            RuntimeError: The optimizer's steps are counted already, or this DiLoCo is closed.
            SyncError: An exchange failed and nothing of it was applied; other fragments that were
                due and did not fail are applied. ``change_group`` goes on with the replicas that
                are left; after a NonFiniteError training may simply go on.
            ValueError: The optimizer trains parameters that it did not when this was constructed,
                or one has had another shape, dtype, device or order in memory since.
            KeyboardInterrupt: On Ctrl-C, when the outer step is done, or before it has begun: then
                the next call does it. While results are waited for it comes at once, and they are
                applied by the next call. A second Ctrl-C breaks in, and only ``close`` is left.
        """
        if self._hooks is not None and not self._is_closed:
            raise RuntimeError(
                "each step of the optimizer is counted already: leave out diloco.step(), or "
                "construct DiLoCo with attach=False"
            )
        self._step()

    def _step(self, *, is_skipped: bool = False) -> None:
        """Take an inner step; ``is_skipped`` if the optimizer was not called for it."""
        take_step = partial(self._take_step, is_skipped=is_skipped)
        if self._elastic is None:
            take_step()
        elif not self.is_done:
            self._refuse_if_closed()
            self._elastic.take_step(self, take_step)

    def _take_step(self, *, is_skipped: bool = False, again: Collection[int] | None = None) -> None:
        """Count an inner step, and exchange what is due.

        The local parameters of a part that is due are subtracted from the outer ones, encoded and
        sent. A mean that is due goes through the outer optimizer, into outer and local parameters.

        Args:
            again: The step is counted already, and the exchange of these parts broke off.
        """
        self._refuse_if_alone()
        self._refuse_if_unfit()
        self._rounds.uninterruptible.has_begun = is_done = False
        self.exchange.tell_of_lost_store()
        self.inner_step += again is None
        try:
            if again is None:
                self._skipped.observe(is_skipped=is_skipped)
                if self._watch is not None:
                    self._watch.stepped()
            due = self._plan.sent_at(self.inner_step)
            if again is not None:
                due = [part for part in due if part.index in again]
            written = self._plan.written_at(self.inner_step, self._saved_writes)
            with self._recorder.deferred_callbacks(), self._all_workers(written, is_idle=not due):
                self._refuse_changes(dict.fromkeys([*due, *written]), is_sending=bool(due))
                due = [part for part in due if part.buffers is not None]
                with self._watched_writes([*due, *written]):
                    # Encode and send what is due; wait for means that are due; outer step on each.
                    self._rounds.exchange_parts(due, self.inner_step, self._skipped.count)
                is_done = True
        except BaseException as error:
            if again is None:
                self._take_step_back(error, is_done)
            raise

    def _take_loaded(self) -> str:
        """Take weights that the program has loaded since the last step for the outer parameters.

        Before the first step alone: later, the momentum and rounds under way are of other weights.
        Then the sentence that says so is returned.
        """
        if self.inner_step == 0:
            self._agreement.begin_anew()
            return ""
        return (
            f"weights were loaded into the model after {self.inner_step} inner steps, and the "
            "outer parameters, which are of the weights before, would pull them back: load weights "
            "before DiLoCo is constructed; to go on from a checkpoint, give its outer state to "
            "diloco.load_state_dict() too, on all replicas"
        )

    def _take_step_back(self, error: BaseException, is_done: bool) -> None:
        """After an interrupt before anything was sent or applied, the next call does all of it."""
        is_untouched = not (is_done or self._rounds.uninterruptible.has_begun)
        if is_untouched and not isinstance(error, Exception):
            self.inner_step -= 1

    def flush(self, *, final: bool = False) -> None:
        """Share what was trained since the last send, and apply it; every replica calls this.

        Afterwards outer and local parameters are identical on all replicas. A fragment that no
        replica has trained since its last send is sent no more.

        Args:
            final: Training ends here: Nesterov's outer parameters, which are ahead of the iterate
                by lr * momentum, are set back to that iterate; the loss is lower there. Training
                that goes on all the same has lost that movement. The same on all replicas.

        Raises:
            SyncError: As ``step``.
            NonFiniteError: Fragments had to be skipped, on all replicas; the others are shared.
            ReplicaMismatch: The outer states differ all the same: a program has written into one.
        """
        flush = partial(self._flush, is_final=flag("final", final))
        if self._elastic is None:
            flush()
        elif not self.is_done:
            self._elastic.flush(self, flush)

    def _flush(self, *, is_final: bool | None = None) -> None:
        """As ``flush``; without ``is_final``, as the others do, whose flush broke off."""
        self._refuse_if_alone()
        self._refuse_if_unfit()
        # As in the headers of rounds, which replicas that still train send.
        self.exchange.inner_step = self.inner_step - self._skipped.count
        with self._recorder.deferred_callbacks(), self._all_workers(self.parts):
            self._refuse_changes(self.parts, is_sending=True)
            self._forget_writes()
            self._rounds.flush(self.inner_step, self._skipped.count, is_final)
            if self.exchange.size > 1:
                self._agreement.refuse_different_state(is_shared=True)

    # -------------------------------------------------------------------------- the data

    def shard(self, loader: DataLoader[Any], *, batches_per_step: int = 1) -> DataLoader[Any]:
        """Return a loader like this one that reads the own part of this replica.

        For a map-style data set and the sampler that ``DataLoader(dataset, shuffle=...)`` makes;
        its other arguments are kept. Not a collective call. The orders come from ``DiLoCo(seed=)``,
        which is equal on all replicas, not from ``generator``. Worker s of S of replica number r
        among W (see ``replica_index``) reads part r * S + s of W * S. FSDP2, DDP and the workers of
        ``shard_group`` are data parallel, each with another part. Where tensors may be sharded in
        another way too, that is an error.

        In a fixed group all parts have the same number of batches, and so all replicas end at the
        same step: the first samples of an epoch are repeated at its end, at most W * S - 1, or with
        ``drop_last=True`` the last ones are left out. Each epoch has another order.
        ``loader.sampler.state_dict()`` and ``load_state_dict()`` go on within an epoch; without
        them a resumed run begins with the first epoch.

        With ``Elastic`` the loader's sampler is an ``ElasticSampler``: iterate over the loader
        once, and leave the loop when ``is_done`` is true.

        Args:
            batches_per_step: Batches of one inner step, with gradient accumulation. It matters with
                ``Elastic``, and for the state of the sampler.

        Raises:
            TypeError, ValueError: If the data set, or a sampler that was given, can only be
                divided by the program; the sentence says how.
        """
        from .sampler import shard

        return shard(loader, self, batches_per_step=batches_per_step)

    # ------------------------------------------------------------------------- the group

    def change_group(
        self, members: Iterable[int] | str, *, store: dist.Store | str | None = None
    ) -> None:
        """Go on with these replicas: the survivors of a failure, with or without newcomers.

        Every member calls this after the same failure or at the same inner step; a newcomer
        constructs ``DiLoCo(..., init="join", store=, replica=, members=)`` meanwhile. Rounds under
        way count, and are applied, if all survivors have voted for them: so no outer step is lost
        that any replica has taken. Once the members have met, the old group is at an end; after an
        error only another call, or ``close``, is left.

        Args:
            members: Numbers of the replicas that go on; "survivors": those that the members of the
                present group have agreed on when it failed, as ``SyncError.survivors`` says.
            store: Where they meet, if the old store is gone.

        Raises:
            SyncError: If the members did not all come or cannot reach each other, or a replica
                lacks a round that counts; the same on all of them. If nobody could decide who
                survives.
            LeftBehind: If the others have decided to go on without this replica.
            NonFiniteError: The new group is formed. A round under way, on NCCL, turned out to have
                values that no wire carries, and ``on_nonfinite`` is "raise".
            ValueError: For "survivors", if there was no failure; for numbers that cannot be.
            RuntimeError: With ``Elastic``, which changes the group by itself.
        """
        if self._elastic is not None:
            raise RuntimeError(
                "peers=Elastic(...) changes the group by itself: leave out change_group"
            )
        self._change_group(members, store)

    def _change_group(
        self, members: Iterable[int] | str, store: dist.Store | str | None = None
    ) -> None:
        self._refuse_if_alone()
        self._refuse_if_unfit()
        unreported: list[NonFiniteError] = []
        self._forget_writes()
        with self._recorder.deferred_callbacks(), self._all_workers(self.parts):
            self._refuse_changes(self.parts)
            repairs = self.exchange.change_group(
                verdicts.chosen_members(self.exchange, members, self._workers),
                store=handshake.connected_store(store, self.exchange.join_timeout),
                last_rounds=partial(self._rounds.last_rounds, self.inner_step, unreported),
                inner_step=self.inner_step,
            )
            with self._rounds.uninterruptible():
                self._rounds.settle(repairs, self.inner_step, self.exchange.agreed_step)
                self.inner_step = self.exchange.agreed_step
            self.inner_step = self._agreement.renew(self.inner_step)
        if unreported:
            raise unreported[0]
