"""Save and resume: train k, save, load in new objects, train on: the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from choice_groups import grouped
from problems import Regression, equal, load_training, save_training, train_step
from torch import Tensor, nn

from diloco_comm import SGD, Adam, DiLoCo, FromTorch, Nesterov

SYNC_EVERY = 4
NUM_STEPS = 10

OUTERS: dict[str, Any] = {
    "sgd": lambda: SGD(1.0),
    "nesterov": lambda: Nesterov(0.7, 0.9),
    "adam": lambda: Adam(0.1),
    "torch_adam": lambda: FromTorch(lambda p: torch.optim.Adam(p, lr=0.05)),
    "torch_sgd": lambda: FromTorch(lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)),
}


def attach(outer: str, **arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"fragments": 3, "outer": OUTERS[outer](), "wire": "int8", "block_size": 64}
    return (
        model,
        optimizer,
        DiLoCo(model, optimizer, sync_every=SYNC_EVERY, **grouped({**settings, **arguments})),
    )


def snapshot(model: nn.Module, diloco: DiLoCo) -> list[Tensor]:
    """Everything that a resumed run must have to the bit."""
    tensors = [param.detach().clone() for param in model.parameters()]
    for part in diloco.parts:
        tensors += [part.outer.clone(), *(t.clone() for t in part.state.tensors().values())]
        residuals = (part.buffers.residual, *part.buffers.residuals.reductions())
        tensors += [residual.clone() for residual in residuals if residual is not None]
        tensors.append(torch.tensor([part.round, part.last_sent, part.state.num_steps]))
    return tensors


def resume_everywhere(rank: int, world: int, outer: str, arguments: dict[str, Any]) -> list[bool]:
    """Train in one go, remembering a save after every step; then resume from each of them."""
    saves = []
    model, optimizer, diloco = attach(outer, **arguments)
    with diloco:
        for step in range(NUM_STEPS):
            saves.append(save_training(model, optimizer, diloco))
            train_step(model, optimizer, rank, step)
        expected = snapshot(model, diloco)
    matches = []
    for first, file in enumerate(saves):
        model, optimizer, diloco = attach(outer, **arguments)
        with diloco:
            load_training(file, model, optimizer, diloco)
            assert diloco.inner_step == first
            for step in range(first, NUM_STEPS):
                train_step(model, optimizer, rank, step)
            matches.append(equal(snapshot(model, diloco), expected))
    return matches


@pytest.mark.nightly("4 s each; they differ in the outer optimizer", but=["torch_adam"])
@pytest.mark.parametrize("outer", OUTERS)
def test_resume_after_every_inner_step(outer: str, workers) -> None:
    arguments = {"error_feedback": outer == "nesterov"}
    assert workers(2).run(resume_everywhere, outer, arguments) == [[True] * NUM_STEPS] * 2


def checkpoint(rank: int, world: int, folder: str, outer: str) -> tuple[bool, bool]:
    """Save with torch.distributed.checkpoint; what differs between replicas has its own keys."""
    own = f"replica_{rank}"
    half = 5
    model, optimizer, diloco = attach(outer, error_feedback=True)
    with diloco:
        for step in range(half):
            train_step(model, optimizer, rank, step)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save({"diloco": diloco, own: state}, checkpoint_id=folder)
        for step in range(half, NUM_STEPS):
            train_step(model, optimizer, rank, step)
        expected = snapshot(model, diloco)
    model, optimizer, diloco = attach(outer, error_feedback=True)
    with diloco:
        _fill_optimizer_state(optimizer)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load({"diloco": diloco, own: state}, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        resumed_at_half = diloco.inner_step == half
        for step in range(half, NUM_STEPS):
            train_step(model, optimizer, rank, step)
        return resumed_at_half, equal(snapshot(model, diloco), expected)


def _fill_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the entries that a checkpoint is loaded into, without a step that is counted."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            zeros = torch.zeros_like(param)
            optimizer.state[param] = {
                "step": torch.tensor(0.0),
                "exp_avg": zeros,
                "exp_avg_sq": zeros.clone(),
            }


@pytest.mark.nightly("1 s each", but=["3-torch_adam"])
@pytest.mark.parametrize("outer", ["nesterov", "torch_adam"])
@pytest.mark.parametrize("world", [2, 3])
def test_distributed_checkpoint(world: int, outer: str, tmp_path: Path, workers) -> None:
    assert workers(world).run(checkpoint, str(tmp_path), outer) == [(True, True)] * world


# ----------------------------------------------------------------- what a saved state looks like


def test_state_has_the_parameters_names_and_shapes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2).bfloat16())
    model[0].to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=1, fragments=2, outer=Adam()) as diloco:
        state = diloco.state_dict()
        assert set(state["buffers"]) == {"exp_avg", "exp_avg_sq"}
        for tensors in (state["outer"], *state["buffers"].values()):
            assert list(tensors) == [name for name, _ in model.named_parameters()]
            for name, param in model.named_parameters():
                assert tensors[name].shape == param.shape
                assert tensors[name].dtype == torch.float32
        for name, param in model.named_parameters():
            assert torch.equal(state["outer"][name], param.detach().float())
        assert not any(key.startswith("replica_") for key in state)
        state["outer"]["0.weight"].zero_()
        assert diloco.parts[0].outer[: model[0].weight.numel()].abs().sum() == 0


def test_a_state_that_differs_between_replicas_is_not_saved_alone() -> None:
    _, _, diloco = attach("sgd", error_feedback=True)
    with diloco:
        assert "replica_0" in diloco.state_dict()
        with pytest.raises(ValueError, match="save on every replica, not on one alone"):
            diloco.state_dict(shared=True)
    _, _, diloco = attach("sgd")
    with diloco:
        assert diloco.state_dict(shared=True)["inner_step"] == 0


def load_state_of_another(rank: int, world: int) -> str:
    """Replica 1 gets what replica 0 saved alone."""
    model, optimizer, diloco = attach("sgd", error_feedback=True)
    with diloco:
        for step in range(SYNC_EVERY):
            train_step(model, optimizer, rank, step)
        blobs = [None] * world
        torch.distributed.all_gather_object(blobs, diloco.state_dict())
        try:
            diloco.load_state_dict(blobs[0])
            return ""
        except ValueError as error:
            diloco.load_state_dict(blobs[0], strict=False)
            assert all(part.buffers.residual.abs().sum() == 0 for part in diloco.parts)
            return str(error)


def test_a_state_without_this_replicas_residuals_is_refused(workers) -> None:
    first, second = workers(2).run(load_state_of_another)
    assert first == ""
    assert "no error-feedback residuals that fit replica 1" in second


def test_a_state_that_cannot_be_read_is_refused() -> None:
    _, _, diloco = attach("sgd")
    with diloco:
        state = diloco.state_dict()
        with pytest.raises(ValueError, match="saved state has version 99, 1 expected"):
            diloco.load_state_dict({"version": 99})
        with pytest.raises(TypeError, match="must be a dictionary, got list"):
            diloco.load_state_dict([state])
        with pytest.raises(ValueError, match="the saved state lacks parts/2"):
            parts = {key: state["parts"][key] for key in "01"}
            diloco.load_state_dict({**state, "parts": parts})
    # The state says another optimizer than its buffers do.
    layout = {**json.loads(state["layout"]), "outer": {"name": "Nesterov"}}
    _, _, other = attach("nesterov")
    with other, pytest.raises(ValueError, match=r"has buffers \[\], this one \['momentum'\]"):
        other.load_state_dict({**state, "layout": json.dumps(layout)})
