"""The options of ``DiLoCo`` in groups: what travels, how, between which replicas, and bad values.

A group is one argument: ``wire=Wire("int4", error_feedback=True)``. Where one choice is enough, a
string is the short form: ``wire="int4"``. Below, ``HOMES`` names the group of each choice; until
0.3 the choices are arguments of their own too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .base.checks import UNSET, Unset, warn
from .base.service.addresses import shown_proxy
from .ops.wire import WireFormat

if TYPE_CHECKING:
    from torch import Tensor


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

    name: str | WireFormat | Mapping[str, str] | None = None
    block_size: int | None = None
    rounding: str | None = None
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
            over a single port of this process. "nccl": the bytes stay on the device.
            Default: tcp with ``StorePeers`` and ``Elastic``; else what the replicas' process group
            has for the device.
        lanes: Connections to each peer in each direction (1), over which chunks are spread. More
            connections fill a link of high bandwidth and long delay that one TCP connection leaves
            idle. Each lane costs two process groups, which connect again whenever the group
            changes.
        chunk_bytes: Bytes of a chunk on the wire.
        timeout: Seconds, or a timedelta, that an exchange may take, and that living replicas are
            waited for (1800).
        join_timeout: Seconds, or a timedelta, that ``change_group`` and a newcomer wait for members
            that were never heard (60).
        suspect_after: Seconds, or a timedelta, after which a peer is given up that shows no sign of
            life, or to which there is no way (30).
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
            lets connections out through a proxy alone; "user:password@" may stand before the host.
            Then the proxy makes all connections that this process dials for its link: to other
            processes, to the relay, and to a store that is given by its address, which needs
            ``keys``. The proxy looks names of hosts up.
    """

    backend: str | None = None
    lanes: int | None = None
    chunk_bytes: int | None = None
    timeout: float | timedelta | None = None
    join_timeout: float | timedelta | None = None
    suspect_after: float | timedelta | None = None
    listen: str | None = None
    advertise: str | None = None
    keys: str | Path | None = None
    relay: str | None = None
    # Its password is for nobody to read.
    proxy: str | None = dataclasses.field(default=None, repr=False)


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

    action: str | None = None
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
    of: int | None = None
    members: Sequence[int] | None = None
    name: str = "default"

    def __post_init__(self) -> None:
        if isinstance(self.members, Iterator):  # The members are read several times.
            object.__setattr__(self, "members", list(self.members))


# Every choice by its name in a configuration: the argument that has the choice, and the name of the
# choice there; "" is the argument itself. Most of these names were arguments of DiLoCo in 0.1.
HOMES = {
    "block_size": ("wire", "block_size"),
    "rounding": ("wire", "rounding"),
    "seed": ("wire", "seed"),
    "error_feedback": ("wire", "error_feedback"),
    "feedback_decay": ("wire", "feedback_decay"),
    "align_tensors": ("wire", "align_tensors"),
    "group": ("peers", ""),
    "mesh": ("peers", ""),
    "membership": ("peers", ""),
    "store": ("peers", "store"),
    "replica": ("peers", "replica"),
    "num_replicas": ("peers", "of"),
    "members": ("peers", "members"),
    "name": ("peers", "name"),
    "backend": ("link", "backend"),
    "lanes": ("link", "lanes"),
    "chunk_bytes": ("link", "chunk_bytes"),
    "timeout": ("link", "timeout"),
    "join_timeout": ("link", "join_timeout"),
    "suspect_after": ("link", "suspect_after"),
    "listen": ("link", "listen"),
    "advertise": ("link", "advertise"),
    "link_keys": ("link", "keys"),
    "relay": ("link", "relay"),
    "proxy": ("link", "proxy"),
    "on_nonfinite": ("nonfinite", "action"),
    "max_skipped": ("nonfinite", "max_skipped"),
    "on_reset": ("nonfinite", "on_reset"),
}
# The names that end with 0.3; DiLoCo has an argument ``name`` beside ``StorePeers.name``.
OLD_NAMES = HOMES.keys() - {"name"}
# The values of choices that were not made.
DEFAULTS: dict[str, Any] = {**dict.fromkeys(HOMES), "max_skipped": UNSET, "name": "default"}
_KINDS: dict[str, type] = {"wire": Wire, "link": Link, "nonfinite": NonFinite, "peers": StorePeers}
# The single replica of a program that has a process group, or none.
ALONE = "alone"


