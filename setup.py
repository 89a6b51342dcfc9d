"""Build diloco_comm: CMake compiles the extension; CMakeLists.txt alone lists the sources."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NEEDS_BUILD = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}
HAS_TORCH = importlib.util.find_spec("torch") is not None

if not HAS_TORCH and NEEDS_BUILD & set(sys.argv):
    sys.exit(
        "diloco_comm is compiled against the PyTorch that you run: install torch first, "
        "then use `pip install --no-build-isolation .`"
    )


if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"building diloco_comm needs setuptools 77 or newer, found {setuptools.__version__}: "
        "run `pip install --upgrade setuptools` first"
    )


def find_tool(name: str) -> str:
    """Find a build tool on PATH or beside the running Python, where pip puts it."""
    beside = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    tool = shutil.which(name, path=beside)
    if tool is None:
        sys.exit(
            f"building diloco_comm needs {name}, not found: run `pip install cmake ninja` first"
        )
    return tool


def dependencies() -> list[str]:
    """Return what a package needs that is built here, or else (sdist) what its sources need."""
    torch = "torch>=2.6"
    if HAS_TORCH and (NEEDS_BUILD | {"dist_info"}) & set(sys.argv):
        # Neither a local suffix as in 2.13.0+cpu nor a patch changes torch's C++ interface.
        torch = f"torch=={'.'.join(torch_version().split('+')[0].split('.')[:2])}.*"
    return [torch, "numpy"]


def torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        # A build of one's own that was never installed.
        import torch

        return torch.__version__


def long_description() -> str:
    """Return the README for a page that has no checkout beside it: only links to the web stay."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n\n", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


class CMakeBuild(build_ext):
    """Configure with CMake, build with ninja, and put the library where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        # An editable install keeps its build for the next one, and for the C++ tests.
        kept = ROOT / "build" / f"editable-{sys.implementation.cache_tag}"
        build_dir = kept if self.editable_mode else Path(self.build_temp).resolve()
        build_dir.mkdir(parents=True, exist_ok=True)
        options = {
            "CMAKE_BUILD_TYPE": "Debug" if self.debug else "Release",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(target.parent),
            "CMAKE_MAKE_PROGRAM": find_tool("ninja"),
            "Python_EXECUTABLE": sys.executable,
            "DILOCO_WERROR": os.environ.get("DILOCO_WERROR", "OFF"),
            "DILOCO_CUDA": os.environ.get("DILOCO_CUDA", "AUTO"),
            "DILOCO_CUDA_ARCHS": os.environ.get("DILOCO_CUDA_ARCHS", ""),
            "DILOCO_KERNELS": os.environ.get("DILOCO_KERNELS", ""),
        }
        flags = [f"-D{key}={value}" for key, value in options.items()]
        cmake = find_tool("cmake")
        subprocess.check_call([cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(build_dir), *flags])
        subprocess.check_call([cmake, "--build", str(build_dir), "--target", "_C"])


# Kernels stand beside the package, where a link in the sources leads to them.
PACKAGES = {
    *setuptools.find_packages(
        include=["diloco_comm", "diloco_comm.*", "diloco_comm_tools", "diloco_comm_tools.*"]
    )
}
PACKAGES.add("diloco_comm.kernels")

setup(
    packages=sorted(PACKAGES),
    package_dir={"diloco_comm.kernels": "kernels"},
    install_requires=dependencies(),
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("diloco_comm._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
