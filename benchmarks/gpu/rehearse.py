"""Run a program of the GPU check without a GPU, with stand-ins for both implementations.

    python -m benchmarks.gpu.rehearse benchmarks.operators.kernels_gpu --device cpu ...

On CPU tensors ``impl="cuda"`` is the emulation of the CUDA operators (tests/cpp/emulated_cuda.cpp),
and ``impl="triton"`` is Triton's interpreter. The time that either takes says nothing about a GPU.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Before Triton is imported.
os.environ["TRITON_INTERPRET"] = "1"

from diloco_comm import ops

LIBRARY = Path(__file__).resolve().parents[2] / "build/emulated/libdiloco_emulated.so"
IMPLS = ("triton", "cuda")


def emulate() -> None:
    """Let the operators of this process take the implementations of a GPU on CPU tensors.

    Raises:
        OSError: If the emulation is not built.
    """
    torch.ops.load_library(str(LIBRARY))
    run = ops._run

    def emulated(operator: str, like: Sequence[Tensor], arguments: dict[str, Any]) -> None:
        if arguments["impl"] != "cuda":
            run(operator, like, arguments)
            return
        *values, _ = (list(v) if isinstance(v, tuple) else v for v in arguments.values())
        with torch.no_grad():
            getattr(torch.ops.diloco_comm_emulated, operator)(*values, "emulated")

    ops._run = emulated  # type: ignore[assignment]
    ops.available_impls = lambda device="cpu": IMPLS  # type: ignore[assignment]


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m benchmarks.gpu.rehearse MODULE [ARGUMENTS]")
    del sys.argv[0]
    emulate()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
