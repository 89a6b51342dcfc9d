"""Outer optimizers of torch get the tensors' own shapes, and elementwise ones keep their bits."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from choice_groups import grouped
from problems import attach, equal, train_step
from torch import Tensor, nn

from diloco_comm import DiLoCo, FromTorch, ops
from diloco_comm.methods.outer import OuterState, Update, make_outer
from diloco_comm.ops.wire import Layout, WireFormat
from diloco_comm.replica.fragments import make_fragments

Factory = Callable[[Any], torch.optim.Optimizer]


class Odd(nn.Module):
    """Tensors of many kinds: strides of any order, no elements, no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(37, 11))
        self.transposed = nn.Parameter(torch.randn(29, 13).t())
        image = torch.randn(5, 3, 2, 7)
        self.image = nn.Parameter(image.to(memory_format=torch.channels_last))
        self.vector = nn.Parameter(torch.randn(101))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.number = nn.Parameter(torch.tensor(3.0))

    def forward(self) -> Tensor:
        return sum(((p + 1.0) ** 2).sum() for p in self.parameters())


SHAPES = [(37, 11), (13, 29), (5, 3, 2, 7), (101,), (1,)]


@pytest.mark.parametrize("aligned", [False, True])
def test_the_function_is_called_once_with_the_shapes_of_the_tensors(aligned: bool) -> None:
    given: list[list[nn.Parameter]] = []

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        given.append(params)
        return torch.optim.SGD(params, lr=1.0, momentum=0.5)

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fragments = [["matrix"], "rest"]
    arguments = {"wire": "int2r", "align_tensors": aligned, "fragments": fragments}
    settings = {"sync_every": 1, "offsets": [1, 1], "outer": make, "peers": "alone"}
    with closing(DiLoCo(model, optimizer, **grouped({**settings, **arguments}))) as diloco:
        for _ in range(3):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        diloco.state_dict()
        assert [[tuple(p.shape) for p in params] for params in given] == [SHAPES[:1], SHAPES[1:]]
        for params, part in zip(given, diloco.parts, strict=True):
            begin, end = part.outer.data_ptr(), part.outer.data_ptr() + part.outer.nbytes
            assert all(begin <= p.data_ptr() < end for p in params)
            outer = {n: o for n, o in part.fragment.views(part.outer).items() if o.numel()}
            assert all(
                torch.equal(p.view(o.shape), o) for p, o in zip(params, outer.values(), strict=True)
            )
            assert all(torch.equal(outer[n], model.get_parameter(n)) for n in outer)
            assert bool(part.fragment.padding()) == (aligned and len(params) > 1)


# ----------------------------------------------------------------------- elementwise optimizers

ELEMENTWISE: dict[str, Factory] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.7),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    "decay": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, weight_decay=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=0.3, eps=0.1),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.3, amsgrad=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.3, initial_accumulator_value=0.5),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.3, momentum=0.9, centered=True),
}


def states(factory: Factory) -> tuple[OuterState, OuterState]:
    """Return the state of an optimizer of one vector, and of one of the tensors' shapes."""
    model = Odd()
    (fragment,) = make_fragments(model, list(model.named_parameters()), 1)
    outer = torch.randn(fragment.num_elements)
    kind = FromTorch(factory)
    return kind.make_state(outer.clone()), kind.make_state(outer.clone(), fragment.cut)


def step_all(states: list[OuterState], num_steps: int) -> None:
    """Take the same steps with each state."""
    count = states[0].outer.numel()
    layout = Layout.plan(count, 1, 1, WireFormat("fp32"))
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    for _ in range(num_steps):
        gradient = torch.randn(count)
        ops.encode(None, [gradient], payload, 0, count, layout.run_elements, "fp32", 256)
        for state in states:
            state.step(Update([(payload, 1.0)], [torch.zeros(count)], layout, 0.5))


def values(state: OuterState) -> list[Tensor]:
    return [state.outer, *state.tensors().values()]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_have_the_bits_of_one_vector(name: str) -> None:
    flat, shaped = states(ELEMENTWISE[name])
    assert equal(values(flat), values(shaped)) and flat.tensors().keys() == shaped.tensors().keys()
    step_all([flat, shaped], 4)
    assert equal(values(flat), values(shaped)) and flat.tensors().keys() == shaped.tensors().keys()
    assert repr(flat.extra()) == repr(shaped.extra())


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_state_of_one_vector_goes_on_with_shapes(name: str) -> None:
    """Version 0.2 saved the state of an optimizer of one vector for each fragment."""
    flat, shaped = states(ELEMENTWISE[name])
    step_all([flat], 3)
    shaped.check(set(flat.tensors()), flat.extra())
    shaped.outer.copy_(flat.outer)
    shaped.num_steps = flat.num_steps
    shaped.load(flat.tensors(), flat.extra())
    step_all([flat, shaped], 2)
    assert equal(values(flat), values(shaped))


