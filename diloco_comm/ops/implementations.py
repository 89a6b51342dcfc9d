"""The implementations of the operators: which ones this machine can run, and which one serves.

Triton's operators are registered as ``torch.ops.diloco_comm_triton.*``, with the extension's
schemas; nothing of Triton is imported before the first call. Where the extension has no CUDA
kernels, Triton's operators also serve ``torch.ops.diloco_comm.*`` on CUDA tensors, so that the C++
engine, which calls through the dispatcher, finds them. Where the extension has CUDA kernels, its
operators call Triton's for ``impl="triton"``, and by default on a device that the kernels do not
run on: the first call on a device asks the driver.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library

from ..base import env
from ..base.checks import warn

# The place of each implementation in the sources, by the type of device that its tensors are on.
# "reference" is plain PyTorch. The other implementations for the CPU are chosen in C++, which
# refuses a name that the processor cannot run. "cuda" is there in builds with CUDA that fit driver
# and device, "triton" where Triton is installed.
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
# The default of each operator on CUDA tensors where both implementations can run; where one can,
# it is the default. docs/measurements/gpu-kernels.md says why none of the defaults is "triton": it
# has the figures of an H200. benchmarks/operators/kernels_gpu.py measures another GPU.
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
# The lowest compute capability of a GPU on which the CUDA kernels, or Triton's, can run.
LEAST_CAPABILITY = (8, 0)

_libraries: list[Library] = []  # a registration lasts as long as its library


def available_impls(device: str = "cpu", index: int | None = None) -> tuple[str, ...]:
    """Name the implementations that run here on "cpu" or "cuda" tensors.

    Implementations for the CPU come slowest first, and the last is the default; on CUDA tensors
    each operator has a default of its own, ``default_on_cuda``. Triton's interpreter, which runs
    Triton's kernels on CPU tensors when ``TRITON_INTERPRET=1``, is for tests: it is never a default
    and is not listed.

    Args:
        index: Which GPU; None: the current one.
    """
    if device == "cpu":
        return _available_on_cpu()
    there = {"cuda": has_cuda_kernels(index), "triton": has_triton()}
    return tuple(name for name in IMPLEMENTATIONS["cuda"] if there[name])


@functools.cache
def _available_on_cpu() -> tuple[str, ...]:
    return ("reference", *torch.ops.diloco_comm._cpu_impls())


def default_on_cuda(operator: str, index: int | None = None) -> str:
    """Name the implementation that serves an operator on CUDA tensors unless another is asked for.

    Raises:
        ValueError: If there is none here.
    """
    names = available_impls("cuda", index)
    if not names:
        raise ValueError(needs_triton(index))
    wanted = DEFAULT_ON_CUDA[operator]
    if wanted in names:
        return wanted
    if wanted == "cuda" and _has_built_kernels():
        warn(f"Triton serves the GPU, because {cuda_obstacle(index)}")
    return names[-1]


def resolve_impl(
    impl: str = "", device: str = "cpu", operator: str = "", index: int | None = None
) -> str:
    """Return the name to pass on: the argument's, else the environment's, else the default.

    The default is "", which leaves the choice to each operator. With ``operator`` given, the
    default on CUDA tensors is that operator's implementation; on the CPU it stays "", and the
    extension chooses. The environment's name is left aside if it is for another type of device.

    Raises:
        ValueError: If the name is unknown or cannot run here on tensors of that device, or if the
            GPU ``index`` is too old for all of them.
        TypeError: If it is no string.
    """
    if not isinstance(impl, str):
        raise TypeError(f'impl must be a name, or "" for the default, got {impl!r}')
    if not impl and env.impl() and not _is_of_another_device(env.impl(), device):
        impl = env.impl()
    if device not in IMPLEMENTATIONS:
        return impl  # torch's dispatcher finds what is registered for another type of device
    if device == "cuda" and index is not None and torch.cuda.is_available():
        if refused := obstacle(torch.device("cuda", index)):
            raise ValueError(f"a tensor is {refused}")
    names = available_impls(device, index)
    if not names:
        raise ValueError(needs_triton(index))
    if impl and impl not in names:
        where = "on this machine" if device == "cpu" else f"on {device} tensors here"
        why = f": {cuda_obstacle(index)}" if impl == "cuda" and device == "cuda" else ""
        raise ValueError(f"impl must be one of {', '.join(names)} {where}, got {impl!r}{why}")
    return default_on_cuda(operator, index) if operator and not impl and device == "cuda" else impl


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


def obstacle(device: torch.device) -> str:
    """Return why the operators take no tensors on this device; "" where the tensors are taken.

    Returns:
        The end of a sentence that begins with the name of a tensor, and "is".
    """
    if device.type == "cuda":
        have = torch.cuda.get_device_capability(device)
        if have >= LEAST_CAPABILITY:
            return ""
        shown, least = (".".join(map(str, numbers)) for numbers in (have, LEAST_CAPABILITY))
        return (
            f"on {device}, a GPU of compute capability {shown}: only tensors on GPUs of {least} "
            "and later, or in CPU memory, are taken"
        )
    key = torch._C._dispatch_key_for_device(device.type)
    is_served = torch._C._dispatch_has_kernel_for_dispatch_key("diloco_comm::encode", key)
    if is_served and device.type != "meta":
        return ""
    return f"on {device}: only tensors on a GPU or in CPU memory are taken"


def has_triton() -> bool:
    """Return whether Triton is there; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def has_cuda_kernels(index: int | None = None) -> bool:
    """Return whether the extension has CUDA kernels that run on a device, or on the current one."""
    return not cuda_obstacle(index)


