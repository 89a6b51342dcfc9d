"""Compile Triton's kernels for GPUs that are not there, and look for spills and wrong arithmetic.

The specialisations are those of real calls: the operators are called with CPU tensors, and what
they would launch is recorded instead. A spill is a fault, unless the committed list
``tests/data/triton-spills.json`` has this spill; the list may only shrink. Run this without
TRITON_INTERPRET:

    python tests/support/devices/triton_specialisations.py [--select all] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from diloco_comm.kernels import operators
from diloco_comm.kernels.checks import check_layout
from diloco_comm.ops.wire import (
    BLOCK_SIZES,
    ELEMENT_WIRES,
    ROTATED_WIRES,
    SPARSE_WIRES,
    Layout,
    WireFormat,
)
from diloco_comm_tools.common.reports import Report as MeasuredReport

# ------------------------ The launches of Triton's kernels by real calls, recorded with CPU tensors


N = 1 << 16
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclass
class Launch:
    """A kernel and the arguments that an operator launches it with."""

    label: str
    operator: str
    kernel: Any
    args: tuple
    meta: dict


_recorded: list[Launch] = []


def _record(name: str, kernel: Any, num_programs: int, device: object, *args, **meta) -> None:
    _recorded.append(Launch("", name, kernel, args, meta))


def launches(label: str, name: str, *args, **kwargs) -> Iterator[Launch]:
    """Yield what one call of an operator launches."""
    operators.launch, real = _record, operators.launch
    _recorded.clear()
    try:
        getattr(operators, name)(*args, **kwargs)
    finally:
        operators.launch = real
    for launch in _recorded:
        launch.label = f"{launch.kernel.__name__.strip('_')} {label}"
        yield launch


def _parameters(*dtypes: torch.dtype) -> list[Tensor]:
    """One tensor needs no tables; two of one dtype do."""
    parts = torch.zeros(N).tensor_split(len(dtypes))
    return [part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True)]


class Cases:
    """Calls of every operator with one wire and block size."""

    def __init__(self, wire: str, block_size: int | None = None) -> None:
        layout = Layout.plan(N, 1, 1, WireFormat(wire, block_size))
        self.name = f"{wire}/{layout.wire.block_size}"
        self.form = (check_layout(wire, layout.wire.block_size, layout.run_elements),)
        self.payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
        self.outer, self.momentum, self.second = torch.zeros(3, N)
        self.count = torch.zeros(1, dtype=torch.int64)

    def encode(
        self,
        *dtypes: torch.dtype,
        stochastic: bool = False,
        residual: torch.dtype | None = None,
        with_outer: bool = True,
    ) -> Iterator[Launch]:
        params = _parameters(*(dtypes or (FP32,)))
        options: dict[str, Any] = {"stochastic": stochastic, "rng_key": 1 << 40}
        if residual is not None:
            error = torch.zeros(N, dtype=residual)
            options.update(residual=error, new_residual=error)
        label = f"{self.name} {_names(dtypes)} {stochastic=} {residual=} {with_outer=}"
        yield from launches(
            label, "encode", self.outer if with_outer else None, params, self.payload, 0, N,
            *self.form, nonfinite=self.count, **options,
        )  # fmt: skip

    def reduce(
        self,
        num_ranks: int,
        stochastic: bool = False,
        residual: torch.dtype | None = None,
        max_blocks: int = 0,
    ) -> Iterator[Launch]:
        error = None if residual is None else torch.zeros(N, dtype=residual)
        received = self.payload.repeat(num_ranks)
        yield from launches(
            f"{self.name} {num_ranks=} {stochastic=} {residual=} {max_blocks=}", "reduce",
            received, self.payload, [1.0] * num_ranks, N, *self.form, stochastic, 1 << 40, 0,
            error, error, self.count, max_blocks,
        )  # fmt: skip

    def step(
        self, optimizer: str, *dtypes: torch.dtype, terms: int = 1, alpha: float = 0.0
    ) -> Iterator[Launch]:
        params = _parameters(*(dtypes or (FP32,)))
        span = ([self.payload] * terms, [1.0] * terms, 0, N, *self.form)
        label = f"{self.name} {optimizer} {_names(dtypes)} {terms=} {alpha=}"
        if optimizer == "adam":
            yield from launches(
                label, "outer_step_adam", self.outer, self.momentum, self.second, params, *span,
                lr=0.3, beta1=0.9, beta2=0.95, eps=0.1, step=1, alpha=alpha, verdict=self.count,
            )  # fmt: skip
        else:
            yield from launches(
                label, "outer_step", self.outer, self.momentum, params, *span, optimizer,
                lr=0.7, mu=0.9, alpha=alpha, verdict=self.count,
            )  # fmt: skip

    def delayed(self, first: bool, last: bool, behind: float = 0.0) -> Iterator[Launch]:
        yield from launches(
            f"{self.name} {first=} {last=} {behind=}", "outer_step_delayed",
            self.outer, self.momentum, self.second, [self.payload], [1.0], 0, N, *self.form,
            lr=0.7, mu=0.9, ahead=0.5, behind=behind, first=first, last=last, verdict=self.count,
        )  # fmt: skip

    def decode(self, *dtypes: torch.dtype, terms: int = 1) -> Iterator[Launch]:
        outs = _parameters(*(dtypes or (FP32,)))
        yield from launches(
            f"{self.name} {_names(dtypes)} {terms=}", "decode",
            [self.payload] * terms, [1.0] * terms, outs, 0, N, *self.form,
        )  # fmt: skip

    def plain(self, *dtypes: torch.dtype, alpha: float = 0.0) -> Iterator[Launch]:
        params = _parameters(*(dtypes or (FP32,)))
        label = _names(dtypes)
        yield from launches(f"{label} {alpha=}", "merge", self.outer, params, alpha)
        out = torch.zeros(2, dtype=torch.float64)
        yield from launches(label, "norms", self.outer, params, out)

    def digest(self, max_blocks: int = 0) -> Iterator[Launch]:
        """At each alignment of the data."""
        data, sums = torch.zeros(N, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
        for shift in (0, 4, 2, 1):
            label = f"{shift=} {max_blocks=}"
            yield from launches(label, "digest", data[shift:], sums, 1 << 40, max_blocks)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return "+".join(str(dtype).removeprefix("torch.") for dtype in dtypes or (FP32,))


def each_kernel() -> Iterator[Launch]:
    """Every kernel once, by the operators' defaults."""
    case = Cases("int8", 256)
    yield from case.encode()
    yield from case.reduce(4)
    yield from case.step("nesterov")
    yield from case.delayed(False, True)
    yield from case.decode()
    yield from case.plain(FP32)
    yield from case.digest()


