"""Hugging Face's Trainer on outer parameters: it evaluates, saves and chooses, and goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from choice_groups import grouped
from torch import Tensor
from trainers import (
    HELD_OUT,
    LEARNING_RATE,
    NUM_STEPS,
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

from diloco_comm import DiLoCo


def hf_trainer(rank: int, folder: Path, arguments: dict[str, Any], **options: Any) -> Any:
    """Make a trainer that evaluates and saves at each 5th step; its callback is ``.diloco``."""
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    callbacks = options.pop("callbacks", [])
    data = Rows(rank, options.pop("steps_per_epoch", NUM_STEPS))
    chosen = {
        "eval_strategy": "steps",
        "eval_steps": SAVED_STEP,
        "save_strategy": "steps",
        "save_steps": SAVED_STEP,
        "logging_steps": 2,
        **options,
    }
    args = quiet_arguments(
        folder / f"replica-{rank}",
        max_steps=NUM_STEPS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        label_names=["y"],
        **chosen,
    )
    callback = DiLoCoCallback(shard=False, **grouped({"evaluate": "outer", **arguments}))
    trainer = Trainer(
        WithLoss(rank),
        args,
        train_dataset=data,
        eval_dataset=Rows(HELD_OUT, 2),
        callbacks=[callback, *callbacks],
    )
    trainer.diloco = callback
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def saved_by_hf(folder: Path, rank: int, step: int) -> Tensor:
    """Return the parameters in the model file of a checkpoint."""
    from safetensors.torch import load_file

    state = load_file(folder / f"replica-{rank}" / f"checkpoint-{step}" / "model.safetensors")
    model = WithLoss()
    model.load_state_dict(state)
    return flat(model)


def hf_outer(
    rank: int, world: int, address: tuple[str, int], folder: Path
) -> tuple[list[float], bytes, list[bool]]:
    where = lambda name: settings(**on_store(rank, world, address, name))  # noqa: E731
    outers, end = outers_of_plain_loop(rank, where("plain outer"))
    first, last = outers[SAVED_STEP - 1], outers[-1]
    trainer = hf_trainer(rank, folder, where("hf outer"))
    trainer.train()
    trained, found = flat(trainer.model), losses(trainer)
    saved = saved_by_hf(folder, rank, SAVED_STEP)
    again = hf_trainer(rank, folder, where("hf outer again"))
    again.train(resume_from_checkpoint=str(folder / f"replica-{rank}/checkpoint-{SAVED_STEP}"))
    local = hf_trainer(rank, folder / "local", {**where("hf local"), "evaluate": "local"})
    local.train()
    facts = [
        # The outer parameters are evaluated and saved, and training is not changed.
        found == pytest.approx([loss_of(first), loss_of(last)], rel=1e-5),
        torch.equal(saved, first),
        torch.equal(saved_by_hf(folder, rank, NUM_STEPS), last),
        torch.equal(trained, end),
        # A run goes on from a checkpoint that has them, to the same bytes.
        torch.equal(flat(again.model), end),
        losses(again)[-1] == found[-1],
        # By default the local parameters are evaluated and saved.
        torch.equal(flat(local.model), end),
        losses(local) != found,
        not torch.equal(saved_by_hf(folder / "local", rank, SAVED_STEP), first),
    ]
    return found, saved.numpy().tobytes(), facts


@needs("transformers")
def test_hugging_face(trainer_replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    pool = trainer_replicas(2)
    first, second = pool.run(hf_outer, pool.store, tmp_path, timeout=110)
    assert first[:2] == second[:2]
    assert first[2] == second[2] == [True] * 9


def hf_best(
    rank: int, world: int, address: tuple[str, int], folder: Path, options: dict[str, Any]
) -> tuple[int, list[str], bytes, bool]:
    """Let the trainer load the best model, here the first one: the loss rises on these rows."""
    place = settings(**on_store(rank, world, address, f"hf best {sorted(options)}"))
    options = {"load_best_model_at_end": True, "greater_is_better": False, **options}
    if isinstance(options["greater_is_better"], list):
        options["greater_is_better"] = options["greater_is_better"][rank]
    trainer = hf_trainer(rank, folder, place, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    messages = [str(w.message) for w in caught if "the best model differs" in str(w.message)]
    step, model = trainer.state.best_global_step, flat(trainer.model)
    is_saved = torch.equal(model, saved_by_hf(folder, rank, step))
    return step, messages, model.numpy().tobytes(), is_saved


@needs("transformers")
@pytest.mark.parametrize(
    "options",
    [
        {},
        # Save only at evaluations, and only if the evaluation was the best so far.
        {"save_strategy": "best"},
        {"eval_strategy": "epoch", "save_strategy": "epoch", "steps_per_epoch": SAVED_STEP},
        {"eval_strategy": "epoch", "save_strategy": "best", "steps_per_epoch": SAVED_STEP},
        {"eval_on_start": True, "save_total_limit": 1},
    ],
    ids=str,
)
def test_the_best_model_of_hugging_face(
    options: dict[str, Any], trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    first, second = pool.run(hf_best, pool.store, tmp_path, options)
    assert first == second
    assert first[:2] == (SAVED_STEP, []) and first[3] is True


@needs("transformers")
def test_replicas_that_disagree_on_the_best(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    first, second = pool.run(hf_best, pool.store, tmp_path, {"greater_is_better": [False, True]})
    assert (first[0], second[0]) == (SAVED_STEP, NUM_STEPS)
    assert first[2] == second[2]
    assert (first[3], second[3]) == (True, False)
    for messages in (first[1], second[1]):
        assert messages == [
            "the best model differs between replicas (step 5 on replica 0, step 10 on replica 1): "
            "all take the model of replica 0; evaluate on the same data everywhere"
        ]


def hf_asked_late(rank: int, world: int, folder: Path) -> str:
    from transformers import TrainerCallback

    class Late(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = state.global_step == 3

    trainer = hf_trainer(rank, folder, {"sync_every": 4, "evaluate": "outer"}, callbacks=[Late()])
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    return str(error.value)


@needs("transformers")
def test_an_evaluation_of_local_parameters_is_refused(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    (sentence,) = trainer_replicas(1).run(hf_asked_late, tmp_path)
    assert sentence.startswith('in spite of evaluate="outer" this evaluation ran on the local')
    assert "put DiLoCoCallback last in callbacks" in sentence


def hf_interrupted(
    rank: int, world: int, address: tuple[str, int], folder: Path
) -> tuple[bool, bool]:
    """Ctrl-C in an evaluation, when the model holds the outer parameters; then resume."""
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        is_on = True

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.is_on and state.global_step == NUM_STEPS:
                raise KeyboardInterrupt

    place = on_store(rank, world, address, "plain interrupted")
    outers, end = outers_of_plain_loop(rank, settings(**place))
    place, interrupt = on_store(rank, world, address, "hf interrupted"), Interrupt()
    trainer = hf_trainer(rank, folder, settings(**place), callbacks=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    is_outer = torch.equal(flat(trainer.model), outers[-1])
    interrupt.is_on = False
    trainer.train(resume_from_checkpoint=str(folder / f"replica-{rank}/checkpoint-{SAVED_STEP}"))
    return is_outer, torch.equal(flat(trainer.model), end)


@needs("transformers")
def test_an_interrupted_evaluation_can_be_resumed(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(2)
    assert pool.run(hf_interrupted, pool.store, tmp_path) == [(True, True)] * 2


def hf_failed(rank: int, world: int, folder: Path) -> list[Any]:
    """A training fails at a step, or in an evaluation; then evaluate, and close."""
    from transformers import TrainerCallback

    class Fail(TrainerCallback):
        event = "step"
        local = torch.zeros(0)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.local = flat(kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.event == "step" and state.global_step == 3:
                raise ValueError("no such row")

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.event == "evaluation":
                raise ValueError("no such row")

    fail = Fail()
    trainer = hf_trainer(rank, folder, settings(evaluate="outer"), callbacks=[fail])
    callback = trainer.diloco
    with pytest.raises(ValueError, match="no such row"):
        trainer.train()
    is_local = torch.equal(flat(trainer.model), fail.local)
    loss = trainer.evaluate()["eval_loss"]
    facts = [is_local, loss == pytest.approx(loss_of(fail.local), rel=1e-5)]
    # The failed training leaves no hook on the optimizer, and does not disturb the next training.
    DiLoCo(trainer.model, trainer.optimizer, sync_every=4).close()
    fail.event = "evaluation"
    with pytest.raises(ValueError, match="no such row"):
        trainer.train()
    outer, fail.event = flat(trainer.model), "nothing"
    loss = trainer.evaluate()["eval_loss"]
    callback.close()
    facts += [
        not torch.equal(outer, fail.local),
        loss == pytest.approx(loss_of(outer), rel=1e-5),
        torch.equal(flat(trainer.model), fail.local),
    ]
    trainer.train()
    return [*facts, len(losses(trainer))]


@needs("transformers")
def test_after_a_training_that_failed(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    (facts,) = trainer_replicas(1).run(hf_failed, tmp_path)
    assert facts == [True] * 5 + [2]


def wrong_choice(rank: int, world: int) -> list[str]:
    from diloco_comm.integrations import huggingface, lightning

    said = []
    for module in (huggingface, lightning):
        with pytest.raises(ValueError) as error:
            module.DiLoCoCallback(evaluate="both", sync_every=4)
        said.append(str(error.value))
    return said


@needs("transformers")
@needs("lightning")
def test_what_cannot_be_evaluated(trainer_replicas: Callable[[int], Pool]) -> None:
    (said,) = trainer_replicas(1).run(wrong_choice)
    assert all(
        sentence.startswith("evaluate must be") and "'both'" in sentence for sentence in said
    )


def hf_workers(
    rank: int, world: int, address: tuple[str, int], folder: Path
) -> tuple[list[float], bytes, bytes]:
    """Two jobs of two workers each, as two torchruns start them; DDP averages within a job."""
    import os

    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    replica, worker = divmod(rank, 2)
    launched = {"RANK": worker, "LOCAL_RANK": worker, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    before = dict(os.environ)
    os.environ |= {name: str(value) for name, value in launched.items()}
    os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
    job = on_store(worker, 2, address, f"job {replica}")["store"]
    dist.init_process_group("gloo", store=job, rank=worker, world_size=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    # Each job has its own store; this store is known to both jobs.
    place = {**on_store(replica, 2, address, "hf workers"), "shard_group": dist.group.WORLD}
    options = {"load_best_model_at_end": True, "greater_is_better": False}
    trainer = hf_trainer(replica, folder, settings(**place), **options)
    trainer.train()
    place["store"] = on_store(replica, 2, address, "hf workers again")["store"]
    options = {"load_best_model_at_end": False}
    again = hf_trainer(replica, folder, settings(**place), **options)
    path = folder / f"replica-{replica}/checkpoint-{SAVED_STEP}"
    again.train(resume_from_checkpoint=str(path))
    place["store"] = on_store(replica, 2, address, "hf workers at once")["store"]
    at_once = hf_trainer(replica, folder / "at once", settings(**place), **options)
    at_once.train()
    assert torch.equal(flat(again.model), flat(at_once.model))
    assert torch.equal(flat(trainer.model), saved_by_hf(folder, replica, SAVED_STEP))
    dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ |= before
    found = losses(trainer)
    return found, flat(trainer.model).numpy().tobytes(), flat(again.model).numpy().tobytes()


@needs("transformers")
def test_replicas_of_several_workers(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = trainer_replicas(4)
    results = pool.run(hf_workers, pool.store, tmp_path, timeout=110)
    assert all(result == results[0] for result in results)
