"""Say what a GPU check runs on, and make the first call to the device.

python -m benchmarks.gpu.facts --versions | --extension
python -m benchmarks.gpu.facts --first-call | --forked-call [--device cpu]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

# What the tests import beside torch.
NEEDED = ("numpy", "pytest", "hypothesis")
# What the process imports from which the tests' workers are forked.
BEFORE_FORK = ("numpy", "torch.distributed", "torch._dynamo", "torch.optim", "diloco_comm")

# Fields of nvidia-smi: clocks, power, heat, and reasons to be slower.
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")


def clocks(busy: Callable[[], object] = lambda: time.sleep(0.01)) -> dict[str, str] | None:
    """Ask nvidia-smi, if there is one, and call ``busy`` until its answer is there."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader", "--id=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asked:
        while asked.poll() is None:
            busy()
        answer = asked.communicate()[0]
    return dict(zip(CLOCKS, map(str.strip, answer.split(",")), strict=False))


def versions() -> dict[str, Any]:
    """Versions of everything that a result depends on; makes no call to a device."""
    facts: dict[str, Any] = {
        "commit": None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": None,
        "nvcc": None,
    }
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        facts["missing"] = f"{', '.join(missing)}: steps that need them will fail"
    if importlib.util.find_spec("triton") is not None:
        import triton

        facts["triton"] = triton.__version__
    if shutil.which("git"):
        git = ["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty"]
        facts["commit"] = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    if shutil.which("nvcc"):
        text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
        facts["nvcc"] = text.strip().splitlines()[-1] if text.strip() else None
    if torch.version.cuda is not None:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def first_call(device: str = "cuda") -> dict[str, Any]:
    """Compute something on the device; what it is.

    Raises:
        RuntimeError: If there is none, or this torch cannot use it.
    """
    if device == "cpu":
        assert torch.arange(10).sum().item() == 45
        return {"device": "none: this is a rehearsal"}
    if not torch.cuda.is_available():
        raise RuntimeError(
            "no CUDA device: torch "
            + (f"is built for {torch.version.cuda}" if torch.version.cuda else "is built for CPUs")
        )
    assert torch.arange(10, device="cuda").sum().item() == 45
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }


def extension() -> dict[str, Any]:
    """Load the extension; what serves tensors of a GPU.

    Raises:
        RuntimeError: If it does not load here, or nothing serves a GPU.
    """
    try:
        from diloco_comm import ops
    except Exception as error:
        raise RuntimeError(
            f"the extension does not load ({error}): build it with benchmarks/gpu/build.sh, or "
            "carry an extension that make gpu-build made for this Python and torch"
        ) from error
    impls = ops.available_impls("cuda")
    if not impls:
        raise RuntimeError("the extension has no CUDA kernels, and Triton is not installed")
    return {"impls": impls}


def forked_call(device: str = "cuda") -> dict[str, Any]:
    """Make the first call in a process forked after the imports, as the tests' workers are.

    Raises:
        RuntimeError: If the child could not use the device.
    """
    for name in BEFORE_FORK:
        importlib.import_module(name)  # must touch no device

    child = os.fork()
    if child == 0:
        status = 1
        try:
            first_call(device)
            status = 0
        except RuntimeError as error:
            print(error)
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError("a process forked after the imports cannot use the device")
    return {"forked_call": "works"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    calls = {
        "versions": (versions, "no call to a device"),
        "extension": (extension, "status 1 unless the extension loads"),
        "first-call": (lambda: first_call(args.device), "use the device once"),
        "forked-call": (
            lambda: forked_call(args.device),
            "use the device once, in a child process",
        ),
    }
    for name, (_, text) in calls.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    args = parser.parse_args()
    wanted = vars(args)
    for name, (call, _) in calls.items():
        if wanted[name.replace("-", "_")]:
            try:
                print(json.dumps(call()), flush=True)
            except RuntimeError as error:
                print(f"{error}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
