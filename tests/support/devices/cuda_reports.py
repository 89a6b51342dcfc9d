"""What nvcc's assembler says about the CUDA kernels: registers, stack frames and spills of each.

CMake leaves a report of each file in build/cuda/sm_90 (``make cuda-tests``, for tests) and in
build/cuda/all (``make cuda``, which runs this file):

    python tests/support/devices/cuda_reports.py [--json FILE]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from diloco_comm_tools.common.reports import Report

REPORTS = Path(__file__).resolve().parents[3] / "build/cuda"
WANTED = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

# Kernels of each file: 14 wires, of which 7 round stochastically, too, and 8 have kernels of whole
# tiles; Adam, arrivals and the other steps; decode, merge, norms, their total, and the upload of
# long lists; digest by alignment; encode, reduce, three kinds of steps and decode of all sparse
# wires.
NUM_KERNELS = {"encode": 51, "reduce": 51, "outer_step": 42, "decode": 26, "digest": 3, "sparse": 6}
# The kernels of whole tiles for int8 and int4, rounded to nearest: their registers at most, and the
# warps of a multiprocessor for which these leave room, at least.
WHOLE_TILES = {"encode": (48, 40), "reduce": (56, 36), "decode": (32, 56)}
# Where that many registers are too few, by begin of the architecture's name, file and argument of
# the template.
MORE_REGISTERS = {
    ("sm_8", "decode", "FormatE5E"): (40, 48),
    ("sm_8", "reduce", "FormatE5E"): (64, 32),
    ("sm_8", "reduce", "FormatE6E"): (64, 32),
}
# Warps of a multiprocessor; 64 elsewhere. Where they are fewer, each lane has more registers.
MOST_WARPS = {"sm_86": 48, "sm_89": 48, "sm_120": 48}
# Bytes of stack, and of spilled stores and loads together, by architecture, file and name: kernels
# of small tiles spill one register. No device has measured the cost.
KNOWN_STACKS = {
    ("sm_80", "encode", "encode_kernel"): 2 * [(8, 8)],
    ("sm_86", "encode", "encode_kernel"): 2 * [(8, 8)],
    ("sm_89", "encode", "encode_kernel"): 2 * [(8, 8)],
    ("sm_120", "outer_step", "step_kernel"): [(8, 8)],
}
_FACTS = re.compile(
    r"Compiling entry function '\w*?\d(?P<name>[a-z_]+_kernel)(?P<arguments>\w*)' for "
    r"'(?P<arch>\w+)'\s+.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\s+ptxas info\s*: Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture."""

    file: str
    name: str
    arch: str
    registers: int
    stack_bytes: int
    spilled_bytes: int
    arguments: str  # of the template, mangled

    @property
    def warps(self) -> int:
        """Warps of a multiprocessor that 65536 registers suffice for, in blocks of four."""
        most = MOST_WARPS.get(self.arch, 64)
        return min(65536 // (-(-self.registers // 8) * 8 * 128) * 4, most)

    @property
    def is_hot(self) -> bool:
        """Whether ``WHOLE_TILES`` says how many registers this kernel may have."""
        is_plain = "FormatE5E" in self.arguments or "FormatE6E" in self.arguments
        return "_whole_" in self.name and is_plain and "Lb1E" not in self.arguments

    @property
    def has_room(self) -> bool:
        """Whether this kernel keeps to ``WHOLE_TILES`` and ``MORE_REGISTERS``."""
        registers, warps = WHOLE_TILES[self.file]
        for (arch, file, argument), more in MORE_REGISTERS.items():
            is_meant = self.arch.startswith(arch) and file == self.file
            if is_meant and argument in self.arguments:
                registers, warps = more
        if self.arch in MOST_WARPS:
            return self.warps >= min(warps, MOST_WARPS[self.arch])
        return self.registers <= registers and self.warps >= warps


def read(file: Path) -> list[Kernel]:
    """List the kernels of one report."""
    found = [match.groupdict() for match in _FACTS.finditer(file.read_text())]
    return [
        Kernel(
            file.stem,
            each["name"],
            each["arch"],
            int(each["registers"]),
            int(each["stack"]),
            int(each["stores"]) + int(each["loads"]),
            each["arguments"],
        )
        for each in found
    ]


def nvcc(option: str) -> str:
    """Ask nvcc, from PATH or where CMake looks for it."""
    path = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    return subprocess.run([path, option], capture_output=True, text=True, check=True).stdout


def known_archs() -> tuple[str, ...]:
    """Name the architectures that are wanted and that this nvcc can compile for."""
    return tuple(arch for arch in WANTED if arch in nvcc("--list-gpu-code").split())


def check(
    folder: Path, archs: tuple[str, ...], files: Collection[str] = NUM_KERNELS
) -> list[Kernel]:
    """List the kernels of the reports; raise AssertionError where one is missing.

    A stack frame or a spill that is not among ``KNOWN_STACKS`` is an error, too, and a kernel with
    more registers than ``WHOLE_TILES`` allows.
    """
    kernels = []
    for name in files:
        count = NUM_KERNELS[name]
        of_file = read(folder / f"{name}.ptxas")
        counts = Counter(kernel.arch for kernel in of_file)
        assert counts == dict.fromkeys(archs, count), f"kernels of {name}: {dict(counts)}"
        kernels += of_file
    known = {
        key: list(sizes)
        for key, sizes in KNOWN_STACKS.items()
        if key[0] in archs and key[1] in files
    }
    for kernel in kernels:
        sizes = known.get((kernel.arch, kernel.file, kernel.name), [])
        own = (kernel.stack_bytes, kernel.spilled_bytes)
        if own in sizes:
            sizes.remove(own)
        else:
            assert own == (0, 0), f"stack or spills: {kernel}"
        assert not kernel.is_hot or kernel.has_room, f"registers: {kernel}"
    gone = {key: sizes for key, sizes in known.items() if sizes}
    assert not gone, f"not so any more, take them out of KNOWN_STACKS: {gone}"
    return kernels


def table(kernels: list[Kernel]) -> list[dict[str, object]]:
    """Count the kernels of each architecture, file and name, with their registers."""
    by_key: dict[tuple[str, str, str], list[int]] = {}
    for kernel in kernels:
        key = (kernel.arch, kernel.file, kernel.name)
        by_key.setdefault(key, []).append(kernel.registers)
    rows = []
    for (arch, file, name), registers in sorted(by_key.items()):
        row = {"target": arch, "kernel": f"{file}.cu {name}", "count": len(registers)}
        rows.append(row | {"registers": f"{min(registers)} to {max(registers)}"})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    report = Report("CUDA kernels, compiled", nvcc=nvcc("--version").splitlines()[3])
    kernels = check(REPORTS / "all", known_archs())
    rows = table(kernels)
    for row in rows:
        name = f"{row['target']:8}{row['kernel']:35}"
        report.print(f"{name}{row['count']:4} kernels {row['registers']:>10} registers")
    with_stack = sum(kernel.stack_bytes > 0 for kernel in kernels)
    spilling = sum(kernel.spilled_bytes > 0 for kernel in kernels)
    report.print(
        f"{len(kernels)} kernels compiled, {with_stack} have a stack frame, {spilling} spill"
    )
    if arguments.json:
        report.save(arguments.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
