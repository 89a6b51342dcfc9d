"""``Elastic``: the options of a group whose members come and go, and its stores for gloo."""

from __future__ import annotations

import hashlib
import json
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch.distributed as dist

from ..base import env
from ..base.checks import MOST_INT32, flag, integer, not_negative, timeout_seconds
from ..base.errors import ReplicaMismatch, SyncError
from ..base.service.addresses import parse_address, with_scheme
from ..base.store_host import dial_store, open_store, place_of_store, resolve
from ..exchange.waits import WaitLog
from ..group.records import NO_RECORD, Key
from ..group.state import Settings, State
from . import exits
from .registry import connect
from .registry.protocol import (
    KEY_WAIT_S,
    KeyRefused,
    Registry,
    RegistryMismatch,
    RegistryUnavailable,
    check_run,
)
from .state_folder import StateFolder

if TYPE_CHECKING:
    from .events import Happening

# Seconds between two beats.
PERIOD_S = 0.5
# Seconds to wait for a shared store where its answer is not needed to train on, as for tidying up.
_ANSWER_S = 5.0
# Id of the registry at which this process has been in a view, by the registry's address and run.
_registries: dict[tuple[str, str], str] = {}


@dataclass
class Elastic:
    """Replicas come and go while the others train on: the argument ``peers=`` of ``DiLoCo``.

    Every process that names the same registry and run is a replica of the same training. A replica
    that dies is left out after seconds, and no outer step that was applied anywhere is lost. A
    process that starts later copies the state, and joins at the end of a round. ``SyncError`` does
    not come out of training, except for what concerns this replica alone; see ``DiLoCo.step``.

    Args:
        registry: Address, ``tcp://host:port`` of ``diloco-comm registry``, or ``etcd://host:port``;
            or a ``torch.distributed.Store``. See ``registry.connect``.
            Default: the environment variable ``DILOCO_COMM_REGISTRY``, which ``diloco-comm launch``
            sets; the same for ``run``, ``key`` and ``insecure``.
        run: Name of the training run ("default"); several runs may share a registry.
        min_replicas: Fewer replicas than this do not train; they wait for more.
        total_steps: Inner steps of the run, the same on all replicas. The step that reaches them
            also shares the training that was not sent yet, as ``flush`` does, and
            ``DiLoCo.is_done`` is true then; a replica that joins late ends with the others.
            Default: the training loop decides when it ends.
        replica: This replica's number, which no other process may have. Default: the environment
            variable ``DILOCO_COMM_REPLICA``; without it, under ``diloco-comm launch`` the number
            of the process before; else the lowest number that is free.
        suspect_after: Seconds after which the others give up a replica that sends no beat, and
            nothing over its link.
        busy_after: Seconds for which the others wait for a replica that lives, as its link says,
            but takes no part in rounds: it evaluates, or its Python code is held up, for instance
            by a data loader that hangs. At least ``suspect_after`` counts.
        quorum_wait: Seconds to wait for enough replicas, or for an answer of the registry, before a
            SyncError; None: for ever.
        founding_wait: Seconds for which the first replicas of a run wait for more to come. After
            all replicas have died, the first that come again wait at least ``suspect_after``.
        rollback: Let this replica begin the run anew where all members have died, or at another
            registry than before, although outer steps that they applied are lost.
        host: With ``link="gloo"``: address of this host for the other members; default: that of the
            interface which leads to the registry. ``Link("tcp")``, the default, has ``listen`` and
            ``advertise`` for that.
        store: With ``link="gloo"``: address of a store, ``tcp://host:port`` of ``diloco-comm
            store``, at which the members connect; equal on all replicas. Default: each replica
            hosts a store for the others, at a free port. ``Link("tcp")`` needs no store.
        round_log_bytes: Most bytes of host memory for the payloads of the latest rounds, from which
            a replica that joins brings its copy of the state forward. Default: 8 bytes for each
            parameter, and at least two rounds of two replicas. 0: replicas copy the state while the
            others wait.
        checkpoint: A ``state_dict()`` of an earlier process of this run. A replica that joins takes
            the outer state from the checkpoint, and copies only what the group has done since.
            Where a run begins, or goes on after all its replicas have died, all take the outer
            state and the inner step of the newest checkpoint that one of them has.
        join_bandwidth: Most bytes a second that this replica asks for while it joins; None: no
            limit.
        inner_state: A replica that joins is given the state of the inner optimizer (the moments of
            AdamW) of the lowest replica that trains, byte for byte, at the boundary where it joins;
            all replicas wait while it travels. Equal on all replicas, which then need inner
            optimizers of one class. A state of other than tensors and numbers is not given, and the
            log says so. Default: a replica that joins begins with a fresh state.
        key, insecure: How to secure the connection to the registry; see ``registry.connect``.
        on_event: Called with each ``Happening``: ``ViewChanged`` and ``JoinProgress`` on the thread
            that trains or constructs DiLoCo, the others on the driver's thread. The function must
            return soon, and must not call DiLoCo; its errors are logged.

    Raises:
        ValueError: If an argument is out of range.
    """

    registry: str | dist.Store | None = None
    run: str | None = None
    min_replicas: int = 1
    total_steps: int | None = None
    replica: int | None = None
    suspect_after: float = 20.0
    busy_after: float = 120.0
    quorum_wait: float | None = 3600.0
    founding_wait: float = 2.0
    rollback: bool = False
    host: str | None = None
    store: str | None = None
    round_log_bytes: int | None = None
    checkpoint: Mapping[str, Any] | None = None
    join_bandwidth: float | None = None
    inner_state: bool = False
    key: str | Path | None = None
    insecure: bool | None = None
    on_event: Callable[[Happening], None] | None = None

    def __post_init__(self) -> None:
        self._take_from_environment()
        assert self.run is not None
        check_run(self.run)
        self.min_replicas = integer("min_replicas", self.min_replicas, 1)
        if self.total_steps is not None:
            self.total_steps = integer("total_steps", self.total_steps, 1)
        if self.replica is None:
            self.replica = env.replica()
        if self.replica is not None:
            self.replica = integer("replica", self.replica, 0, most=MOST_INT32)
        self.founding_wait = not_negative("founding_wait", self.founding_wait)
        flag("rollback", self.rollback)
        flag("inner_state", self.inner_state)
        if self.round_log_bytes is not None:
            self.round_log_bytes = integer("round_log_bytes", self.round_log_bytes, 0)
        if self.join_bandwidth is not None:
            self.join_bandwidth = not_negative("join_bandwidth", self.join_bandwidth)
            if self.join_bandwidth == 0:
                raise ValueError("join_bandwidth must be above 0 bytes a second, got 0")
        if self.on_event is not None and not callable(self.on_event):
            raise TypeError(f"on_event must be a function of a Happening, got {self.on_event!r}")
        if self.host in ("0.0.0.0", "::", ""):
            raise ValueError(f"host must be an address that other hosts reach, got {self.host!r}")
        if self.store is not None:
            parse_address("store", self.store)
        self.suspect_after = timeout_seconds(self.suspect_after, "suspect_after")
        self.busy_after = timeout_seconds(self.busy_after, "busy_after")
        if self.quorum_wait is not None:
            self.quorum_wait = timeout_seconds(self.quorum_wait, "quorum_wait")
        if self.suspect_after < 2 * PERIOD_S:
            raise ValueError(
                f"suspect_after must be at least {2 * PERIOD_S:g} seconds, two beats, got "
                f"{self.suspect_after:g}"
            )

    def _take_from_environment(self) -> None:
        if self.registry is None:
            self.registry = env.registry()
            if not self.registry:
                raise ValueError(
                    "registry is missing: give Elastic the address of diloco-comm registry, or "
                    "start the script by diloco-comm launch --registry tcp://host:port"
                )
        if isinstance(self.registry, str):
            self.registry = with_scheme(self.registry)
        self.run = env.run() if self.run is None else self.run
        self.key = env.registry_key() if self.key is None else self.key
        self.insecure = env.is_insecure() if self.insecure is None else self.insecure

    def connect(self) -> Registry:
        """Connect to the registry; wait up to ``quorum_wait`` seconds until it answers.

        Raises:
            ReplicaMismatch: If another registry answers than before, or one that has lost the run,
                or if the registry refuses the key.
            SyncError: If no registry answers in time.
        """
        assert self.registry is not None and self.run is not None
        folder = self.folder()
        known = "" if folder is None else folder.registry_id
        place = "this process" if not known or folder is None else str(folder.file)
        known = known or _registries.get((str(self.registry), self.run), "")
        known = "" if self.rollback else known
        registry = connect(
            self.registry,
            run=self.run,
            key=self.key,
            insecure=bool(self.insecure),
            registry_id=known,
        )
        log, began, refused_since, reason = WaitLog(), time.monotonic(), 0.0, ""
        while True:
            try:
                record = registry.read()
                if not record and folder is not None:
                    self._refuse_lost_record(folder)
                return registry
            except RegistryMismatch as error:
                registry.close()
                raise self._mismatch(error, known, place) from None
            except ReplicaMismatch:
                registry.close()
                raise
            except RegistryUnavailable as error:
                reason = str(error)
                limit, now = self.quorum_wait, time.monotonic()
                is_refused, waited = isinstance(error, KeyRefused), now - began
                refused_since = (refused_since or now) if is_refused else 0.0
                if is_refused and now - refused_since > KEY_WAIT_S:
                    registry.close()
                    raise ReplicaMismatch(str(error), stage="registry") from None
                if limit is not None and waited > limit:
                    registry.close()
                    raise SyncError(
                        f"waited {limit:g} s for the registry: {error}", stage="registry"
                    ) from error
            if exits.is_asked_to_leave() or (folder is not None and folder.is_asked_to_leave):
                registry.close()
                raise SyncError(
                    "asked to leave before the registry answered", stage=exits.LEFT_STAGE
                )
            log.tick(partial(str, reason))
            time.sleep(PERIOD_S)

    def _mismatch(self, error: RegistryMismatch, known: str, place: str) -> ReplicaMismatch:
        text = str(error)
        if known and known in text:
            text = (
                f"{text.rpartition(': ')[0]}, as {place} notes: start that registry at this "
                "address, with its own journal or data; to begin the run anew instead, give "
                "Elastic rollback=True, or give the run another name"
            )
        return ReplicaMismatch(text, stage="registry")

    def _refuse_lost_record(self, folder: StateFolder) -> None:
        """Raise if this replica has been in a view of the run, and the registry has lost the run.

        Beginning the run anew would lose its outer steps without a word.
        """
        if folder.last_view == NO_RECORD or self.rollback or self.checkpoint is not None:
            return
        raise ReplicaMismatch(
            f"the registry at {self.registry} knows nothing of run {self.run!r}, and this replica "
            f"was in view {folder.last_view} of it, as {folder.file} notes: start the registry "
            "with its newest journal; to begin the run anew instead, give Elastic a checkpoint= or "
            "rollback=True",
            stage="registry",
        )

    def remember(self, registry_id: str) -> None:
        """Remember the registry of this run until the run has ended; "" forgets it."""
        if isinstance(self.registry, str) and self.run is not None:
            _registries[self.registry, self.run] = registry_id

    def interface(self) -> str:
        """Return the address at which the other members reach this process.

        Raises:
            SyncError: If the registry's host has no address.
        """
        try:
            return self.host or own_interface(self.registry)
        except OSError as error:
            # A SyncError, as the name server may just be late: a launcher starts the replica again.
            raise SyncError(str(error), stage="rendezvous") from None

    def place(self, timeout_s: float) -> Place:
        """Open the store at which the members' gloo groups, or their devices, connect.

        Args:
            timeout_s: Longest wait for a store that all members share, in seconds.

        Raises:
            SyncError: If the store, or the registry's host, has no address or does not answer.
        """
        assert self.run is not None
        if self.store is None:
            return Place.hosted(self.interface(), self.run)
        try:
            return Place.shared(self.store, self.run, timeout_s)
        except dist.DistError as error:
            raise SyncError(str(error), stage="rendezvous") from None

    def folder(self) -> StateFolder | None:
        """Return the folder that ``diloco-comm launch`` has given to this replica; None without."""
        return StateFolder(env.state_dir()) if env.state_dir() else None

    def begin(
        self,
        *,
        shown: Any,
        folder: StateFolder | None = None,
        saved_step: int = -1,
    ) -> State:
        """Return the first state of a process that wants to take part.

        Args:
            shown: The settings that must be equal on all replicas, as JSON types.
            folder: The launcher's state folder, which knows the number of the process before; None
                without a launcher.
            saved_step: Inner step of the checkpoint; -1 without one.

        Raises:
            ValueError: If the folder belongs to another run.
        """
        digest = hashlib.blake2b(json.dumps(shown, sort_keys=True).encode(), digest_size=16)
        assert self.run is not None
        before = None if folder is None else folder.last_process(self.run)
        number = self.replica if before is None or self.replica is not None else before[0]
        # The driver takes another number when this one is taken.
        key = Key(number or 0, uuid.uuid4().bytes)
        settings = Settings(
            self.run,
            digest.digest(),
            self.min_replicas,
            suspect_after=max(2, round(self.suspect_after / PERIOD_S)),
            founding_wait=round(self.founding_wait / PERIOD_S),
            allows_rollback=self.rollback,
        )
        has_checkpoint = saved_step >= 0
        return State(settings, key, inner_step=max(0, saved_step), has_checkpoint=has_checkpoint)


