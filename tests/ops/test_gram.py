"""gram: the reference's bits for every wire, plain fp64 products, fixed order, refusals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from codec_cases import CPU_IMPLS, assert_same, encode, fragment
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco_comm import ops
from diloco_comm.ops import reference
from diloco_comm.ops.wire import WIRES, Layout, WireFormat

every_impl = pytest.mark.parametrize("impl", CPU_IMPLS)
every_wire = pytest.mark.parametrize("wire", WIRES)


def payloads_of(
    count: int, num_elements: int, wire: WireFormat, num_runs: int = 1
) -> tuple[list[Tensor], Layout]:
    """Encode ``count`` pseudo-gradients of normal values."""
    cases = [fragment(num_elements, wire, seed=i, num_runs=num_runs) for i in range(count)]
    return [encode(case, "scalar")[0] for case in cases], cases[0].layout


def form_of(layout: Layout) -> tuple[int, int, str, int]:
    """Return num_elements, run_elements, wire and block_size."""
    wire = layout.wire
    return layout.num_elements, layout.run_elements, wire.name, wire.block_size


def gram(
    payloads: Sequence[Tensor], layout: Layout, begin: int, end: int, impl: str, first_row: int = 0
) -> Tensor:
    out = torch.full((len(payloads) ** 2,), 9.0, dtype=torch.float64)
    ops.gram(payloads, out, begin, end, *form_of(layout), first_row, impl=impl)
    return out


@every_impl
@every_wire
def test_bits_of_the_reference(impl: str, wire: str) -> None:
    for num_elements, count in ((1, 1), (4097, 3), (9001, 2)):
        payloads, layout = payloads_of(count, num_elements, WireFormat(wire))
        actual = gram(payloads, layout, 0, num_elements, impl)
        assert_same(actual, gram(payloads, layout, 0, num_elements, "reference"), wire)


@every_impl
@given(num_elements=st.integers(1, 3000), count=st.integers(1, 5), runs=st.integers(1, 3))
def test_plain_products(impl: str, num_elements: int, count: int, runs: int) -> None:
    """The matrix is that of the decoded values, and a part of the runs gives a part of the sum."""
    payloads, layout = payloads_of(count, num_elements, WireFormat("int8", 32), runs)
    decoded = [torch.zeros(num_elements) for _ in payloads]
    for payload, out in zip(payloads, decoded, strict=True):
        reference.decode([payload], [1.0], [out], 0, num_elements, *form_of(layout)[1:])
    rows = torch.stack(decoded).double()
    whole = gram(payloads, layout, 0, num_elements, impl)
    exact = (rows @ rows.T).flatten()
    torch.testing.assert_close(whole, exact, rtol=1e-12, atol=1e-18)
    # A range begins at a run: a fragment of one run has an empty first part.
    cut = layout.run_elements if num_elements > layout.run_elements else 0
    parts = [gram(payloads, layout, *span, impl) for span in ((0, cut), (cut, num_elements))]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("impl", [*CPU_IMPLS, "reference"])
@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_the_last_rows_alone(impl: str, wire: str) -> None:
    """The rest stays as it was; both halves of the matrix are written."""
    payloads, layout = payloads_of(7, 1000, WireFormat(wire))
    whole = gram(payloads, layout, 0, 1000, impl).view(7, 7)
    for first_row in (1, 6):
        rows = gram(payloads, layout, 0, 1000, impl, first_row).view(7, 7)
        assert torch.equal(rows[first_row:], whole[first_row:])
        assert torch.equal(rows[:, first_row:], whole[:, first_row:])
        assert (rows[:first_row, :first_row] == 9.0).all()
    with pytest.raises(ValueError, match=r"first_row must lie in \[0, 7\), got 7"):
        ops.gram(payloads, whole.flatten(), 0, 1000, *form_of(layout), 7)


@every_impl
@pytest.mark.parametrize("scale", [1e38, -3.0, 1e-38, float("inf"), float("nan")])
def test_scales_of_any_size_in_int8(impl: str, scale: float) -> None:
    """A block whose scale makes a code infinite has the products of the decoded values."""
    payloads, layout = payloads_of(3, 700, WireFormat("int8"))
    payloads[1][2:4] = torch.tensor([scale], dtype=torch.bfloat16).view(torch.uint8)
    actual = gram(payloads, layout, 0, 700, impl)
    assert_same(actual, gram(payloads, layout, 0, 700, "reference"), "gram")
    assert bool(actual.isfinite().all()) == (abs(scale) < 1e37)


@every_impl
@pytest.mark.parametrize("block_size", [32, 1024])
@pytest.mark.parametrize("num_elements", [1, 1023, 1024, 3 * 1024 + 17])
def test_the_largest_sums_of_int8_codes(impl: str, block_size: int, num_elements: int) -> None:
    """Nine payloads of codes of -128, which no encoder writes, and blocks that end anywhere."""
    wire = WireFormat("int8", block_size)
    payloads, layout = payloads_of(9, num_elements, wire)
    begin = wire.code_offset(layout.run_elements)
    for payload in payloads:
        payload[begin : begin + num_elements] = 0x80
    actual = gram(payloads, layout, 0, num_elements, impl)
    assert_same(actual, gram(payloads, layout, 0, num_elements, "reference"), "gram")
    # A mixture of signs: no sum of products in pairs may saturate.
    for number, payload in enumerate(payloads):
        payload[begin + number : begin + num_elements : 9] = 0x7F
    actual = gram(payloads, layout, 0, num_elements, impl)
    assert_same(actual, gram(payloads, layout, 0, num_elements, "reference"), "gram")


@pytest.mark.parametrize("impl", [*CPU_IMPLS, "reference"])
def test_an_empty_range_has_zero_products(impl: str) -> None:
    payloads, layout = payloads_of(2, 40, WireFormat("int8", 32))
    assert gram(payloads, layout, 0, 0, impl).tolist() == [0.0] * 4


@every_impl
def test_many_tiles_and_threads(impl: str) -> None:
    payloads, layout = payloads_of(2, 300_007, WireFormat("int4"), 3)
    expected = gram(payloads, layout, 0, 300_007, "reference")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert_same(gram(payloads, layout, 0, 300_007, impl), expected, "gram")
    finally:
        torch.set_num_threads(before)


@every_impl
def test_the_most_payloads(impl: str) -> None:
    payloads, layout = payloads_of(2, 40, WireFormat("fp32"))
    matrix = gram([payloads[0]] * 63 + [payloads[1]], layout, 0, 40, impl).view(64, 64)
    assert torch.equal(matrix, matrix.T) and len(matrix[:63, :63].unique()) == 1
    sentence = "payloads must hold 1 to 64 tensors, got 65"
    with pytest.raises(ValueError, match=sentence):
        gram([payloads[0]] * 65, layout, 0, 40, impl)


def test_refusals() -> None:
    payloads, layout = payloads_of(2, 40, WireFormat("int8"))
    form = form_of(layout)
    with pytest.raises(ValueError, match="out must have 4 elements for 2 payloads, got 2"):
        ops.gram(payloads, torch.zeros(2, dtype=torch.float64), 0, 40, *form)
    with pytest.raises(TypeError, match="out must be Double, got Float"):
        ops.gram(payloads, torch.zeros(4), 0, 40, *form)
    with pytest.raises(ValueError, match="payloads must hold 1 to 64 tensors, got 0"):
        ops.gram([], torch.zeros(0, dtype=torch.float64), 0, 40, *form)
    with pytest.raises(ValueError, match="must be whole runs"):
        ops.gram(payloads, torch.zeros(4, dtype=torch.float64), 0, 39, *form)
    with pytest.raises(ValueError, match="must be whole runs"):
        ops.gram(payloads, torch.zeros(4, dtype=torch.float64), 40, 40, *form)
    elsewhere = torch.zeros(4, dtype=torch.float64, device="meta")
    with pytest.raises(ValueError, match=r"gram runs on CPU tensors alone.*got a tensor on meta"):
        ops.gram(payloads, elsewhere, 0, 40, *form)
    with pytest.raises(ValueError, match=r"gram runs on CPU tensors alone.*got impl='triton'"):
        ops.gram(payloads, torch.zeros(4, dtype=torch.float64), 0, 40, *form, impl="triton")
