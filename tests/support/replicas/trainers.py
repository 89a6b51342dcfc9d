"""What the tests of all trainers share: the data, the plain loop, and when two runs are equal."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from problems import Regression, batch
from torch import Tensor, nn
from torch.utils.data import Dataset

from diloco_comm import DiLoCo, Nesterov, Streaming

WIDTH, ROWS = 24, 8
NUM_STEPS, SAVED_STEP = 10, 5
LEARNING_RATE = 0.01
HELD_OUT = 77  # whose rows all replicas evaluate on


def is_installed(library: str) -> bool:
    return importlib.util.find_spec(library.partition(".")[0]) is not None


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_installed(library), reason=f"{library} is not installed")


def settings(**others: Any) -> dict[str, Any]:
    """DiLoCo's arguments: a round is under way at the step that is saved."""
    return {
        "sync_every": 4,
        "fragments": 2,
        "outer": Nesterov(0.7, 0.9),
        "wire": "int8",
        "overlap": Streaming(delay=2, alpha=0.5),
        **others,
    }


def on_store(rank: int, world: int, address: tuple[str, int], name: str) -> dict[str, Any]:
    """This replica's place among jobs that know nothing but a store; a name for each run."""
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=60))
    return {
        "store": dist.PrefixStore(name, store),
        "replica": rank,
        "num_replicas": world,
        "timeout": 60,
    }


class Rows(Dataset):
    """Rows in the order of the plain loop's batches; ``accumulate`` batches make one step."""

    def __init__(self, rank: int, num_steps: int = NUM_STEPS, accumulate: int = 1) -> None:
        batches = [batch(rank, index, WIDTH, ROWS) for index in range(num_steps * accumulate)]
        self.x = torch.cat([x for x, _ in batches])
        self.y = torch.cat([y for _, y in batches])

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class WithLoss(nn.Module):
    """The regression in the form that trainers want: it returns its own loss."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = Regression(WIDTH, seed)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x), y)}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)


def plain_loop(
    model: nn.Module,
    rank: int,
    arguments: dict[str, Any],
    *,
    accumulate: int = 1,
    steps_per_epoch: int = NUM_STEPS,
) -> list[Tensor]:
    """Train without any trainer; returns the parameters after each step and after the flush."""
    optimizer = make_optimizer(model)
    history = []
    with DiLoCo(model, optimizer, **grouped(arguments)) as diloco:
        for step in range(NUM_STEPS):
            for part in range(accumulate):
                index = step % steps_per_epoch * accumulate + part
                x, y = batch(rank, index, WIDTH, ROWS)
                (model(x, y)["loss"] / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(flat(model))
        diloco.flush(final=True)
        history.append(flat(model))
    return history


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def outers_of_plain_loop(
    rank: int, arguments: dict[str, Any], steps_per_epoch: int = NUM_STEPS
) -> tuple[list[Tensor], Tensor]:
    """Train without a trainer; returns the outer parameters after each step, and the last ones."""
    model = WithLoss(rank)
    optimizer = make_optimizer(model)
    outers = []
    with DiLoCo(model, optimizer, **grouped(arguments)) as diloco:
        for step in range(NUM_STEPS):
            model(*batch(rank, step % steps_per_epoch, WIDTH, ROWS))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            with diloco.outer_parameters():
                outers.append(flat(model))
        diloco.flush(final=True)
    return outers, flat(model)


def loss_of(parameters: Tensor) -> float:
    """Evaluate parameters as the trainer does: the mean over two batches."""
    model = WithLoss()
    torch.nn.utils.vector_to_parameters(parameters, model.parameters())
    with torch.no_grad():
        values = [model(*batch(HELD_OUT, i, WIDTH, ROWS))["loss"].item() for i in range(2)]
    return sum(values) / 2