# --------------------------------------------------- stores for groups of gloo and devices


class Place:
    """A store at which members connect: hosted by this process, or shared by all members.

    Attributes:
        address: ``tcp://host:port`` of the store.
    """

    def __init__(self, store: dist.Store, address: str, run: str) -> None:
        self.address = address
        self._store: dist.Store | None = store
        self._run = run
        # Connects to the shared store again; None where this process hosts the store.
        self._connect: Callable[[], dist.Store] | None = None

    @classmethod
    def hosted(cls, interface: str, run: str) -> Place:
        """Host a store; the members of a view use the store of the lowest one.

        Args:
            interface: Address or name at which the other members reach this process.
            run: Name of the training run.
        """
        hosted = open_store(interface, 0)
        return cls(hosted.store, hosted.address, run)

    @classmethod
    def shared(cls, address: str, run: str, timeout_s: float) -> Place:
        """Connect to a store that ``diloco-comm store`` hosts for all members of its runs.

        Raises:
            torch.distributed.DistError: If the store does not answer.
        """

        def connect(seconds: float) -> dist.Store:
            store = _dial(address, seconds)
            store.set_timeout(timedelta(seconds=_ANSWER_S))
            return store

        place = cls(connect(timeout_s), address, run)
        place._connect = partial(connect, _ANSWER_S)
        return place

    def tidy(self, attempt: str, *, is_lowest: bool) -> None:
        """Delete the keys of other attempts from the store, when a view has begun.

        In a shared store only the lowest member does so.

        Args:
            attempt: Name of the attempt that has led to the view.
            is_lowest: This process is the lowest member of the view.
        """
        if self._connect is not None and not is_lowest:
            return
        try:
            if self._store is None:
                assert self._connect is not None
                self._store = self._connect()
            # Older versions of torch cannot list the keys of a store; then the keys stay there.
            list_keys = getattr(self._store, "list_keys", None)
            for key in () if list_keys is None else list_keys():
                run, _, rest = key.partition("/")
                if run == self._run and rest.partition("/")[0] != attempt:
                    self._store.delete_key(key)
        except dist.DistError:
            # The connection may be broken: connect again in the next view.
            self._store = None if self._connect is not None else self._store


def meeting_place(run: str, attempt: str, address: str, timeout_s: float) -> dist.Store:
    """Connect to the store at which the members of an attempt meet, under a prefix of the attempt.

    Args:
        address: ``tcp://host:port``.

    Raises:
        torch.distributed.DistError: If no store answers at the address.
    """
    return dist.PrefixStore(f"{run}/{attempt}", _dial(address, timeout_s))


def _dial(address: str, timeout_s: float) -> dist.Store:
    return dial_store(*parse_address("store", address), timeout_s)


def own_interface(registry: object) -> str:
    """Return the address of this host's network interface that leads to the registry's host.

    If the registry is a store without a known address, return the loopback address.

    Raises:
        OSError: If the registry's host has no address.
    """
    if isinstance(registry, dist.Store):
        _, place = place_of_store(registry)
    else:
        url = urlsplit(str(registry).split(",")[0])
        place = None if url.hostname is None else (url.hostname, url.port or 0)
    if place is None:
        return "127.0.0.1"
    family, _, _, _, target = resolve(*place, "the registry", kind=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # A datagram socket sends nothing when it connects; it only chooses its interface.
        probe.connect(target)
        return str(probe.getsockname()[0])
