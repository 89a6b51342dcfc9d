"""The training runs of the GPU check: a byte-level transformer on Python's own sources."""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.support import common
from diloco_comm import DiLoCo
from diloco_comm_tools.demo.data import Batches, load_corpus
from diloco_comm_tools.demo.model import ByteTransformer, ModelConfig

# Sizes and rows of a batch. nanoGPT's 124 M parameters are this with a larger vocabulary; a step of
# 32 rows keeps the device longer busy than the host. The other is for tests on a CPU.
SIZES = {
    "nanogpt": (ModelConfig(context=512, width=768, num_layers=12, num_heads=12), 32),
    "tiny": (ModelConfig(context=32, width=32, num_layers=1, num_heads=2), 4),
}


def add_training(parser: argparse.ArgumentParser, iters: int, sync_every: int) -> None:
    """Add the options of a training on a device."""
    add, count = parser.add_argument, common.parse_count
    add("--device", default="cuda", help="cuda (default) or cpu")
    add("--model", default="nanogpt", choices=list(SIZES), help="size of the transformer")
    add("-n", "--iters", type=count, default=iters, help="steps measured")
    add("--sync_every", type=count, default=sync_every, help="inner steps between two sends")
    common.add_output(parser, help="write the figures there")


@dataclass
class Run:
    """One replica's training.

    Attributes:
        losses: One a step; device tensors until ``finish``, so that no step waits for them.
        seconds: Of the steps after the warm-up.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    losses: list[Any] = field(default_factory=list)


class Trainer:
    """A model with its optimizer and data, on a device."""

    def __init__(self, size: str, device: torch.device, rank: int, world: int) -> None:
        config, rows = SIZES[size]
        self.device = device
        self.model = ByteTransformer(config, seed=0).to(device)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=fused)
        shard = load_corpus(None, world).shards[rank]
        self.batches = Batches(shard, rows, config.context, seed=rank)
        self.tokens_per_step = rows * config.context

    def step(self) -> Tensor:
        """Take one inner step; returns the loss, which may still be computed."""
        is_gpu = self.device.type == "cuda"
        x, y = self.batches.next()
        if is_gpu:
            # Page-locked, so that the copy waits for nobody.
            x, y = (t.pin_memory().to(self.device, non_blocking=True) for t in (x, y))
        with torch.autocast("cuda", torch.bfloat16) if is_gpu else nullcontext():
            loss = F.cross_entropy(self.model(x).flatten(0, 1).float(), y.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def train(self, num_steps: int, warmup: int, diloco: DiLoCo | None) -> Run:
        """Train, time what comes after the warm-up, and end with all losses on the host."""
        run = Run()
        begin = 0.0
        for step in range(warmup + num_steps):
            if step == warmup:
                self.synchronize()
                begin = time.perf_counter()
            run.losses.append(self.step())
        self.synchronize()
        run.seconds = time.perf_counter() - begin
        if diloco is not None:
            diloco.flush()
        run.num_tokens = num_steps * self.tokens_per_step
        run.losses = [loss.item() for loss in run.losses]
        return run

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
