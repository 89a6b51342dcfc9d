"""The communication hook: DDP's gradients, quantised at every step."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from devices import GPU
from problems import Regression, batch, parameters_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import diloco_comm
from diloco_comm import NonFiniteError
from diloco_comm.integrations.ddp_hook import QuantizedAllReduce, quantized_allreduce_hook

# DDP's first step has one bucket, whatever is asked for; the later ones hold 0.12 of 0.4 MB.
WIDTH = 160
BUCKETS = {"bucket_cap_mb": 0.12}


def make_model(
    *, device: str = "cpu", find_unused_parameters: bool = False, **hook: Any
) -> tuple[DistributedDataParallel, QuantizedAllReduce]:
    model = DistributedDataParallel(
        Regression(WIDTH).to(device), find_unused_parameters=find_unused_parameters, **BUCKETS
    )
    state = QuantizedAllReduce(**hook)
    model.register_comm_hook(state, quantized_allreduce_hook)
    return model, state


def backward(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    place = next(model.parameters()).device
    x, y = (part.to(place) for part in batch(rank, step, WIDTH))
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    return [param.grad.clone() for param in model.parameters()]


def gradients(rank: int, world: int, wire: str, device: str) -> tuple[float, list[int], bytes]:
    model, _ = make_model(wire=wire, device=device)
    own = Regression(WIDTH).to(device)
    num_calls: list[int] = []
    errors = []
    for step in range(3):
        with CountCalls(num_calls):
            ours = torch.cat([g.flatten() for g in backward(model, rank, step)])
        exact = torch.zeros_like(ours)
        for peer in range(world):
            exact += torch.cat([g.flatten() for g in backward(own, peer, step)]) / world
        errors.append(float((ours - exact).norm() / exact.norm()))
    return max(errors), num_calls, ours.cpu().numpy().tobytes()


class CountCalls:
    """Count the exchanges that a block begins."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def _calls(self) -> int:
        engines = diloco_comm.exchange.collective._engines.values()
        return sum(engine.num_calls for by_lanes in engines for engine in by_lanes.values())

    def __enter__(self) -> None:
        self.before = self._calls()

    def __exit__(self, *exception: object) -> None:
        self.counts.append(self._calls() - self.before)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    ("world", "wire", "bound"),
    # Gradients of one batch are spread wider than Gaussian data, which lose half as much.
    [(2, "int8", 0.02), (3, "int8", 0.02), (2, "fp32", 1e-6), (2, "int4", 0.35)],
)
def test_gradients_are_the_mean(world: int, wire: str, bound: float, device: str, workers) -> None:
    results = workers(world).run(gradients, wire, device)
    assert len({digest for *_, digest in results}) == 1
    for error, num_buckets, _ in results:
        assert error <= bound
        assert (error > 1e-3) == (wire != "fp32")
        assert num_buckets[0] == 1 and num_buckets[1] == num_buckets[2] >= 2


def mean_of_steps(rank: int, world: int, error_feedback: bool) -> float:
    """Return how far the mean of many int4 gradients of one batch is from the exact one."""
    model, state = make_model(wire="int4", block_size=32, error_feedback=error_feedback)
    own = Regression(WIDTH)
    exact = sum(torch.cat([g.flatten() for g in backward(own, r, 0)]) for r in range(world)) / world
    total = torch.zeros_like(exact)
    for _ in range(20):
        total += torch.cat([g.flatten() for g in backward(model, rank, 0)])
    # After the first step DDP makes new buckets, which take the residuals of the first ones over.
    kept = sum(residual.numel() for residual in state._residuals.values())
    assert kept == (exact.numel() if error_feedback else 0)
    return float((total / 20 - exact).norm() / exact.norm())


def test_error_feedback_makes_the_mean_right(workers) -> None:
    [without, _] = workers(2).run(mean_of_steps, False)
    [with_feedback, _] = workers(2).run(mean_of_steps, True)
    # 20 steps together lose as much as one step.
    assert with_feedback < without / 5


