"""The end of training: the mean of the last round, or outer parameters without look-ahead."""

from __future__ import annotations

import copy
import io
import logging
import math
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import Method, simulate
from oracle import OuterOptimizer as Oracle
from problems import (
    INNER_LR,
    START,
    Quadratic,
    attach,
    equal,
    inner_steps,
    load_training,
    parameters_of,
    save_training,
    train_step,
)
from torch import Tensor, nn

from diloco_comm import (
    CO2,
    SGD,
    Adam,
    Blocking,
    Delayed,
    DiLoCo,
    Eager,
    HeavyBall,
    Nesterov,
    NonFiniteError,
    ReplicaMismatch,
    Streaming,
    SyncError,
)
from diloco_comm.methods.outer import Update
from diloco_comm.rounds import consensus
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


def nesterov_of_torch(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, nesterov=True)


def adam_of_torch(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.3, betas=(0.9, 0.95), eps=0.1)


# ------------------------------------------------------------------------- the mean, in float64


OUTERS = {
    "sgd": (SGD(0.7), lambda: Oracle("sgd", 0.7)),
    "heavy ball": (HeavyBall(0.3, 0.8), lambda: Oracle("heavy_ball", 0.3, 0.8)),
    "nesterov": (Nesterov(0.4, 0.9), lambda: Oracle("nesterov", 0.4, 0.9)),
    "adam": (Adam(0.3, (0.9, 0.95), 0.1), lambda: Oracle("adam", 0.3, 0.9)),
    "nesterov of torch": (nesterov_of_torch, lambda: Oracle("nesterov", LR, MOMENTUM)),
    "adam of torch": (adam_of_torch, lambda: Oracle("adam", 0.3, 0.9)),
}


def half(step: int = 0) -> float:
    return 0.5


POLICIES = {
    "blocking": (Blocking(), Method()),
    "streaming": (Streaming(2, 0.5), Method("streaming", (2, 2, 2), 0.5)),
    "delayed": (Delayed(), Method("delayed")),
    "delayed by 2": (Delayed(2), Method("delayed", rounds=2)),
    "eager": (Eager(), Method("eager")),
    "eager by 2": (Eager(2), Method("eager", rounds=2)),
    "co2": (CO2(gap=2.0, inner_lr=half), Method("co2", gap=2.0, inner_lr=half)),
    "co2 with a clip": (CO2(0.05, "gap-aware"), Method("co2", gap="gap-aware", clip=0.05)),
}
# A fragment ends on a whole round, then the other one, then none; and before the first send.
NUM_STEPS = (9, 10, 11, 2)
SPLIT: dict[str, Any] = {
    "sync_every": 3,
    "fragments": [["coordinates.0"], ["coordinates.1"]],
    "offsets": [3, 4],
}


def flush_quadratic(
    rank: int, world: int, overlap: Any, outer: Any, weights: list[float]
) -> list[list[list[float]]]:
    """Return outer parameters after flush(), flush() and then with final, and final at once."""
    found = []
    for num_steps in NUM_STEPS:
        values = []
        for finals in ([False, True], [True]):
            model = Quadratic(rank)
            optimizer = torch.optim.SGD(model.parameters(), lr=INNER_LR)
            arguments = {"overlap": overlap, "outer": outer, "weight": weights[rank], **SPLIT}
            with DiLoCo(model, optimizer, wire="fp32", **arguments) as diloco:
                for _ in range(num_steps):
                    optimizer.zero_grad()
                    model().backward()
                    optimizer.step()
                for final in finals:
                    diloco.flush(final=final)
                    values.append([part.outer.item() for part in diloco.parts])
                    assert model.values() == values[-1]
        found.append(values)
    return found


def clipped(name: str, policy: str) -> bool:
    """Whether the clip of the policy has a momentum to bound."""
    return "clip" in policy and name not in ("heavy ball", "nesterov")


