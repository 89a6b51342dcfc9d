"""encode: every implementation gives the reference's bytes, residuals and counts."""

from __future__ import annotations

import device_ops as ops
import pytest
import torch
from codec_cases import (
    CPU_IMPLS,
    HOST_IMPLS,
    IMPLS,
    KINDS,
    LOW_PRECISION,
    SIZES,
    Fragment,
    assert_same,
    block_sizes,
    dtype_names,
    encode,
    fill,
    fragment,
    kinds,
    low_precision,
    remembered,
    seeds,
    sizes,
    values,
)
from hypothesis import given
from hypothesis import strategies as st

from diloco_comm.ops.wire import ELEMENT_WIRES, Layout, WireFormat

every_impl = pytest.mark.parametrize("impl", IMPLS)
every_wire = pytest.mark.parametrize("wire", ELEMENT_WIRES)
every_low_precision = pytest.mark.parametrize("dtypes", LOW_PRECISION, ids=dtype_names)


def check(case: Fragment, impl: str, **options) -> None:
    """Compare payload, count and new residual with the reference's."""

    def results_of(name: str) -> tuple:
        own = dict(options)
        if "residual" in own:
            own["new_residual"] = torch.full_like(own["residual"], 9.0)
        return (*encode(case, name, **own), own.get("new_residual"))

    payload, count, error = results_of(impl)
    true_payload, true_count, true_error = remembered(
        lambda: results_of("reference"), case.outer, case.params, case.layout, options
    )
    what = f"of {case.layout} with {options.keys()}"
    assert_same(payload, true_payload, f"{impl} payload {what}")
    assert count == true_count
    if error is not None:
        assert_same(error, true_error, f"{impl} new residual {what}")


@every_impl
@every_wire
def test_sizes(impl: str, wire: str) -> None:
    for num_elements in SIZES:
        case = fragment(num_elements, WireFormat(wire), "normal", num_elements, num_runs=3)
        for stochastic in (False, True):
            check(case, impl, stochastic=stochastic, rng_key=-12345)


@pytest.mark.each_pair("256 combinations")
@every_impl
@every_wire
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_values(impl: str, wire: str, kind: str) -> None:
    for seed, block_size in enumerate((32, 64, 128, 256, 512, 1024)):
        case = fragment(4000 + seed, WireFormat(wire, block_size), kind, seed, num_runs=2)
        residual = values(4000 + seed, "normal", seed + 50)
        for stochastic in (False, True):
            check(case, impl, stochastic=stochastic, rng_key=seed)
            check(case, impl, stochastic=stochastic, rng_key=seed, residual=residual)


@pytest.mark.each_value("32 combinations of many fragments")
@every_impl
@every_wire
@given(data=st.data())
def test_any_fragment(impl: str, wire: str, data: st.DataObject) -> None:
    num_elements, seed = data.draw(sizes), data.draw(seeds)
    case = fragment(
        num_elements,
        WireFormat(wire, data.draw(block_sizes)),
        data.draw(kinds),
        seed,
        num_runs=data.draw(st.integers(1, 5)),
        with_outer=data.draw(st.booleans()),
    )
    options = {
        "stochastic": data.draw(st.booleans()),
        "rng_key": data.draw(st.integers(-9, 9)) << 59,
    }
    residual_dtype = data.draw(st.sampled_from([None, torch.float32, torch.bfloat16]))
    if residual_dtype is not None:
        options["residual"] = values(num_elements, data.draw(kinds), seed + 1).to(residual_dtype)
    check(case, impl, **options)


@pytest.mark.each_pair("96 combinations")
@every_impl
@every_wire
@every_low_precision
def test_low_precision(impl: str, wire: str, dtypes: tuple) -> None:
    """Pseudo-gradients of few units: the outer values are rounded as the parameters were."""
    for kind in ("normal", "wide", "subnormal", "edge", "bad"):
        check_low_precision(impl, wire, dtypes, kind, 4099)


def check_low_precision(impl: str, wire: str, dtypes: tuple, kind: str, num_elements: int) -> None:
    outer, params = low_precision(num_elements, dtypes, kind, 5)
    case = Fragment(outer, params, Layout.plan(num_elements, 2, 1, WireFormat(wire, 64)))
    check(case, impl)
    residual = values(num_elements, "normal", 9)
    check(case, impl, residual=residual, stochastic=True, rng_key=3)


