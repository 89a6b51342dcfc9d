"""Refuse gradients that a trainer averages over replicas, and divide its undivided data."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from ..base import env
from ..base.checks import timeout_seconds, warn
from ..replica import sharding
from ..replica.sharding import Wrapper
from ..replica.workers import WorkerMessages
from ..rounds import handshake
from ..training.diloco import DiLoCo
from ..training.sampler import ElasticSampler, ReplicaSampler, shard_part

_DIVIDED = "DiLoCoCallback(shard=False) says that the data are divided already"


def refuse_if_spans_replicas(model: nn.Module, choices: Mapping[str, Any], remedy: str) -> None:
    """Raise if DDP or FSDP averages gradients over several replicas at every step.

    With a store this is a collective call of the workers whose gradients are averaged.

    Args:
        model: The model, wrapped by the trainer.
        choices: The choices of ``DiLoCo``, as ``choices_of`` returns them.
        remedy: What to write instead, for the error.

    Raises:
        ValueError: The message names the ranks and the remedy.
    """
    for wrapper in sharding.around(model):
        ranks = _several_replicas(wrapper, choices)
        if ranks:
            raise ValueError(
                f"{wrapper.name} averages gradients over ranks {ranks} at every step, but these "
                f"are different replicas, which DiLoCo averages every sync_every steps: {remedy}"
            )


def refuse_if_alone_in_a_job(num_processes: int, choices: Mapping[str, Any], remedy: str) -> None:
    """Raise if the trainer knows of one process, in a job of several.

    Such a trainer gives all replicas the same data and the same folder. On a CPU this happens to
    transformers and accelerate under torchrun, unless they are told to use the CPU.

    Args:
        num_processes: Number of processes that the trainer knows of.
        choices: The choices of ``DiLoCo``, as ``choices_of`` returns them. If the
            choices name the replicas the check is skipped.
        remedy: What to write instead, for the error.

    Raises:
        ValueError: The message names the remedy.
    """
    named = ("group", "mesh", "store", "num_replicas", "membership")
    if any(choices.get(name) is not None for name in named) or not dist.is_initialized():
        return
    world = dist.get_world_size()
    if num_processes == 1 and world > 1:
        raise ValueError(
            f"the trainer knows of one process, in a job of {world}: all of them would train on "
            f"the same data and write the same files: {remedy}, or give DiLoCo the process "
            "group of the replicas as peers="
        )


def _several_replicas(wrapper: Wrapper, choices: Mapping[str, Any]) -> list[int]:
    """Return the wrapper's ranks that are different replicas; [] if all are one replica."""
    if choices.get("membership") is not None:
        # The processes of one launch are the workers of one replica.
        return []
    if choices.get("store") is None:
        names = ("group", "mesh", "store", "num_replicas")
        group = handshake.replica_group(*(choices.get(name) for name in names))
        replicas = [] if group is None else dist.get_process_group_ranks(group)
        shared = sorted(wrapper.ranks.intersection(replicas))
        return shared if len(shared) > 1 else []
    given = choices.get("timeout")
    seconds = timeout_seconds(env.timeout_s() if given is None else given)
    # For workers that hold DTensors another check compares the replicas.
    for group in wrapper.groups:
        replicas = WorkerMessages(group, seconds).gather(choices.get("replica"))
        if len(set(replicas)) > 1:
            return dist.get_process_group_ranks(group)
    return []


