"""The CUDA operators with the lanes of a warp run one after the other on the CPU.

``build/emulated`` holds them as ``torch.ops.diloco_comm_emulated.*``: the argument checks, tables
and tiles of the CUDA build, with the lanes and the launch of ``tests/cpp/emulated_cuda.cpp``.
``make test`` builds it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

LIBRARY = Path(__file__).resolve().parents[3] / "build/emulated/libdiloco_emulated.so"
REASON = "build/emulated is not built: make test builds it"

needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason=REASON)


def operator(name: str) -> Callable[..., None]:
    """Return one emulated operator; tensors may require gradients, as in ``diloco_comm.ops``."""
    torch.ops.load_library(str(LIBRARY))

    def run(*args: object, **kwargs: object) -> None:
        with torch.no_grad():
            getattr(torch.ops.diloco_comm_emulated, name)(*args, **kwargs)

    return run
