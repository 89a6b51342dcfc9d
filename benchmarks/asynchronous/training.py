"""The model, the text and the inner steps of the asynchronous and the decoupled runs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from diloco_comm_tools.demo.data import Batches, Corpus, load_corpus, validation_windows
from diloco_comm_tools.demo.model import ByteTransformer, ModelConfig, byte_loss

TUNING_SEED, SEEDS = 1000, (0, 1, 2)
PRETRAINING_STEPS = 100
BATCH_SIZE = 8
INNER_LR, LAST_LR = 2e-3, 2e-4
NUM_EVALUATIONS = 8
MODELS = {
    "118k": ModelConfig(context=32, width=64, num_layers=2),
    "34k": ModelConfig(context=32, width=32, num_layers=1),
}


@cache
def corpus(num_workers: int) -> Corpus:
    return load_corpus(None, num_workers)


def batches_of(model: str, text: Tensor, seed: int) -> Batches:
    return Batches(text, BATCH_SIZE, MODELS[model].context, seed)


@cache
def pretrained(model: str, seed: int) -> tuple[Tensor, ...]:
    """Return the parameters that all methods start from: some steps of plain training."""
    trainer = Trainer(model, seed, ByteTransformer(MODELS[model], seed).parameters())
    batches = [batches_of(model, text, 77 + seed) for text in corpus(4).shards]
    for step in range(PRETRAINING_STEPS):
        trainer.learn(batches[step % len(batches)], INNER_LR * min(1.0, (step + 1) / 30))
    return tuple(p.detach().clone() for p in trainer.net.parameters())


class Trainer:
    """A model that begins at ``start``, and its inner optimizer."""

    def __init__(self, model: str, seed: int, start: Iterable[Tensor]) -> None:
        self.net = ByteTransformer(MODELS[model], seed)
        with torch.no_grad():
            for param, value in zip(self.net.parameters(), start, strict=True):
                param.copy_(value)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=INNER_LR)

    def learn(self, batches: Batches, lr: float) -> None:
        """Take an inner step on the next batch."""
        self.optimizer.param_groups[0]["lr"] = lr
        byte_loss(self.net, *batches.next()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@torch.no_grad()
def held_out_loss(net: torch.nn.Module, model: str) -> float:
    """Return the loss on text that nobody trains on, nats a byte."""
    windows = validation_windows(corpus(4).validation, 192, MODELS[model].context)
    return byte_loss(net, windows[:, :-1], windows[:, 1:]).item()