def representative() -> Iterator[Launch]:
    """The defaults of every operator, and each of their options once."""
    case = Cases("int8", 256)
    yield from case.encode()
    yield from case.encode(BF16, BF16)
    yield from case.encode(FP32, BF16, FP16, stochastic=True, residual=FP32)
    yield from case.reduce(4)
    yield from case.step("nesterov")
    yield from case.step("nesterov", BF16, BF16)
    yield from case.step("nesterov", FP32, BF16, FP16, terms=3, alpha=0.5)
    yield from case.step("adam", BF16)
    yield from case.delayed(False, True, behind=0.1)
    yield from case.decode()
    yield from case.plain(FP32, BF16, FP16, alpha=0.5)
    yield from case.digest()
    yield from case.reduce(4, max_blocks=1)
    yield from case.digest(max_blocks=1)
    yield from Cases("int4", 256).encode(BF16)
    yield from Cases("e3m0", 32).encode(stochastic=True)
    yield from Cases("fp8_e4m3", 1024).encode(residual=BF16)
    yield from Cases("fp16", 64).step("heavy_ball", FP16)
    yield from Cases("fp8_e5m2", 128).reduce(9)
    for wire in ("int2r", "sub8", "topk64"):
        yield from Cases(wire).encode(residual=FP32)
        yield from Cases(wire).step("nesterov", terms=2)
    yield from Cases("int2r").reduce(4)
    yield from Cases("sub2").decode()
    yield from Cases("topk256").decode()


