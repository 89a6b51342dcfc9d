"""Replicas whose data do not last equally long agree on how many steps they all take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from problems import Regression, attach, equal, parameters_of, train_step
from torch import Tensor, nn
from trainers import ROWS, Rows, WithLoss, flat, make_optimizer, needs, on_store
from workers import Pool

from diloco_comm import (
    CO2,
    SGD,
    Blocking,
    Delayed,
    DiLoCo,
    Eager,
    Link,
    ReplicaMismatch,
    Streaming,
    SyncError,
)

STEPS = [9, 7, 12]


def train_unevenly(rank: int, world: int, overlap: Any) -> tuple[list[int], list[bytes]]:
    """Agree before the first step and again amid the rounds; returns what was agreed."""
    model, optimizer, diloco = attach(rank, sync_every=2, fragments=2, wire="int8", overlap=overlap)
    with diloco:
        agreed = [diloco.agree_on_steps(STEPS[rank])]
        for step in range(agreed[0]):
            train_step(model, optimizer, rank, step)
            agreed.append(diloco.agree_on_steps(STEPS[rank] - step - 1))
        diloco.flush()
        return agreed, [param.numpy().tobytes() for param in parameters_of(model)]


@pytest.mark.parametrize(
    "overlap", [Blocking(), Streaming(delay=1), Delayed(), Eager()], ids=lambda o: type(o).__name__
)
def test_all_take_the_least(overlap: Any, workers) -> None:
    results = workers(3).run(train_unevenly, overlap)
    assert results[0][0] == list(range(7, -1, -1))
    assert results[1] == results[0] and results[2] == results[0]


def workers_of_replicas(rank: int, world: int) -> list[int]:
    """Two replicas of two workers: the least over all four, whose peers are only two."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "worker"))
    model = nn.parallel.DistributedDataParallel(
        nn.Linear(4, 4), process_group=mesh["worker"].get_group()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = {"mesh": mesh["replica"], "shard_group": mesh["worker"]}
    with DiLoCo(model, optimizer, sync_every=1, **grouped(place)) as diloco:
        return [diloco.agree_on_steps(10 + (rank + turn) % 4) for turn in range(4)]


def test_workers_count_too(workers) -> None:
    assert workers(4).run(workers_of_replicas) == [[10] * 4] * 4


def test_one_replica_alone() -> None:
    diloco = attach()[2]
    with diloco:
        assert diloco.agree_on_steps(5) == 5 and diloco.agree_on_steps(0) == 0
        for wrong in (-1, 1.5, True, None):
            with pytest.raises(ValueError, match="num_steps must be an integer of at least 0"):
                diloco.agree_on_steps(wrong)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="this DiLoCo is closed"):
        diloco.agree_on_steps(5)


# -------------------------------------------------------------------------------- in trainers


def hf_steps(rank: int, world: int, address: tuple[str, int], folder: Path) -> tuple[int, list]:
    """An epoch that is shorter on replica 1; returns the steps taken, and the parameters."""
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    model = WithLoss(rank)
    args = quiet_arguments(
        folder / f"hf-{rank}",
        num_train_epochs=2,
    )
    place = on_store(rank, world, address, "uneven hf")
    callback = DiLoCoCallback(sync_every=4, shard=False, **grouped(place))
    data = Rows(rank, [5, 3][rank])
    Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
    return callback.diloco.inner_step, flat(model).tolist()


@needs("transformers")
def test_hugging_face(trainer_replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    pool = trainer_replicas(2)
    first, second = pool.run(hf_steps, pool.store, tmp_path)
    assert first == second and first[0] == 6


def lightning_steps(
    rank: int, world: int, address: tuple[str, int], folder: Path, limits: dict[str, int]
) -> tuple[int, list]:
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    place = on_store(rank, world, address, f"uneven lightning {limits}")
    module, callback = Module(rank), DiLoCoCallback(sync_every=4, shard=False, **grouped(place))
    trainer = quiet_trainer(
        callbacks=[callback],
        default_root_dir=folder / f"lightning-{rank}",
        **limits,
    )
    data = Rows(rank, [5, 3][rank])
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=ROWS))
    return callback.diloco.inner_step, flat(module).tolist()


