"""Triton's operators on the rotated wires: the reference's bytes, interpreted or on a GPU.

The bodies are those of test_rotated.py. The interpreter takes milliseconds for each tile, so the
cases are fewer, and chosen.
"""

from __future__ import annotations

import pytest
import test_rotated as rotated
import torch
from codec_cases import KINDS, fragment, values
from triton_cases import every_impl, no_overflow_warning

from diloco_comm.ops.wire import ROTATED_WIRES, WireFormat

pytest.importorskip("triton", reason="needs Triton")

every_wire = pytest.mark.parametrize("wire", ROTATED_WIRES)

pytestmark = no_overflow_warning


@pytest.mark.nightly(
    "up to 10 s each in the interpreter; they differ in the wire", but=["int2r-triton"]
)
@every_impl
@every_wire
def test_kinds_of_values(impl: str, wire: str) -> None:
    """With and without feedback, several runs, tiles that are cut short, and a whole tile."""
    for seed, kind in enumerate(KINDS):
        num_elements = (1, 700, 4096, 2500)[seed % 4]
        case = fragment(
            num_elements, WireFormat(wire), kind, seed, num_runs=1 + seed % 2, with_outer=seed != 3
        )
        options = {}
        if seed % 2:
            dtype = (torch.float32, torch.bfloat16)[seed // 2 % 2]
            options["residual"] = values(num_elements, "normal", seed + 50).to(dtype)
        rotated.check(case, impl, rng_key=(seed - 4) << 60, **options)


@pytest.mark.nightly(
    "up to 12 s each in the interpreter; they differ in wire and number of terms",
    but=["1-int2r-triton", "1-sub4-triton"],
)
@every_impl
@every_wire
@pytest.mark.parametrize("num_payloads", [1, 3, 9])
def test_reduce(impl: str, wire: str, num_payloads: int) -> None:
    """Nine terms come from a table on the device, fewer are arguments."""
    rotated.test_reduce(impl, wire, num_payloads)


@pytest.mark.nightly(
    "up to 5 s each in the interpreter; they differ in wire and optimizer",
    but=["sgd-int2r-triton", "adam-sub4-triton"],
)
@every_impl
@every_wire
@pytest.mark.parametrize("optimizer", rotated.OPTIMIZERS)
def test_outer_steps(impl: str, wire: str, optimizer: str) -> None:
    rotated.test_outer_steps(impl, wire, optimizer)


@every_impl
@pytest.mark.parametrize("wire", ["int2r", "sub8"])
def test_ranges_add_up_to_the_whole(impl: str, wire: str) -> None:
    rotated.test_ranges_add_up_to_the_whole(impl, wire)


@pytest.mark.nightly(
    "6 s each in the interpreter; test_rotated has the limits of the other implementations"
)
@every_impl
@every_wire
def test_limits(impl: str, wire: str) -> None:
    """Of magnitudes, and of the scales that a decoder takes."""
    rotated.test_largest_magnitude(impl, wire)
    rotated.test_a_scale_that_no_encoder_makes_decodes_to_nan(impl, wire)
