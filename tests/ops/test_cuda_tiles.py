"""How CUDA's tiles read: tensors at every address, exact products, loads issued together.

On the CPU, emulated (emulated.py): a copy to the stage arrives there as late as it can.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import cuda_sass
import device_ops as ops
import pytest
import torch
from codec_cases import EMULATED, assert_same, fill, values
from torch import Tensor

from diloco_comm.ops import reference
from diloco_comm.ops.wire import Layout, WireFormat

emulated = pytest.mark.parametrize("impl", [EMULATED])


def shifted(source: Tensor, num_elements: int) -> Tensor:
    """Copy a tensor to a place that many elements behind a multiple of 16 bytes."""
    storage = torch.empty(source.numel() + num_elements, dtype=source.dtype)
    assert storage.data_ptr() % 16 == 0
    return storage[num_elements:].copy_(source)


@emulated
@pytest.mark.parametrize("shift", range(1, 8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_whose_storage_is_shifted(impl: str, shift: int, dtype: torch.dtype) -> None:
    """All arrays of all operators, each shifted by another number of elements."""
    n = 2 * 1024 + 517
    layout = Layout.plan(n, 1, 1, WireFormat("int8", 128))
    form = (layout.run_elements, "int8", 128)
    written = []
    for name in (impl, "reference"):
        outer, momentum = shifted(values(n, "normal", 1), shift % 4), values(n, "normal", 2)
        residual = shifted(values(n, "normal", 3).bfloat16(), (shift + 2) % 8)
        params = [shifted(torch.zeros(n, dtype=dtype), shift)]
        fill(params, values(n, "normal", 4))
        payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
        rest, norms = shifted(residual, 3), torch.zeros(2, dtype=torch.float64)
        options = {"residual": residual, "new_residual": rest, "impl": name}
        ops.encode(outer, params, payload, 0, n, *form, **options)
        terms = ([payload], [1.0], 0, n, *form)
        momentum = shifted(momentum, (shift + 1) % 4)
        ops.outer_step(
            outer, momentum, params, *terms, "nesterov", 0.7, mu=0.9, alpha=0.5, impl=name
        )
        ops.norms(outer, params, norms, impl=name)
        written.append([payload, rest, outer, momentum, params[0], norms])
    for got, truth in zip(*written, strict=True):
        assert_same(got, truth, f"shifted by {shift}")


@emulated
@pytest.mark.parametrize("wire", ["int8", "int4", "e3m0", "fp8_e4m3", "fp8_e5m2"])
def test_any_scale_with_any_coefficient(impl: str, wire: str) -> None:
    """Products are fused only where they are exact: payloads of any bits, not only encoded ones."""
    n = 1 << 16
    layout = Layout.plan(n, 1, 1, WireFormat(wire, 32))
    rng = torch.Generator().manual_seed(7)
    payloads = []
    for number in range(3):
        payload = torch.randint(0, 256, (layout.payload_bytes,), dtype=torch.uint8, generator=rng)
        if number > 0:  # scales as encoders make them: positive, 2^-60 to 2^60
            scales = payload[: 2 * (n // 32)].view(torch.int16)
            scales.copy_(torch.randint(0x2180, 0x5D80, scales.shape, generator=rng))
        payloads.append(payload)
    form = (0, n, layout.run_elements, wire, 32)
    for coefficients in ([1.0], [2.0**-7], [2.0**-8], [2.0], [-0.5], [0.3], [0.5, 0.25, 0.25]):
        some = payloads[: len(coefficients)]
        outs = [torch.zeros(n), torch.zeros(n)]
        ops.decode(some, coefficients, outs[:1], *form, impl=impl)
        reference.decode(some, coefficients, outs[1:], *form)
        assert_same(outs[0], outs[1], f"decoded with {coefficients}")
    outs = [torch.zeros(n), torch.zeros(n)]
    ops.decode(payloads[1:], [0.5, 0.5], outs[:1], *form, impl=impl)
    reference.decode(payloads[1:], [0.5, 0.5], outs[1:], *form)
    assert_same(outs[0], outs[1], "decoded two with equal weights")


@pytest.mark.parametrize("size", [1, 65536, 65537, 9 * 65536 + 3, 300 * 65536 // 16])
def test_norms_of_many_chunks(size: int) -> None:
    """A chunk cut short, and more tiles than a warp has read ahead."""
    outer = values(size, "normal", 1)
    params = [shifted(values(size, "normal", 2), 1)]
    norms = [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
    params[0][size // 2] = float("inf")
    ops.norms(outer, params, norms[0], impl=EMULATED.values[0])
    reference.norms(outer, params, norms[1])
    assert_same(norms[0], norms[1], f"norms of {size}")


FP8 = """
#include "cuda/quad_codes.h"
using namespace diloco::cuda;
__global__ void both(const float* x, unsigned* codes, Quad* values) {
    const Quad y = {{x[0], x[1], x[2], x[3]}};
    const auto e4m3 = scaled_codes_of<Format::kFp8E4m3, false>(y, 0);
    const auto e5m2 = scaled_codes_of<Format::kFp8E5m2, false>(y, 0);
    codes[0] = e4m3.w[0];
    codes[1] = e5m2.w[0];
    values[0] = values_of<Format::kFp8E4m3>(e4m3);
    values[1] = values_of<Format::kFp8E5m2>(e5m2);
}
"""
CONVERSIONS = [
    f"cvt.rn.{form}"
    for kind in ("e4m3x2", "e5m2x2")
    for form in (f"satfinite.{kind}.f32", f"f16x2.{kind}")
]


@pytest.mark.nightly("calls nvcc for each architecture", but=["90"])
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", [80, 90])
def test_fp8_is_converted_by_devices_that_can(tmp_path: Path, arch: int) -> None:
    """sm_90 has instructions for that, sm_80 has not."""
    source = tmp_path / "fp8.cu"
    source.write_text(FP8)
    include, output = cuda_sass.ROOT / "csrc", tmp_path / "fp8.ptx"
    subprocess.run(
        [
            "nvcc",
            "-std=c++17",
            f"-I{include}",
            "-ptx",
            f"-arch=compute_{arch}",
            "-o",
            output,
            source,
        ],
        check=True,
        timeout=300,
    )
    text = output.read_text()
    assert [name for name in CONVERSIONS if name in text] == (CONVERSIONS if arch == 90 else [])


# Kernel, template arguments, and bytes that a lane has asked for before it uses the first.
IN_FLIGHT = [
    ("encode", "encode_kernelILNS_4wire6FormatE5ELb0ELi2E", 64),  # outer and params, 2 x 16 each
    ("reduce", "encode_kernelILNS_4wire6FormatE5ELb0ELi4E", 64),  # codes of four runs, 4 x 4 each
    ("outer_step", "step_kernelILNS_4wire6FormatE5ELb0E", 192),  # outer, momentum, four payloads
    ("outer_step", "step_kernelILNS_4wire6FormatE5ELb1E", 256),
    ("outer_step", "arrival_kernelILNS_4wire6FormatE5E", 240),
    ("decode", "decode_kernelILNS_4wire6FormatE5E", 32),  # four payloads
    ("encode", "encode_whole_kernelILNS_4wire6FormatE5ELb0E", 64),
    ("reduce", "encode_whole_kernelILNS_4wire6FormatE5ELb0E", 64),
    ("decode", "decode_whole_kernelILNS_4wire6FormatE5E", 8),  # a term at a time, in many warps
    ("sparse", "sparse_encode_kernelINS0_10EncodeArgsE", 128),  # outer and params, 4 x 16 each
    ("sparse", "sparse_step_kernelILb0E", 128),
    ("decode", "merge_kernel", 128),
    ("decode", "norms_kernel", 256),
    ("digest", "digest_kernelILi16E", 64),
]


def machine_code(report: str, kernel: str) -> list[cuda_sass.Instruction]:
    name, _, template = kernel.partition("I")
    return cuda_sass.instructions(
        cuda_sass.symbol(f"{report}.ptxas", name, f"I{template}" if template else "")
    )


needs_machine_code = pytest.mark.skipif(
    cuda_sass.cuobjdump() is None or not cuda_sass.REPORTS.exists(),
    reason="needs cuobjdump, and build/cuda, which needs nvcc",
)


@pytest.mark.nightly("compiling the kernels of sm_90 takes minutes")
@needs_machine_code
@pytest.mark.parametrize(("report", "kernel", "wanted"), IN_FLIGHT)
def test_loads_are_issued_together(report: str, kernel: str, wanted: int) -> None:
    assert cuda_sass.most_in_flight(machine_code(report, kernel)) >= wanted


# Kernel and wire, what a loop over whole tiles meets, elements of a lane, instructions for each.
WAYS = [
    ("encode", "encode_whole_kernel", 5, ["LDG.E.128", "STG"], 8, 12.5),
    ("encode", "encode_whole_kernel", 6, ["LDG.E.128", "STG"], 8, 13.5),
    ("reduce", "encode_whole_kernel", 5, ["IDP", "STG.E.128"], 16, 18.0),  # four runs
    ("reduce", "encode_whole_kernel", 6, ["IDP", "STG.E.128"], 32, 16.5),
    ("decode", "decode_whole_kernel", 5, ["FFMA", "STG.E.128"], 8, 13.5),
    ("decode", "decode_whole_kernel", 6, ["FFMA", "STG.E.128"], 8, 15.5),
]


@pytest.mark.nightly("compiling the kernels of sm_90 takes minutes")
@needs_machine_code
@pytest.mark.parametrize(("report", "kernel", "wire", "through", "elements", "most"), WAYS)
def test_instructions_of_whole_tiles(
    report: str, kernel: str, wire: int, through: list[str], elements: int, most: float
) -> None:
    """int8 and int4, fp32 tensors: the shortest way round the loop."""
    rounding = "" if report == "decode" else "Lb0E"
    code = machine_code(report, f"{kernel}ILNS_4wire6FormatE{wire}E{rounding}")
    fewest = cuda_sass.fewest_in_loop(code, through) / elements
    print(f"{report} {wire}: {fewest:.1f} instructions an element")
    assert fewest <= most


@pytest.mark.nightly("compiling the kernels of sm_90 takes minutes")
@needs_machine_code
@pytest.mark.parametrize(("report", "kernel"), [row[:2] for row in IN_FLIGHT[:-2]])
def test_stores_are_plain(report: str, kernel: str) -> None:
    """To global memory by name, without an order among them, and by the default cache policy.

    ``STL`` is a spill; test_cuda_build.py compares all spills with a list.
    """
    codes = [each.code for each in machine_code(report, kernel) if each.code.startswith("ST")]
    codes = [code for code in codes if not code.startswith("STL")]
    assert codes
    assert all(code.startswith(("STG.E", "STS")) and "STRONG" not in code for code in codes)
    assert not any(".EF" in code for code in codes)
