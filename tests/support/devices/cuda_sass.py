"""How many bytes a lane of a CUDA kernel has asked for before it uses the first, and how long a
loop over tiles is.

Reads the machine code of build/cuda (``make cuda-tests``) with cuobjdump, which CUDA's toolkit and
Triton bring along:

    python tests/support/devices/cuda_sass.py encode.ptxas encode_kernel 5  # file, kernel, wire
"""

from __future__ import annotations

import heapq
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
REPORTS = ROOT / "build/cuda/sm_90"
_INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,5})\*/\s+(?P<predicate>@\S+ )?\s*(?P<code>[A-Z][A-Z0-9_.]*)"
    r"\s*(?P<operands>.*?) ;"
)
_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
MOST_BRANCHES = 14  # that a path from a load is followed through


@dataclass(frozen=True)
class Instruction:
    """One line of machine code."""

    address: int
    is_conditional: bool
    code: str
    operands: str

    @property
    def reads(self) -> set[int]:
        """Registers that are read; of a load or a calculation all operands but the first."""
        is_store = self.code.startswith(("ST", "RED", "BRA"))
        text = self.operands if is_store else self.operands.partition(",")[2]
        return {int(number) for number in re.findall(r"\bR(\d+)", text)}

    @property
    def bytes_loaded(self) -> int:
        """Bytes that a load from global memory to registers asks for; else 0."""
        if self.code.startswith("LDG."):
            return next((_BYTES[p] for p in self.code.split(".") if p in _BYTES), 4)
        return 0

    @property
    def is_load(self) -> bool:
        return self.code.startswith(("LDG.", "LD."))

    @property
    def writes(self) -> set[int]:
        """Registers that the first operand names."""
        target = re.match(r"R(\d+)", self.operands)
        if target is None or self.code.startswith(("ST", "RED", "BRA", "LDGSTS")):
            return set()
        width = next((_BYTES[p] for p in self.code.split(".") if p in _BYTES), 4)
        return set(range(int(target[1]), int(target[1]) + max(width // 4, 1)))


def cuobjdump() -> str | None:
    """Find cuobjdump, on PATH or in Triton's folder."""
    found = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("triton")
    if found is None and spec is not None and spec.origin is not None:
        beside = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"
        found = str(beside) if beside.exists() else None
    return found


def symbol(report: str, kernel: str, template: str) -> str:
    """Return the mangled name of the kernel with these template arguments."""
    names = re.findall(r"entry function '(\w+)' for 'sm_90'", (REPORTS / report).read_text())
    (found,) = [name for name in names if kernel in name and template in name]
    return found


def instructions(name: str) -> list[Instruction]:
    """Disassemble one kernel of the extension in build/cuda."""
    (library,) = sorted((ROOT / "build/cuda").glob("_C*.so"))
    tool = cuobjdump()
    assert tool is not None
    text = subprocess.run(
        [tool, "-sass", "-arch", "sm_90", "-fun", name, library],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return [
        Instruction(int(m["address"], 16), m["predicate"] is not None, m["code"], m["operands"])
        for m in _INSTRUCTION.finditer(text)
    ]


def most_in_flight(code: list[Instruction]) -> int:
    """Return the most bytes that a lane has asked for before it uses what a load brought.

    Follows every path from every load, through a limited number of branches; a path ends at the
    first instruction that reads a register which a load on it fills, and where copies to shared
    memory are waited for.
    """
    at = {each.address: i for i, each in enumerate(code)}
    best = 0
    seen: set[tuple[int, int, frozenset[int]]] = set()
    waiting = [
        (i, 0, frozenset[int](), 0)
        for i, each in enumerate(code)
        if each.bytes_loaded and not (i and code[i - 1].bytes_loaded)
    ]
    while waiting:
        i, total, pending, branches = waiting.pop()
        while i < len(code) and branches <= MOST_BRANCHES:
            each = code[i]
            if each.reads & pending or each.code.startswith(("LDGDEPBAR", "DEPBAR", "EXIT")):
                break
            # A register that is set otherwise is that of a load whose condition was not met.
            pending = pending | each.writes if each.is_load else pending - each.writes
            total += each.bytes_loaded
            best = max(best, total)
            i += 1
            if not each.code.startswith("BRA") or ".DIV" in each.code:
                continue
            target = at[int(re.findall(r"0x([0-9a-f]+)", each.operands)[-1], 16)]
            if target <= at[each.address]:  # a loop ends
                if not each.is_conditional:
                    break
                continue
            if not each.is_conditional:
                i = target
                continue
            branches += 1
            if (target, total, pending) not in seen:
                seen.add((target, total, pending))
                waiting.append((target, total, pending, branches))
    return best


def fewest_in_loop(code: list[Instruction], through: Collection[str]) -> int:
    """Return the instructions of the shortest way round a loop that meets all of ``through``.

    A loop ends with a branch back. The way meets instructions whose codes begin with these words,
    in this order.
    """
    at = {each.address: i for i, each in enumerate(code)}
    ways: list[list[int]] = []  # where each instruction may go on
    for i, each in enumerate(code):
        goes = [] if each.code.startswith("EXIT") and not each.is_conditional else [i + 1]
        if each.code.startswith("BRA") and ".DIV" not in each.code:
            target = at[int(re.findall(r"0x([0-9a-f]+)", each.operands)[-1], 16)]
            goes = [target, i + 1] if each.is_conditional else [target]
        ways.append([to for to in goes if to < len(code)])

    def distances(start: dict[int, int], first: int, last: int) -> dict[int, int]:
        best = {}
        waiting = [(steps, i) for i, steps in start.items()]
        heapq.heapify(waiting)
        while waiting:
            steps, i = heapq.heappop(waiting)
            if i in best:
                continue
            best[i] = steps
            for to in ways[i]:
                if first <= to <= last and to not in best:
                    heapq.heappush(waiting, (steps + 1, to))
        return best

    found = []
    for last, each in enumerate(code):
        for first in (to for to in ways[last] if to <= last and each.code.startswith("BRA")):
            reached = {first: 1}
            for word in through:
                steps = distances(reached, first, last)
                reached = {i: n for i, n in steps.items() if code[i].code.startswith(word)}
            if reached and last in (steps := distances(reached, first, last)):
                found.append(steps[last])
    return min(found)


if __name__ == "__main__":
    for wanted in sys.argv[3:]:
        kernel = symbol(sys.argv[1], sys.argv[2], wanted)
        code = instructions(kernel)
        print(f"{wanted}: {most_in_flight(code)} bytes a lane, {len(code)} instructions")
