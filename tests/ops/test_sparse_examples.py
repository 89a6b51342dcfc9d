"""The sparse wires on blocks whose bytes were computed by hand or apart from the package."""

from __future__ import annotations

import device_ops as ops
import pytest
import torch
from codec_cases import IMPLS
from torch import Tensor

from diloco_comm.ops import reference_sparse
from diloco_comm.ops.wire import Layout, WireFormat

TOPK64 = (
    "aaaaaaaaaaaaaaaa cccccccccccccccc 0f0f0f0f0f0f0f8f f00ff00ff00ff08f 00f0ff0f00f0ff8f"
    "ffffff0f000000f0 feffffdfffffffff 0100000000000040 0000004000000000"
).replace(" ", "")


def block() -> Tensor:
    i = torch.arange(4096)
    x = ((2654435761 * i) % 65536 - 32768).float() / 65536
    x[100:180] = 0.75
    x[130] = -1.0
    x[4095] = 2.0
    return x


def test_a_block_of_64_by_hand() -> None:
    x = torch.zeros(64)
    for i, value in (
        (3, -1.0), (9, 2.0), (10, 1.0), (20, -4.0), (21, 1.0), (33, 1.0), (40, 0.5), (47, -3.0),
        (50, 1.0), (63, 1.0),
    ):  # fmt: skip
        x[i] = value
    encoded = reference_sparse._encode_blocks(x.view(1, -1), 8)
    assert encoded.numpy().tobytes().hex() == "e03f" + "73c558" + "6d2a" + "49"


@pytest.mark.parametrize("impl", [pytest.param("reference", id="reference"), *IMPLS])
def test_a_block_of_topk64(impl: str) -> None:
    x, layout = block(), Layout.plan(4096, 1, 1, WireFormat("topk64"))
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    form = (0, 4096, 4096, "topk64", 4096)
    ops.encode(None, [x], payload, *form, impl=impl)
    assert payload[:2].numpy().tobytes().hex() == "463f"
    assert payload[16 : 16 + 72].numpy().tobytes().hex() == TOPK64
    out = torch.full((4096,), 9.0)
    ops.decode([payload], [1.0], [out], *form, impl=impl)
    kept = [*range(100, 163), 4095]
    assert out.nonzero().flatten().tolist() == kept
    scale = 0.7734375
    assert out[kept].tolist() == [-scale if i == 130 else scale for i in kept]
