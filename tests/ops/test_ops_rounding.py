"""What the formats promise, against fp64 and tables: nearest codes, half a step, no bias."""

from __future__ import annotations

import itertools
import math

import device_ops as ops
import pytest
import torch
from codec_cases import CPU_IMPLS, SCALED, block_sizes, kinds, seeds, sizes, values
from hypothesis import given
from hypothesis import strategies as st
from test_ops_reduce import true_values
from torch import Tensor

from diloco_comm.ops.reference_codec import philox, random_bits
from diloco_comm.ops.wire import ELEMENT_WIRES, Layout, WireFormat, rng_key

every_impl = pytest.mark.parametrize("impl", ["reference", *CPU_IMPLS])
every_wire = pytest.mark.parametrize("wire", ELEMENT_WIRES)


def through(x: Tensor, wire: WireFormat, impl: str, **options) -> tuple[Tensor, Tensor]:
    """Encode and decode x in one run; return the values and the scale of each element."""
    count = x.numel()
    layout = Layout.plan(count, 1, 1, wire)
    form = (layout.run_elements, wire.name, wire.block_size)
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    ops.encode(None, [x], payload, 0, count, *form, impl=impl, **options)
    out = torch.empty(count)
    ops.decode([payload], [1.0], [out], 0, count, *form, impl=impl)
    if not wire.has_scales:
        return out, torch.ones(count)
    num_blocks = -(-count // wire.block_size)
    scales = payload[: 2 * num_blocks].view(torch.bfloat16).float()
    return out, scales.repeat_interleave(wire.block_size)[:count]


def steps(y: Tensor, wire: str) -> Tensor:
    """Return the distance between the two codes around each fp64 scaled element."""
    if wire in ("int8", "int4"):
        return torch.ones_like(y)
    mantissa_bits, min_exponent = {
        "fp32": (23, -126),
        "bf16": (7, -126),
        "fp16": (10, -14),
        "fp8_e4m3": (3, -6),
        "fp8_e5m2": (2, -14),
        "e3m0": (0, -2),
    }[wire]
    exponent = (torch.frexp(y.abs()).exponent - 1).clamp(min=min_exponent)
    return torch.ldexp(torch.ones_like(y), exponent - mantissa_bits)


@every_impl
@every_wire
@given(data=st.data())
def test_error_is_at_most_half_a_step(impl: str, wire: str, data: st.DataObject) -> None:
    """|decoded - x| <= step / 2, or one step if stochastic, plus the four fp32 roundings."""
    form = WireFormat(wire, data.draw(block_sizes))
    x = values(
        data.draw(sizes), data.draw(kinds.filter(lambda kind: kind != "bad")), data.draw(seeds)
    )
    largest = 65504.0 if wire == "fp16" else 2.0**126
    x = torch.where(x.abs() <= largest, x, 1.0)
    stochastic = data.draw(st.booleans())
    out, scale = through(x, form, impl, stochastic=stochastic, rng_key=7)
    exact, scale = x.double(), scale.double()
    # x / scale rounded as in the encoder may fall in the next binade: take the larger step there.
    y = (exact / scale) * (1 + 2.0**-22)
    step = steps(y, wire) * scale
    bound = step * (1.0 if stochastic else 0.5) + exact.abs() * 2.0**-22 + 2.0**-149
    if wire == "fp16" and stochastic:
        bound = torch.where(exact.abs() > 65472, 65504.0, bound)  # may overflow and be refused
    assert ((out.double() - exact).abs() <= bound).all()


@every_impl
@pytest.mark.parametrize("wire", SCALED)
@given(data=st.data())
def test_scale_is_absmax_rounded_up(impl: str, wire: str, data: st.DataObject) -> None:
    """The smallest bf16 not below absmax / qmax, at least 2^-126; the largest never clips."""
    form = WireFormat(wire, 32)
    x = values(
        32, data.draw(st.sampled_from(["normal", "wide", "subnormal", "zeros"])), data.draw(seeds)
    )
    _, scale = through(x, form, impl)
    quotient = (x.abs().max() / form.qmax).item()
    exact = scale[0].item()
    assert exact >= quotient and exact >= 2.0**-126
    below = (scale[:1].view(torch.int32) - 0x10000).view(torch.float32).item()
    assert below < max(quotient, 2.0**-126)
    assert x.double().abs().max() / exact <= form.qmax * (1 + 2.0**-23)


@every_impl
@pytest.mark.parametrize("wire", [name for name in ELEMENT_WIRES if name != "fp32"])
def test_nearest_is_nearest_in_the_table_of_codes(impl: str, wire: str) -> None:
    """At every code, every middle of two codes and both fp32 neighbours of that."""
    form = WireFormat(wire, 1024)
    table = true_values(wire)
    largest = form.qmax if form.has_scales else 2.0**125
    codes = table[table.isfinite() & (table.abs() <= largest)]
    codes = codes.unique()
    codes, upper = codes[:-1], codes[1:]
    middle = ((codes.double() + upper.double()) / 2).float()
    inf = torch.tensor(torch.inf)
    x = torch.cat([codes, upper, middle, middle.nextafter(inf), middle.nextafter(-inf)])
    x = torch.cat([x, x * 0.9, x * 0.51])
    if form.has_scales:
        # A maximum in each block that makes the scale one.
        x = torch.nn.functional.pad(x, (0, -x.numel() % 1023)).view(-1, 1023)
        x = torch.cat([torch.full((x.shape[0], 1), form.qmax), x], dim=1).flatten()
    out, scale = through(x, form, impl)
    assert (scale == 1).all()
    assert torch.equal(out + 0.0, nearest_in_table(x, wire))


def nearest_in_table(x: Tensor, wire: str) -> Tensor:
    """Search all finite codes; a tie goes to the code with an even bit pattern."""
    table = true_values(wire)
    if wire in ("int8", "int4"):
        codes = torch.arange(table.numel())
        usable = table > -(table.numel() // 2)
    else:
        codes, usable = torch.arange(table.numel()), table.isfinite()
    order = table[usable].sort()
    values_sorted, codes_sorted = order.values.double(), codes[usable][order.indices]
    keep = torch.ones_like(codes_sorted, dtype=torch.bool)
    keep[1:] = values_sorted[1:] != values_sorted[:-1]
    values_sorted, codes_sorted = values_sorted[keep], codes_sorted[keep]
    right = torch.searchsorted(values_sorted, x.double()).clamp(1, values_sorted.numel() - 1)
    low, high = values_sorted[right - 1], values_sorted[right]
    to_low, to_high = (x.double() - low).abs(), (high - x.double()).abs()
    high_is_even = codes_sorted[right] % 2 == 0
    take_high = (to_high < to_low) | ((to_high == to_low) & high_is_even)
    return torch.where(take_high, high, low).float() + 0.0


@every_impl
@pytest.mark.parametrize("wire", [name for name in ELEMENT_WIRES if name != "fp32"])
def test_stochastic_rounding_has_no_bias(impl: str, wire: str) -> None:
    """The mean of n roundings lies within 6 standard deviations + 2^-17 steps of the element."""
    form, n = WireFormat(wire, 1024), 1 << 16
    low, high = {
        "int8": (5.0, 6.0),
        "int4": (-3.0, -2.0),
        "e3m0": (4.0, 8.0),
        "fp8_e4m3": (10.0, 11.0),
        "fp8_e5m2": (-40.0, -32.0),
        "bf16": (1.0, 1.0 + 2.0**-7),
        "fp16": (512.0, 512.5),
    }[wire]
    tiny_low, tiny_high = {
        "e3m0": (0.0, 0.25),
        "fp8_e4m3": (2.0**-9, 2.0**-8),
        "fp8_e5m2": (0.0, 2.0**-16),
        "bf16": (2.0**-133, 2.0**-132),
        "fp16": (511 * 2.0**-24, 512 * 2.0**-24),
    }.get(wire, (0.0, 1.0))
    for lower, upper in ((low, high), (tiny_low, tiny_high)):
        for i, p in enumerate((0.001, 0.1, 0.37, 0.5, 0.93)):
            element = torch.tensor(lower + p * (upper - lower)).float()
            x = element.repeat(n)
            if form.has_scales:
                x[::1024] = form.qmax
            out, scale = through(x, form, impl, stochastic=True, rng_key=rng_key(i, 0, 0, 1, 2))
            assert (scale == 1).all()
            out = out[x == element].double()
            assert torch.isin(out, torch.tensor([lower, upper]).double()).all()
            exact_p = (element.double().item() - lower) / (upper - lower)
            deviation = math.sqrt(exact_p * (1 - exact_p) / out.numel())
            up = (out == upper).double().mean().item()
            assert abs(up - exact_p) <= 6 * deviation + 2.0**-13 * (wire == "fp16") + 2.0**-17


@every_impl
@every_wire
def test_stochastic_rounding_leaves_codes_alone(impl: str, wire: str) -> None:
    form = WireFormat(wire, 1024)
    if wire == "fp32":
        x = values(4096, "wide", 3)
    else:
        x = true_values(wire)
        x = x[x.isfinite() & (x.abs() <= (form.qmax if form.has_scales else 2.0**126))]
    x = x + 0.0 if wire in ("int8", "int4", "e3m0") else x
    if wire == "fp16":
        x = torch.cat([x, torch.full((1 << 18,), 1023 * 2.0**-24)])
    if form.has_scales:
        x = torch.nn.functional.pad(x.repeat(200), (0, 1024))
        x[::1024] = form.qmax
    for key in range(3):
        out, scale = through(x, form, impl, stochastic=True, rng_key=key)
        assert (scale == 1).all() or x[-1024:].abs().max() == 0
        assert torch.equal(out[: x.numel() - 1024], x[: x.numel() - 1024])


@every_impl
def test_stochastic_errors_are_independent(impl: str) -> None:
    """No correlation between neighbours, keys or replicas, within five standard deviations."""
    form, n = WireFormat("int8", 1024), 1 << 16
    x = values(n, "normal", 9)
    keys = [
        rng_key(*part)
        for part in ((0, 0, 0, 1, 0), (0, 1, 0, 1, 0), (0, 0, 1, 1, 0), (0, 0, 0, 2, 0))
    ]
    errors = [through(x, form, impl, stochastic=True, rng_key=key)[0] - x for key in keys]
    errors = [(error - error.mean()) / error.std() for error in errors]
    # Each element's error has mean zero, so the products of independent ones have mean zero too.
    for lag in (1, 2, 7, 8):
        correlation = (errors[0][lag:] * errors[0][:-lag]).mean().item()
        assert abs(correlation) < 5 / math.sqrt(n)
    for first, second in itertools.combinations(errors, 2):
        assert abs((first * second).mean().item()) < 5 / math.sqrt(n)


@every_impl
def test_stochastic_rounding_does_not_depend_on_the_runs(impl: str) -> None:
    """The bits belong to the element of the fragment, wherever its run begins."""
    x, outs = values(8192, "normal", 10), []
    for num_runs in (1, 4, 32):
        layout = Layout.plan(8192, num_runs, 1, WireFormat("int4"))
        form = (layout.run_elements, "int4", 256)
        payload, out = torch.zeros(layout.payload_bytes, dtype=torch.uint8), torch.empty(8192)
        ops.encode(None, [x], payload, 0, 8192, *form, stochastic=True, rng_key=5, impl=impl)
        ops.decode([payload], [1.0], [out], 0, 8192, *form, impl=impl)
        outs.append(out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_philox_is_the_published_one() -> None:
    """Known answers of the Random123 distribution, and which bytes make an element's 16 bits."""
    pi, e = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 0x299F31D0A4093822
    ones = [0xFFFFFFFF] * 4
    answers = [
        (7, [0, 0, 0, 0], 0, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (7, ones, -1, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (7, pi, e, [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]),
        (10, [0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (10, ones, -1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (10, pi, e, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]
    for rounds, counter, key, expected in answers:
        words = philox([torch.tensor([word]) for word in counter], key, rounds)
        assert [int(word) for word in words] == expected
    assert random_bits(0, 6, 0).tolist() == [0x09B7, 0xB709, 0x6F5F, 0x5F6F, 0x643F, 0x3F64]
    assert torch.equal(random_bits(5, 100, 3), random_bits(0, 105, 3)[5:])


@every_impl
@pytest.mark.parametrize(
    ("wire", "block_size", "expected"),
    [
        ("int8", 256, 0.0070),
        ("int8", 32, 0.0054),
        ("fp8_e4m3", 256, 0.026),
        ("int4", 256, 0.127),
        ("int4", 32, 0.097),
        ("bf16", 256, 0.0017),
        ("fp16", 256, 0.00021),
        ("fp8_e5m2", 256, 0.052),
        ("e3m0", 256, 0.195),
    ],
)
def test_relative_error_on_gaussian_data(
    impl: str, wire: str, block_size: int, expected: float
) -> None:
    """The documented relative L2 errors of one encoding, to the two digits they are given with."""
    x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(1))
    out, _ = through(x, WireFormat(wire, block_size), impl)
    assert ((out - x).norm() / x.norm()).item() == pytest.approx(expected, rel=0.04)
