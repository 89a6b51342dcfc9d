"""The options of ``DiLoCo`` in groups: what travels, how, between which replicas, and bad values.

A group is one argument: ``wire=Wire("int4", error_feedback=True)``. Where one choice is enough, a
string is the short form: ``wire="int4"``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch.distributed as dist
from typing_extensions import get_overloads

from .base.checks import UNSET, Unset
from .ops.wire import WireFormat, WireName

if TYPE_CHECKING:
    from torch import Tensor

Rounding = Literal["nearest", "stochastic"]
Backend = Literal["gloo", "tcp", "nccl"]
Action = Literal["raise", "skip", "reset"]
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Wire:
    """The format of the payloads that travel between replicas, and how values are rounded.

    A choice that is None is the default, or as ``config=`` says. ``DiLoCo`` checks the values.

    Args:
        name: A wire (default "int8"; ``diloco_comm.wire.WIRES`` has all), or a ``WireFormat``.
            A mapping of regular expressions to wires gives groups of parameters wires of their own:
            the first expression that is found in a parameter's name counts, and the last key may
            be "rest".
        block_size: Elements that share a scale (256).
        rounding: "nearest" (default) or "stochastic".
        seed: Seed of stochastic rounding, and of a rotated wire's signs (0).
        error_feedback: Add to an encoding what the encoding before lost (False). A sparse wire
            needs it.
        feedback_decay: Factor of what an encoding lost, from 0 to 1 (1; 0.95 on sparse wires).
        align_tensors: Let no block hold elements of two tensors (False), so that the noise of a
            rotated wire does not reach one tensor from another.
    """

    name: WireName | WireFormat | Mapping[str, WireName] | None = field(
        default=None, metadata={"choice": "wire"}
    )
    block_size: int | None = None
    rounding: Rounding | None = None
    seed: int | None = None
    error_feedback: bool | None = None
    feedback_decay: float | None = None
    align_tensors: bool | None = None


@dataclass(frozen=True)
class Link:
    """How payloads travel between replicas.

    A choice that is None is the default. ``DiLoCo`` checks the values.

    Args:
        backend: How payloads travel. "gloo": encoded bytes of parameters on a GPU are copied to
            host memory, and travel from there; across sites. "tcp": likewise, but everything goes
            over a single port of this process. "nccl": the bytes stay on the device. With "gloo"
            and "nccl" this process opens a port for signs of life and changes of the group, too.
            Default: tcp with ``StorePeers`` and ``Elastic``; else what the replicas' process group
            has for the device.
        lanes: Connections to each peer in each direction (1), over which chunks are spread. More
            connections fill a link of high bandwidth and long delay that one TCP connection leaves
            idle. Each lane costs two process groups, which connect again whenever the group
            changes.
        chunk_bytes: Bytes of a chunk on the wire; None: by the size of the payload.
        timeout: Seconds, or a timedelta, that an exchange may take, and that living replicas are
            waited for (1800).
        join_timeout: Seconds, or a timedelta, that ``change_group`` and a newcomer wait for members
            that were never heard (60).
        suspect_after: Seconds, or a timedelta, after which a peer is given up from which nothing
            comes over the link (30). A peer whose host refuses connections is given up at once.
        listen: With "tcp", the "host:port" at which this process listens, such as "0.0.0.0:29700";
            port 0 is any free port. "": this process does not listen. Default: the interface that
            gloo would take, and any free port.
        advertise: With "tcp", the "tcp://host:port" at which the others reach this process, where
            a router translates addresses. "": the others cannot dial this process, which dials
            them; then two such processes need ``relay`` to be in one group. Default: where this
            process listens.
        keys: With "tcp", a folder with the keys of this process, made by `diloco-comm keys make`,
            or the file NAME.key_secret there: all connections are encrypted, and only the owners of
            keys in the folder ``allowed`` beside can connect. All replicas have keys, or none.
        relay: With "tcp", the "tcp://host:port" of a relay (`diloco-comm relay`), for a process
            that nobody can dial: two such processes meet there, and the relay copies their bytes.
            Other processes are dialled directly.
        proxy: With "tcp", "http://host:port" or "socks5://host:port", for a process whose firewall
            lets connections out through a proxy alone. "user:password@" may stand before the host,
            or "user@" with the password in the environment, as DILOCO_COMM_PROXY_PASSWORD. The
            proxy makes all connections that this process dials for its link: to other
            processes, to the relay, and to a store that is given by its address. The proxy looks
            names of hosts up.
    """

    backend: Backend | None = None
    lanes: int | None = None
    chunk_bytes: int | None = None
    timeout: float | timedelta | None = None
    join_timeout: float | timedelta | None = None
    suspect_after: float | timedelta | None = None
    listen: str | None = None
    advertise: str | None = None
    keys: str | Path | None = field(default=None, metadata={"choice": "link_keys"})
    relay: str | None = None
    # No repr, because the text may have a password.
    proxy: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class NonFinite:
    """How a round ends in which a replica has values that no wire carries.

    Such values are NaN, infinities, and values out of the wire's range.

    Args:
        action: "raise" (default) or "skip": the round is left out on all replicas, with an error or
            without. "reset": that replica takes the outer parameters, and the other replicas go on
            with their mean.
        max_skipped: Rounds of a fragment that may be skipped in a row, or may end with a reset of
            the same replica (3). After one more there is a NonFiniteError. None: no limit.
        on_reset: Called with the exchanged parameters on a replica that was reset, when they have
            been written: to clear the optimizer's state, which is else left alone.
    """

    action: Action | None = field(default=None, metadata={"choice": "on_nonfinite"})
    max_skipped: int | Unset | None = UNSET
    on_reset: Callable[[list[Tensor]], None] | None = None


@dataclass(frozen=True, eq=False)
class StorePeers:
    """The replicas as separate jobs that share a store.

    Args:
        store: A ``torch.distributed.Store``, or the ``tcp://host:port`` that ``diloco-comm store``
            prints.
        replica: This replica's number.
        of: How many replicas there are; their numbers are 0 to ``of`` - 1.
        members: Instead of ``of``: the numbers of the replicas that take part.
        name: As ``DiLoCo(name=)``.
    """

    store: dist.Store | str
    replica: int | None = None
    of: int | None = field(default=None, metadata={"choice": "num_replicas"})
    members: Sequence[int] | None = None
    name: str = "default"

    def __post_init__(self) -> None:
        if isinstance(self.members, Iterator):  # The members are read several times.
            object.__setattr__(self, "members", list(self.members))


# The arguments that are groups of choices.
_GROUPS: dict[str, type] = {"wire": Wire, "link": Link, "nonfinite": NonFinite, "peers": StorePeers}
# The value of ``peers`` for the only replica there is, whether or not there is a process group.
ALONE = "alone"


def _name_of(choice: Field[Any]) -> str:
    """Return the name of a choice in a configuration, and where choices stand side by side."""
    return choice.metadata.get("choice", choice.name)


# The values of choices that were not made. The last three are ``peers`` that are no ``StorePeers``.
DEFAULTS: dict[str, Any] = {
    **{_name_of(one): one.default for kind in _GROUPS.values() for one in fields(kind)},
    **dict.fromkeys(("store", "group", "mesh", "membership")),
}


def closed(function: _Function) -> _Function:
    """Refuse a keyword that a function does not have; the error names the nearest one it has.

    The signature stays as it is; of a function with overloads, the first overload has it.
    """
    signature = inspect.signature((get_overloads(function) or [function])[0])
    owner = function.__qualname__.removesuffix(".__init__")
    names = [name for name in signature.parameters if name != "self"]

    @wraps(function)
    def checked(*arguments: Any, **given: Any) -> Any:
        check_names(owner, given, names)
        return function(*arguments, **given)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return cast(_Function, checked)


def check_names(owner: str, given: Mapping[str, Any], wanted: Collection[str]) -> None:
    """Raise TypeError for the first keyword that is not among those that are wanted.

    Args:
        owner: The class or function that the user calls.
    """
    for name, value in given.items():
        if name in wanted:
            continue
        if name in ("model", "optimizer"):
            raise TypeError(f"{owner} takes the trainer's own {name}: leave out {name}=")
        raise TypeError(f"{owner} has no argument {name!r}: {_advice(name, value, wanted)}")


def _advice(name: str, value: Any, wanted: Collection[str]) -> str:
    """Return what to write instead of an unknown keyword."""
    near = {known: repr(known) for known in wanted}
    for argument, kind in _GROUPS.items():
        for one in fields(kind) if argument in wanted else ():
            is_shown = one.repr and isinstance(value, bool | int | float | str)
            if name in (one.name, _name_of(one)):
                spelled = _spelled(argument, one, repr(value) if is_shown else "...")
                return f"{name} is a field of {kind.__name__}: {spelled}"
            near.setdefault(one.name, _spelled(argument, one))
    if name in DEFAULTS and "peers" in wanted:
        return f"give the {name} as peers=..."
    close = get_close_matches(name, near, 1, cutoff=0.7)
    return f"did you mean {near[close[0]]}?" if close else f"it has {', '.join(wanted)}"


def _spelled(argument: str, one: Field[Any], value: str = "...") -> str:
    """Return how a choice is written."""
    return f"{argument}={_GROUPS[argument].__name__}({one.name}={value})"


def choices_of(
    arguments: Mapping[str, Any], owner: str = "DiLoCo", *, is_ours: bool = True
) -> dict[str, Any]:
    """Return arguments with each choice by its own name, and without the groups of choices.

    Args:
        arguments: Arguments of ``DiLoCo``, by name; any may be left out.
        owner: The class or function that the user calls.
        is_ours: Whether the arguments go to a function of this package. A function of the user's
            may mean another thing by ``link`` or ``peers``; then a value of another type is none
            of ours.

    Raises:
        TypeError: If a group is of another type, or a choice is given twice.
    """
    choices = DEFAULTS | {name: v for name, v in arguments.items() if name not in _GROUPS}
    for argument, kind in _GROUPS.items():
        value = arguments.get(argument)
        if isinstance(value, kind):
            found = _fields(value)
        elif value is None:
            continue
        elif argument == "peers":
            found = _peers(value)
            if not is_ours and "membership" in found and not hasattr(value, "total_steps"):
                continue
        elif argument == "wire" or isinstance(value, str):
            found = {_name_of(fields(kind)[0]): value}
        elif not is_ours:
            continue
        else:
            raise TypeError(
                f"{argument} must be a {kind.__name__} or a string, got {type(value).__name__}"
            )
        for name, choice in found.items():
            if _is_default(name, choices[name]):
                choices[name] = choice
            elif not _is_default(name, choice):
                raise TypeError(f"{owner} is given {name} twice: in {argument}= and as {name}=")
    return choices


def choices_in(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a configuration with each choice by its own name.

    ``DiLoCo.config()`` writes those names. A configuration that is written by hand may have
    groups: ``{"wire": {"name": "int4", "seed": 3}, "link": {"lanes": 4}}``.

    Args:
        name: The configuration's name, for messages.

    Raises:
        ValueError: If it has a choice twice, or an unknown one in a group.
    """
    found = dict(config)
    for argument in ("wire", "link", "nonfinite"):
        kind: Any = _GROUPS[argument]
        names = {one.name: _name_of(one) for one in fields(kind)}
        group = config.get(argument)
        if isinstance(group, str) and argument != "wire":
            group = {next(iter(names)): group}
        elif isinstance(group, kind):
            group = {name: getattr(group, name) for name in names}
        if not isinstance(group, Mapping) or not group:
            continue
        unknown = [name for name in group if name not in names]
        if unknown and argument == "wire":
            continue  # A mapping of patterns of parameters' names to wires.
        if unknown:
            raise ValueError(
                f"{name} has {unknown[0]!r} in {argument}, where only {', '.join(names)} can be"
            )
        del found[argument]
        for own, choice in group.items():
            if names[own] in found:
                raise ValueError(f"{name} has {names[own]} twice: in {argument} and beside it")
            if not _is_default(names[own], choice):
                found[names[own]] = choice
    return found