def everything() -> Iterator[Launch]:
    """Every wire with every block size and rounding, and every option of every operator."""
    for wire in ELEMENT_WIRES:
        for block_size in BLOCK_SIZES:
            case = Cases(wire, block_size)
            yield from case.encode()
            yield from case.encode(FP32, BF16, FP16, stochastic=True, residual=FP32)
            yield from case.reduce(4)
            yield from case.reduce(4, max_blocks=1)
            yield from case.step("nesterov", FP32, BF16, FP16, terms=3, alpha=0.5)
        case = Cases(wire, 256)
        yield from case.encode(stochastic=True)
        for max_blocks in (0, 1):
            yield from case.reduce(9, stochastic=True, residual=BF16, max_blocks=max_blocks)
        yield from case.step("nesterov")
        yield from case.step("adam", BF16)
        yield from case.decode()
        yield from case.delayed(False, False)
        yield from case.delayed(False, True)
    for wire in ROTATED_WIRES + SPARSE_WIRES:
        case = Cases(wire)
        yield from case.encode()
        yield from case.encode(FP32, BF16, FP16, residual=FP32)
        for ranks, max_blocks in ((4, 0), (4, 1), (9, 0)):
            yield from case.reduce(ranks, residual=BF16, max_blocks=max_blocks)
        yield from case.step("nesterov", FP32, BF16, FP16, terms=3, alpha=0.5)
        yield from case.step("adam", BF16)
        yield from case.decode()
        yield from case.delayed(False, True)
    yield from _all_dtypes(Cases("int8", 256))
    for max_blocks in (0, 1):
        yield from Cases("int8", 256).digest(max_blocks)
    case = Cases("int4", 256)
    for count in range(2, 10):
        yield from case.reduce(count, residual=FP32)
        yield from case.step("nesterov", terms=count)
        yield from case.decode(BF16, terms=count)
    for first in (False, True):
        yield from case.delayed(first, True, behind=0.1)


def _all_dtypes(case: Cases) -> Iterator[Launch]:
    """One tensor, two of one dtype, and every set of dtypes."""
    dtypes = (FP32, BF16, FP16)
    sets = [part for count in (1, 2, 3) for part in combinations(dtypes, count)]
    for chosen in sets + [(dtype, dtype) for dtype in dtypes]:
        yield from case.encode(*chosen, residual=BF16)
        yield from case.encode(*chosen, with_outer=False)
        for optimizer in ("sgd", "heavy_ball", "nesterov", "adam"):
            yield from case.step(optimizer, *chosen, alpha=0.5 * (optimizer != "sgd"))
        for alpha in (0.0, 0.5):
            yield from case.plain(*chosen, alpha=alpha)


# ------------------------------------------------------------------------------ the specialisations


TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {
    FP32: "*fp32",
    BF16: "*bf16",
    FP16: "*fp16",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int64: "*i64",
}


def _specialise(value: Any, path: tuple, varies: bool, constants: dict, attributes: dict) -> Any:
    """Return the type of one argument as Triton's launcher would; note constants and alignment."""
    if isinstance(value, tuple):
        parts = enumerate(value)
        return tuple(_specialise(v, (*path, i), varies, constants, attributes) for i, v in parts)
    if value is None:
        constants[path] = None
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if not varies and (value.data_ptr() if isinstance(value, Tensor) else value) % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_for(launch: Launch, target: GPUTarget) -> Any:
    """Compile what was recorded, with the options of ``operators.launch``."""
    signature: dict[str, Any] = {}
    constants: dict[tuple, Any] = {}
    attributes: dict[tuple, Any] = {}
    for i, parameter in enumerate(launch.kernel.params):
        if i < len(launch.args):
            varies = parameter.do_not_specialize
            signature[parameter.name] = _specialise(
                launch.args[i], (i,), varies, constants, attributes
            )
        else:
            signature[parameter.name] = "constexpr"
            constants[i,] = launch.meta[parameter.name]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {
        "num_warps": launch.PROGRAMS[launch.operator][1],
        "enable_fp_fusion": False,
    }
    return triton.compile(source, target=target, options=options)


# By target and label: spilled bytes (NVIDIA) or registers (AMD) that are known.
KNOWN_SPILLS: dict[str, int] = json.loads(
    (Path(__file__).parents[2] / "data" / "triton-spills.json").read_text()
)
SELECTIONS = {"each-kernel": each_kernel, "representative": representative, "all": everything}


@dataclass
class Report:
    """What the assembler says about one compiled kernel.

    Attributes:
        spill_bytes: Spilled bytes on NVIDIA, spilled registers on AMD.
    """

    label: str
    target: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    faults: list[str]

    @property
    def known_spill(self) -> int:
        return KNOWN_SPILLS.get(f"{self.target} {self.label}", 0)

    def __str__(self) -> str:
        faults = "".join(f"  FAULT: {fault}" for fault in self.faults)
        if self.spill_bytes and not self.faults:
            faults = f"  known to spill {self.spill_bytes}"
        return f"{self.target:8}{self.registers:4} registers  {self.label}{faults}"


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(number) for number in re.findall(pattern, text)]


