"""The arguments of ``DiLoCo``, checked before anything is made from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args

from torch import nn

from ..base import env
from ..base.checks import choice, flag, not_negative, timeout_seconds
from ..base.service.addresses import check_link
from ..base.service.keys import LinkKeys
from ..methods.settings import Config, Settings, merge, read_config
from ..options import ALONE, choices_in
from ..replica.model_watch import CHECKS
from ..rounds.handshake import check_place
from ..rounds.runner import Weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..elastic.options import Elastic
    from ..methods.outer import Factory, OuterName, OuterOptimizer
    from ..methods.overlap import Overlap, OverlapName
    from ..ops.wire import WireFormat, WireName
    from ..options import Action, Backend, Link, NonFinite, StorePeers, Wire
    from ..replica.fragments import FragmentSpec
    from ..replica.model_watch import Checks

Init = Literal["broadcast", "check", "join"]
Optimizers: TypeAlias = "torch.optim.Optimizer | Sequence[torch.optim.Optimizer]"
OverlapOption: TypeAlias = "OverlapName | Overlap"
OuterOption: TypeAlias = "OuterName | OuterOptimizer | Factory"
WireOption: TypeAlias = "WireName | WireFormat | Mapping[str, WireName] | Wire"
LinkOption: TypeAlias = "Backend | Link"
NonFiniteOption: TypeAlias = "Action | NonFinite"
Peers: TypeAlias = "dist.ProcessGroup | DeviceMesh | StorePeers | Elastic | Literal['alone']"
Workers: TypeAlias = "dist.ProcessGroup | DeviceMesh"
# Arguments that must be left out with ``Elastic``, which finds these by itself.
_GIVEN_BY_VIEWS = ("group", "mesh", "store", "replica", "num_replicas", "members")


class _CommonArguments(TypedDict, total=False):
    """The arguments of ``DiLoCo`` with defaults, except ``weight`` and ``config``."""

    fragments: FragmentSpec
    offsets: Sequence[int] | None
    overlap: OverlapOption
    outer: OuterOption
    wire: WireOption
    peers: Peers | None
    link: LinkOption | None
    nonfinite: NonFiniteOption
    shard_group: Workers | None
    init: Init
    impl: str
    average_buffers: bool
    norms: bool
    attach: bool
    checks: Checks
    offload: Literal["cpu"] | None
    name: str


class BesideConfig(_CommonArguments, total=False):
    """The arguments of ``DiLoCo`` that a call with ``config`` may leave out."""

    sync_every: int
    weight: Weight


class UnweightedArguments(_CommonArguments, total=False):
    """The arguments of ``DiLoCo`` that ``fedavg`` passes on."""

    config: Config | None


class PresetArguments(_CommonArguments, total=False):
    """The arguments of ``DiLoCo`` that presets pass on."""

    weight: Weight
    config: Config | None


class Arguments(_CommonArguments, total=False):
    """The arguments of ``DiLoCo`` beside model and optimizer, for functions that pass them on."""

    sync_every: int
    weight: Weight
    config: Config | None


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a function that have a default, with the defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def check_arguments(model: nn.Module, chosen: Mapping[str, Any]) -> None:
    """Check the arguments of ``DiLoCo`` that are no ``Settings``.

    Args:
        chosen: All arguments but the model, as ``options.choices_of`` returns them.

    Raises:
        TypeError, ValueError: For the first argument that is invalid.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    flag("norms", chosen["norms"])
    flag("attach", chosen["attach"])
    choice("checks", chosen["checks"], CHECKS)
    choice("init", chosen["init"], get_args(Init))
    choice("offload", chosen["offload"], (None, "cpu"))
    of_link = ("listen", "advertise", "link_keys", "relay", "proxy")
    check_link(backend_of(chosen), *(chosen[name] for name in of_link))
    for name in ("join_timeout", "suspect_after"):
        if chosen[name] is not None:
            timeout_seconds(chosen[name], name)
    if chosen["membership"] is not None:
        _check_membership(chosen)
    else:
        place = ("store", "replica", "num_replicas", "members", "name")
        check_place(*(chosen[name] for name in place))
    if chosen["link_keys"] is not None:
        # Read keys now, so that an error comes before the others wait for this replica.
        keys = LinkKeys.read(chosen["link_keys"])
        elastic = chosen["membership"]
        number = chosen["replica"] if elastic is None else elastic.replica
        if number is not None:
            keys.check_own(number)


def backend_of(chosen: Mapping[str, Any]) -> str | None:
    """Return the backend of the link; None for the backend of the replicas' process group.

    Replicas that are separate jobs use tcp, unless the program names another backend.
    """
    are_jobs = chosen["store"] is not None or chosen["membership"] is not None
    return "tcp" if chosen["backend"] is None and are_jobs else chosen["backend"]


def weight_of(weight: Weight) -> Weight:
    """Return a checked weight: a number as a float, a function as it is."""
    return weight if callable(weight) else not_negative("weight", weight, "a number or a function")


def seconds_of(timeout: float | timedelta | None) -> float:
    """Return the timeout of an exchange in seconds; for None, the environment's."""
    return timeout_seconds(env.timeout_s() if timeout is None else timeout)


def settings_of(chosen: Mapping[str, Any]) -> Settings:
    """Return the settings: from the arguments of ``DiLoCo``, and for the rest from ``config``."""
    names = {field.name for field in fields(Settings)}
    name, saved = read_config(chosen.get("config"))
    given = {name: value for name, value in chosen.items() if name in names}
    return merge(given, choices_in(name, saved), name)


def _check_membership(chosen: Mapping[str, Any]) -> None:
    """Check the arguments of ``DiLoCo`` that are given together with ``Elastic``.

    Raises:
        TypeError, ValueError: For the first argument that is invalid.
    """
    from ..elastic.options import Elastic

    membership = chosen["membership"]
    if not isinstance(membership, Elastic):
        raise TypeError(
            "peers must be a ProcessGroup, a DeviceMesh, StorePeers(...), Elastic(...) or "
            f'"{ALONE}", got {membership!r}'
        )
    given = [name for name in _GIVEN_BY_VIEWS if chosen[name] is not None]
    given += ["name, and give Elastic a run= of its own"] * (chosen["name"] != "default")
    if given:
        raise ValueError(f"Elastic finds the replicas: leave out {', '.join(given)}")
    if chosen["init"] != "broadcast":
        raise ValueError(
            f"Elastic knows who begins and who joins: leave out init, got {chosen['init']!r}"
        )
    if chosen["backend"] == "nccl":
        raise ValueError('Elastic exchanges over gloo or tcp: give link="gloo", got "nccl"')
    if chosen["proxy"] is not None:
        raise ValueError(
            "no proxy carries the connections of Elastic to the registry: give peers=StorePeers("
            "...), or leave out proxy"
        )
