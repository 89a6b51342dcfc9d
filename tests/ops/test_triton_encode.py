"""Triton's encode: the reference's bytes, in the interpreter and, where there is one, on a GPU.

The bodies are those of test_ops_*.py. The interpreter takes milliseconds for each tile, so the
cases are fewer, and chosen: every wire, every block size, every kind of value, every dtype.
"""

from __future__ import annotations

import pytest
import test_ops_encode as encoding
import torch
from codec_cases import KINDS, SIZES, fragment, values
from triton_cases import IS_COMPILED, every_impl, no_overflow_warning

from diloco_comm.ops.wire import BLOCK_SIZES, ELEMENT_WIRES, WireFormat

pytest.importorskip("triton", reason="needs Triton")

every_wire = pytest.mark.parametrize("wire", ELEMENT_WIRES)
rounding = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])

pytestmark = no_overflow_warning

SMALL_SIZES = list(zip(SIZES[:-1], BLOCK_SIZES, strict=True))
LARGEST_SIZE = SIZES[-1]


@pytest.mark.nightly(
    "up to 2 s each in the interpreter; they differ in wire and rounding",
    but=["nearest-int8-triton", "nearest-fp8_e4m3-triton", "stochastic-bf16-triton"],
)
@every_impl
@every_wire
@rounding
def test_encode_sizes_and_blocks(impl: str, wire: str, stochastic: bool) -> None:
    for num_elements, block_size in SMALL_SIZES:
        case = fragment(num_elements, WireFormat(wire, block_size), "good", block_size, num_runs=3)
        encoding.check(case, impl, stochastic=stochastic, rng_key=-12345)


@pytest.mark.nightly(
    "up to 2 s each in the interpreter; they differ in wire and rounding",
    but=["nearest-e3m0-triton", "nearest-int4-triton", "stochastic-bf16-triton"],
)
@every_impl
@every_wire
@rounding
def test_encode_kinds_of_values(impl: str, wire: str, stochastic: bool) -> None:
    for seed, kind in enumerate(KINDS):
        if IS_COMPILED and seed % 2 == stochastic:
            continue  # half of them: each combination is compiled
        case = fragment(900 + seed, WireFormat(wire, 32), kind, seed, with_outer=seed % 3 > 0)
        residual = values(900 + seed, "normal", seed + 50).to(
            (torch.float32, torch.bfloat16)[seed % 2]
        )
        encoding.check(case, impl, stochastic=stochastic, rng_key=seed << 60, residual=residual)


@every_impl
@encoding.every_low_precision
@pytest.mark.parametrize("wire", ["int4", "fp32"])
def test_low_precision(impl: str, wire: str, dtypes: tuple) -> None:
    for kind in ("normal", "subnormal", "bad"):
        encoding.check_low_precision(impl, wire, dtypes, kind, 900)


@pytest.mark.nightly(
    "up to 7 s each in the interpreter; they differ in the wire", but=["int8-False-triton"]
)
@every_impl
@pytest.mark.parametrize(("wire", "stochastic"), [("int8", False), ("int4", True)])
def test_encode_many_tiles(impl: str, wire: str, stochastic: bool) -> None:
    case = fragment(LARGEST_SIZE, WireFormat(wire), "good", 1, num_runs=2)
    encoding.check(case, impl, stochastic=stochastic, rng_key=7)


@every_impl
@pytest.mark.parametrize("wire", ["int8", "e3m0", "bf16"])
def test_encode_in_ranges_and_in_place(impl: str, wire: str) -> None:
    encoding.test_ranges_add_up_to_the_whole(impl, wire, True)
    encoding.test_residual_may_be_updated_in_place(impl, wire)


@every_impl
@every_wire
def test_bad_elements(impl: str, wire: str) -> None:
    encoding.test_bad_elements_are_counted_and_sent_as_zeros(impl, wire)
    count = {"fp16": 1}.get(wire, 0)
    if wire in ("fp16", "bf16", "fp32"):
        encoding.test_fp16_overflow_is_a_bad_element(impl, wire, count)