def check_names(
    owner: Callable[..., Any], names: Iterable[str], wanted: Collection[str] = HOMES
) -> None:
    """Raise TypeError for the first name that is not among those that are wanted.

    Args:
        owner: The class or function that the user calls.
        names: Arguments that are not in the signature of ``owner``.
    """
    for name in names:
        if name in wanted:
            continue
        if name in ("model", "optimizer"):
            raise TypeError(f"{owner.__name__} takes the trainer's own {name}: leave out {name}=")
        parameters = inspect.signature(owner).parameters.values()
        own = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
        close = get_close_matches(name, [*own, *_KINDS, *wanted], 1)
        advice = f"did you mean {_spelled(close[0])}?" if close else "give arguments of DiLoCo"
        raise TypeError(f"{owner.__name__} has no argument {name!r}: {advice}")


def _spelled(name: str) -> str:
    """Return how a choice is written."""
    argument, field = HOMES.get(name, ("", ""))
    if not argument:
        return repr(name)
    return f"{argument}={_KINDS[argument].__name__}({field}=...)" if field else f"{argument}=..."


def grouped(arguments: Mapping[str, Any], homes: Collection[str] = OLD_NAMES) -> dict[str, Any]:
    """Return arguments with the choices that have names of 0.1 in their groups.

    Args:
        arguments: Arguments of ``DiLoCo``, by name; any may be left out.
        homes: The names of 0.1 that the function takes; others stay as they are.

    Raises:
        TypeError: If a choice is given twice.
    """
    found = {name: value for name, value in arguments.items() if name not in homes}
    for name in [name for name in HOMES if name in homes and name in arguments]:
        (argument, field), value = HOMES[name], arguments[name]
        kind: Any = _KINDS[argument]
        group = found.get(argument)
        if _is_default(name, value):
            continue
        if argument == "peers" and (not field or not isinstance(group, StorePeers | None)):
            # Values that fit no single argument stay two arguments, which DiLoCo refuses.
            found["peers" if group is None else name] = value
            continue
        group = group if isinstance(group, kind) else kind(group)
        if not _is_default(name, getattr(group, field)):
            raise TypeError(f"{name} is given twice: in {argument}= and as {name}=")
        found[argument] = replace(group, **{field: value})
    peers = found.get("peers")
    if isinstance(peers, StorePeers) and peers.store is None and peers.of == 1:
        found["peers"] = ALONE if peers.replica is None and peers.members is None else peers
    return found


def in_groups(
    owner: str, arguments: Mapping[str, Any], homes: Collection[str] = OLD_NAMES
) -> dict[str, Any]:
    """Return ``grouped`` arguments, and warn of the names of 0.1 among them.

    Args:
        owner: The class or function that the user calls.
    """
    new = grouped(arguments, homes)
    old = [name for name in arguments if name in homes]
    if old:
        groups = dict.fromkeys(HOMES[name][0] for name in old)
        before = {name: arguments[name] for name in arguments if name in groups or name in old}
        after = {name: new[name] for name in [*groups, *old] if name in new}
        warn(
            f"{owner}({_line(before)}) is written {owner}({_line(after)}) since 0.2; the old names "
            "end with 0.3",
            DeprecationWarning,
        )
    return new


def _line(arguments: Mapping[str, Any]) -> str:
    """Return arguments as a program has them; a value that has no short text is a name."""
    given = {name: value for name, value in arguments.items() if name in HOMES or value is not None}
    return ", ".join(f"{name}={_text(name, value)}" for name, value in given.items())


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f'"{shown_proxy(value) if name == "proxy" else value}"'
    if isinstance(value, bool | int | float | None) or value is UNSET:
        return repr(value)
    if name in _KINDS and isinstance(value, _KINDS[name]):
        return _text_of_group(name, value)
    if name == "peers":
        (name,) = _peers(value)
    if name == "membership":
        return "Elastic(...)"
    return repr(value) if isinstance(value, list | tuple) and len(value) < 9 else name


