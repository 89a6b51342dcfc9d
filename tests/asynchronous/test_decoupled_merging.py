"""The merge of a quorum's reports: weights, radius and direction, the outer step, the pieces."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco_comm import Nesterov
from diloco_comm.asynchronous.decoupled import merges as fragments
from diloco_comm.asynchronous.decoupled.merges import Gathered, Piece, SharedFragment, pieces_of
from diloco_comm.asynchronous.model import layout_of
from diloco_comm.methods.outer import SGD, Adam
from diloco_comm.ops import reference
from diloco_comm.ops.wire import WireFormat


def encoded(values: Tensor, wire: WireFormat) -> Tensor:
    """Return the payload of a flat tensor."""
    layout = layout_of(values.numel(), wire)
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    form = (layout.run_elements, wire.name, wire.block_size)
    reference.encode(None, [values], payload, 0, layout.num_elements, *form)
    return payload


def decoded(payload: Tensor, count: int, wire: WireFormat) -> Tensor:
    layout, out = layout_of(count, wire), torch.zeros(count)
    form = (layout.run_elements, wire.name, wire.block_size)
    reference.decode([payload], [1.0], [out], 0, count, *form)
    return out.double()


def rda(rows: list[Tensor], weights: list[float]) -> Tensor:
    """The merge as its equation says, in fp64."""
    total = sum(weights)
    radius = sum(w * row.norm() for w, row in zip(weights, rows, strict=True)) / total
    mean = sum(w * row / row.norm() for w, row in zip(weights, rows, strict=True))
    return radius * mean / mean.norm()


def shared(values: Tensor, merge: str, wire: WireFormat, outer: object = None) -> SharedFragment:
    piece = Piece((0,), values.numel(), merge)
    return SharedFragment([values], [piece], wire, outer or SGD(1.0))


def test_worked_example() -> None:
    """v = (3, 4) and (0, -1), tokens/steps 100/10 and 200/10."""
    wire, weights = (
        WireFormat("fp32"),
        [fragments.report_weight(100, 10), fragments.report_weight(200, 10)],
    )
    assert weights == [1000.0, 4000.0]
    rows = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, -1.0])]
    merged = {}
    for merge in fragments.MERGES:
        fragment = shared(torch.zeros(2), merge, wire)
        fragment.merge([[encoded(row, wire)] for row in rows], weights)
        merged[merge] = (-fragment.values[0]).tolist()
    assert merged["rda"] == pytest.approx([0.3317193631, -1.7691699365], rel=1e-6)
    assert merged["mean"] == pytest.approx([0.6, 0.0], abs=1e-7)


@pytest.mark.nightly("up to 3 s each; they differ in their wire", but=["int4"])
@pytest.mark.parametrize("wire", ["fp32", "int8", "int4", "int2r"])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**20), count=st.integers(2, 8), size=st.integers(8, 700))
def test_rda_and_nesterov_in_fp64(wire: str, seed: int, count: int, size: int) -> None:
    """Two merges of decoded payloads, against the equations."""
    rng = torch.Generator().manual_seed(seed)
    form, start = WireFormat(wire), torch.randn(size, generator=rng)
    weights = torch.rand(count, generator=rng).add(0.1).tolist()
    fragment = shared(start, "rda", form, Nesterov(0.7, 0.9))
    theta, momentum = start.double(), torch.zeros(size, dtype=torch.float64)
    for _ in range(2):
        rows = torch.randn(count, size, generator=rng) + 0.3
        payloads = [encoded(row, form) for row in rows]
        fragment.merge([[payload] for payload in payloads], weights)
        g = rda([decoded(payload, size, form) for payload in payloads], weights)
        momentum = 0.9 * momentum + g
        theta = theta - 0.7 * (g + 0.9 * momentum)
    scale = theta.abs().max().item() + 4
    assert (fragment.values[0].double() - theta).abs().max().item() <= 2e-6 * scale


def coefficients(rows: list[list[float]], weights: list[float]) -> list[float]:
    matrix = torch.tensor(rows, dtype=torch.float64)
    return fragments.direction_coefficients((matrix @ matrix.T).flatten(), weights)


@pytest.mark.parametrize(
    ("angle", "is_mean"), [(0.0, True), (1e-7, True), (1e-5, False), (0.5, False)]
)
def test_opposite_directions_fall_back_to_the_mean(angle: float, is_mean: bool) -> None:
    """|u| of two opposite unit vectors, bent by an angle, is about half of the angle."""
    rows = [[1.0, 0.0], [-math.cos(angle), math.sin(angle)]]
    factors = coefficients(rows, [1.0, 1.0])
    assert (factors == [0.5, 0.5]) is is_mean
    if not is_mean:
        merged = [sum(f * row[i] for f, row in zip(factors, rows, strict=True)) for i in (0, 1)]
        assert math.hypot(*merged) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("merge", ["rda", "mean"])
def test_a_factor_beyond_fp32_falls_back_to_the_mean(merge: str) -> None:
    """A tiny report beside a usual one would get the factor 2.5e43, and the model -inf."""
    assert coefficients([[1.0, 0.0], [0.0, 1e-44]], [1.0, 1.0]) == [0.5, 0.5]
    wire = WireFormat("fp32")
    fragment = shared(torch.zeros(2), merge, wire)
    rows = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1e-44])]
    factors = fragment.merge([[encoded(row, wire)] for row in rows], [1.0, 1.0])
    assert factors == [[0.5, 0.5]] and fragment.values[0].tolist()[0] == -0.5
    # With a factor that fp32 holds the report keeps its direction.
    assert coefficients([[1.0, 0.0], [0.0, 1e-30]], [1.0, 1.0])[1] > 1e29


def test_zeros_have_a_radius_and_no_direction() -> None:
    assert coefficients([[0.0, 0.0], [0.0, 0.0]], [1.0, 3.0]) == [0.25, 0.75]
    assert coefficients([[0.0, 0.0], [0.0, 2.0]], [1.0, 3.0]) == [0.0, 0.75]


def test_one_report_is_itself() -> None:
    assert coefficients([[3.0, -4.0, 12.0]], [7.0]) == pytest.approx([1.0], rel=1e-15)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: fragments.report_weight(0, 1), "must be at least 1, got 0, 1"),
        (lambda: fragments.normalised([]), "weights must be positive numbers"),
        (lambda: fragments.normalised([1.0, -1.0]), "weights must be positive numbers"),
        (lambda: coefficients([[math.nan]], [1.0]), "Gram matrix must be finite"),
        (lambda: coefficients([[1.0]], [1.0, 1.0]), "2 payloads has 4 elements, got 1"),
        (lambda: pieces_of([(2, 2)], "median"), "merge must be one of mean, rda, got 'median'"),
        (lambda: pieces_of([(0, 2)]), "a fragment needs at least one element"),
        (
            lambda: shared(torch.zeros(2), "mean", WireFormat("fp32"), Adam(0.1)),
            "takes SGD, HeavyBall or Nesterov as the outer optimizer, got Adam",
        ),
    ],
)
def test_refusals(call: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()  # type: ignore[operator]


def test_pieces() -> None:
    """Matrices alone; vectors, small tensors and the named ones together, by the mean."""
    shapes = [(64, 32), (64,), (4, 4), (100, 50), (50, 64)]
    assert pieces_of(shapes) == [Piece((0, 1, 2, 3, 4), 10328, "mean")]
    assert pieces_of(shapes, "rda", by_mean=[3]) == [
        Piece((0,), 2048, "rda"),
        Piece((4,), 3200, "rda"),
        Piece((1, 2, 3), 5080, "mean"),
    ]
    assert pieces_of([(64, 32)], "rda") == [Piece((0,), 2048, "rda")]


def test_every_piece_has_its_own_factors() -> None:
    tensors = [torch.zeros(2, 2), torch.zeros(3)]
    pieces = pieces_of([t.shape for t in tensors], "rda", least=4)
    wire = WireFormat("fp32")
    fragment = SharedFragment(tensors, pieces, wire, SGD(1.0))
    rows = [torch.ones(4), -2 * torch.tensor([1.0, 1.0, 1.0, -1.0])]
    reports = [[encoded(row, wire), encoded(torch.full((3,), row[0].item()), wire)] for row in rows]
    factors = fragment.merge(reports, [1.0, 1.0])
    assert factors[1] == [0.5, 0.5] and factors[0] != factors[1]
    assert fragment.values[1].tolist() == [0.5] * 3


def test_a_refused_payload_changes_nothing() -> None:
    wire = WireFormat("fp32")
    fragment = shared(torch.ones(2), "rda", wire)
    bad = torch.full((layout_of(2, wire).payload_bytes,), 0xFF, dtype=torch.uint8)
    with pytest.raises(ValueError, match="payload of piece 0 holds NaN or Inf"):
        fragment.merge([[bad]], [1.0])
    assert fragment.values[0].tolist() == [1.0, 1.0] and fragment.num_merges == 0


@pytest.mark.parametrize("wire", ["int8", "int4", "fp32"])
def test_products_taken_at_arrival_give_the_same_factors(wire: str) -> None:
    """Whatever the order of arrival, to the bit: a replay has the reports in another order."""
    form = WireFormat(wire)
    torch.manual_seed(0)
    payloads = {str(i): encoded(torch.randn(5000), form) for i in range(5)}
    layout, pieces = layout_of(5000, form), [Piece((0,), 5000, "rda")]
    gathered, in_order = Gathered(pieces, [layout]), Gathered(pieces, [layout])
    for name, its_place in zip("30142", "01234", strict=True):
        assert gathered.add(name, [payloads[name]]) == ""
        assert in_order.add(its_place, [payloads[its_place]]) == ""
    names, weights = list("01234"), [1.0, 2.0, 3.0, 4.0, 5.0]
    assert gathered.factors(names, weights) == in_order.factors(names, weights)
    gathered.clear()
    assert gathered.add("2", [payloads["2"]]) == ""
    assert gathered.factors(["2"], [1.0])[0] == pytest.approx([1.0])


def test_more_reports_than_one_gram_matrix_holds() -> None:
    form, count = WireFormat("fp32"), 130
    rows = torch.randn(count, 40, generator=torch.Generator().manual_seed(1))
    gathered = Gathered([Piece((0,), 40, "rda")], [layout_of(40, form)])
    names = [f"{i:03d}" for i in range(count)]
    payloads = [encoded(row, form) for row in rows]
    for name, payload in zip(names, payloads, strict=True):
        assert gathered.add(name, [payload]) == ""
    (factors,) = gathered.factors(names, [1.0] * count)
    merged = torch.tensor(factors, dtype=torch.float64) @ rows.double()
    torch.testing.assert_close(merged, rda(list(rows.double()), [1.0] * count))
