"""Rotated and sparse wires: every implementation gives the reference's bytes, steps and counts."""

from __future__ import annotations

import device_ops as ops
import pytest
import torch
from codec_cases import (
    CPU_IMPLS,
    IMPLS,
    KINDS,
    Fragment,
    assert_same,
    clone,
    encode,
    fragment,
    kinds,
    remembered,
    seeds,
    sizes,
    values,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco_comm.kernels.checks import check_layout
from diloco_comm.ops.wire import ROTATED_WIRES, SPARSE_WIRES, Layout, WireFormat

REFERENCE = pytest.param("reference", id="reference")


every_impl = pytest.mark.parametrize("impl", IMPLS)
every_wire = pytest.mark.parametrize("wire", [*ROTATED_WIRES, *SPARSE_WIRES])
rotated_wires = pytest.mark.parametrize("wire", ROTATED_WIRES)
OPTIMIZERS = ("sgd", "heavy_ball", "nesterov", "adam", "delayed")


# The largest sum of the coefficients of a decoded block: their number, times the larger level.
LARGEST_SUMS = {"int2r": 2560, "int1r": 256, "sub2": 512, "sub4": 256, "sub8": 128, "sub16": 64}


def float_bits(value: float) -> int:
    return int(torch.tensor(value).view(torch.int32))


def check(case: Fragment, impl: str, **options) -> None:
    """Compare payload, count, new residual and decoded values with the reference's."""

    def results_of(name: str) -> tuple:
        own = dict(options)
        if "residual" in own:
            own["new_residual"] = torch.full_like(own["residual"], 9.0)
        payload, count = encode(case, name, **own)
        out = torch.full((case.layout.num_elements,), 7.0)
        whole = (0, case.layout.num_elements)
        ops.decode([payload], [0.37], [out], *whole, *case.form, impl=name)
        return payload, out, own.get("new_residual"), count

    results = results_of(impl)
    truths = remembered(
        lambda: results_of("reference"), case.outer, case.params, case.layout, options
    )
    for mine, truth in zip(results[:3], truths[:3], strict=True):
        if mine is not None:
            assert_same(mine, truth, f"{impl} of {case.layout} with {options.keys()}")
    assert results[3] == truths[3]


@pytest.mark.each_pair("320 combinations")
@every_impl
@every_wire
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_values(impl: str, wire: str, kind: str) -> None:
    for num_elements in (1, 256, 1025, 5000):
        case = fragment(num_elements, WireFormat(wire), kind, num_elements, num_runs=2)
        check(case, impl, rng_key=num_elements)
        residual = values(num_elements, "normal", num_elements + 50)
        check(case, impl, rng_key=-num_elements, residual=residual)
        check(case, impl, rng_key=-num_elements, residual=residual.bfloat16())


@pytest.mark.parametrize("impl", CPU_IMPLS)
@pytest.mark.parametrize("wire", ["int2r", "int1r"])
def test_scales_where_bounds_of_the_sum_of_squares_are_far_apart(impl: str, wire: str) -> None:
    """Blocks with few elements, of all exponents: some bounds lead to different scales."""
    num_blocks = 2048
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(num_blocks, 256, generator=rng)
    x *= torch.rand(num_blocks, 256, generator=rng) < 0.05
    x = torch.ldexp(x, torch.randint(-126, 113, (num_blocks, 1), generator=rng)).flatten()
    layout = Layout.plan(x.numel(), 1, 1, WireFormat(wire))
    payloads = torch.zeros(2, layout.payload_bytes, dtype=torch.uint8)
    form = (layout.run_elements, wire, layout.wire.block_size)
    for payload, name in zip(payloads, (impl, "reference"), strict=True):
        ops.encode(None, [x], payload, 0, x.numel(), *form, rng_key=5, impl=name)
    assert_same(payloads[0], payloads[1], impl)


@pytest.mark.each_value("40 combinations of many fragments")
@every_impl
@every_wire
@given(data=st.data())
def test_any_fragment(impl: str, wire: str, data: st.DataObject) -> None:
    num_elements, seed = data.draw(sizes), data.draw(seeds)
    case = fragment(
        num_elements,
        WireFormat(wire),
        data.draw(kinds),
        seed,
        num_runs=data.draw(st.integers(1, 5)),
        with_outer=data.draw(st.booleans()),
    )
    options = {"rng_key": data.draw(st.integers(-(2**63), 2**63 - 1))}
    dtype = data.draw(st.sampled_from([None, torch.float32, torch.bfloat16]))
    if dtype is not None:
        options["residual"] = values(num_elements, data.draw(kinds), seed + 1).to(dtype)
    check(case, impl, **options)


@every_impl
@every_wire
def test_ranges_add_up_to_the_whole(impl: str, wire: str) -> None:
    size = 30_000 if wire.startswith("topk") else 9000
    case = fragment(size, WireFormat(wire), "good", 3, num_runs=7)
    whole, _ = encode(case, "reference", rng_key=1 << 62)
    parts, run = case.payload(), case.layout.run_elements
    for begin, end in ((3 * run, size), (0, run), (run, 3 * run)):
        form = case.form
        ops.encode(case.outer, case.params, parts, begin, end, *form, rng_key=1 << 62, impl=impl)
    assert_same(parts, whole, "payload encoded in three ranges")


def several(wire: str, num_elements: int, num_payloads: int) -> tuple[Layout, list[Tensor]]:
    layout = Layout.plan(num_elements, 1, 1, WireFormat(wire))
    form = (layout.run_elements, wire, layout.wire.block_size)
    payloads = []
    for i in range(num_payloads):
        payloads.append(torch.zeros(layout.payload_bytes, dtype=torch.uint8))
        x = values(num_elements, "normal", i)
        ops.encode(None, [x], payloads[-1], 0, num_elements, *form, rng_key=i, impl="reference")
    return layout, payloads


@pytest.mark.each_pair("160 combinations")
@every_impl
@every_wire
@pytest.mark.parametrize("num_payloads", [1, 2, 3, 5])
def test_reduce(impl: str, wire: str, num_payloads: int) -> None:
    for num_elements in (700, 2048):
        layout, payloads = several(wire, num_elements, num_payloads)
        weights = [1 / (2 + i) for i in range(num_payloads)]
        results = []
        for name in (impl, "reference"):
            for residual in (None, values(num_elements, "normal", 99)):
                new = None if residual is None else torch.empty(num_elements)
                result, bad = (
                    torch.zeros(layout.payload_bytes, dtype=torch.uint8),
                    torch.tensor([0]),
                )
                ops.reduce(
                    torch.cat(payloads), result, weights, num_elements, layout.run_elements, wire,
                    layout.wire.block_size, rng_key=77, residual=residual, new_residual=new,
                    nonfinite=bad, impl=name,
                )  # fmt: skip
                results.append((result, new if new is not None else torch.empty(0), bad))
        for mine, truth in zip(results[:2], results[2:], strict=True):
            for a, b in zip(mine, truth, strict=True):
                assert_same(a, b, impl)


@pytest.mark.each_pair("200 combinations")
@every_impl
@every_wire
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_outer_steps(impl: str, wire: str, optimizer: str) -> None:
    layout, payloads = several(wire, 3000, 3)
    common = (0, 3000, layout.run_elements, wire, layout.wire.block_size)
    start = fragment(3000, layout.wire, "normal", 8)
    results = []
    for name in (impl, "reference"):
        params = clone(start.params)
        outer, momentum, second = (values(3000, "normal", seed) for seed in (1, 2, 3))
        terms = (payloads, [0.5, 0.3, 0.2])
        if optimizer == "adam":
            second.abs_()
            ops.outer_step_adam(
                outer, momentum, second, params, *terms, *common, 0.1, 0.9, 0.99, 1e-8, 3, impl=name
            )
        elif optimizer == "delayed":
            ops.outer_step_delayed(
                outer, momentum, second, *terms, *common, 0.7, mu=0.9, ahead=0.2, last=True,
                impl=name,
            )  # fmt: skip
        else:
            ops.outer_step(
                outer, momentum, params, *terms, *common, optimizer, 0.7, mu=0.9, alpha=0.25,
                impl=name,
            )  # fmt: skip
        results.append([outer, momentum, second, *params])
    for mine, truth in zip(*results, strict=True):
        assert_same(mine, truth, f"{impl} {optimizer}")


@every_impl
@rotated_wires
def test_largest_magnitude(impl: str, wire: str) -> None:
    size = WireFormat(wire).block_size
    for value, bad in ((2.0**116, 0), (2.0**116 * (1 + 2.0**-23), 1), (-torch.inf, 1)):
        x = torch.full((size,), 2.0**116)
        x[3] = value
        layout = Layout.plan(size, 1, 1, WireFormat(wire))
        case = Fragment(None, [x], layout)
        payload, count = encode(case, impl, rng_key=5)
        assert count == bad
        out = torch.empty(size)
        ops.decode([payload], [1.0], [out], 0, size, *case.form, impl=impl)
        assert bool((out.abs() <= 2.0**126).all()) and bool(out.any()) == (bad == 0)
        check(case, impl, rng_key=5)


@pytest.mark.parametrize("impl", [REFERENCE, *IMPLS])
@every_wire
def test_a_scale_that_no_encoder_makes_decodes_to_nan(impl: str, wire: str) -> None:
    size = 2 * WireFormat(wire).block_size
    layout, (payload,) = several(wire, size, 1)
    form = (layout.run_elements, wire, layout.wire.block_size)
    # The largest scale with which no element exceeds 2^126, one more, and the largest bf16 number.
    largest = float_bits(2.0**126 / LARGEST_SUMS.get(wire, 1)) >> 16
    place, block = layout.wire.scale_offset, layout.wire.block_size
    out = torch.zeros(size)
    payload[place : place + 2] = torch.tensor([largest & 0xFF, largest >> 8])
    ops.decode([payload], [1.0], [out], 0, size, *form, impl=impl)
    assert bool((out.abs() <= 2.0**126).all()) and bool((out[:block].abs() > 0).any())
    too_large = (largest + 1, 0x7F7F)
    for bits in (0x8000, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0x0001, 0x007F, *too_large):
        payload[place : place + 2] = torch.tensor([bits & 0xFF, bits >> 8])
        out = torch.zeros(size)
        ops.decode([payload], [0.5], [out], 0, size, *form, impl=impl)
        assert bool(out[:block].isnan().all()) and bool(out[block:].isfinite().all())
        result, bad = torch.zeros_like(payload), torch.tensor([0])
        ops.reduce(payload, result, [1.0], size, *form, nonfinite=bad, impl=impl)
        assert int(bad) == block


@pytest.mark.parametrize("wire", ROTATED_WIRES + SPARSE_WIRES)
def test_triton_kernels_refuse_another_block_size(wire: str) -> None:
    size = WireFormat(wire).block_size
    with pytest.raises(ValueError, match=f"wire {wire} has blocks of {size}, got block_size=512"):
        check_layout(wire, 512, 512)
