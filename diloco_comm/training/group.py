"""How a replica enters its group: it connects, compares settings, and gets the common state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..base.errors import ReplicaMismatch
from ..base.service.addresses import proxy_of
from ..base.service.keys import link_keys
from ..exchange.exchange import Exchange
from ..exchange.membership.change import Change
from ..exchange.membership.own_link import LinkShare
from ..exchange.waits import describe_store
from ..methods.settings import Settings
from ..monitor.figures import FiguresOf
from ..ops.digests import digest_of
from ..replica.fragments import (
    buffer_names,
    describe_parameters,
    named_layout,
    same_memory,
    shared_memory,
    uncopied_tensors,
    unexchanged_tensors,
)
from ..replica.workers import ReplicaWorkers
from ..rounds import admission, handshake, history
from ..rounds.metrics import Recorder
from ..rounds.nonfinite import OnReset
from ..rounds.progress import Progress
from ..rounds.runner import RoundRunner, Weight
from ..rounds.send_timed import SendTimed
from ..rounds.state_dict import Scope
from ..rounds.step_timed import StepTimed
from .arguments import backend_of
from .inner_state import InnerStates
from .plan import Plan


@dataclass(frozen=True)
class Replica:
    """The model, settings and plan with which one worker of a replica enters a group.

    Attributes:
        workers: All workers of this replica; None if this one is alone.
        figures: See ``group.driver.Driver``.
        impl: Implementation of the operators.
        timeout_s: Seconds that an exchange may take.
        weight, norms, on_reset: See ``RoundRunner``.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    settings: Settings
    plan: Plan
    workers: ReplicaWorkers | None
    recorder: Recorder
    figures: FiguresOf
    impl: str
    timeout_s: float
    weight: Weight
    norms: bool
    on_reset: OnReset | None


class ElasticChange(Change, Protocol):
    """A change of the group by which a replica enters it.

    Attributes:
        role, source_rank: Values for ``Place.init`` and ``Place.source_rank``; valid once all
            members have agreed on the change.
    """

    @property
    def role(self) -> str: ...
    @property
    def source_rank(self) -> int: ...


@dataclass(frozen=True)
class Place:
    """Where the replicas of a group meet, and with which weights they begin.

    Attributes:
        group: The process group of the replicas; None at a store, with ``Elastic`` or
            for one replica.
        store: The store at which they meet; None for any other place.
        replica, num_replicas, members, name: See ``StorePeers``.
        init: See ``DiLoCo``.
        source_rank: Rank of the replica whose weights all take with ``init="broadcast"``.
        backend, join_timeout, suspect_after, listen, advertise, link_keys, relay, proxy: See
            ``Link``.
        change: The change by which this replica enters an elastic group; None for a fixed group.
        link_share: See ``Exchange``.
        beside, inner: See ``Agreement``.
    """

    group: dist.ProcessGroup | None
    store: dist.Store | None
    replica: int | None
    num_replicas: int | None
    members: Sequence[int] | None
    name: str
    init: str
    backend: str | None
    join_timeout: Any
    suspect_after: Any
    listen: str | None = None
    advertise: str | None = None
    link_keys: str | Path | None = None
    relay: str | None = None
    proxy: str | None = field(default=None, repr=False)
    source_rank: int = 0
    change: ElasticChange | None = None
    link_share: LinkShare | None = None
    beside: admission.CopyBeside | None = None
    inner: InnerStates | None = None

    @classmethod
    def of(cls, chosen: Mapping[str, Any], timeout_s: float) -> Place:
        """Return the place that the arguments of ``DiLoCo`` name; connect to its store, if any.

        Raises:
            ValueError, TypeError, RuntimeError, torch.distributed.DistError: See ``handshake``.
        """
        group, store = None, None
        # An elastic group has another place in each view.
        if chosen["membership"] is None:
            keys = link_keys(chosen["link_keys"])
            proxy = proxy_of(chosen["proxy"])
            store = handshake.connected_store(chosen["store"], timeout_s, keys, proxy)
            of = chosen["num_replicas"]
            group = handshake.replica_group(chosen["group"], chosen["mesh"], store, of)
        names = ("replica", "num_replicas", "members", "name", "init", "join_timeout")
        of_link = ("suspect_after", "listen", "advertise", "link_keys", "relay", "proxy")
        same = {name: chosen[name] for name in (*names, *of_link)}
        return cls(group, store, backend=backend_of(chosen), **same)


