"""The demo's model: a byte-level transformer small enough for four replicas on two cores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the transformer; the defaults give 0.4 million parameters.

    ``deviation`` is the standard deviation of the initial weights.
    """

    context: int = 64
    width: int = 128
    num_layers: int = 2
    num_heads: int = 4
    deviation: float = 0.02


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteTransformer(nn.Module):
    """Predict the next byte; input and output embeddings are tied."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    # Residual branches start small: GPT-2's initialisation.
                    branch = name.endswith(("out.weight", "down.weight"))
                    factor = 1.0 / math.sqrt(2 * config.num_layers) if branch else 1.0
                    parameter.normal_(0.0, factor * config.deviation, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, 256] for int64 tokens [batch, length]."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def byte_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte; int64 [batch, length] both."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
