"""Rounds on rotated and sparse wires: equal outer parameters under every policy; refusals."""

from __future__ import annotations

import copy
import json
import math
from contextlib import closing
from typing import Any

import pytest
import torch
from choice_groups import grouped
from problems import Regression, train_step
from torch import nn

from diloco_comm import (
    SGD,
    Adam,
    Blocking,
    Delayed,
    DiLoCo,
    Eager,
    NonFiniteError,
    Streaming,
    SyncError,
    all_reduce,
    shutdown,
)
from diloco_comm.asynchronous.worker import AsyncDiLoCo
from diloco_comm.integrations.ddp_hook import QuantizedAllReduce

WIDTH = 24


def attach(**arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
    model = Regression(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    settings = {"sync_every": 3, "fragments": 2, "outer": SGD(1.0), "chunk_bytes": 64}
    return model, optimizer, DiLoCo(model, optimizer, **grouped({**settings, **arguments}))


def survive(rank: int, world: int, wires: list[str]) -> list[Any]:
    """Replica 1 leaves in the middle of a round; the others go on without it."""
    ends, others = [], [number for number in range(world) if number != 1]
    for wire in wires:
        for overlap in (Blocking(), Streaming(2, 0.5), Delayed(), Eager()):
            options = {"error_feedback": wire.startswith("topk"), "timeout": 60}
            model, optimizer, diloco = attach(wire=wire, overlap=overlap, **options)
            with closing(diloco):
                while diloco.inner_step < 18:
                    if rank == 1 and diloco.inner_step == 8:
                        break
                    try:
                        train_step(model, optimizer, rank, diloco.inner_step, WIDTH)
                    except SyncError:
                        diloco.change_group(others)
                if rank == 1:
                    continue
                diloco.flush()
                rounds = [part.round for part in diloco.parts]
                local = torch.cat([p.detach().flatten() for p in model.parameters()])
                ends.append((diloco.exchange.members, rounds, diloco.outer_hash(), local.tolist()))
    return ends


@pytest.mark.nightly("up to 6 s each; they differ in wire and replicas", but=["3-int2r"])
@pytest.mark.parametrize(
    ("world", "wire"),
    # From 5 to 4 replicas, sub2 goes from a mean on int1r to payloads that all replicas add up.
    [(3, "int2r"), (3, "int1r"), (3, "sub8"), (3, "topk64"), (5, "sub2")],
)
def test_survivors_stay_bit_identical(world: int, wire: str, workers) -> None:
    first, _, *rest = workers(world).run(survive, [wire])
    for other in rest:
        assert [end[:3] for end in first] == [end[:3] for end in other]
    living = (0, *range(2, world))
    assert all(members == living and min(rounds) >= 3 for members, rounds, *_ in first)
    assert len({end[2] for end in first}) == 4
    assert all(math.isfinite(value) for end in first for value in end[3])


def resume(rank: int, world: int, overlap: Any) -> tuple[str, str, set[str]]:
    """Save in the middle of a round; go on, and go on from what was saved."""
    ends, state, local = [], {}, {}
    for is_resumed in (False, True):
        model, optimizer, diloco = attach(wire="sub2", overlap=overlap, fragments=1)
        with diloco:
            if is_resumed:
                model.load_state_dict(local)
                diloco.load_state_dict(state)
            for step in range(7 if is_resumed else 0, 14):
                if step == 7 and not is_resumed:
                    state = copy.deepcopy(diloco.state_dict())
                    local = copy.deepcopy(model.state_dict())
                train_step(model, optimizer, rank, step, WIDTH)
            diloco.flush()
            ends.append(diloco.outer_hash())
    in_flight = {
        flight.get("mean_wire", "")
        for value in _texts(state)
        for flight in json.loads(value)["rounds"]
    }
    return ends[0], ends[1], in_flight


def _texts(state: Any) -> list[str]:
    """The entries of a saved state that list rounds under way."""
    if isinstance(state, dict):
        return [text for value in state.values() for text in _texts(value)]
    return [state] if isinstance(state, str) and '"rounds"' in state else []


@pytest.mark.parametrize("overlap", [Streaming(2, 0.5), Delayed(), Eager()], ids=repr)
def test_a_saved_round_keeps_the_wire_of_its_mean(overlap: Any, workers) -> None:
    results = workers(5).run(resume, overlap)
    assert len({end for one, other, _ in results for end in (one, other)}) == 1
    assert [wires for *_, wires in results] == [{"" if overlap == Eager() else "int1r"}] * 5


def hashes_with(rank: int, world: int, arguments: dict[str, Any]) -> str:
    model, optimizer, diloco = attach(wire="int2r", **arguments)
    with diloco:
        for step in range(9):
            train_step(model, optimizer, rank, step, WIDTH)
        return diloco.outer_hash()


@pytest.mark.parametrize(
    "arguments", [{"error_feedback": True}, {"outer": Adam()}, {"seed": 5}, {"lanes": 2}], ids=repr
)
def test_settings_of_int2r(arguments: dict[str, Any], workers) -> None:
    plain = workers(3).run(hashes_with, {})
    other = workers(3).run(hashes_with, arguments)
    assert len(set(plain)) == len(set(other)) == 1
    assert (plain[0] == other[0]) == ("lanes" in arguments)


def huge_value(rank: int, world: int, wire: str, value: float) -> tuple[str, bool]:
    model, _, diloco = attach(wire=wire, attach=False)
    with diloco:
        before = diloco.outer_hash()
        if rank == 1:
            with torch.no_grad():
                next(model.parameters()).view(-1)[3] = value
        try:
            for _ in range(3):
                diloco.step()
        except NonFiniteError as error:
            return f"{error.replicas}", before == diloco.outer_hash()
    return "", False


@pytest.mark.parametrize("wire", ["int2r", "sub8"])
@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e36])
def test_a_value_above_2_to_116_is_refused(wire: str, value: float, workers) -> None:
    assert workers(3).run(huge_value, wire, value) == [("(1,)", True)] * 3


