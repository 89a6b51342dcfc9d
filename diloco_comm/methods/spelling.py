"""The call that makes an optimizer, as messages show it."""

from __future__ import annotations

import inspect

import torch


def call_of(optimizer: torch.optim.Optimizer, argument: str) -> str:
    """Return the call that makes such an optimizer, of its first group's arguments.

    Arguments that are the class's own defaults are left out, but for the learning rate.

    Args:
        argument: What stands for the parameters.
    """
    made = type(optimizer)
    values = {**optimizer.defaults, **optimizer.param_groups[0]}
    written = [argument]
    for name, parameter in inspect.signature(made).parameters.items():
        value = values.get(name, parameter.default)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        is_plain = isinstance(value, (bool, int, float, str, tuple, list))
        if name != "params" and is_plain and (name == "lr" or value != parameter.default):
            written.append(f"{name}={value!r}")
    return f"{class_name(made)}({', '.join(written)})"


def class_name(kind: type[torch.optim.Optimizer]) -> str:
    """Return the name of an optimizer's class as a program writes it."""
    is_public = kind.__module__.startswith("torch.optim") and hasattr(torch.optim, kind.__name__)
    return "torch.optim." * is_public + kind.__name__