class Joined(NamedTuple):
    """The result of ``join``: a replica in its group.

    Attributes:
        rounds: Sends and applies the replica's rounds.
        agreement: Compares the replica with the others.
        inner_step: The inner step with which this replica begins.
        twins: Finds other objects of this process that peers could mistake for this one.
    """

    rounds: RoundRunner
    agreement: Agreement
    inner_step: int
    twins: Twins


def join(replica: Replica, place: Place) -> Joined:
    """Connect to the other replicas, and begin with the same state on all of them.

    Raises:
        ValueError: If the choices of the place do not go together.
        SyncError: If the replicas do not come in time.
        ReplicaMismatch: On every replica, when models, arguments or weights differ between them.
    """
    plan, settings, workers = replica.plan, replica.settings, replica.workers
    if place.change is None:
        with nullcontext() if workers is None else workers.all_workers():
            exchange = _connect(replica, place)
    else:
        # An elastic change synchronises the workers by itself.
        exchange = _connect(replica, place)
        change = place.change
        place = replace(place, init=change.role, source_rank=change.source_rank)
    try:
        runner = SendTimed if settings.overlap.rounds else StepTimed
        rounds = runner(
            exchange,
            plan.parts,
            settings,
            replica.recorder,
            layout=named_layout(plan.layout, place.name),
            weight=replica.weight,
            norms=replica.norms,
            impl=replica.impl,
            workers=workers,
            on_reset=replica.on_reset,
        )
        agreement = Agreement(replica, rounds, place.beside, place.inner)
        with rounds.all_workers(plan.parts):
            inner_step = agreement.start(place)
        exchange.has_state()
    except BaseException:
        exchange.close()
        raise
    return Joined(rounds, agreement, inner_step, Twins(place, plan, exchange))


def progress_of(replica: Replica, exchange: Exchange, name: str) -> Progress:
    """Return the object that logs the rounds of a replica; of several workers, worker 0 logs."""
    plan, workers = replica.plan, replica.workers
    own = [tensor for part in plan.parameter_parts() for tensor in part.tensors()]
    return Progress(
        replica.recorder,
        exchange,
        num_parts=len(plan.parts),
        parameter_bytes=sum(tensor.numel() * tensor.element_size() for tensor in own),
        name=name,
        worker=(0, 1) if workers is None else (workers.rank, workers.size),
    )


class Twins:
    """Finds other DiLoCo objects of this process that peers cannot tell from this one: twins.

    Objects with the same name meet their peers in the order in which they are made. If two of them
    also have the same layout, and replicas make them in different orders, each meets the wrong
    peer. An object is no twin if it is closed or collected, or if it took its steps before this
    one was made, and takes none after that.

    Attributes:
        has_begun: Whether this object has taken an inner step.
        others: The objects that may be twins.
    """

    def __init__(self, place: Place, plan: Plan, exchange: Exchange) -> None:
        self._name = place.name
        self._key = _where(place), place.name, place.replica, plan.worker, plan.layout
        self.has_begun = False
        self.others: list[weakref.ref[Twins]] = []
        if place.change is not None or exchange.size == 1:
            return
        for other in list(_met):
            if other._key == self._key:
                other.others.append(weakref.ref(self))
                if not other.has_begun:
                    self.others.append(weakref.ref(other))
        _met.add(self)

    def refuse(self) -> None:
        """Raise RuntimeError, at an inner step of this object, if a twin is in use too."""
        gc.collect()  # A dropped twin and its optimizer's hooks refer to each other.
        self.others = [other for other in self.others if other() in _met]
        if self.others:
            raise RuntimeError(
                "this process has two DiLoCo objects of one layout that meet the other replicas as "
                f"{self._name!r}, and these cannot tell the two apart: give each object a name of "
                'its own (DiLoCo(..., name="critic1")), the same on all replicas, or close() the '
                "first before the second is made"
            )

    def leave(self) -> None:
        """Stop being anybody's twin; idempotent."""
        _met.discard(self)


