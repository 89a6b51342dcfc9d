"""``on_nonfinite="skip"``: how often in a row, and what ``flush`` says of what was skipped."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from problems import attach as attach_regression
from problems import equal, parameters_of, train_step
from torch import nn
from workers import Pool

from diloco_comm import CO2, Blocking, Delayed, DiLoCo, Eager, HeavyBall, NonFiniteError, Streaming

H = 4
ROUNDS = 50
VICTIM = 1


def attach(rank: int, **arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
    return attach_regression(rank, **{"sync_every": H, "on_nonfinite": "skip", **arguments})


@torch.no_grad()
def spoil(model: nn.Module, value: float = math.nan) -> None:
    next(model.parameters())[0, 0] = value


def describe(error: NonFiniteError, inner_step: int) -> tuple[Any, ...]:
    return inner_step, str(error), error.replicas, error.fragment, error.round


def stuck(rank: int, world: int, arguments: dict[str, Any]) -> list[Any]:
    """One NaN at inner step 7 stays in the local parameters for ever."""
    model, optimizer, diloco = attach(rank, **arguments)
    with diloco:
        failure = None
        for step in range(ROUNDS * H):
            if rank == VICTIM and step == 6:
                spoil(model)
            try:
                train_step(model, optimizer, rank, step)
            except NonFiniteError as error:
                failure = describe(error, diloco.inner_step)
                break
        applied = [metrics.is_applied for metrics in diloco.metrics()]
        return [failure, applied, diloco.outer_hash()]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("overlap", [Blocking(), Streaming(2, 0.5)], ids=["blocking", "streaming"])
@pytest.mark.parametrize(("max_skipped", "most"), [({}, 3), ({"max_skipped": 1}, 1)])
def test_a_replica_that_stays_bad_ends_the_run(
    workers: Callable[[int], Pool], world: int, overlap: Any, max_skipped: dict[str, int], most: int
) -> None:
    first, *others = workers(world).run(stuck, {"overlap": overlap, **max_skipped})
    failure, applied, _ = first
    assert failure is not None, "nothing was raised"
    inner_step, message, replicas, fragment, number = failure
    # The first round is applied; one more than may be skipped are not, and the last of them raises.
    assert inner_step == (most + 2) * H + overlap.steps()
    assert (replicas, fragment, number) == ((VICTIM,), 0, 1)
    assert applied == [True] + [False] * (most + 1)
    assert f"on replica {VICTIM}" in message and f"{most} round" in message
    assert 'DiLoCo nonfinite="reset"' in message and f"restore replica {VICTIM}" in message
    assert "\n" not in message
    assert others == [first] * (world - 1)


def stuck_and_caught(rank: int, world: int, on_nonfinite: str) -> list[Any]:
    """The values stay bad, and the loop goes on after each error."""
    model, optimizer, diloco = attach(rank, on_nonfinite=on_nonfinite, max_skipped=1)
    found = []
    with diloco:
        for step in range(9 * H):
            if rank == VICTIM and step >= 6:
                spoil(model)
            try:
                train_step(model, optimizer, rank, step)
            except NonFiniteError as error:
                found.append((diloco.inner_step, error.replicas, error.missing))
        if on_nonfinite == "skip":
            with pytest.raises(NonFiniteError) as caught:
                diloco.flush()
            found.append((-1, caught.value.replicas, caught.value.missing))
    return found


@pytest.mark.parametrize("on_nonfinite", ["skip", "reset"])
def test_the_count_begins_anew_after_the_error(
    workers: Callable[[int], Pool], on_nonfinite: str
) -> None:
    first, *others = workers(3).run(stuck_and_caught, on_nonfinite)
    flushed = [(-1, (VICTIM,), (VICTIM,))] if on_nonfinite == "skip" else []
    # Of the rounds 2 to 9 every second is one too many.
    assert first == [(n * H, (VICTIM,), (VICTIM,)) for n in (3, 5, 7, 9)] + flushed
    assert others == [first] * 2


def stuck_and_resumed(rank: int, world: int) -> list[Any]:
    """Two rounds are skipped before a save; the run that goes on from it is another group."""
    model, optimizer, diloco = attach(rank)
    with closing(diloco):
        for step in range(3 * H + 1):
            if rank == VICTIM and step == 6:
                spoil(model)
            train_step(model, optimizer, rank, step)
        assert diloco.totals().num_skipped == 2
        saved = {"diloco": diloco.state_dict(), "model": model.state_dict()}
        saved = copy.deepcopy(saved)
    model, optimizer, diloco = attach(rank)
    with closing(diloco):
        model.load_state_dict(saved["model"])
        diloco.load_state_dict(saved["diloco"])
        for step in range(3 * H + 1, ROUNDS * H):
            try:
                train_step(model, optimizer, rank, step)
            except NonFiniteError as error:
                return [describe(error, diloco.inner_step), diloco.totals().num_skipped]
    return []


def test_a_resumed_run_counts_anew(workers: Callable[[int], Pool]) -> None:
    results = workers(3).run(stuck_and_resumed)
    assert results[0][0][0] == 7 * H and results[0][1] == 4
    assert results == [results[0]] * 3


def healed(rank: int, world: int) -> list[bool]:
    """A round that is applied sets the count back: three may be skipped again after it."""
    model, optimizer, diloco = attach(rank)
    with diloco:
        for step in range(12 * H):
            if rank == VICTIM and step // H in (1, 2, 3, 5, 6, 7):
                spoil(model)
            train_step(model, optimizer, rank, step)
            if step % H == H - 1:
                for param in model.parameters():
                    param.data.nan_to_num_(0.0)
        diloco.flush()
        return [metrics.is_applied for metrics in diloco.metrics()]


def test_an_applied_round_sets_the_count_back(workers: Callable[[int], Pool]) -> None:
    three = [False] * 3
    expected = [True, *three, True, *three, *[True] * 4]
    assert workers(2).run(healed) == [expected] * 2


# --------------------------------------------------------------------------------------- flush


def flush_in_vain(rank: int, world: int, arguments: dict[str, Any]) -> list[Any]:
    """Replica 1 spoils fragments 0 and 2 of three; nothing of these can be shared."""
    model, optimizer, diloco = attach(rank, fragments=3, offsets=[H] * 3, **arguments)
    with diloco:
        for step in range(2 * H - 1):
            train_step(model, optimizer, rank, step)
        if rank == VICTIM:
            for index in (0, 2):
                diloco.parts[index].tensors()[0].view(-1)[0] = math.nan
        kept = [[t.clone() for t in part.tensors()] for part in diloco.parts]
        failure = None
        try:
            diloco.flush()
        except NonFiniteError as error:
            failure = describe(error, diloco.inner_step)
        rounds = [part.round for part in diloco.parts]
        is_kept = [
            equal(before, part.tensors()) for before, part in zip(kept, diloco.parts, strict=True)
        ]
        # What could not be shared is healed, and shared by the next call.
        for index in (0, 2):
            diloco.parts[index].tensors()[0].nan_to_num_(0.0)
        diloco.flush()
        return [failure, rounds, is_kept, diloco.outer_hash(), parameters_of(model)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("overlap", [Blocking(), Streaming(2, 0.5)], ids=["blocking", "streaming"])
def test_flush_that_shares_nothing_raises(
    workers: Callable[[int], Pool], world: int, overlap: Any
) -> None:
    results = workers(world).run(flush_in_vain, {"overlap": overlap})
    for failure, rounds, is_kept, *_ in results:
        assert failure is not None, "flush returned"
        _, message, replicas, fragment, _ = failure
        assert (replicas, fragment) == ((VICTIM,), 0)
        assert "fragment 0" in message and "fragment 2" in message and "fragment 1" not in message
        assert f"on replica {VICTIM}" in message and "\n" not in message
        # The sound fragment was shared all the same, the others are as they were.
        assert rounds == [1, 2, 1] and is_kept == [True, False, True]
        assert failure == results[0][0]
    assert len({result[3] for result in results}) == 1
    assert all(equal(result[4], results[0][4]) for result in results)


def flush_what_is_owed(rank: int, world: int, arguments: dict[str, Any]) -> list[Any]:
    """The payload that ``flush`` sends holds a NaN: the rest of it is owed, and comes later."""
    model, optimizer, diloco = attach(rank, **arguments)
    with diloco:
        for step in range(2 * H + 1):
            train_step(model, optimizer, rank, step)
        if rank == VICTIM:
            spoil(model)
        message = ""
        try:
            diloco.flush()
        except NonFiniteError as error:
            message = str(error)
        for step in range(2 * H + 1, 4 * H):
            train_step(model, optimizer, rank, step)
        diloco.flush()
        return [message, diloco.outer_hash(), parameters_of(model)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"overlap": Delayed(2)},
        {"overlap": Eager()},
        {"overlap": CO2(), "outer": HeavyBall(0.5, 0.5), "error_feedback": True, "wire": "int8"},
    ],
    ids=lambda arguments: type(arguments["overlap"]).__name__,
)
def test_flush_of_turns_raises_too(
    workers: Callable[[int], Pool], arguments: dict[str, Any]
) -> None:
    results = workers(2).run(flush_what_is_owed, arguments)
    for message, outer, local in results:
        assert "fragment 0" in message and f"on replica {VICTIM}" in message, "flush returned"
        assert message == results[0][0] and outer == results[0][1]
        assert equal(local, results[0][2]) and all(tensor.isfinite().all() for tensor in local)
