"""The sparse wires: which elements are kept, what is fed back, and codes that no encoder makes."""

from __future__ import annotations

import device_ops as ops
import pytest
import torch
from codec_cases import IMPLS as ALL_IMPLS
from codec_cases import values
from torch import Tensor

from diloco_comm.asynchronous.payloads import find_garbage
from diloco_comm.ops.wire import SPARSE_WIRES, Layout, WireFormat

IMPLS = [pytest.param("reference", id="reference"), *ALL_IMPLS]
every_impl = pytest.mark.parametrize("impl", IMPLS)
every_wire = pytest.mark.parametrize("wire", SPARSE_WIRES)


def sent(x: Tensor, wire: str, impl: str, **options) -> tuple[Tensor, Tensor, Layout]:
    """Return x after one encoding, the payload and its layout."""
    layout = Layout.plan(x.numel(), 1, 1, WireFormat(wire))
    form = (0, x.numel(), layout.run_elements, wire, 4096)
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    ops.encode(None, [x], payload, *form, impl=impl, **options)
    out = torch.empty(x.numel())
    ops.decode([payload], [1.0], [out], *form, impl=impl)
    return out, payload, layout


@every_impl
@every_wire
def test_the_largest_are_kept_and_of_equal_ones_the_first(impl: str, wire: str) -> None:
    kept = WireFormat(wire).num_kept
    x = values(4096, "normal", 3)
    out, _, _ = sent(x, wire, impl)
    largest = x.abs().topk(kept).indices.sort().values
    assert torch.equal(out.nonzero().flatten(), largest)
    assert torch.equal(out[largest].sign(), x[largest].sign())
    equal = torch.where(x > 0, 2.0, -2.0)
    out, _, _ = sent(equal, wire, impl)
    assert torch.equal(out[:kept], equal[:kept]) and not out[kept:].any()
    # With fewer elements than are sent, zeros are sent too, the first ones.
    few = torch.zeros(4096)
    few[-kept + 1 :] = 1.0
    out, _, _ = sent(few, wire, impl)
    assert out.nonzero().flatten().tolist() == [0, *range(4096 - kept + 1, 4096)]
    out, payload, _ = sent(torch.zeros(5000), wire, impl)
    assert not out.any() and not payload.any()


@every_impl
@every_wire
def test_limits_of_magnitude(impl: str, wire: str) -> None:
    for value, bad in ((2.0**126, 0), (2.0**126 * (1 + 2.0**-23), 1), (torch.nan, 1)):
        x = torch.ones(4096)
        x[77] = value
        count = torch.tensor([0])
        out, _, _ = sent(x, wire, impl, nonfinite=count)
        assert int(count) == bad and bool(out.any()) == (bad == 0)


@every_wire
def test_error_of_one_encoding_of_gaussian_data(wire: str) -> None:
    error = {"topk256": 0.82, "topk128": 0.90, "topk64": 0.94, "topk32": 0.97}[wire]
    x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(1))
    out, _, _ = sent(x, wire, "scalar")
    assert float((out - x).norm() / x.norm()) == pytest.approx(error, abs=0.01)


@every_impl
def test_error_feedback_loses_nothing(impl: str) -> None:
    x = values(9000, "normal", 3)
    residual, total = torch.zeros(9000), torch.zeros(9000, dtype=torch.float64)
    for _ in range(60):
        out, _, _ = sent(x, "topk256", impl, residual=residual, new_residual=residual)
        total += out.double()
    assert torch.allclose(total + residual, 60 * x.double(), atol=1e-4 * float(x.abs().max()))
    # What is not sent at once is sent later.
    assert float((total / 60 - x).norm() / x.norm()) < 0.6


@every_impl
@every_wire
def test_a_code_that_no_encoder_makes_decodes_to_nan(impl: str, wire: str) -> None:
    form = WireFormat(wire)
    kept, (_, code_bytes) = form.num_kept, form.code_unit
    x = torch.zeros(2 * 4096)
    x[: 2 * kept : 2] = 1.0
    x[4096:] = 1.0
    _, payload, layout = sent(x, wire, impl)
    assert not find_garbage(payload, layout)
    begin = form.code_offset(layout.run_elements)
    upper = begin + code_bytes - 3 * kept // 8
    arguments = (0, 8192, layout.run_elements, wire, 4096)
    for change in ("one more", "one less", "descending", "past the end"):
        broken = payload.clone()
        if change == "one more":
            broken[upper + kept // 4 - 1] |= 0x80
        elif change == "one less":
            broken[upper] &= 0xFE
        elif change == "descending":
            broken[begin] ^= 0x01
            broken[begin + kept // 8] ^= 0x03
        else:
            broken[upper : upper + kept // 4] = 0
            broken[upper + kept // 8 : upper + kept // 4] = 0xFF
        out = torch.zeros(8192)
        ops.decode([broken], [1.0], [out], *arguments, impl=impl)
        assert bool(out[:4096].isnan().all()), change
        assert torch.equal(out[4096:].nonzero().flatten(), torch.arange(kept))
        assert "indices of a block" in find_garbage(broken, layout)
