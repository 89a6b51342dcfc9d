"""Outer optimizers: the published worked examples, and torch's own optimizers."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from choice_groups import grouped
from problems import (
    INNER_LR,
    START,
    Quadratic,
    attach,
    equal,
    everything,
    inner_steps,
    train_step,
    ulps,
)

from diloco_comm import CO2, SGD, Adam, DiLoCo, FromTorch, HeavyBall, Nesterov, ReplicaMismatch, ops
from diloco_comm.methods.outer import OuterOptimizer, OuterState, Update, make_outer
from diloco_comm.ops.wire import Layout, WireFormat

NUM_ROUNDS = 3

# Outer parameters after each round: DiLoCo with H=2 on the two quadratic problems.
PUBLISHED = {
    "sgd": [(0.22785, 0.5875), (0.4200278425, 0.65874446), (0.5821423861, 0.7166907169)],
    "heavy_ball": [
        (0.068355, 0.52625),
        (0.1950190058, 0.5746620014),
        (0.3682126171, 0.6403199548),
    ],
    "nesterov": [
        (0.3030405, 0.616375),
        (0.6721714706, 0.7536080753),
        (1.053867964, 0.8891785855),
    ],
    "adam": [(0.2084947384, 0.64), (0.4111186175, 0.7671940304), (0.6066177868, 0.8794710054)],
}
OUTERS: dict[str, OuterOptimizer] = {
    "sgd": SGD(1.0),
    "heavy_ball": HeavyBall(0.3, 0.9),
    "nesterov": Nesterov(0.7, 0.9),
    "adam": Adam(0.3, (0.9, 0.95), 0.1),
}
TORCH = {
    "sgd": functools.partial(torch.optim.SGD, lr=1.0),
    "heavy_ball": functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.3, betas=(0.9, 0.95), eps=0.1),
}


def expected_rounds(name: str, num_workers: int) -> list[np.ndarray]:
    """Compute the rounds from the equations in float64."""
    theta, m, v = np.array(START), np.zeros(2), np.zeros(2)
    rounds = []
    for t in range(1, NUM_ROUNDS + 1):
        deltas = [theta - inner_steps(rank, theta, 2) for rank in range(num_workers)]
        g = np.mean(deltas, axis=0)
        if name == "sgd":
            theta = theta - g
        elif name == "heavy_ball":
            m = 0.9 * m + g
            theta = theta - 0.3 * m
        elif name == "nesterov":
            m = 0.9 * m + g
            theta = theta - 0.7 * (g + 0.9 * m)
        else:
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            theta = theta - 0.3 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 0.1)
        rounds.append(theta)
    return rounds


def run_quadratic(rank: int, world: int, outer: Any, **arguments: Any) -> list[list[float]]:
    """Train H=2 through the public API; returns the parameters after each round."""
    model = Quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=INNER_LR)
    rounds = []
    with DiLoCo(
        model, optimizer, sync_every=2, outer=outer, **grouped({"wire": "fp32", **arguments})
    ) as diloco:
        for _ in range(NUM_ROUNDS):
            for _ in range(2):
                model().backward()
                optimizer.step()
                optimizer.zero_grad()
            with diloco.outer_parameters():
                rounds.append(model.values())
            assert model.values() == rounds[-1]
    return rounds


@pytest.mark.parametrize("name", OUTERS)
def test_worked_example(name: str, workers) -> None:
    expected = expected_rounds(name, num_workers=2)
    np.testing.assert_allclose(expected, PUBLISHED[name], rtol=0, atol=1e-9)
    for rounds in workers(2).run(run_quadratic, OUTERS[name]):
        np.testing.assert_allclose(rounds, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OUTERS)
def test_worked_example_with_torch_optimizer_and_two_fragments(name: str, workers) -> None:
    expected = expected_rounds(name, num_workers=2)
    arguments = {"fragments": 2, "offsets": [2, 2]}
    for rounds in workers(2).run(run_quadratic, TORCH[name], **arguments):
        np.testing.assert_allclose(rounds, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OUTERS)
@pytest.mark.parametrize("num_elements", [1, 257, 10_007])
def test_step_is_as_accurate_as_torch(name: str, num_elements: int) -> None:
    """torch fuses multiply and add; from the same state we are within 1 ulp of its accuracy."""
    torch.manual_seed(num_elements)
    layout = Layout.plan(num_elements, 1, 1, WireFormat("fp32"))
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    ours = OUTERS[name].make_state(torch.randn(num_elements))
    theirs = make_outer(TORCH[name]).make_state(torch.empty(num_elements))
    exact = torch.nn.Parameter(torch.empty(num_elements, dtype=torch.float64))
    optimizer = TORCH[name]([exact])
    params = [torch.zeros(num_elements), torch.zeros(num_elements)]
    lr = OUTERS[name].lr_at(0, ours)
    for step in range(4):
        before = ours.outer.clone()
        theirs.outer.copy_(before)
        exact.data.copy_(before)
        if step:
            _copy_buffers(ours, theirs, optimizer.state[exact])
        gradient = torch.randn(num_elements)
        exact.grad = gradient.double()
        optimizer.step()
        _encode(gradient, layout, payload)
        ours.step(Update([(payload, 1.0)], params[:1], layout, lr))
        theirs.step(Update([(payload, 1.0)], params[1:], layout, lr))
        scales = [before, gradient, (ours.outer - before) / lr, *ours.tensors().values()]
        own_error = ulps(ours.outer.double(), exact.data, *scales)
        assert own_error <= ulps(theirs.outer.double(), exact.data, *scales) + 1
        assert torch.equal(params[0], ours.outer) and torch.equal(params[1], theirs.outer)


def _copy_buffers(ours: OuterState, theirs: OuterState, exact: dict[str, Any]) -> None:
    named = {k: v for k, v in exact.items() if k != "step"}
    for own, other, wide in zip(
        ours.tensors().values(), theirs.tensors().values(), named.values(), strict=True
    ):
        other.copy_(own)
        wide.copy_(own)


def test_nesterov_is_bitwise_the_unfused_formula_of_torch() -> None:
    torch.manual_seed(0)
    layout = Layout.plan(10_007, 1, 1, WireFormat("fp32"))
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    outer, m = torch.randn(10_007), torch.zeros(10_007)
    state = Nesterov(0.7, 0.9).make_state(outer.clone())
    for _ in range(5):
        g = torch.randn(10_007)
        _encode(g, layout, payload)
        state.step(Update([(payload, 1.0)], [torch.zeros(10_007)], layout, 0.7))
        m = m.mul(0.9).add(g)
        outer = outer.sub(g.add(m.mul(0.9)).mul(0.7))
        assert torch.equal(state.outer, outer) and torch.equal(state.tensors()["momentum"], m)


def _encode(value: torch.Tensor, layout: Layout, payload: torch.Tensor) -> None:
    ops.encode(None, [value], payload, 0, layout.num_elements, layout.run_elements, "fp32", 256)


def change_lr(rank: int, world: int, how: str) -> list[float]:
    model = Quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=INNER_LR)
    outer = {
        "attribute": SGD(1.0),
        "function": SGD(lambda round: 1.0 if round == 0 else 0.5),
        "torch": FromTorch(TORCH["sgd"]),
    }[how]
    with DiLoCo(model, optimizer, sync_every=1, outer=outer, wire="fp32") as diloco:
        for step in range(2):
            if step == 1 and how != "function":
                diloco.outer.lr = 0.5
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        # The end of the block is the mean of the last round, at no rate.
        return model.values()


@pytest.mark.parametrize("how", ["attribute", "function", "torch"])
def test_learning_rate_may_change_between_rounds(how: str, workers) -> None:
    theta = np.array(START)
    for lr in (1.0, 0.5):
        theta = theta - lr * np.mean([theta - inner_steps(r, theta, 1) for r in (0, 1)], axis=0)
    for values in workers(2).run(change_lr, how):
        np.testing.assert_allclose(values, theta, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: Nesterov(lr=math.nan), ValueError, "outer lr must be finite and not negative"),
        (lambda: SGD(-1), ValueError, "outer lr must be finite and not negative, got -1.0"),
        (lambda: SGD(None), TypeError, "outer lr must be a number or a function, got None"),
        (lambda: SGD(torch.ones(2)), TypeError, "outer lr must be a number or a function, got"),
        (lambda: FromTorch(TORCH["sgd"], "a"), TypeError, "outer lr must be a number or a func"),
        (lambda: HeavyBall(momentum="a"), TypeError, "momentum must be a number, got 'a'"),
        (
            lambda: Nesterov(momentum=math.nan),
            ValueError,
            "momentum must be at least 0 and below 1",
        ),
        (
            lambda: Nesterov(momentum=1),
            ValueError,
            "momentum must be at least 0 and below 1, got 1",
        ),
        (lambda: Adam(betas=(2, 3)), ValueError, "each of betas must be at least 0 and below 1"),
        (lambda: Adam(betas=(0.9,)), TypeError, r"betas must be two numbers, got \(0.9,\)"),
        (lambda: Adam(betas="ab"), TypeError, "each of betas must be a number, got 'a'"),
        (lambda: Adam(eps=0), ValueError, "eps must be positive and finite, got 0.0"),
    ],
)
def test_arguments_that_cannot_be(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()


@pytest.mark.parametrize(
    ("value", "error", "sentence"),
    [
        (
            math.nan,
            ValueError,
            r"outer lr .*<lambda>\(0\) must be finite and not negative, got nan",
        ),
        (-0.5, ValueError, r"outer lr .*<lambda>\(0\) must be finite and not negative, got -0.5"),
        (None, TypeError, r"outer lr .*<lambda>\(0\) must be a number, got None"),
    ],
)
def test_a_learning_rate_of_a_function_is_checked_before_the_send(
    value: Any, error: type[Exception], sentence: str
) -> None:
    model, optimizer, diloco = attach(sync_every=1, outer=Nesterov(lambda round: value))
    with closing(diloco):
        before = everything(model, diloco)[-2:]
        with pytest.raises(error, match=sentence):
            train_step(model, optimizer, 0, 0)
        assert equal(before, everything(model, diloco)[-2:]) and not diloco.parts[0].in_flight


@pytest.mark.parametrize("lr", [torch.tensor(0.5), np.float32(0.5), 0.5])
def test_a_learning_rate_is_kept_as_a_plain_number(lr: Any) -> None:
    outer = SGD(lr)
    assert outer.lr == 0.5 and type(outer.lr) is float
    outer.lr = lr
    assert type(outer.lr) is float


@pytest.mark.parametrize("name", [*OUTERS, "torch"])
def test_only_the_learning_rate_may_be_assigned(name: str) -> None:
    outer = OUTERS[name] if name in OUTERS else FromTorch(TORCH["sgd"])
    before = outer.config()
    for attribute in {*before, "learning_rate"} - {"lr"}:
        with pytest.raises(AttributeError, match=rf"{attribute} cannot be assigned: only the lr"):
            setattr(outer, attribute, 0.5)
    with pytest.raises(ValueError, match="outer lr must be finite"):
        outer.lr = -1.0
    assert outer.config() == before
    assert copy.deepcopy(outer).config() == before


def make_sgd(momentum: float) -> Any:
    return lambda params: torch.optim.SGD(params, lr=0.7, momentum=momentum)


def make_adam() -> Any:
    return lambda params: torch.optim.Adam(params, lr=0.7)


def keep_rates(rank: int, world: int, overlap: Any) -> list[float]:
    """Assign a rate for one round, without a factor of a policy; return the rates after steps."""
    made: list[torch.optim.Optimizer] = []

    def make(params: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(params, lr=0.7))
        return made[-1]

    model, optimizer, diloco = attach(rank, sync_every=2, outer=make, overlap=overlap)
    rates = []
    with closing(diloco):
        group = made[0].param_groups[0]
        for step in range(8):
            if overlap is None:
                diloco.outer.lr = 0.2 if step == 3 else None
            train_step(model, optimizer, rank, step)
            rates.append(group["lr"])
    return rates


def half() -> float:
    return 0.5


@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_of_torch_takes_over_the_rate_of_the_round(world: int, workers) -> None:
    for rates in workers(world).run(keep_rates, None):
        assert rates == [0.7] * 3 + [0.2] * 5


@pytest.mark.parametrize("world", [1, 2])
def test_the_factor_of_a_policy_is_for_one_round(world: int, workers) -> None:
    assert workers(world).run(keep_rates, CO2(gap=1.0, inner_lr=half)) == [[0.7] * 8] * world


def attach_optimizers_of_torch(rank: int, world: int, factories: list[Any]) -> str:
    make, *arguments = factories[rank]
    outer = FromTorch(make(*arguments))
    outer.factory.__qualname__ = "factory"
    try:
        attach(outer=outer)[2].close()
    except ReplicaMismatch as error:
        return str(error)
    return ""


def test_optimizers_of_torch_that_differ_are_refused(workers) -> None:
    same, momentum, kind = (
        workers(2).run(attach_optimizers_of_torch, [(make_sgd, 0.9), other])
        for other in [(make_sgd, 0.9), (make_sgd, 0.1), (make_adam,)]
    )
    assert same == ["", ""]
    for one in momentum:
        assert one.startswith("outer differs between replicas: {'optimizer': 'SGD', 'lr': 0.7")
        assert "'momentum': 0.9" in one and "'momentum': 0.1" in one
    for one in kind:
        assert "{'optimizer': 'SGD'" in one and "{'optimizer': 'Adam'" in one


def test_configuration_round_trip() -> None:
    for outer in OUTERS.values():
        assert make_outer(outer.config()) == outer
    assert make_outer(None) == Nesterov(0.7, 0.9)
    assert make_outer("nesterov") == Nesterov() and make_outer("HEAVYBALL") == HeavyBall()
    for lion in ({"name": "Lion"}, "Lion"):
        with pytest.raises(ValueError, match="unknown outer 'Lion'"):
            make_outer(lion)
    with pytest.raises(ValueError, match=r"outer Adam has unknown arguments \['beta'\]"):
        make_outer({"name": "Adam", "beta": 1})
    with pytest.raises(ValueError, match=r"names a function as outer, .* give outer= again"):
        make_outer(json.loads(json.dumps(make_outer(make_adam()).config())))
    with pytest.raises(TypeError, match=r"^outer=Nesterov is a class: give an object, Nesterov\("):
        make_outer(Nesterov)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="outer must be SGD"):
        make_outer(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a torch\.optim\.Optimizer is expected"):
        make_outer(lambda params: 3).make_state(torch.zeros(4))  # type: ignore[arg-type,return-value]


class OfOneself(torch.optim.SGD):
    """An optimizer that a user wrote, with an argument that has no default."""

    def __init__(self, params: Any, decay: float, lr: float = 1.0) -> None:
        super().__init__(params, lr)
        self.defaults["decay"] = decay


MADE: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "sgd": (
        lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True),
        "torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)",
    ),
    "defaults": (torch.optim.SGD, "torch.optim.SGD(params, lr=0.001)"),
    "adamw": (
        lambda params: torch.optim.AdamW(params, betas=(0.9, 0.95), weight_decay=0.1),
        "torch.optim.AdamW(params, lr=0.001, betas=(0.9, 0.95), weight_decay=0.1)",
    ),
    "tensor": (
        lambda params: torch.optim.Adam(params, lr=torch.tensor(0.5)),
        "torch.optim.Adam(params, lr=0.5)",
    ),
    "groups": (
        lambda params: torch.optim.SGD([{"params": params, "lr": 0.3}], lr=0.1),
        "torch.optim.SGD(params, lr=0.3)",
    ),
    "own": (lambda params: OfOneself(params, 0.25), "OfOneself(params, decay=0.25, lr=1.0)"),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(torch.optim.SGD, "torch.optim.SGD"), (OfOneself, "OfOneself")]
)
def test_a_class_of_torch_is_answered_with_the_function_to_write(kind: Any, name: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError) as refused:
        DiLoCo(model, torch.optim.SGD(model.parameters()), sync_every=1, outer=kind)
    said = str(refused.value)
    assert f"outer={kind.__name__} is a class" in said and "\n" not in said
    assert f"write outer=lambda params: {name}(params, lr=0.7)" in said


@pytest.mark.parametrize("name", MADE)
def test_an_optimizer_of_torch_is_answered_with_the_function_to_write(name: str) -> None:
    make, call = MADE[name]
    model = torch.nn.Linear(2, 2)
    made = make(model.parameters())
    with pytest.raises(TypeError) as refused:
        DiLoCo(model, torch.optim.SGD(model.parameters()), sync_every=1, outer=made)
    said = str(refused.value)
    assert said.endswith(f"write outer=lambda params: {call}") and "\n" not in said
    # What is to be written makes such an optimizer.
    written = eval(f"lambda params: {call}", {"torch": torch, "OfOneself": OfOneself})
    first, second = (o.param_groups[0] for o in (made, written(list(model.parameters()))))
    assert first == second
