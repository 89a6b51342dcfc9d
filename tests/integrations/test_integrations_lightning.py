"""Lightning's callbacks that average weights, and its handler of Slurm's signal, beside DiLoCo."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_replicas import hash_of
from trainers import ROWS, Rows, needs
from workers import Pool


@pytest.fixture(scope="module")
def replicas(trainer_replicas: Callable[[int], Pool]) -> Callable[[int], Pool]:
    return trainer_replicas


def fit_with_averages(rank: int, world: int) -> list[tuple[str, str]]:
    """Return the errors of trainings with each callback that averages, in both orders."""
    from lightning.pytorch import callbacks
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    class OwnAveraging(callbacks.WeightAveraging):
        pass

    averages = [
        callbacks.EMAWeightAveraging(decay=0.9),
        callbacks.StochasticWeightAveraging(swa_lrs=0.01),
        OwnAveraging(),
    ]
    errors = []
    for average in averages:
        for is_first in (True, False):
            found = [DiLoCoCallback(sync_every=2, peers="alone", shard=False)]
            found.insert(0 if is_first else 1, average)
            trainer = quiet_trainer(max_epochs=2, callbacks=found)
            with pytest.raises(ValueError) as caught:
                trainer.fit(Module(), torch.utils.data.DataLoader(Rows(0), batch_size=ROWS))
            assert trainer.global_step == 0
            errors.append((type(average).__name__, str(caught.value)))
    return errors


@needs("lightning")
def test_averages_of_local_weights_are_refused_by_name(replicas: Callable[[int], Pool]) -> None:
    [errors] = replicas(1).run(fit_with_averages)
    assert len(errors) == 6
    for name, text in errors:
        assert text.startswith(f"{name} averages the local parameters of this replica alone")
        assert "diloco.on_sync()" in text and "\n" not in text


def averages_of_outer(rank: int, world: int, address: tuple[str, int]) -> tuple[str, str, int]:
    """The average that ``docs/how-to/lightning.md`` shows; return its hash and the model's."""
    import lightning.pytorch as pl
    from choice_groups import grouped
    from lightning_runs import Module, quiet_trainer
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
    from trainers import on_store

    from diloco_comm.integrations.lightning import DiLoCoCallback

    place = on_store(rank, world, address, "averages")
    callback = DiLoCoCallback(sync_every=2, shard=False, **grouped(place))

    class Averaging(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.average = AveragedModel(module, avg_fn=get_ema_avg_fn(0.9))
            callback.diloco.on_sync(lambda metrics: self.update(module))

        def update(self, module: Any) -> None:
            with callback.diloco.outer_parameters():
                self.average.update_parameters(module)

    averaging, module = Averaging(), Module(rank)
    trainer = quiet_trainer(max_epochs=1, callbacks=[callback, averaging])
    trainer.fit(module, torch.utils.data.DataLoader(Rows(rank), batch_size=ROWS))
    hashes = [
        hash_of([p.detach() for p in one.parameters()]) for one in (averaging.average, module)
    ]
    return hashes[0], hashes[1], int(averaging.average.n_averaged)


@needs("lightning")
def test_an_average_of_the_outer_parameters_is_the_same_on_all_replicas(
    replicas: Callable[[int], Pool],
) -> None:
    pool = replicas(2)
    (average, model, count), other = pool.run(averages_of_outer, pool.store)
    assert other == (average, model, count) and average != model and count == 5


def requeue(
    rank: int, world: int, home: Path, where: str
) -> tuple[list[tuple[str, bool]], list[bool]]:
    """Slurm's signal comes at a place of a step; a second training begins at its checkpoint.

    Returns:
        For each training the hash of its end, and whether it has saved; and whether the checkpoint
        was there when the signal had been sent.
    """
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    os.environ.update({f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID", "NODEID")})
    os.environ.update({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"})

    class Signalled(Module):
        at = -1

        def send(self, place: str) -> None:
            if place == where and self.trainer.global_step == self.at:
                os.kill(os.getpid(), signal.SIGUSR1)
                at_once.append((home / "signalled" / "hpc_ckpt_1.ckpt").exists())

        def training_step(self, rows: Any, index: int) -> Any:
            self.send("closure")
            return super().training_step(rows, index)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda *_: self.send("updated"))
            return optimizer

        def validation_step(self, rows: Any, index: int) -> None:
            self.send("validation")

    ends, at_once, evaluate = [], list[bool](), "outer" if where == "validation" else "local"
    for folder, at in (("whole", -1), ("signalled", 5), ("signalled", -1)):
        module = Signalled()
        module.at = at
        trainer = quiet_trainer(
            max_epochs=10,
            default_root_dir=home / folder,
            plugins=[SLURMEnvironment()],
            num_sanity_val_steps=0,
            callbacks=[DiLoCoCallback(sync_every=4, peers="alone", shard=False, evaluate=evaluate)],
        )
        loaders = [torch.utils.data.DataLoader(Rows(0, 1), batch_size=ROWS) for _ in range(2)]
        trainer.fit(module, *loaders)
        has_saved = (home / folder / "hpc_ckpt_1.ckpt").exists()
        ends.append((hash_of([p.detach() for p in module.parameters()]), has_saved))
    return ends, at_once


@needs("lightning")
@pytest.mark.parametrize("where", ["closure", "updated", "validation"])
def test_a_signal_of_slurm_saves_at_the_end_of_the_batch_or_at_once_outside(
    where: str, replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    ((whole, no), signalled, resumed), at_once = replicas(1).run(requeue, tmp_path, where)[0]
    assert at_once == [where == "validation"]
    assert signalled == resumed == (whole, True) and not no