# The open objects of this process that have met their peers.
_met: weakref.WeakSet[Twins] = weakref.WeakSet()


def _where(place: Place) -> object:
    """Return a key for the group or store of a place, equal for two objects that meet there."""
    store = place.store
    if store is None:
        return id(place.group)
    address = "" if isinstance(store, dist.PrefixStore) else describe_store(store)
    return address if "://" in address else id(store)


def _connect(replica: Replica, place: Place) -> Exchange:
    """Connect this worker to its peers: workers of other replicas with the same parameters."""
    plan, settings, store = replica.plan, replica.settings, place.store
    name, is_store = place.name, store is not None or place.change is not None
    return handshake.make_exchange(
        group=place.group,
        store=store,
        replica=place.replica,
        num_replicas=place.num_replicas,
        members=place.members,
        # On a store, workers with different shards form different groups, so they need other names.
        name=f"{name}@{plan.worker}" if plan.worker and is_store else name,
        line_name=name,
        lanes=settings.lanes or 1,
        chunk_bytes=settings.chunk_bytes,
        timeout=replica.timeout_s,
        join_timeout=place.join_timeout,
        suspect_after=place.suspect_after,
        listen=place.listen,
        advertise=place.advertise,
        link_keys=place.link_keys,
        relay=place.relay,
        proxy=place.proxy,
        impl=replica.impl,
        device=plan.device,
        collectives=handshake.collectives_of(place.backend, place.group, plan.device),
        join=place.init == "join",
        num_under_way=max(1, settings.overlap.rounds),
        change=place.change,
        link_share=place.link_share if place.backend == "tcp" else None,
        workers=_workers_beside(replica.workers, place.group),
        figures=replica.figures,
    )


def _workers_beside(
    workers: ReplicaWorkers | None, group: dist.ProcessGroup | None
) -> ReplicaWorkers | None:
    """Return ``workers``; None if the program has, by mistake, given them as replicas.

    These then meet as replicas, and raise an error, as their models differ.
    """
    if workers is None or group is None:
        return workers
    ranks = set(dist.get_process_group_ranks(group))
    return None if len(ranks & set(dist.get_process_group_ranks(workers.group))) > 1 else workers


def shard_group_of(shard_group: Any, timeout_s: float) -> ReplicaWorkers | None:
    """Return the argument ``shard_group`` as workers of one replica; None if it is not given."""
    if shard_group is None:
        return None
    return ReplicaWorkers.with_same_parameters(shard_group, timeout_s)


def workers_of(plan: Plan, timeout_s: float) -> ReplicaWorkers | None:
    """Return the workers of this replica; None if this worker is the replica's only one."""
    return plan.shard_group or ReplicaWorkers.of(plan.parameters(), timeout_s)


def meet_workers(
    workers: ReplicaWorkers, plan: Plan, settings: Settings, others: dict[str, Any]
) -> None:
    """Compare model and settings with the replica's other workers; a collective call.

    It also sets which elements of each fragment this worker counts in the replica's norms.

    Args:
        others: Further arguments that must be equal, by name.
    """
    fragments = plan.parameter_parts()
    model = describe_parameters([part.fragment for part in fragments], whole=True)
    shown = {**settings.as_json(), "outer": settings.outer.shared_config()}
    workers.check_alike({"the model": model, **shown, **others})
    if plan.shard_group is None:
        is_counted = iter(workers.counted(plan.parameters()))
        for part in fragments:
            part.count([next(is_counted) for _ in part.fragment.params])


