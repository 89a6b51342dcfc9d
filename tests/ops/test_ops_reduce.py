"""reduce and decode: the same bytes as the reference, and an error that the format explains."""

from __future__ import annotations

import device_ops as ops
import pytest
import torch
from codec_cases import (
    IMPLS,
    SIZES,
    Fragment,
    assert_same,
    block_sizes,
    clone,
    fill,
    fragment,
    kinds,
    remembered,
    seeds,
    sizes,
    tensors_like,
    values,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco_comm.ops import reference
from diloco_comm.ops.wire import ELEMENT_WIRES, Layout, WireFormat

every_impl = pytest.mark.parametrize("impl", IMPLS)
every_wire = pytest.mark.parametrize("wire", ELEMENT_WIRES)


def received_runs(num_ranks: int, count: int, wire: WireFormat, kind: str, seed: int) -> Tensor:
    """Encode one run of ``count`` elements for each rank, one after the other."""
    layout = Layout.plan(count, 1, 1, wire)
    runs = []
    for rank in range(num_ranks):
        run = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
        x = values(count, kind, seed + rank)
        form = (layout.run_elements, wire.name, wire.block_size)
        reference.encode(None, [x], run, 0, count, *form)
        runs.append(run)
    return torch.cat(runs)


def check_reduce(
    received: Tensor, weights: list[float], count: int, wire: WireFormat, impl: str, **options
) -> None:
    """Compare one reduction with the reference: bytes, count of bad elements, new residual."""
    run_bytes = received.numel() // len(weights)
    run_elements = Layout.plan(count, 1, 1, wire).run_elements
    form = (run_elements, wire.name, wire.block_size)

    def outcome_of(name: str) -> tuple:
        result = torch.full((run_bytes,), 0xA5, dtype=torch.uint8)
        nonfinite = torch.tensor([2])
        own = dict(options)
        if "residual" in own:
            own["new_residual"] = torch.full_like(own["residual"], 9.0)
        ops.reduce(received, result, weights, count, *form, nonfinite=nonfinite, impl=name, **own)
        return result, int(nonfinite), own.get("new_residual")

    result, bad, error = outcome_of(impl)
    true_result, true_bad, true_error = remembered(
        lambda: outcome_of("reference"), received, weights, count, form, options
    )
    assert_same(result, true_result, f"{impl} result")
    assert bad == true_bad
    if error is not None:
        assert_same(error, true_error, f"{impl} new residual")


@pytest.mark.each_pair("128 combinations")
@every_impl
@every_wire
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_sizes(impl: str, wire: str, num_ranks: int) -> None:
    form = WireFormat(wire, 128)
    for num_elements in SIZES if num_ranks == 3 else SIZES[:-1]:
        received = received_runs(num_ranks, num_elements, form, "normal", num_ranks)
        weights = reference.normalised([1.0 + rank for rank in range(num_ranks)])
        check_reduce(received, weights, num_elements, form, impl)


@pytest.mark.each_value("32 combinations of many runs")
@every_impl
@every_wire
@given(data=st.data())
def test_any_run(impl: str, wire: str, data: st.DataObject) -> None:
    count, seed = data.draw(sizes), data.draw(seeds)
    form = WireFormat(wire, data.draw(block_sizes))
    weights = data.draw(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=8))
    received = received_runs(len(weights), count, form, data.draw(kinds), seed)
    if data.draw(st.booleans()):
        # Any bytes at all: scales and codes that no encoder makes decode to what their bits say.
        rng = torch.Generator().manual_seed(seed)
        shape = (received.numel(),)
        received = torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng)
    options = {
        "stochastic": data.draw(st.booleans()),
        "rng_key": data.draw(st.integers(-(2**63), 2**63 - 1)),
        "index_begin": form.block_size * data.draw(st.integers(0, 2**50)),
    }
    residual_dtype = data.draw(st.sampled_from([None, torch.float32, torch.bfloat16]))
    if residual_dtype is not None:
        options["residual"] = values(count, data.draw(kinds), seed + 9).to(residual_dtype)
    check_reduce(received, reference.normalised(weights), count, form, impl, **options)


@every_impl
@every_wire
def test_sum_is_as_good_as_torch(impl: str, wire: str) -> None:
    """Error against the fp64 sum: at most twice that of torch's fp32 sum, plus one rounding."""
    form, count, num_ranks = WireFormat(wire), 4096, 4
    received = received_runs(num_ranks, count, form, "normal", 11)
    weights = reference.normalised([1.0, 2.0, 3.0, 4.5])
    layout = Layout.plan(count, 1, 1, form)
    args = (layout.run_elements, wire, form.block_size)
    decoded = torch.empty(num_ranks, count)
    for row, run in zip(decoded, received.view(num_ranks, -1), strict=True):
        ops.decode([run], [1.0], [row], 0, count, *args, impl=impl)
    exact = (decoded.double() * torch.tensor(weights).double()[:, None]).sum(0)
    honest = (decoded * torch.tensor(weights)[:, None]).sum(0)
    result, rounded = torch.zeros(layout.payload_bytes, dtype=torch.uint8), torch.empty(count)
    error = torch.zeros(count)
    residual = torch.zeros(count)
    ops.reduce(
        received, result, weights, count, *args, residual=residual, new_residual=error, impl=impl
    )
    ops.decode([result], [1.0], [rounded], 0, count, *args, impl=impl)
    # rounded + error is the sum before it was encoded, up to the rounding of that subtraction.
    summed = rounded.double() + error.double()
    slack = 2.0**-24 * error.abs().max().item() + 1e-12
    assert (summed - exact).abs().max() <= 2 * (honest - exact).abs().max() + slack