def _nvidia(label: str, name: str, ptx: str) -> Report:
    ptxas = get_ptxas(TARGETS[name].arch).path
    (architecture,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        arguments = [
            "-v",
            "--fmad=false",
            f"--gpu-name={architecture}",
            str(source),
            "-o",
            "/dev/null",
        ]
        done = subprocess.run([ptxas, *arguments], capture_output=True, text=True, check=True)
    said = done.stderr + done.stdout
    (registers,) = _numbers(r"Used (\d+) registers", said)
    (stack,) = _numbers(r"(\d+) bytes stack frame", said)
    spills = sum(_numbers(r"(\d+) bytes spill", said))
    faults = []
    if ".ftz" in ptx:
        faults.append("flushes sub-normals")
    if re.search(r"\bfma\.rn\.f(32|64)", ptx):
        faults.append("contracts a product and a sum")
    if re.search(r"\b(div\.full|div\.approx|sqrt\.approx|rcp\.approx)", ptx):
        faults.append("approximates a division or a root")
    return Report(label, name, registers, spills, stack, faults)


def _amd(label: str, name: str, text: str) -> Report:
    """The notes that the assembler leaves in the text."""
    (registers,) = _numbers(r"\.vgpr_count:\s+(\d+)", text)
    spills = sum(_numbers(r"\.[sv]gpr_spill_count:\s+(\d+)", text))
    (stack,) = _numbers(r"\.private_segment_fixed_size:\s+(\d+)", text)
    faults = []
    # A division is made of fused steps; where there is none, nothing may be fused.
    if "v_div_fixup" not in text and re.search(r"\bv_(pk_)?(fma|fmac|mad)_f(32|64)", text):
        faults.append("contracts a product and a sum")
    return Report(label, name, registers, spills, stack, faults)


def examine(launch: Launch, target: str) -> Report:
    """Compile one launch for one target and look at the code."""
    compiled = compile_for(launch, TARGETS[target])
    if "ptx" in compiled.asm:
        report = _nvidia(launch.label, target, compiled.asm["ptx"])
    else:
        report = _amd(launch.label, target, compiled.asm["amdgcn"])
    if report.spill_bytes > report.known_spill:
        report.faults.append(f"spills {report.spill_bytes}")
    # Spilled values lie on the stack.
    if report.stack_bytes > report.known_spill:
        report.faults.append(f"keeps {report.stack_bytes} bytes of stack")
    if report.spill_bytes < report.known_spill:
        report.faults.append(
            f"spills {report.spill_bytes}, less than triton-spills.json says: correct the list"
        )
    return report


def _examine_slice(choice: str, part: int, parts: int) -> list[Report]:
    """Kernels cannot be sent to another process: each records the launches again."""
    work = [(launch, target) for launch in SELECTIONS[choice]() for target in TARGETS]
    return [examine(launch, target) for launch, target in work[part::parts]]


def _table(reports: list[Report]) -> list[dict[str, object]]:
    """Count the kernels of each target and name, with their registers and faults."""
    rows = []
    named = [(report.target, report.label.split()[0], report) for report in reports]
    for target, name in sorted({(target, name) for target, name, _ in named}):
        ours = [report for *key, report in named if key == [target, name]]
        registers = [report.registers for report in ours]
        row = {"target": target, "kernel": name, "count": len(ours)}
        row |= {"least_registers": min(registers), "most_registers": max(registers)}
        row |= {"spilling": sum(bool(report.spill_bytes) for report in ours)}
        rows.append(row | {"at_fault": sum(bool(report.faults) for report in ours)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--select", choices=SELECTIONS, default="representative")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write a table of the figures to this file")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        # More parts than processes, so that none waits long for the others and progress is seen.
        parts = 32 if arguments.select == "all" else arguments.jobs
        futures = [
            pool.submit(_examine_slice, arguments.select, part, parts) for part in range(parts)
        ]
        reports = []
        for future in futures:
            for report in future.result():
                print(report, flush=True)
                reports.append(report)
    faulty = [report for report in reports if report.faults]
    known = sum(bool(report.spill_bytes) and not report.faults for report in reports)
    if known:
        print(f"{known} spill as the list says")
    print(f"{len(reports)} kernels compiled, {len(faulty)} at fault")
    if arguments.json:
        saved = MeasuredReport("Triton kernels, compiled", quiet=True, triton=triton.__version__)
        saved.save(arguments.json, _table(reports))
    return 1 if faulty or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
