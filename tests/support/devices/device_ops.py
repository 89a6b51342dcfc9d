"""The operators for tests that are written with CPU tensors, on any device.

An implementation may be given as "name@device": the arguments are then copied to the device, and
what the operator wrote there is copied back into the CPU tensors. "emulated" is CUDA's code on the
CPU (emulated.py). Other names are passed on as they are. So one test body serves CPU and CUDA.
"""

from __future__ import annotations

from collections.abc import Callable

import emulated
import torch
from torch import Tensor

from diloco_comm import ops


def _copied(argument: object, device: str, copies: dict[int, tuple[Tensor, Tensor]]) -> object:
    """Copy tensors, alone or in lists; one tensor that is passed twice stays one."""
    if isinstance(argument, (list, tuple)):
        return [_copied(each, device, copies) for each in argument]
    if not isinstance(argument, Tensor):
        return argument
    if id(argument) not in copies:
        # With the argument's strides, which ``to`` keeps only where no element is left out.
        base = torch.empty(0, dtype=argument.dtype).set_(argument.untyped_storage()).to(device)
        place = (argument.shape, argument.stride(), argument.storage_offset())
        copies[id(argument)] = (argument, base.as_strided(*place))
    return copies[id(argument)][1]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _anywhere(name: str) -> Callable[..., None]:
    def run(*args: object, impl: str = "", **kwargs: object) -> None:
        if impl == "emulated":
            emulated.operator(name)(*args, **kwargs)
            return
        operator = getattr(ops, name)
        impl, _, device = impl.partition("@")
        if not device:
            operator(*args, impl=impl, **kwargs)
            return
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        there = [_copied(each, device, copies) for each in args]
        named = {key: _copied(each, device, copies) for key, each in kwargs.items()}
        operator(*there, impl=impl, **named)
        with torch.no_grad():
            for here, copy in copies.values():
                if not torch.equal(_bytes(here), _bytes(copy.to(here.device))):  # -0 is not 0
                    here.copy_(copy)

    return run


encode = _anywhere("encode")
reduce = _anywhere("reduce")
outer_step = _anywhere("outer_step")
outer_step_adam = _anywhere("outer_step_adam")
outer_step_delayed = _anywhere("outer_step_delayed")
decode = _anywhere("decode")
merge = _anywhere("merge")
norms = _anywhere("norms")
digest = _anywhere("digest")
