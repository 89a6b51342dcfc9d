"""Whole tiles have kernels of their own: which tiles these take, and their arithmetic.

Emulated on the CPU (emulated.py), and on a GPU where there is one: each tile must be written by one
of two launches, so tensors of
every length and address are compared with the reference. ``reduce`` adds integers where weights are
equal powers of two; its inputs are those for which that is exact, and those for which it is not.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import device_ops as ops
import pytest
import torch
from codec_cases import DTYPES, EMULATED, ON_A_GPU, assert_same, fill, values
from commands import run_command
from torch import Tensor

from diloco_comm.ops import reference
from diloco_comm.ops.wire import WireFormat

ROOT = Path(__file__).resolve().parents[2]
on_devices = pytest.mark.parametrize("impl", [EMULATED, *ON_A_GPU])
WIRES = ["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "e3m0"]


def tensors_of(sizes: Sequence[int], seed: int) -> list[Tensor]:
    """Tensors of these sizes, of every type, a third of them at an odd address."""
    rng = torch.Generator().manual_seed(seed)
    tensors = []
    for size in sizes:
        dtype = DTYPES[int(torch.randint(0, 3, (), generator=rng))]
        shift = max(0, int(torch.randint(-10, 5, (), generator=rng)))
        tensors.append(torch.zeros(size + shift, dtype=dtype)[shift:])
    return tensors


def random_sizes(total: int, seed: int) -> list[int]:
    """Sizes of tensors: whole tiles, one element more or less, and others."""
    rng = torch.Generator().manual_seed(seed)
    sizes: list[int] = []
    while (left := total - sum(sizes)) > 0:
        tiles = 256 * int(torch.randint(0, 7, (), generator=rng))
        odd = (0, 1, 255, 16, int(torch.randint(1, 600, (), generator=rng)))
        size = tiles + odd[int(torch.randint(0, len(odd), (), generator=rng))]
        sizes.append(min(max(size, 1), left))
    return sizes


@on_devices
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_each_tile_is_encoded_and_decoded_once(impl: str, wire: str, stochastic: bool) -> None:
    """Fragments of many tensors, from a block in the middle on, in runs that end in a cut tile."""
    for seed in range(6):
        n, run = 9000 + 77 * seed, (512, 768, 2048, 9216)[seed % 4]
        source = values(n, "bad" if seed % 2 else "wide", seed)
        form = WireFormat(wire, 256)
        begin = run * (seed % 3)
        payload_bytes = form.run_bytes(run) * -(-n // run)
        outer = values(n, "normal", 100 + seed)
        written = []
        for name in (impl, "reference"):
            params = tensors_of(random_sizes(n, seed), seed)
            fill(params, source)
            payload = torch.zeros(payload_bytes, dtype=torch.uint8)
            bad = torch.zeros(1, dtype=torch.int64)
            options = {"stochastic": stochastic, "rng_key": 3, "nonfinite": bad, "impl": name}
            ops.encode(outer, params, payload, begin, n, run, wire, 256, **options)
            outs = tensors_of(random_sizes(n, seed + 50), seed + 50)
            terms = ([payload, payload], [0.5, 0.25], outs, begin, n, run, wire, 256)
            ops.decode(*terms, impl=name)
            written.append([payload, bad, *outs])
        for got, truth in zip(*written, strict=True):
            assert_same(got, truth, f"seed {seed}")


@on_devices
def test_more_odd_tiles_than_the_parameters_of_a_kernel_hold(impl: str) -> None:
    """An odd number of ranges, which are uploaded."""
    sizes = 401 * [300]
    n = sum(sizes)
    run = -(-n // 256) * 256
    payload_bytes = WireFormat("int8", 256).run_bytes(run)
    outer, source, written = values(n, "normal", 1), values(n, "normal", 2), []
    for name in (impl, "reference"):
        params = [torch.zeros(size) for size in sizes]
        fill(params, source)
        payload = torch.zeros(payload_bytes, dtype=torch.uint8)
        ops.encode(outer, params, payload, 0, n, run, "int8", 256, impl=name)
        written.append(payload)
    assert_same(*written, "401 tensors")


KINDS = [
    *("normal", "scaled", "far", "tiny", "tinier", "huge", "cancelling", "half_zero", "zero"),
    *("same", "heavy", "random_codes", "largest_codes", "bad_scales"),
]


def runs_of(kind: str, wire: str, num_runs: int, n: int, seed: int) -> list[Tensor]:
    """Payloads of n elements: encoded ones, and ones of any codes with scales near one another."""
    rng = torch.Generator().manual_seed(seed)
    form = WireFormat(wire, 256)
    blocks = n // 256
    runs: list[Tensor] = []
    last = torch.zeros(n)

    def per_block(low: int, high: int) -> Tensor:
        exponents = torch.randint(low, high, (blocks,), generator=rng)
        return torch.exp2(exponents.float()).repeat_interleave(256)

    for number in range(num_runs):
        x = torch.randn(n, generator=rng)
        if kind == "scaled":
            x *= per_block(-3, 4)
        elif kind == "far":
            x *= per_block(-60, 60)
        elif kind == "tiny":
            x *= 2.0**-120
        elif kind == "tinier":
            x *= 2.0**-130
        elif kind == "huge":
            x *= 2.0**115
        elif kind == "cancelling" and number % 2:
            x = -last
        elif kind == "half_zero":
            x *= (torch.rand(blocks, generator=rng) < 0.5).float().repeat_interleave(256)
        elif kind == "zero":
            x.zero_()
        elif kind == "same" and number:
            x = last
        elif kind == "heavy":
            x = x**5
        last = x.clone()
        run = torch.zeros(form.run_bytes(n), dtype=torch.uint8)
        reference.encode(None, [x], run, 0, n, n, wire, 256)
        scales, codes = run[: 2 * blocks].view(torch.int16), run[form.code_offset(n) :]
        if kind in ("random_codes", "bad_scales"):
            codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8, generator=rng))
            mantissas = torch.randint(0, 1024, scales.shape, generator=rng)
            scales.copy_((0x1E00 + 128 * (seed % 3) + mantissas).short())
        if kind == "largest_codes":
            ends = (0x81, 0x7F) if wire == "int8" else (0x99, 0x77)
            some = torch.rand(codes.shape, generator=rng) < 0.5
            codes.copy_(torch.where(some, *ends).to(torch.uint8))
            octaves = torch.randint(100, 108, scales.shape, generator=rng)
            scales.copy_((octaves * 128 + 127).short())
        if kind == "bad_scales":  # zero, subnormal, infinite, NaN, negative
            odd = torch.tensor([0, 1, 0x7F80, 0x7FC0, -0x8000, -0x4080]).short()
            scales[number::7] = odd[torch.arange(scales[number::7].numel()) % len(odd)]
        runs.append(run)
    return runs


@on_devices
@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_integer_sums_give_the_bytes_of_the_contract(impl: str, wire: str, kind: str) -> None:
    """Equal weights of 4, 8, 12 and 16 runs: exact sums are integers, others take the usual way."""
    n = 24 * 512 + 100
    n = n // 256 * 256  # the last tile is cut
    for num_runs, weight in ((4, 0.25), (8, 0.125), (12, 0.0625), (16, 0.0625), (4, 1.0)):
        runs = runs_of(kind, wire, num_runs, n, num_runs)
        received, written = torch.cat(runs), []
        for name in (impl, "reference"):
            result = torch.zeros_like(runs[0])
            bad = torch.zeros(1, dtype=torch.int64)
            weights = num_runs * [weight]
            ops.reduce(received, result, weights, n, n, wire, 256, nonfinite=bad, impl=name)
            written.append((result, bad))
        for got, truth in zip(*written, strict=True):
            assert_same(got, truth, f"{num_runs} runs")


@on_devices
@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize("num_runs", [*range(1, 21), 32, 64, 128])
def test_equal_weights_of_any_number_of_runs(impl: str, wire: str, num_runs: int) -> None:
    """Dot products take four runs at a time, and sixteen at most: with more, sums could round."""
    n = 2 * 512
    weight = 2.0 ** -((num_runs - 1).bit_length())
    runs = runs_of("largest_codes", wire, num_runs, n, num_runs)
    received, written = torch.cat(runs), []
    for name in (impl, "reference"):
        result = torch.zeros_like(runs[0])
        ops.reduce(received, result, num_runs * [weight], n, n, wire, 256, impl=name)
        written.append(result)
    assert_same(*written, f"{num_runs} runs")


@on_devices
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "weights", [[1 / 3] * 3, [0.7, 0.1, 0.1, 0.1], [0.25] * 3, [2.0**-8] * 4, [0.5, 0.25] * 2]
)
def test_other_weights(impl: str, wire: str, weights: list[float]) -> None:
    n = 4 * 512 + 256
    form = WireFormat(wire, 256)
    runs = []
    for number in range(len(weights)):
        run = torch.zeros(form.run_bytes(n), dtype=torch.uint8)
        reference.encode(None, [values(n, "good", number)], run, 0, n, n, wire, 256)
        runs.append(run)
    for stochastic in (False, True):
        written = []
        for name in (impl, "reference"):
            result = torch.zeros_like(runs[0])
            options = {"stochastic": stochastic, "rng_key": 5, "impl": name}
            ops.reduce(torch.cat(runs), result, weights, n, n, wire, 256, **options)
            written.append(result)
        assert_same(*written, f"stochastic {stochastic}")


DIVISIONS = """
#include "cuda/quad_codes.h"
#include <cstdio>
#include <initializer_list>
using namespace diloco;
static long wrong = 0, cases = 0;
static void same(uint32_t got, uint32_t truth) { ++cases; wrong += got != truth; }
template <wire::Format kFormat> void scales() {
    const float q = wire::qmax(kFormat);
    for (uint32_t exponent : {0u, 1u, 2u, 3u, 7u, 8u, 16u, 17u, 127u, 252u, 253u, 254u, 255u}) {
        for (uint32_t m = 0; m < 1u << 23; m += STEP) {
            const uint32_t bits = exponent << 23 | m;
            const uint32_t truth = bits > wire::kLargestGoodBits
                ? wire::kSmallestScale : wire::scale_of(wire::bits_float(bits), q);
            same(cuda::scale_of_bits<kFormat>(bits), truth);
        }
    }
}
int main() {
    scales<wire::Format::kInt8>();
    scales<wire::Format::kInt4>();
    scales<wire::Format::kE3m0>();
    scales<wire::Format::kFp8E4m3>();
    scales<wire::Format::kFp8E5m2>();
    for (uint32_t scale = wire::kSmallestScale; scale <= 0x7E80; ++scale) {
        const float s = wire::scale_value(static_cast<uint16_t>(scale));
        for (int error = -1; error <= 1; ++error) {
            const float guess = wire::bits_float(wire::float_bits(1.0f / s) + error);
            same(wire::float_bits(cuda::refined_reciprocal(s, guess)),
                 wire::float_bits(1.0f / s));
        }
        same(wire::float_bits(cuda::inverse_of(s)), wire::float_bits(1.0f / s));
    }
    std::printf("%ld of %ld wrong\\n", wrong, cases);
    return wrong != 0;
}
"""


@pytest.mark.nightly("tries every mantissa, which takes a minute", but=["some"])
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("step", [pytest.param(1, id="all"), pytest.param(61, id="some")])
def test_divisions_without_a_division(tmp_path: Path, step: int) -> None:
    """Scales and their reciprocals have the bits of IEEE's division, whatever a device guesses."""
    source, program = tmp_path / "divisions.cpp", tmp_path / "divisions"
    source.write_text(DIVISIONS)
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", f"-DSTEP={step}", "-march=native"]
    subprocess.run([*command, f"-I{ROOT / 'csrc'}", source, "-o", program], check=True, timeout=300)
    done = run_command([program], timeout=600)
    assert done.returncode == 0 and done.stdout.startswith("0 of "), done.stdout
