"""What a reset leaves in a replica: moments, fragments, buffers, saved states, metrics, lines."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from choice_groups import grouped
from problems import (
    Regression,
    batch,
    equal,
    load_training,
    parameters_of,
    save_training,
    train_step,
)
from torch import Tensor, nn
from workers import Pool

from diloco_comm import CO2, Blocking, Delayed, DiLoCo, Eager, HeavyBall, NonFiniteError, Streaming

H, VICTIM = 4, 1


@torch.no_grad()
def spoil(model: nn.Module, value: float = math.nan) -> None:
    next(model.parameters())[0, 0] = value


class Normalised(Regression):
    """With BatchNorm's running statistics."""

    def __init__(self, width: int = 24, seed: int = 0) -> None:
        super().__init__(width, seed)
        self.norm = nn.BatchNorm1d(width)


def attach(**arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
    model = arguments.pop("make", Regression)()
    optimizer = arguments.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.01)
    if arguments.pop("forgets", False):

        def forget(params: list[nn.Parameter]) -> None:
            assert all(param.isfinite().all() for param in params)
            for param in params:
                optimizer.state.pop(param, None)

        arguments["on_reset"] = forget
    settings = {"sync_every": H, "wire": "int8", "block_size": 64, "on_nonfinite": "reset"}
    return model, optimizer, DiLoCo(model, optimizer, **grouped({**settings, **arguments}))


# ------------------------------------------------------------------- the inner optimizer's state


def moments(rank: int, world: int, arguments: dict[str, Any]) -> list[Any]:
    """One NaN in a gradient stays in AdamW's moments, unless they are forgotten."""
    model, optimizer, diloco = attach(**arguments)
    failure = None
    with diloco:
        for step in range(10 * H):
            if rank == VICTIM and step == 6:
                spoil(model)
            try:
                train_step(model, optimizer, rank, step)
            except NonFiniteError as error:
                failure = (diloco.inner_step, str(error), error.replicas, error.round)
                break
        verdicts = [(m.is_applied, m.reset_replicas) for m in diloco.metrics()]
        return [failure, verdicts, diloco.outer_hash(), diloco.totals().num_reset]


@pytest.mark.parametrize("overlap", [Blocking(), Streaming(1), Eager()], ids=lambda o: repr(o))
def test_moments_that_stay_bad_end_the_run(workers: Callable[[int], Pool], overlap: Any) -> None:
    results = workers(3).run(moments, {"overlap": overlap})
    failure, verdicts, *_ = results[0]
    late = overlap.steps() + H * overlap.rounds
    assert failure is not None, "nothing was raised"
    assert (failure[0], failure[2:]) == (5 * H + late, ((VICTIM,), 4))
    # All of these rounds are applied, the one that raises too.
    assert verdicts == [(True, ()), *[(True, (VICTIM,))] * 4]
    assert f"replica {VICTIM}" in failure[1] and "3 rounds in a row" in failure[1]
    assert "on_reset" in failure[1] and "max_skipped=3" in failure[1] and "\n" not in failure[1]
    assert all(result[:2] == results[0][:2] for result in results)
    assert isinstance(overlap, Eager) or len({result[2] for result in results}) == 1
    assert [result[3] for result in results] == [0, 4, 0]


@pytest.mark.parametrize("overlap", [Delayed(2), Eager(), Eager(2, "sync")], ids=lambda o: repr(o))
def test_turns_that_are_skipped_end_the_run(workers: Callable[[int], Pool], overlap: Any) -> None:
    """Their local parameters become the outer ones at each send, but the moments stay bad."""
    results = workers(2).run(moments, {"overlap": overlap, "on_nonfinite": "skip"})
    failure, verdicts, *_ = results[0]
    assert failure is not None, "nothing was raised"
    assert failure[2] == (VICTIM,) and "3 rounds in a row" in failure[1]
    assert verdicts == [(True, ()), *[(False, ())] * 4]
    assert all(result[:2] == results[0][:2] for result in results)


@pytest.mark.each_value("up to 2 s each; they differ in policy and number of replicas")
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize(
    "overlap", [Blocking(), Streaming(1), Delayed(2), Eager(), CO2()], ids=lambda o: repr(o)
)
def test_moments_that_are_forgotten_cost_one_reset(
    workers: Callable[[int], Pool], overlap: Any, fragments: int
) -> None:
    """Also of fragments that are sent at different steps: all of them are reset at once."""
    outer = {"outer": HeavyBall(0.5, 0.5)} if isinstance(overlap, CO2) else {}
    arguments = {"overlap": overlap, "fragments": fragments, "forgets": True, **outer}
    results = workers(2).run(moments, arguments)
    for failure, verdicts, *_ in results:
        assert failure is None, failure
        assert verdicts.count((True, (VICTIM,))) == 1
        assert verdicts.count((True, ())) == len(verdicts) - 1
    assert [result[3] for result in results] == [0, 1]
    assert overlap.rounds == 0 or isinstance(overlap, Eager) or results[0][2] == results[1][2]


