"""``shard`` and its samplers: they decide on which samples each replica trains."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ..base.checks import choice, flag, integer
from ..elastic.leases import REPEAT, SKIP, Account, Plan
from ..methods.settings import Settings
from ..replica import sharding
from ..replica.workers import ReplicaWorkers
from .leases import Leasing

# The number of a part of the data, from 0, and how many parts there are.
Place = tuple[int, int]


class Trained(Protocol):
    """The part of a ``DiLoCo`` that a sampler reads."""

    inner_step: int
    settings: Settings
    _model: nn.Module
    _workers: ReplicaWorkers | None
    _batches_at_once: int | None

    @property
    def _leasing(self) -> Leasing | None: ...

    @property
    def members(self) -> tuple[int, ...]: ...

    @property
    def replica_index(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    @property
    def is_done(self) -> bool: ...


# ----------------------------------------------------------------------------------------- loaders


def shard(
    loader: DataLoader[Any], diloco: Trained, *, batches_per_step: int = 1
) -> DataLoader[Any]:
    """Return a loader like ``loader`` that reads this replica's part; see ``DiLoCo.shard``."""
    integer("batches_per_step", batches_per_step, 1)
    worker, num_workers = _worker_of(diloco)

    def place() -> Place:
        part = diloco.replica_index * num_workers + worker
        return part, diloco.num_replicas * num_workers

    is_elastic, seed = diloco._leasing is not None, diloco.settings.seed
    num_samples, is_shuffled = _ordinary(loader, place(), is_elastic=is_elastic)
    batch_size = loader.batch_size or 1
    if is_elastic:
        lease = batch_size * batches_per_step
        elastic = ElasticSampler(
            num_samples, diloco, batch_size=lease, seed=seed, shuffle=is_shuffled
        )
        return _with_sampler(loader, elastic)
    at_once = diloco._batches_at_once or 1
    batch_size *= at_once
    fixed = ReplicaSampler(
        num_samples,
        place,
        seed=seed,
        shuffle=is_shuffled,
        batch_size=batch_size,
        drop_last=loader.drop_last,
        inner_step=lambda: diloco.inner_step,
        samples_per_step=batch_size * batches_per_step,
        counts_anew=diloco._batches_at_once is not None,
        ahead=-(-loader.num_workers * (loader.prefetch_factor or 0) // at_once),
    )
    return _with_part(loader, fixed)


def shard_part(
    loader: DataLoader[Any], part: int, num_parts: int, *, seed: int = 0
) -> DataLoader[Any]:
    """Return a loader like ``loader`` that reads one of ``num_parts`` parts, without a DiLoCo.

    As ``DiLoCo.shard`` in a fixed group, for a loader that is made before DiLoCo is attached. Each
    iteration is a new epoch, unless ``loader.sampler.set_epoch()`` is called before it.

    Args:
        part: From 0; another one on each worker of each replica.
        seed: The seed of the epochs' orders; the same on all replicas.
    """
    num_parts = integer("num_parts", num_parts, 1)
    if integer("part", part, 0) >= num_parts:
        raise ValueError(f"part must be less than num_parts, {num_parts}, got {part}")
    place = part, num_parts
    num_samples, is_shuffled = _ordinary(loader, place)
    fixed = ReplicaSampler(
        num_samples,
        lambda: place,
        seed=seed,
        shuffle=is_shuffled,
        batch_size=loader.batch_size or 1,
        drop_last=loader.drop_last,
    )
    return _with_part(loader, fixed)


def _ordinary(
    loader: DataLoader[Any], place: Place, *, is_elastic: bool = False
) -> tuple[int, bool]:
    """Return the number of samples of a loader with an ordinary sampler, and whether it shuffles.

    Raises:
        TypeError, ValueError: If only the program knows how the loader's data can be divided.
    """
    part, num_parts = place
    by_hand = (
        "give DataLoader(sampler=ElasticSampler(dataset, diloco, batch_size=))"
        if is_elastic
        else "give DataLoader(sampler=DistributedSampler(dataset, "
        f"num_replicas={num_parts}, rank={part}))"
    )
    if not isinstance(loader, DataLoader):
        raise TypeError(f"shard() takes a torch DataLoader, got {loader!r}: {by_hand}")
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            "shard() got a loader of an IterableDataset, which has no indices to divide: divide "
            "the data set itself, for Hugging Face data sets by "
            "datasets.distributed.split_dataset_by_node(dataset, "
            f"rank={part}, world_size={num_parts})"
        )
    sampler = loader.sampler
    if isinstance(sampler, ReplicaSampler | ElasticSampler):
        raise ValueError("shard() got a loader that is sharded already: use it as it is")
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            "shard() got a loader with a DistributedSampler, of "
            f"num_replicas={sampler.num_replicas} and rank={sampler.rank}: leave out shard(), and "
            f"{by_hand}"
        )
    if type(loader) is not DataLoader:
        kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
        raise TypeError(
            f"shard() takes a torch DataLoader and got the subclass {kind}, which it cannot make "
            f"anew: shard the loader before a trainer prepares it, or {by_hand}"
        )
    if loader.batch_sampler is not None and loader.batch_size is None:
        raise ValueError(
            "shard() got a loader with a batch_sampler of its own, "
            f"{type(loader.batch_sampler).__name__}: let the batch_sampler choose from part {part} "
            f"of {num_parts} of the indices, and leave out shard()"
        )
    return _num_samples(sampler, len(loader.dataset), by_hand), isinstance(sampler, RandomSampler)  # type: ignore[arg-type]


