"""Small training problems whose course is known or easy to follow by hand."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from choice_groups import grouped
from torch import Tensor, nn

from diloco_comm import DiLoCo

# f_m(x) = 0.5 (x - b_m)' A_m (x - b_m), the quadratic problem of the worked examples.
MATRICES = (((1.0, 0.2), (0.2, 0.5)), ((0.6, -0.1), (-0.1, 1.2)))
TARGETS = ((1.0, -1.0), (3.0, 2.0))
START = (0.0, 0.5)
INNER_LR = 0.1


class Quadratic(nn.Module):
    """Worker ``rank``'s problem; the two coordinates are parameters of their own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.coordinates = nn.ParameterList([nn.Parameter(torch.tensor(x)) for x in START])
        # Not persistent: persistent buffers are made alike on all replicas.
        self.register_buffer("matrix", torch.tensor(MATRICES[rank % 2]), persistent=False)
        self.register_buffer("target", torch.tensor(TARGETS[rank % 2]), persistent=False)

    def forward(self) -> Tensor:
        error = torch.stack(list(self.coordinates)) - self.target
        return 0.5 * error @ self.matrix @ error

    def values(self) -> list[float]:
        return [coordinate.item() for coordinate in self.coordinates]


def inner_steps(rank: int, x: np.ndarray, num_steps: int) -> np.ndarray:
    """Take plain gradient steps on worker ``rank``'s problem in float64."""
    matrix, target = np.array(MATRICES[rank]), np.array(TARGETS[rank])
    for _ in range(num_steps):
        x = x - INNER_LR * matrix @ (x - target)
    return x


class Regression(nn.Module):
    """A two-layer network with a norm; ``batch`` draws data that differ by rank and step."""

    def __init__(self, width: int = 24, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def batch(rank: int, step: int, width: int = 24, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(rows, width, generator=generator)
    return x, x.sum(1, keepdim=True) + rank


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, width: int = 24
) -> float:
    """Take one step on the batch of this rank and step; returns the loss."""
    x, y = batch(rank, step, width)
    loss = nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def ulps(a: Tensor, b: Tensor, *scales: Tensor) -> float:
    """Return the largest difference in fp32 units of the largest magnitude at each place."""
    largest = torch.stack([t.abs() for t in (a, b, *scales)]).amax(0).float()
    # Spacing of fp32 at `largest`; its exponent field gives the power of two.
    spacing = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 24)
    return ((a - b).abs() / spacing.clamp_min(2.0**-149)).max().item()


def parameters_of(model: nn.Module) -> list[Tensor]:
    """Copy the parameters."""
    return [param.detach().clone() for param in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Compare lists of tensors bit by bit; NaN equals itself."""
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(_bits(x), _bits(y)) for x, y in zip(a, b, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def attach(rank: int = 0, **arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
    model = Regression(width=arguments.pop("width", 24), seed=arguments.pop("model_seed", 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    arguments = {"sync_every": 2, "wire": "fp32", **arguments}
    return model, optimizer, DiLoCo(model, optimizer, **grouped(arguments))


def everything(model: nn.Module, diloco: DiLoCo) -> list[Tensor]:
    tensors = [p.detach().clone() for p in model.parameters()]
    for part in diloco.parts:
        tensors += [part.outer.clone(), *(t.clone() for t in part.state.tensors().values())]
    return tensors


def save_training(model: nn.Module, optimizer: torch.optim.Optimizer, diloco: DiLoCo) -> io.BytesIO:
    """Return what a training saves, as ``torch.save`` writes it."""
    file = io.BytesIO()
    state = {"diloco": diloco.state_dict(), "model": model.state_dict()}
    torch.save({**state, "optimizer": optimizer.state_dict()}, file)
    return file


def load_training(
    file: io.BytesIO, model: nn.Module, optimizer: torch.optim.Optimizer, diloco: DiLoCo
) -> None:
    """Go on with what ``save_training`` returned."""
    file.seek(0)
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    diloco.load_state_dict(state["diloco"])
