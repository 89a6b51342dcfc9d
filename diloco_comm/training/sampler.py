"""Which samples of a data set each replica trains on, in a group that changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ..base.checks import choice, flag, integer
from ..elastic.leases import REPEAT, SKIP, Account, Plan

if TYPE_CHECKING:
    from .diloco import DiLoCo


class ElasticSampler(Sampler[int]):
    """Give each replica of an elastic group other samples, whoever comes and goes.

    The iterator gives the indices of one inner step after another, and ends when
    ``diloco.is_done`` is true. Within a data epoch the replicas that train together never take the
    same sample. An epoch ends where the replicas together have gone through the data set; the next
    epoch has another order.

    What a replica had taken when it was lost, and what no outer step holds, is given out again or
    skipped. Exactly once is not promised: a lost replica may have shared a part of a sample's
    effect, as other fragments or with an overlap, and steps of a round that broke off count.

    Pass it to ``DataLoader(..., sampler=, batch_size=)`` and iterate over the loader once. With
    ``num_workers > 0`` the loader takes samples ahead of the training, at most ``num_workers *
    prefetch_factor`` batches. They stay this replica's own when the view changes. Leave the loop
    when ``diloco.is_done`` is true: a step on a batch taken ahead would not be shared.

    Args:
        data: The data set, or the number of its samples.
        diloco: With ``membership=``.
        batch_size: Samples that each worker of a replica takes for one inner step: with gradient
            accumulation, those of all its batches.
        seed: Of the orders of the epochs.
        shuffle: False for the order of the data set in every epoch.
        lost: "repeat" or "skip": what becomes of the unapplied samples of a lost replica.

    An order takes 8 bytes a sample of host memory; two orders are kept.

    Raises:
        ValueError: If an argument is out of range, or ``diloco`` has no ``membership=``.
        RuntimeError: If this DiLoCo has a sampler already.
        ReplicaMismatch: If this replica has joined others whose samplers have other arguments.
    """

    def __init__(
        self,
        data: Sized | int,
        diloco: DiLoCo,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        lost: str = REPEAT,
    ) -> None:
        training = diloco._elastic
        if training is None:
            raise ValueError(
                "ElasticSampler needs a DiLoCo with membership=; for a fixed group take "
                "torch.utils.data.DistributedSampler"
            )
        num_samples = data if isinstance(data, int) else len(data)
        self._num_samples = integer("data", num_samples, 1)
        self._batch_size = integer("batch_size", batch_size, 1)
        self._seed = integer("seed", seed)
        flag("shuffle", shuffle)
        choice("lost", lost, (REPEAT, SKIP))
        self._diloco, self._shuffle = diloco, shuffle
        workers = diloco._workers
        self._worker = 0 if workers is None else workers.rank
        self._num_workers = 1 if workers is None else workers.size
        self._orders: dict[int, Tensor] = {}
        self._shape = {
            "num_samples": self._num_samples,
            "lease": self._batch_size * self._num_workers,
            "seed": self._seed,
            "shuffle": shuffle,
            "lost": lost,
        }
        replica = diloco.members[diloco.replica_index]
        self._book = training.leasing.begin(self._shape, replica, diloco.members, diloco.inner_step)

    def __iter__(self) -> Iterator[int]:
        while not self._diloco.is_done:
            lease = self._book.draw()
            begin = (lease * self._num_workers + self._worker) * self._batch_size
            for place in range(begin, begin + self._batch_size):
                yield self._sample(place)

    def _sample(self, place: int) -> int:
        """Return the index of the sample at a place of the endless stream."""
        epoch, index = divmod(place, self._num_samples)
        return int(self._order(epoch)[index]) if self._shuffle else index

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[min(self._orders)]
            text = f"{self._seed} {epoch}".encode()
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
            generator = torch.Generator().manual_seed(seed)
            self._orders[epoch] = torch.randperm(self._num_samples, generator=generator)
        return self._orders[epoch]

    def state_dict(self) -> dict[str, Any]:
        """Return where the data stand, for a checkpoint at this inner step.

        What was taken ahead of the training, and not yet used, is given out again after a resume.
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