class Agreement:
    """Compares this replica with the others, and gives newcomers the state.

    It does so at the start, and in each new group.

    Args:
        beside: A newcomer's copy, see ``admission.share``; None if newcomers copy all of the state
            in ``share_state``.
        inner: Gives newcomers the state of the inner optimizers; None if they begin with a fresh
            state.

    Attributes:
        is_state_shared: All replicas have the same outer parameters after the same rounds.
        overwritten: Digest of the weights that this replica has received in place of its own
            different ones; None if it has not.
        copied_bytes: Bytes of outer and inner state that newcomers of this group were given.
    """

    def __init__(
        self,
        replica: Replica,
        rounds: RoundRunner,
        beside: admission.CopyBeside | None,
        inner: InnerStates | None,
    ) -> None:
        self._exchange, self._plan, self._settings = rounds.exchange, replica.plan, replica.settings
        self._model, self._optimizers, self._rounds = replica.model, replica.optimizers, rounds
        self._weight = None if callable(replica.weight) else float(replica.weight)
        self._impl = replica.impl
        self._beside, self._inner = beside, inner
        self.overwritten: int | None = None
        self.copied_bytes = 0
        self.is_state_shared = replica.settings.overlap.is_shared
        # Digests of frozen parameters, which never change: not computed again when replicas join.
        self._frozen: handshake.Digests = {}

    def start(self, place: Place) -> int:
        """Give all replicas the same weights, as ``place.init`` says; return the inner step."""
        model, init, source_rank = self._model, place.init, place.source_rank
        if place.group is not None:
            handshake.warn_if_spans_replicas(model, self._optimizers, place.group)
        self.agree(init)
        exchange, parts, inner_step = self._exchange, self._plan.parts, 0
        named = {name: tensor for part in parts for name, tensor in part.named().items()}
        if init == "check":
            handshake.check_same_weights(exchange, named)
        elif init == "broadcast":
            tensors = list(named.values())
            # The source keeps its weights, and needs no digest.
            given = None if exchange.rank == source_rank else digest_of(tensors)
            exchange.broadcast(tensors, source_rank)
            if given is not None and (copied := digest_of(tensors)) != given:
                self.overwritten = copied
        if init == "join":
            self._compare_newcomers()
        else:
            others, uncopied = unexchanged_tensors(model, named), uncopied_tensors(model, named)
            digests = handshake.share_unexchanged(exchange, others, uncopied, init, source_rank)
            buffers = buffer_names(model)
            self._frozen = {name: each for name, each in digests.items() if name not in buffers}
        for part in parts:
            part.open_buffers(exchange)
        if init == "join":
            return self.share_state(inner_step)
        for part in self._plan.parameter_parts():
            part.read_local()
        for part in parts:
            history.begin(part, is_shared=True)
        self.refuse_different_state()
        return inner_step

    def begin_from(self, inner_step: int, source_rank: int) -> int:
        """Give all replicas the outer state of one replica, which has loaded a checkpoint.

        Returns:
            The inner step of that replica.
        """
        exchange, parts = self._exchange, self._plan.parts
        given = admission.begin_from(exchange, parts, inner_step, self._impl, source_rank)
        for part in parts:
            history.begin(part, is_shared=True)
        self.refuse_different_state()
        return given

    def begin_anew(self) -> None:
        """Take the present local weights as outer parameters, before the first step.

        If replicas have different weights, their histories differ, and the first exchange fails.
        """
        for part in self._plan.parameter_parts():
            part.read_local()
            history.begin(part, is_shared=True)

    def agree(self, init: str) -> None:
        """Compare model and settings with the other replicas; a collective call."""
        settings, exchange = self._settings, self._exchange
        shown = {
            "number of fragments": self._plan.num_fragments,
            **settings.shared(),
            "init": init,
        }
        if exchange.joined:
            # Do not compare lr: the program may have changed it, and a newcomer gets the present
            # value.
            shown["outer"] = {k: v for k, v in shown["outer"].items() if k != "lr"}
        private = {"overlap": settings.overlap.private_config(), "weight": self._weight}
        tensors = [tensor for part in self._plan.parts for tensor in part.tensors()]
        private["memory"] = shared_memory(tensors)
        views = handshake.agree(exchange, self._plan.description, shown, private)
        self._refuse_same_memory([view["memory"] for view in views])
        weights = [view["weight"] for view in views]
        if all(weight == 0 for weight in weights):
            raise ValueError(f"the weights of all replicas are zero: {weights}")
        self.fix_weight()
        is_alike = all(view["overlap"] == views[0]["overlap"] for view in views)
        self.is_state_shared = settings.overlap.is_shared and is_alike

    def _refuse_same_memory(self, places: list[list[str]]) -> None:
        """Raise if two replicas share the memory of tensors, as threads of one process may."""
        owners: dict[str, int] = {}
        for replica, found in zip(self._exchange.members, places, strict=True):
            for place in found:
                other = owners.setdefault(place, replica)
                if other != replica:
                    raise ReplicaMismatch(same_memory(f"replicas {other} and {replica}"))

    def renew(self, inner_step: int) -> int:
        """Compare this replica with the others in a new group; return the inner step."""
        self.copied_bytes = 0
        self._rounds.begin_group()
        if self._exchange.joined:
            self.agree("join")
            self._compare_newcomers()
            return self.share_state(inner_step)
        self.fix_weight()
        # The call that compares ends of training also carries the states, which saves a round trip.
        own = history.standing(self._plan.parts, is_shared=self.is_state_shared)
        views = self._rounds.end_like_others(own)
        if views is None:
            self.refuse_different_state()
        else:
            history.refuse_difference(self._exchange, self._plan.parts, views)
        return inner_step

    def _compare_newcomers(self) -> None:
        """Warn of newcomers with other frozen parameters or buffers than the group has."""
        exchanged = {name for part in self._plan.parts for name in part.named()}
        tensors = unexchanged_tensors(self._model, exchanged)
        tensors |= uncopied_tensors(self._model, exchanged)
        new = {name: t for name, t in tensors.items() if name not in self._frozen}
        digests = handshake.digests_by_name(new)
        buffers = buffer_names(self._model)
        self._frozen |= {name: digests[name] for name in new if name not in buffers}
        handshake.warn_of_newcomers(self._exchange, {**self._frozen, **digests}, buffers)

    def fix_weight(self) -> None:
        """Exchange the weights that never change; a collective call, see ``StreamMember``."""
        self._exchange.fix_weight(self._weight)

    def share_state(self, inner_step: int) -> int:
        """Give newcomers the outer state of the lowest replica that trains; compare all states.

        Returns:
            The inner step of that replica.
        """
        self._rounds.end_like_others()
        exchange, outer = self._exchange, self._settings.outer
        beside = self._beside if self.is_state_shared else None
        parts = self._plan.parts
        shared = admission.share(exchange, parts, inner_step, outer, self._impl, beside)
        self.copied_bytes = shared.copied_bytes
        if self._inner is not None:
            self._inner.share(exchange)
            self.copied_bytes += self._inner.copied_bytes
        if not shared.is_equal:
            self.refuse_different_state()
        return shared.inner_step

    def refuse_different_state(self, *, is_shared: bool | None = None) -> None:
        """Raise ReplicaMismatch if the outer states of the replicas differ; a collective call.

        Args:
            is_shared: Whether outer parameters must be equal; default: ``is_state_shared``.
        """
        is_shared = self.is_state_shared if is_shared is None else is_shared
        own = history.standing(self._plan.parts, is_shared=is_shared)
        views = handshake.gather_json(self._exchange, own)
        history.refuse_difference(self._exchange, self._plan.parts, views)

    def scope(self) -> Scope:
        """Return the description of replica, worker and group for a saved state."""
        return Scope(
            self._exchange.replica,
            self._exchange.members,
            self._plan.saved_layout,
            self._settings.overlap,
            self.is_state_shared,
            self._plan.worker,
        )
