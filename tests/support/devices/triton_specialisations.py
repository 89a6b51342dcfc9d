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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton_launches import BF16, FP16, FP32, Launch, each_kernel, everything, representative

from diloco_comm.kernels.launch import PROGRAMS
from diloco_comm_tools.common.reports import Report as MeasuredReport

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
        "num_warps": PROGRAMS[launch.operator][1],
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
