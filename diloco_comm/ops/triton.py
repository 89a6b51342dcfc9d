"""Triton's operators as ``torch.ops.diloco_comm_triton.*``, with the names and schemas of ours.

Nothing of Triton is imported before the first call. Where the extension has no CUDA kernels they
are also what ``torch.ops.diloco_comm.*`` does with CUDA tensors, so that the C++ engine, which
calls through the dispatcher, finds them; where it has, its operators call these for
``impl="triton"``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.library import Library

OPERATORS = (
    "encode",
    "reduce",
    "outer_step",
    "outer_step_adam",
    "outer_step_delayed",
    "decode",
    "merge",
    "norms",
    "digest",
)
NEEDS_TRITON = (
    "operators on CUDA tensors need Triton, which is not installed, or an extension built with "
    "CUDA: run `pip install triton`, or build with DILOCO_CUDA=ON"
)

_libraries: list[Library] = []  # a registration lasts as long as its library


def is_installed() -> bool:
    """Return whether Triton is there; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def has_cuda_kernels() -> bool:
    """Return whether the extension was built with CUDA kernels of its own."""
    return len(_libraries) == 1


def register() -> None:
    """Define the operators, and serve CUDA tensors where nothing else does. Call once."""
    assert not _libraries
    is_served = torch._C._dispatch_has_kernel_for_dispatch_key("diloco_comm::encode", "CUDA")
    theirs, ours = Library("diloco_comm_triton", "DEF"), Library("diloco_comm", "IMPL")
    _libraries.extend((theirs,) if is_served else (theirs, ours))
    for name in OPERATORS:
        schema = getattr(torch.ops.diloco_comm, name).default._schema
        theirs.define(str(schema).removeprefix("diloco_comm::"))
        kernel = _kernel(name, [argument.name for argument in schema.arguments])
        theirs.impl(name, kernel, "CPU")
        theirs.impl(name, kernel, "CUDA")
        theirs.impl(name, _nothing, "Meta")
        if not is_served:
            ours.impl(name, kernel, "CUDA")


def _kernel(name: str, argument_names: Sequence[str]) -> Callable[..., None]:
    """Return a function for the dispatcher, which passes arguments by position."""

    def run(*args: object, **kwargs: object) -> None:
        values = dict(zip(argument_names, args, strict=False)) | kwargs
        impl = values.pop("impl", "")
        if impl not in ("", "triton"):
            raise ValueError(f"impl must be triton on CUDA tensors here, got {impl!r}")
        with torch.no_grad():
            _operator(name, _device_of(values.values()))(**values)

    return run


def _nothing(*args: object, **kwargs: object) -> None:
    """Stand for an operator on fake tensors, which have nothing to write."""


def _operator(name: str, device: torch.device) -> Callable[..., None]:
    """Import Triton's kernels; raise where they cannot run on tensors of that device."""
    if not is_installed():
        raise ValueError(NEEDS_TRITON)
    operators = importlib.import_module("diloco_comm.kernels.operators")
    if device.type == "cpu" and not operators.is_interpreted():
        raise ValueError(
            "impl 'triton' runs on CUDA tensors, and on CPU tensors only in Triton's interpreter: "
            "set TRITON_INTERPRET=1 before Python starts"
        )
    return getattr(operators, name)


def _device_of(values: Iterable[object]) -> torch.device:
    """Return the device of the first tensor, alone or in a list."""
    for value in values:
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, Tensor):
            return first.device
    return torch.device("cpu")