def _num_samples(sampler: Any, size: int, by_hand: str) -> int:
    """Return ``size``, the length of the data set, if the sampler takes each sample once."""
    kind = type(sampler)
    if kind not in (RandomSampler, SequentialSampler):
        raise ValueError(
            f"shard() got a loader with a sampler of its own, {kind.__name__}: {by_hand}, or let "
            "your sampler choose other indices on each replica, and leave out shard()"
        )
    if getattr(sampler, "replacement", False):
        raise ValueError(
            "shard() got a loader with RandomSampler(replacement=True), whose draws cannot be "
            "divided: draw with another seed on each replica, and leave out shard()"
        )
    if not len(sampler) == len(sampler.data_source) == size:
        raise ValueError(
            f"shard() got a loader whose sampler takes {len(sampler)} samples of a data set of "
            f"{size}: choose them by torch.utils.data.Subset, or {by_hand}"
        )
    return size


def _with_part(loader: DataLoader[Any], sampler: ReplicaSampler) -> DataLoader[Any]:
    made = _with_sampler(loader, sampler)
    if len(made) == 0:
        _, num_parts = sampler.place()
        raise ValueError(
            f"with drop_last=True, {len(loader.dataset)} samples in {num_parts} parts leave no "  # type: ignore[arg-type]
            f"batch of {loader.batch_size}: give more data, smaller batches or drop_last=False"
        )
    return made


def _with_sampler(loader: DataLoader[Any], sampler: Sampler[int]) -> DataLoader[Any]:
    """Return a DataLoader with the arguments of ``loader`` and another sampler."""
    names = inspect.signature(DataLoader.__init__).parameters.keys()
    kept = names - {"self", "shuffle", "sampler", "batch_sampler"}
    arguments = {name: getattr(loader, name) for name in kept if hasattr(loader, name)}
    return DataLoader(**arguments, sampler=sampler)


def _worker_of(diloco: Trained) -> Place:
    """Return this worker's number among the workers of its replica that take different samples.

    Raises:
        ValueError: If it is not certain that the workers are data parallel.
    """
    worker, num_workers = _data_parallel_worker(diloco)
    # If a trainer divides each batch among the workers, each worker's sampler must yield all of the
    # replica's samples.
    return (worker, num_workers) if diloco._batches_at_once is None else (0, 1)


