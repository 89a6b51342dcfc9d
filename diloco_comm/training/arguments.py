"""The arguments of ``DiLoCo``, checked before anything is made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from torch import nn

from ..base import env
from ..base.checks import choice, flag, not_negative, timeout_seconds
from ..base.service.addresses import check_link
from ..base.service.keys import LinkKeys
from ..methods.settings import Config, Settings, merge, read_config
from ..options import ALONE, Link, NonFinite, StorePeers, Wire, choices_in
from ..replica.model_watch import CHECKS
from ..rounds.handshake import check_place
from ..rounds.runner import Weight

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
    name: str


class PresetArguments(UnweightedArguments, total=False):
    """The arguments of ``DiLoCo`` that presets pass on."""

    weight: Weight


class Arguments(UnweightedArguments, total=False):
    """The arguments of ``DiLoCo`` beside model and optimizer, for functions that pass them on."""

    sync_every: int | None
    weight: Weight


def check_arguments(
    model: nn.Module,
    chosen: Mapping[str, Any],
    *,
    norms: bool,
    attach: bool,
    checks: str,
    init: str,
    offload: str | None,
) -> None:
    """Check the arguments of ``DiLoCo`` that are no ``Settings``.

    Args:
        chosen: The choices of ``options.choices_of``.

    Raises:
        TypeError, ValueError: For the first one that cannot be.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    flag("norms", norms)
    flag("attach", attach)
    choice("checks", checks, CHECKS)
    choice("init", init, ("broadcast", "check", "join"))
    choice("offload", offload, (None, "cpu"))
    of_link = ("listen", "advertise", "link_keys", "relay", "proxy")
    check_link(backend_of(chosen), *(chosen[name] for name in of_link))
    for name in ("join_timeout", "suspect_after"):
        if chosen[name] is not None:
            timeout_seconds(chosen[name], name)
    if chosen["membership"] is not None:
        _check_membership(chosen, init)
    else:
        place = ("store", "replica", "num_replicas", "members", "name")
        check_place(*(chosen[name] for name in place))
    if chosen["link_keys"] is not None:
        # Before the others wait for this replica.
        keys = LinkKeys.read(chosen["link_keys"])
        elastic = chosen["membership"]
        number = chosen["replica"] if elastic is None else elastic.replica
        if number is not None:
            keys.check_own(number)


def backend_of(chosen: Mapping[str, Any]) -> str | None:
    """Return the backend of the link; None for what the replicas' process group has.

    Replicas that are separate jobs take tcp, if the program names nothing else.
    """
    are_jobs = chosen["store"] is not None or chosen["membership"] is not None
    return "tcp" if chosen["backend"] is None and are_jobs else chosen["backend"]


def weight_of(weight: Weight) -> Weight:
    """Return a weight that is a number as a float, which stays as it is; a function as given."""
    return weight if callable(weight) else not_negative("weight", weight, "a number or a function")


def seconds_of(timeout: float | timedelta | None) -> float:
    """Return the timeout of an exchange in seconds; without one, that of the environment."""
    return timeout_seconds(env.timeout_s() if timeout is None else timeout)


def settings_of(chosen: Mapping[str, Any], config: Config | None, **arguments: Any) -> Settings:
    """Return the settings of ``DiLoCo``: its arguments, and choices that are settings."""
    names = {field.name for field in fields(Settings)}
    choices = {name: value for name, value in chosen.items() if name in names}
    name, saved = read_config(config)
    return merge({**choices, **arguments}, choices_in(name, saved), name)


def _check_membership(chosen: Mapping[str, Any], init: str) -> None:
    """Check the choices of ``DiLoCo`` that go with ``membership``.

    Raises:
        TypeError, ValueError: For the first one that cannot be.
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
    if init != "broadcast":
        raise ValueError(f"Elastic knows who begins and who joins: leave out init, got {init!r}")
    if chosen["backend"] == "nccl":
        raise ValueError('Elastic exchanges over gloo or tcp: give link="gloo", got "nccl"')
    if chosen["proxy"] is not None:
        raise ValueError(
            "no proxy carries the connections of Elastic to the registry: give peers=StorePeers("
            "...), or leave out proxy"
        )