class Division:
    """Give this replica its own part of the training data, where the trainer does not divide them.

    A trainer divides the data over the processes that it knows of. It knows of no other replica if
    each replica is a job of its own, or if it knows of one process only.

    Args:
        choices: The choices of ``DiLoCo``, as ``choices_of`` returns them.
        is_wanted: False leaves all data as they are.
    """

    def __init__(self, choices: Mapping[str, Any], *, is_wanted: bool) -> None:
        self._choices, self._is_wanted = choices, is_wanted
        self._has_warned = False
        self._datasets: dict[int, Any] = {}  # the divided data sets, by their id()
        self._samplers: list[Any] = []

    def is_needed(self, num_processes: int) -> bool:
        """Whether the trainer gives all replicas the same data.

        Args:
            num_processes: Number of processes that the trainer knows of.
        """
        _, num_parts = self._place(num_processes)
        is_elastic = self._choices.get("membership") is not None
        return self._is_wanted and (num_parts > 1 or is_elastic)

    def _place(self, num_processes: int) -> tuple[int, int]:
        """Return this replica's part, and the number of parts."""
        given = self._choices.get
        if given("store") is not None:
            members = given("members") or range(given("num_replicas") or 1)
            return sorted(set(members)).index(given("replica") or 0), len(set(members))
        # Without a store, several processes are those that the trainer divides the data among, of
        # all replicas; under elastic membership no part is known.
        if num_processes > 1 or given("membership") is not None:
            return 0, 1
        group = handshake.replica_group(given("group"), given("mesh"), None, given("num_replicas"))
        return (0, 1) if group is None else (group.rank(), group.size())

    def part_of(self, loader: Any, num_processes: int) -> Any:
        """Return a loader like ``loader`` with this replica's part; another object as it is.

        Warns once if the loader cannot be divided, and returns it as it is.
        """
        place = self._place(num_processes)
        if not self.is_needed(num_processes) or not isinstance(loader, DataLoader):
            return loader
        if isinstance(loader.sampler, DistributedSampler | ReplicaSampler | ElasticSampler):
            return loader
        if self._choices.get("membership") is not None:
            self.warn_undivided(
                "with peers=Elastic(...) the callback divides no data: give each replica data of "
                "its own"
            )
            return loader
        try:
            divided = shard_part(loader, *place, seed=self._choices.get("seed") or 0)
        except (TypeError, ValueError) as error:
            self.warn_undivided(str(error))
            return loader
        self._datasets[id(loader.dataset)] = loader.dataset
        self._samplers.append(divided.sampler)
        return divided

    def begin_at(self, epoch: int) -> None:
        """Let the divided loaders go on with this epoch, where the trainer does not tell them."""
        for sampler in self._samplers:
            sampler.set_epoch(epoch)

    def warn_undivided(self, reason: str) -> None:
        """Warn once that the replicas have the same data."""
        if not self._has_warned:
            self._has_warned = True
            warn(f"all replicas may train on the same data: {reason}; {_DIVIDED}")

    def check(self, diloco: DiLoCo) -> None:
        """Warn if the data were divided though they differ between replicas; a collective call."""
        if diloco.view >= 0:
            return
        own = [_shown(data) for data in self._datasets.values()]
        self._datasets = {}
        views = handshake.gather_json(diloco.exchange, own)
        are_known = all(view and all(view) for view in views)
        if are_known and any(view != views[0] for view in views):
            warn(
                "each replica has data of its own, and trains on a part of them alone, one of "
                f"{len(views)}: {_DIVIDED}"
            )


def _shown(data: Any) -> str:
    """Return the length of a data set and a digest of three samples; "" where that fails."""
    try:
        size = len(data)
        with _seeded():
            samples = [data[index] for index in sorted({0, size // 2, size - 1})]
        digest = hashlib.blake2b(b" ".join(_pieces(samples)), digest_size=8).hexdigest()
        return f"{size} {digest}"
    except Exception:
        # Reading a data set may raise anything; training reads it again and shows the error.
        return ""


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed all random generators alike on all replicas within the block, then restore them."""
    numpy, before = sys.modules.get("numpy"), random.getstate()
    numpy_before = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            random.seed(0)
            torch.default_generator.manual_seed(0)
            if numpy is not None:
                numpy.random.seed(0)
            yield
        finally:
            random.setstate(before)
            if numpy is not None:
                numpy.random.set_state(numpy_before)


def _pieces(sample: Any) -> Iterable[bytes]:
    """Return the numbers of a sample as bytes; texts may be paths, which differ between hosts."""
    if isinstance(sample, Mapping):
        for name, value in sample.items():
            yield str(name).encode()
            yield from _pieces(value)
    elif isinstance(sample, Tensor):
        yield f"{sample.dtype}{tuple(sample.shape)}".encode()
        yield repr(sample.flatten()[:4096].tolist()).encode()
    elif isinstance(sample, list | tuple):
        for value in sample:
            yield from _pieces(value)
    elif isinstance(sample, bytes | int | float):
        yield repr(sample).encode()