@pytest.mark.each_value("200 s for all; each policy, each optimizer and each number of replicas")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_training_ends_on_the_mean_of_the_last_round(
    policy: str, outer: str, world: int, workers
) -> None:
    if clipped(outer, policy):
        pytest.skip("a clip bounds the momentum of HeavyBall and Nesterov")
    (overlap, method), (optimizer, oracle) = POLICIES[policy], OUTERS[outer]
    weights = [1.0, 2.0, 0.5][:world]
    # One replica has the whole mean when it sends; a decay of the momentum would be a step more.
    method = Method() if world == 1 and policy[:5] == "eager" else method
    results = workers(world).run(flush_quadratic, overlap, optimizer, weights)
    assert results == [results[0]] * world
    for num_steps, (flushed, after, at_once) in zip(NUM_STEPS, results[0], strict=True):
        run = simulate(
            np.array(START),
            num_steps,
            3,
            replace(method, weights=weights, delays=method.delays[:1] * world),
            oracle,
            lambda rank, _, x: inner_steps(rank % 2, x, 1),
            fragments=[[0], [1]],
            offsets=SPLIT["offsets"],
            num_replicas=world,
            flushes=True,
        )
        assert np.allclose(flushed, run.flushed[0], rtol=0, atol=2e-6)
        assert np.allclose(at_once, run.ended[0], rtol=0, atol=2e-6)
        # Under Eager the replicas' states are averaged before the one end, and after the other.
        is_exact = policy[:5] != "eager" or "adam" not in outer
        assert np.allclose(after, at_once, rtol=0, atol=1e-6 if is_exact else 0.02)


# ------------------------------------------------------------------------ payloads of all kinds


WIRES: dict[str, dict[str, Any]] = {
    "fp32": {"overlap": Blocking()},
    "int4": {"overlap": Streaming(1, 0.5), "error_feedback": True},
    "e3m0": {"overlap": CO2(gap=3.0), "outer": HeavyBall(0.3, 0.8)},
    "int2r": {"overlap": Delayed(), "outer": Adam(0.1)},
    "sub8": {"overlap": Blocking(), "outer": nesterov_of_torch},
    "topk64": {"overlap": Delayed(2), "error_feedback": True},
}