def test_there_may_be_no_limit(workers: Callable[[int], Pool]) -> None:
    for failure, verdicts, *_ in workers(2).run(moments, {"max_skipped": None}):
        assert failure is None
        assert verdicts == [(True, ()), *[(True, (VICTIM,))] * 9]


def raising(rank: int, world: int) -> list[Any]:
    """What ``on_reset`` raises comes out of the step, which is done all the same."""

    def refuse(params: list[nn.Parameter]) -> None:
        raise LookupError("no such state")

    model, optimizer, diloco = attach(on_reset=refuse, optimizer=torch.optim.SGD)
    with diloco:
        raised = []
        for step in range(3 * H):
            if rank == VICTIM and step == 6:
                spoil(model)
            try:
                train_step(model, optimizer, rank, step)
            except LookupError as error:
                raised.append((diloco.inner_step, str(error)))
                optimizer.zero_grad()
        rounds = [part.round for part in diloco.parts]
        return [raised, rounds, diloco.outer_hash()]


def test_what_on_reset_raises_divides_no_step(workers: Callable[[int], Pool]) -> None:
    first, second = workers(2).run(raising)
    assert first[0] == [] and second[0] == [(2 * H, "no such state")]
    assert first[1:] == second[1:] == [[3], first[2]]


# --------------------------------------------------------------------------------------- buffers


def statistics(rank: int, world: int, arguments: dict[str, Any]) -> list[Any]:
    """Inputs that are not finite spoil parameters and running statistics alike, once."""
    model, optimizer, diloco = attach(make=Normalised, average_buffers=True, **arguments)
    with diloco:
        for step in range(5 * H):
            x, y = batch(rank, step)
            if rank == VICTIM and step == 2 * H - 1:
                x = x * math.inf
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2 * H - 1:
                is_bad = not all(buffer.isfinite().all() for buffer in model.buffers())
                assert is_bad == (rank == VICTIM and diloco.settings.overlap.steps() > 0)
        diloco.flush()
        buffers = [buffer.clone() for buffer in model.buffers() if buffer.is_floating_point()]
        return [parameters_of(model), buffers, diloco.totals().num_reset]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("overlap", [Blocking(), Streaming(2)], ids=["blocking", "streaming"])
def test_bad_buffers_become_the_mean_of_the_others(
    workers: Callable[[int], Pool], world: int, overlap: Any
) -> None:
    results = workers(world).run(statistics, {"overlap": overlap, "forgets": True})
    for local, buffers, _ in results:
        assert equal(local, results[0][0]) and equal(buffers, results[0][1])
        assert all(tensor.isfinite().all() for tensor in (*local, *buffers))
    # Once for the parameters, once for the buffers.
    assert [num_reset for *_, num_reset in results] == [0, 2, 0][:world]


# ---------------------------------------------------------------------------------- saved states


def snapshot(model: nn.Module, diloco: DiLoCo) -> list[Tensor]:
    """Everything that a resumed run must have to the bit."""
    diloco.state_dict()  # waits for what is under way
    tensors = [*parameters_of(model), *(buffer.clone() for buffer in model.buffers())]
    for part in diloco.parts:
        if part.outer is not None:
            tensors += [part.outer.clone(), *(t.clone() for t in part.state.tensors().values())]
        if part.buffers.residual is not None:
            tensors.append(part.buffers.residual.clone())
        tensors += [residual.clone() for residual in part.buffers.residuals.reductions()]
        tensors.append(
            torch.tensor([part.round, part.last_sent, part.owed.is_lost, part.owed.is_ahead])
        )
    return tensors


