"""A GradScaler skips steps on one replica: all replicas still end at the same step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from choice_groups import grouped
from torch import Tensor
from trainers import LEARNING_RATE, ROWS, Rows, WithLoss, flat, make_optimizer, needs, on_store
from workers import Pool

from diloco_comm import DiLoCo

NUM_STEPS = 8
# Replica 1's gradients overflow at this step, at which a round is due.
SKIPPED_STEP = 4
# Inner steps, those of the rounds, applied steps, parameters at the end.
End = tuple[int, list[int], int, list[float]]


class Overflowing(WithLoss):
    """A model whose loss is infinite at one step of replica 1."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank, self.num_batches = rank, 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = super().forward(x, y)["loss"]
        self.num_batches += 1
        is_bad = self.rank == 1 and self.num_batches == SKIPPED_STEP
        return {"loss": loss * torch.inf if is_bad else loss}


def make_scaler() -> torch.amp.GradScaler:
    # At this scale nothing else overflows.
    return torch.amp.GradScaler("cpu", init_scale=1.0)


def end_of(diloco: DiLoCo, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> End:
    applied = int(next(iter(optimizer.state.values()))["step"])
    rounds = [metrics.inner_step for metrics in diloco.metrics()]
    return diloco.inner_step, rounds, applied, flat(model).tolist()


def check(ends: list[End]) -> None:
    for rank, (inner_step, rounds, applied, _) in enumerate(ends):
        assert (inner_step, rounds) == (NUM_STEPS, [4, 8])
        assert applied == NUM_STEPS - (rank == 1)
    assert ends[0][3] == ends[1][3]


# -------------------------------------------------------------------------------- plain loops


def plain(rank: int, world: int, address: tuple[str, int], is_fused: bool, is_hooked: bool) -> End:
    model, scaler = Overflowing(rank), make_scaler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=is_fused)
    place = on_store(rank, world, address, f"plain {is_fused} {is_hooked}")
    loader = torch.utils.data.DataLoader(Rows(rank, NUM_STEPS), batch_size=ROWS)
    with DiLoCo(model, optimizer, sync_every=4, attach=is_hooked, **grouped(place)) as diloco:
        num_steps = diloco.agree_on_steps(len(loader))
        for _, rows in zip(range(num_steps), loader, strict=False):
            scaler.scale(model(**rows)["loss"]).backward()
            scaler.step(optimizer)
            scaler.update()
            if not is_hooked:
                diloco.step()
            optimizer.zero_grad()
        diloco.flush()
        return end_of(diloco, optimizer, model)


@pytest.mark.parametrize(("is_fused", "is_hooked"), [(True, True), (False, False), (True, False)])
def test_the_loops_of_the_documentation(
    is_fused: bool, is_hooked: bool, trainer_replicas: Callable[[int], Pool]
) -> None:
    pool = trainer_replicas(2)
    check(pool.run(plain, pool.store, is_fused, is_hooked))


def test_a_step_that_no_hook_counts_ends_in_the_flush(
    trainer_replicas: Callable[[int], Pool],
) -> None:
    """The first replica has sent its second round in vain; the flush shares that round."""
    pool = trainer_replicas(2)
    ends = pool.run(plain, pool.store, False, True)
    assert [(steps, applied) for steps, _, applied, _ in ends] == [(8, 8), (7, 7)]
    assert [rounds for _, rounds, _, _ in ends] == [[4, 8], [4, 7]]
    assert ends[0][3] == ends[1][3]


def in_accelerate(rank: int, world: int, address: tuple[str, int]) -> End:
    from accelerate import Accelerator

    from diloco_comm.integrations.accelerate import attach

    accelerator, inner = Accelerator(cpu=True), Overflowing(rank)
    accelerator.scaler = make_scaler()
    loader = torch.utils.data.DataLoader(Rows(rank, NUM_STEPS), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(inner, make_optimizer(inner), loader)
    place = on_store(rank, world, address, "skipped accelerate")
    with attach(
        accelerator, model, optimizer, sync_every=4, attach=False, **grouped(place)
    ) as diloco:
        for rows in loader:
            accelerator.backward(model(**rows)["loss"])
            optimizer.step()
            diloco.step()
            optimizer.zero_grad()
        diloco.flush()
    return end_of(diloco, optimizer.optimizer, inner)


@needs("accelerate")
def test_accelerate(trainer_replicas: Callable[[int], Pool]) -> None:
    pool = trainer_replicas(2)
    check(pool.run(in_accelerate, pool.store))


# ---------------------------------------------------------------------------------- trainers


def hugging_face(rank: int, world: int, address: tuple[str, int], folder: Path, optim: str) -> End:
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    args = quiet_arguments(
        folder / f"replica-{rank}",
        max_steps=NUM_STEPS,
        learning_rate=LEARNING_RATE,
        optim=optim,
        max_grad_norm=0.0,
        save_strategy="no",
    )
    place = on_store(rank, world, address, f"skipped {optim}")
    callback, model = DiLoCoCallback(sync_every=4, shard=False, **grouped(place)), Overflowing(rank)
    data = Rows(rank, NUM_STEPS)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.accelerator.scaler = make_scaler()
    trainer.train()
    return end_of(callback.diloco, trainer.optimizer.optimizer, model)


@needs("transformers")
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_hugging_face(optim: str, trainer_replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    pool = trainer_replicas(2)
    check(pool.run(hugging_face, pool.store, tmp_path, optim))


def lightning(rank: int, world: int, address: tuple[str, int], is_automatic: bool) -> End:
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    class Overflows(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Overflowing(rank)
            self.automatic_optimization = is_automatic

        def training_step(self, rows: dict[str, Tensor], index: int) -> Tensor | None:
            loss = self.model(**rows)["loss"]
            if is_automatic:
                return loss
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
            return None

    class InFullPrecision(MixedPrecision):
        def autocast_context_manager(self) -> Any:
            return torch.autocast("cpu", enabled=False)

    place = on_store(rank, world, address, f"skipped lightning {is_automatic}")
    callback, module = DiLoCoCallback(sync_every=4, shard=False, **grouped(place)), Overflows()
    trainer = quiet_trainer(
        max_epochs=1,
        plugins=[InFullPrecision("16-mixed", "cpu", make_scaler())],
        callbacks=[callback],
    )
    trainer.fit(module, torch.utils.data.DataLoader(Rows(rank, NUM_STEPS), batch_size=ROWS))
    return end_of(callback.diloco, trainer.optimizers[0], module)


@needs("lightning")
@pytest.mark.parametrize("is_automatic", [True, False], ids=["automatic", "manual"])
def test_lightning(is_automatic: bool, trainer_replicas: Callable[[int], Pool]) -> None:
    pool = trainer_replicas(2)
    check(pool.run(lightning, pool.store, is_automatic))