def mean_of_ranks(rank: int, world: int, wire: str) -> tuple[list[float], float]:
    x = torch.arange(5000.0).sin() + rank
    first = all_reduce(x.clone(), wire=wire)
    total = first.clone()
    for _ in range(99):
        total += all_reduce(x.clone(), wire=wire)
    exact = torch.arange(5000.0).sin() + (world - 1) / 2
    shutdown()
    return first[:9].tolist(), float((total / 100 - exact).norm() / (first - exact).norm())


@pytest.mark.parametrize("wire", ["int1r", "sub4"])
def test_all_reduce_takes_new_signs_for_each_call(wire: str, workers) -> None:
    results = workers(3).run(mean_of_ranks, wire)
    assert len({tuple(first) for first, _ in results}) == 1
    # One hundred independent errors: a tenth of one.
    assert all(ratio < 0.15 for _, ratio in results)


REFUSED = [
    (
        {"wire": "int1r", "error_feedback": True},
        "error_feedback=True does not go with wire 'int1r'",
    ),
    ({"wire": "sub8", "error_feedback": True}, "error_feedback=True does not go with wire 'sub8'"),
    (
        {"wire": "int2r", "rounding": "stochastic"},
        "rounding='stochastic' does not go with wire 'int2r'",
    ),
    ({"wire": "topk64"}, "wire 'topk64' needs error_feedback=True"),
    ({"wire": "sub4", "block_size": 256}, "wire sub4 has blocks of 1024, got block_size=256"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        DiLoCo(model, optimizer, sync_every=2, **grouped(arguments))
    with pytest.raises(ValueError, match=message):
        AsyncDiLoCo(model, optimizer, server="tcp://127.0.0.1:9", **grouped(arguments))
    if "rounding" in arguments:
        with pytest.raises(ValueError, match=message):
            all_reduce(torch.zeros(3), **arguments)


def test_the_hook_of_ddp_refuses_feedback_on_a_rotated_wire() -> None:
    with pytest.raises(ValueError, match="does not go with wire 'int2r' in this hook"):
        QuantizedAllReduce(wire="int2r", error_feedback=True)
