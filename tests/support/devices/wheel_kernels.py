"""The CUDA kernels inside a wheel: each of them for every architecture, PTX, and their size.

    python tests/support/devices/wheel_kernels.py WHEEL

``make package-cuda`` runs this on the wheel that it has built.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from cuda_reports import NUM_KERNELS, WANTED

# A wheel of the package index may have 100 MB; this one is downloaded by every worker of a run.
LARGEST_MB = 20
_ARCH = re.compile(r"^arch = (sm_\d+)$", re.MULTILINE)
_ENTRY = re.compile(r"STO_ENTRY +(\S+)")


def cuobjdump(option: str, library: Path) -> str:
    """Ask the cuobjdump that Triton brings along."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin is not None, "cuobjdump comes with Triton"
    tool = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run(
        [tool, option, library], capture_output=True, text=True, check=True
    ).stdout


def check(
    library: Path,
    archs: Sequence[str] = WANTED,
    num_kernels: int = sum(NUM_KERNELS.values()),
) -> None:
    """Raise AssertionError where a kernel, an architecture or the newest one's PTX is missing."""
    kernels: dict[str, set[str]] = {}
    _, *parts = _ARCH.split(cuobjdump("-symbols", library))
    for arch, text in zip(parts[::2], parts[1::2], strict=True):
        kernels.setdefault(arch, set()).update(_ENTRY.findall(text))
    assert set(kernels) == set(archs), f"kernels are for {sorted(kernels)}, not for {archs}"
    for arch, names in kernels.items():
        assert len(names) == num_kernels, f"{len(names)} kernels for {arch}, not {num_kernels}"
        assert names == kernels[archs[-1]], f"other kernels for {arch} than for {archs[-1]}"
    ptx = set(re.findall(r"\.(sm_\d+)\.ptx", cuobjdump("-lptx", library)))
    assert ptx == {archs[-1]}, f"PTX is for {sorted(ptx)}, not for {archs[-1]}"


def main() -> None:
    wheel = Path(sys.argv[1])
    with zipfile.ZipFile(wheel) as files, tempfile.TemporaryDirectory() as folder:
        (name,) = [one for one in files.namelist() if one.endswith(".so")]
        check(Path(files.extract(name, folder)))
    megabytes = wheel.stat().st_size / 1e6
    print(f"{sum(NUM_KERNELS.values())} kernels, each for {', '.join(WANTED)} and PTX")
    print(f"{wheel.name}: {megabytes:.1f} MB, of at most {LARGEST_MB}")
    assert megabytes <= LARGEST_MB


if __name__ == "__main__":
    main()
