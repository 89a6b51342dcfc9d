"""How objects are written in messages: what a DiLoCo is doing, the call that makes an optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .diloco import DiLoCo


def describe(diloco: DiLoCo) -> str:
    """Return one line about a DiLoCo, from what this replica knows by itself."""
    exchange = getattr(diloco, "exchange", None)
    if exchange is None:
        return "DiLoCo(not attached)"
    settings, parts = diloco.settings, diloco.parts
    count = diloco._plan.num_fragments
    rounds = sorted({part.round for part in parts})
    words = [
        f"replica {exchange.replica} of members {list(exchange.members)}",
        f"sync_every={settings.sync_every}",
        f"overlap={_call(settings.overlap.config())}",
        f"outer={_call(settings.outer.config())}",
        f"wire={settings.wire.name}",
        f"{count} fragment{'s'[: count > 1]}",
        f"inner step {diloco.inner_step}",
        f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}",
    ]
    words += ["closed"] * diloco._is_closed
    return f"DiLoCo({', '.join(words)})"


def _call(config: Mapping[str, Any]) -> str:
    arguments = [f"{k}={v!r}" for k, v in config.items() if k != "name" and v is not None]
    return f"{config['name']}({', '.join(arguments)})"


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