def with_defaults(defaults: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with defaults for those that are missing.

    A ``Wire`` without a name takes the name from the default.
    """
    wire, default = arguments.get("wire"), defaults.get("wire")
    if isinstance(wire, Wire) and wire.name is None and default is not None:
        if isinstance(default, Wire):
            own = {f.name: getattr(wire, f.name) for f in fields(wire)}
            wire = replace(default, **{name: v for name, v in own.items() if v is not None})
        else:
            wire = replace(wire, name=default)
        arguments = {**arguments, "wire": wire}
    return {**defaults, **arguments}


def choices_among(
    owner: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the choices that have a default here, each by its own name.

    Raises:
        TypeError: As ``choices_of``; or if a group makes another choice.
    """
    choices = choices_of(arguments, owner)
    for argument, kind in _GROUPS.items():
        for one in fields(kind):
            name = _name_of(one)
            if name not in defaults and not _is_default(name, choices[name]):
                raise TypeError(f"{owner} has no {_spelled(argument, one)}")
    given = {name: choices[name] for name in defaults}
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def _is_default(name: str, value: Any) -> bool:
    default = DEFAULTS[name]
    return value is default or (isinstance(value, str) and value == default)


def _fields(group: Any) -> dict[str, Any]:
    """Return what a group chooses, each choice by its own name."""
    return {_name_of(one): getattr(group, one.name) for one in fields(group)}


def _peers(value: Any) -> dict[str, Any]:
    if isinstance(value, str) and value == ALONE:
        return {"num_replicas": 1}
    # A rank outside of a group has a number in the place of the group.
    if isinstance(value, dist.ProcessGroup) or value is dist.GroupMember.NON_GROUP_MEMBER:
        return {"group": value}
    from torch.distributed.device_mesh import DeviceMesh

    # Any other value must be an Elastic, which DiLoCo checks: this module knows no registry.
    return {"mesh" if isinstance(value, DeviceMesh) else "membership": value}