def _data_parallel_worker(diloco: Trained) -> Place:
    params = [p for p in diloco._model.parameters() if sharding.is_sharded(p)]
    workers = diloco._workers
    if params:
        if workers is None:
            return 0, 1
        if not _are_data_parallel(diloco, params):
            raise ValueError(
                f"the parameters lie on {workers.size} workers of this replica in a way that does "
                "not tell which of them take the same samples: give DataLoader("
                "sampler=DistributedSampler(dataset, num_replicas=, rank=)), where rank is equal "
                "on workers of one tensor-parallel group"
            )
        return workers.rank, workers.size
    groups = [group for one in sharding.around(diloco._model) for group in one.groups]
    groups += [] if workers is None else [workers.group]
    found = {tuple(sorted(dist.get_process_group_ranks(group))) for group in groups}
    found = {ranks for ranks in found if len(ranks) > 1}
    if not found:
        return 0, 1
    if len(found) > 1:
        raise ValueError(
            "the model averages gradients over several groups of workers, of ranks "
            f"{sorted(map(list, found))}: give DataLoader(sampler=DistributedSampler(dataset, "
            "num_replicas=, rank=)), with a rank of its own for each worker of each replica"
        )
    (ranks,) = found
    return ranks.index(dist.get_rank()), len(ranks)


def _are_data_parallel(diloco: Trained, params: list[Any]) -> bool:
    """Whether FSDP2 alone has sharded the parameters: over one dimension, or as HSDP."""
    managed = {id(param) for m in sharding.fsdp_modules(diloco._model) for param in m.parameters()}
    meshes = {param.device_mesh for param in params}
    is_fsdp = all(id(param) in managed for param in params)
    # With tensor parallelism, FSDP shards along the mesh's first dimension; HSDP replicates there.
    copied = {tuple(one.is_replicate() for one in param.placements) for param in params}
    return is_fsdp and len(meshes) == 1 and copied in ({(False,)}, {(True, False)})


# ---------------------------------------------------------------------------------------- samplers


class Orders:
    """The order of the samples in each data epoch, equal on all replicas.

    An order needs 8 bytes of host memory for each sample; two orders are kept.
    """

    def __init__(self, num_samples: int, seed: int, *, shuffle: bool) -> None:
        self.num_samples = num_samples
        self._seed, self._shuffle = seed, shuffle
        self._kept: dict[int, Tensor] = {}

    def sample(self, epoch: int, index: int) -> int:
        """Return the sample at place ``index`` of an epoch."""
        return int(self.order(epoch)[index]) if self._shuffle else index

    def order(self, epoch: int) -> Tensor:
        """Return a permutation of the samples, int64."""
        if epoch not in self._kept:
            while len(self._kept) > 1:
                del self._kept[min(self._kept)]
            text = f"{self._seed} {epoch}".encode()
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
            generator = torch.Generator().manual_seed(seed)
            self._kept[epoch] = torch.randperm(self.num_samples, generator=generator)
        return self._kept[epoch]


