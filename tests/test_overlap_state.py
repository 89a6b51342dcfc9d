"""Save and resume in the middle of an overlap: the same bytes, under every policy."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from problems import equal, train_step
from torch import Tensor, nn

from diloco_comm import CO2, Delayed, DiLoCo, Eager, HeavyBall, Nesterov, Streaming

SYNC_EVERY = 3
NUM_STEPS = 11
WIDTH = 8

SETTINGS: dict[str, dict[str, Any]] = {
    "streaming": {"overlap": Streaming(2, 0.5), "error_feedback": True},
    "delayed": {"overlap": Delayed(), "rounding": "stochastic"},
    "delayed_2": {"overlap": Delayed(2), "error_feedback": True, "average_buffers": True},
    "eager": {"overlap": Eager(), "weight": 2.0},
    "eager_2": {"overlap": Eager(2, "skip"), "error_feedback": True},
    "co2": {"overlap": CO2(0.01, "gap-aware"), "outer": HeavyBall(0.7, 0.5)},
}


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layers(x)))


def attach(rank: int, name: str) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
    model = WithBuffer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"fragments": 2, "wire": "int4", "block_size": 32, "outer": Nesterov(0.4, 0.9)}
    arguments = {**settings, **SETTINGS[name]}
    if "weight" in arguments:
        arguments["weight"] = 1.0 + rank
    return model, optimizer, DiLoCo(model, optimizer, sync_every=SYNC_EVERY, **arguments)


def snapshot(model: nn.Module, diloco: DiLoCo) -> list[Tensor]:
    """Everything that a resumed run must have to the bit, after what is in flight arrived."""
    tensors = [t.detach().clone() for t in model.state_dict().values()]
    for part in diloco.parts:
        tensors.append(torch.tensor([part.round, part.last_sent, len(part.in_flight)]))
        if hasattr(part, "state"):
            tensors += [part.outer.clone(), *(t.clone() for t in part.state.tensors().values())]
            tensors.append(torch.tensor([part.state.num_steps]))
            numbers = [part.weight_sum, part.step_norm, part.largest_norm]
            tensors.append(torch.tensor(numbers, dtype=torch.float64))
        for flight in part.in_flight:
            tensors += [payload.clone() for payload, _ in flight.wait().terms]
            tensors.append(torch.tensor([flight.number, flight.sent_step, flight.apply_step]))
        residuals = (part.slot.residual, part.slot.reduce_residual)
        tensors += [residual.clone() for residual in residuals if residual is not None]
    return tensors


def resume_everywhere(rank: int, world: int, names: list[str]) -> dict[str, list[bool]]:
    """Train in one go, saving after every step, then resume from each of the saves."""
    matches: dict[str, list[bool]] = {}
    for name in names:
        saves = []
        model, optimizer, diloco = attach(rank, name)
        with diloco:
            for step in range(NUM_STEPS):
                file = io.BytesIO()
                state = {"diloco": diloco.state_dict(), "model": model.state_dict()}
                torch.save({**state, "optimizer": optimizer.state_dict()}, file)
                saves.append(file)
                train_step(model, optimizer, rank, step, WIDTH)
            expected = snapshot(model, diloco)
        # One object takes all saves in turn: loading drops what it has in flight.
        model, optimizer, diloco = attach(rank, name)
        with diloco:
            matches[name] = []
            for first, file in enumerate(saves):
                file.seek(0)
                state = torch.load(file, weights_only=True)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                diloco.load_state_dict(state["diloco"])
                assert diloco.inner_step == first
                for step in range(first, NUM_STEPS):
                    train_step(model, optimizer, rank, step, WIDTH)
                matches[name].append(equal(snapshot(model, diloco), expected))
    return matches


@pytest.mark.parametrize("world", [2, 3])
def test_resume_after_every_inner_step(world: int, workers) -> None:
    names = list(SETTINGS) if world == 2 else ["delayed_2", "eager"]
    results = workers(world).run(resume_everywhere, names)
    assert results == [{name: [True] * NUM_STEPS for name in names}] * world
