"""Callbacks of real trainers: each replica reads its own part of the data, or its own data."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from trainers import WithLoss, make_optimizer, needs, on_store
from workers import Pool

NUM_SAMPLES, WIDTH = 60, 24

# The first element of each row is its number.
Run = tuple[list[list[int]], list[str]]


class Numbered(Dataset):
    """Rows with numbers, from ``first`` on."""

    def __init__(self, first: int = 0, num_samples: int = NUM_SAMPLES) -> None:
        self.x = torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(first))
        self.x[:, 0] = torch.arange(first, first + num_samples)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.x[index, 1:].sum(0, keepdim=True)}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        data = Numbered()
        return (data[i] for i in range(len(data)))


class Recording(WithLoss):
    """A model that notes the numbers of the rows of each batch."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.batches: list[list[int]] = []

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.batches.append(x[:, 0].int().tolist())
        return super().forward(x / 10, y)


def train_hf(rank: int, folder: str, data: Any, options: dict[str, Any], **arguments: Any) -> Run:
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    is_late = arguments.pop("is_late", False)
    args = quiet_arguments(
        f"{folder}/{rank}",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        save_strategy="no",
        seed=rank,
        **options,
    )
    callback, model = DiLoCoCallback(sync_every=4, **arguments), Recording(rank)
    callbacks = [] if is_late else [callback]
    trainer = Trainer(model, args, train_dataset=data, callbacks=callbacks)
    if is_late:
        trainer.add_callback(callback)
    return model.batches, told(trainer.train)