@dataclass
class _Iteration:
    """One iteration over a part of an epoch.

    Attributes:
        epoch, num_parts: Number of the epoch, and of parts of the data.
        inner_step, first: The inner step and the sample at which this iteration began.
        taken: Samples of this part of the epoch that were taken, with earlier iterations.
        end: Samples of this part of the epoch.
        batch_size: Samples of a batch; the last batch of the epoch may have fewer.
        before: The iteration that reached the end of the epoch before; None if none is needed.
        rest: Batches of ``before`` that its inner steps did not use.
        carried: How many of these the first inner step of this iteration uses: all, or 0.
        is_known: Whether this iteration has come to its first inner step.
    """

    epoch: int
    num_parts: int
    inner_step: int
    first: int
    taken: int
    end: int
    batch_size: int
    before: _Iteration | None = None
    rest: int = 0
    carried: int = 0
    is_known: bool = False

    @property
    def drawn(self) -> int:
        """The number of batches that this iteration has taken."""
        return -(-(self.taken - self.first) // self.batch_size)

    def used(self, inner_step: int, batches_per_step: int) -> int:
        """Return how many batches of this iteration the inner steps have used."""
        return (inner_step - self.inner_step) * batches_per_step - self.carried


class ReplicaSampler(Sampler[int]):
    """Yields one part of each data epoch, in a fixed group.

    Part p of n takes the places p, p + n, p + 2n ... of the epoch's order. All parts have the same
    number of samples: with ``drop_last`` samples that fill no batch are dropped, otherwise the
    first samples of the epoch are taken once more.

    An epoch is over when one of its iterations was exhausted, or was left after an inner step; the
    next iteration begins the next epoch. So a look at a first batch, on one replica alone, changes
    no order.

    Args:
        num_samples: The length of the data set.
        place: Returns the own part and the number of parts; called when an iteration begins.
        seed: The seed of the orders.
        shuffle: False for the order of the data set in every epoch.
        batch_size: Samples of a batch.
        drop_last: Drop samples, instead of repeating some.
        inner_step: Returns the inner steps taken; None makes each iteration a new epoch.
        samples_per_step: Samples of one inner step, in whole batches. With it the sampler knows
            which samples were used, as loaders take batches ahead of the training.
        counts_anew: Whether a trainer calls ``set_epoch`` with numbers that begin with 0 in each
            process: after a resume they count on from the saved epoch.
        ahead: The least number of batches that the loader takes before the loop uses the first.
    """

    def __init__(
        self,
        num_samples: int,
        place: Callable[[], Place],
        *,
        seed: int,
        shuffle: bool,
        batch_size: int,
        drop_last: bool,
        inner_step: Callable[[], int] | None = None,
        samples_per_step: int = 0,
        counts_anew: bool = False,
        ahead: int = 0,
    ) -> None:
        self.place, self.epoch = place, 0
        self._orders = Orders(integer("num_samples", num_samples, 1), seed, shuffle=shuffle)
        self._batch_size, self._drop_last = batch_size, drop_last
        self._inner_step, self._batches_per_step = inner_step, samples_per_step // batch_size
        self._shape = {"num_samples": num_samples, "seed": seed, "shuffle": shuffle}
        self._counts_anew, self._is_loaded, self._offset = counts_anew, False, 0
        # The sample at which the next iteration begins, the iteration that took samples last, and
        # the last iteration of the epoch before.
        self._first = 0
        self._last: _Iteration | None = None
        self._before: _Iteration | None = None
        self._is_over = False
        # Whether the loop, as last observed, uses the rest of an epoch in the next epoch.
        self._ahead, self._counts_on = ahead, False

    def __len__(self) -> int:
        _, num_parts = self.place()
        return self._count(num_parts)

    def _count(self, num_parts: int) -> int:
        num_samples = self._orders.num_samples
        if self._drop_last:
            return num_samples // num_parts // self._batch_size * self._batch_size
        return -(-num_samples // num_parts)

    def __iter__(self) -> Iterator[int]:
        if self._is_over:
            self._begin(self.epoch + 1)
        return self._samples(self.epoch, self._first)

    def _samples(self, epoch: int, first: int) -> Iterator[int]:
        (part, num_parts), before = self.place(), self._last
        end = self._count(num_parts)
        own = _Iteration(epoch, num_parts, self._now(), first, first, end, self._batch_size)
        self._carry(own)
        is_over = False
        try:
            for number in range(first, end):
                self._look(own)
                own.taken = number + 1
                self._last = own if epoch == self.epoch else self._last
                place = number * num_parts + part
                yield self._orders.sample(epoch, place % self._orders.num_samples)
            is_over = True
        finally:
            is_over = is_over or self._inner_step is None or self._now() != own.inner_step
            if epoch == self.epoch and is_over:
                self._is_over = True
            elif self._last is own:
                self._last = before

    def _carry(self, own: _Iteration) -> None:
        """Find out how many batches of the epoch before the inner steps did not use.

        With gradient accumulation, a loop may count batches on over the end of an epoch; then the
        first step of the next epoch uses this rest. A loop that counts anew in each epoch does not
        use it; ``_look`` finds out which is the case.
        """
        before = self._before
        if before is None or self._inner_step is None or before.taken < before.end or own.first:
            return
        rest = before.drawn - before.used(own.inner_step, self._batches_per_step)
        if rest < 0 and before.rest:
            # The steps have used more batches than the epoch had: the loop counts on.
            self._counts_on, rest = True, rest + before.rest
        if 0 < rest < self._batches_per_step:
            own.before, own.rest, before.before = before, rest, None
            own.carried = rest if self._counts_on else 0

    def _look(self, own: _Iteration) -> None:
        """At the first inner step of an iteration, infer how many batches that step has used.

        It has used the batches drawn so far, minus the ones that the loader is ahead.
        """
        if own.is_known or self._now() == own.inner_step:
            return
        own.is_known = True
        if own.taken == own.end or self._now() != own.inner_step + 1:
            # At the end of the data the loader is less far ahead than usual; after two steps the
            # batches of the first are not known.
            return
        ahead = own.drawn - self._batches_per_step
        if own.rest:
            self._counts_on = ahead < self._ahead
            own.carried = own.rest if self._counts_on else 0
        else:
            self._ahead = ahead

    def _now(self) -> int:
        return 0 if self._inner_step is None else self._inner_step()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration; the same number on all replicas."""
        epoch = integer("epoch", epoch, 0)
        if self._is_loaded and self._counts_anew:
            self._offset = self.epoch - epoch
        self._is_loaded = False
        epoch += self._offset
        if epoch != self.epoch or self._last is not None:
            self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self._before = self._last or self._before
        self.epoch, self._first, self._last, self._is_over = epoch, 0, None, False

    def state_dict(self) -> dict[str, Any]:
        """Return where the data stand, for a checkpoint at this inner step."""
        num_parts, taken, epoch, last = self.place()[1], self._first, self.epoch, self._last
        if last is not None and self._inner_step is not None:
            self._look(last)
            if last.carried and self._now() == last.inner_step and last.before is not None:
                last = last.before
        if last is not None:
            num_parts, taken, epoch = last.num_parts, last.taken, last.epoch
            if self._inner_step is not None:
                used = last.used(self._now(), self._batches_per_step)
                taken = min(taken, last.first + used * last.batch_size)
        return {**self._shape, "num_parts": num_parts, "epoch": epoch, "taken": taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from a checkpoint, of this replica or of any other.

        Call this after ``diloco.load_state_dict``.

        Raises:
            ValueError: If the state is of other data, or of another number of parts within an
                epoch.
        """
        other = {name: state.get(name) for name in self._shape}
        if other != self._shape:
            raise ValueError(
                f"the saved state is of a loader with {other}, and this one has {self._shape}: "
                "shard the same data, in a DiLoCo with the same seed"
            )
        epoch, taken, num_parts = int(state["epoch"]), int(state["taken"]), self.place()[1]
        if taken and state["num_parts"] != num_parts:
            raise ValueError(
                f"the saved state is {taken} samples into an epoch of {state['num_parts']} parts, "
                f"and there are {num_parts} parts now: begin an epoch by "
                f"loader.sampler.set_epoch({epoch + 1}), on all replicas"
            )
        left = self._count(num_parts) - taken
        is_over = left < (self._batch_size if self._drop_last else 1)
        self._begin(epoch + is_over)
        self._before = None
        self._first, self._is_loaded = 0 if is_over else taken, True


class ElasticSampler(Sampler[int]):
    """Gives each replica of an elastic group different samples, while replicas come and go.

    The iterator gives the indices of one inner step after another, and ends when
    ``diloco.is_done`` is true. Within a data epoch the replicas that train together never take the
    same sample. An epoch ends where the replicas together have gone through the data set; the next
    epoch has another order.

    If a replica is lost, its samples that are in no outer step are given out again or skipped. So a
    sample may count partly, or more than once: with fragments or overlap, a lost replica may have
    shared a part of a sample's effect, and steps of a failed round still count.

    Pass it to ``DataLoader(..., sampler=, batch_size=)`` and iterate over the loader once. With
    ``num_workers > 0`` the loader takes samples ahead of the training, at most ``num_workers *
    prefetch_factor`` batches. They stay this replica's own when the view changes. Leave the loop
    when ``diloco.is_done`` is true: a step on a batch taken ahead would not be shared.

    Args:
        data: The data set, or the number of its samples.
        diloco: A DiLoCo with ``Elastic``.
        batch_size: Samples that each worker of a replica takes for one inner step: with gradient
            accumulation, the samples of all its batches.
        seed: The seed of the epochs' orders.
        shuffle: False for the order of the data set in every epoch.
        lost: Whether samples of a lost replica that are in no outer step are given out again
            ("repeat") or dropped ("skip").

    Raises:
        ValueError: If an argument is out of range, or ``diloco`` has no ``Elastic``; if it is
            not certain that the workers of this replica are data parallel.
        RuntimeError: If this DiLoCo has a sampler already.
        ReplicaMismatch: If this replica has joined others whose samplers have other arguments.
    """

    def __init__(
        self,
        data: Sized | int,
        diloco: Trained,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        lost: str = REPEAT,
    ) -> None:
        leasing = diloco._leasing
        if leasing is None:
            raise ValueError(
                "ElasticSampler needs a DiLoCo with peers=Elastic(...); for a fixed group use "
                "diloco.shard(loader)"
            )
        num_samples = data if isinstance(data, int) else len(data)
        self._num_samples = integer("data", num_samples, 1)
        self._batch_size = integer("batch_size", batch_size, 1)
        self._seed = integer("seed", seed)
        flag("shuffle", shuffle)
        choice("lost", lost, (REPEAT, SKIP))
        self._diloco = diloco
        self._worker, self._num_workers = _worker_of(diloco)
        self._batch_size *= diloco._batches_at_once or 1
        self._orders = Orders(self._num_samples, self._seed, shuffle=shuffle)
        self._shape = {
            "num_samples": self._num_samples,
            "lease": self._batch_size * self._num_workers,
            "seed": self._seed,
            "shuffle": shuffle,
            "lost": lost,
        }
        replica = diloco.members[diloco.replica_index]
        self._book = leasing.begin(self._shape, replica, diloco.members, diloco.inner_step)

    def __iter__(self) -> Iterator[int]:
        while not self._diloco.is_done:
            lease = self._book.draw()
            begin = (lease * self._num_workers + self._worker) * self._batch_size
            for place in range(begin, begin + self._batch_size):
                yield self._orders.sample(*divmod(place, self._num_samples))

    def state_dict(self) -> dict[str, Any]:
        """Return where the data stand, for a checkpoint at this inner step.

        Samples that were taken ahead of the training, and not yet used, are given out again after a
        resume.
        """
        plan = self._book.saved(self._diloco.inner_step)
        return {**self._shape, "first": plan.first, "again": list(plan.again)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; every replica of the run loads the same one where a run begins.

        Call this after ``diloco.load_state_dict``, and before the iteration.

        Raises:
            ValueError: If the state is of a sampler with other arguments.
            RuntimeError: If samples were taken already.
        """
        other = {name: state.get(name) for name in self._shape}
        if other != self._shape:
            raise ValueError(
                f"the saved state is of an ElasticSampler with {other}, and this one has "
                f"{self._shape}: give it the same arguments"
            )
        if self._book.account.taken:
            raise RuntimeError("load_state_dict must come before the first sample is taken")
        first, again = int(state["first"]), tuple(int(one) for one in state["again"])
        plan, step = Plan(self._diloco.members, first, again), self._diloco.inner_step
        self._book.account = Account(self._book.account.view, plan, step)
