"""Real trainers with two replicas: trained, saved amid a round, resumed, equal to a plain loop."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from choice_groups import grouped
from trainers import (
    LEARNING_RATE,
    NUM_STEPS,
    ROWS,
    SAVED_STEP,
    Rows,
    WithLoss,
    flat,
    make_optimizer,
    needs,
    on_store,
    plain_loop,
    settings,
)
from workers import Pool

from diloco_comm import DiLoCo, NonFiniteError
from diloco_comm.integrations.attachment import Swap

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def replicas(trainer_replicas: Callable[[int], Pool]) -> Callable[[int], Pool]:
    return trainer_replicas


# --------------------------------------------------------------------- what cannot be shared


def end_in_vain(rank: int, world: int, trainer: str) -> str:
    """The last values are not finite: the end of training says so, and the attachment is closed."""
    module = importlib.import_module(f"diloco_comm.integrations.{trainer}")
    model = WithLoss()
    callback = module.DiLoCoCallback(sync_every=4)
    optimizer = make_optimizer(model)
    diloco = DiLoCo(model, optimizer, sync_every=4, nonfinite="skip", attach=False)
    diloco.step()
    next(model.parameters()).data.fill_(torch.nan)
    callback.diloco, callback._swap = diloco, Swap(diloco)
    settings = SimpleNamespace(load_best_model_at_end=False)
    arguments = [settings, None, None] if trainer == "huggingface" else [None, None]
    with pytest.raises(NonFiniteError, match="could not share all that was trained") as info:
        callback.on_train_end(*arguments)
    with pytest.raises(RuntimeError, match="closed"):
        diloco.flush()
    return str(info.value)


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param("huggingface", marks=needs("transformers")),
        pytest.param("lightning", marks=needs("lightning")),
    ],
)
def test_the_end_of_training_says_what_was_not_shared(
    replicas: Callable[[int], Pool], trainer: str
) -> None:
    [message] = replicas(1).run(end_in_vain, trainer)
    assert "fragment 0" in message and "replica 0" in message


# ------------------------------------------------------------------------ Hugging Face's Trainer


def hf_run(
    rank: int, folder: Path, arguments: dict[str, Any], *, resume: bool = False, **options: Any
) -> torch.Tensor:
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    model = WithLoss(seed=7 if resume else rank)
    accumulate = options.get("gradient_accumulation_steps", 1)
    args = quiet_arguments(
        folder / f"replica_{rank}",
        max_steps=NUM_STEPS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        save_steps=SAVED_STEP,
        **options,
    )
    callback = DiLoCoCallback(shard=False, **grouped(arguments))
    data = Rows(rank, accumulate=accumulate)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-5" if resume else None)
    assert callback.diloco.inner_step == NUM_STEPS
    return flat(model)


def hf_and_plain(
    rank: int, world: int, address: tuple[str, int], folder: Path
) -> tuple[list[bool], bytes]:
    where = lambda name: on_store(rank, world, address, name)  # noqa: E731
    trained = hf_run(rank, folder, settings(**where("hf")), gradient_accumulation_steps=2)
    resumed = hf_run(
        rank, folder, settings(**where("hf again")), gradient_accumulation_steps=2, resume=True
    )
    plain = plain_loop(WithLoss(rank), rank, settings(**where("plain")), accumulate=2)
    # The comparison includes the last outer step, without which the replicas differ.
    matches = [torch.equal(trained, plain[-1]), torch.equal(resumed, plain[-1])]
    return [*matches, not torch.equal(plain[-1], plain[-2])], trained.numpy().tobytes()


@needs("transformers")
def test_hugging_face_trainer(replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    pool = replicas(2)
    first, second = pool.run(hf_and_plain, pool.store, tmp_path)
    assert first[0] == second[0] == [True] * 3
    assert first[1] == second[1]


def hf_same_folder(
    rank: int, world: int, address: tuple[str, int], folder: Path, options: dict[str, Any]
) -> str:
    """Train with the same ``output_dir`` on all replicas; return what is said of the folder."""
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    arguments = settings(**on_store(rank, world, address, f"folder {options}"))
    callback = DiLoCoCallback(shard=False, **grouped(arguments))
    args = quiet_arguments(folder, max_steps=2, **options)
    trainer = Trainer(WithLoss(rank), args, train_dataset=Rows(rank), callbacks=[callback])
    try:
        trainer.train()
    except ValueError as error:
        callback.close()
        return str(error)
    return ""


@needs("transformers")
def test_two_replicas_do_not_save_into_one_folder(
    replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = replicas(2)
    for said in pool.run(hf_same_folder, pool.store, tmp_path, {"save_steps": 1}):
        assert said.startswith("replicas [0, 1] save their checkpoints into one folder, here ")
        assert said.endswith("give each replica its own TrainingArguments(output_dir=...)")
    assert not list(tmp_path.glob("checkpoint-*"))
    assert pool.run(hf_same_folder, pool.store, tmp_path, {"save_strategy": "no"}) == ["", ""]


def hf_refusals(rank: int, world: int, folder: Path) -> list[str]:
    """Return the callback's errors about settings of the trainer that it refuses."""
    from transformers import TrainerState, TrainingArguments

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    model = WithLoss()
    given: dict[str, Any] = {"model": model, "optimizer": make_optimizer(model), "control": None}
    said = []
    for options, step in (({}, 3), ({"load_best_model_at_end": True, "eval_strategy": "steps"}, 0)):
        args = TrainingArguments(output_dir=str(folder), save_strategy="steps", **options)
        state = TrainerState(global_step=step)
        with pytest.raises(ValueError) as error:
            DiLoCoCallback(sync_every=4).on_train_begin(args, state, **given)
        said.append(str(error.value))
    args = TrainingArguments(output_dir=str(folder))
    # The library itself need not be there to be refused.
    args.deepspeed = "zero.json"
    with pytest.raises(ValueError) as error:
        DiLoCoCallback(sync_every=4).on_train_begin(args, TrainerState(), **given)
    return [*said, str(error.value)]


