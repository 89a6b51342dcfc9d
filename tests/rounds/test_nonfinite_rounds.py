"""One NaN in one replica, for ever or once: resets against one process with plain operators.

Also rounds in which all replicas are sick.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Regression, attach, equal, parameters_of, train_step
from torch import Tensor, nn
from workers import Pool

from diloco_comm import Blocking, Delayed, Eager, Nesterov, NonFiniteError, Streaming
from diloco_comm.ops import reference
from diloco_comm.ops.wire import ELEMENT_WIRES, Layout, WireFormat

H, ROUNDS, VICTIM, BLOCK = 4, 50, 1, 32
LR, MU = 0.7, 0.9
RESET: dict[str, Any] = {"sync_every": H, "on_nonfinite": "reset"}


@torch.no_grad()
def spoil(model: nn.Module) -> None:
    next(model.parameters())[0, 0] = math.nan


# ------------------------------------------------------------------------------ one NaN, 50 rounds


def one_nan(rank: int, world: int, arguments: dict[str, Any]) -> tuple[list[Tensor], list[Any]]:
    """Train 50 rounds with a NaN at inner step 7; what there is after each step that applies."""
    outer = {"outer": Nesterov(LR, MU)}
    model, optimizer, diloco = attach(rank, **RESET, **outer, **arguments)
    seen = []
    with diloco:
        for step in range(ROUNDS * H + diloco.settings.overlap.steps()):
            if rank == VICTIM and step == 6:
                spoil(model)
            train_step(model, optimizer, rank, step)
            if diloco.metrics() and diloco.metrics()[-1].inner_step == step + 1:
                part = diloco.parts[0]
                seen += [part.outer.clone(), part.state.momentum.clone(), *parameters_of(model)]
        applied = [(m.is_applied, m.is_reset, m.reset_replicas) for m in diloco.metrics()]
        return seen, applied


def one_nan_alone(
    _rank: int, _world: int, world: int, overlap: Any, wire: WireFormat, keeps_residuals: bool
) -> list[list[Tensor]]:
    """The same in one process, replica after replica, without the sick one in its round."""
    models = [Regression() for _ in range(world)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    tensors = [[param.detach() for param in model.parameters()] for model in models]
    outer = torch.cat([tensor.flatten() for tensor in tensors[0]])
    momentum, terms = torch.zeros_like(outer), []
    layout = Layout.plan(outer.numel(), world, 1, wire)
    lost = _Lost(outer, world) if keeps_residuals else None
    seen: list[list[Tensor]] = [[] for _ in models]
    for step in range(1, ROUNDS * H + overlap.steps() + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if rank == VICTIM and step == 7:
                spoil(model)
            train_step(model, optimizer, rank, step - 1)
        if step % H == 0:
            weights = [0.0 if tensors[r][0].isnan().any() else 1.0 for r in range(world)]
            assert weights.count(0.0) == (step == 2 * H)
            for rank in range(world):
                if weights[rank] == 0.0:
                    reference.merge(outer, tensors[rank])
            residuals: dict[str, Any] = lost.arguments() if lost else {}
            outers = [outer] * world
            residuals["round"] = step // H - 1
            terms = reference.all_reduce(tensors, layout, weights, outers=outers, **residuals)
            if lost:
                lost.turn(weights, wire.feedback_decay)
        if step > overlap.steps() and (step - overlap.steps()) % H == 0:
            payloads, shares = zip(*terms, strict=True)
            reference.outer_step(
                outer, momentum, [], payloads, shares, 0, outer.numel(), layout.run_elements,
                wire.name, wire.block_size, "nesterov", LR, MU,
            )  # fmt: skip
            for rank in range(world):
                reference.merge(outer, tensors[rank], overlap.alpha)
                seen[rank] += [outer.clone(), momentum.clone(), *parameters_of(models[rank])]
    return seen


class _Lost:
    """What encodings and the reduction have lost; the sick one's encoding loses nothing."""

    def __init__(self, outer: Tensor, world: int) -> None:
        self.old, self.new = ([torch.zeros_like(outer) for _ in range(world)] for _ in range(2))
        self.reduction, self.new_reduction = torch.zeros_like(outer), torch.zeros_like(outer)

    def arguments(self) -> dict[str, Any]:
        reduction = {"reduce_residual": self.reduction, "new_reduce_residual": self.new_reduction}
        return {"residuals": self.old, "new_residuals": self.new, **reduction}

    def turn(self, weights: list[float], decay: float) -> None:
        for old, new, weight in zip(self.old, self.new, weights, strict=True):
            if weight:
                old.copy_(new * decay)
        self.reduction.copy_(self.new_reduction)


