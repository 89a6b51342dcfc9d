"""From how many replicas on the owners of runs encode a mean, and on which wire."""

from __future__ import annotations

import pytest

from diloco_comm.ops.wire import (
    WIRES,
    Layout,
    WireFormat,
    held_bits,
    mean_layout,
    mean_wire,
    num_phases,
    received_bits,
)

# The most replicas among which all payloads go to all, and the owners' wire beyond.
LIMITS = {
    "sub2": (4, "int1r"),
    "sub4": (8, "int1r"),
    "sub8": (15, "int1r"),
    "sub16": (27, "int1r"),
    "topk256": (9, "int2r"),
    "topk128": (16, "int2r"),
    "topk64": (28, "int2r"),
    "topk32": (50, "int2r"),
}


@pytest.mark.parametrize("wire", WIRES)
def test_the_number_of_phases(wire: str) -> None:
    form = WireFormat(wire)
    limit, owner = LIMITS.get(wire, (2, wire))
    assert mean_wire(form).name == owner
    assert [num_phases(form, n) for n in (1, 2, limit, limit + 1)] == [0, 1, 1, 2]
    assert num_phases(form, 1000, must_gather=True) == (1 if wire in LIMITS else 2)
    bits = form.bits_per_element
    assert [held_bits(form, n) for n in (1, 2, limit)] == [bits, 2 * bits, limit * bits]
    assert held_bits(form, limit + 1) == bits + mean_wire(form).bits_per_element


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("num_replicas", [2, 3, 9, 64])
def test_bits_that_a_replica_receives(wire: str, num_replicas: int) -> None:
    form = WireFormat(wire)
    bits = form.bits_per_element
    gathered = (num_replicas - 1) * bits
    reduced = (num_replicas - 1) / num_replicas * (bits + mean_wire(form).bits_per_element)
    phases = num_phases(form, num_replicas)
    found = received_bits(form, num_replicas)
    assert found == pytest.approx(gathered if phases == 1 else reduced)
    # The second way is never dearer where it is taken.
    assert phases == 1 or found <= gathered * (1 + 1e-12)


def test_no_bits_without_a_peer() -> None:
    assert received_bits(WireFormat("sub8"), 1) == received_bits(WireFormat("int8"), 1) == 0


@pytest.mark.parametrize("wire", ["sub2", "topk256"])
def test_the_layout_of_a_mean_has_the_same_runs(wire: str) -> None:
    layout = Layout.plan(100_001, 16, 2, WireFormat(wire))
    assert mean_layout(layout, 4) == layout
    assert mean_layout(layout, 16, must_gather=True) == layout
    mean = mean_layout(layout, 16)
    runs = range(layout.num_runs)
    assert [mean.run_range(i) for i in runs] == [layout.run_range(i) for i in runs]
    assert mean.wire.name == LIMITS[wire][1]
