"""Run a training loop as public trainers write it, on two replicas, and see that nothing warns.

A loop is a function of a ``Replica`` that attaches, trains, flushes and closes, and returns the
closed ``DiLoCo``, or several. ``check`` runs the loop, makes an error of each warning of the
package, and compares the replicas.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trainers import on_store
from workers import Pool

from diloco_comm import DiLoCo

PACKAGE = "diloco_comm"
NUM_TOKENS, BLOCK_SIZE, WIDTH = 16, 8, 16


@dataclass(frozen=True)
class Replica:
    """The place of one replica.

    Attributes:
        rank: Its number; its data depend on it.
        folder: A folder of its own.
        store: The store at which replicas without a default process group meet.
    """

    rank: int
    folder: Path
    store: tuple[str, int]

    def place(self, name: str) -> dict[str, Any]:
        """Return DiLoCo's arguments for a group that meets at the store under a name."""
        return on_store(self.rank, 2, self.store, f"{self.folder.parent.name} {name}")


Loop = Callable[[Replica], DiLoCo | Sequence[DiLoCo]]


class End(NamedTuple):
    """The inner steps and applied rounds of one DiLoCo, and the hash of its outer parameters."""

    num_steps: int
    num_rounds: int
    outer_hash: str


def check(
    pool: Pool, loop: Loop, folder: Path, *expected: tuple[int, int], num_shards: int = 1
) -> None:
    """Run the loop, and compare what each DiLoCo in it has done on all replicas.

    Args:
        expected: For each DiLoCo its inner steps and the rounds that it has applied.
        num_shards: Workers of a replica; the workers with the same shard are compared.
    """
    ends = pool.run(run, loop, folder, pool.store, num_shards, timeout=110)
    assert all(own == ends[rank % num_shards] for rank, own in enumerate(ends)), ends
    found = [end[:2] for end in ends[0]]
    assert found == list(expected), f"found {found}, expected {expected}"


def run(
    rank: int, world: int, loop: Loop, folder: Path, store: tuple[str, int], num_shards: int
) -> list[End]:
    """Run the loop on one worker; each replica has a seed, and each worker a folder of its own."""
    torch.manual_seed(rank // num_shards)
    own = folder / f"worker-{rank}"
    own.mkdir()
    with no_warnings():
        attached = loop(Replica(rank // num_shards, own, store))
    ends = []
    for diloco in [attached] if isinstance(attached, DiLoCo) else attached:
        with pytest.raises(RuntimeError, match="closed"):
            diloco.flush()
        num_rounds = sum(metrics.is_applied for metrics in diloco.metrics())
        assert num_rounds == diloco.totals().num_syncs
        ends.append(End(diloco.inner_step, num_rounds, diloco.outer_hash()))
    return ends


@contextmanager
def no_warnings() -> Iterator[None]:
    """Raise where a module of the package warns, and after the block if one has logged a warning.

    The module that calls ``warnings.warn`` counts, whatever the warning's ``stacklevel`` points at.
    """
    warn = warnings.warn

    def refuse(message: Any, *args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(1).f_globals["__name__"]
        assert caller.partition(".")[0] != PACKAGE, f"{caller} warned: {message}"
        warn(message, *args, **kwargs)

    handler = Kept(logging.WARNING)
    logger = logging.getLogger(PACKAGE)
    logger.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(warnings, "warn", refuse)
            yield
    finally:
        logger.removeHandler(handler)
    assert not handler.lines, handler.lines


class Kept(logging.Handler):
    """The lines that were logged."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# ----------------------------------------------------------------------------------- small models


class Block(nn.Module):
    """A transformer block as nanoGPT has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).split(x.shape[-1], dim=-1)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A language model whose embedding is the weight of its head, too."""

    def __init__(self, width: int = WIDTH, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.wte = nn.Embedding(NUM_TOKENS, width)
        self.wpe = nn.Embedding(BLOCK_SIZE, width)
        self.h = nn.ModuleList([Block(width) for _ in range(2)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, NUM_TOKENS, bias=False)
        self.wte.weight = self.lm_head.weight
        self.register_buffer("positions", torch.arange(BLOCK_SIZE), persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(self.positions)
        for block in self.h:
            if self.checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def configure_optimizers(
        self, learning_rate: float = 1e-2, weight_decay: float = 0.1, *, fused: bool = False
    ) -> torch.optim.AdamW:
        """Decay the matrices alone, as nanoGPT does."""
        params = [param for param in self.parameters() if param.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused)


def get_batch(rank: int, step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Return tokens and the tokens after them: sequences that count up, from another start each."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    start = torch.randint(NUM_TOKENS, (rows, 1), generator=generator)
    tokens = (start + (1 + rank) * torch.arange(BLOCK_SIZE + 1)) % NUM_TOKENS
    return tokens[:, :-1], tokens[:, 1:]


def get_lr(step: int, largest: float, warmup: int, last: int) -> float:
    """Return the rate of a linear warm-up and a cosine, as nanoGPT sets it by hand."""
    if step < warmup:
        return largest * (step + 1) / (warmup + 1)
    ratio = min(1.0, (step - warmup) / (last - warmup))
    return largest * (0.1 + 0.45 * (1.0 + math.cos(math.pi * ratio)))


class ConvNet(nn.Module):
    """A small classifier of 8x8 images with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(4)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def images(rank: int, num_batches: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of images with their labels, in the way of a DataLoader."""
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(num_batches):
        labels = torch.randint(4, (8,), generator=generator)
        x = torch.randn(8, 1, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1)
        batches.append((x, labels))
    return batches
