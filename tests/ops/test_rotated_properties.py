"""What the rotated wires promise, and the bias they have beside dominant elements."""

from __future__ import annotations

import math

import pytest
import torch
from codec_cases import values
from torch import Tensor

from diloco_comm import ops
from diloco_comm.ops.wire import ROTATED_WIRES, Layout, WireFormat, rng_key

every_wire = pytest.mark.parametrize("wire", ROTATED_WIRES)


def sent(x: Tensor, wire: str, key: int, **options) -> Tensor:
    """Return x after one encoding."""
    layout = Layout.plan(x.numel(), 1, 1, WireFormat(wire))
    form = (0, x.numel(), layout.run_elements, wire, layout.wire.block_size)
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    ops.encode(None, [x], payload, *form, rng_key=key, **options)
    out = torch.empty(x.numel())
    ops.decode([payload], [1.0], [out], *form)
    return out


# Relative L2 error on Gaussian data. Of f folded values, each is the sum of f - 1 others' noise
# besides its own: f * pi / 2 - 1 is the square.
ERRORS = {
    "int2r": 0.3633,
    "int1r": 0.7554,
    **{f"sub{f}": math.sqrt(f * math.pi / 2 - 1) for f in (2, 4, 8, 16)},
}


@every_wire
def test_error_and_gain_on_gaussian_data(wire: str) -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    got = sent(x, wire, rng_key(3, 1, 0, 2, 0))
    assert float((got - x).norm() / x.norm()) == pytest.approx(ERRORS[wire], rel=0.03)
    # The scale is rounded to eight bits, without a bias.
    assert float(x @ got / (x @ x)) == pytest.approx(1.0, abs=0.012)


def test_least_squares_errors_of_int2r_and_int1r() -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(2))
    for wire, error in (("int2r", 0.3413), ("int1r", 0.6021)):
        lost = torch.empty_like(x)
        got = sent(x, wire, 5, new_residual=lost)
        assert float((got - x).norm() / x.norm()) == pytest.approx(error, rel=0.01)
        assert torch.equal(lost, x - got)


@pytest.mark.nightly("up to 6 s each; they differ in the wire", but=["int2r", "sub8"])
@every_wire
def test_the_mean_over_many_signs_is_the_vector(wire: str) -> None:
    size, num_rounds = WireFormat(wire).block_size, 4096
    x = values(size, "normal", 7)
    total, squares = torch.zeros(2, size, dtype=torch.float64)
    for round in range(num_rounds):
        got = sent(x, wire, rng_key(0, 0, 0, round, 0)).double()
        total += got
        squares += got**2
    mean = total / num_rounds
    sigma = ((squares / num_rounds - mean**2) / num_rounds).sqrt()
    # The sums of one vector are nearly normal; the scale's own rounding leaves less than 0.4 %.
    bound = 5 * sigma + 0.004 * x.abs()
    assert bool(((mean - x).abs() <= bound).all())


@pytest.mark.parametrize("wire", ["int2r", "int1r"])
def test_one_value_alone_is_exact_but_for_the_scale(wire: str) -> None:
    for idx in (0, 3, 255):
        x = torch.zeros(256)
        x[idx] = -0.37
        got = sent(x, wire, 11)
        assert got[idx].item() == pytest.approx(-0.37, rel=2.0**-8)
        got[idx] = 0.0
        assert not got.any()


def test_error_feedback_loses_nothing() -> None:
    x = values(3000, "normal", 3)
    residual, total = torch.zeros(3000), torch.zeros(3000, dtype=torch.float64)
    for round in range(50):
        key = rng_key(0, 0, 0, round, 0)
        total += sent(x, "int2r", key, residual=residual, new_residual=residual).double()
    assert torch.allclose(total + residual, 50 * x.double(), atol=1e-6 * float(x.abs().max()))


def test_signs_follow_every_part_of_the_key() -> None:
    x = values(1024, "normal", 1)
    first = sent(x, "int1r", rng_key(1, 2, 0, 3, 4))
    assert torch.equal(first, sent(x, "int1r", rng_key(1, 2, 0, 3, 4)))
    for parts in (
        (0, 2, 0, 3, 4),
        (1, 0, 0, 3, 4),
        (1, 2, 1, 3, 4),
        (1, 2, 0, 0, 4),
        (1, 2, 0, 3, 0),
    ):
        assert not torch.equal(first, sent(x, "int1r", rng_key(*parts)))


def test_payloads_are_laid_out_anew() -> None:
    for wire in ROTATED_WIRES:
        x = values(20_000, "normal", 5)
        decoded = []
        layouts = [Layout.plan(20_000, runs, 1, WireFormat(wire)) for runs in (1, 3)]
        payload = torch.zeros(layouts[0].payload_bytes, dtype=torch.uint8)
        form = (wire, layouts[0].wire.block_size)
        ops.encode(None, [x], payload, 0, 20_000, layouts[0].run_elements, *form, rng_key=9)
        for layout in layouts:
            moved = layouts[0].rearrange(payload, layout)
            out = torch.empty(20_000)
            ops.decode([moved], [1.0], [out], 0, 20_000, layout.run_elements, *form)
            decoded.append(out)
        assert torch.equal(*decoded)
        assert torch.equal(layouts[1].rearrange(moved, layouts[0]), payload)
        moved[layouts[1].run_bytes] ^= 1
        with pytest.raises(ValueError, match="were encoded with several keys"):
            layouts[1].rearrange(moved, layouts[0])


@pytest.mark.parametrize("wire", ROTATED_WIRES)
def test_elements_beside_dominant_ones_are_biased(wire: str) -> None:
    """The condition of docs/developers/wire-formats.md: 10 times is harmless, 100 times is not."""
    size = WireFormat(wire).block_size
    for num_large, ratio in ((1, 10.0), (1, 100.0), (2, 100.0)):
        x = values(size, "normal", 7)
        x[:num_large] = ratio * float(x.norm()) / math.sqrt(size)
        total = torch.zeros(size)
        for round in range(400):
            total += sent(x, wire, rng_key(0, 0, 0, round, 0)) / 400
        small = x[num_large:]
        factor = float(total[num_large:] @ small / (small @ small))
        # The projection on the whole block is right, but for the scale's own rounding.
        assert float(total @ x / (x @ x)) == pytest.approx(1.0, abs=0.05)
        if ratio == 10.0:
            assert factor == pytest.approx(1.0, abs=0.1)
        elif num_large == 2 or wire == "int2r":
            assert factor > 1.3
        else:
            assert factor < 0.2


def test_two_elements_alone_are_the_same_for_every_key() -> None:
    x = torch.zeros(256)
    x[:2] = torch.tensor([1.0, -0.5])
    for key in range(20):
        got = sent(x, "int1r", key)
        assert got[0] == 1.25 and not got[1:].any()
