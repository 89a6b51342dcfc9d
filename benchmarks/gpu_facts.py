"""Say what a GPU check runs on, and make the first call to the device.

python benchmarks/gpu_facts.py --versions | --first-call
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from typing import Any

import torch


def versions() -> dict[str, Any]:
    """Versions of everything that a result depends on; makes no call to a device."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": None,
        "nvcc": None,
    }
    if importlib.util.find_spec("triton") is not None:
        import triton

        facts["triton"] = triton.__version__
    if shutil.which("nvcc"):
        text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
        facts["nvcc"] = text.strip().splitlines()[-1] if text.strip() else None
    if torch.version.cuda is not None:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def first_call() -> dict[str, Any]:
    """Compute something on the device; what it is.

    Raises:
        RuntimeError: If there is none, or this torch cannot use it.
    """
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", action="store_true", help="no call to a device")
    parser.add_argument("--first-call", action="store_true", help="use the device once")
    args = parser.parse_args()
    try:
        facts = (versions() if args.versions else {}) | (first_call() if args.first_call else {})
    except RuntimeError as error:
        print(f"{error}")
        return 1
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