def end_on_a_wire(
    rank: int, world: int, wire: str, arguments: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return outer parameters at the end, and before the last steps less the decoded means."""
    arguments = {"outer": Nesterov(LR, MOMENTUM), **arguments, "wire": wire, "sync_every": 4}
    model, optimizer, diloco = attach(rank, fragments=2, weight=1.0 + rank, **arguments)
    with diloco:
        parts = diloco._plan.parameter_parts()
        expected: dict[int, Tensor] = {}
        for part in parts:
            part.state.step = partial(remember, part, part.state.step, expected)  # type: ignore[method-assign]
        for step in range(10):
            train_step(model, optimizer, rank, step)
        diloco.flush(final=True)
        for part in parts:
            # Padding of a rotated wire is set to zero after the step.
            for begin, end in part._padding:
                expected[part.index][begin:end] = 0.0
        return [part.outer.clone() for part in parts], [expected[part.index] for part in parts]


def remember(part: Any, step: Callable[[Update], None], expected: Any, update: Update) -> None:
    """Take an outer step; keep the value before, less the mean of the round in float64."""
    mean = part.outer.double()
    for payload, coefficient in update.terms:
        decoded = part.decode(payload, update.layout, "").double()
        mean -= coefficient * update.penalty * decoded
    expected[part.index] = mean
    step(update)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wire", WIRES)
def test_the_mean_is_what_the_wire_carried(wire: str, world: int, workers) -> None:
    results = workers(world).run(end_on_a_wire, wire, WIRES[wire])
    for outer, expected in results:
        assert equal(outer, results[0][0])
        for found, mean in zip(outer, expected, strict=True):
            assert torch.allclose(found.double(), mean, rtol=0, atol=1e-6)


# ----------------------------------------------------------------------------- without payloads


LOADED = {
    "lr": (Nesterov(0.6, 0.85), Nesterov(0.1, 0.85), 0.6 * 0.85),
    "momentum": (Nesterov(0.6, 0.85), Nesterov(0.6, 0.5), 0.6 * 0.85),
    "the defaults": (Nesterov(0.4, 0.6), None, 0.4 * 0.6),
    "torch": (nesterov_of_torch, lambda p: torch.optim.SGD(p, 0.1, 0.3, nesterov=True), 0.4),
    "no look-ahead": (HeavyBall(0.6, 0.8), HeavyBall(0.6, 0.8), 0.0),
}


@pytest.mark.parametrize("name", LOADED)
def test_a_loaded_state_loses_the_look_ahead_that_it_holds(name: str) -> None:
    saved_outer, outer, factor = LOADED[name]
    model, optimizer, diloco = attach(num_replicas=1, outer=saved_outer)
    with diloco:
        for step in range(6):
            train_step(model, optimizer, 0, step)
        before = state_of(model, diloco)
        file = save_training(model, optimizer, diloco)
    model, optimizer, diloco = attach(num_replicas=1, outer=outer)
    with diloco:
        load_training(file, model, optimizer, diloco)
        diloco.flush(final=True)
        after = state_of(model, diloco)
        assert torch.equal(after[1][0], before[1][0] + before[2][0] * factor)
        # The next state holds the same end.
        again = save_training(model, optimizer, diloco)
        load_training(again, model, optimizer, diloco)
        diloco.flush(final=True)
        assert all(equal(a, b) for a, b in zip(state_of(model, diloco), after, strict=True))


def joined_by_a_third(
    rank: int, address: tuple[str, int], *, num_steps: int, has_ended: bool
) -> tuple[nn.Module, DiLoCo]:
    """Let replicas 0 and 1 train, and end or not, before replica 2 joins them."""
    arguments = {"store": dist.TCPStore(*address, is_master=False), "replica": rank}
    arguments |= {"sync_every": 4, "outer": Nesterov(LR, MOMENTUM)}
    if rank == 2:
        model, _, diloco = attach(rank, init="join", members=range(3), **arguments)
        return model, diloco
    model, optimizer, diloco = attach(rank, num_replicas=2, **arguments)
    for step in range(num_steps):
        train_step(model, optimizer, rank, step)
    if has_ended:
        diloco.flush(final=True)
    diloco.change_group(range(3))
    return model, diloco


def end_with_a_newcomer(rank: int, world: int, address: tuple[str, int]) -> tuple[State, State]:
    """Let replica 2 come after the last whole round, and end; return the state before too."""
    model, diloco = joined_by_a_third(rank, address, num_steps=8, has_ended=False)
    with diloco:
        before = state_of(model, diloco)
        diloco.flush(final=True)
        return before, state_of(model, diloco)


def test_replicas_end_alike_with_a_newcomer_that_lacks_the_mean(workers) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = workers(3).run(end_with_a_newcomer, ("127.0.0.1", store.port))
    for before, after in results:
        assert all(equal(a, b) for a, b in zip(after, results[0][1], strict=True))
        assert torch.equal(after[1][0], before[1][0] + before[2][0] * (LR * MOMENTUM))


def end_after_a_lost_round(rank: int, world: int) -> tuple[State, State]:
    """Replica 1 spoils the round of the flush, so that no payload of a good round is left."""
    arguments = {"overlap": Delayed(), "on_nonfinite": "skip", "sync_every": 4}
    model, optimizer, diloco = attach(rank, outer=Nesterov(LR, MOMENTUM), **arguments)
    with diloco:
        for step in range(10):
            train_step(model, optimizer, rank, step)
        if rank == 1:
            next(model.parameters()).data[0, :3] = math.nan
        with pytest.raises(NonFiniteError):
            diloco.flush()
        before = state_of(model, diloco)
        diloco.flush(final=True)
        return before, state_of(model, diloco)


def test_replicas_end_alike_after_a_round_that_was_voted_down(workers) -> None:
    results = workers(2).run(end_after_a_lost_round)
    for _, after in results:
        assert all(equal(a, b) for a, b in zip(after, results[0][1], strict=True))
        assert all(bool(tensor.isfinite().all()) for tensor in after[1])


def test_a_resume_from_the_last_round_says_that_the_mean_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = io.BytesIO()
    with caplog.at_level(logging.INFO, "diloco_comm.rounds.consensus"):
        for is_resumed in (False, True):
            model, optimizer, diloco = attach(num_replicas=1, outer=HeavyBall(LR, MOMENTUM))
            with diloco:
                if is_resumed:
                    load_training(file, model, optimizer, diloco)
                else:
                    for step in range(4):
                        train_step(model, optimizer, 0, step)
                    file = save_training(model, optimizer, diloco)
                before = state_of(model, diloco)
                diloco.flush(final=True)
                assert equal(before[1], state_of(model, diloco)[1]) == is_resumed
            found = [record.getMessage() for record in caplog.records]
            assert len(found) == is_resumed
    assert "without the mean of the last round in fragments [0]" in found[0]


def lose_the_mean(rank: int, world: int, address: tuple[str, int]) -> str:
    """As ``break_off``, and the replica that fails loads its own state before the new group."""
    store = dist.TCPStore(*address, is_master=False)
    arguments = {"store": store, "replica": rank, "num_replicas": 2}
    arguments["timeout"] = 20.0 if rank else 3.0
    model, optimizer, diloco = attach(rank, sync_every=4, outer=Nesterov(LR, MOMENTUM), **arguments)
    with closing(diloco):
        for step in range(4):
            train_step(model, optimizer, rank, step)
        fail_to_end(diloco, rank)
        if rank:
            load_training(save_training(model, optimizer, diloco), model, optimizer, diloco)
        with pytest.raises(ReplicaMismatch) as error:
            diloco.change_group(range(2))
    return str(error.value)


def test_a_replica_that_lost_the_mean_of_others_is_named(workers) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for text in workers(2).run(lose_the_mean, ("127.0.0.1", store.port)):
        assert "the mean of the last round, which replica 1 no longer has since a load" in text


def end_with_other_numbers(rank: int, world: int) -> list[State]:
    """End under Eager; the state of replica 1 counts rounds as steps, and names no end."""
    arguments = {"overlap": Eager(), "sync_every": 4, "outer": Nesterov(LR, MOMENTUM)}
    model, optimizer, diloco = attach(rank, **arguments)
    with closing(diloco):
        for step in range(8):
            train_step(model, optimizer, rank, step)
        diloco.flush()
        saved = copy.deepcopy([model.state_dict(), diloco.state_dict()])
    if rank == 1:
        numbers = saved[1]["replica_1"]["parts"]["0"]
        for name in ("last_lr", "last_momentum", "ended_at", "is_mean"):
            numbers.pop(name, None)
        numbers["num_steps"] = numbers["round"]
    model, optimizer, diloco = attach(rank, **arguments)
    with closing(diloco):
        model.load_state_dict(saved[0])
        diloco.load_state_dict(saved[1])
        states = []
        for _ in range(2):
            diloco.flush(final=True)
            states.append(state_of(model, diloco))
        return states


def test_eager_replicas_at_other_steps_end_once(workers) -> None:
    first, second = workers(2).run(end_with_other_numbers)
    assert all(equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    for ends in (first, second):
        assert all(equal(a, b) for a, b in zip(*ends, strict=True))


# ------------------------------------------------------------------------- agreement and states


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
        # Training had ended before the save.
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


def test_a_saved_end_says_whether_it_is_the_mean() -> None:
    for is_resumed in (False, True):
        model, optimizer, diloco = attach(num_replicas=1)
        with diloco:
            for step in range(2):
                train_step(model, optimizer, 0, step)
            if is_resumed:
                load_training(save_training(model, optimizer, diloco), model, optimizer, diloco)
            assert not diloco.state_dict()["parts"]["0"]["is_mean"]
            diloco.flush(final=True)
            file = save_training(model, optimizer, diloco)
        model, optimizer, diloco = attach(num_replicas=1)
        with diloco:
            load_training(file, model, optimizer, diloco)
            assert diloco.state_dict()["parts"]["0"]["is_mean"] == (not is_resumed)


def join_after_the_end(rank: int, world: int, address: tuple[str, int]) -> State:
    model, diloco = joined_by_a_third(rank, address, num_steps=6, has_ended=True)
    with diloco:
        diloco.flush(final=True)
        return state_of(model, diloco)


def test_a_newcomer_knows_of_the_end(workers) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = workers(3).run(join_after_the_end, ("127.0.0.1", store.port))
    truth = workers(2).run(end, 6, [True], {})[0][0]
    for found in ends:
        assert all(equal(a, b) for a, b in zip(found, truth, strict=True))


def break_off(rank: int, world: int, address: tuple[str, int], trains_on: bool) -> State:
    """Let the first replica end training, and the second one fail right before that.

    If it ``trains_on``, the second one finds at its next send that the group is dead.
    """
    store = dist.TCPStore(*address, is_master=False)
    arguments = {"store": store, "replica": rank, "num_replicas": 2}
    # The first replica waits in vain, and then comes to the new group.
    arguments["timeout"] = 20.0 if rank else 3.0
    model, optimizer, diloco = attach(rank, sync_every=4, outer=Nesterov(LR, MOMENTUM), **arguments)
    with diloco:
        for step in range(6):
            train_step(model, optimizer, rank, step)
        fail_to_end(diloco, rank)
        if rank and trains_on:
            diloco.exchange.seal()
            with pytest.raises(SyncError):
                for step in range(6, 9):
                    train_step(model, optimizer, rank, step)
        diloco.change_group(range(2))
        return state_of(model, diloco)


def fail_to_end(diloco: DiLoCo, rank: int) -> None:
    reach: Callable[..., None] = Ending.reach

    def fail(*_: Any) -> None:
        raise SyncError("the connection is lost")

    Ending.reach = fail if rank else reach  # type: ignore[method-assign]
    try:
        with pytest.raises(SyncError):
            diloco.flush(final=True)
    finally:
        Ending.reach = reach  # type: ignore[method-assign]


@pytest.mark.parametrize("trains_on", [False, True])
def test_an_end_that_breaks_off_is_reached_by_all(trains_on: bool, workers) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = workers(2).run(break_off, ("127.0.0.1", store.port), trains_on)
    truth = workers(2).run(end, 6, [True], {})[0][0]
    for found in ends:
        assert all(equal(a, b) for a, b in zip(found, truth, strict=True))


def die_in_the_last_round(rank: int, world: int, address: tuple[str, int]) -> State:
    """Replica 2 votes to one of the others and dies: one ends training, and one lacks the round."""
    arguments = {"store": dist.TCPStore(*address, is_master=False), "replica": rank}
    arguments |= {"sync_every": 4, "outer": Nesterov(LR, MOMENTUM), "timeout": 20.0}
    model, optimizer, diloco = attach(rank, num_replicas=3, **arguments)
    exchange_parts = diloco._rounds.exchange_parts

    def die(*given: Any) -> None:
        diloco.exchange.inject_fault(action="kill", stage="vote", num_peers=1)
        exchange_parts(*given)

    with diloco:
        for step in range(6):
            train_step(model, optimizer, rank, step)
        if rank == 2:
            diloco._rounds.exchange_parts = die  # type: ignore[method-assign]
        with pytest.raises(SyncError):
            diloco.flush(final=True)
        num_steps = diloco._plan.parameter_parts()[0].state.num_steps
        assert num_steps in (1, 2)
        diloco.change_group([0, 1])
        diloco.flush(final=True)
        return [torch.tensor(num_steps)], *state_of(model, diloco)[1:]


def test_a_replica_that_missed_the_last_round_ends_on_its_mean_too(fresh_workers) -> None:
    pool = fresh_workers(3, init_group=False)
    *survivors, _ = pool.run(die_in_the_last_round, pool.store, expect_exit={2})
    truth = fresh_workers(3).run(end, 6, [True], {})[0][0]
    assert sorted(int(state[0][0]) for state in survivors) == [1, 2]
    for found in survivors:
        assert equal(found[1], truth[1]) and equal(found[2], truth[2])


# --------------------- Replicas of a changed group tell each other more, beside the end of training


@pytest.mark.parametrize(
    ("ends", "is_older"),
    [
        ([(3, False), (3, False)], False),
        ([(3, True), (3, True)], False),
        # The replicas are at different steps, so that no one ends as the other has.
        ([(3, True), (4, False)], False),
        ([(3, True), (3, False)], True),
    ],
)
def test_values_beside_count_unless_a_replica_ends(
    ends: list[tuple[int, bool]], is_older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange: Any = SimpleNamespace(members=(0, 1), replica=0, joined=())
    part: Any = SimpleNamespace(index=0)
    told = [[[[step, has_ended, True, None, None]], f"of {step}"] for step, has_ended in ends]
    monkeypatch.setattr(consensus, "gather_json", lambda *_: told)
    found = consensus.end_like_others(exchange, [part], "", lambda _: nullcontext(), "own")
    assert found == (None if is_older else [f"of {step}" for step, _ in ends])
