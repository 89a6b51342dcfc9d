"""Loops of Hugging Face, Lightning, accelerate and PEFT: no check of the library objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from choice_groups import grouped
from ordinary_loops import (
    BLOCK_SIZE,
    GPT,
    NUM_TOKENS,
    WIDTH,
    ConvNet,
    Loop,
    Replica,
    check,
    get_batch,
    images,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from trainers import needs
from workers import Pool

from diloco_comm import DiLoCo

NUM_STEPS, SAVED_STEP = 10, 5


@pytest.fixture(scope="module")
def replicas(trainer_replicas: Callable[[int], Pool]) -> Callable[[int], Pool]:
    return trainer_replicas


class Tokens(Dataset):
    """Rows of tokens, of a replica alone."""

    def __init__(self, rank: int, num_batches: int) -> None:
        batches = [get_batch(rank, step) for step in range(num_batches)]
        self.input_ids = torch.cat([x for x, _ in batches])
        self.labels = torch.cat([y for _, y in batches])

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


class LanguageModel(nn.Module):
    """The language model, which returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = GPT()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits, loss = self.transformer(input_ids, labels)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


# ------------------------------------------------------------------------ Hugging Face's Trainer


def train_huggingface(replica: Replica, name: str, *, checkpoint: str | None = None) -> DiLoCo:
    from huggingface_runs import quiet_arguments
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    config = GPT2Config(
        vocab_size=NUM_TOKENS, n_positions=BLOCK_SIZE, n_embd=WIDTH, n_layer=1, n_head=2
    )
    args = quiet_arguments(
        replica.folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=NUM_STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        eval_strategy="steps",
        eval_steps=SAVED_STEP,
        save_steps=SAVED_STEP,
        logging_steps=2,
    )
    callback = DiLoCoCallback(sync_every=4, shard=False, **grouped(replica.place(name)))
    trainer = Trainer(
        GPT2LMHeadModel(config),
        args,
        train_dataset=Tokens(replica.rank, 12),
        eval_dataset=Tokens(9, 2),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.evaluate()
    trainer.save_model(str(replica.folder / "last"))
    assert callback.diloco is not None
    return callback.diloco


def huggingface(replica: Replica) -> DiLoCo:
    return train_huggingface(replica, "at once")


def huggingface_resumed(replica: Replica) -> list[DiLoCo]:
    first = train_huggingface(replica, "first")
    checkpoint = str(replica.folder / f"checkpoint-{SAVED_STEP}")
    return [first, train_huggingface(replica, "resumed", checkpoint=checkpoint)]


# ------------------------------------------------------------------------------------- Lightning


def train_lightning(replica: Replica, name: str, *, checkpoint: Path | None = None) -> DiLoCo:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_runs import quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = ConvNet()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    callback = DiLoCoCallback(sync_every=4, shard=False, **grouped(replica.place(name)))
    saving = ModelCheckpoint(replica.folder, filename="{step}", save_top_k=-1)
    trainer = quiet_trainer(
        max_epochs=2,
        gradient_clip_val=1.0,
        callbacks=[callback, saving],
        default_root_dir=replica.folder,
        enable_checkpointing=True,
        num_sanity_val_steps=1,
    )
    rows = [pair for x, y in images(replica.rank, 5) for pair in zip(x, y, strict=True)]
    module = Classifier()
    trainer.fit(
        module,
        DataLoader(rows, batch_size=8, shuffle=True),
        DataLoader(rows[:16], batch_size=8),
        ckpt_path=checkpoint,
    )
    trainer.validate(module, DataLoader(rows[:16], batch_size=8), verbose=False)
    assert callback.diloco is not None
    return callback.diloco


def lightning(replica: Replica) -> DiLoCo:
    return train_lightning(replica, "at once")


def lightning_resumed(replica: Replica) -> list[DiLoCo]:
    first = train_lightning(replica, "first")
    checkpoint = replica.folder / f"step={SAVED_STEP}.ckpt"
    return [first, train_lightning(replica, "resumed", checkpoint=checkpoint)]


# --------------------------------------------------------------------------- accelerate and PEFT


def accelerate(replica: Replica) -> DiLoCo:
    """The loop of accelerate's documentation, which saves all and loads all half-way."""
    from accelerate import Accelerator

    from diloco_comm.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=NUM_STEPS)
    loader = DataLoader(Tokens(replica.rank, NUM_STEPS), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    diloco = attach(
        accelerator, model, optimizer, sync_every=4, **grouped(replica.place("accelerate"))
    )
    for epoch in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for batch in loader:
                accelerator.gather_for_metrics(model(**batch)["logits"].argmax(-1))
        if epoch == 0:
            accelerator.save_state(str(replica.folder / "state"))
            accelerator.load_state(str(replica.folder / "state"))
    diloco.flush()
    diloco.close()
    accelerator.unwrap_model(model)
    return diloco


def peft_lora(replica: Replica) -> DiLoCo:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from peft import set_peft_model_state_dict as set_state

    config = LoraConfig(r=2, target_modules=["c_attn", "c_proj"], modules_to_save=["ln_f"])
    model = get_peft_model(LanguageModel(), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    diloco = DiLoCo(model, optimizer, sync_every=4, **grouped(replica.place("peft")))
    for step in range(NUM_STEPS):
        input_ids, labels = get_batch(replica.rank, step)
        model(input_ids=input_ids, labels=labels)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == SAVED_STEP:
            with model.disable_adapter(), torch.no_grad():
                model(input_ids=input_ids)
            model.merge_adapter()
            model.unmerge_adapter()
            set_state(model, get_peft_model_state_dict(model))
    diloco.flush()
    diloco.close()
    model.merge_and_unload()
    return diloco


# ------------------------------------------------------------------------------------ the tests

LOOPS: dict[Loop, tuple[str, list[tuple[int, int]]]] = {
    huggingface: ("transformers", [(10, 3)]),
    huggingface_resumed: ("transformers", [(10, 3), (10, 2)]),
    lightning: ("lightning", [(10, 3)]),
    lightning_resumed: ("lightning", [(10, 3), (10, 2)]),
    accelerate: ("accelerate", [(10, 3)]),
    peft_lora: ("peft", [(10, 3)]),
}


@pytest.mark.nightly(
    "the first tier resumes all trainers in test_integrations_trainers",
    but=["huggingface", "lightning", "accelerate"],
)
@pytest.mark.parametrize(
    "loop",
    [pytest.param(loop, marks=needs(library)) for loop, (library, _) in LOOPS.items()],
    ids=lambda loop: loop.__name__,
)
def test_no_check_objects(loop: Loop, replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    check(replicas(2), loop, tmp_path, *LOOPS[loop][1])
