"""What benchmarks/convergence/ trains: the demo's transformer on text, a small CNN on digits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco_comm_tools.demo.data import Batches, load_corpus, validation_windows
from diloco_comm_tools.demo.model import ByteTransformer, ModelConfig, byte_loss


@dataclass(frozen=True)
class Size:
    """How long a run is; equal for all methods of a task."""

    num_steps: int
    sync_every: int
    batch_size: int
    inner_lr: float
    warmup_steps: int

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth; `step` counts from 0."""
        if step < self.warmup_steps:
            return self.inner_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.inner_lr * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress)))


class Task(Protocol):
    """One replica's share of the data, and the model that learns it."""

    model: nn.Module

    def loss(self, model: nn.Module) -> Tensor:
        """Loss of the next training batch; the same batches for every method of a seed."""

    def validate(self, half: int) -> tuple[float, float]:
        """Loss and accuracy on one half (0: for tuning, 1: for the table) of the held-out data."""


class Text:
    """The demo's model on the Python standard library's sources; loss in nats a byte."""

    def __init__(
        self,
        seed: int,
        replica: int,
        world: int,
        batch_size: int,
        config: ModelConfig | None = None,
        num_windows: int = 256,
    ) -> None:
        config = config or ModelConfig()
        corpus = load_corpus(None, world)
        self.model: nn.Module = ByteTransformer(config, seed)
        shard = corpus.shards[replica]
        self._batches = Batches(shard, batch_size, config.context, seed * world + replica)
        windows = validation_windows(corpus.validation, num_windows, config.context)
        self._halves = [windows[half::2] for half in (0, 1)]

    def loss(self, model: nn.Module) -> Tensor:
        return byte_loss(model, *self._batches.next())

    @torch.no_grad()
    def validate(self, half: int) -> tuple[float, float]:
        tokens = self._halves[half]
        logits = torch.cat([self.model(part[:, :-1]) for part in tokens.split(32)])
        return _loss_and_accuracy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Digits:
    """scikit-learn's 8x8 digits; a quarter is held out, each replica has a quarter of the rest."""

    def __init__(self, seed: int, replica: int, world: int, batch_size: int) -> None:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
        labels = torch.tensor(digits.target, dtype=torch.int64)
        # The split is the same for all seeds; the order of batches is not.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        held_out, rest = order[: len(order) // 4], order[len(order) // 4 :]
        own = rest[replica::world]
        self._images, self._labels = images[own], labels[own]
        self._halves = [(images[h], labels[h]) for h in (held_out[0::2], held_out[1::2])]
        self._order = self._endless(seed * world + replica, batch_size)
        # The layers draw their weights from torch's global generator.
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def _endless(self, seed: int, batch_size: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self._labels), generator=generator)
            yield from order[: len(order) // batch_size * batch_size].split(batch_size)

    def loss(self, model: nn.Module) -> Tensor:
        index = next(self._order)
        return F.cross_entropy(model(self._images[index]), self._labels[index])

    @torch.no_grad()
    def validate(self, half: int) -> tuple[float, float]:
        images, labels = self._halves[half]
        return _loss_and_accuracy(self.model(images), labels)


def make_optimizer(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return the inner optimizer of all tasks."""
    return torch.optim.AdamW(params, lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def inner_step(
    task: Task,
    optimizers: Sequence[torch.optim.Optimizer],
    lr: float,
    forward: nn.Module | None = None,
) -> None:
    """Take one inner step at this rate; ``forward`` stands for the task's own model."""
    task.loss(forward or task.model).backward()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()


def _loss_and_accuracy(logits: Tensor, targets: Tensor) -> tuple[float, float]:
    accuracy = (logits.argmax(-1) == targets).double().mean()
    return float(F.cross_entropy(logits, targets)), float(accuracy)


TASKS = {"text": Text, "digits": Digits}
SIZES = {
    "text": Size(num_steps=300, sync_every=15, batch_size=8, inner_lr=2e-3, warmup_steps=60),
    "digits": Size(num_steps=160, sync_every=8, batch_size=16, inner_lr=2e-3, warmup_steps=16),
}
SMOKE = {
    "text": Size(num_steps=8, sync_every=4, batch_size=1, inner_lr=1e-3, warmup_steps=2),
    "digits": Size(num_steps=8, sync_every=4, batch_size=4, inner_lr=1e-3, warmup_steps=2),
}
