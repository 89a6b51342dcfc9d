"""Register Triton's operators as ``torch.ops.diloco_comm_triton.*``, with the extension's schemas.

Nothing of Triton is imported before the first call. Where the extension has no CUDA kernels,
Triton's operators also serve ``torch.ops.diloco_comm.*`` on CUDA tensors, so that the C++ engine,
which calls through the dispatcher, finds them. Where the extension has CUDA kernels, its operators
call Triton's for ``impl="triton"``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.library import Library

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


def register(operators: Iterable[str]) -> None:
    """Define the operators, and serve CUDA tensors where nothing else does. Call once."""
    assert not _libraries
    is_served = torch._C._dispatch_has_kernel_for_dispatch_key("diloco_comm::encode", "CUDA")
    own, shared = Library("diloco_comm_triton", "DEF"), Library("diloco_comm", "IMPL")
    _libraries.extend((own,) if is_served else (own, shared))
    for name in operators:
        schema = getattr(torch.ops.diloco_comm, name).default._schema
        own.define(str(schema).removeprefix("diloco_comm::"))
        names = [argument.name for argument in schema.arguments]
        on_cpu, on_cuda = (_kernel(name, names, device) for device in ("cpu", "cuda"))
        own.impl(name, on_cpu, "CPU")
        own.impl(name, on_cuda, "CUDA")
        own.impl(name, _nothing, "Meta")
        if not is_served:
            shared.impl(name, on_cuda, "CUDA")


def _kernel(name: str, argument_names: Sequence[str], device: str) -> Callable[..., None]:
    """Return a function for the dispatcher, which passes arguments by position."""

    def run(*args: object, **kwargs: object) -> None:
        values: dict[str, Any] = dict(zip(argument_names, args, strict=False)) | kwargs
        impl = values.pop("impl", "")
        if impl not in ("", "triton"):
            raise ValueError(f"impl must be triton on CUDA tensors here, got {impl!r}")
        operators = _operators(device)
        if "wire" in values:
            checks = importlib.import_module("diloco_comm.kernels.checks")
            layout = (values.pop(each) for each in ("wire", "block_size", "run_elements"))
            values["layout"] = checks.check_layout(*layout)
        with torch.no_grad():
            getattr(operators, name)(**values)

    return run


def _nothing(*args: object, **kwargs: object) -> None:
    """Stand for an operator on fake tensors, which have nothing to write."""


def _operators(device: str) -> Any:
    """Import Triton's operators; raise where they cannot run on tensors of that device."""
    if not is_installed():
        raise ValueError(NEEDS_TRITON)
    operators = importlib.import_module("diloco_comm.kernels.operators")
    if device == "cpu" and not operators.is_interpreted():
        raise ValueError(
            "impl 'triton' runs on CUDA tensors, and on CPU tensors only in Triton's interpreter: "
            "set TRITON_INTERPRET=1 before Python starts"
        )
    return operators
