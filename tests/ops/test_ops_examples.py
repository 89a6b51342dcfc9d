"""Worked examples of the published algorithms, from the operators alone, in fp32."""

from __future__ import annotations

import device_ops as ops
import pytest
import torch
from codec_cases import IMPLS
from torch import Tensor

from diloco_comm.ops.wire import Layout, WireFormat

every_impl = pytest.mark.parametrize("impl", IMPLS)

# f_m(x) = 0.5 (x - b_m)' A_m (x - b_m); inner plain SGD, lr 0.1; two workers; x_0 = (0, 0.5).
A = torch.tensor([[[1.0, 0.2], [0.2, 0.5]], [[0.6, -0.1], [-0.1, 1.2]]])
B = torch.tensor([[1.0, -1.0], [3.0, 2.0]])
LAYOUT = Layout.plan(2, 1, 1, WireFormat("fp32"))
SPAN = (0, 2, LAYOUT.run_elements, "fp32", 256)


def train(worker: int, x: Tensor, num_steps: int = 2) -> Tensor:
    x = x.clone()
    for _ in range(num_steps):
        x -= 0.1 * A[worker] @ (x - B[worker])
    return x


def encoded(outer: Tensor, local: Tensor, impl: str) -> Tensor:
    payload = torch.zeros(LAYOUT.payload_bytes, dtype=torch.uint8)
    ops.encode(outer, [local], payload, *SPAN, impl=impl)
    return payload


def mean_of(payloads: list[Tensor], impl: str) -> Tensor:
    result = torch.zeros(LAYOUT.payload_bytes, dtype=torch.uint8)
    weights = [1 / len(payloads)] * len(payloads)
    ops.reduce(torch.cat(payloads), result, weights, 2, *SPAN[2:], impl=impl)
    return result


DILOCO = {
    "sgd": [(0.22785, 0.5875), (0.4200278425, 0.65874446), (0.5821423861, 0.7166907169)],
    "heavy_ball": [(0.068355, 0.52625), (0.1950190058, 0.5746620014), (0.3682126171, 0.6403199548)],
    "nesterov": [(0.3030405, 0.616375), (0.6721714706, 0.7536080753), (1.053867964, 0.8891785855)],
    "adam": [(0.2084947384, 0.64), (0.4111186175, 0.7671940304), (0.6066177868, 0.8794710054)],
}
SETTINGS = {
    "sgd": {"lr": 1.0},
    "heavy_ball": {"lr": 0.3, "mu": 0.9},
    "nesterov": {"lr": 0.7, "mu": 0.9},
    "adam": {"lr": 0.3, "beta1": 0.9, "beta2": 0.95, "eps": 0.1},
}


@every_impl
@pytest.mark.parametrize("name", DILOCO)
def test_diloco(impl: str, name: str) -> None:
    """Three rounds of DiLoCo (arXiv 2311.08105), H=2, two payloads averaged by coefficients."""
    outer, m, v = torch.tensor([0.0, 0.5]), torch.zeros(2), torch.zeros(2)
    local = [outer.clone(), outer.clone()]
    for i, expected in enumerate(DILOCO[name]):
        payloads = [encoded(outer, train(w, local[w]), impl) for w in range(2)]
        args = ([payloads[0], payloads[1]], [0.5, 0.5], *SPAN)
        if name == "adam":
            ops.outer_step_adam(
                outer, m, v, [local[0]], *args, step=i + 1, impl=impl, **SETTINGS[name]
            )
        else:
            momentum = None if name == "sgd" else m
            ops.outer_step(outer, momentum, [local[0]], *args, name, impl=impl, **SETTINGS[name])
        local[1].copy_(local[0])
        torch.testing.assert_close(outer, torch.tensor(expected), atol=1e-6, rtol=0)
        assert torch.equal(local[0], outer)


EAGER = [
    [(0.050958, 0.458713), (0.122208, 0.607787)],
    [(0.2427572732, 0.5084186382), (0.3428177945, 0.7118472225)],
    [(0.4857167948, 0.5756566031), (0.6179355207, 0.8295008213)],
]


@every_impl
def test_eager(impl: str) -> None:
    """Eager updates (arXiv 2502.12996): three terms, the own one taken back a round later."""
    outer = [torch.tensor([0.0, 0.5]) for _ in range(2)]
    momentum = [torch.zeros(2) for _ in range(2)]
    local = [start.clone() for start in outer]
    zero = torch.zeros(LAYOUT.payload_bytes, dtype=torch.uint8)
    average, previous = zero, [zero, zero]
    for expected in EAGER:
        own = [encoded(outer[w], train(w, local[w]), impl) for w in range(2)]
        for w in range(2):
            terms = [average, own[w], previous[w]]
            ops.outer_step(
                outer[w], momentum[w], [local[w]], terms, [1.0, 0.5, -0.5], *SPAN,
                "nesterov", lr=0.4, mu=0.9, impl=impl,
            )  # fmt: skip
            torch.testing.assert_close(outer[w], torch.tensor(expected[w]), atol=1e-6, rtol=0)
        average, previous = mean_of(own, impl), own


@every_impl
def test_co2(impl: str) -> None:
    """One-round-stale heavy ball (CO2, arXiv 2401.16265), beta 0.5, no gap penalty, no clip."""
    outer, momentum = torch.tensor([0.0, 0.5]), torch.zeros(2)
    average = torch.zeros(LAYOUT.payload_bytes, dtype=torch.uint8)
    local = outer.clone()
    for expected in [(0, 0.5), (0.22785, 0.5875), (0.569625, 0.71875), (0.9326903425, 0.85561946)]:
        own = [encoded(outer, train(w, local), impl) for w in range(2)]
        ops.outer_step(
            outer, momentum, [local], [average], [1.0], *SPAN,
            "heavy_ball", lr=1.0, mu=0.5, impl=impl,
        )  # fmt: skip
        torch.testing.assert_close(outer, torch.tensor(expected), atol=1e-6, rtol=0)
        average = mean_of(own, impl)


@every_impl
def test_e3m0_block(impl: str) -> None:
    """The codes of a published-size block under our scale, absmax / 16 rounded up to bf16."""
    x = torch.tensor([0.013, -0.0021, 0.0004, -0.016, 9e-05, 0.006, 0.0])
    payload = torch.full((64,), 0, dtype=torch.uint8)
    ops.encode(None, [x], payload, 0, 7, 32, "e3m0", 32, impl=impl)
    assert payload[:2].view(torch.bfloat16).item() == pytest.approx(0.00100708, rel=1e-5)
    codes = torch.stack([payload[16:20] & 15, payload[16:20] >> 4], dim=1).flatten()[:7]
    assert codes.tolist() == [7, 12, 2, 15, 0, 5, 0]


@every_impl
def test_e3m0_ties(impl: str) -> None:
    x = torch.tensor([16, 0.125, 0.375, 0.75, 1.5, 3, 6, 12, -0.125])
    payload, out = torch.zeros(64, dtype=torch.uint8), torch.empty(9)
    ops.encode(None, [x], payload, 0, 9, 32, "e3m0", 32, impl=impl)
    ops.decode([payload], [1.0], [out], 0, 9, 32, "e3m0", 32, impl=impl)
    assert out.tolist() == [16, 0, 0.5, 0.5, 2, 2, 8, 8, 0]
