"""Every implementation encodes the bytes that an older version put on the wire."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from codec_cases import CPU_IMPLS
from samples import BYTES, FORMS, encoded

from diloco_comm.ops.wire import ELEMENT_WIRES, WIRES

SAMPLE = torch.load(Path(__file__).parents[1] / "data" / BYTES, weights_only=True)


@pytest.mark.parametrize("impl", [*CPU_IMPLS, "reference"])
@pytest.mark.parametrize(("wire", "rounding"), FORMS)
def test_bytes_of_an_older_version(wire: str, rounding: str, impl: str) -> None:
    payload = encoded(SAMPLE["values"], wire, rounding, impl)
    expected = SAMPLE["payloads"][f"{wire} {rounding}"]
    assert payload.shape == expected.shape
    assert (payload != expected).nonzero().flatten().tolist() == [], "places of other bytes"


def test_the_sample_has_every_wire() -> None:
    assert "a4c5881" in SAMPLE["made_with"]
    assert sorted(SAMPLE["payloads"]) == sorted(" ".join(form) for form in FORMS)
    assert len(FORMS) == len(WIRES) + len(ELEMENT_WIRES)
    coded = [wire for wire in ELEMENT_WIRES if wire != "fp32"]
    for wire in coded:
        both = [SAMPLE["payloads"][f"{wire} {rounding}"] for rounding in ("nearest", "stochastic")]
        assert not torch.equal(*both), wire
