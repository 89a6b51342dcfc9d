"""Trainers in an elastic group: a replica leaves, and a newcomer goes on at the group's step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_replicas import registry as registry
from registries import Host
from trainers import Rows, WithLoss, make_optimizer, needs
from workers import Pool

from diloco_comm import DiLoCo, Elastic

LAST_STEP, LONG_RUN = 40, 60


def train(rank: int, world: int, registry: str, folder: str) -> tuple[int, int, bool]:
    """Return the trainer's steps, the group's inner steps, and whether this replica was done."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from huggingface_runs import quiet_arguments
    from transformers import Trainer, TrainerCallback

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    membership = Elastic(registry, run="hf", replica=rank, min_replicas=1, founding_wait=3.0)
    callback = DiLoCoCallback(sync_every=4, membership=membership, timeout=40, shard=False)

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
    callback = DiLoCoCallback(sync_every=2, membership=membership, timeout=40, shard=False)
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
    callback = DiLoCoCallback(sync_every=2, membership=membership, timeout=40, shard=False)
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


@pytest.mark.nightly("6 s each; test_inner_state has the sentence about a plain loop")
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
