"""The end of training: Nesterov's outer parameters without their look-ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problems import attach, equal, parameters_of, train_step
from torch import Tensor

from diloco_comm import (
    SGD,
    Adam,
    Blocking,
    Delayed,
    DiLoCo,
    Eager,
    HeavyBall,
    Nesterov,
    ReplicaMismatch,
    Streaming,
    SyncError,
)
from diloco_comm.rounds.consensus import Ending

LR, MOMENTUM = 0.5, 0.8
State = tuple[list[Tensor], list[Tensor], list[Tensor]]


def state_of(model: torch.nn.Module, diloco: DiLoCo) -> State:
    """Return local parameters, outer parameters and momenta."""
    parts = diloco._plan.parameter_parts()
    momenta = [tensor.clone() for part in parts for tensor in part.state.tensors().values()]
    return parameters_of(model), [part.outer.clone() for part in parts], momenta


def end(
    rank: int, world: int, steps: int, finals: list[bool], arguments: dict[str, Any]
) -> list[State]:
    """Train and flush; return the states after each flush."""
    arguments = {"outer": Nesterov(LR, MOMENTUM), "sync_every": 4, **arguments}
    model, optimizer, diloco = attach(rank, **arguments)
    with diloco:
        for step in range(steps):
            train_step(model, optimizer, rank, step)
        states = []
        for final in finals:
            diloco.flush(final=final)
            states.append(state_of(model, diloco))
        return states


POLICIES = [Blocking(), Streaming(delay=1, alpha=0.5), Delayed(), Eager()]


@pytest.mark.parametrize("overlap", POLICIES, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("steps", [6, 8], ids=["remainder", "whole round"])
def test_the_look_ahead_is_taken_back_once(overlap: Any, steps: int, workers) -> None:
    arguments = {"overlap": overlap, "fragments": 2}
    results = workers(2).run(end, steps, [False, True, True, False], arguments)
    before, after, *more = results[0]
    for outer, momentum, ended in zip(before[1], before[2], after[1], strict=True):
        assert momentum.any()
        assert torch.equal(ended, outer + momentum * (LR * MOMENTUM))
    assert equal(before[2], after[2])
    local = torch.cat([tensor.flatten() for tensor in after[0]])
    assert torch.equal(local.sort()[0], torch.cat(after[1]).sort()[0])
    for states in results:
        for found in (states[1], *more):
            assert all(equal(a, b) for a, b in zip(found, after, strict=True))


@pytest.mark.parametrize("outer", [SGD(1.0), HeavyBall(0.3, 0.9), Adam()], ids=lambda o: str(o))
def test_other_optimizers_are_not_ahead(outer: Any, workers) -> None:
    for before, after in workers(2).run(end, 6, [False, True], {"outer": outer}):
        assert all(equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_nesterov_of_torch_is_ahead_too(workers) -> None:
    outer = nesterov_of_torch
    for before, after in workers(2).run(end, 6, [False, True], {"outer": outer}):
        assert torch.equal(after[1][0], before[1][0] + before[2][0] * (LR * MOMENTUM))


def nesterov_of_torch(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, nesterov=True)


def one_ends(rank: int, world: int) -> str:
    with attach(rank)[2] as diloco, pytest.raises(ReplicaMismatch) as error:
        diloco.flush(final=rank == 1)
    return str(error.value)


def test_all_replicas_end_or_none(workers) -> None:
    for text in workers(2).run(one_ends):
        assert "final= of flush() differs between replicas" in text


def go_on(rank: int, world: int) -> tuple[State, State, str]:
    """Go on after an end, in the same process and in a resumed one."""
    states = []
    model, optimizer, diloco = attach(rank, sync_every=4, outer=Nesterov(LR, MOMENTUM))
    with diloco:
        for step in range(6):
            train_step(model, optimizer, rank, step)
        diloco.flush(final=True)
        saved = copy.deepcopy([model.state_dict(), diloco.state_dict(), optimizer.state_dict()])
        ended = state_of(model, diloco)
        for step in range(6, 12):
            train_step(model, optimizer, rank, step)
        diloco.flush(final=True)
        states.append(state_of(model, diloco))
    model, optimizer, diloco = attach(rank, sync_every=4, outer=Nesterov(LR, MOMENTUM))
    with diloco:
        model.load_state_dict(saved[0])
        diloco.load_state_dict(saved[1])
        # The look-ahead was taken back before the save.
        diloco.flush(final=True)
        assert all(equal(a, b) for a, b in zip(state_of(model, diloco), ended, strict=True))
        for step in range(6, 12):
            train_step(model, optimizer, rank, step)
        diloco.flush(final=True)
        states.append(state_of(model, diloco))
        return states[0], states[1], diloco.outer_hash()


def test_training_may_go_on_after_an_end(workers) -> None:
    results = workers(2).run(go_on)
    for first, resumed, digest in results:
        assert all(equal(a, b) for a, b in zip(first, resumed, strict=True))
        assert digest == results[0][2]


def test_a_fresh_state_asks_for_nothing_that_older_files_lack() -> None:
    """``torch.distributed.checkpoint`` looks in a file for each key of the state of a fresh run."""
    model, optimizer, diloco = attach(num_replicas=1)
    with diloco:
        assert not {"last_lr", "ended_at"} & diloco.state_dict()["parts"]["0"].keys()
        for step in range(2):
            train_step(model, optimizer, 0, step)
        assert {"last_lr", "ended_at"} <= diloco.state_dict()["parts"]["0"].keys()


def join_after_the_end(rank: int, world: int, address: tuple[str, int]) -> State:
    arguments = {"store": dist.TCPStore(*address, is_master=False), "replica": rank}
    arguments |= {"sync_every": 4, "outer": Nesterov(LR, MOMENTUM)}
    if rank == 2:
        model, _, diloco = attach(rank, init="join", members=range(3), **arguments)
    else:
        model, optimizer, diloco = attach(rank, num_replicas=2, **arguments)
        for step in range(6):
            train_step(model, optimizer, rank, step)
        diloco.flush(final=True)
        diloco.change_group(range(3))
    with diloco:
        diloco.flush(final=True)
        return state_of(model, diloco)


def test_a_newcomer_knows_of_the_end(workers) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = workers(3).run(join_after_the_end, ("127.0.0.1", store.port))
    truth = workers(2).run(end, 6, [True], {})[0][0]
    for found in ends:
        assert all(equal(a, b) for a, b in zip(found, truth, strict=True))


def break_off(rank: int, world: int, address: tuple[str, int]) -> State:
    """Let the first replica end training, and the second one fail right before that."""
    store = dist.TCPStore(*address, is_master=False)
    arguments = {"store": store, "replica": rank, "num_replicas": 2}
    # The first replica waits in vain, and then comes to the new group.
    arguments["timeout"] = 20.0 if rank else 3.0
    model, optimizer, diloco = attach(rank, sync_every=4, outer=Nesterov(LR, MOMENTUM), **arguments)
    reach: Callable[..., None] = Ending.reach

    def fail(*_: Any) -> None:
        raise SyncError("the connection is lost")

    with diloco:
        for step in range(6):
            train_step(model, optimizer, rank, step)
        Ending.reach = fail if rank else reach  # type: ignore[method-assign]
        try:
            with pytest.raises(SyncError):
                diloco.flush(final=True)
        finally:
            Ending.reach = reach  # type: ignore[method-assign]
        diloco.change_group(range(2))
        return state_of(model, diloco)


def test_an_end_that_breaks_off_is_reached_by_all(workers) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = workers(2).run(break_off, ("127.0.0.1", store.port))
    truth = workers(2).run(end, 6, [True], {})[0][0]
    for found in ends:
        assert all(equal(a, b) for a, b in zip(found, truth, strict=True))
