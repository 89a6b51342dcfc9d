"""How alike successive merges are, against numpy, and the effective rate against Nesterov."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from diloco_comm.asynchronous.decoupled.merges import WatchedFragment, effective_rate, pieces_of
from diloco_comm.methods.outer import Nesterov
from diloco_comm.ops.wire import WireFormat

SHAPES = [(8, 4), (5,)]
LR, MOMENTUM = 0.5, 0.9


def watched(merge: str) -> WatchedFragment:
    tensors = [torch.zeros(shape) for shape in SHAPES]
    pieces = pieces_of(SHAPES, merge, least=1)
    return WatchedFragment(tensors, pieces, WireFormat("fp32"), Nesterov(LR, MOMENTUM))


def payloads_of(fragment: WatchedFragment, values: np.ndarray) -> list[torch.Tensor]:
    """Return fp32 payloads of the fragment's pieces: the elements, then padding of zeros."""
    found, begin = [], 0
    for layout in fragment.layouts:
        payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
        part = torch.from_numpy(values[begin : begin + layout.num_elements].copy())
        payload[: 4 * layout.num_elements] = part.view(torch.uint8)
        found.append(payload)
        begin += layout.num_elements
    return found


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_cosines_of_successive_merges(merge: str) -> None:
    fragment = watched(merge)
    rng = np.random.default_rng(0)
    merged = []
    for _ in range(4):
        reports = rng.standard_normal((2, 37)).astype(np.float32)
        factors = fragment.merge([payloads_of(fragment, each) for each in reports], [0.25, 0.75])
        sizes = [layout.num_elements for layout in fragment.layouts]
        by_report = np.array([np.repeat([f[m] for f in factors], sizes) for m in range(2)])
        merged.append((by_report * reports).sum(0))
    expected = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairwise(merged)]
    assert fragment.cosines == pytest.approx(expected, abs=1e-6)


def test_merges_of_zeros_have_no_cosine() -> None:
    fragment = watched("mean")
    for value in (1.0, 0.0, 1.0, 1.0):
        values = np.full(37, value, dtype=np.float32)
        fragment.merge([payloads_of(fragment, values)], [1.0])
    assert fragment.cosines == pytest.approx([1.0])


@pytest.mark.parametrize("rho", [0.0, 0.5, 1.0])
def test_effective_rate_is_that_of_nesterov(rho: float) -> None:
    """Merges whose parts along the newest one are rho^k: the step along it is the rate."""
    fragment = watched("mean")
    # Element 0 is the newest direction; the merge k rounds ago has rho^k of it.
    for k in reversed(range(200)):
        before = fragment.values[0][0].item()
        values = np.zeros(37, dtype=np.float32)
        values[0] = rho**k
        fragment.merge([payloads_of(fragment, values)], [1.0])
    step = before - fragment.values[0][0].item()
    assert step == pytest.approx(effective_rate(LR, MOMENTUM, rho), rel=1e-4)


@pytest.mark.parametrize(("momentum", "rho"), [(1.0, 0.0), (-0.1, 0.0), (0.9, 1.5), (0.9, -2.0)])
def test_effective_rate_refuses(momentum: float, rho: float) -> None:
    with pytest.raises(ValueError, match=r"momentum must lie in \[0, 1\) and autocorrelation in"):
        effective_rate(1.0, momentum, rho)
