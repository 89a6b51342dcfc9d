"""A step whose exchanges partly fail, is interrupted, or cannot be sent."""

from __future__ import annotations

import copy
import math
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from problems import Regression, equal, parameters_of, train_step
from torch import nn

import diloco_comm
from diloco_comm import (
    Blocking,
    Delayed,
    DiLoCo,
    Eager,
    Nesterov,
    NonFiniteError,
    PeerLeft,
    Streaming,
    SyncError,
)
from diloco_comm.exchange import collective
from diloco_comm.exchange.round import Round


def attach(**arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    arguments = {"sync_every": 2, "wire": "fp32", **arguments}
    return model, optimizer, DiLoCo(model, optimizer, **grouped(arguments))


# ------------------------------------------------------------- several fragments due at one step


def one_of_three_fails(rank: int, world: int, bad: int) -> tuple[Any, ...]:
    """Replica 1 spoils one of three fragments that are due at the same step."""
    model, optimizer, diloco = attach(fragments=3, offsets=[2, 2, 2])
    with diloco:
        train_step(model, optimizer, rank, 0)
        if rank == 1:
            diloco.parts[bad].tensors()[0].fill_(math.nan)
        optimizer.zero_grad()
        with pytest.raises(NonFiniteError) as info:
            optimizer.step()
        rounds = [part.round for part in diloco.parts]
        in_flight = [len(part.in_flight) for part in diloco.parts]
        saved = diloco.state_dict()["inner_step"]
        diloco.parts[bad].tensors()[0].zero_()
        for step in range(2, 4):
            train_step(model, optimizer, rank, step)
        after = [part.round for part in diloco.parts]
        local = parameters_of(model)
        with diloco.outer_parameters():
            is_applied = equal(local, parameters_of(model))
        return info.value.fragment, rounds, in_flight, saved, after, is_applied, diloco.outer_hash()


@pytest.mark.parametrize("bad", [0, 1])
def test_the_other_fragments_of_a_failed_step_are_applied(bad: int, workers) -> None:
    first, second = workers(2).run(one_of_three_fails, bad)
    assert first == second
    rounds = [int(index != bad) for index in range(3)]
    assert first[:-1] == (bad, rounds, [0, 0, 0], 2, [r + 1 for r in rounds], True)


def callback_raises(rank: int, world: int) -> tuple[list[int], bool, list[int]]:
    model, optimizer, diloco = attach(fragments=2, offsets=[2, 2])
    told = []

    def refuse(metrics: Any) -> None:
        raise LookupError(f"fragment {metrics.fragment}")

    with diloco:
        diloco.on_sync(refuse)
        diloco.on_sync(lambda metrics: told.append(metrics.fragment))
        train_step(model, optimizer, rank, 0)
        with pytest.raises(LookupError, match="fragment 0"):
            train_step(model, optimizer, rank, 1)
        local = parameters_of(model)
        with diloco.outer_parameters():
            return [part.round for part in diloco.parts], equal(local, parameters_of(model)), told


def test_a_callback_that_raises_keeps_nothing_from_being_applied_and_told(workers) -> None:
    assert workers(2).run(callback_raises) == [([1, 1], True, [0, 1])] * 2


def callback_raises_beside_a_failure(rank: int, world: int) -> tuple[int, str]:
    model, optimizer, diloco = attach(fragments=2, offsets=[2, 2])

    def refuse(metrics: Any) -> None:
        raise LookupError(f"fragment {metrics.fragment}")

    with diloco:
        diloco.on_sync(refuse)
        train_step(model, optimizer, rank, 0)
        diloco.parts[0].tensors()[0].fill_(math.nan)
        with pytest.raises(NonFiniteError) as info:
            optimizer.step()
        return info.value.fragment, str(info.value.__cause__)


def test_a_round_that_failed_says_more_than_a_callback(workers) -> None:
    assert workers(2).run(callback_raises_beside_a_failure) == [(0, "fragment 1")] * 2


# A round is applied in its own step, in a later one, or inside flush().
@pytest.mark.parametrize("overlap", [Blocking(), Streaming(1, 0.5), Eager()])
def test_a_callback_may_look_at_everything(overlap: Any) -> None:
    model, optimizer, diloco = attach(sync_every=2, fragments=2, overlap=overlap)
    seen = []

    def look(metrics: Any) -> None:
        local, hashed = parameters_of(model), diloco.outer_hash()
        state = diloco.state_dict()
        with diloco.outer_parameters():
            assert state["inner_step"] == diloco.inner_step
        assert equal(local, parameters_of(model)) and hashed == diloco.outer_hash()
        seen.append(metrics)

    with diloco:
        diloco.on_sync(look)
        for step in range(5):
            train_step(model, optimizer, 0, step)
        diloco.flush()
        assert seen == diloco.metrics() and len(seen) >= 5


@pytest.mark.parametrize("call", ["step", "flush", "consensus", "change_group", "optimizer"])
def test_a_callback_cannot_do_what_needs_the_others(call: str) -> None:
    model, optimizer, diloco = attach(sync_every=1, attach=call != "step")
    calls = {"change_group": lambda: diloco.change_group([0]), "optimizer": optimizer.step}
    act = calls.get(call) or getattr(diloco, call)
    diloco.on_sync(lambda metrics: act())
    with diloco:
        train = train_step if call != "step" else lambda *arguments: diloco.step()
        with pytest.raises(RuntimeError, match="an on_sync callback cannot call"):
            train(model, optimizer, 0, 0)
        diloco._recorder.callbacks.clear()
        train(model, optimizer, 0, 1)
        diloco.flush()
        assert [m.round for m in diloco.metrics()] == [0, 1]


def test_a_callback_may_close() -> None:
    model, optimizer, diloco = attach(sync_every=1)
    diloco.on_sync(lambda metrics: diloco.close())
    for step in range(3):
        train_step(model, optimizer, 0, step)
    assert diloco.inner_step == 1


def test_an_interrupted_wait_keeps_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, diloco = attach(fragments=2, offsets=[2, 2])
    wait, calls = Round.wait, []

    def interrupted(work: Round, **options: Any) -> Any:
        calls.append(work)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return wait(work, **options)

    with diloco:
        train_step(model, optimizer, 0, 0)
        monkeypatch.setattr(Round, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_step(model, optimizer, 0, 1)
        assert [part.round for part in diloco.parts] == [0, 0]
        assert diloco.state_dict()["inner_step"] == 2
        diloco.flush()
        assert [len(part.in_flight) for part in diloco.parts] == [0, 0]
        assert [part.round for part in diloco.parts] == [1, 1]


# ---------------------------------------------------------------------------------- the weight


def test_the_weight_is_asked_for_once_in_a_step_that_sends() -> None:
    asked: list[float] = []

    def weight() -> float:
        asked.append(1.0 + len(asked))
        return asked[-1]

    model, optimizer, diloco = attach(fragments=3, offsets=[2, 2, 1], weight=weight)
    with diloco:
        for step in range(4):
            train_step(model, optimizer, 0, step)
        assert [m.weight for m in diloco.metrics()] == [1.0, 2.0, 2.0, 3.0, 4.0, 4.0]


def test_a_weight_that_raises_sends_nothing() -> None:
    def weight() -> float:
        raise LookupError("no tokens")

    model, optimizer, diloco = attach(fragments=2, offsets=[1, 1], weight=weight)
    with closing(diloco):
        with pytest.raises(LookupError, match="no tokens"):
            train_step(model, optimizer, 0, 0)
        assert not any(part.in_flight for part in diloco.parts) and not diloco.metrics()


def one_weight_fails(rank: int, world: int, overlap: Any, bad: float | None) -> list[Any]:
    """Replica 1 has no weight at the second of five sends."""
    asked: list[int] = []

    def weight() -> float:
        asked.append(rank)
        if asked != [1, 1]:
            return 1.0 + rank
        if bad is None:
            raise LookupError("no tokens")
        return bad

    model, optimizer, diloco = attach(overlap=overlap, weight=weight, timeout=60.0)
    failures = []
    with diloco:
        for step in range(10):
            try:
                train_step(model, optimizer, rank, step)
            except (SyncError, LookupError, ValueError) as error:
                failures.append((type(error).__name__, str(error)))
                optimizer.zero_grad()
        diloco.flush()
        values = torch.cat([part.outer for part in diloco.parts])
        return [failures, diloco.outer_hash(), bool(values.isfinite().all())]


@pytest.mark.parametrize("bad", [None, -1.0])
@pytest.mark.parametrize(
    "overlap", [Blocking(), Streaming(1, 0.5), Delayed(), Eager(), Eager(2, "sync")]
)
def test_a_weight_that_fails_is_told_to_the_others(overlap: Any, bad: Any, workers) -> None:
    first, second = workers(2).run(one_weight_fails, overlap, bad)
    ((name, message),) = first[0]
    assert name == "SyncError" and message.endswith("replica 0 has 1; replica 1 has nan")
    assert second[0][0][0] == ("LookupError" if bad is None else "ValueError")
    assert first[1:] == second[1:] == [first[1], True]


# ------------------------------------------------------------- what is trained but not exchanged


def test_parameters_that_are_trained_later_are_named() -> None:
    model = Regression()
    model.head.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with closing(DiLoCo(model, optimizer, sync_every=2, wire="fp32")) as diloco:
        train_step(model, optimizer, 0, 0)
        model.head.bias.requires_grad_(True)
        with pytest.raises(ValueError, match=r"trains parameters that are not .*: 'head\.bias'; "):
            train_step(model, optimizer, 0, 1)
        with pytest.raises(ValueError, match=r"trains parameters that are not .*: 'head\.bias'; "):
            diloco.flush()
        assert diloco.inner_step == 1
        model.head.bias.requires_grad_(False)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(ValueError, match=r"one of shape \(3,\) outside the model'; "):
            train_step(model, optimizer, 0, 1)
        assert not diloco.metrics()


# -------------------------------------------------------------------- joining, saved arguments


def test_a_joiner_alone_is_told() -> None:
    with pytest.raises(SyncError, match=r"all members .* came to join and none trains"):
        attach(init="join")


def test_a_saved_function_as_outer_lr_is_refused() -> None:
    diloco = attach(outer=Nesterov(lr=lambda round: 0.5))[2]
    with diloco:
        config = diloco.config()
    with pytest.raises(ValueError, match=r"names a function as outer lr.*give outer= again"):
        attach(config=config)


def test_an_infinite_timeout_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout must be finite, got inf"):
        attach(timeout=math.inf)


# ------------------------------------------------------------------------------ a dead group


def flush_after_death(rank: int, world: int) -> list[Any]:
    diloco = attach(timeout=20.0)[2]
    if rank == 1:
        diloco.close()
        return []
    events = []
    for _ in range(2):
        with pytest.raises(SyncError) as info:
            diloco.flush()
        events.append((type(info.value).__name__, info.value.stage))
    diloco.close()
    return events


def test_a_flush_of_a_dead_group_is_a_sync_error(fresh_workers) -> None:
    events = fresh_workers(2).run(flush_after_death)[0]
    assert [kind for kind, _ in events] == ["PeerLeft", "SyncError"] and events[1][1] == "start"


def all_reduce_after_failure(rank: int, world: int) -> list[Any]:
    group = dist.new_group([0, 1])
    value = torch.ones(64)
    diloco_comm.all_reduce(value, group, timeout=20.0)
    if rank == 1:
        diloco_comm.shutdown()
        dist.barrier()
        diloco_comm.all_reduce(value, group)
        return [value[0].item()]
    work = diloco_comm.all_reduce(value, group, async_op=True)
    for _ in range(2):
        with pytest.raises(PeerLeft):
            work.wait()
    engine = next(iter(collective._engines[group].values()))
    num_idle = sum(map(len, engine.idle.values()))
    with pytest.raises(SyncError) as info:
        diloco_comm.all_reduce(value, group)
    diloco_comm.shutdown()
    dist.barrier()
    diloco_comm.all_reduce(value, group)
    return [value[0].item(), num_idle, str(info.value)]


def test_all_reduce_after_a_failure(fresh_workers) -> None:
    first, second = fresh_workers(2).run(all_reduce_after_failure)
    # A mean of ones, twice through int8.
    assert first[0] == second[0] == pytest.approx(1.0, abs=0.01) and first[1] == 1
    assert "call diloco_comm.shutdown() on all ranks" in first[2]


def test_a_state_of_before_the_first_round_resets_a_torch_optimizer() -> None:
    model, optimizer, diloco = attach(sync_every=1, outer=lambda params: torch.optim.AdamW(params))
    with diloco:
        start = copy.deepcopy(diloco.state_dict())
        train_step(model, optimizer, 0, 0)
        assert diloco.parts[0].state.optimizer.state
        diloco.load_state_dict(start)
        assert not diloco.parts[0].state.optimizer.state
