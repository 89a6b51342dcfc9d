"""Callbacks refuse wrong arguments when they are made, and not when the trainer begins."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trainers import Rows, WithLoss, needs
from workers import Pool

from diloco_comm import DiLoCo, Link, StorePeers, Wire, eager_diloco, fedavg, local_sgd
from diloco_comm.integrations.attachment import check, with_norms

TRAINERS = [
    pytest.param("huggingface", marks=needs("transformers")),
    pytest.param("lightning", marks=needs("lightning")),
]


def with_any(model: Any, optimizer: Any, **anything: Any) -> DiLoCo:
    raise NotImplementedError


def with_one(model: Any, optimizer: Any, steps: int) -> DiLoCo:
    raise NotImplementedError


def tagged(tag: str, model: Any, optimizer: Any, **anything: Any) -> DiLoCo:
    raise NotImplementedError


def with_all(*places: Any, **names: Any) -> DiLoCo:
    return DiLoCo(*places, **names)


def with_model_alone(model: Any) -> DiLoCo:
    raise NotImplementedError


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sync_evry": 4}, "DiLoCoCallback has no argument 'sync_evry': did you mean 'sync_every'"),
    ({"sync_every": 4, "evalute": "outer"}, "no argument 'evalute': did you mean 'evaluate'"),
    ({"sync_every": 4, "zzz": 1}, "no argument 'zzz': it has make, "),
    ({"sync_every": 4, "model": 1}, "takes the trainer's own model: leave out model="),
    ({}, "sync_every is missing: give the inner steps between two outer steps"),
    ({"sync_every": 0}, "sync_every must be an integer of at least 1, got 0"),
    ({"sync_every": 4, "wire": "int9"}, "int9"),
    ({"sync_every": 4, "overlap": "soon"}, "soon"),
    ({"sync_every": 4, "link": Link(timeout=-1)}, "timeout must be positive, got -1"),
    ({"sync_every": 4, "weight": "big"}, "weight must be a number or a function, got 'big'"),
    ({"sync_every": 4, "peers": StorePeers("tcp://h:1")}, "StorePeers needs replica=, and one of"),
    ({"sync_every": 4, "checks": "loud"}, "checks must be one of raise, warn, off, got 'loud'"),
    ({"sync_every": 4, "shard": "no"}, "shard must be True or False, got 'no'"),
    ({"sync_every": 4, "figures": "few"}, "figures must be one of main, all, got 'few'"),
    ({"make": 100}, "make must be DiLoCo or a preset such as eager_diloco, got 100"),
    ({"make": local_sgd}, "DiLoCoCallback needs sync_every=, which local_sgd asks for"),
    ({"make": fedavg, "sync_every": 4}, "needs weight=, which fedavg asks for"),
    ({"make": eager_diloco, "wires": "e3m0"}, "no argument 'wires': did you mean 'wire'"),
    ({"make": eager_diloco, "norms": 1}, "norms must be True or False, got 1"),
    ({"make": partial(local_sgd, sync_every=4), "lane": 1}, "did you mean link=Link(lanes=...)?"),
    ({"make": with_model_alone}, "make is called as make(model, optimizer, ...), and <function"),
]
RIGHT: list[dict[str, Any]] = [
    {"sync_every": 4},
    {"config": {"sync_every": 4}},
    {"make": eager_diloco},
    {"make": partial(DiLoCo, sync_every=4), "peers": StorePeers("tcp://h:1", 0, of=2)},
    {"make": with_any, "zzz": 1},
    {"make": with_one, "steps": 1},
    {"make": with_all, "sync_every": 4},
    {"make": partial(tagged, "x"), "zzz": 1},
]


def refusals(rank: int, world: int, trainer: str, given: list[dict[str, Any]]) -> list[str]:
    """Return the error of each construction, "" for none."""
    callback = importlib.import_module(f"diloco_comm.integrations.{trainer}").DiLoCoCallback
    found = []
    for arguments in given:
        try:
            callback(**arguments)
            found.append("")
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("trainer", TRAINERS)
def test_wrong_arguments_are_refused_at_once(
    trainer: str, trainer_replicas: Callable[[int], Pool]
) -> None:
    [found] = trainer_replicas(1).run(refusals, trainer, [given for given, _ in WRONG])
    for text, (_, sentence) in zip(found, WRONG, strict=True):
        assert sentence in text and "\n" not in text
    assert trainer_replicas(1).run(refusals, trainer, RIGHT) == [[""] * len(RIGHT)]


def test_the_arguments_of_a_partial_count() -> None:
    make = partial(partial(DiLoCo, sync_every=4, norms=False), wire=Wire(seed=3))
    arguments = with_norms(make, check(DiLoCo, make, {"wire": Wire(seed=5)}))
    assert arguments == {"sync_every": 4, "norms": False, "wire": Wire(seed=5)}
    assert with_norms(eager_diloco, {}) == {"norms": True} and with_norms(with_any, {}) == {}


def with_file(rank: int, world: int, path: Path) -> list[str]:
    os.environ["DILOCO_COMM_CONFIG"] = str(path)
    found = []
    try:
        for sync_every in (4, 0):
            path.write_text(f'{{"sync_every": {sync_every}}}')
            found += refusals(rank, world, "huggingface", [{}])
    finally:
        del os.environ["DILOCO_COMM_CONFIG"]
    return found


@needs("transformers")
def test_a_configuration_of_the_environment_counts(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    [(right, wrong)] = trainer_replicas(1).run(with_file, tmp_path / "settings.json")
    assert right == "" and wrong == "sync_every must be an integer of at least 1, got 0"


def attach_wrongly(rank: int, world: int) -> list[str]:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    from diloco_comm.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError) as unknown:
        attach(accelerator, model, optimizer, sync_evry=4)

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        attach(accelerator, model, optimizer, sync_every=4)

    with pytest.raises(ValueError) as restarted:
        train()
    return [str(unknown.value), str(restarted.value)]


@needs("accelerate")
def test_attach_refuses_too(trainer_replicas: Callable[[int], Pool]) -> None:
    [(unknown, restarted)] = trainer_replicas(1).run(attach_wrongly)
    assert unknown == "attach has no argument 'sync_evry': did you mean 'sync_every'?"
    assert restarted.startswith("find_executable_batch_size begins the training of one replica")


def find_batch_size(rank: int, world: int, folder: Path) -> str:
    from huggingface_runs import quiet_arguments
    from transformers import Trainer

    from diloco_comm.integrations.huggingface import DiLoCoCallback

    args = quiet_arguments(folder, max_steps=2, auto_find_batch_size=True)
    callback = DiLoCoCallback(sync_every=1)
    trainer = Trainer(WithLoss(), args, train_dataset=Rows(0), callbacks=[callback])
    with pytest.raises(ValueError) as error:
        trainer.train()
    return str(error.value)


@needs("transformers")
def test_a_batch_size_that_is_looked_for_is_refused(
    trainer_replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    [text] = trainer_replicas(1).run(find_batch_size, tmp_path)
    assert text.startswith("auto_find_batch_size=True begins the training of one replica anew")
