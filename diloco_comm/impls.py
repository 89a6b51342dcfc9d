"""Which implementations of the operators there are, which of them run here, and the default."""

from __future__ import annotations

import torch

from . import env, ops_triton

# Where each implementation lives, by the type of device that its tensors are on. "reference" is
# plain PyTorch; the other ones for the CPU are chosen in C++, which refuses by name what the
# processor cannot run. "cuda" is there in builds with CUDA, "triton" where Triton is installed.
IMPLEMENTATIONS = {
    "cpu": {
        "reference": "diloco_comm.reference",
        "scalar": "csrc/codec/kernels_scalar.cpp",
        "avx2": "csrc/codec/kernels_avx2.cpp",
        "avx512": "csrc/codec/kernels_avx512.cpp",
    },
    "cuda": {
        "triton": "diloco_comm.kernels.operators",
        "cuda": "csrc/cuda",
    },
}
# The default on CUDA tensors: the first of these that is there. Written down before any
# measurement; the one that turns out faster belongs first.
DEFAULT_ON_CUDA = ("cuda", "triton")


def available_impls(device: str = "cpu") -> tuple[str, ...]:
    """Name the implementations that run here on "cpu" or "cuda" tensors; the last is the default.

    Those of the CPU come slowest first. Triton's interpreter, which runs its kernels on CPU tensors
    when ``TRITON_INTERPRET=1``, is for tests: it is never a default and is not listed.
    """
    if device == "cpu":
        return ("reference", *torch.ops.diloco_comm._cpu_impls())
    there = {"cuda": ops_triton.has_cuda_kernels(), "triton": ops_triton.is_installed()}
    return tuple(name for name in reversed(DEFAULT_ON_CUDA) if there[name])


def resolve_impl(impl: str = "", device: str = "cpu") -> str:
    """Return the name to pass on: the argument's, else the environment's, else the default.

    The default is "" on the CPU, where the extension chooses, and a name on CUDA tensors. The
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
    return impl if impl or device == "cpu" else names[-1]


def _is_of_another_device(impl: str, device: str) -> bool:
    others = (names for key, names in IMPLEMENTATIONS.items() if key != device)
    return impl not in IMPLEMENTATIONS.get(device, {}) and any(impl in names for names in others)
