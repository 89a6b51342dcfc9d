"""The arguments of ``DiLoCo``, checked before anything is made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any

from torch import nn

from ..base import env
from ..base.checks import choice, flag, not_negative, timeout_seconds
from ..methods.settings import Config, Settings, merge
from ..replica.model_watch import CHECKS
from ..rounds.weighing import Weight

# What the views of a membership say.
_GIVEN_BY_VIEWS = ("group", "mesh", "store", "replica", "num_replicas", "members")


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
    return merge({field.name: arguments[field.name] for field in fields(Settings)}, config)


def _check_membership(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of ``DiLoCo`` that go with ``membership``.

    Raises:
        TypeError, ValueError: For the first one that cannot be.
    """
    from ..elastic.options import Elastic

    membership = arguments["membership"]
    if not isinstance(membership, Elastic):
        raise TypeError(f"membership must be an Elastic, got {membership!r}")
    given = [name for name in _GIVEN_BY_VIEWS if arguments[name] is not None]
    if given:
        raise ValueError(f"membership finds the replicas: leave out {', '.join(given)}")
    if arguments["init"] != "broadcast":
        raise ValueError(
            f"membership knows who begins and who joins: leave out init, got {arguments['init']!r}"
        )
    if arguments["backend"] == "nccl":
        raise ValueError('membership exchanges over gloo: give backend="gloo", got "nccl"')