def _text_of_group(argument: str, group: Any) -> str:
    names = _names_of(argument)
    choices = {field.name: getattr(group, field.name) for field in fields(group)}
    made = {
        field: _text(field, choice)
        for field, choice in choices.items()
        if not _is_default(names[field], choice)
    }
    first = next(iter(choices))
    if list(made) == [first] and argument != "peers":
        return made[first]
    is_bare = argument != "link"
    words = [
        text if is_bare and field == first else f"{field}={text}" for field, text in made.items()
    ]
    return f"{type(group).__name__}({', '.join(words)})"


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
    choices = {name: value for name, value in arguments.items() if name not in _KINDS}
    choices = DEFAULTS | choices
    choices["wire"] = arguments.get("wire")
    for argument, kind in _KINDS.items():
        value = arguments.get(argument)
        if isinstance(value, kind):
            found = _fields(argument, value)
        elif argument == "wire" or value is None:
            continue
        elif argument == "peers":
            found = _peers(value)
            if not is_ours and "membership" in found and not hasattr(value, "total_steps"):
                continue
        elif isinstance(value, str):
            found = {"backend" if argument == "link" else "on_nonfinite": value}
        elif not is_ours:
            continue
        else:
            raise TypeError(
                f"{argument} must be a {kind.__name__} or a string, got {type(value).__name__}"
            )
        for name, choice in found.items():
            if name not in HOMES or _is_default(name, choices[name]):
                choices[name] = choice
            elif not _is_default(name, choice):
                raise TypeError(f"{owner} is given {name} twice: in {argument}= and as {name}=")
    return choices


def choices_in(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a configuration with each choice by its name of 0.1.

    ``DiLoCo.config()`` writes those names, which 0.1 reads. A configuration that is written by hand
    may have groups: ``{"wire": {"name": "int4", "seed": 3}, "link": {"lanes": 4}}``.

    Args:
        name: The configuration's name, for messages.

    Raises:
        ValueError: If it has a choice twice, or an unknown one in a group.
    """
    found = dict(config)
    for argument in ("wire", "link", "nonfinite"):
        kind: Any = _KINDS[argument]
        group = config.get(argument)
        if isinstance(group, str) and argument != "wire":
            group = {fields(kind)[0].name: group}
        elif isinstance(group, kind):
            group = {field.name: getattr(group, field.name) for field in fields(group)}
        if not isinstance(group, Mapping) or not group:
            continue
        names = _names_of(argument)
        unknown = [field for field in group if field not in names]
        if unknown and argument == "wire":
            continue  # A mapping of patterns of parameters' names to wires.
        if unknown:
            raise ValueError(
                f"{name} has {unknown[0]!r} in {argument}, where only {', '.join(names)} can be"
            )
        del found[argument]
        for field, choice in group.items():
            if names[field] in found:
                raise ValueError(f"{name} has {names[field]} twice: in {argument} and beside it")
            if not _is_default(names[field], choice):
                found[names[field]] = choice
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
    for name in HOMES:
        if name not in defaults and not _is_default(name, choices[name]):
            raise TypeError(f"{owner} has no {_spelled(name)}")
    unsaid = {"wire": defaults.get("wire")}
    in_groups(owner, {n: v for n, v in arguments.items() if v is not None and v != unsaid.get(n)})
    given = {name: choices[name] for name in defaults}
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def _is_default(name: str, value: Any) -> bool:
    default = DEFAULTS.get(name)
    return value is default or (isinstance(value, str) and value == default)


def _names_of(argument: str) -> dict[str, str]:
    """Return the name of 0.1 of each field of a group."""
    names = {field: name for name, (home, field) in HOMES.items() if home == argument and field}
    return names | ({"name": "wire"} if argument == "wire" else {})


def _fields(argument: str, value: Any) -> dict[str, Any]:
    """Return what a group chooses, by the names of 0.1."""
    names = _names_of(argument)
    return {names[field.name]: getattr(value, field.name) for field in fields(value)}


def _peers(value: Any) -> dict[str, Any]:
    if isinstance(value, str) and value == ALONE:
        return {"num_replicas": 1}
    # A rank outside of a group has a number in the place of the group.
    if isinstance(value, dist.ProcessGroup) or value is dist.GroupMember.NON_GROUP_MEMBER:
        return {"group": value}
    from torch.distributed.device_mesh import DeviceMesh

    # Any other value must be an Elastic, which DiLoCo checks: this module knows no registry.
    return {"mesh" if isinstance(value, DeviceMesh) else "membership": value}
