"""The devices that tests run on: the host, the stand-in of ``cpp/lagging_device.cpp``, a GPU.

A body that takes the name of a device is the same on all of them; on a GPU it is marked ``gpu``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from commands import run_command
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "tests" / "cpp" / "lagging_device.cpp"
LAG_US = 200

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["lagging", GPU]
synchronizes_stand_in = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch.accelerator.synchronize() of torch 2.11 does not wait for the stand-in",
)


def build_stand_in() -> str:
    """Compile the stand-in unless that was done before; return the path of the library."""
    if torch.__version__ < "2.8":
        pytest.skip("the stand-in is written for the device interface of later versions")
    facts = f"{torch.__version__} {cpp_extension.include_paths()}".encode()
    sources = b"".join(path.read_bytes() for path in sorted(SOURCE.parent.glob("lagging_*")))
    key = hashlib.sha256(sources + facts).hexdigest()[:16]
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    library = folder / f"lagging-{key}.so"
    with (folder / "lagging.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return str(library)


def _compile(library: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "c++"
    launcher = shlex.split(os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER", ""))
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    folders = cpp_extension.library_paths()
    partial = library.with_suffix(".partial")
    standard = 20 if torch.__version__ >= "2.14" else 17  # TorchVersion compares numbers
    command = [*launcher, compiler, f"-std=c++{standard}", "-O1", "-fPIC", "-shared", "-Wall"]
    command += ["-Wextra", "-Wno-unused-parameter", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command += [word for path in cpp_extension.include_paths() for word in ("-isystem", path)]
    command += ["-o", str(partial), str(SOURCE), *(f"-L{path}" for path in folders)]
    command += ["-lc10", "-ltorch_cpu", *(f"-Wl,-rpath,{path}" for path in folders)]
    done = run_command(command, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    partial.rename(library)


def use(name: str, library: str = "", index: int = 0) -> torch.device:
    """Make a device ready in this process, and return it; the stand-in and a host may have two."""
    if name == "cuda":
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if name == "lagging" and not hasattr(torch, "lagging"):
        torch.ops.load_library(library)
        torch.utils.rename_privateuse1_backend("lagging")
        module = types.SimpleNamespace(
            is_available=lambda: True,
            current_device=torch.accelerator.current_device_index,
            set_device=torch.accelerator.set_device_index,
            device_count=lambda: 2,
            _is_in_bad_fork=lambda: False,
            manual_seed_all=lambda seed: None,
        )
        torch._register_device_module("lagging", module)
        torch.ops.lagging.set_lag(LAG_US)
    return torch.device("cpu" if name == "cpu" else f"{name}:{index}")


@contextmanager
def no_host_wait(device: torch.device) -> Iterator[None]:
    """Assert that the host does not wait for the stand-in inside this block.

    On a GPU, PyTorch raises at operators that synchronise.
    """
    if device.type == "cpu":
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    torch.ops.lagging.host_waits()
    yield
    waits = [wait for wait in torch.ops.lagging.host_waits() if "diloco" not in wait]
    assert waits == [], waits


def capture(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return what replays ``function``: a CUDA graph of it on a GPU.

    Elsewhere it is the function, which must not allocate on the stand-in, nor make the host wait.
    """
    if device.type == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        # Capturing runs nothing: the first replay is the first time.
        with torch.cuda.graph(graph, stream=side):
            function()
        return graph.replay

    def run() -> None:
        before = torch.ops.lagging.num_allocations() if device.type == "lagging" else 0
        with no_host_wait(device):
            function()
        if device.type == "lagging":
            assert torch.ops.lagging.num_allocations() == before

    return run
