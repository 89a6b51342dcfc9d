"""DiLoCo attached to a training loop: from the step hook to the outer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import ops
from ..base import env
from ..base.checks import choice, flag, integer, not_negative, timeout_seconds
from ..base.errors import NonFiniteError, SyncError
from ..exchange.membership import verdicts
from ..methods.outer import Factory, OuterOptimizer
from ..methods.overlap import Overlap
from ..methods.settings import UNSET, Config, Unset, merge
from ..ops.digests import digest_of
from ..ops.wire import WireFormat
from ..replica.fragments import FragmentSpec, describe_parameters, refuse_new_parameters
from ..replica.hooks import SkippedSteps, StepHooks, hookable
from ..replica.shard_group import ShardGroup
from ..replica.workers import ReplicaWorkers
from ..rounds import joining
from ..rounds.agreement import consensus, handshake, history
from ..rounds.agreement.consensus import mean_outer
from ..rounds.agreement.resets import OnReset, check_on_reset
from ..rounds.checkpoint import load as loading
from ..rounds.checkpoint import save as saved_state
from ..rounds.metrics import Recorder, SyncMetrics, SyncTotals
from ..rounds.runner import RoundRunner, Weight
from ..rounds.send_timed import SendTimed
from ..rounds.synced import SyncedFragment, SyncedPart
from . import spelling
from .evaluation import swapped_in
from .planning import make_plan


class DiLoCo:
    """Train this replica on its own and share what it learned every ``sync_every`` steps.

    Args:
        model: Where names and layers come from.
        optimizer: The inner optimizer, or several that together make one step. The parameters in
            their groups that require gradients are exchanged; they are written in place only. With
            ``attach=False`` anything that has ``param_groups``.
        sync_every: Inner steps between two sends of the same fragment (H).
        fragments: A number (1), ``"layers:3"``, ``"sequential:3"`` or lists of name patterns.
        offsets: 1-based inner step of each fragment's first send; default floor(H*(p+1)/P).
        overlap: When results are applied: ``Blocking()`` (default), ``Streaming``, ``Delayed``,
            ``Eager`` or ``CO2``.
        outer: ``SGD``, ``HeavyBall``, ``Nesterov`` (default), ``Adam``, or a callable that makes
            a ``torch.optim.Optimizer`` from a list of parameters.
        group, mesh: The replicas, as a process group or a one-dimensional DeviceMesh; without
            either, the default group; without that one, or with ``num_replicas=1`` and no store,
            a single replica.
        store, replica, num_replicas, members: The replicas as separate jobs that share a store
            (a Store, or the ``tcp://host:port`` that ``diloco-comm store`` prints):
            this one's number, and how many there are or which numbers take part.
        name: Tells several DiLoCo objects on one store apart.
        shard_group: The workers of this replica, a ProcessGroup or one-dimensional DeviceMesh, when
            they hold the same parameters (DDP, ZeRO-1/2): exchange and outer state are split among
            them. ``group``, ``mesh`` or ``store`` then has this worker's peers alone.
        wire, block_size: What travels ("int8"), see ``wire.WIRES``; elements that share a scale
            (256).
        rounding, seed: "nearest" (default) or "stochastic", and the seed of the latter (0).
        error_feedback: Add what the last encoding lost to the next one (default: no).
        weight: This replica's weight in the mean, a number or a callable (tokens of the round),
            called once in each step that sends, whatever the number of fragments. When it raises,
            that comes out of the step, and the round fails on the other replicas too.
        init: "broadcast" (weights of the lowest replica), "check" (raise if they differ) or
            "join" (take over the state of replicas that train already; see ``change_group``).
        impl: Force an implementation of the operators.
        config: Saved arguments (``diloco.config()``), or a JSON file of them, for those that are
            not given here; default: the file that ``DILOCO_COMM_CONFIG`` names.
        average_buffers: Average floating-point buffers too, in fp32, at the end of each round
            (default: no); those that hold infinities or NaN from the start (masks) are left out.
        backend: How parameters on a GPU travel. "gloo": only the encoded bytes are copied to host
            memory, and travel from there; across sites. "nccl": they stay on the device. Default:
            what ``group`` has for it; gloo with ``store``.
        offload: "cpu" keeps outer parameters and momentum of a model on a GPU in page-locked host
            memory, and brings them to the device chunk by chunk when they are needed.
        lanes, chunk_bytes: Connections to each peer; bytes of a chunk on the wire.
        timeout: Seconds, or a timedelta, that an exchange may take, and that replicas which live
            are waited for.
        join_timeout: Likewise, that ``change_group`` and a newcomer wait for members of which
            nothing is heard (60).
        suspect_after: Likewise, without a sign of life from a peer that is waited for, or without a
            way to it, after which it is given up (30).
        on_nonfinite: What becomes of a round in which a replica has values that are NaN, Inf or
            out of the wire's range: "raise" (default) and "skip" it on all replicas, or "reset"
            that replica: it takes the outer parameters, the others go on with their mean.
        max_skipped: How many rounds of a fragment may be skipped in a row, or end with a reset of
            the same replica (3); after one more there is a NonFiniteError. None: no limit.
        on_reset: Called with the exchanged parameters on a replica that was reset, when they have
            been written: to clear the optimizer's state, which is else left alone.
        norms: Measure the norm of the pseudo-gradient, one more pass over the parameters.
        attach: False leaves it to the user to call ``step()`` after each optimizer step.

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
        outer: OuterOptimizer | Factory | None = None,
        group: dist.ProcessGroup | None = None,
        mesh: Any = None,
        store: dist.Store | str | None = None,
        replica: int | None = None,
        num_replicas: int | None = None,
        members: Sequence[int] | None = None,
        name: str = "default",
        shard_group: Any = None,
        wire: str | WireFormat | None = None,
        block_size: int | None = None,
        rounding: str | None = None,
        seed: int | None = None,
        error_feedback: bool | None = None,
        weight: Weight = 1.0,
        init: str = "broadcast",
        impl: str = "",
        config: Config | None = None,
        average_buffers: bool | None = None,
        lanes: int | None = None,
        chunk_bytes: int | None = None,
        timeout: float | timedelta | None = None,
        join_timeout: float | timedelta | None = None,
        suspect_after: float | timedelta | None = None,
        on_nonfinite: str | None = None,
        max_skipped: int | Unset | None = UNSET,
        on_reset: OnReset | None = None,
        norms: bool = False,
        attach: bool = True,
        backend: str | None = None,
        offload: str | None = None,
    ) -> None:
        given = {
            "sync_every": sync_every,
            "fragments": fragments,
            "offsets": offsets,
            "overlap": overlap,
            "outer": outer,
            "wire": wire,
            "block_size": block_size,
            "rounding": rounding,
            "seed": seed,
            "error_feedback": error_feedback,
            "average_buffers": average_buffers,
            "lanes": lanes,
            "chunk_bytes": chunk_bytes,
            "on_nonfinite": on_nonfinite,
            "max_skipped": max_skipped,
        }
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not callable(weight):
            weight = not_negative("weight", weight, "a number or a function")
        flag("norms", norms)
        flag("attach", attach)
        choice("init", init, ("broadcast", "check", "join"))
        choice("offload", offload, (None, "cpu"))
        seconds = timeout_seconds(env.timeout_s() if timeout is None else timeout)
        self.settings = merge(given, config)
        check_on_reset(on_reset, self.settings)
        self.inner_step = 0
        self._recorder = Recorder()
        self._is_swapped = self._is_closed = False

        optimizers = hookable(optimizer, attach=attach)
        self._skipped = SkippedSteps(optimizers)
        self._hooks: StepHooks | None = None
        self._model, self._optimizers = model, optimizers
        self._shard_group = None if shard_group is None else ShardGroup(shard_group, seconds)
        self._plan = make_plan(
            model, optimizers, self.settings, shard_group=self._shard_group, offload=offload
        )
        self.parts, self.schedule = self._plan.parts, self._plan.schedule
        self.device = self._plan.device
        self._saved_writes: dict[int, set[int]] = {}
        self._workers = self._shard_group or ReplicaWorkers.of(self._parameters(), seconds)
        if self._workers is not None:
            self._meet(self._workers, {"norms": norms, "replica": replica})
        self.impl = ops.resolve_impl(impl, self.device.type)
        store = handshake.connected_store(store, seconds)
        group = handshake.replica_group(group, mesh, store, num_replicas)
        worker = self._plan.worker
        self.exchange = handshake.make_exchange(
            group=group,
            store=store,
            replica=replica,
            num_replicas=num_replicas,
            members=members,
            # On a store, workers with other shards are other groups of the same replicas.
            name=f"{name}@{worker}" if worker and store is not None else name,
            line_name=name,
            lanes=self.settings.lanes,
            chunk_bytes=self.settings.chunk_bytes,
            timeout=seconds,
            join_timeout=join_timeout,
            suspect_after=suspect_after,
            impl=self.impl,
            device=self.device,
            collectives=handshake.collectives_of(backend, group, self.device),
            join=init == "join",
            num_under_way=max(1, self.settings.overlap.rounds),
        )
        self._weight = weight
        self._rounds = (SendTimed if self.settings.overlap.rounds else RoundRunner)(
            self.exchange,
            self.parts,
            self.settings,
            self._recorder,
            layout=self._plan.layout,
            weight=weight,
            norms=norms,
            impl=self.impl,
            workers=self._workers,
            on_reset=on_reset,
        )
        try:
            with self._together(self.parts):
                self._start(model, group, init)
        except BaseException:
            self.close()
            raise
        if attach:
            self._hooks = StepHooks(optimizers, self._step)

    # ------------------------------------------------------------------------- attaching

    def _start(self, model: nn.Module, group: dist.ProcessGroup | None, init: str) -> None:
        if group is not None:
            handshake.warn_if_spans_replicas(model, group)
        self._agree(init)
        named = {name: tensor for part in self.parts for name, tensor in part.named().items()}
        if init == "check":
            handshake.check_same_weights(self.exchange, named)
        elif init == "broadcast":
            self.exchange.broadcast(list(named.values()), 0)
        for part in self.parts:
            part.open_buffers(self.exchange)
        if init == "join":
            self._share_state()
        else:
            for part in self._parameter_parts():
                part.read_local()
            for part in self.parts:
                history.begin(part, is_shared=True)
        self._refuse_different_state()

    def _refuse_different_state(self) -> None:
        history.refuse_difference(self.exchange, self.parts, is_shared=self._is_state_shared)

    def _meet(self, workers: ReplicaWorkers, others: dict[str, Any]) -> None:
        """Compare model and settings with the replica's other workers; agree on who counts what."""
        model = describe_parameters([p.fragment for p in self._parameter_parts()], whole=True)
        shown = {**self.settings.as_json(), "outer": self.outer.shared_config()}
        workers.check_alike({"the model": model, **shown, **others})
        if self._shard_group is None:
            is_counted = iter(workers.counted(self._parameters()))
            for part in self._parameter_parts():
                part.count([next(is_counted) for _ in part.fragment.params])

    def _agree(self, init: str) -> None:
        """Compare model and settings with the other replicas."""
        shown = {
            "number of fragments": self._plan.num_fragments,
            **self.settings.shared(),
            "init": init,
        }
        if self.exchange.joined:
            # It may have been assigned since the start; the joiner is given the present one.
            shown["outer"] = {k: v for k, v in shown["outer"].items() if k != "lr"}
        policy = self.settings.overlap
        weight = None if callable(self._weight) else self._weight
        private = {"overlap": policy.private_config(), "weight": weight}
        views = handshake.agree(self.exchange, self._plan.description, shown, private)
        weights = [view["weight"] for view in views]
        if all(weight == 0 for weight in weights):
            raise ValueError(f"the weights of all replicas are zero: {weights}")
        self._fix_weight()
        overlaps = [view["overlap"] for view in views]
        self._is_state_shared = policy.is_shared and all(one == overlaps[0] for one in overlaps)

    def _fix_weight(self) -> None:
        """Tell the replicas a weight that will not change."""
        self.exchange.fix_weight(None if callable(self._weight) else self._weight)

    def _parameters(self) -> list[nn.Parameter]:
        return [param for part in self._parameter_parts() for param in part.fragment.params]

    def _parameter_parts(self) -> list[SyncedFragment]:
        return [part for part in self.parts if isinstance(part, SyncedFragment)]

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
        self._refuse_if_alone()
        self._refuse_if_unfit()
        self._rounds.whole.has_begun = is_done = False
        self.exchange.tell_of_lost_store()
        self.inner_step += 1
        try:
            if is_skipped:
                self._skipped.count += 1
            else:
                self._skipped.observe()
            due = [self.parts[index] for index in self.schedule.due(self.inner_step)]
            written = self._written()
            with self._recorder.deferred_callbacks(), self._together(written, is_idle=not due):
                if due:
                    self._refuse_new_parameters()
                for part in dict.fromkeys([*due, *written]):
                    part.refuse_changes()
                due = [part for part in due if part.buffers is not None]
                self._rounds.exchange_parts(due, self.inner_step, self._skipped.count)
                is_done = True
        except Exception:
            raise
        except BaseException:
            # An interrupt before anything was sent or applied: the next call does all of it.
            if not is_done and not self._rounds.whole.has_begun:
                self.inner_step -= 1
            raise

    def _written(self) -> list[SyncedPart]:
        """List the parts whose local parameters are written in this step, if nothing fails.

        All workers of a replica find the same ones, whatever became of their own rounds.
        """
        policy = self.settings.overlap
        sent = self.inner_step - (0 if policy.rounds else policy.steps())
        saved = self._saved_writes.get(self.inner_step, set())
        return [self.parts[index] for index in sorted({*self.schedule.due(sent), *saved})]

    @contextmanager
    def _together(self, parts: Iterable[SyncedPart], *, is_idle: bool = False) -> Iterator[None]:
        """Enter a block that writes local parameters of these parts, with the replica's workers."""
        try:
            with self._with_workmates(parts, is_idle=is_idle):
                yield
        except SyncError as error:
            # Without the frames that it came through, which would live as long.
            self.exchange.last_error = type(error)(str(error))
            raise
        if not is_idle:
            self.exchange.last_error = None

    @contextmanager
    def _with_workmates(self, parts: Iterable[SyncedPart], *, is_idle: bool) -> Iterator[None]:
        fragments = [part.fragment for part in parts if isinstance(part, SyncedFragment)]
        if self._workers is None or (is_idle and not fragments):
            yield
            return
        # An interrupt here alone would leave the workmates with one vote too few.
        with self._rounds.whole(), self._workers.together(fragments):
            try:
                yield
            finally:
                self._rounds.post_norms()

    def flush(self) -> None:
        """Share what was trained since the last send, and apply it; every replica calls this.

        Afterwards outer and local parameters are identical on all replicas. A fragment that no
        replica has trained since its last send is left alone.

        Raises:
            SyncError: As ``step``.
            NonFiniteError: Fragments had to be skipped, on all replicas; the others are shared.
            ReplicaMismatch: The outer states differ all the same: a program has written into one.
        """
        self._refuse_if_alone()
        self._refuse_if_unfit()
        self.exchange.inner_step = self.inner_step
        with self._recorder.deferred_callbacks(), self._together(self.parts):
            self._refuse_changes()
            self._rounds.flush(self.inner_step, self._skipped.count)
            if self.exchange.size > 1:
                history.refuse_difference(self.exchange, self.parts, is_shared=True)

    def agree_on_steps(self, num_steps: int) -> int:
        """Return the least ``num_steps`` of all replicas; every replica calls this at one point.

        Each exchange needs all replicas, so that all must take the same number of inner steps,
        also when their data do not last equally long: stop after what this returns, then flush.

        Args:
            num_steps: Inner steps that this replica could take from here on.

        Raises:
            ValueError: If it is not an integer of at least 0.
            SyncError: If the group fails.
        """
        num_steps = integer("num_steps", num_steps, 0)
        self._refuse_if_alone()
        with self._together(()):
            if self._workers is not None:
                num_steps = self._workers.least(num_steps)
            return min(handshake.gather_json(self.exchange, num_steps))

    def _refuse_new_parameters(self) -> None:
        """Raise if the optimizers train what was not there, or frozen, when this was attached."""
        known = {id(p) for part in self._parameter_parts() for p in part.fragment.params}
        refuse_new_parameters(self._model, self._optimizers, known)

    def _refuse_changes(self) -> None:
        """Raise if a parameter or buffer does not lie in memory as when this was attached."""
        for part in self.parts:
            part.refuse_changes()

    def _settle_verdicts(self) -> None:
        with self._recorder.deferred_callbacks():
            self._rounds.settle_verdicts(self.inner_step)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("this DiLoCo is closed")

    def _refuse_if_alone(self) -> None:
        """Raise if the other replicas, or workers, may not do the same now."""
        self._refuse_if_closed()
        self._recorder.refuse_in_callback()

    def _refuse_if_unfit(self) -> None:
        self._rounds.whole.refuse_if_broken()
        if self._is_swapped:
            raise RuntimeError("the model holds the outer parameters: leave outer_parameters()")

    # ------------------------------------------------------------------- outer parameters

    @contextmanager
    def outer_parameters(self, *, consensus: bool = False) -> Iterator[None]:
        """Put the outer parameters into the model, to evaluate them; restore it bit by bit.

        Args:
            consensus: Take their mean over the replicas, see ``consensus()``; a collective call.
        """
        if consensus or self._shard_group is not None:
            self._refuse_if_alone()
        self._refuse_if_unfit()
        self._refuse_changes()
        self._settle_verdicts()
        parts = self._parameter_parts()
        outers = [part.outer for part in parts]
        if consensus:
            outers = mean_outer(self.exchange, parts, self.impl)
        # With shards of their own, workmates need nothing from each other here.
        writing = nullcontext() if self._shard_group is None else self._together(parts)
        self._is_swapped = True
        try:
            with swapped_in(
                parts, outers, impl=self.impl, writing=writing, whole=self._rounds.whole
            ):
                yield
        finally:
            self._is_swapped = False

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
        self._refuse_changes()
        self._settle_verdicts()
        return consensus.mean_state(self.exchange, self.parts, self.impl)

    def outer_hash(self) -> str:
        """Return a hash of all outer parameters, equal on replicas that agree bit by bit."""
        return f"{digest_of([part.outer for part in self._parameter_parts()]):016x}"

    @property
    def outer(self) -> OuterOptimizer:
        """The outer optimizer; assign ``outer.lr`` on every replica to change it from now on."""
        return self.settings.outer

    def config(self) -> dict[str, Any]:
        """Return the arguments that replicas share, as JSON types, for ``config=``."""
        return self.settings.as_json()

    # --------------------------------------------------------------------------- metrics

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

    # ------------------------------------------------------------------- saving, resuming

    def state_dict(self, *, shared: bool = False) -> dict[str, Any]:
        """Return what a resumed run needs besides the model and the inner optimizer.

        **With** ``shard_group`` **this is a collective call**: it gathers what its workers own, so
        all of them must call it, also when only one of them writes the file
        (``if rank == 0: torch.save(diloco.state_dict(), ...)`` hangs). Otherwise, under FSDP2 too,
        it calls no collective.

        Tensors are views of the live buffers, under the parameters' names, fp32. What differs
        between replicas is keyed ``replica_<r>``: every replica must save its own. Waits for rounds
        under way, and applies nothing: they are part of the state. A round that failed is not: the
        state is that before the round.

        Args:
            shared: Refuse if something differs between replicas, for a save by one of them alone.
        """
        if self._shard_group is not None:
            self._refuse_if_alone()
        self._rounds.whole.refuse_if_broken()
        self._refuse_changes()
        self._settle_verdicts()
        return saved_state.collect(
            self.parts, self._scope(), inner_step=self.inner_step, shared=shared
        )

    def _scope(self) -> saved_state.Scope:
        return saved_state.Scope(
            self.exchange.replica,
            self.exchange.members,
            self._plan.saved_layout,
            self.settings.overlap,
            self._is_state_shared,
            self._plan.worker,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take over a saved state, in place; local parameters come with the user's model.

        Args:
            strict: Raise when what this replica had for itself is missing, instead of doing
                without: residuals start at zero, outer parameters that differ between replicas are
                those of the lowest one.

        Rounds under way are dropped; those of the state take their place.

        Raises:
            ValueError: If the state was saved with another model, schedule or set of fragments, or
                lacks something; nothing is changed.
            RuntimeError: Inside ``outer_parameters()``, or after ``close()``.
        """
        self._refuse_if_closed()
        self._refuse_if_unfit()
        self._refuse_changes()
        write = loading.restore(self.parts, state_dict, self._scope(), strict=strict)
        with self._recorder.deferred_callbacks(), self._rounds.whole():
            self._rounds.drop()
            self.inner_step = write()
            self._saved_writes = {}
            for part in self.parts:
                for flight in part.in_flight:
                    self._saved_writes.setdefault(flight.apply_step, set()).add(part.index)

    # ------------------------------------------------------------------------- the group

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the replicas of the present group, in order."""
        return self.exchange.members

    @property
    def epoch(self) -> int:
        """Number of the present group; each change makes a higher one, equal on its members."""
        return self.exchange.epoch

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
        """
        self._refuse_if_alone()
        self._refuse_if_unfit()
        unreported: list[NonFiniteError] = []
        with self._recorder.deferred_callbacks(), self._together(self.parts):
            self._refuse_changes()
            members = verdicts.chosen_members(self.exchange, members, self._workers)
            store = handshake.connected_store(store, self.exchange.join_timeout)
            repairs = self.exchange.change_group(
                members,
                store=store,
                last_rounds=partial(self._last_rounds, unreported),
                inner_step=self.inner_step,
            )
            with self._rounds.whole():
                self._rounds.settle(repairs, self.inner_step)
                self._turn_back(self.exchange.agreed_step)
            if not self.exchange.joined:
                self._fix_weight()
            if self.exchange.joined:
                self._agree("join")
                self._share_state()
            self._refuse_different_state()
        if unreported:
            raise unreported[0]

    def _last_rounds(self, unreported: list[NonFiniteError]) -> dict[int, int]:
        """Return the last applied round of each part, now that no exchange is under way.

        Args:
            unreported: Takes the error of a round that was skipped, and of which nobody was told.
        """
        with suppress(SyncError):
            try:
                self._rounds.settle_verdicts(self.inner_step)
            except NonFiniteError as error:
                unreported.append(error)
        return {part.index: part.round - 1 for part in self.parts}

    def _turn_back(self, inner_step: int) -> None:
        """Count on from where the slowest replica is, so that all send the same fragment next.

        Who had applied a round that others had not trained on until its next send failed.
        """
        for part in self.parts:
            part.last_sent -= self.inner_step - inner_step
        self.inner_step = inner_step

    def _share_state(self) -> None:
        """Give the newcomers the outer state of the lowest replica that was here before."""
        self.inner_step = joining.share(
            self.exchange, self.parts, self.inner_step, self.outer, self.impl
        )

    def close(self) -> None:
        """Tell the peers, end the engine's threads and take the hooks off; idempotent.

        What this replica has may still be looked at: parameters, metrics, ``state_dict``.
        """
        self._is_closed = True
        if self._hooks is not None:
            self._hooks.remove()
        self.exchange.inner_step = self.inner_step
        self.exchange.close()
        if self._workers is not None:
            self._workers.close()

    def __repr__(self) -> str:
        return spelling.describe(self)

    def __enter__(self) -> DiLoCo:
        self._refuse_if_closed()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def emulate_link(self, gbps: float, rtt_ms: float = 0.0) -> None:
        """Throttle the engine to a slow link, for tests and demonstrations."""
        self.exchange.emulate_link(gbps, rtt_ms)