@pytest.mark.each_value("32 combinations of many payloads")
@every_impl
@every_wire
@given(data=st.data())
def test_decode_any_payload(impl: str, wire: str, data: st.DataObject) -> None:
    num_elements, seed = data.draw(sizes), data.draw(seeds)
    form = WireFormat(wire, data.draw(block_sizes))
    layout = Layout.plan(num_elements, data.draw(st.integers(1, 4)), 1, form)
    num_terms = data.draw(st.integers(1, 3))
    if data.draw(st.booleans()):
        rng = torch.Generator().manual_seed(seed)
        shape = (num_terms, layout.payload_bytes)
        payloads = list(torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng))
    else:
        payloads = [whole_payload(layout, data.draw(kinds), seed + i) for i in range(num_terms)]
    coefficients = data.draw(
        st.lists(st.floats(-2, 2, width=32), min_size=num_terms, max_size=num_terms)
    )
    args = (layout.run_elements, wire, form.block_size)
    filled = -(-num_elements // layout.run_elements)
    begin = layout.run_range(data.draw(st.integers(0, filled - 1)))[0]
    outs = tensors_like(num_elements, seed)
    fill(outs, torch.full((num_elements,), 3.0))
    expected = clone(outs)
    reference.decode(payloads, coefficients, expected, begin, num_elements, *args)
    ops.decode(payloads, coefficients, outs, begin, num_elements, *args, impl=impl)
    for out, true_out in zip(outs, expected, strict=True):
        assert_same(out, true_out, f"{impl} decoded {tuple(out.shape)} {out.dtype}")


def whole_payload(layout: Layout, kind: str, seed: int) -> Tensor:
    """Encode values of one kind into a payload of the given layout."""
    case = Fragment(None, [values(layout.num_elements, kind, seed)], layout)
    payload = case.payload()
    reference.encode(None, case.params, payload, 0, layout.num_elements, *case.form)
    return payload


@every_impl
@pytest.mark.parametrize("wire", [name for name in ELEMENT_WIRES if name != "fp32"])
def test_every_code_decodes_to_what_its_bits_say(impl: str, wire: str) -> None:
    form = WireFormat(wire, 256)
    codes = torch.arange(1 << form.code_bits)
    if form.code_bits == 16:
        stored = codes.to(torch.int16).view(torch.uint8)
    elif form.code_bits == 8:
        stored = codes.to(torch.uint8)
    else:
        stored = (codes[0::2] | (codes[1::2] << 4)).to(torch.uint8)
    count = codes.numel()
    layout = Layout.plan(count, 1, 1, form)
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    offset = form.code_offset(layout.run_elements)
    payload[offset : offset + stored.numel()] = stored
    if form.has_scales:
        payload[:2] = torch.tensor([0.5], dtype=torch.bfloat16).view(torch.uint8)
    out = torch.empty(count)
    ops.decode([payload], [1.0], [out], 0, count, layout.run_elements, wire, 256, impl=impl)
    assert_same(out, 0.5 * true_values(wire) if form.has_scales else true_values(wire), wire)


def true_values(wire: str) -> Tensor:
    """The values of all codes in order, from the formats' definitions."""
    if wire == "int8":
        return torch.tensor([*range(128), *range(-128, 0)]).float()
    if wire == "int4":
        return torch.tensor([*range(8), *range(-8, 0)]).float()
    if wire == "e3m0":
        magnitudes = torch.tensor([0, 0.25, 0.5, 1, 2, 4, 8, 16])
        return torch.cat([magnitudes, -magnitudes])
    exponent_bits, mantissa_bits, bias, has_inf = {
        "bf16": (8, 7, 127, True),
        "fp16": (5, 10, 15, True),
        "fp8_e4m3": (4, 3, 7, False),
        "fp8_e5m2": (5, 2, 15, True),
    }[wire]
    code = torch.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = mantissa.double() / (1 << mantissa_bits)
    normal = torch.ldexp(1 + fraction, exponent - bias)
    value = torch.where(exponent == 0, torch.ldexp(fraction, torch.tensor(1 - bias)), normal)
    top = exponent == (1 << exponent_bits) - 1
    if has_inf:
        value = torch.where(top, torch.where(mantissa == 0, torch.inf, torch.nan), value)
    else:
        value = torch.where(code == code.max(), torch.nan, value)
    return torch.cat([value, -value]).float()


@every_impl
def test_decode_into_a_half_of_the_fragment_leaves_the_rest(impl: str) -> None:
    case = fragment(1024, WireFormat("int8", 32), "normal", 8, num_runs=4)
    payload = case.payload()
    reference.encode(case.outer, case.params, payload, 0, 1024, *case.form)
    out = torch.full((1024,), -3.0)
    ops.decode([payload], [1.0], [out], 256, 512, *case.form, impl=impl)
    assert (out[:256] == -3).all() and (out[512:] == -3).all() and (out[256:512] != -3).all()