@every_impl
@pytest.mark.parametrize("wire", ["fp32", "int8"])
@every_low_precision
def test_a_parameter_that_did_not_move_has_no_pseudo_gradient(
    impl: str, wire: str, dtypes: tuple
) -> None:
    outer, params = low_precision(4099, dtypes, "normal", 1)
    fill(params, outer)
    case = Fragment(outer, params, Layout.plan(4099, 2, 1, WireFormat(wire, 64)))
    payload, count = encode(case, impl)
    decoded = torch.ones(4099)
    ops.decode([payload], [1.0], [decoded], 0, 4099, *case.form, impl=impl)
    assert count == 0
    assert (decoded == 0).all()


@pytest.mark.each_pair("64 combinations")
@every_impl
@every_wire
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_ranges_add_up_to_the_whole(impl: str, wire: str, stochastic: bool) -> None:
    case = fragment(5000, WireFormat(wire, 64), "good", 3, num_runs=7)
    options = {"stochastic": stochastic, "rng_key": 1 << 62}
    whole, _ = encode(case, "reference", **options)
    parts, run = case.payload(), case.layout.run_elements
    for begin, end in ((3 * run, 5000), (0, run), (run, 3 * run)):
        ops.encode(case.outer, case.params, parts, begin, end, *case.form, impl=impl, **options)
    assert_same(parts, whole, "payload encoded in three ranges")


@every_impl
@every_wire
def test_residual_may_be_updated_in_place(impl: str, wire: str) -> None:
    case = fragment(1000, WireFormat(wire, 64), "normal", 1)
    for dtype in (torch.float32, torch.bfloat16):
        expected = torch.empty(1000, dtype=dtype)
        residual = values(1000, "normal", 2).to(dtype)
        encode(case, "reference", residual=residual.clone(), new_residual=expected)
        encode(case, impl, residual=residual, new_residual=residual)
        assert_same(residual, expected, "residual written over itself")


@every_impl
@every_wire
def test_bad_elements_are_counted_and_sent_as_zeros(impl: str, wire: str) -> None:
    case = fragment(600, WireFormat(wire, 256), "normal", 4)
    assert case.outer is not None
    for idx, value in ((0, float("nan")), (3, float("inf")), (300, -1e38), (599, 3e38)):
        case.outer[idx] = value
    payload, count = encode(case, impl)
    assert count == 4
    out = torch.full((600,), 7.0)
    ops.decode([payload], [1.0], [out], 0, 600, *case.form, impl=impl)
    assert out.isfinite().all()
    scaled = case.layout.wire.has_scales
    assert (out == 0).all() if scaled else (out == 0).sum() == 4


@every_impl
@pytest.mark.parametrize(("wire", "count"), [("fp16", 1), ("bf16", 0), ("fp32", 0)])
def test_fp16_overflow_is_a_bad_element(impl: str, wire: str, count: int) -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, 1.0])
    payload, bad = torch.zeros(512 * 2, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    ops.encode(None, [x], payload, 0, 4, 256, wire, 256, nonfinite=bad, impl=impl)
    assert int(bad) == count


@pytest.mark.parametrize("impl", HOST_IMPLS)
@every_wire
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_flush_to_zero_changes_nothing(impl: str, wire: str, stochastic: bool) -> None:
    case = fragment(3000, WireFormat(wire), "subnormal", 5)
    expected, _ = encode(case, "reference", stochastic=stochastic)
    tiny = torch.tensor([2.0**-126])
    for name in (impl, "reference"):
        torch.set_flush_denormal(True)
        try:
            payload, _ = encode(case, name, stochastic=stochastic)
            still_flushes = (tiny * 0.5).item() == 0.0
        finally:
            torch.set_flush_denormal(False)
        assert_same(payload, expected, f"{name} payload under flush-to-zero")
        assert still_flushes
    encode(case, impl)
    assert (tiny * 0.5).item() != 0.0


@pytest.mark.parametrize("impl", CPU_IMPLS)
@every_wire
def test_threads_change_nothing(impl: str, wire: str) -> None:
    num_elements = 400_003  # several of the 4096-block pieces that threads share
    case = fragment(num_elements, WireFormat(wire, 32), "good", 6, num_runs=2)
    options = {"stochastic": True, "residual": values(num_elements, "normal", 7)}
    expected, _ = encode(case, "reference", **options)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            payload, _ = encode(case, impl, **options)
            assert_same(payload, expected, f"payload with {threads} threads")
    finally:
        torch.set_num_threads(before)
