"""``diloco.shard(loader)``: each replica reads its own part, and all end at the same step."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from problems import Regression, attach, train_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from diloco_comm import DiLoCo
from diloco_comm.training.sampler import shard_part

NUM_SAMPLES = 103


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(**arguments: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), **{"batch_size": 4, "shuffle": True, **arguments})


def read(loader: DataLoader[int]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


# --------------------------------------------------------------------------------- the division


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_parts_are_of_equal_length_and_hold_all_samples(
    num_parts: int, drop_last: bool, shuffle: bool
) -> None:
    loaders = [
        shard_part(loader_of(drop_last=drop_last, shuffle=shuffle), part, num_parts)
        for part in range(num_parts)
    ]
    for _ in range(2):
        parts = [read(loader) for loader in loaders]
        assert {len(part) for part in parts} == {len(loaders[0])}
        assert len({tuple(map(len, part)) for part in parts}) == 1
        counts = Counter(index for part in parts for batch in part for index in batch)
        if drop_last:
            assert set(counts.values()) == {1} and {len(b) for p in parts for b in p} == {4}
            assert counts.total() > NUM_SAMPLES - 5 * num_parts
        else:
            assert len(counts) == NUM_SAMPLES and counts.total() < NUM_SAMPLES + num_parts


def test_epochs_have_other_orders_which_the_seed_gives() -> None:
    loader, again = (shard_part(loader_of(), 1, 3, seed=7) for _ in range(2))
    epochs = [read(loader) for _ in range(3)]
    assert all(one != other for one, other in pairwise(epochs))
    assert epochs == [read(again) for _ in range(3)]
    again.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert read(again) == epochs[1] and read(again) == epochs[2]
    assert read(shard_part(loader_of(), 1, 3, seed=8)) != epochs[0]
    ordered = shard_part(loader_of(shuffle=False), 1, 3)
    assert read(ordered) == read(ordered)
    assert read(ordered)[0] == [1, 4, 7, 10]


def collate(batch: list[int]) -> torch.Tensor:
    return torch.tensor(batch) * 10


def start(worker: int) -> None:
    torch.set_num_threads(1)


@pytest.mark.filterwarnings("error")
def test_the_other_arguments_are_kept() -> None:
    generator = torch.Generator()
    given: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True}
    given |= {"timeout": 50, "worker_init_fn": start, "multiprocessing_context": "fork"}
    given |= {"collate_fn": collate, "generator": generator, "drop_last": True}
    loader = loader_of(**given)
    made = shard_part(loader, 0, 2)
    assert type(made) is DataLoader and made.batch_size == 4
    assert made.dataset is loader.dataset and made.generator is generator
    names = given.keys() - {"multiprocessing_context"}
    assert all(getattr(made, name) == given[name] for name in names)
    assert made.multiprocessing_context.get_start_method() == "fork"
    assert all(index % 10 == 0 for batch in read(made) for index in batch)
    # Without batches, the loader gives samples.
    single = shard_part(
        DataLoader(Numbers(), batch_size=None, collate_fn=lambda sample: sample), 1, 2
    )
    assert [int(index) for index in single][:3] == [1, 3, 5]


# ------------------------------------------------------------------------------- what is refused


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class OwnLoader(DataLoader[int]):
    pass


class OwnSampler(RandomSampler):
    pass


DATA = Numbers()


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (range(9), "takes a torch DataLoader, got range.*num_replicas=3, rank=1"),
        (DataLoader(Stream()), r"split_dataset_by_node\(dataset, rank=1, world_size=3\)"),
        (OwnLoader(DATA), "the subclass .*OwnLoader.*before a trainer prepares it"),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, False)),
            "batch_sampler of its own, BatchSampler.*part 1 of 3",
        ),
        (DataLoader(DATA, sampler=OwnSampler(DATA)), "sampler of its own, OwnSampler"),
        (DataLoader(DATA, sampler=SubsetRandomSampler([1, 2])), "its own, SubsetRandomSampler"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0], 3)), "WeightedRandomSampler"),
        (
            DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=4, rank=2)),
            "of num_replicas=4 and rank=2: leave out.*num_replicas=3, rank=1",
        ),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "replacement=True"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=5)), "5 samples.* of 103"),
        (DataLoader(DATA, sampler=SequentialSampler(range(7))), "7 samples of a data set of 103"),
        (shard_part(DataLoader(DATA), 0, 3), "sharded already"),
        (DataLoader(DATA, batch_size=64, drop_last=True), "103 samples in 3 parts leave no batch"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_only_the_program_can_divide(loader: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        shard_part(loader, 1, 3)
    assert "\n" not in str(caught.value)


def test_a_part_must_be_among_the_parts() -> None:
    with pytest.raises(ValueError, match="part must be less than num_parts, 2, got 2"):
        shard_part(loader_of(), 2, 2)


# ------------------------------------------------------------------------------- on a DiLoCo


def read_two_epochs(rank: int, world: int) -> tuple[list[list[list[int]]], str]:
    """Train on the sharded loader, and look at first batches on one replica alone."""
    torch.manual_seed(rank)
    model, optimizer, diloco = attach(sync_every=4, seed=5)
    with diloco:
        loader = diloco.shard(loader_of(batch_size=8))
        if rank == 1:
            next(iter(loader))
        epochs: list[list[list[int]]] = []
        for _ in range(2):
            assert diloco.agree_on_steps(len(loader)) == len(loader)
            epochs.append([])
            for batch in loader:
                epochs[-1].append(batch.tolist())
                train_step(model, optimizer, rank, int(batch[0]))
                if rank == 0 and len(epochs[-1]) == 2:
                    next(iter(loader))
        diloco.flush(final=True)
        return epochs, diloco.outer_hash()


@pytest.mark.parametrize("world", [2, 3])
def test_replicas_read_their_parts_and_end_together(
    workers: Callable[[int], Any], world: int
) -> None:
    ends = workers(world).run(read_two_epochs)
    assert len({outer for _, outer in ends}) == 1
    for epoch in range(2):
        counts = Counter(i for epochs, _ in ends for batch in epochs[epoch] for i in batch)
        assert len(counts) == NUM_SAMPLES and counts.total() < NUM_SAMPLES + world
    assert ends[0][0][0] != ends[0][0][1]


def lose_one(rank: int, world: int) -> list[list[int]]:
    """Replica 1 leaves after an epoch; the other two divide the next one."""
    model, optimizer, diloco = attach(sync_every=4)
    with diloco:
        loader = diloco.shard(loader_of(drop_last=True))
        for batch in loader:
            train_step(model, optimizer, rank, int(batch[0]))
        diloco.flush()
        if rank == 1:
            return []
        diloco.change_group([0, 2])
        found = []
        for batch in loader:
            found.append(batch.tolist())
            train_step(model, optimizer, rank, int(batch[0]))
        return found


def test_a_changed_group_divides_its_next_epoch_anew(workers: Callable[[int], Any]) -> None:
    first, _, third = workers(3).run(lose_one)
    counts = Counter(index for batch in [*first, *third] for index in batch)
    assert len(first) == len(third) == NUM_SAMPLES // 2 // 4
    assert set(counts.values()) == {1} and counts.total() > NUM_SAMPLES - 9


def leave_within_an_epoch(rank: int, world: int) -> str:
    """Return the error of a resume by two replicas in an epoch that three have begun."""
    model, optimizer, diloco = attach(sync_every=4)
    with diloco:
        loader = diloco.shard(loader_of())
        for number, batch in enumerate(loader, 1):
            train_step(model, optimizer, rank, int(batch[0]))
            if number == 4:
                diloco.flush()
                if rank == 1:
                    return ""
                diloco.change_group([0, 2])
            if number == 5:
                break
        sampler: Any = loader.sampler
        with pytest.raises(ValueError, match="20 samples into") as caught:
            sampler.load_state_dict(sampler.state_dict())
        return str(caught.value)


def test_a_place_is_saved_with_the_parts_of_its_epoch(workers: Callable[[int], Any]) -> None:
    first, _, third = workers(3).run(leave_within_an_epoch)
    assert first == third and "an epoch of 3 parts, and there are 2 parts now" in first


def test_an_epoch_is_over_when_it_was_exhausted_or_left_after_a_step() -> None:
    model, optimizer, diloco = attach(sync_every=4, num_replicas=1)
    with diloco:
        loader = diloco.shard(loader_of())
        # Gradients are only accumulated, in the first two epochs.
        orders = [read(loader) for _ in range(2)]
        for _ in range(2):
            orders.append([])
            for batch in islice(loader, 3):
                orders[-1].append(batch.tolist())
                train_step(model, optimizer, 0, int(batch[0]))
        look = next(iter(loader)).tolist()
        orders.append(read(loader))
        diloco.flush()
    assert look == orders[-1][0]
    assert len({tuple(batches[0]) for batches in orders}) == 5


def resume(
    num_workers: int, batches_per_step: int, stop_at: int, is_outside: bool, **arguments: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the batches of a run, and of a run that stops in its second epoch and resumes."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo, DataLoader[int]]:
        model, optimizer, diloco = attach(sync_every=4, num_replicas=1)
        context = "fork" if num_workers else None
        loader = loader_of(num_workers=num_workers, multiprocessing_context=context, **arguments)
        return model, optimizer, diloco, diloco.shard(loader, batches_per_step=batches_per_step)

    runs: list[list[list[int]]] = []
    for stops in (False, True):
        model, optimizer, diloco, loader = begin()
        batches: list[list[int]] = []
        for epoch in range(4):
            saved = None
            for number, batch in enumerate(loader, 1):
                batches.append(batch.tolist())
                if number % batches_per_step == 0:
                    train_step(model, optimizer, 0, diloco.inner_step)
                if stops and epoch == 1 and number == stop_at and not is_outside:
                    saved = diloco.state_dict(), loader.sampler.state_dict()  # type: ignore[attr-defined]
                    break
            if stops and epoch == 1 and is_outside:
                saved = diloco.state_dict(), loader.sampler.state_dict()  # type: ignore[attr-defined]
            if saved is not None:
                diloco.close()
                model, optimizer, diloco, loader = begin()
                diloco.load_state_dict(saved[0])
                loader.sampler.load_state_dict(saved[1])  # type: ignore[attr-defined]
        diloco.flush()
        diloco.close()
        runs.append(batches[: 3 * len(loader)])
    return runs[0], runs[1]


@pytest.mark.parametrize(("num_workers", "batches_per_step"), [(0, 1), (0, 2), (1, 1), (1, 2)])
def test_a_run_resumes_at_the_next_batch(num_workers: int, batches_per_step: int) -> None:
    """A loader with a worker has taken batches ahead when the state is saved."""
    whole, resumed = resume(num_workers, batches_per_step, 12, False)
    assert resumed == whole


@pytest.mark.parametrize(("num_workers", "is_outside"), [(0, False), (0, True), (1, True)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_run_resumes_at_the_end_of_an_epoch(
    num_workers: int, is_outside: bool, drop_last: bool
) -> None:
    last = NUM_SAMPLES // 4 + (not drop_last)
    whole, resumed = resume(num_workers, 1, last, is_outside, drop_last=drop_last)
    assert resumed == whole and len(whole) == 3 * last


class Accumulating:
    """A loop whose inner steps take three of the 25 batches of an epoch.

    Args:
        counts_on: A step may begin in one epoch and end in the next; otherwise the loop throws the
            last batch of an epoch away.
        state: To begin with.
        given: Other arguments of the loader than four samples a batch and ``drop_last``.
    """

    def __init__(self, num_workers: int, counts_on: bool, state: Any = None, **given: Any) -> None:
        self._counts_on = counts_on
        self._model, self._optimizer, self._diloco = attach(sync_every=4, num_replicas=1)
        context = "fork" if num_workers else None
        options = {"num_workers": num_workers, "multiprocessing_context": context}
        loader = loader_of(**{"drop_last": True, **options, **given})
        self._loader = self._diloco.shard(loader, batches_per_step=3)
        self._sampler: Any = self._loader.sampler
        if state is not None:
            self._diloco.load_state_dict(state[0])
            self._sampler.load_state_dict(state[1])

    def used(self, end: int, is_late: bool = False) -> tuple[list[list[int]], Any]:
        """Train to an inner step; return the batches of each step, and the state.

        Args:
            is_late: One more batch is taken before the state is asked for.
        """
        steps, batches = [], []
        with self._diloco:
            while True:
                batches = batches if self._counts_on else []
                for batch in self._loader:
                    if len(steps) and self._diloco.inner_step == end:
                        return steps, self._state()
                    batches.append(batch.tolist())
                    if len(batches) == 3:
                        train_step(self._model, self._optimizer, 0, self._diloco.inner_step)
                        steps.append([one for batch in batches for one in batch])
                        batches = []
                    if self._diloco.inner_step == end and not is_late:
                        return steps, self._state()

    def _state(self) -> Any:
        state = copy.deepcopy((self._diloco.state_dict(), self._sampler.state_dict()))
        self._diloco.flush()
        return state


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("counts_on", "is_late"), [(True, False), (True, True), (False, False)])
def test_a_run_resumes_in_a_step_over_the_end_of_an_epoch(
    num_workers: int, counts_on: bool, is_late: bool
) -> None:
    whole, _ = Accumulating(num_workers, counts_on).used(19)
    for step in (8, 9, 16, 17, 18):
        before, state = Accumulating(num_workers, counts_on).used(step, is_late)
        after, _ = Accumulating(num_workers, counts_on, state).used(19)
        assert before + after == whole, step


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_loader_ahead_by_an_epoch_shows_no_carry() -> None:
    """Eight batches an epoch, all taken before the first step: the loop throws two away."""
    options: dict[str, Any] = {"batch_size": 13, "drop_last": False}
    whole, _ = Accumulating(4, False, **options).used(6)
    for step in (3, 4, 5):
        before, state = Accumulating(4, False, **options).used(step)
        after, _ = Accumulating(4, False, state, **options).used(6)
        assert before + after == whole, step


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_carry_is_counted_in_batches_though_the_last_one_is_short(num_workers: int) -> None:
    """The last of 26 batches has three samples, and two batches are carried."""
    whole, _ = Accumulating(num_workers, True, drop_last=False).used(19)
    for step in (9, 10, 17, 18):
        before, state = Accumulating(num_workers, True, drop_last=False).used(step)
        after, _ = Accumulating(num_workers, True, state, drop_last=False).used(19)
        assert before + after == whole, step


@pytest.mark.parametrize("counts_on", [True, False])
def test_a_run_that_began_in_the_rest_of_an_epoch_resumes_again(counts_on: bool) -> None:
    """No step of the resumed epoch shows how far the loader is ahead; its workers tell."""
    whole, _ = Accumulating(1, counts_on).used(12)
    _, state = Accumulating(1, counts_on).used(8)
    middle, state = Accumulating(1, counts_on, state).used(10)
    end, _ = Accumulating(1, counts_on, state).used(12)
    assert whole[8:] == middle + end


def test_a_state_of_other_data_is_refused() -> None:
    loader = shard_part(loader_of(), 0, 2)
    sampler: Any = loader.sampler
    state = sampler.state_dict()
    with pytest.raises(ValueError, match="'num_samples': 5"):
        sampler.load_state_dict({**state, "num_samples": 5})
    with pytest.raises(ValueError, match=r"4 samples into an epoch of 3 parts.*set_epoch\(1\)"):
        sampler.load_state_dict({**state, "num_parts": 3, "taken": 4})
    sampler.load_state_dict({**state, "num_parts": 3})


# --------------------------------------------------------------------- replicas of several workers


def part_of(diloco: DiLoCo) -> tuple[int, int]:
    return diloco.shard(loader_of()).sampler.place()  # type: ignore[attr-defined]


def parts_of_workers(rank: int, world: int) -> dict[str, Any]:
    """Two replicas of two workers: what each kind of replica gives this worker to read."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "worker"))
    default: dict[str, Any] = {"sync_every": 4, "mesh": mesh["replica"]}
    found: dict[str, Any] = {}

    def look(name: str, model: nn.Module, **arguments: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, **grouped({**default, **arguments})) as diloco:
            try:
                found[name] = part_of(diloco)
            except ValueError as error:
                found[name] = str(error)

    sharded = Regression()
    fully_shard(sharded, mesh=mesh["worker"])
    look("FSDP2", sharded)
    group = mesh["worker"].get_group()
    look("shard_group", Regression(), shard_group=group)
    ddp = nn.parallel.DistributedDataParallel(Regression(), process_group=group)
    look("DDP", ddp)
    look("both", ddp, shard_group=group)
    parallel = Regression()
    parallelize_module(parallel, mesh["worker"], {"layers.*": ColwiseParallel()})
    look("tensor parallel", parallel)
    inside = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replica", "copy", "shard"))
    copied = Regression()
    fully_shard(copied, mesh=inside["copy", "shard"])
    look("HSDP", copied, mesh=inside["replica"])
    both = Regression()
    parallelize_module(both, inside["shard"], {"layers.*": ColwiseParallel()})
    fully_shard(both, mesh=inside["copy"])
    look("FSDP2 and tensor parallel", both, mesh=inside["replica"])
    dist.barrier()
    return found


def test_workers_of_a_replica_that_are_data_parallel(workers: Callable[[int], Any]) -> None:
    ends = workers(4).run(parts_of_workers)
    for kind in ("FSDP2", "shard_group", "DDP", "both", "HSDP"):
        assert [found[kind] for found in ends] == [(0, 4), (1, 4), (2, 4), (3, 4)], kind
    for found in ends:
        for kind in ("tensor parallel", "FSDP2 and tensor parallel"):
            assert "does not tell which of them take the same samples" in found[kind]
