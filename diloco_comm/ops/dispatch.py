"""Choose the implementation of an operator and run it: the one place where Python does either.

A name given as ``impl`` comes first, then the environment's (``DILOCO_COMM_IMPL``), then the
default: ``DEFAULT_ON_CUDA`` for CUDA tensors, and on the CPU the fastest that the extension finds
the processor able to run. Which registered kernel serves a device is torch's own dispatch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base import env
from . import triton as ops_triton

# The place of each implementation in the sources, by the type of device that its tensors are on.
# "reference" is plain PyTorch. The other implementations for the CPU are chosen in C++, which
# refuses a name that the processor cannot run. "cuda" is there in builds with CUDA, "triton" where
# Triton is installed.
IMPLEMENTATIONS = {
    "cpu": {
        "reference": "diloco_comm.ops.reference",
        "scalar": "csrc/codec/scalar/kernels.cpp",
        "avx2": "csrc/codec/simd/kernels_avx2.cpp",
        "avx512": "csrc/codec/simd/kernels_avx512.cpp",
    },
    "cuda": {
        "triton": "diloco_comm.kernels.operators",
        "cuda": "csrc/cuda",
    },
}
# The default of each operator on CUDA tensors, where both implementations are there; else the
# available one is the default. docs/measurements/gpu-kernels.md has the figures of an H200, and why
# Triton serves none of the operators there; benchmarks/operators/kernels_gpu.py measures a GPU.
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
OPERATORS = tuple(DEFAULT_ON_CUDA)
# The operators that have no kernels for CUDA tensors.
CPU_ONLY = ("gram",)


def run(operator: str, like: Sequence[Tensor], arguments: dict[str, Any]) -> None:
    """Run one operator in the implementation for the device of the first tensor of ``like``.

    Autograd is off: the operators write parameters in place.

    Args:
        like: Tensors of the call; with none, the device is the CPU.
        arguments: All arguments of the schema by name, in its order; ``impl`` is the last.

    Raises:
        ValueError, TypeError: As ``resolve_impl``, and what the operator raises.
    """
    *values, impl = arguments.values()
    for position in _lists(operator):
        values[position] = list(values[position])
    device = like[0].device.type if like else "cpu"
    if operator in CPU_ONLY and (device != "cpu" or impl == "triton"):
        given = f"impl={impl!r}" if device == "cpu" else f"a tensor on {device}"
        raise ValueError(f"{operator} runs on CPU tensors alone, without Triton; got {given}")
    # Triton's kernels know whether they are interpreted, and then take CPU tensors too.
    if impl != "triton" or device != "cpu":
        impl = resolve_impl(impl, device, operator)
    with torch.no_grad():
        if impl == "reference":
            reference = importlib.import_module("diloco_comm.ops.reference")
            getattr(reference, operator)(*values)
        elif impl == "triton":
            getattr(torch.ops.diloco_comm_triton, operator)(*values, impl)
        else:
            getattr(torch.ops.diloco_comm, operator)(*values, impl)


@functools.cache
def _lists(operator: str) -> tuple[int, ...]:
    """Return which arguments torch takes as lists alone, where callers may have any sequence."""
    schema = getattr(torch.ops.diloco_comm, operator).default._schema
    types = [argument.type for argument in schema.arguments]
    return tuple(i for i, kind in enumerate(types) if isinstance(kind, torch.ListType))


def available_impls(device: str = "cpu") -> tuple[str, ...]:
    """Name the implementations that run here on "cpu" or "cuda" tensors.

    Implementations for the CPU come slowest first, and the last is the default; on CUDA tensors
    each operator has a default of its own, ``default_on_cuda``. Triton's interpreter, which runs
    Triton's kernels on CPU tensors when ``TRITON_INTERPRET=1``, is for tests: it is never a default
    and is not listed.
    """
    if device == "cpu":
        return _available_on_cpu()
    there = {"cuda": ops_triton.has_cuda_kernels(), "triton": ops_triton.is_installed()}
    return tuple(name for name in IMPLEMENTATIONS["cuda"] if there[name])


@functools.cache
def _available_on_cpu() -> tuple[str, ...]:
    return ("reference", *torch.ops.diloco_comm._cpu_impls())


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


def resolve_engine_impl(impl: str = "", device: str = "cpu") -> str:
    """As ``resolve_impl``, for operators that the exchange engine calls, too.

    Raises:
        ValueError: Also for "reference", which is Python.
    """
    resolved = resolve_impl(impl, device)
    if resolved == "reference":
        names = [name for name in available_impls(device) if name != resolved]
        raise ValueError(
            "impl 'reference' (an argument, or DILOCO_COMM_IMPL) is plain PyTorch, which the "
            f"exchange engine cannot call: take one of {', '.join(names)}"
        )
    return resolved


def _is_of_another_device(impl: str, device: str) -> bool:
    others = (names for key, names in IMPLEMENTATIONS.items() if key != device)
    return impl not in IMPLEMENTATIONS.get(device, {}) and any(impl in names for names in others)


def is_served(device: torch.device) -> bool:
    """Whether there are operators for tensors on this device."""
    if device.type in ("cpu", "cuda", "meta"):
        return device.type != "meta"
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("diloco_comm::encode", key)