def train_lightning(rank: int, folder: str, data: Any, options: Any, **arguments: Any) -> Run:
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    class Loading(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(data, batch_size=4, **options)

    arguments.pop("is_late", None)
    module, callback = Loading(rank), DiLoCoCallback(sync_every=4, **arguments)
    module.model = Recording(rank)
    trainer = quiet_trainer(max_epochs=2, callbacks=[callback], default_root_dir=folder)
    return module.model.batches, told(lambda: trainer.fit(module))


def told(train: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [str(one.message) for one in caught if "shard=False" in str(one.message)]


def run(
    rank: int, world: int, address: tuple[str, int], folder: Path, trainer: str, kind: str
) -> Run:
    train = train_hf if trainer == "huggingface" else train_lightning
    place = on_store(rank, world, address, f"data {trainer} {kind}")
    data: Any = Numbered()
    options: dict[str, Any] = {} if trainer == "huggingface" else {"shuffle": True}
    arguments: dict[str, Any] = {}
    if kind == "own":
        data = Numbered(rank * NUM_SAMPLES)
    elif kind == "hands off":
        data, arguments = Numbered(rank * NUM_SAMPLES), {"shard": False}
    elif kind == "stream":
        data, options = Stream(), {"max_steps": 6} if trainer == "huggingface" else {}
    elif kind == "divided":
        options = {"sampler": DistributedSampler(data, world, rank)}
    elif kind == "late":
        arguments = {"is_late": True}
    return train(rank, str(folder), data, options, **arguments, **place)


TRAINERS = [
    pytest.param("huggingface", marks=needs("transformers")),
    pytest.param("lightning", marks=needs("lightning")),
]


def numbers(batches: list[list[int]]) -> Counter[int]:
    return Counter(number for rows in batches for number in rows)


def halves(batches: list[list[int]]) -> tuple[Counter[int], Counter[int]]:
    """Return the numbers of the first epoch and of the second."""
    middle = len(batches) // 2
    return numbers(batches[:middle]), numbers(batches[middle:])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_replica_reads_its_own_part(
    trainer: str, trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    (first, said), (second, also) = pool.run(run, pool.store, tmp_path, trainer, "shared")
    assert said == also == []
    # 30 samples in batches of 4, in two epochs.
    assert len(first) == len(second) == 16
    for own, other in zip(halves(first), halves(second), strict=True):
        assert own.total() == other.total() == NUM_SAMPLES // 2
        assert not own & other and (own | other) == Counter(range(NUM_SAMPLES))
    assert halves(first)[0] != halves(first)[1]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_own_data_stay_whole_with_shard_false(
    trainer: str, trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    results = pool.run(run, pool.store, tmp_path, trainer, "hands off")
    for rank, (batches, said) in enumerate(results):
        assert said == []
        own = range(rank * NUM_SAMPLES, (rank + 1) * NUM_SAMPLES)
        assert halves(batches) == (Counter(own), Counter(own))


DOUBTS = {
    "own": "each replica has data of its own, and trains on a part of them alone, one of 2: ",
    "stream": "all replicas may train on the same data: shard() got a loader of an Iterable",
    "late": "all replicas may train on the same data: the callback came after the Trainer",
}


@pytest.mark.nightly(
    "2 s each; the first tier has each sentence once",
    but=["huggingface-own", "huggingface-late", "lightning-stream"],
)
@pytest.mark.parametrize(
    ("trainer", "kind"),
    [
        pytest.param(trainer, kind, marks=needs(library), id=f"{trainer}-{kind}")
        for trainer, library in (("huggingface", "transformers"), ("lightning", "lightning"))
        for kind in DOUBTS
        # Lightning looks for callbacks when training begins.
        if (trainer, kind) != ("lightning", "late")
    ],
)
def test_a_doubt_is_told(
    trainer: str, kind: str, trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    for _, said in pool.run(run, pool.store, tmp_path, trainer, kind):
        assert len(said) == 1 and said[0].startswith(DOUBTS[kind])


@needs("lightning")
def test_a_distributed_sampler_stays(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    (first, said), (second, _) = pool.run(run, pool.store, tmp_path, "lightning", "divided")
    assert said == [] and len(first) == len(second) == 16
    assert not halves(first)[0] & halves(second)[0]


def with_accelerate(rank: int, world: int, address: tuple[str, int]) -> list[list[int]]:
    from accelerate import Accelerator

    from diloco_comm.integrations.accelerate import attach

    accelerator, model = Accelerator(cpu=True), Recording(rank)
    place = on_store(rank, world, address, "data accelerate")
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    with attach(accelerator, model, optimizer, sync_every=4, **place) as diloco:
        loader = accelerator.prepare(diloco.shard(DataLoader(Numbered(), 4, shuffle=True)))
        for _ in range(2):
            for rows in loader:
                accelerator.backward(model(**rows)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        diloco.flush(final=True)
    return model.batches


@needs("accelerate")
def test_accelerate_prepares_a_sharded_loader(trainer_replicas: Callable[[int], Pool]) -> None:
    pool = trainer_replicas(2)
    first, second = pool.run(with_accelerate, pool.store)
    assert len(first) == len(second) == 16
    for own, other in zip(halves(first), halves(second), strict=True):
        assert not own & other and (own | other) == Counter(range(NUM_SAMPLES))


def hf_of_several_workers(
    rank: int, world: int, address: tuple[str, int], folder: Path
) -> list[list[int]]:
    """Two replicas of two workers: the trainer divides the part of a replica among its workers."""
    import os
    from datetime import timedelta

    replica, worker = divmod(rank, 2)
    launched = {"RANK": worker, "WORLD_SIZE": 2, "LOCAL_RANK": worker, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in launched.items()}
    os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=60))
    own = dist.PrefixStore(f"workers {replica}", store)
    dist.init_process_group("gloo", store=own, rank=worker, world_size=2)
    place = on_store(replica, 2, address, "data several workers")
    place["shard_group"] = dist.group.WORLD
    return train_hf(replica, str(folder / str(rank)), Numbered(), {}, **place)[0]


@pytest.mark.nightly("4 s; test_each_replica_reads_its_own_part has replicas of one worker")
@needs("transformers")
def test_workers_of_a_replica_divide_its_part(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(4)
    results = pool.run(hf_of_several_workers, pool.store, tmp_path, timeout=110)
    firsts = [halves(batches)[0] for batches in results]
    assert len({counts.total() for counts in firsts}) == 1
    whole = set().union(*firsts)
    assert whole == set(range(NUM_SAMPLES))
    assert not (firsts[0] | firsts[1]) & (firsts[2] | firsts[3])
