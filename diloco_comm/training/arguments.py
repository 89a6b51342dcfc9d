"""The arguments of ``DiLoCo``, checked before anything is made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from torch import nn

from ..base import env
from ..base.checks import choice, flag, not_negative, timeout_seconds
from ..methods.settings import Config, Settings, merge, read_config
from ..options import ALONE, Link, NonFinite, StorePeers, Wire, choices_in
from ..replica.model_watch import CHECKS
from ..rounds.weighing import Weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..elastic.options import Elastic
    from ..methods.outer import Factory, OuterOptimizer
    from ..methods.overlap import Overlap
    from ..ops.wire import WireFormat
    from ..replica.fragments import FragmentSpec

Peers: TypeAlias = "dist.ProcessGroup | DeviceMesh | StorePeers | Elastic | str"
# What the views of a membership say.
_GIVEN_BY_VIEWS = ("group", "mesh", "store", "replica", "num_replicas", "members")


class UnweightedArguments(TypedDict, total=False):
    """The arguments of ``DiLoCo`` that ``fedavg`` passes on."""

    fragments: FragmentSpec | None
    offsets: Sequence[int] | None
    overlap: Overlap | str | None
    outer: OuterOptimizer | Factory | str | None
    wire: str | WireFormat | Mapping[str, str] | Wire | None
    peers: Peers | None
    link: str | Link | None
    nonfinite: str | NonFinite | None
    shard_group: Any
    init: str
    impl: str
    config: Config | None
    average_buffers: bool | None
    norms: bool
    attach: bool
    checks: str
    offload: str | None


class PresetArguments(UnweightedArguments, total=False):
    """The arguments of ``DiLoCo`` that presets pass on."""

    weight: Weight


class Arguments(UnweightedArguments, total=False):
    """The arguments of ``DiLoCo`` beside model and optimizer, for functions that pass them on."""

    sync_every: int | None
    weight: Weight


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of ``DiLoCo`` that are no ``Settings``.

    Raises:
        TypeError, ValueError: For the first one that cannot be.
    """
    model = arguments["model"]
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    flag("norms", arguments["norms"])
    flag("attach", arguments["attach"])
    choice("checks", arguments["checks"], CHECKS)
    choice("init", arguments["init"], ("broadcast", "check", "join"))
    choice("offload", arguments["offload"], (None, "cpu"))
    if arguments["membership"] is not None:
        _check_membership(arguments)


def weight_of(weight: Weight) -> Weight:
    """Return a weight that is a number as a float, which stays as it is; a function as given."""
    return weight if callable(weight) else not_negative("weight", weight, "a number or a function")


def seconds_of(timeout: float | timedelta | None) -> float:
    """Return the timeout of an exchange in seconds; without one, that of the environment."""
    return timeout_seconds(env.timeout_s() if timeout is None else timeout)


def settings_among(arguments: Mapping[str, Any], config: Config | None) -> Settings:
    """Return the settings among the arguments of ``DiLoCo``: fields and arguments share names."""
    name, saved = read_config(config)
    given = {field.name: arguments[field.name] for field in fields(Settings)}
    return merge(given, choices_in(name, saved), name)


def _check_membership(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of ``DiLoCo`` that go with ``membership``.

    Raises:
        TypeError, ValueError: For the first one that cannot be.
    """
    from ..elastic.options import Elastic

    membership = arguments["membership"]
    if not isinstance(membership, Elastic):
        raise TypeError(
            "peers must be a ProcessGroup, a DeviceMesh, StorePeers(...), Elastic(...) or "
            f'"{ALONE}", got {membership!r}'
        )
    given = [name for name in _GIVEN_BY_VIEWS if arguments[name] is not None]
    if given:
        raise ValueError(f"Elastic finds the replicas: leave out {', '.join(given)}")
    if arguments["init"] != "broadcast":
        raise ValueError(
            f"Elastic knows who begins and who joins: leave out init, got {arguments['init']!r}"
        )
    if arguments["backend"] == "nccl":
        raise ValueError('Elastic exchanges over gloo: give link="gloo", got "nccl"')