def test_a_state_of_one_vector_that_does_not_fit_is_refused() -> None:
    flat, shaped = states(functools.partial(torch.optim.Adafactor, lr=0.1))
    step_all([flat], 1)
    with pytest.raises(ValueError, match=r"lacks 'row_var' of shape \[37, 1\] for parameter 'mat"):
        shaped.check(set(flat.tensors()), flat.extra())


# --------------------------------------------------------------------------- rules of matrices


class MuonBesideSGD(torch.optim.Optimizer):
    """Muon for matrices, momentum for all other tensors; each with buffers of its own names."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.matrices = [p for p in params if p.ndim == 2]
        self.others = [p for p in params if p.ndim != 2]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.matrices:
            muon = self.state[param].setdefault("matrix_momentum", torch.zeros_like(param))
            muon.mul_(0.9).add_(param.grad)
            u, _, v = torch.linalg.svd(muon, full_matrices=False)
            param.sub_(u @ v, alpha=self.param_groups[0]["lr"])
        for param in self.others:
            # Not in place: the new tensor takes the place of the old one.
            before = self.state[param].get("momentum", torch.zeros_like(param))
            self.state[param]["momentum"] = before * 0.5 + param.grad
            param.sub_(self.state[param]["momentum"], alpha=self.param_groups[0]["lr"])


MATRIX_WISE: dict[str, Factory] = {
    "own": lambda params: MuonBesideSGD(params),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.05),
}


def test_muon_is_taken_as_outer_optimizer() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = functools.partial(torch.optim.Muon, lr=0.1)
    expected = nn.Parameter(model.weight.detach().clone())
    muon = make([expected])
    with DiLoCo(model, optimizer, sync_every=1, outer=make, wire="fp32", peers="alone"):
        for _ in range(3):
            before = model.weight.detach().clone()
            loss = (model(torch.randn(3, 6)) ** 2).sum()
            loss.backward()
            expected.grad = before - (before - 0.1 * model.weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            muon.step()
            assert torch.equal(model.weight, expected)


def train_matrix_wise(rank: int, world: int, name: str) -> list[bool]:
    """Save in the middle of a run, and resume with fragments of other parameters."""
    ends, weights = [], {}
    file = io.BytesIO()
    for fragments in (["*weight", "rest"], "layers:2", ["*weight", "rest"]):
        offsets = [2] * (3 if fragments == "layers:2" else 2)
        arguments = {"fragments": fragments, "offsets": offsets, "outer": MATRIX_WISE[name]}
        model, optimizer, diloco = attach(rank, **arguments)
        with closing(diloco):
            if weights:
                file.seek(0)
                diloco.load_state_dict(torch.load(file, weights_only=True))
                model.load_state_dict(weights)
            for step in range(diloco.inner_step, 8):
                if step == 4 and not weights:
                    weights = copy.deepcopy(model.state_dict())
                    torch.save(diloco.state_dict(), file)
                train_step(model, optimizer, rank, step)
            ends.append(copy.deepcopy(list(model.parameters())))
    return [equal(ends[0], end) for end in ends]


@pytest.mark.parametrize("name", MATRIX_WISE)
def test_a_rule_of_matrices_is_saved_and_resumed(name: str, workers) -> None:
    assert workers(2).run(train_matrix_wise, name) == [[True] * 3] * 2


def test_groups_keep_their_ratio_to_the_rate_of_the_round() -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices, others = (
            [p for p in params if (p.ndim == 2) is is_2d] for is_2d in (True, False)
        )
        groups = [{"params": matrices}, {"params": others, "lr": 0.25}]
        made.append(torch.optim.SGD(groups, lr=1.0))
        return made[-1]

    made: list[torch.optim.Optimizer] = []
    model, optimizer, diloco = attach(sync_every=1, outer=FromTorch(make, lr=0.5))
    with closing(diloco):
        train_step(model, optimizer, 0, 0)
        assert [group["lr"] for group in made[0].param_groups] == [0.5, 0.125]
        assert diloco.outer.shared_config()["groups"][0]["lr"] == 0.25
        diloco.outer.lr = 0.1
        train_step(model, optimizer, 0, 1)
        assert [group["lr"] for group in made[0].param_groups] == [0.1, 0.025]


def test_a_refusal_of_the_optimizer_reaches_the_user() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        attach_model(model, lambda params: torch.optim.Muon(params, lr=0.1))


def attach_model(model: nn.Module, outer: Any) -> DiLoCo:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DiLoCo(model, optimizer, sync_every=1, outer=make_outer(outer), peers="alone")
