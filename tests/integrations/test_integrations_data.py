"""Callbacks of real trainers: each replica reads its own part of the data, or its own data."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from trainers import WithLoss, make_optimizer, needs, on_store
from workers import Crew, Pool, Zygote

from diloco_comm import DiLoCo
from diloco_comm.integrations.division import _shown

NUM_SAMPLES, WIDTH = 60, 24

# The first element of each row is its number.
Run = tuple[list[list[int]], list[str]]
# The batches of a whole run, and of a resumed one.
Resumed = tuple[list[list[int]], list[list[int]]]


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


class Decoded(Dataset):
    """Samples of random crops, with the paths of this host; notes which are asked for."""

    def __init__(self, host: str) -> None:
        self.host, self.asked = host, []  # type: tuple[str, list[int]]

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        crop = [torch.rand(1).item(), random.random(), float(np.random.rand())]
        return {"path": f"/{self.host}/{index}.png", "crop": crop, "y": torch.tensor(index)}


def test_paths_and_random_crops_are_no_other_data() -> None:
    own, other = Decoded("a"), Decoded("b")
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert _shown(own) == _shown(other) != ""
    assert own.asked == [0, 4, 8]
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()
    assert len({_shown(Numbered()), _shown(Numbered(60)), _shown(Numbered(0, 59))}) == 3


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
    callback, model = DiLoCoCallback(sync_every=4, **grouped(arguments)), Recording(rank)
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
    module, callback = Loading(rank), DiLoCoCallback(sync_every=4, **grouped(arguments))
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
    elif kind == "bound":
        arguments, place = {"make": partial(DiLoCo, **grouped(place))}, {}
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


# The place of a replica may be in the arguments of the callback, or in a partial.
@pytest.mark.parametrize("kind", ["shared", "bound"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_replica_reads_its_own_part(
    trainer: str, kind: str, trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    (first, said), (second, also) = pool.run(run, pool.store, tmp_path, trainer, kind)
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


def resumed_hf(
    rank: int, folder: str, place: dict[str, Any], num_loaders: int, saved: int = 11
) -> Resumed:
    """Return the batches of two epochs, and those after a resume from a step of the second one."""
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    found = []
    for checkpoint in (None, f"{folder}/{rank}/checkpoint-{saved}"):
        own = {**place, "store": dist.PrefixStore(str(checkpoint is None), place["store"])}
        args = quiet_arguments(
            f"{folder}/{rank}",
            per_device_train_batch_size=4,
            num_train_epochs=2,
            save_steps=saved if checkpoint is None else 100,
            dataloader_num_workers=num_loaders,
        )
        model, callback = Recording(rank), DiLoCoCallback(sync_every=4, **grouped(own))
        trainer = Trainer(model, args, train_dataset=Numbered(), callbacks=[callback])
        trainer.train(resume_from_checkpoint=checkpoint)
        found.append(model.batches)
    return found[0][saved:], found[1]


def resumed_lightning(rank: int, folder: str, place: dict[str, Any], num_loaders: int) -> Resumed:
    """Return the batches of the second epoch, and those after a resume from the first one."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    context = "fork" if num_loaders else None

    class Loading(Module):
        def train_dataloader(self) -> Any:
            options: Any = {"num_workers": num_loaders, "multiprocessing_context": context}
            return DataLoader(Numbered(), 4, shuffle=True, **options)

    found, path = [], Path(folder, str(rank))
    for checkpoint in (None, path / "epoch=0-step=8.ckpt"):
        own = {**place, "store": dist.PrefixStore(str(checkpoint is None), place["store"])}
        module, callback = Loading(rank), DiLoCoCallback(sync_every=4, **grouped(own))
        module.model = Recording(rank)
        saving = ModelCheckpoint(path, save_top_k=-1)
        trainer = quiet_trainer(
            max_epochs=2, callbacks=[callback, saving], enable_checkpointing=True
        )
        trainer.fit(module, ckpt_path=checkpoint)
        found.append(module.model.batches)
    return found[0][8:], found[1]


def resumed_run(
    rank: int,
    world: int,
    address: tuple[str, int],
    folder: Path,
    trainer: str,
    num_loaders: int,
) -> Resumed:
    place = on_store(rank, world, address, f"data resumed {trainer} {num_loaders}")
    resumed = resumed_hf if trainer == "huggingface" else resumed_lightning
    return resumed(rank, str(folder), place, num_loaders)