def cuda_obstacle(device: int | None = None) -> str:
    """Say in one sentence why the extension's CUDA kernels do not run on a device; "": they do.

    Args:
        device: Index of the device. None: the current one. Before torch has used a device, the
            driver is not asked, as a process that has asked cannot be forked; the answer then only
            says whether the kernels were built.
    """
    if not _has_built_kernels():
        return "the extension was built without CUDA kernels"
    if device is None:
        if not torch.cuda.is_initialized():
            return ""
        device = torch.cuda.current_device()
    return _sentence(*torch.ops.diloco_comm._cuda_support(device))


def _has_built_kernels() -> bool:
    return len(_libraries) == 1


def _sentence(runs: int, runtime: int, driver: int, device: int, *kernels: int) -> str:
    """Say what was found and what is needed; the arguments come from ``support_of`` in C++."""
    if runs:
        return ""
    if device == 0:
        found = f"the driver is for CUDA {driver // 1000}.{driver % 1000 // 10}"
        found = found if driver else "there is no driver of CUDA"
        return f"{found}, and the CUDA kernels need a driver for CUDA {runtime // 1000}.0 or newer"
    names = ", ".join(f"sm_{each // 10}" for each in kernels)
    return f"the device is sm_{device // 10}, and the CUDA kernels are for {names}"


def needs_triton(index: int | None = None) -> str:
    """Say that Triton is needed here, and why the CUDA kernels are not enough."""
    obstacle = cuda_obstacle(index)
    why = f", because {obstacle}" if obstacle else ""
    return f"Triton is needed here{why}, and is not installed: run `pip install triton`"


def served_by(device: int) -> str:
    """Say in one sentence what serves a CUDA device; if not CUDA kernels, why.

    The sentence begins with "not served" where the operators raise.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the sentence says the same
            names = {resolve_impl("", "cuda", operator, device) for operator in OPERATORS}
        why = f"{env.IMPL} is triton" if env.impl() == "triton" else cuda_obstacle(device)
    except (ValueError, RuntimeError) as error:  # a failing CUDA driver raises RuntimeError
        return f"not served: {str(error).partition(chr(10))[0]}"
    which = " and ".join("Triton" if name == "triton" else "CUDA kernels" for name in sorted(names))
    return f"served by {which}" + (f", because {why}" if why else "")


def register_triton() -> None:
    """Define Triton's operators, and serve CUDA tensors where nothing else does. Call once."""
    assert not _libraries
    is_served = torch._C._dispatch_has_kernel_for_dispatch_key("diloco_comm::encode", "CUDA")
    own, shared = Library("diloco_comm_triton", "DEF"), Library("diloco_comm", "IMPL")
    _libraries.extend((own,) if is_served else (own, shared))
    for name in OPERATORS:
        schema = getattr(torch.ops.diloco_comm, name).default._schema
        own.define(str(schema).removeprefix("diloco_comm::"))
        on_cpu, on_cuda = (_kernel(name, schema.arguments, device) for device in ("cpu", "cuda"))
        own.impl(name, on_cpu, "CPU")
        own.impl(name, on_cuda, "CUDA")
        own.impl(name, _nothing, "Meta")
        if not is_served:
            shared.impl(name, on_cuda, "CUDA")


def _kernel(name: str, arguments: Sequence[Any], device: str) -> Callable[..., None]:
    """Return a function for the dispatcher, which passes arguments by position."""
    names = [argument.name for argument in arguments]
    defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}

    def run(*args: object, **kwargs: object) -> None:
        values: dict[str, Any] = defaults | dict(zip(names, args, strict=False)) | kwargs
        impl = values.pop("impl")
        if impl not in ("", "triton"):
            raise ValueError(f"impl must be triton on CUDA tensors here, got {impl!r}")
        operators = _operators(device)
        if "wire" in values:
            checks = importlib.import_module("diloco_comm.kernels.checks")
            layout = (values.pop(each) for each in ("wire", "block_size", "run_elements"))
            values["layout"] = checks.check_layout(*layout)
        with torch.no_grad():
            getattr(operators, name)(operators.Arguments(**values))

    return run


def _nothing(*args: object, **kwargs: object) -> None:
    """Serve as an operator on fake tensors (without memory): there is nothing to write."""


def _operators(device: str) -> Any:
    """Import Triton's operators; raise where they cannot run on tensors of that device."""
    if not has_triton():
        raise ValueError(needs_triton())
    operators = importlib.import_module("diloco_comm.kernels.operators")
    if device == "cpu" and not operators.is_interpreted():
        raise ValueError(
            "impl 'triton' runs on CUDA tensors, and on CPU tensors only in Triton's interpreter: "
            "set TRITON_INTERPRET=1 before Python starts"
        )
    return operators