@pytest.mark.nightly(
    "up to 9 s each; they differ in wire and policy", but=["int8-False-blocking-2"]
)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("overlap", [Blocking(), Streaming(2, 0.5)], ids=["blocking", "streaming"])
@pytest.mark.parametrize(
    ("wire", "error_feedback"),
    [
        ("fp32", False),
        ("int8", False),
        ("int4", False),
        ("int4", True),
        ("int2r", True),
        ("sub8", False),
        ("topk64", True),
    ],
)
def test_one_nan_costs_one_replica_one_round(
    workers: Callable[[int], Pool], world: int, overlap: Any, wire: str, error_feedback: bool
) -> None:
    form = WireFormat(wire, BLOCK) if wire in ELEMENT_WIRES else WireFormat(wire)
    (expected,) = workers(1).run(one_nan_alone, world, overlap, form, error_feedback)
    arguments = {"overlap": overlap, "wire": form, "error_feedback": error_feedback}
    for rank, (seen, applied) in enumerate(workers(world).run(one_nan, arguments)):
        assert equal(seen, expected[rank]), rank
        healthy = (True, False, ())
        sick = (True, rank == VICTIM, (VICTIM,))
        assert applied == [healthy, sick, *[healthy] * (ROUNDS - 2)]


# ------------------------------------------------------------------------------------- all of them


def all_sick(rank: int, world: int, arguments: dict[str, Any], num_bad: int) -> list[Any]:
    """All replicas are sick in ``num_bad`` rounds in a row, from the second on."""
    model, optimizer, diloco = attach(rank, **RESET, **arguments)
    failure = None
    with diloco:
        for step in range(8 * H):
            if step % H == H - 1 and 1 <= step // H <= num_bad:
                spoil(model)
            before = diloco.outer_hash()
            try:
                train_step(model, optimizer, rank, step)
            except NonFiniteError as error:
                failure = (diloco.inner_step, str(error), error.replicas, error.stage)
                break
            if step == 2 * H - 1:
                is_outer = diloco.outer_hash() == before or diloco.settings.overlap.rounds > 0
                taken = torch.cat([tensor.flatten() for tensor in parameters_of(model)])
                is_outer = is_outer and equal([taken], [diloco.parts[0].outer])
                assert is_outer, "the outer parameters are not as before, or not the local ones"
        if failure is None:
            diloco.flush()
        verdicts = [(m.is_applied, m.is_reset, m.reset_replicas) for m in diloco.metrics()]
        return [failure, verdicts, diloco.outer_hash(), parameters_of(model)]


ALL_SICK = [
    ("blocking", {"overlap": Blocking()}),
    ("delayed_2", {"overlap": Delayed(2), "wire": "int8", "error_feedback": True}),
    ("eager", {"overlap": Eager(), "wire": "int4"}),
    ("eager_sync", {"overlap": Eager(2, "sync")}),
]


@pytest.mark.each_value("1 s each; they differ in policy and number of replicas")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("name", "arguments"), ALL_SICK, ids=[name for name, _ in ALL_SICK])
def test_a_round_in_which_all_are_sick_is_skipped(
    workers: Callable[[int], Pool], world: int, name: str, arguments: dict[str, Any]
) -> None:
    everyone = tuple(range(world))
    results = workers(world).run(all_sick, arguments, 1)
    for failure, verdicts, outer, local in results:
        assert failure is None
        assert verdicts.count((False, True, everyone)) == 1
        assert verdicts.count((True, False, ())) == len(verdicts) - 1 >= 7
        assert outer == results[0][2] and equal(local, results[0][3])
        assert all(tensor.isfinite().all() for tensor in local)


@pytest.mark.parametrize(("name", "arguments"), ALL_SICK, ids=[name for name, _ in ALL_SICK])
def test_all_sick_too_often_is_an_error(
    workers: Callable[[int], Pool], name: str, arguments: dict[str, Any]
) -> None:
    results = workers(2).run(all_sick, arguments, 6)
    failure, verdicts, *_ = results[0]
    # A first round that is waited for is sent again at once.
    late = 0 if name == "eager_sync" else arguments["overlap"].rounds
    assert failure is not None
    assert failure[0] == (2 + 3 + late) * H and failure[2:] == ((0, 1), "header")
    assert "on replicas 0, 1, and no other replica has a weight" in failure[1]
    assert "3 rounds in a row" in failure[1] and "restore replicas 0, 1" in failure[1]
    assert verdicts.count((False, True, (0, 1))) == 4
    assert all(result[:2] == results[0][:2] for result in results)