@pytest.mark.nightly("2 s each", but=["huggingface-0", "lightning-1"])
@pytest.mark.parametrize("num_loaders", [0, 1])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_resumes_in_its_second_epoch(
    trainer: str, num_loaders: int, trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    for whole, resumed in pool.run(resumed_run, pool.store, tmp_path, trainer, num_loaders):
        assert resumed == whole and len(whole) == (5 if trainer == "huggingface" else 8)


def with_accelerate(rank: int, world: int, address: tuple[str, int]) -> list[list[int]]:
    from accelerate import Accelerator

    from diloco_comm.integrations.accelerate import attach

    accelerator, model = Accelerator(cpu=True), Recording(rank)
    place = on_store(rank, world, address, "data accelerate")
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    with attach(accelerator, model, optimizer, sync_every=4, **grouped(place)) as diloco:
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


def resumed_with_accelerate(
    rank: int, world: int, address: tuple[str, int], folder: Path
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the batches of a run, and of a run that resumes in its second epoch."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from diloco_comm.integrations.accelerate import attach

    place = on_store(rank, world, address, "data resumed with accelerate")

    def begin(name: str) -> tuple[Any, ...]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, model = Accelerator(cpu=True), Recording(rank)
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
        own = {**place, "store": dist.PrefixStore(name, place["store"])}
        diloco = attach(accelerator, model, optimizer, sync_every=4, **grouped(own))
        loader = diloco.shard(DataLoader(Numbered(), 4, shuffle=True))
        accelerator.register_for_checkpointing(loader.sampler)
        return accelerator, model, optimizer, diloco, accelerator.prepare(loader)

    runs = []
    for stops in (False, True):
        accelerator, model, optimizer, diloco, loader = begin(f"{stops}")
        batches: list[list[int]] = []
        while len(batches) < 3 * 8:
            for rows in loader:
                accelerator.backward(model(**rows)["loss"])
                optimizer.step()
                optimizer.zero_grad()
                batches.append(model.batches[-1])
                if stops and len(batches) == 13:
                    accelerator.save_state(str(folder / str(rank)))
                    diloco.close()
                    accelerator, model, optimizer, diloco, loader = begin("resumed")
                    accelerator.load_state(str(folder / str(rank)))
                    break
        diloco.flush(final=True)
        diloco.close()
        runs.append(batches)
    AcceleratorState._reset_state(reset_partial_state=True)
    return runs[0], runs[1]


@needs("accelerate")
def test_accelerate_resumes_at_the_next_batch(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    for whole, resumed in pool.run(resumed_with_accelerate, pool.store, tmp_path):
        assert resumed == whole and len(whole) == 24


@pytest.fixture
def fresh_trainers(trainer_zygote: Zygote) -> Iterator[Callable[[int], Pool]]:
    """Like ``trainer_replicas``, of this test alone: a launched process stays one."""
    crew = Crew(trainer_zygote)
    yield lambda world: crew.pool(world, init_group=False)
    crew.close()


def join_workers(rank: int, address: tuple[str, int], name: str) -> tuple[int, int]:
    """Let two processes be the workers of a replica; return the replica and the worker."""
    import os
    from datetime import timedelta

    replica, worker = divmod(rank, 2)
    launched = {"RANK": worker, "WORLD_SIZE": 2, "LOCAL_RANK": worker, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in launched.items()}
    os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=60))
    own = dist.PrefixStore(f"{name} {replica}", store)
    dist.init_process_group("gloo", store=own, rank=worker, world_size=2)
    return replica, worker


def accelerate_of_several_workers(
    rank: int, world: int, address: tuple[str, int], split_batches: bool
) -> tuple[list[list[int]], int, int]:
    """Return the batches of an epoch, their number, and the samples that the state has taken."""
    from accelerate import Accelerator, DataLoaderConfiguration

    from diloco_comm.integrations.accelerate import attach

    name = f"accelerate of several workers, {world} {split_batches}"
    replica, _ = join_workers(rank, address, name)
    place = on_store(replica, world // 2, address, f"data {name}")
    place["shard_group"] = dist.group.WORLD
    config = DataLoaderConfiguration(split_batches=split_batches)
    accelerator, recording = Accelerator(cpu=True, dataloader_config=config), Recording(replica)
    model, optimizer = accelerator.prepare(recording, make_optimizer(recording))
    with attach(accelerator, model, optimizer, sync_every=4, **grouped(place)) as diloco:
        sharded = diloco.shard(DataLoader(Numbered(), 6, shuffle=True, drop_last=True))
        loader = accelerator.prepare(sharded)
        for number, rows in enumerate(loader, 1):
            accelerator.backward(model(**rows)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            if number == 2:
                taken = sharded.sampler.state_dict()["taken"]  # type: ignore[attr-defined]
        diloco.flush(final=True)
    return recording.batches, len(loader), taken


@needs("accelerate")
@pytest.mark.nightly("4 s with two replicas", but=["False-2"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("split_batches", [False, True])
def test_accelerate_divides_a_replica_among_its_workers(
    fresh_trainers: Callable[[int], Pool], world: int, split_batches: bool
) -> None:
    pool = fresh_trainers(world)
    ends = pool.run(accelerate_of_several_workers, pool.store, split_batches, timeout=110)
    counts = Counter(i for batches, _, _ in ends for batch in batches for i in batch)
    at_once = world // 2 * (6 if split_batches else 12)
    assert set(counts.values()) == {1} and counts.total() > NUM_SAMPLES - at_once
    assert all(len(batches) == number for batches, number, _ in ends)
    assert {taken for _, _, taken in ends} == {12 if split_batches else 24}


def hf_of_several_workers(
    rank: int, world: int, address: tuple[str, int], folder: Path
) -> list[list[int]]:
    """Two replicas of two workers: the trainer divides the part of a replica among its workers."""
    replica, _ = join_workers(rank, address, "workers")
    place = on_store(replica, 2, address, "data several workers")
    place["shard_group"] = dist.group.WORLD
    return train_hf(replica, str(folder / str(rank)), Numbered(), {}, **place)[0]


def resumed_hf_of_several_workers(
    rank: int, world: int, address: tuple[str, int], folder: Path
) -> Resumed:
    replica, _ = join_workers(rank, address, "resumed workers")
    place = on_store(replica, 2, address, "data resumed workers")
    place["shard_group"] = dist.group.WORLD
    return resumed_hf(replica, str(folder), place, 0, saved=6)


@pytest.mark.nightly("4 s; test_a_trainer_resumes_in_its_second_epoch has one worker")
@needs("transformers")
def test_workers_of_a_replica_resume_in_their_second_epoch(
    fresh_trainers: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = fresh_trainers(4)
    for whole, resumed in pool.run(
        resumed_hf_of_several_workers, pool.store, tmp_path, timeout=110
    ):
        assert resumed == whole and len(whole) == 2


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
