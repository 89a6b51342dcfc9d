"""Which implementations of the operators there are, which of them run here, and the default."""

from __future__ import annotations

import torch

from ..base import env
from . import triton as ops_triton

# Where each implementation lives, by the type of device that its tensors are on. "reference" is
# plain PyTorch; the other ones for the CPU are chosen in C++, which refuses by name what the
# processor cannot run. "cuda" is there in builds with CUDA, "triton" where Triton is installed.
IMPLEMENTATIONS = {
    "cpu": {
        "reference": "diloco_comm.ops.reference",
        "scalar": "csrc/codec/kernels_scalar.cpp",
        "avx2": "csrc/codec/kernels_avx2.cpp",
        "avx512": "csrc/codec/kernels_avx512.cpp",
    },
    "cuda": {
        "triton": "diloco_comm.kernels.operators",
        "cuda": "csrc/cuda",
    },
}
# The default of each operator on CUDA tensors, where both are there; else the other one. Written
# down before any GPU measured them: benchmarks/operators/kernels_gpu.py prints the measured table.
DEFAULT_ON_CUDA = {
    "encode": "cuda",
    "reduce": "cuda",
    "outer_step": "cuda",
    "outer_step_adam": "cuda",
    "outer_step_delayed": "cuda",
    "decode": "cuda",
    "merge": "cuda",
    "norms": "cuda",
    "digest": "cuda",
}


def available_impls(device: str = "cpu") -> tuple[str, ...]:
    """Name the implementations that run here on "cpu" or "cuda" tensors.

    Those of the CPU come slowest first, and the last is the default; on CUDA tensors each operator
    has a default of its own, ``default_on_cuda``. Triton's interpreter, which runs its kernels on
    CPU tensors when ``TRITON_INTERPRET=1``, is for tests: it is never a default and is not listed.
    """
    if device == "cpu":
        return ("reference", *torch.ops.diloco_comm._cpu_impls())
    there = {"cuda": ops_triton.has_cuda_kernels(), "triton": ops_triton.is_installed()}
    return tuple(name for name in IMPLEMENTATIONS["cuda"] if there[name])


def default_on_cuda(operator: str) -> str:
    """Name the implementation that serves an operator on CUDA tensors unless another is asked for.

    Raises:
        ValueError: If there is none here.
    """
    names = available_impls("cuda")
    if not names:
        raise ValueError(ops_triton.NEEDS_TRITON)
    wanted = DEFAULT_ON_CUDA[operator]
    return wanted if wanted in names else names[-1]


def resolve_impl(impl: str = "", device: str = "cpu", operator: str = "") -> str:
    """Return the name to pass on: the argument's, else the environment's, else the default.

    The default is "", which leaves the choice to each operator; with ``operator`` given it is that
    operator's name on CUDA tensors, and "" on the CPU, where the extension chooses. The
    environment's name is left aside where it means another type of device than ``device``.

    Raises:
        ValueError: If the name is unknown or cannot run here on tensors of that device.
        TypeError: If it is no string.
    """
    if not isinstance(impl, str):
        raise TypeError(f'impl must be a name, or "" for the default, got {impl!r}')
    if not impl and env.impl() and not _is_of_another_device(env.impl(), device):
        impl = env.impl()
    if device not in IMPLEMENTATIONS:
        return impl  # whatever is registered for that kind of device
    names = available_impls(device)
    if not names:
        raise ValueError(ops_triton.NEEDS_TRITON)
    if impl and impl not in names:
        where = "on this machine" if device == "cpu" else f"on {device} tensors here"
        raise ValueError(f"impl must be one of {', '.join(names)} {where}, got {impl!r}")
    return default_on_cuda(operator) if operator and not impl and device == "cuda" else impl


def _is_of_another_device(impl: str, device: str) -> bool:
    others = (names for key, names in IMPLEMENTATIONS.items() if key != device)
    return impl not in IMPLEMENTATIONS.get(device, {}) and any(impl in names for names in others)


def is_served(device: torch.device) -> bool:
    """Whether there are operators for tensors on this device."""
    if device.type in ("cpu", "cuda", "meta"):
        return device.type != "meta"
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("diloco_comm::encode", key)