@needs("transformers")
def test_hugging_face_refusals(replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    [(missing, best, deepspeed)] = replicas(1).run(hf_refusals, tmp_path)
    file = tmp_path / "checkpoint-3" / "diloco.pt"
    assert missing.startswith(f"training goes on from a checkpoint, but {file} is not there")
    assert best.startswith("load_best_model_at_end=True would put one replica's local parameters")
    assert deepspeed.startswith("under DeepSpeed the trainer holds no optimizer of the model's own")


# ------------------------------------------------------------------------------------ accelerate


def accelerate_run(
    rank: int, folder: Path, arguments: dict[str, Any], *, resume: bool = False
) -> torch.Tensor:
    from accelerate import Accelerator

    from diloco_comm.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = WithLoss(seed=7 if resume else rank)
    loader = torch.utils.data.DataLoader(Rows(rank, accumulate=2), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    diloco = attach(accelerator, model, optimizer, **grouped(arguments))
    first = 0
    if resume:
        accelerator.load_state(str(folder / f"replica_{rank}"))
        first = SAVED_STEP * 2
    with diloco:
        for index, rows in enumerate(accelerator.skip_first_batches(loader, first), start=first):
            with accelerator.accumulate(model):
                accelerator.backward(model(**rows)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if index + 1 == SAVED_STEP * 2 and not resume:
                accelerator.save_state(str(folder / f"replica_{rank}"))
        assert diloco.inner_step == NUM_STEPS
        diloco.flush(final=True)
    return flat(model)


def accelerate_and_plain(
    rank: int, world: int, address: tuple[str, int], folder: Path
) -> list[bool]:
    runs = [
        accelerate_run(rank, folder, settings(**on_store(rank, world, address, "accelerate"))),
        accelerate_run(
            rank, folder, settings(**on_store(rank, world, address, "accelerate 2")), resume=True
        ),
    ]
    arguments = settings(**on_store(rank, world, address, "accelerate plain"))
    plain = plain_loop(WithLoss(rank), rank, arguments, accumulate=2)
    return [torch.equal(run, plain[-1]) for run in runs]


@needs("accelerate")
def test_accelerate(replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    pool = replicas(2)
    assert pool.run(accelerate_and_plain, pool.store, tmp_path) == [[True, True]] * 2


# ------------------------------------------------------------------------------------- Lightning


def lightning_run(
    rank: int, folder: Path, arguments: dict[str, Any], *, resume: bool = False
) -> torch.Tensor:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_runs import Module, quiet_trainer

    from diloco_comm.integrations.lightning import DiLoCoCallback

    module, home = Module(seed=7 if resume else rank), folder / f"replica_{rank}"
    callback = DiLoCoCallback(shard=False, **grouped(arguments))
    saving = ModelCheckpoint(home, filename="{step}", every_n_train_steps=SAVED_STEP, save_top_k=-1)
    trainer = quiet_trainer(
        max_steps=NUM_STEPS,
        accumulate_grad_batches=2,
        callbacks=[callback, saving],
        default_root_dir=home,
        enable_checkpointing=True,
    )
    # Lightning goes on at an epoch's begin; DiLoCo is within a round there.
    loader = torch.utils.data.DataLoader(Rows(rank, SAVED_STEP, 2), batch_size=ROWS)
    path = str(home / f"step={SAVED_STEP}.ckpt") if resume else None
    trainer.fit(module, loader, ckpt_path=path)
    assert callback.diloco.inner_step == NUM_STEPS
    return flat(module)


def lightning_and_plain(
    rank: int, world: int, address: tuple[str, int], folder: Path
) -> list[bool]:
    runs = [
        lightning_run(rank, folder, settings(**on_store(rank, world, address, "lightning"))),
        lightning_run(
            rank, folder, settings(**on_store(rank, world, address, "lightning 2")), resume=True
        ),
    ]
    arguments = settings(**on_store(rank, world, address, "lightning plain"))
    model = WithLoss(rank)
    plain = plain_loop(model, rank, arguments, accumulate=2, steps_per_epoch=SAVED_STEP)
    return [torch.equal(run, plain[-1]) for run in runs]


@needs("lightning")
def test_lightning(replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    pool = replicas(2)
    assert pool.run(lightning_and_plain, pool.store, tmp_path) == [[True, True]] * 2


# ------------------------------------------------------------------------------------ PEFT, LoRA


def lora(rank: int, world: int, address: tuple[str, int]) -> tuple[list[str], int, bool, bytes]:
    from peft import LoraConfig, get_peft_model

    from diloco_comm import DiLoCo

    torch.manual_seed(rank)
    config = LoraConfig(r=2, target_modules=["layers.0", "layers.1"])
    model = get_peft_model(WithLoss(0).net, config)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = make_optimizer(model)
    place = on_store(rank, world, address, "peft")
    with DiLoCo(model, optimizer, **grouped(settings(**place))) as diloco:
        for step in range(NUM_STEPS):
            rows = Rows(rank, NUM_STEPS)[step * ROWS : (step + 1) * ROWS]
            torch.nn.functional.mse_loss(model(rows["x"]), rows["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()
        diloco.flush()
        names = sorted(diloco.state_dict()["outer"])
        num_elements = sum(part.fragment.num_elements for part in diloco.parts)
    after = dict(model.named_parameters())
    kept = all(torch.equal(after[name], value) for name, value in frozen.items())
    trained = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    return names, num_elements, kept, trained.numpy().tobytes()


@needs("peft")
def test_peft_exchanges_the_adapters_alone(replicas: Callable[[int], Pool]) -> None:
    pool = replicas(2)
    (names, num_elements, kept, first), (*_, second) = pool.run(lora, pool.store)
    # Two adapters of rank 2 on matrices of 24 by 24.
    assert len(names) == 4 and all(".lora_" in name for name in names)
    assert num_elements == 2 * (2 * 24 + 24 * 2)
    assert kept
    assert first == second


# ---------------------------------------------------------------------------------- the examples


def run_example(
    rank: int, world: int, address: tuple[str, int], script: str, options: list[str]
) -> tuple[str, bool]:
    """Run a script as torchrun does; returns the hash of the parameters at the end."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Each script has its own part of the store.
        "TORCHELASTIC_RESTART_COUNT": script,
    }
    sys.argv = [script, *options]
    end = runpy.run_path(str(EXAMPLES / script))
    diloco = end["diloco"] if "diloco" in end else end["callback"].diloco
    return diloco.outer_hash(), "RANK" in os.environ


@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param(
            "huggingface_trainer.py",
            ["--steps", "5", "--sync-every", "2"],
            marks=needs("transformers"),
        ),
        pytest.param(
            "lightning_trainer.py",
            ["--steps", "10", "--sync-every", "4"],
            marks=needs("lightning"),
        ),
        pytest.param("accelerate_loop.py", ["--epochs", "2"], marks=needs("accelerate")),
    ],
)
def test_example(
    script: str, options: list[str], replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = replicas(2)
    options = [*options, "--output-dir", str(tmp_path)]
    first, second = pool.run(run_example, pool.store, script, options)
    assert first == second
    assert first[1] is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replica-0", "replica-1"]
