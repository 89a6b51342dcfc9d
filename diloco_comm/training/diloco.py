"""DiLoCo attached to a training loop: from the step hook to the outer step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import unwrap
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack, overload

from .. import ops
from ..base import recording
from ..base.checks import choice, flag, integer, refuse_copy
from ..base.errors import LeftBehind, NonFiniteError, PeerLeft
from ..methods.outer import OuterOptimizer
from ..methods.overlap import Blocking
from ..monitor.figures import FiguresOf
from ..ops.digests import digest_of
from ..ops.implementations import resolve_engine_impl
from ..options import choices_of, closed
from ..replica.fragments import all_parameters
from ..replica.hooks import SkippedSteps, StepHooks, hookable, is_in_step, refuse_in_step
from ..replica.model_watch import ModelWatch, outer_has_weights, warn_at_exit
from ..rounds import handshake
from ..rounds.consensus import mean_outer, mean_state
from ..rounds.load import Restore
from ..rounds.metrics import Recorder, SyncMetrics, SyncTotals
from ..rounds.nonfinite import check_on_reset
from ..rounds.part import SyncedFragment, SyncedPart
from ..rounds.state_dict import Scope, collect, saved_writes, with_run
from . import arguments
from .group import Place, Replica, join, meet_workers, progress_of, shard_group_of, workers_of
from .plan import make_plan

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from ..elastic.events import ElasticTotals
    from ..methods.settings import Config
    from ..replica.fragments import FragmentSpec
    from ..replica.model_watch import Checks
    from .leases import Leasing
    from .views import ElasticTraining


class DiLoCo:
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
        overlap: When results are applied: ``Blocking``, ``Streaming``, ``Delayed``, ``Eager`` or
            ``CO2``, or their names for the default of each.
        outer: ``SGD``, ``HeavyBall``, ``Nesterov``, ``Adam``, or their names for the
            default of each; or a callable that makes a ``torch.optim.Optimizer`` from a list of
            parameters.
        peers: The replicas: a process group, a one-dimensional DeviceMesh, ``StorePeers`` (separate
            jobs that share a store), or ``Elastic`` (replicas come and go by themselves; without
            ``init``). "alone": a single replica. Default: the default group, or without one a
            single replica.
        shard_group: The workers of this replica, a ProcessGroup or one-dimensional DeviceMesh, when
            they hold the same parameters (DDP, ZeRO-1/2): exchange and outer state are split among
            them. ``peers`` then has this worker's peers alone.
        wire: The format of the payloads ("int8"): a name of ``wire.WIRES``, or ``Wire`` with a
            block size, stochastic rounding, error feedback. A mapping of regular expressions to
            names gives groups of parameters wires of their own.
        link: "gloo", "tcp" (over a single port), "nccl", or ``Link`` with lanes, timeouts, keys.
        nonfinite: The end of a round in which a replica has NaN or infinities: "raise"
            (default), "skip", "reset", or ``NonFinite``.
        weight: This replica's weight in the mean, a number or a callable (tokens of the round),
            called once in each step that sends, whatever the number of fragments; what is sent
            again at this step has the same weight. When it raises, that comes out of the step,
            and the round fails on the other replicas too.
        init: "broadcast" (weights of the lowest replica), "check" (raise if they differ) or
            "join" (take over the state of replicas that train already; see ``change_group``).
        impl: Force an implementation of the operators.
        config: Saved arguments (``diloco.config()``), or a JSON file of them, in place of the
            defaults: an argument that is given wins over ``config``, and ``sync_every`` may be left
            out. None: the file that ``DILOCO_COMM_CONFIG`` names, if it names one.
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
        name: Objects of one name meet, also if threads make them in another order on each replica.
            A second object of the same layout over the same peers needs a name.

    Attributes:
        inner_step: Inner steps taken.

    Raises:
        ValueError, TypeError: For arguments that cannot be.
        RuntimeError: If the optimizer is attached to another DiLoCo that is not closed.
        ReplicaMismatch: On every replica, when models, arguments or (``init="check"``) weights
            differ between them.
    """

    # Only with ``Elastic``; else None.
    _elastic: ElasticTraining | None = None
    # The hooks of the optimizers; None with ``attach=False``.
    _hooks: StepHooks | None = None
    # How many batches of a loader a trainer takes at once, one for each worker; None: it does not.
    _batches_at_once: int | None = None
    # By inner step, the parts with a round from a saved state that this step applies.
    _saved_writes: Mapping[int, set[int]] = {}
    # Inner steps before this one are only counted: they send nothing and apply nothing.
    _next_due = 0
    _is_swapped = _is_closed = False
    # The inner step of the newest ``state_dict()``.
    _saved_step = -1

    @overload
    def __init__(
        self,
        model: nn.Module,
        optimizer: arguments.Optimizers,
        *,
        sync_every: int,
        fragments: FragmentSpec = 1,
        offsets: Sequence[int] | None = None,
        overlap: arguments.OverlapOption = "blocking",
        outer: arguments.OuterOption = "nesterov",
        wire: arguments.WireOption = "int8",
        peers: arguments.Peers | None = None,
        link: arguments.LinkOption | None = None,
        nonfinite: arguments.NonFiniteOption = "raise",
        shard_group: arguments.Workers | None = None,
        weight: arguments.Weight = 1.0,
        init: arguments.Init = "broadcast",
        impl: str = "",
        config: None = None,
        average_buffers: bool = False,
        norms: bool = False,
        attach: bool = True,
        checks: Checks = "raise",
        offload: Literal["cpu"] | None = None,
        name: str = "default",
    ) -> None: ...

    @overload
    def __init__(
        self,
        model: nn.Module,
        optimizer: arguments.Optimizers,
        *,
        config: Config | None,
        **given: Unpack[arguments.BesideConfig],
    ) -> None: ...

    @closed
    def __init__(self, model: nn.Module, optimizer: Any, **given: Any) -> None:
        # Options: objects such as ``Link`` become one value for each of their names.
        chosen = choices_of(arguments.defaults_of(DiLoCo) | given)
        arguments.check_arguments(model, chosen)
        recording.start_if_asked()
        names = "norms", "attach", "checks", "on_reset"
        norms, attach, checks, on_reset = (chosen[name] for name in names)
        weight = arguments.weight_of(chosen["weight"])
        timeout_s = arguments.seconds_of(chosen["timeout"])

        # Settings: what all replicas share.
        settings = arguments.settings_of(choices_of(given))
        check_on_reset(on_reset, settings)

        # Plan: the parts of this replica, and the workers that train it.
        optimizers = hookable(optimizer, attach=attach)
        shards, offload = shard_group_of(chosen["shard_group"], timeout_s), chosen["offload"]
        plan = make_plan(model, optimizers, settings, shard_group=shards, offload=offload)
        workers = workers_of(plan, timeout_s)
        if workers is not None:
            same = {"norms": norms, "replica": chosen["replica"]}
            meet_workers(workers, plan, settings, same)
        self.settings, self.impl = settings, resolve_engine_impl(chosen["impl"], plan.device.type)
        # Fragments, and averaged buffers after them; and when each of these parts is sent.
        self.parts, self.schedule, self.device = plan.parts, plan.schedule, plan.device
        self._model, self._optimizers = model, optimizers
        self._plan, self._workers, self._recorder = plan, workers, Recorder()
        self._skipped = SkippedSteps(optimizers)

        # Peers: the exchange with the other replicas, and the same state on all of them.
        known = model, optimizers, settings, plan, workers, self._recorder
        own = {"timeout_s": timeout_s, "weight": weight, "norms": norms, "on_reset": on_reset}
        replica = Replica(*known, FiguresOf(self), impl=self.impl, **own)
        try:
            place = Place.of(chosen, timeout_s)
            if chosen["membership"] is None:
                joined = join(replica, place)
            else:
                from .views import ElasticTraining

                self._elastic = ElasticTraining(chosen["membership"], replica, place)
                joined = self._elastic.enter(place)
        except BaseException:
            if workers is not None:
                workers.close()
            raise
        self.exchange, self._rounds = joined.rounds.exchange, joined.rounds
        self._agreement, self.inner_step, self._twins = joined[1:]
        self._progress = progress_of(replica, self.exchange, place.name)

        # The loop: what looks at the model, and what counts the optimizer's steps.
        self._watch = ModelWatch(
            model,
            optimizers,
            [part.fragment for part in plan.parameter_parts()],
            self._take_loaded,
            checks,
            sync_every=settings.sync_every,
            is_hooked=attach,
            refuses_new=True,
        )
        try:
            if self._elastic is not None:
                self._elastic.begin(self)
            if checks != "off":
                self._rounds.same_data.begin(self.parts, self.inner_step)
        except BaseException:
            self._close(is_finished=False)
            raise
        if attach:
            self._hooks = StepHooks(optimizers, self._step)
        warn_at_exit(self)
        self._progress.begin(plan.words(settings, self.inner_step), self.inner_step)

    def __enter__(self) -> DiLoCo:
        self._refuse_if_closed()
        return self

    def __exit__(self, *exception: object) -> None:
        """End training: ``flush(final=True)``, which all replicas call, and ``close()``.

        After an error nothing is shared, and no function of ``after_step`` is called; nor is
        anything shared with ``Elastic``, whose other replicas may train on.
        """
        is_finished = False
        try:
            if exception[:1] == (None,):
                self._share_rest()
                is_finished = True
                self._recorder.call_waiting()
        finally:
            self._close(is_finished=is_finished)

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self.exchange.has_failed or self._rounds.uninterruptible.is_broken

    def _share_rest(self) -> None:
        """Flush at the end of a block, unless it is closed or its last exchange has failed."""
        if self._is_over or self._elastic is not None:
            return
        was_caught = isinstance(self.exchange.last_error, NonFiniteError)
        try:
            self.flush(final=True)
        except NonFiniteError:
            # The program has caught such an error before, and goes on all the same.
            if not was_caught:
                raise
        except (PeerLeft, LeftBehind):
            # The flush before was the last one of the others, or they go on without this replica.
            if self._rounds.has_unsent(self.inner_step):
                raise

    def close(self) -> None:
        """Tell the peers, end the engine's threads and take the hooks off; idempotent.

        Parameters, metrics and ``state_dict`` may still be looked at. A warning says so if inner
        steps were neither shared nor saved by ``state_dict``.
        """
        try:
            if not is_in_step(sys._getframe(1), self._optimizers, self, _CALLS):
                self._recorder.call_waiting()
            self._warn_of_unshared_steps()
        finally:
            self._close(is_finished=True)

    def _warn_of_unshared_steps(self) -> None:
        """Warn when training ends in good order, and without a flush."""
        is_alone = self._elastic is not None or self.exchange.size == 1
        is_saved = self._is_over or is_alone or self._saved_step == self.inner_step
        if not is_saved and self._rounds.has_unsent(self.inner_step):
            name = f"replica {self.exchange.replica}"
            remedy = "call flush() at the end, on all replicas, or save a state_dict()"
            self._watch.warn_of_unshared_steps(name, self.inner_step, remedy)

    def _close(self, *, is_finished: bool) -> None:
        """As ``close``; ``is_finished`` if this replica has taken all its steps."""
        self._is_closed, self._next_due = True, 0
        if self._hooks is not None:
            self._hooks.remove()
        self._watch.close()
        self._twins.leave()
        self.exchange.inner_step = self.inner_step
        if self._elastic is None:
            self.exchange.close()
        else:
            self._elastic.close(self.exchange, is_finished=is_finished)
        if self._workers is not None:
            self._workers.close()
        changes = None if self._elastic is None else self.elastic_totals()
        self._progress.end(self.inner_step, changes)

    def __reduce__(self) -> NoReturn:
        refuse_copy(self, "save diloco.state_dict() for load_state_dict() of a new DiLoCo")

    def __repr__(self) -> str:
        if not hasattr(self, "exchange"):  # An error came out of the constructor.
            return "DiLoCo(not attached)"
        place = f"replica {self.exchange.replica} of members {list(self.exchange.members)}"
        words = [place, *self._plan.words(self.settings, self.inner_step)]
        return f"DiLoCo({', '.join(words + ['closed'] * self._is_closed)})"

    # ----------------------------------------------------------------------------- one inner step

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
        if self._elastic is None:
            self._take_step(is_skipped=is_skipped)
        elif not self.is_done:
            self._refuse_if_alone()
            with self._rounds.in_order():
                self._elastic.take_step(self, is_skipped=is_skipped)
        if self._recorder.waiting:
            self._recorder.call_waiting()

    def _take_step(self, *, is_skipped: bool = False, again: Collection[int] | None = None) -> None:
        """Count an inner step, and exchange what is due.

        The local parameters of a part that is due are subtracted from the outer ones, encoded and
        sent. A mean that is due goes through the outer optimizer, into outer and local parameters.

        Args:
            again: The step is counted already, and the exchange of these parts broke off.
        """
        if again is None and self.inner_step + 1 < self._next_due:
            self.inner_step += 1
            self._count_step(is_skipped)
            return
        self._refuse_if_alone()
        self._refuse_if_unfit()
        self._twins.has_begun = True
        if self._twins.others:
            self._twins.refuse()
        self._rounds.uninterruptible.has_begun = is_done = False
        self.inner_step += again is None
        try:
            if again is None:
                self._count_step(is_skipped)
            due = self._plan.sent_at(self.inner_step)
            due = [part for part in due if again is None or part.index in again]
            written = self._plan.written_at(self.inner_step, self._saved_writes)
            with (
                self._recorder.deferred_callbacks(),
                self._rounds.all_workers(written, is_idle=not due),
            ):
                self._refuse_changes(dict.fromkeys([*due, *written]), is_sending=bool(due))
                due = [part for part in due if part.buffers is not None]
                with self._watch.writing() if due or written else nullcontext():
                    # Encode and send what is due; wait for means that are due; outer step on each.
                    self._rounds.exchange_parts(due, self.inner_step, self._skipped.count)
                is_done = True
                # Before the callbacks: a call in one of them may set this to 0, which must last.
                self._next_due = self._plan.next_due(self.inner_step, self._saved_writes)
        except BaseException as error:
            self._next_due = 0
            if again is None:
                self._take_step_back(error, is_done)
            raise

    def _count_step(self, is_skipped: bool) -> None:
        self._skipped.observe(is_skipped=is_skipped)
        self._watch.stepped()

    def _take_loaded(self) -> str:
        """Make weights that the program has loaded before the first step the outer parameters.

        Later, momentum and rounds under way belong to other weights: then only return a sentence
        that says so; "" otherwise.
        """
        if self.inner_step == 0:
            self._agreement.begin_anew()
            return ""
        return outer_has_weights(self.inner_step)

    def _take_step_back(self, error: BaseException, is_done: bool) -> None:
        """Undo the count of a step that a Ctrl-C has interrupted before it sent or applied."""
        if not (is_done or self._rounds.uninterruptible.has_begun or isinstance(error, Exception)):
            self.inner_step -= 1

    def flush(self, *, final: bool = False) -> None:
        """Share what was trained since the last send, and apply it; every replica calls this.

        Afterwards outer and local parameters are identical on all replicas. A fragment that no
        replica has trained since its last send is sent no more.

        Args:
            final: Training ends here, on the mean of the last round, whatever the outer optimizer;
                where a load or a join has lost that mean, without Nesterov's look-ahead alone.
                Training that goes on has lost the last outer step. The same on all replicas.

        Raises:
            SyncError: As ``step``.
            NonFiniteError: Fragments had to be skipped, on all replicas; the others are shared.
            ReplicaMismatch: The outer states differ all the same: a program has written into one.
        """
        is_final = flag("final", final)
        self._refuse_in_step("flush")
        if self._elastic is None:
            self._flush(is_final=is_final)
        elif not self.is_done:
            self._refuse_if_alone()
            with self._rounds.in_order():
                self._elastic.flush(self, is_final=is_final)
        self._recorder.call_waiting()

    def _flush(self, *, is_final: bool | None) -> None:
        """Flush, without the checks of ``flush``; None: end training only if other replicas do."""
        self._refuse_if_alone()
        self._refuse_if_unfit()
        # The same number as in the headers of rounds, with which other replicas compare it.
        self.exchange.inner_step = self.inner_step - self._skipped.count
        with self._recorder.deferred_callbacks(), self._rounds.all_workers(self.parts):
            self._refuse_changes(self.parts, is_sending=True)
            self._watch.forget_writes()
            self._rounds.flush(self.inner_step, self._skipped.count, is_final)
            if self.exchange.size > 1:
                self._agreement.refuse_different_state(is_shared=True)

    # ----------------------------------------------------------------------------------- the data

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

    # ---------------------------------------------------------------------------------- the group

    def change_group(
        self, members: Iterable[int] | str, *, store: dist.Store | str | None = None
    ) -> None:
        """Go on with these replicas: the survivors of a failure, with or without newcomers.

        Every member calls this after the same failure or at the same inner step; a newcomer
        constructs ``DiLoCo(..., init="join", peers=StorePeers(...))`` meanwhile. Rounds under
        way count, and are applied, if all survivors have voted for them: so no outer step is lost
        that any replica has taken. The call ends the old group; after an error only another call,
        or ``close``, is left.

        Args:
            members: Numbers of the replicas that go on; "survivors": all members that live.
            store: Has the record of the group from now on, if the old store is gone.

        Raises:
            SyncError: If the members did not all come or cannot reach each other, or a replica
                lacks a round that counts.
            LeftBehind: If the others have decided to go on without this replica.
            NonFiniteError: The new group is formed. A round under way, on NCCL, turned out to have
                values that no wire carries, and ``on_nonfinite`` is "raise".
            ValueError: For "survivors", if there was no failure; for numbers that cannot be.
            RuntimeError: With ``Elastic``, which changes the group by itself.
        """
        if self._elastic is not None:
            raise RuntimeError("Elastic(...) changes the group by itself: leave out change_group")
        self._refuse_in_step("change_group")
        with self._rounds.in_order():
            self._change_group(members, store)

    def _change_group(self, members: Iterable[int] | str, store: dist.Store | str | None) -> None:
        self._refuse_if_alone()
        self._refuse_if_unfit()
        self._watch.forget_writes()
        exchange = self.exchange
        chosen = exchange.chosen_members(members, self._workers)
        with self._rounds.all_workers(self.parts):
            self._refuse_changes(self.parts)
            link = exchange.link_keys, exchange.proxy
            there = handshake.connected_store(store, exchange.join_timeout, *link)
        unreported: list[NonFiniteError] = []
        while True:
            before = self.inner_step
            last = partial(self._rounds.last_rounds, before, unreported)
            exchange.change_group(chosen, store=there, last_rounds=last, inner_step=before)
            with self._recorder.deferred_callbacks(), self._rounds.all_workers(self.parts):
                with self._rounds.uninterruptible():
                    self._rounds.settle(exchange.take_repairs(), before, exchange.agreed_step)
                    self.inner_step = exchange.agreed_step
                self.inner_step = self._agreement.renew(self.inner_step)
                exchange.has_state()
            if chosen is None or tuple(chosen) == exchange.members:
                break
            there = None
        if unreported:
            raise unreported[0]

    @property
    def _leasing(self) -> Leasing | None:
        return None if self._elastic is None else self._elastic.leasing

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

    def doing(self, phase: str) -> AbstractContextManager[None]:
        """Name a phase, "evaluation" or "checkpoint", to those that wait, in a ``with`` block."""
        choice("phase", phase, ("evaluation", "checkpoint"))
        return (self.exchange if self._elastic is None else self._elastic.group).doing(phase)

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
        self._refuse_in_step("agree_on_steps")
        self._refuse_if_alone()
        self.exchange.inner_step = self.inner_step
        with self._rounds.all_workers(()):
            if self._workers is not None:
                num_steps = self._workers.least(num_steps)
            return min(handshake.gather_json(self.exchange, num_steps))

    def emulate_link(self, gbps: float, rtt_ms: float = 0.0) -> None:
        """Throttle the engine to a slow link, for tests and demonstrations."""
        self.exchange.emulate_link(gbps, rtt_ms)

    # ------------------------------------------------------------------------------------ reading

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
        metrics, save ``state_dict()`` and look at ``outer_parameters()``. A call that needs the
        other replicas (``step``, ``flush``, ``consensus``, ``change_group``; with ``shard_group``
        also ``state_dict`` and ``outer_parameters``) is a RuntimeError there.

        An error that it raises comes out of that method, after the other callbacks have been
        called; what was exchanged stays applied.

        Raises:
            TypeError: If it is not a function.
        """
        if not callable(callback):
            raise TypeError(f"on_sync takes a function of a SyncMetrics, got {callback!r}")
        self._recorder.callbacks.append(callback)

    def after_step(self, function: Callable[[], object]) -> None:
        """Call ``function`` once, at the end of the step under way, or of the next one.

        For signal handlers: in the middle of a step no ``state_dict()`` fits the model. A
        ``flush``, ``close`` or ``with`` block's end counts as a step, one that raises does not;
        after ``close`` the function is called at once. The limits of ``on_sync`` hold. An error of
        the function comes out of the step, which stays done.

        Raises:
            TypeError: If it is not a function.
        """
        self._recorder.call_after_step(function, at_once=self._is_closed)

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
        self._refuse_in_step("consensus")
        self._refuse_if_alone()
        self._look_at_parts()
        return mean_state(self.exchange, self.parts, self.impl)

    def outer_hash(self) -> str:
        """Return a hash of all outer parameters, equal on replicas that agree bit by bit."""
        return f"{digest_of([part.outer for part in self._plan.parameter_parts()]):016x}"

    # --------------------------------------------------------------------------- outer parameters

    @contextmanager
    def outer_parameters(self, *, consensus: bool = False) -> Iterator[None]:
        """Put the outer parameters into the model, to evaluate them; restore it bit by bit.

        Args:
            consensus: Take their mean over the replicas, see ``consensus()``; a collective call.
        """
        self._refuse_in_step("outer_parameters")
        is_sharded = self._plan.shard_group is not None
        if consensus or is_sharded:
            self._refuse_if_alone()
        self._refuse_if_unfit()
        parts = self._look_at_parts()
        outers = [part.outer for part in parts]
        if consensus:
            outers = mean_outer(self.exchange, parts, self.impl)
        local = [[tensor.clone() for tensor in part.fragment.local()] for part in parts]
        self._is_swapped = True
        try:
            with self._watch.paused(), self.doing("evaluation"):
                try:
                    # Workers with shards of their own need nothing from each other here.
                    with self._rounds.all_workers(parts) if is_sharded else nullcontext():
                        for part, outer in zip(parts, outers, strict=True):
                            ops.merge(outer.to(part.device), part.tensors(), impl=self.impl)
                    yield
                finally:
                    with self._rounds.uninterruptible():
                        for part, saved in zip(parts, local, strict=True):
                            for tensor, value in zip(part.fragment.local(), saved, strict=True):
                                tensor.copy_(value)
        finally:
            self._is_swapped = False

    # --------------------------------------------------------------------------- saving, resuming

    def state_dict(self, *, shared: bool = False) -> dict[str, Any]:
        """Return what a resumed run needs besides the model and the inner optimizer.

        **With** ``shard_group`` **this is a collective call**: it gathers what its workers own, so
        all of them must call it, also when only one of them writes the file
        (``if rank == 0: torch.save(diloco.state_dict(), ...)`` hangs). Otherwise, under FSDP2 too,
        it calls no collective.

        Tensors are views of the live buffers, under the parameters' names, fp32. A value that
        differs between replicas is keyed ``replica_<r>``: every replica must save its own. Waits
        for rounds under way, and applies nothing: they are part of the state. A round that failed
        is not: then this is the state before the round.

        Args:
            shared: Refuse if something differs between replicas, for a save by one of them alone.
        """
        self._refuse_in_step("state_dict")
        if self._plan.shard_group is not None:
            self._refuse_if_alone()
        self._rounds.uninterruptible.refuse_if_broken()
        self._look_at_parts()
        self._saved_step = self.inner_step
        return collect(self.parts, self._scope(), inner_step=self.inner_step, shared=shared)

    def _scope(self) -> Scope:
        return with_run(self._agreement.scope(), self.parts, self.schedule, self.settings)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take over a saved state, in place; local parameters come with the user's model.

        The state goes by the names of parameters, and follows other settings of the same model:
        ``sync_every``, fragments, offsets, wire, error feedback, overlap policy, numbers of the
        outer optimizer, averaged buffers, group, and parameters that were frozen or unfrozen. A
        parameter that was not exchanged before begins without outer momentum, from the weights
        that the model has at the next step. All replicas must load with the same settings: replicas
        whose outer state differs raise a ReplicaMismatch at the next exchange.

        Args:
            strict: Raise when what this replica had for itself is missing and the change does not
                explain it, instead of doing without: residuals start at zero, and the
                lowest replica's outer parameters take the place of different ones.

        Rounds under way are dropped; the state's own rounds take their place.

        Raises:
            ValueError: If the state was saved with another model, other shapes or another kind of
                outer optimizer, has rounds under way that cannot follow a change, or lacks
                something; nothing is changed.
            RuntimeError: Inside ``outer_parameters()``, or after ``close()``; with ``Elastic``,
                if this replica has joined a group that trains, whose state it has.
        """
        self._refuse_in_step("load_state_dict")
        self._refuse_if_closed()
        if self._elastic is not None:
            self._elastic.refuse_to_load()
        self._refuse_if_unfit()
        self._refuse_changes(self.parts)
        model = all_parameters(self._model)
        restore = Restore(self.parts, state_dict, self._scope(), model, strict=strict)
        with self._recorder.deferred_callbacks(), self._rounds.restoring():
            self._rounds.drop()
            restore.write()
            self.inner_step = restore.inner_step
            self._progress.inner_step = self.inner_step
            self._saved_writes = saved_writes(self.parts)
        if self._rounds.same_data.is_wanted:
            self._rounds.same_data.begin(self.parts, self.inner_step)
        # Under ``Blocking`` with nothing unsent, the local parameters to load equal the outer ones.
        is_shared = type(self.settings.overlap) is Blocking and self.inner_step > 0
        is_shared &= not restore.has_new and not self._rounds.has_unsent(self.inner_step)
        lost = self._plan.has_own_progress if is_shared else None
        late = restore.read_new if restore.has_new else None
        self._watch.expect_load(self._agreement.overwritten, lost, late)

    # ------------------------------------------------------------------------------------- guards

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("this DiLoCo is closed")

    def _refuse_in_step(self, call: str) -> None:
        """Raise in a signal handler that has interrupted a step or one of ``_NAMES``."""
        caller = None if self._recorder.is_telling else sys._getframe(1).f_back
        refuse_in_step(call, caller, self._optimizers, self, _CALLS)

    def _refuse_if_alone(self) -> None:
        """Raise if closed, or in a callback: other replicas may not make the same call now."""
        self._refuse_if_closed()
        if self._recorder.is_telling:
            raise RuntimeError(
                "an on_sync callback cannot call what needs the other replicas, whose callbacks "
                "may run at another step, nor can after_step(f): do it in the training loop"
            )

    def _refuse_if_unfit(self) -> None:
        """Raise if the model holds the outer parameters in place of the local ones.

        Also let the next inner step check for rounds to send and apply.
        """
        self._next_due = 0
        self._rounds.uninterruptible.refuse_if_broken()
        if self._is_swapped:
            raise RuntimeError("the model holds the outer parameters: leave outer_parameters()")

    def _refuse_changes(self, parts: Iterable[SyncedPart], *, is_sending: bool = False) -> None:
        """Raise if tensors have moved in memory since this object was attached.

        Args:
            is_sending: Also raise if the optimizers train new parameters, or ones that were
                frozen, or if the model has other parameters under the same names.
        """
        if is_sending:
            self._watch.before_send()
        else:
            self._watch.read_late()
        for part in parts:
            part.refuse_changes()

    def _look_at_parts(self) -> list[SyncedFragment]:
        """Wait for votes that are under way; return the parts with parameters."""
        self._refuse_changes(self.parts)
        with self._recorder.deferred_callbacks():
            self._rounds.settle_verdicts(self.inner_step)
        return self._plan.parameter_parts()


# While these calls run, the state belongs to no inner step, and signal handlers may not call them.
_NAMES = "_step flush change_group consensus outer_parameters state_dict load_state_dict".split()
_CALLS = {unwrap(getattr(DiLoCo, name)).__code__ for name in _NAMES}
