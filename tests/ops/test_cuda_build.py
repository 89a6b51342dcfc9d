"""CUDA builds without a GPU: kernels compile without unknown spills, and the extension still loads.

``make cuda-tests`` builds build/cuda where nvcc is: the extension with CUDA for sm_90, and nvcc's
report of registers, stack frames and spills of each kernel.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cuda_reports
import pytest
import torch
import wheel_kernels
from commands import run_command, run_python

import diloco_comm._C
from diloco_comm import ops

ROOT = Path(__file__).resolve().parents[2]
BUILT = sorted((ROOT / "build/cuda").glob("_C*.so"))
SKIP = pytest.mark.skipif(not BUILT, reason="build/cuda is not built: it needs nvcc")


def needs_build(test: Callable[[], None]) -> Callable[[], None]:
    """Mark a test of what nvcc made."""
    return pytest.mark.nightly("compiling the kernels of sm_90 takes minutes")(SKIP(test))


SMALLEST = ROOT / "build/cuda/sm_90/digest.ptxas"


@pytest.mark.skipif(not SMALLEST.exists(), reason="build/cuda is not built: it needs nvcc")
def test_no_kernel_of_the_smallest_file_spills() -> None:
    cuda_reports.check(SMALLEST.parent, ("sm_90",), ["digest"])


@needs_build
def test_no_kernel_spills_but_the_known_ones() -> None:
    """Of the kernels for sm_90; ``make cuda`` looks at those for every architecture."""
    for row in cuda_reports.table(cuda_reports.check(ROOT / "build/cuda/sm_90", ("sm_90",))):
        print(row)


def run_with_cuda(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the extension that has CUDA."""
    load = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('diloco_comm._C', {str(BUILT[-1])!r})\n"
        "module = sys.modules['diloco_comm._C'] = importlib.util.module_from_spec(spec)\n"
        "import torch, torch.distributed\n"
        "spec.loader.exec_module(module)\n"
        "import diloco_comm.ops as ops\n"
    )
    done = run_python("-c", load + program, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done


@needs_build
def test_the_extension_with_cuda_loads_without_a_gpu() -> None:
    done = run_with_cuda(
        "out = torch.zeros(3)\n"
        "ops.merge(torch.arange(3.0), [out])\n"
        "print(out.tolist(), *ops.available_impls('cuda'))\n"
    )
    with_triton = "triton " if importlib.util.find_spec("triton") else ""
    assert done.stdout.strip() == f"[0.0, 1.0, 2.0] {with_triton}cuda"


# A driver that says which CUDA it is for, and nothing else.
DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 11080; return 0; }
"""


@needs_build
@pytest.mark.parametrize("has_driver", [False, True])
def test_the_runtime_inside_tells_which_driver_is_there(has_driver: bool, tmp_path: Path) -> None:
    """Doctor prints this sentence for a GPU."""
    found = "there is no driver of CUDA"
    if has_driver:
        (tmp_path / "driver.c").write_text(DRIVER)
        library = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1"]
        subprocess.run(["cc", *library, "driver.c"], cwd=tmp_path, check=True)
        found = "the driver is for CUDA 11.8"
    done = run_with_cuda(
        "from diloco_comm.ops import implementations\nprint(implementations.served_by(0))\n",
        LD_LIBRARY_PATH=str(tmp_path),
    )
    needed = f", and the CUDA kernels need a driver for CUDA {nvcc_major()}.0 or newer"
    assert done.stdout.strip() == f"served by Triton, because {found}{needed}"


def nvcc_major() -> str:
    """Return the major version of the CUDA that the extension is built with."""
    release = re.search(r"release (\d+)", cuda_reports.nvcc("--version"))
    assert release is not None
    return release[1]


@needs_build
def test_every_kernel_is_found_in_the_extension_and_a_missing_one_is_named() -> None:
    wheel_kernels.check(BUILT[-1], ["sm_90"])
    with pytest.raises(AssertionError, match=r"for \['sm_90'\], not for \['sm_90', 'sm_100'\]"):
        wheel_kernels.check(BUILT[-1], ["sm_90", "sm_100"])
    with pytest.raises(AssertionError, match=r"\d+ kernels for sm_90, not 1"):
        wheel_kernels.check(BUILT[-1], ["sm_90"], 1)


@needs_build
def test_the_extension_with_cuda_links_no_library_of_cuda() -> None:
    """The runtime is inside; torch's own libraries are asked through the dispatcher."""
    content = BUILT[-1].read_bytes()
    assert b".nv_fatbin" in content
    for library in (b"libcudart.so", b"libc10_cuda", b"libtorch_cuda"):
        assert library not in content
    symbols = run_command(["nm", "-D", BUILT[-1]], check=True)
    assert " w aoti_torch_get_current_cuda_stream\n" in symbols.stdout


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_gets_no_cuda_code() -> None:
    assert "cuda" not in ops.available_impls("cuda")
    content = Path(diloco_comm._C.__file__).read_bytes()
    for sign in (b".nv_fatbin", b"cudaLaunchKernel", b"libcudart"):
        assert sign not in content


NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release {version}, V{version}.1" ;;
--list-gpu-code) echo sm_90 ;;
*) echo "#$ TOP={top}" >&2 ;;
esac
"""


@pytest.fixture
def decide(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """``decide("13.0", TORCH_CUDA="13.0")``: what CMake says with that nvcc and that torch."""

    def run(nvcc: str | None, *, has_runtime: bool = True, **options: str) -> tuple[int, str]:
        values = {"DILOCO_NVCC": "DILOCO_NVCC-NOTFOUND", "TORCH_VERSION": "2.13.0"}
        values["TORCH_CUDA"] = ""
        if nvcc is None:
            values["CMAKE_FIND_USE_CMAKE_SYSTEM_PATH"] = "OFF"
        else:
            (tmp_path / "lib64").mkdir(exist_ok=True)
            if has_runtime:
                (tmp_path / "lib64/libcudart_static.a").touch()
            script = tmp_path / "nvcc"
            script.write_text(NVCC.format(version=nvcc, top=tmp_path))
            script.chmod(0o755)
            values["DILOCO_NVCC"] = str(script)
        flags = [f"-D{key}={value}" for key, value in (values | options).items()]
        beside = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
        cmake = shutil.which("cmake", path=beside)
        assert cmake is not None
        # Nothing of this machine's toolkit is on the way of a machine without one.
        done = run_command(
            [cmake, *flags, "-P", str(ROOT / "csrc/cuda/decide.cmake")],
            env={"PATH": str(tmp_path), "CMAKE_IGNORE_PREFIX_PATH": ""},
        )
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run


BUILT_FOR = "CUDA kernels: built (nvcc 13.0, torch's CUDA 13.0)"
NO_CUDA = "CUDA kernels: not built (torch 2.13.0 is built without CUDA)"
CHOICES = [
    ("13.0", {"DILOCO_CUDA": "AUTO", "TORCH_CUDA": "13.0"}, 0, BUILT_FOR),
    ("13.0", {"DILOCO_CUDA": "AUTO"}, 0, NO_CUDA),
    ("13.0", {"DILOCO_CUDA": "auto", "TORCH_CUDA": "12.8"}, 0,
     "CUDA kernels: not built (nvcc 13.0 does not fit torch's CUDA 12.8)"),
    ("13.0", {"DILOCO_CUDA": "ON"}, 0, "CUDA kernels: built (DILOCO_CUDA=ON, nvcc 13.0)"),
    ("13.0", {"DILOCO_CUDA": "OFF", "TORCH_CUDA": "13.0"}, 0,
     "CUDA kernels: not built (DILOCO_CUDA=OFF)"),
    ("13.0", {"DILOCO_CUDA": "maybe"}, 1, "DILOCO_CUDA must be AUTO, ON or OFF, got 'maybe'"),
    ("11.8", {"DILOCO_CUDA": "AUTO", "TORCH_CUDA": "11.8"}, 0,
     "CUDA kernels: not built (nvcc 11.8 is older than 12.1)"),
    (None, {"DILOCO_CUDA": "AUTO", "TORCH_CUDA": "13.0"}, 0,
     "CUDA kernels: not built (there is no nvcc)"),
    (None, {"DILOCO_CUDA": "ON", "TORCH_CUDA": "13.0"}, 1,
     "DILOCO_CUDA=ON cannot be satisfied: there is no nvcc"),
    ("13.0", {"DILOCO_CUDA": "ON", "DILOCO_CUDA_ARCHS": "80;90a"}, 0, "CUDA kernels: built ("),
    ("13.0", {"DILOCO_CUDA": "ON", "DILOCO_CUDA_ARCHS": "80 90"}, 1,
     'DILOCO_CUDA_ARCHS must be like "80;90", got "80 90"'),
    ("13.0", {"DILOCO_CUDA": "ON", "DILOCO_CUDA_ARCHS": "9.0"}, 1,
     'DILOCO_CUDA_ARCHS must be like "80;90", got "9.0"'),
]  # fmt: skip


@pytest.mark.parametrize(("nvcc", "options", "status", "sentence"), CHOICES)
def test_the_choice_and_its_reason_are_said_once(
    decide: Callable[..., tuple[int, str]],
    nvcc: str | None,
    options: dict[str, str],
    status: int,
    sentence: str,
) -> None:
    code, text = decide(nvcc, **options)
    assert (code != 0) == bool(status), text
    assert text.count(sentence) == 1, text


def test_kernels_that_were_compiled_before_need_neither_nvcc_nor_a_torch_with_cuda(
    decide: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    options = {"DILOCO_KERNELS": str(tmp_path)}
    code, text = decide(None, DILOCO_CUDA="AUTO", **options)
    assert code != 0 and f"DILOCO_KERNELS={tmp_path} is no folder of compiled kernels" in text
    for name in ("encode", "reduce", "outer_step", "decode", "digest"):
        (tmp_path / f"{name}.o").touch()
    code, text = decide(None, DILOCO_CUDA="AUTO", **options)
    assert code != 0 and "it lacks sparse.o, libcudart_static.a" in text
    for name in ("sparse.o", "libcudart_static.a"):
        (tmp_path / name).touch()
    for wanted, choice in (("AUTO", "built (DILOCO_KERNELS="), ("OFF", "not built (DILOCO_CUDA=")):
        code, text = decide(None, DILOCO_CUDA=wanted, **options)
        assert code == 0 and text.count(f"CUDA kernels: {choice}") == 1, text


def test_a_toolkit_without_the_static_runtime_is_an_obstacle(
    decide: Callable[..., tuple[int, str]],
) -> None:
    code, text = decide("13.0", has_runtime=False, DILOCO_CUDA="ON")
    assert code != 0
    assert "cannot be satisfied: nvcc 13.0 comes without libcudart_static" in text
