"""The single-process truth of a whole exchange, ``reference.all_reduce``."""

from __future__ import annotations

import pytest
import torch
from codec_cases import CPU_IMPLS, fill, flat, fragment, tensors_like, values
from torch import Tensor

from diloco_comm import ops
from diloco_comm.ops import reference
from diloco_comm.ops.wire import ELEMENT_WIRES, Layout, WireFormat, rng_key

every_wire = pytest.mark.parametrize("wire", ELEMENT_WIRES)


def ranks(world_size: int, num_elements: int, seed: int = 0) -> list[list[Tensor]]:
    """Return each rank's tensors of one fragment."""
    fragments = []
    for rank in range(world_size):
        tensors = tensors_like(num_elements, seed)
        fill(tensors, values(num_elements, "normal", seed + 10 * rank))
        fragments.append(tensors)
    return fragments


def result_of(terms: list[tuple[Tensor, float]], layout: Layout) -> Tensor:
    out = torch.empty(layout.num_elements)
    payloads, coefficients = [term[0] for term in terms], [term[1] for term in terms]
    form = (layout.run_elements, layout.wire.name, layout.wire.block_size)
    reference.decode(payloads, coefficients, [out], 0, layout.num_elements, *form)
    return out


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("num_elements", [1, 300, 10_001])
def test_fp32_is_the_weighted_sum_in_rank_order(world_size: int, num_elements: int) -> None:
    params = ranks(world_size, num_elements)
    weights = [1.0 + rank for rank in range(world_size)]
    layout = Layout.plan(num_elements, world_size, 2, WireFormat("fp32"))
    actual = result_of(reference.all_reduce(params, layout, weights), layout)
    factors = [torch.tensor(weight / sum(weights)) for weight in weights]
    expected = factors[0] * flat(params[0])
    for factor, tensors in zip(factors[1:], params[1:], strict=True):
        expected = expected + factor * flat(tensors)
    assert torch.equal(actual, expected)


@every_wire
def test_terms_by_world_size(wire: str) -> None:
    for world_size in (1, 2, 3):
        layout = Layout.plan(1000, world_size, 1, WireFormat(wire))
        terms = reference.all_reduce(ranks(world_size, 1000), layout, [1.0, 3.0, 4.0][:world_size])
        coefficients = [coefficient for _, coefficient in terms]
        assert coefficients == {1: [1.0], 2: [0.25, 0.75], 3: [1.0]}[world_size]
        assert all(payload.numel() == layout.payload_bytes for payload, _ in terms)


@pytest.mark.each_pair("48 combinations")
@every_wire
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_two_phases_from_operators(wire: str, stochastic: bool, impl: str) -> None:
    """Encode on four replicas, reduce each run on its owner: the same bytes."""
    world_size, num_elements, ids = 4, 5003, [3, 5, 6, 9]
    params = ranks(world_size, num_elements)
    layout = Layout.plan(num_elements, world_size, 3, WireFormat(wire, 64))
    form = (layout.run_elements, wire, 64)
    outer = values(num_elements, "normal", 99)
    truth = reference.all_reduce(
        params, layout, [1, 2, 3, 4], outers=[outer] * 4, stochastic=stochastic, seed=17,
        replicas=ids, round=8, fragment=2,
    )  # fmt: skip
    payloads = torch.zeros(world_size, layout.payload_bytes, dtype=torch.uint8)
    for rank in range(world_size):
        key = rng_key(17, ids[rank], 0, 8, 2)
        ops.encode(
            outer, params[rank], payloads[rank], 0, num_elements, *form,
            stochastic=stochastic, rng_key=key, impl=impl,
        )  # fmt: skip
    average = torch.zeros(layout.num_runs, layout.run_bytes, dtype=torch.uint8)
    received = payloads.view(world_size, layout.num_runs, layout.run_bytes)
    for run_idx in range(layout.num_runs):
        begin, end = layout.run_range(run_idx)
        key = rng_key(17, ids[run_idx % world_size], 1, 8, 2)
        ops.reduce(
            received[:, run_idx].flatten(), average[run_idx], [0.1, 0.2, 0.3, 0.4], end - begin,
            *form, stochastic=stochastic, rng_key=key, index_begin=begin, impl=impl,
        )  # fmt: skip
    assert len(truth) == 1 and truth[0][1] == 1.0
    assert torch.equal(average.flatten(), truth[0][0])


@every_wire
def test_result_does_not_depend_on_chunks_or_on_tensors(wire: str) -> None:
    """Where runs begin changes no element: blocks are counted in the fragment."""
    params = ranks(3, 6001)
    whole = [[flat(tensors)] for tensors in params]
    results = []
    for num_chunks, tensors in ((1, params), (2, whole), (5, params)):
        layout = Layout.plan(6001, 3, num_chunks, WireFormat(wire, 32))
        terms = reference.all_reduce(tensors, layout, [1, 1, 2])
        results.append(result_of(terms, layout))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_bad_elements_are_counted_by_rank() -> None:
    params = [[values(1000, "normal", rank)] for rank in range(3)]
    params[1][0][5] = float("nan")
    params[2][0][:3] = float("inf")
    counts = torch.zeros(3, dtype=torch.int64)
    layout = Layout.plan(1000, 3, 1, WireFormat("int8"))
    reference.all_reduce(params, layout, nonfinite=counts)
    assert counts.tolist() == [0, 1, 3]


@pytest.mark.parametrize("wire", ["int4", "e3m0", "int8"])
def test_error_feedback_makes_the_bias_vanish(wire: str) -> None:
    """The mean over rounds of what arrives tends to the true mean, like one over the rounds."""
    world_size, n, rounds = 3, 2000, 64
    params = [[values(n, "normal", rank)] for rank in range(world_size)]
    exact = sum(flat(tensors).double() for tensors in params) / world_size
    layout = Layout.plan(n, world_size, 1, WireFormat(wire))
    residuals = [torch.zeros(n) for _ in range(world_size)]
    reduce_residual = torch.zeros(n)
    total, first = torch.zeros(n, dtype=torch.float64), None
    for _ in range(rounds):
        terms = reference.all_reduce(
            params, layout, residuals=residuals, new_residuals=residuals,
            reduce_residual=reduce_residual, new_reduce_residual=reduce_residual,
        )  # fmt: skip
        arrived = result_of(terms, layout).double()
        first = (arrived - exact).norm() if first is None else first
        total += arrived
    assert (total / rounds - exact).norm() <= 4 * first / rounds


@pytest.mark.parametrize(("wire", "must"), [("int8", 0.0102), ("int4", 0.185)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_relative_error_of_an_all_reduce(wire: str, must: float, world_size: int) -> None:
    n = 1 << 17
    rng = torch.Generator().manual_seed(5)
    params = [[torch.randn(n, generator=rng)] for _ in range(world_size)]
    exact = sum(flat(tensors).double() for tensors in params) / world_size
    layout = Layout.plan(n, world_size, 1, WireFormat(wire))
    actual = result_of(reference.all_reduce(params, layout), layout)
    assert ((actual - exact).norm() / exact.norm()).item() < must


def test_empty_fragment() -> None:
    layout = Layout.plan(0, 3, 1, WireFormat())
    terms = reference.all_reduce([[], [torch.empty(0)], []], layout)
    assert result_of(terms, layout).numel() == 0
    case = fragment(1, WireFormat(), num_runs=3)
    assert len(reference.all_reduce([case.params] * 3, case.layout)) == 1
