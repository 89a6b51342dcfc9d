"""Settings that have a name in the literature; every argument of ``DiLoCo`` may be added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..methods.outer import SGD, HeavyBall, Nesterov
from ..methods.overlap import CO2, Eager, Streaming
from ..options import with_defaults
from ..rounds.runner import Weight
from .diloco import DiLoCo

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import Optimizers, PresetArguments, UnweightedArguments


def fedavg(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    sync_every: int,
    weight: Weight,
    **arguments: Unpack[UnweightedArguments],
) -> DiLoCo:
    """Average the replicas' parameters, each weighted by its samples (arXiv 1602.05629).

    Args:
        weight: Samples this replica trained on in the round, a number or a callable.
    """
    defaults = {"outer": SGD(lr=1.0), "wire": "fp32", "weight": weight}
    given = with_defaults(defaults, arguments)
    return DiLoCo(model, optimizer, sync_every=sync_every, **given)


def local_sgd(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    sync_every: int,
    **arguments: Unpack[PresetArguments],
) -> DiLoCo:
    """Average the replicas' parameters, all alike (arXiv 1805.09767)."""
    defaults = {"outer": SGD(lr=1.0), "wire": "fp32"}
    given = with_defaults(defaults, arguments)
    return DiLoCo(model, optimizer, sync_every=sync_every, **given)


def streaming_diloco(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    sync_every: int = 100,
    **arguments: Unpack[PresetArguments],
) -> DiLoCo:
    """Exchange a few layers at a time, hidden behind one inner step (arXiv 2501.18512).

    Strided fragments of three layers, outer Nesterov 0.4/0.9, 4-bit pseudo-gradients; fragments
    that find no layers in the model are an error: give ``fragments=`` then.
    """
    defaults = {
        "overlap": Streaming(delay=1, alpha=0.5),
        "fragments": "layers:3",
        "outer": Nesterov(0.4, 0.9),
        "wire": "e3m0",
    }
    given = with_defaults(defaults, arguments)
    return DiLoCo(model, optimizer, sync_every=sync_every, **given)


def eager_diloco(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    sync_every: int = 30,
    **arguments: Unpack[PresetArguments],
) -> DiLoCo:
    """Give the exchange a whole round, and use the own share at once (arXiv 2502.12996).

    Outer Nesterov 0.2/0.9, 4-bit pseudo-gradients. The learning rate is half of Blocking's best in
    the search over rates (``docs/measurements/convergence.md``). Evaluate
    ``outer_parameters(consensus=True)``, and ``flush()`` at the end.
    """
    defaults = {"overlap": Eager(), "outer": Nesterov(0.2, 0.9), "wire": "e3m0"}
    given = with_defaults(defaults, arguments)
    return DiLoCo(model, optimizer, sync_every=sync_every, **given)


def co2(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    sync_every: int = 48,
    **arguments: Unpack[PresetArguments],
) -> DiLoCo:
    """Give the exchange a whole round, with a clipped outer momentum (arXiv 2401.16265).

    Outer lr 1.0, momentum 0.5 and clip 1.0 as in the authors' code and its script; fp32 wire.
    """
    defaults = {"overlap": CO2(clip=1.0), "outer": HeavyBall(1.0, 0.5), "wire": "fp32"}
    given = with_defaults(defaults, arguments)
    return DiLoCo(model, optimizer, sync_every=sync_every, **given)
