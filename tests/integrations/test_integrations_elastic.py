"""Trainers in an elastic group: a newcomer goes on at the group's step."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_replicas import registry as registry
from registries import Host
from trainers import Rows, WithLoss, make_optimizer, needs
from workers import Pool

from diloco_comm import DiLoCo, Elastic, Link
from diloco_comm.integrations.attachment import attach, move_schedule

LAST_STEP, LONG_RUN = 40, 60
NUM_BATCHES = 10


def train(rank: int, world: int, registry: str, folder: str) -> tuple[int, int, bool]:
    """Return the trainer's steps, the group's inner steps, and whether this replica was done."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from huggingface_runs import quiet_arguments
    from transformers import Trainer, TrainerCallback

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    membership = Elastic(registry, run="hf", replica=rank, min_replicas=1, founding_wait=3.0)
    callback = DiLoCoCallback(sync_every=4, peers=membership, link=Link(timeout=40), shard=False)

    class Leave(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            time.sleep(0.01)
            if rank == 1 and state.global_step == 10:
                callback.diloco.leave()

    model = WithLoss()
    trainer = Trainer(
        model,
        quiet_arguments(Path(folder) / str(rank), max_steps=LAST_STEP, save_strategy="no"),
        train_dataset=Rows(rank, LAST_STEP),
        optimizers=(make_optimizer(model), None),
        callbacks=[callback, Leave()],
    )
    trainer.train()
    assert callback.diloco is not None
    return trainer.state.global_step, callback.diloco.inner_step, callback.diloco.is_done


@pytest.mark.nightly("25 s; test_elastic_training has a replica that leaves")
@pytest.mark.slow
@needs("transformers")
def test_a_trainers_replica_leaves_and_the_other_ends(
    trainer_replicas: Callable[[int], Pool], registry: Host, tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    stays, leaves = pool.run(train, registry.address, str(tmp_path), timeout=60)
    assert stays == (LAST_STEP, LAST_STEP, True)
    assert leaves[2] and leaves[0] < LAST_STEP and leaves[1] < LAST_STEP


# --------------------------------------------------------------------------------- a newcomer

# A replica's learning rate by inner step, whether the trainer's step was the group's, and the names
# of the checkpoints.
Course = tuple[dict[int, float], bool, list[str]]


def come(rank: int, store: tuple[str, int], registry: str, name: str) -> tuple[Any, dist.Store]:
    """Return the membership of a replica; replica 1 comes when replica 0 has taken six steps."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signs = dist.TCPStore(*store, is_master=False, timeout=timedelta(seconds=60))
    signs = dist.PrefixStore(name, signs)
    if rank == 1:
        signs.wait(["six steps"])
    membership = Elastic(registry, run=name, replica=rank, min_replicas=1, founding_wait=0.0)
    return membership, signs


def pace(diloco: DiLoCo, rank: int, signs: dist.Store) -> None:
    """Let replica 0 wait for the newcomer."""
    if rank == 0 and len(diloco.members) == 1:
        if diloco.inner_step == 6:
            signs.set("six steps", "taken")
        time.sleep(0.05)


def join_hf(rank: int, world: int, store: tuple[str, int], registry: str, folder: Path) -> Course:
    from huggingface_runs import quiet_arguments
    from transformers import Trainer, TrainerCallback

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    membership, signs = come(rank, store, registry, "hf-joins")
    callback = DiLoCoCallback(sync_every=2, peers=membership, link=Link(timeout=40), shard=False)
    rates, is_alike = {}, []

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer, **kwargs):  # type: ignore[no-untyped-def]
            pace(callback.diloco, rank, signs)
            is_alike.append(state.global_step == callback.diloco.inner_step)
            rates[state.global_step] = optimizer.param_groups[0]["lr"]

    args = quiet_arguments(
        folder / str(rank), max_steps=LONG_RUN, warmup_steps=LONG_RUN // 2, save_steps=10
    )
    trainer = Trainer(
        WithLoss(), args, train_dataset=Rows(rank, LONG_RUN), callbacks=[callback, Note()]
    )
    trainer.train()
    names = [path.name for path in (folder / str(rank)).glob("checkpoint-*")]
    return rates, all(is_alike), names


def join_lightning(
    rank: int, world: int, store: tuple[str, int], registry: str, folder: Path
) -> Course:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    class Warming(Module):
        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self.model)
            warming = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: i / LONG_RUN)
            return [optimizer], [{"scheduler": warming, "interval": "step"}]

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer, *others: Any) -> None:  # type: ignore[no-untyped-def]
            pace(callback.diloco, rank, signs)
            is_alike.append(trainer.global_step == callback.diloco.inner_step)
            rates[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]

    membership, signs = come(rank, store, registry, "lightning-joins")
    callback = DiLoCoCallback(sync_every=2, peers=membership, link=Link(timeout=40), shard=False)
    rates, is_alike = {}, []
    home = folder / str(rank)
    saving = ModelCheckpoint(home, filename="{step}", every_n_train_steps=10, save_top_k=-1)
    trainer = quiet_trainer(
        max_steps=LONG_RUN,
        callbacks=[callback, Note(), saving],
        default_root_dir=home,
        enable_checkpointing=True,
    )
    rows = Rows(rank, LONG_RUN)
    trainer.fit(Warming(rank), torch.utils.data.DataLoader(rows, batch_size=8))
    return rates, all(is_alike), [path.stem for path in home.glob("*.ckpt")]


@pytest.mark.nightly("6 s each; they differ in the trainer", but=["huggingface"])
@pytest.mark.parametrize(
    "join",
    [
        pytest.param(join_hf, marks=needs("transformers"), id="huggingface"),
        pytest.param(join_lightning, marks=needs("lightning"), id="lightning"),
    ],
)
def test_a_newcomers_steps_and_schedule_are_the_groups(
    join: Any, trainer_replicas: Callable[[int], Pool], registry: Host, tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    old, new = pool.run(join, pool.store, registry.address, tmp_path, timeout=100)
    (old_rates, old_alike, old_names), (new_rates, new_alike, new_names) = old, new
    assert old_alike and new_alike
    assert min(new_rates) > 6 and max(new_rates) == max(old_rates) == LONG_RUN
    assert new_rates == {step: old_rates[step] for step in new_rates}
    # Checkpoints are named by the group's steps.
    assert set(new_names) < set(old_names) and old_names


def resume(rank: int, world: int, registry: str) -> tuple[int, str, str]:
    """Come back as a trainer that has resumed, after all replicas have died."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def train(diloco: DiLoCo, num_steps: int) -> None:
        for _ in range(num_steps):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone") as alone:
        train(alone, 4 + 2 * rank)
        saved = copy.deepcopy(alone.state_dict())
        alone.flush()
    membership = Elastic(
        registry, run="resumed", replica=rank, min_replicas=world, checkpoint=saved
    )
    arguments = {"sync_every": 2, "peers": membership, "link": Link(timeout=40)}
    diloco = attach(DiLoCo, model, optimizer, arguments, saved)
    first = diloco.inner_step
    with pytest.raises(RuntimeError, match="has the state of a group") as refused:
        diloco.load_state_dict(saved)
    train(diloco, 4)
    diloco.flush()
    digest = diloco.outer_hash()
    diloco.close()
    return first, digest, str(refused.value)


def test_a_trainers_checkpoint_gives_way_to_the_newest(
    workers: Callable[..., Pool], registry: Host
) -> None:
    one, other = workers(2, init_group=False).run(resume, registry.address)
    assert one[0] == 6 and one == other


# ------------------------------------------------------------------- schedules of the learning rate

# By batches that make a step: interval and frequency of schedules. An epoch ends with a step.
SCHEDULES = {
    1: [("epoch", 2), ("step", 3)],
    3: [("epoch", 1), ("step", 5)],
    4: [("epoch", 1), ("step", 1), ("step", 2), ("step", 4), ("step", 5)],
}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        rows = Rows(0, NUM_BATCHES)
        return (rows[i] for i in range(len(rows)))


def turns_by_step(
    accumulated: int, moves: list[int], last: int, rows: Any
) -> dict[int, dict[tuple[str, int], int]]:
    """Train with Lightning up to a step; first go to some steps as a newcomer does.

    Returns:
        How often each schedule had been stepped, by the trainer's steps.
    """
    import lightning.pytorch as pl
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import _move_to_group

    kinds = SCHEDULES[accumulated]
    turns: dict[int, dict[tuple[str, int], int]] = {}

    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self.model)
            halving = [torch.optim.lr_scheduler.StepLR(optimizer, 7) for _ in kinds]
            configs = [
                {"scheduler": one, "interval": interval, "frequency": frequency}
                for one, (interval, frequency) in zip(halving, kinds, strict=True)
            ]
            return [optimizer], configs

    class Note(pl.Callback):
        def on_train_start(self, trainer, *others: Any) -> None:  # type: ignore[no-untyped-def]
            for step in moves:
                _move_to_group(trainer, step)
                self.on_train_batch_end(trainer)

        def on_train_batch_end(self, trainer, *others: Any) -> None:  # type: ignore[no-untyped-def]
            counts = [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs]
            turns[trainer.global_step] = dict(zip(kinds, counts, strict=True))

    trainer = quiet_trainer(max_steps=last, callbacks=[Note()], accumulate_grad_batches=accumulated)
    trainer.fit(Scheduled(), torch.utils.data.DataLoader(rows, batch_size=8))
    return turns


def moved_and_real(rank: int, world: int, accumulated: int) -> tuple[Any, Any]:
    """Return the turns of schedules that were moved, and of a real training."""
    moves, rows = [2, 3, 7, 9, 13, 29], Rows(0, NUM_BATCHES)
    moved = turns_by_step(accumulated, moves, moves[-1] + 1, rows)
    real = turns_by_step(accumulated, [], moves[-1], rows)
    return [moved[step] for step in moves], [real[step] for step in moves]


@needs("lightning")
def test_a_newcomers_schedule_is_moved_as_lightning_steps_it(
    trainer_replicas: Callable[[int], Pool],
) -> None:
    for accumulated in SCHEDULES:
        [(moved, real)] = trainer_replicas(1).run(moved_and_real, accumulated)
        assert moved == real
        assert all(count > 0 for count in real[-1].values())


def move_on_a_stream(rank: int, world: int) -> tuple[Any, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("diloco_comm").addHandler(handler)
    try:
        return turns_by_step(4, [6], 7, Stream())[6], said
    finally:
        logging.getLogger("diloco_comm").removeHandler(handler)


@needs("lightning")
def test_data_without_a_length_leave_a_schedule_by_epochs(
    trainer_replicas: Callable[[int], Pool],
) -> None:
    [(turns, said)] = trainer_replicas(1).run(move_on_a_stream)
    assert turns == {
        ("epoch", 1): 0,
        ("step", 1): 6,
        ("step", 2): 6,
        ("step", 4): 6,
        ("step", 5): 1,
    }
    assert said == [
        "the learning rate of this replica begins anew, and the group has taken 6 steps: a "
        "schedule by epochs cannot be moved there, since the data have no length"
    ]


class KeepsItsBase(torch.optim.lr_scheduler.LRScheduler):
    """A warm-up of three steps around another scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [base * min(1.0, (self.last_epoch + 1) / 4) for base in self.base_lrs]


def test_a_scheduler_around_another_is_moved_itself() -> None:
    optimizer = make_optimizer(WithLoss())
    schedule = KeepsItsBase(optimizer)
    move_schedule(schedule, 3)
    assert schedule.last_epoch == 3 and schedule.scheduler.last_epoch == 0
    # As accelerate's wrapper, which is no scheduler of torch.
    move_schedule(SimpleNamespace(scheduler=schedule), 2)
    assert schedule.last_epoch == 5