@needs("lightning")
@pytest.mark.parametrize(
    ("limits", "expected"),
    [({"max_epochs": 2}, 6), ({"max_epochs": 1}, 3), ({"max_epochs": -1, "max_steps": 8}, 8)],
)
def test_lightning(
    limits: dict[str, int],
    expected: int,
    trainer_replicas: Callable[[int], Pool],
    tmp_path: Path,
) -> None:
    pool = trainer_replicas(2)
    first, second = pool.run(lightning_steps, pool.store, tmp_path, limits)
    assert first == second and first[0] == expected


def lightning_own_steps(
    rank: int,
    world: int,
    address: tuple[str, int],
    kind: str,
    num_batches: list[int],
    limits: list[dict[str, int]],
) -> tuple[int, int, list] | str:
    """Steps that are not each so many batches; what was taken, or why the data are refused."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    class OfKind(Module):
        def __init__(self) -> None:
            super().__init__(rank)
            self.automatic_optimization = kind == "scheduled"

        def training_step(self, rows: dict[str, torch.Tensor], index: int) -> torch.Tensor | None:
            loss = self.model(**rows)["loss"]
            if self.automatic_optimization:
                return loss
            self.manual_backward(loss)
            if (index + 1) % 2 == 0:
                own = self.optimizers()
                for optimizer in own if kind == "two optimizers" else [own]:
                    optimizer.step()
                    optimizer.zero_grad()
            return None

        def configure_optimizers(self) -> Any:
            if kind != "two optimizers":
                return make_optimizer(self.model)
            (first, *others) = self.model.parameters()
            return [torch.optim.SGD(params, lr=0.01) for params in ([first], others)]

    place = on_store(rank, world, address, f"uneven lightning {kind} {num_batches} {limits}")
    module, callback = OfKind(), DiLoCoCallback(sync_every=2, shard=False, **grouped(place))
    scheduled = [GradientAccumulationScheduler({0: 1, 1: 3})] if kind == "scheduled" else []
    trainer = quiet_trainer(
        callbacks=[callback, *scheduled],
        **limits[rank],
    )
    loader = torch.utils.data.DataLoader(Rows(rank, num_batches[rank]), batch_size=ROWS)
    try:
        trainer.fit(module, loader)
    except ValueError as error:
        return str(error)
    return callback.diloco.inner_step, trainer.global_step, flat(module).tolist()


@needs("lightning")
@pytest.mark.parametrize(
    ("kind", "num_batches", "limits", "expected"),
    [
        # Two epochs of 3 steps by the same data.
        ("manual", [6, 6], [{"max_epochs": 2}] * 2, (6, 6)),
        # Each step is two batches, of which an epoch's odd one is lost.
        ("manual", [5, 3], [{"max_steps": 4}, {"max_steps": 6}], (4, 4)),
        # Lightning counts the steps of both.
        ("two optimizers", [4, 4], [{"max_steps": 6}, {"max_steps": 10}], (3, 6)),
        # 4 steps, and 2 in the second epoch, of three batches and of one.
        ("scheduled", [4, 4], [{"max_epochs": 2}] * 2, (6, 6)),
        ("scheduled", [4, 4], [{"max_steps": 5}, {"max_steps": 9}], (5, 5)),
    ],
)
def test_lightning_steps_of_its_own(
    kind: str,
    num_batches: list[int],
    limits: list[dict[str, int]],
    expected: tuple[int, int],
    trainer_replicas: Callable[[int], Pool],
) -> None:
    pool = trainer_replicas(2)
    first, second = pool.run(lightning_own_steps, pool.store, kind, num_batches, limits)
    assert first == second and first[:2] == expected


@needs("lightning")
@pytest.mark.parametrize(
    ("num_batches", "limits", "found"),
    [
        ([16, 12], [{"max_epochs": 1}] * 2, "=1 of 16 batches on replica 0, max_epochs=1 of 12"),
        (
            [6, 6],
            [{"max_epochs": 1}, {"max_steps": 3}],
            "of 6 batches on replica 0, max_epochs=-1 on",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["manual", "scheduled"])
def test_lightning_refuses_data_that_do_not_tell_the_steps(
    kind: str,
    num_batches: list[int],
    limits: list[dict[str, int]],
    found: str,
    trainer_replicas: Callable[[int], Pool],
) -> None:
    pool = trainer_replicas(2)
    for sentence in pool.run(lightning_own_steps, pool.store, kind, num_batches, limits):
        assert sentence.startswith("under manual optimisation, and with a GradientAccumulationSch")
        assert found in sentence and "limit_train_batches" in sentence


def accelerate_steps(rank: int, world: int, address: tuple[str, int]) -> tuple[int, list]:
    """The loop of the documentation."""
    from accelerate import Accelerator

    from diloco_comm.integrations.accelerate import attach as attach_to

    accelerator = Accelerator(cpu=True)
    model = WithLoss(rank)
    loader = torch.utils.data.DataLoader(Rows(rank, [5, 3][rank]), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    place = on_store(rank, world, address, "uneven accelerate")
    with attach_to(accelerator, model, optimizer, sync_every=4, **grouped(place)) as diloco:
        num_steps = diloco.agree_on_steps(len(loader))
        for _, rows in zip(range(num_steps), loader, strict=False):
            accelerator.backward(model(**rows)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        diloco.flush()
    return diloco.inner_step, flat(model).tolist()


@needs("accelerate")
def test_accelerate(trainer_replicas: Callable[[int], Pool]) -> None:
    pool = trainer_replicas(2)
    first, second = pool.run(accelerate_steps, pool.store)
    assert first == second and first[0] == 3


def without_agreeing(rank: int, world: int) -> str:
    """What the agreement is for: one ends and flushes, the others want the next round."""
    model, optimizer, diloco = attach(rank, sync_every=1, link=Link(timeout=30))
    with diloco, pytest.raises(SyncError) as error:
        for step in range(STEPS[rank]):
            train_step(model, optimizer, rank, step)
        diloco.flush()
    return str(error.value)


def test_without_it_the_end_is_an_error(workers) -> None:
    for sentence in workers(2).run(without_agreeing):
        assert "replica 1" in sentence


# -------------------------------------------------------- a replica that has taken fewer steps


def end_unevenly(
    rank: int, world: int, steps: list[int], overlap: Any, arguments: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], int]:
    """Flush after other numbers of steps; return parameters, local mean and rounds applied."""
    model, optimizer, diloco = attach(rank, sync_every=4, overlap=overlap, **grouped(arguments))
    with diloco:
        for step in range(steps[rank]):
            train_step(model, optimizer, rank, step)
        diloco.flush()
        outer = [part.outer.clone() for part in diloco.parts]
        return parameters_of(model), outer, diloco.parts[0].round


POLICIES = [Blocking(), Streaming(delay=1), Delayed(), Eager(), Eager(rounds=2), CO2()]


@pytest.mark.parametrize("overlap", POLICIES, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("steps", [[7, 8], [12, 11, 12]], ids=str)
def test_a_step_that_one_replica_has_skipped_is_no_mismatch(
    overlap: Any, steps: list[int], workers
) -> None:
    results = workers(len(steps)).run(end_unevenly, steps, overlap, {"fragments": 2})
    for params, outer, _ in results:
        assert equal(params, results[0][0]) and equal(outer, results[0][1])


def train_apart(rank: int, world: int, steps: list[int]) -> list[Tensor]:
    """Average the parameters after four steps and at the end, without the package."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps[rank]):
        train_step(model, optimizer, rank, step)
        if step == 3:
            average(model)
    average(model)
    return parameters_of(model)


def average(model: nn.Module) -> None:
    for param in model.parameters():
        dist.all_reduce(param.data)
        param.data /= dist.get_world_size()


def test_all_steps_are_shared(workers) -> None:
    """The replica with eight steps has sent its second round in vain."""
    steps, outer = [7, 8], SGD(lr=1.0)
    truth = workers(2).run(train_apart, steps)[0]
    for params, _, rounds in workers(2).run(end_unevenly, steps, Blocking(), {"outer": outer}):
        assert rounds == 2
        torch.testing.assert_close(params, truth)


def end_far_apart(rank: int, world: int) -> str:
    try:
        end_unevenly(rank, world, [7, 13], Blocking(), {})
    except ReplicaMismatch as error:
        return str(error)
    return ""


def test_a_whole_round_more_is_a_mismatch(workers) -> None:
    for text in workers(2).run(end_far_apart):
        assert "replica 0 has ended at inner step 7" in text
        assert "replica 1 still trains, at inner step 12" in text