def saved_and_resumed(rank: int, world: int, is_rebuilt: bool) -> tuple[bool, bool, float]:
    """Compare a resumed run with a whole run: residuals, gradients, distance of the gradients."""
    options = {"wire": "int4", "error_feedback": True, "find_unused_parameters": not is_rebuilt}
    model, state = make_model(**options)
    for step in range(3):
        backward(model, rank, step)
    saved = state.state_dict()
    whole = torch.cat([g.flatten() for g in backward(model, rank, 3)])
    resumed_model, resumed = make_model(**options)
    resumed.load_state_dict(saved)
    again = resumed.state_dict()["residuals"]
    is_same = all(torch.equal(again[place], value) for place, value in saved["residuals"].items())
    is_whole = sum(map(torch.numel, again.values())) == whole.numel()
    ours = torch.cat([g.flatten() for g in backward(resumed_model, rank, 3)])
    return is_same and is_whole, torch.equal(ours, whole), float((ours - whole).norm())


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_residuals_are_saved_and_resumed(is_rebuilt: bool, workers) -> None:
    fresh = workers(2).run(mean_of_resumed_without_state)
    for (is_same, is_equal, distance), lost in zip(
        workers(2).run(saved_and_resumed, is_rebuilt), fresh, strict=True
    ):
        assert is_same
        # Where DDP makes new buckets, the blocks of the first step after a resume are others.
        assert is_equal or (is_rebuilt and distance < lost)


def mean_of_resumed_without_state(rank: int, world: int) -> float:
    """Return the distance of gradients with and without the residuals of three steps."""
    model, _ = make_model(wire="int4", error_feedback=True)
    for step in range(3):
        backward(model, rank, step)
    whole = torch.cat([g.flatten() for g in backward(model, rank, 3)])
    again, _ = make_model(wire="int4", error_feedback=True)
    return float((torch.cat([g.flatten() for g in backward(again, rank, 3)]) - whole).norm())


def test_a_state_that_does_not_fit_is_one_sentence(workers) -> None:
    state = QuantizedAllReduce(wire="int4", error_feedback=True)
    with pytest.raises(ValueError, match="has no 'residuals'"):
        state.load_state_dict({})
    with pytest.raises(ValueError, match="construct with error_feedback=True"):
        QuantizedAllReduce().load_state_dict({"residuals": {0: torch.zeros(3)}})
    with pytest.raises(TypeError, match="save its state_dict\\(\\) on every rank"):
        pickle.dumps(state)
    assert all("has 3 elements" in message for message in workers(2).run(wrong_residual))


def wrong_residual(rank: int, world: int) -> str:
    model, state = make_model(wire="int4", error_feedback=True)
    state.load_state_dict({"residuals": {0: torch.zeros(3)}})
    try:
        backward(model, rank, 0)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def dropped_residual(rank: int, world: int) -> tuple[float, float]:
    model, state = make_model(wire="topk256", error_feedback=True)
    own = torch.cat([g.flatten() for g in backward(Regression(WIDTH), rank, 0)])
    backward(model, rank, 0)
    [residual] = state._residuals.values()
    return float(residual.norm()), float(own.norm())


def test_a_sparse_wire_needs_error_feedback_and_keeps_less_than_all(workers) -> None:
    with pytest.raises(ValueError, match="topk64' needs error_feedback=True"):
        QuantizedAllReduce(wire="topk64")
    for residual, whole in workers(2).run(dropped_residual):
        assert 0.5 * whole < residual <= 0.95 * whole


def non_finite(rank: int, world: int, error_feedback: bool) -> list[Any]:
    model, state = make_model(error_feedback=error_feedback)
    backward(model, rank, 0)
    backward(model, rank, 1)
    before = parameters_of(model)
    x, y = batch(rank, 2, WIDTH)
    if rank == 1:
        y[0] = float("inf")
    model.zero_grad()
    try:
        nn.functional.mse_loss(model(x), y).backward()
        message = ""
    except (NonFiniteError, RuntimeError) as error:
        message = str(error)
    finite = all(bool(r.isfinite().all()) for r in state._residuals.values())
    same = all(torch.equal(a, b) for a, b in zip(before, parameters_of(model), strict=True))
    diloco_comm.shutdown()
    return [message, finite, same]


@pytest.mark.parametrize("error_feedback", [False, True])
def test_values_that_are_not_finite_are_an_error_of_backward(
    error_feedback: bool, fresh_workers
) -> None:
    for message, finite, same in fresh_workers(2).run(non_finite, error_feedback):
        assert "NaN, Inf" in message and "on replica 1" in message
        assert finite and same