def resume_everywhere(rank: int, world: int, arguments: dict[str, Any], bad: int) -> list[bool]:
    """Train in one go with a sick replica at step ``bad``; then resume from each step but those."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        x, y = batch(rank, step)
        if rank == VICTIM and step == bad:
            spoil(model)
            x = x * math.inf
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    saves, num_steps = [], 5 * H
    model, optimizer, diloco = attach(make=Normalised, forgets=True, **arguments)
    with diloco:
        for step in range(num_steps):
            saves.append(save_training(model, optimizer, diloco))
            train(model, optimizer, step)
        expected = snapshot(model, diloco)
        assert (diloco.totals().num_reset > 0) == (rank == VICTIM)
    matches = []
    for first, file in enumerate(saves):
        model, optimizer, diloco = attach(make=Normalised, forgets=True, **arguments)
        with diloco:
            load_training(file, model, optimizer, diloco)
            for step in range(first, num_steps):
                train(model, optimizer, step)
            matches.append(equal(snapshot(model, diloco), expected))
    return matches


@pytest.mark.nightly("up to 24 s each; they differ in the policy", but=["-Delayed(rounds=1)-1"])
@pytest.mark.parametrize(
    ("world", "arguments", "bad"),
    [
        (2, {"overlap": Streaming(2), "average_buffers": True}, 2 * H - 1),
        (3, {"overlap": Streaming(3), "error_feedback": True, "wire": "int4"}, 2 * H - 1),
        (3, {"overlap": Eager(2), "error_feedback": True, "wire": "int4"}, 2 * H - 1),
        (2, {"overlap": Eager(2, "skip")}, 2 * H - 1),
        (3, {"overlap": Delayed(), "average_buffers": True}, 2 * H - 1),
        (2, {"overlap": Delayed(), "fragments": 2}, H),
    ],
    ids=lambda value: repr(value["overlap"]) if isinstance(value, dict) else "",
)
def test_resume_after_every_step_of_a_run_with_a_reset(
    workers: Callable[[int], Pool], world: int, arguments: dict[str, Any], bad: int
) -> None:
    results = workers(world).run(resume_everywhere, arguments, bad)
    assert results == [[True] * len(results[0])] * world


# ------------------------------------------------------------------------------- what is said of it


def said(rank: int, world: int) -> list[Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("diloco_comm").addHandler(handler)
    calls = []
    model, optimizer, diloco = attach(forgets=True)
    diloco.on_sync(lambda metrics: calls.append((metrics.is_reset, metrics.weight)))
    with diloco:
        for step in range(3 * H):
            if rank == VICTIM and step == 6:
                spoil(model)
            train_step(model, optimizer, rank, step)
    logging.getLogger("diloco_comm").removeHandler(handler)
    return [[line for line in lines if line.startswith("reset")], calls]


def test_one_line_and_the_metrics_tell_of_a_reset(workers: Callable[[int], Pool]) -> None:
    results = workers(2).run(said)
    for rank, (lines, calls) in enumerate(results):
        assert len(lines) == 1 and lines == results[0][0]
        assert "fragment 0, round 1" in lines[0] and f"replica {VICTIM}" in lines[0]
        sick = (True, 0.0) if rank == VICTIM else (False, 1.0)
        assert calls == [(False, 1.0), sick, (False, 1.0)]


def without_weight(rank: int, world: int) -> list[str]:
    """The sick replica cannot say its weight either: that is the error, on all of them."""

    def weight() -> float:
        if rank == VICTIM and diloco.inner_step == 2 * H:
            raise LookupError("no tokens")
        return 2.0

    model, optimizer, diloco = attach(weight=weight, optimizer=torch.optim.SGD)
    seen = []
    with diloco:
        for step in range(3 * H):
            if rank == VICTIM and step == 6:
                spoil(model)
            try:
                train_step(model, optimizer, rank, step)
            except (RuntimeError, LookupError) as error:
                seen.append(f"{type(error).__name__} {error}")
                optimizer.zero_grad()
        return [*seen, diloco.outer_hash(), str([m.is_applied for m in diloco.metrics()])]


def test_a_sick_replica_without_a_weight(workers: Callable[[int], Pool]) -> None:
    first, second = workers(2).run(without_weight)
    assert first[0].startswith("SyncError") and "replica 1 has nan" in first[0]
    assert second[0] == "LookupError no tokens"
    assert first[1:] == second[1:]
    assert first[2] == "[True, True]"


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"max_skipped": 0}, ValueError, "max_skipped must be an integer of at least 1, got 0"),
        ({"max_skipped": "3"}, ValueError, "max_skipped must be an integer of at least 1"),
        ({"on_reset": 3}, TypeError, "on_reset must be a function of a list of parameters, got 3"),
        ({"on_reset": print, "on_nonfinite": "skip"}, ValueError, 'with nonfinite="reset"'),
    ],
)
def test_arguments_that_cannot_be(
    arguments: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        attach(**arguments)


def test_no_limit_can_be_saved_and_given() -> None:
    with attach(max_skipped=None)[2] as diloco:
        config = diloco.config()
    assert config["max_skipped"] is None
    for given, expected in (({}, None), ({"max_skipped": 2}, 2)):
        with attach(config=config, **given)[2] as diloco:
            assert diloco.config()["max_skipped"] == expected
    with attach(config={**config, "max_skipped": 7}, max_skipped=None)[2] as diloco:
        assert diloco.config()["max_skipped"] is None
    with attach()[2] as diloco:
        assert diloco.config()["max_skipped"] == 3
