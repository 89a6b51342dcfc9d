"""Updates on the rotated wires: workers hold the server's bytes, and garbage is found."""

from __future__ import annotations

import pytest
import torch
from async_helpers import attach, serving, status

from diloco_comm import Nesterov, ops
from diloco_comm.asynchronous.model import layout_of
from diloco_comm.asynchronous.payloads import find_garbage
from diloco_comm.asynchronous.rules import DelayedNesterov, Immediate, ServerRule
from diloco_comm.ops import reference
from diloco_comm.ops.wire import ROTATED_WIRES, SPARSE_WIRES, WireFormat

SIZE = 5001


def noise(index: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("rule", [Immediate(outer=Nesterov(0.7, 0.9)), DelayedNesterov(period=2)])
def test_followers_of_every_rotated_wire_hold_the_servers_bytes(rule: ServerRule) -> None:
    with serving(rule, parameters=[noise(0)]) as server:
        pairs = [
            attach(server.address, wire, size=SIZE, wire=wire, fetch="updates", seed=3)
            for wire in ROTATED_WIRES
        ]
        options = {"wire": "topk64", "error_feedback": True}
        pairs.append(attach(server.address, "topk", size=SIZE, fetch="updates", **options))
        for index in range(3 * len(pairs)):
            model, worker = pairs[index % len(pairs)]
            model.descend(0.1 * noise(index + 1))
            worker.step()
            reader, other = attach(server.address, "reader", size=SIZE)
            other.close()
            assert torch.equal(model.values(), reader.values())
        assert status(server)["updates"] == 3 * len(pairs)
        for _, worker in pairs:
            worker.close()


@pytest.mark.parametrize("wire", ROTATED_WIRES)
def test_a_scale_that_no_encoder_makes_is_garbage(wire: str) -> None:
    layout = layout_of(SIZE, WireFormat(wire))
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    form = (0, SIZE, layout.run_elements, wire, layout.wire.block_size)
    x = noise(1)
    x[:2000] = 0.0  # null blocks
    reference.encode(None, [x], payload, *form, rng_key=-5)
    assert not find_garbage(payload, layout)
    for bits in (0x8000, 0xBF80, 0x7F80, 0x7FC0, 0x0001, 0x007F):
        broken = payload.clone()
        broken[8:10] = torch.tensor([bits & 0xFF, bits >> 8])
        assert find_garbage(broken, layout) == "a scale is not a finite positive number"


# For each wire the largest scale with which no decoded element exceeds 2^126; that of a block of
# 2^126 in the wires with a code for each element.
LARGEST_SCALES = {
    "int2r": 0x78CC,
    "int1r": 0x7A80,
    "sub2": 0x7A00,
    "sub4": 0x7A80,
    "sub8": 0x7B00,
    "sub16": 0x7B80,
    **dict.fromkeys(SPARSE_WIRES, 0x7E80),
    "int8": 0x7B02,
    "int4": 0x7D13,
    "e3m0": 0x7C80,
    "fp8_e4m3": 0x7A13,
    "fp8_e5m2": 0x7693,
}


@pytest.mark.parametrize("wire", LARGEST_SCALES)
def test_a_scale_whose_elements_may_be_infinite_is_garbage(wire: str) -> None:
    layout = layout_of(SIZE, WireFormat(wire))
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    form = (0, SIZE, layout.run_elements, wire, layout.wire.block_size)
    x = noise(1)
    if layout.wire.has_element_codes:
        x[0] = 2.0**126
    reference.encode(None, [x], payload, *form, rng_key=-5)
    assert not find_garbage(payload, layout)
    place, largest = layout.wire.scale_offset, LARGEST_SCALES[wire]
    for bits in (largest, largest + 1, 0x7E81, 0x7F7F):
        payload[place : place + 2] = torch.tensor([bits & 0xFF, bits >> 8])
        found = find_garbage(payload, layout)
        is_good = bits == largest
        assert found == ("" if is_good else "a scale is larger than any that an encoder makes")
        if is_good or not layout.wire.has_element_codes:
            out = torch.empty(SIZE)
            ops.decode([payload], [1.0], [out], *form)
            first = out[: layout.wire.block_size]
            assert bool(first.isfinite().all() if is_good else first.isnan().all())
