"""Lightning's Trainer validates and saves the outer parameters, and goes on from the local."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from choice_groups import grouped
from torch import Tensor
from trainers import (
    HELD_OUT,
    NUM_STEPS,
    ROWS,
    SAVED_STEP,
    Rows,
    WithLoss,
    flat,
    loss_of,
    needs,
    on_store,
    outers_of_plain_loop,
    settings,
)
from workers import Pool

from diloco_comm import Blocking

FAILED_STEP = 7


def make_module(home: Path, *, seed: int, fails: bool) -> Any:
    """Return a module that saves a checkpoint in its validation at ``SAVED_STEP``.

    Args:
        fails: The step behind ``FAILED_STEP`` fails, which ends the training.
    """
    from lightning_runs import Module

    class Validating(Module):
        def __init__(self) -> None:
            super().__init__(seed)
            self.losses: list[float] = []

        def training_step(self, rows: dict[str, Tensor], index: int) -> Tensor:
            if fails and self.trainer.global_step == FAILED_STEP:
                raise ValueError("no such row")
            return self.model(**rows)["loss"]

        def validation_step(self, rows: dict[str, Tensor], index: int) -> None:
            loss = self.model(**rows)["loss"]
            self.losses.append(loss.item())
            self.log("val_loss", loss)

        def on_validation_epoch_end(self) -> None:
            if self.trainer.global_step == SAVED_STEP:
                self.trainer.save_checkpoint(home / "amid.ckpt")

    return Validating()


def lightning_run(
    rank: int,
    folder: Path,
    arguments: dict[str, Any],
    *,
    resume: bool = False,
    fails: bool = False,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Train with a validation and a checkpoint at each epoch's end, every 5th step.

    Args:
        fails: Have the step behind ``FAILED_STEP`` fail, which ends the training.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_runs import quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    home = folder / f"replica-{rank}"
    module = make_module(home, seed=7 if resume else rank, fails=fails)
    callback = DiLoCoCallback(shard=False, **grouped({"evaluate": "outer", **arguments}))
    saving = ModelCheckpoint(
        home, filename="{step}", monitor="val_loss", save_top_k=-1, save_on_exception=fails
    )
    trainer = quiet_trainer(
        max_steps=NUM_STEPS,
        callbacks=[callback, saving],
        default_root_dir=home,
        enable_checkpointing=True,
        **options,
    )
    loaders = [
        torch.utils.data.DataLoader(rows, batch_size=ROWS)
        for rows in (Rows(rank, SAVED_STEP), Rows(HELD_OUT, 2))
    ]
    path = str(home / f"step={SAVED_STEP}.ckpt") if resume else None
    with pytest.raises(ValueError, match="no such row") if fails else nullcontext():
        trainer.fit(module, *loaders, ckpt_path=path)
    return module, callback, saving


def saved_by_lightning(path: str | Path) -> Tensor:
    state = torch.load(path, weights_only=True)["state_dict"]
    model = WithLoss()
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    return flat(model)


def local_of_lightning(path: Path) -> Tensor:
    (state,) = (
        state
        for name, state in torch.load(path, weights_only=True)["callbacks"].items()
        if name.startswith("DiLoCoCallback")
    )
    return torch.cat([value.flatten() for value in state["local"].values()])


def lightning_outer(
    rank: int, world: int, address: tuple[str, int], folder: Path
) -> tuple[list[float], bytes, list[bool]]:
    where = lambda name: settings(**on_store(rank, world, address, name))  # noqa: E731
    outers, end = outers_of_plain_loop(rank, where("plain lightning outer"), SAVED_STEP)
    first, last = outers[SAVED_STEP - 1], outers[-1]
    module, _, saving = lightning_run(rank, folder, where("lightning outer"))
    found = module.losses[2:]  # without those of the sanity check
    best = saved_by_lightning(saving.best_model_path)
    again, *_ = lightning_run(rank, folder, where("lightning outer again"), resume=True)
    home = folder / f"replica-{rank}"
    # One checkpoint was saved during the validation, with the outer parameters in the model.
    amid, after = (local_of_lightning(home / f"{name}.ckpt") for name in ("amid", "step=5"))
    local, *_ = lightning_run(
        rank, folder / "local", {**where("lightning local"), "evaluate": "local"}
    )
    facts = [
        sum(found[:2]) / 2 == pytest.approx(loss_of(first), rel=1e-5),
        sum(found[2:]) / 2 == pytest.approx(loss_of(last), rel=1e-5),
        torch.equal(saved_by_lightning(home / "step=5.ckpt"), first),
        torch.equal(saved_by_lightning(home / "step=10.ckpt"), last),
        torch.equal(best, first),
        torch.equal(saved_by_lightning(home / "amid.ckpt"), first),
        torch.equal(amid, after) and not torch.equal(after, first),
        torch.equal(flat(module), end),
        torch.equal(flat(again), end),
        again.losses[-2:] == found[2:],
        torch.equal(flat(local), end),
        local.losses[2:] != found,
        not torch.equal(saved_by_lightning(folder / f"local/replica-{rank}/step=5.ckpt"), first),
    ]
    return found, best.numpy().tobytes(), facts


@pytest.mark.nightly("18 s; test_integrations_trainers runs the example of Lightning's trainer")
@needs("lightning")
def test_lightning(trainer_replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    pool = trainer_replicas(2)
    first, second = pool.run(lightning_outer, pool.store, tmp_path, timeout=110)
    assert first[:2] == second[:2]
    assert first[2] == second[2] == [True] * 13


def lightning_failed(rank: int, world: int, address: tuple[str, int], folder: Path) -> list[bool]:
    """Fail at a step without a round under way; check the states saved then and later."""
    where = lambda name: settings(overlap=Blocking(), **on_store(rank, world, address, name))  # noqa: E731
    outers, _ = outers_of_plain_loop(rank, where("plain lightning failed"), SAVED_STEP)
    outer = outers[FAILED_STEP - 1]
    home = folder / f"replica-{rank}"
    module = lightning_run(rank, folder, where("lightning failed"), fails=True)[0]
    trainer, trained = module.trainer, flat(module)
    torch.nn.utils.vector_to_parameters(trained + 1, module.parameters())
    trainer.save_checkpoint(home / "later.ckpt")
    trainer.validate(module, torch.utils.data.DataLoader(Rows(HELD_OUT, 2), batch_size=ROWS))
    failed = home / f"step={FAILED_STEP}.ckpt"
    return [
        torch.equal(saved_by_lightning(failed), outer),
        torch.equal(local_of_lightning(failed), trained),
        not torch.equal(trained, outer),
        # From then on the parameters are the user's.
        torch.equal(saved_by_lightning(home / "later.ckpt"), trained + 1),
        sum(module.losses[-2:]) / 2 == pytest.approx(loss_of(trained + 1), rel=1e-5),
    ]


@needs("lightning")
def test_a_checkpoint_of_the_failure(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    assert pool.run(lightning_failed, pool.store, tmp_path, timeout=110) == [[True] * 5] * 2


def lightning_weights_only(rank: int, world: int) -> str:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from diloco_comm.integrations.lightning import DiLoCoCallback

    callbacks = [
        DiLoCoCallback(evaluate="outer", sync_every=4),
        ModelCheckpoint(save_weights_only=True),
    ]
    trainer = pl.Trainer(accelerator="cpu", callbacks=callbacks, logger=False)
    with pytest.raises(ValueError) as error:
        callbacks[0].on_train_start(trainer, pl.LightningModule())
    return str(error.value)


@needs("lightning")
def test_lightning_saves_weights_alone_without_asking(
    trainer_replicas: Callable[[int], Pool],
) -> None:
    (sentence,) = trainer_replicas(1).run(lightning_weights_only)
    assert sentence.startswith("ModelCheckpoint(save_weights_only=True) asks no callback")
