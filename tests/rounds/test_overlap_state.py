"""Save and resume in the middle of an overlap: the same bytes, under every policy."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from choice_groups import grouped
from problems import equal, load_training, save_training, train_step
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
    "rotated": {
        "overlap": Streaming(2, 0.5),
        "wire": "int2r",
        "block_size": None,
        "error_feedback": True,
    },
    "gathered": {"overlap": Delayed(2), "wire": "sub4", "block_size": None},
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
    return model, optimizer, DiLoCo(model, optimizer, sync_every=SYNC_EVERY, **grouped(arguments))


def snapshot(model: nn.Module, diloco: DiLoCo) -> list[Tensor]:
    """Everything that a resumed run must have to the bit, after what is in flight arrived."""
    tensors = [t.detach().clone() for t in model.state_dict().values()]
    for part in diloco.parts:
        tensors.append(torch.tensor([part.round, part.last_sent, len(part.in_flight)]))
        if hasattr(part, "state"):
            tensors += [part.outer.clone(), *(t.clone() for t in part.state.tensors().values())]
            tensors.append(torch.tensor([part.state.num_steps]))
            numbers = [part.weight_sum, *part.step_norms.read()]
            tensors.append(torch.tensor(numbers, dtype=torch.float64))
        for flight in part.in_flight:
            tensors += [payload.clone() for payload, _ in flight.wait().terms]
            tensors.append(torch.tensor([flight.number, flight.sent_step, flight.apply_step]))
        residuals = (part.buffers.residual, *part.buffers.residuals.reductions())
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
                saves.append(save_training(model, optimizer, diloco))
                train_step(model, optimizer, rank, step, WIDTH)
            expected = snapshot(model, diloco)
        # One object takes all saves in turn: loading drops what it has in flight.
        model, optimizer, diloco = attach(rank, name)
        with diloco:
            matches[name] = []
            for first, file in enumerate(saves):
                load_training(file, model, optimizer, diloco)
                assert diloco.inner_step == first
                for step in range(first, NUM_STEPS):
                    train_step(model, optimizer, rank, step, WIDTH)
                matches[name].append(equal(snapshot(model, diloco), expected))
    return matches


@pytest.mark.nightly("13 s; test_state resumes after every step, the frozen runs on all policies")
@pytest.mark.parametrize("world", [2, 3])
def test_resume_after_every_inner_step(world: int, workers) -> None:
    names = list(SETTINGS) if world == 2 else ["delayed_2", "eager", "rotated", "gathered"]
    results = workers(world).run(resume_everywhere, names)
    assert results == [{name: [True] * NUM_STEPS for name in names}] * world


def settle_what_is_under_way(rank: int, world: int, names: list[str]) -> dict[str, bool]:
    """Save with rounds under way, and change the group: in this run, and in one that resumed."""
    matches = {}
    for name in names:
        file, ends = io.BytesIO(), []
        for is_resumed in (False, True):
            model, optimizer, diloco = attach(rank, name)
            with diloco:
                if is_resumed:
                    load_training(file, model, optimizer, diloco)
                else:
                    for step in range(7):
                        train_step(model, optimizer, rank, step, WIDTH)
                    file = save_training(model, optimizer, diloco)
                assert any(part.in_flight for part in diloco.parts)
                diloco.change_group(range(world))
                assert not any(part.in_flight for part in diloco.parts)
                for step in range(7, NUM_STEPS):
                    train_step(model, optimizer, rank, step, WIDTH)
                ends.append(snapshot(model, diloco))
        matches[name] = equal(*ends)
    return matches


@pytest.mark.nightly("6 s; test_saved_wires resumes rounds under way")
def test_a_round_settled_after_a_resume_counts_no_rounding_twice(workers) -> None:
    names = ["streaming", "delayed_2", "rotated", "gathered"]
    assert workers(3).run(settle_what_is_under_way, names) == [dict.fromkeys(names, True)] * 3


# ------------------------------------------------------------------------ distributed checkpoints


def checkpoint(rank: int, world: int, folder: str) -> dict[str, bool]:
    """Save with torch.distributed.checkpoint with rounds under way, load in place, go on."""
    matches = {}
    for name in SETTINGS:
        model, optimizer, diloco = attach(rank, name)
        with diloco:
            for step in range(7):
                train_step(model, optimizer, rank, step, WIDTH)
            assert any(part.in_flight for part in diloco.parts)
            local = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            dcp.save({"diloco": diloco}, checkpoint_id=f"{folder}/{name}")
            for step in range(7, NUM_STEPS):
                train_step(model, optimizer, rank, step, WIDTH)
            expected = snapshot(model, diloco)
        model, optimizer, diloco = attach(rank, name)
        with diloco:
            dcp.load({"diloco": diloco}, checkpoint_id=f"{folder}/{name}")
            model.load_state_dict(local[0])
            optimizer.load_state_dict(local[1])
            for step in range(7, NUM_STEPS):
                train_step(model, optimizer, rank, step, WIDTH)
            matches[name] = equal(snapshot(model, diloco), expected)
    return matches


@pytest.mark.nightly("8 s each; two replicas stand for three", but=["2"])
@pytest.mark.parametrize("world", [2, 3])
def test_distributed_checkpoint(world: int, tmp_path: Path, workers) -> None:
    results = workers(world).run(checkpoint, str(tmp_path))
    assert results == [dict.fromkeys(SETTINGS, True)] * world


# --------------------------------------------------------------------- other groups, other delays


def hashes_of_a_smaller_group(
    rank: int, world: int, state: dict[str, Any], overlap: Any
) -> tuple[str, str]:
    """Three replicas saved; two of them go on, with the rounds that were under way."""
    model, optimizer, diloco = attach(rank, "delayed_2")
    diloco.close()
    if rank == 2:
        dist.new_group([0, 1])
        return "", ""
    group = dist.new_group([0, 1])
    model = WithBuffer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    diloco = DiLoCo(model, optimizer, overlap=overlap, **grouped({"group": group, **PLAIN}))
    with diloco:
        diloco.load_state_dict(state)
        before = diloco.outer_hash()
        for step in range(7, NUM_STEPS):
            train_step(model, optimizer, rank, step, WIDTH)
        diloco.flush()
        return before, diloco.outer_hash()


PLAIN: dict[str, Any] = {"sync_every": SYNC_EVERY, "wire": "int8", "block_size": 32}


def save_of_three(rank: int, world: int, overlap: Any) -> tuple[dict[str, Any], str]:
    model = WithBuffer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, overlap=overlap, **grouped(PLAIN)) as diloco:
        for step in range(7):
            train_step(model, optimizer, rank, step, WIDTH)
        return copy.deepcopy(diloco.state_dict()), diloco.outer_hash()


@pytest.mark.parametrize("overlap", [Streaming(2, 0.5), Delayed(2), Eager()], ids=repr)
def test_a_smaller_group_takes_over_rounds_under_way(overlap: Any, workers) -> None:
    pool = workers(3)
    saves = pool.run(save_of_three, overlap)
    state = copy.deepcopy(saves[0][0])
    for rank in (1, 2):
        key = f"replica_{rank}"
        if key in saves[rank][0]:
            state[key] = saves[rank][0][key]
    first, second, _ = pool.run(hashes_of_a_smaller_group, state, overlap)
    assert [first[0], second[0]] == [saves[0][1], saves[1][1]]
    assert first[1] == second[1] != first[0]


def unequal_delays(rank: int, world: int) -> tuple[bool, str, bool]:
    """A replica that applies earlier has other outer parameters in between: its own part."""
    model = WithBuffer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    arguments = {**PLAIN, "overlap": Streaming(2 * rank, 0.5)}
    with DiLoCo(model, optimizer, **grouped(arguments)) as diloco:
        for step in range(4):
            train_step(model, optimizer, rank, step, WIDTH)
        saved = copy.deepcopy((diloco.state_dict(), model.state_dict(), optimizer.state_dict()))
        with pytest.raises(ValueError, match="save on every replica"):
            diloco.state_dict(shared=True)
        for step in range(4, NUM_STEPS):
            train_step(model, optimizer, rank, step, WIDTH)
        expected = snapshot(model, diloco)
    model = WithBuffer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, **grouped(arguments)) as diloco:
        diloco.load_state_dict(saved[0])
        model.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[2])
        for step in range(4, NUM_STEPS):
            train_step(model, optimizer, rank, step, WIDTH)
        is_resumed = equal(snapshot(model, diloco), expected)
        diloco.flush()
        return is_resumed, diloco.outer_hash(), "parts" in saved[0]


def test_unequal_delays_are_saved_apart(workers) -> None:
    first, second = workers(2).run(unequal_delays)
    assert first == second == (True, first[1], False)


# ------------------------------------------------------------------------ states that do not fit


def without(state: dict[str, Any], path: str) -> dict[str, Any]:
    """Copy a state without one entry; ``*`` is the first key of a mapping."""
    state = copy.deepcopy(state)
    *parents, last = path.split("/")
    inner: Any = state
    for key in parents:
        inner = inner[next(iter(inner)) if key == "*" else key]
    del inner[next(iter(inner)) if last == "*" else last]
    return state


def damaged_states(rank: int, world: int) -> list[tuple[str, str, bool]]:
    results = []
    settings = {
        "delayed_2": ["outer", "outer/*", "parts/0", "parts/1/round", "buffers", "flights/0/0/*",
                      "replica_0/own/*", "replica_0/residual/*", "inner_step", "replica_0"],
        "eager": ["replica_0", "replica_0/outer/*", "replica_0/flights/*/*/*"],
    }  # fmt: skip
    for name, paths in settings.items():
        model, optimizer, diloco = attach(rank, name)
        with diloco:
            for step in range(7):
                train_step(model, optimizer, rank, step, WIDTH)
            state = copy.deepcopy(diloco.state_dict())
            other = copy.deepcopy(state)
            outer = other.get("outer") or other["replica_0"]["outer"]
            for parameter in outer:
                outer[parameter] += 1.0
            before = snapshot(model, diloco)
            for path in paths:
                try:
                    diloco.load_state_dict(without(other, path))
                except ValueError as error:
                    kept = equal(before, snapshot(model, diloco))
                    results.append((path, str(error), kept))
                else:
                    results.append((path, "", False))
    return results


def test_a_damaged_state_is_refused_and_nothing_is_changed(workers) -> None:
    for path, error, is_kept in workers(1).run(damaged_states)[0]:
        assert is_kept, (path, error)
        assert "saved state" in error, (path, error)


def test_rounds_under_way_need_their_policy() -> None:
    model, optimizer, diloco = attach(0, "delayed")
    with diloco:
        for step in range(7):
            train_step(model, optimizer, 0, step, WIDTH)
        state = copy.deepcopy(diloco.state_dict())
        diloco.flush()
        flushed = copy.deepcopy(diloco.state_dict())
    other = attach(0, "streaming")[2]
    with other:
        with pytest.raises(ValueError, match=r"rounds under way with overlap .*Delayed"):
            other.load_state_dict(state, strict=False)
        other.load_state_dict(flushed, strict=False)
        assert other.inner_step == 7
