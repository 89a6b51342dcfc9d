"""Before the first exchange: finds the replicas, and compares model, settings and weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn import functional

from .. import _C
from ..base import launch
from ..base.checks import MOST_INT32, first_of, integer, logger_of, timeout_seconds, warn
from ..base.errors import ReplicaMismatch
from ..base.service.addresses import Proxy, parse_address, proxy_of, tcp_address
from ..base.service.keys import LinkKeys, link_keys
from ..base.store_host import dial_store
from ..exchange.exchange import Exchange, ExchangeOptions
from ..exchange.waits import call_patiently
from ..ops.digests import each_digest
from ..replica import sharding

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logger_of(__name__)
_MOST_UNEXCHANGED_BYTES = 64 << 20

# These functions of torch have the default group, at the time of their import, as the default value
# of an argument. That keeps the group alive until the interpreter ends, where it aborts: drop it.
for function in vars(functional).values():
    if isinstance(function, FunctionType) and function.__defaults__:
        function.__defaults__ = tuple(
            None if isinstance(value, dist.ProcessGroup) else value
            for value in function.__defaults__
        )


def connect_store(
    address: str,
    *,
    keys: str | Path | None = None,
    timeout: float | timedelta = timedelta(minutes=30),
    proxy: str | None = None,
) -> dist.Store:
    """Connect to the store of ``diloco-comm store``, for a program with data of its own there.

    ``StorePeers`` takes the result, too. The store has no queues (``queue_push``).

    Args:
        address: ``tcp://host:port``, as the store prints it.
        keys: As ``Link(keys=)``; needed where the store has keys.
        timeout: Time to wait for the store, and later for keys of the store; in seconds, if a
            number.
        proxy: As ``Link(proxy=)``.

    Raises:
        ValueError: If the address is not of the form ``tcp://host:port``, the timeout is not
            positive and finite, ``keys`` names no pair of keys, or ``proxy`` is no proxy.
        TypeError: If the address or the proxy is no string.
        RuntimeError: If there is no OpenSSL for the keys.
        torch.distributed.DistError: If no store answers there in time, the host has no address, or
            store and process do not let in each other's keys.
    """
    parse_address("address", address)
    store = connected_store(address, timeout, link_keys(keys), proxy_of(proxy))
    assert store is not None
    return store


def connected_store(
    store: dist.Store | str | None,
    timeout: float | timedelta,
    keys: LinkKeys | None = None,
    proxy: Proxy | None = None,
) -> dist.Store | None:
    """Connect to a store given by address, as ``diloco-comm store`` prints it.

    A store object, or None, is returned as it is.

    Args:
        store: ``tcp://host:port``, a store, or None.
        timeout: Time to connect, and limit of the store's later waits; in seconds, if a number.
        keys: The keys of this process; the store must have keys, too.
        proxy: The proxy that makes the connection.

    Raises:
        ValueError: If the address is not of the form ``tcp://host:port``, or the timeout is not
            positive and finite.
        TypeError: If ``store`` is neither a store nor an address.
        torch.distributed.DistError: If no store answers there in time, or the host has no address.
    """
    if store is None or isinstance(store, dist.Store):
        return store
    place = parse_address("store", store)
    seconds = timeout_seconds(timeout)
    return call_patiently(
        lambda: dial_store(*place, seconds, keys, proxy), f"the store at {tcp_address(*place)}"
    )


def replica_group(
    group: dist.ProcessGroup | None, mesh: Any, store: Any, num_replicas: int | None = None
) -> dist.ProcessGroup | None:
    """Return the process group whose ranks are the replicas; None for a store or a single replica.

    Without group, mesh and store the default group is returned, unless ``num_replicas`` is 1.

    Raises:
        ValueError: If this process is not among the replicas.
        TypeError: If ``group`` is no process group, or ``mesh`` no DeviceMesh.
        RuntimeError: If a launcher has started several processes, and no argument joins them.
    """
    is_alone = store is None and num_replicas == 1
    chosen = (group, mesh, store, num_replicas)
    launch.hidden.is_used |= any(one is not None for one in chosen)
    if mesh is not None:
        if not hasattr(mesh, "get_group"):
            raise TypeError(f"mesh must be a DeviceMesh, got {mesh!r}")
        if mesh.ndim != 1:
            raise ValueError(f"mesh must have one dimension, the replicas, got {mesh.ndim}")
        group = mesh.get_group()
    if group is None and store is None and not is_alone:
        if dist.is_initialized():
            group = dist.group.WORLD
        else:
            launch.refuse_if_forgotten()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group does not contain this rank: only its members can attach to it")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group of torch.distributed, got {group!r}")
    return group


def collectives_of(
    backend: str | None, group: dist.ProcessGroup | None, device: torch.device
) -> str:
    """Return "gloo", "tcp" or "nccl": ``backend``, or the group's backend for the device.

    Raises:
        ValueError: If ``backend`` is none of these.
    """
    if backend not in (None, "gloo", "tcp", "nccl"):
        raise ValueError(f'link must be "gloo", "tcp" or "nccl", got {backend!r}')
    if backend is not None:
        return backend
    if group is None or device.type == "cpu":
        return "gloo"
    kinds = [kind.type for kind in group._device_types]
    has_own = device.type in kinds and group._get_backend(device).name() == "nccl"
    return "nccl" if has_own else "gloo"


def make_exchange(
    *,
    group: dist.ProcessGroup | None,
    store: dist.Store | None,
    replica: int | None,
    num_replicas: int | None,
    members: Sequence[int] | None,
    name: str,
    **options: Unpack[ExchangeOptions],
) -> Exchange:
    """Return an exchange over a group, over a store, or for one replica alone.

    Raises:
        ValueError: If the arguments do not go together.
    """
    if options.get("change") is not None:
        assert replica is not None and members is not None
        return Exchange(dist.HashStore(), replica, members, name=name, **options)
    everyone = check_place(store, replica, num_replicas, members)
    if store is not None:
        assert replica is not None
        return Exchange(store, replica, everyone, name=name, **options)
    if group is None:
        return Exchange(dist.HashStore(), 0, [0], name=name, **options)
    return Exchange.from_group(group, name=name, **options)


def check_place(
    store: dist.Store | str | None,
    replica: int | None,
    num_replicas: int | None,
    members: Sequence[int] | None,
    name: str = "default",
) -> list[int]:
    """Check the arguments of ``StorePeers``; return all members, in order, [] without a store.

    Raises:
        ValueError: If these arguments do not go together, or a number is out of range.
        TypeError: If ``store`` is no store, the members are no numbers, or the name is no text.
    """
    if not isinstance(store, dist.Store | None):
        parse_address("store", store)
    if store is not None and (replica is None or (num_replicas is None) == (members is None)):
        raise ValueError("StorePeers needs replica=, and one of of= and members=")
    has_number = replica is not None or num_replicas not in (None, 1) or members is not None
    if store is None and has_number:
        raise ValueError("StorePeers needs store=, a Store or 'tcp://host:port'")
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a text that is not empty, got {name!r}")
    if store is None:
        return []
    replica = integer("replica", replica, 0, most=MOST_INT32)
    if members is None:
        everyone = list(range(integer("of", num_replicas, 1, most=_C.MAX_REPLICAS)))
    elif isinstance(members, str) or not isinstance(members, Iterable):
        raise TypeError(f"members must be the numbers of the replicas, got {members!r}")
    else:
        each = [integer("each of members", member, 0, most=MOST_INT32) for member in members]
        everyone = sorted(set(each))
    if replica not in everyone:
        raise ValueError(f"replica must be one of the members {everyone}, got {replica}")
    return everyone


def warn_if_spans_replicas(
    model: nn.Module, optimizers: Sequence[Any], group: dist.ProcessGroup
) -> None:
    """Warn if DDP, FSDP, ZeRO or SyncBatchNorm spans several replicas, which then are no replicas.

    Args:
        group: The process group whose ranks are the replicas.
    """
    replicas = set(dist.get_process_group_ranks(group))
    for wrapper in chain(sharding.around(model, optimizers), sharding.batch_norms(model)):
        shared = sorted(wrapper.ranks & replicas)
        if len(shared) > 1:
            warn(
                f"{wrapper.name} {wrapper.does} ranks {shared} at every step, but these are "
                f"different replicas: give it a {wrapper.argument} of this replica's own "
                "workers"
            )
            return


# -------------------------------------------------------------------------------- agreement


def gather_json(exchange: Exchange, value: Any, *, is_end: bool = False) -> list[Any]:
    """Return every replica's ``value``, in rank order; a collective call.

    Args:
        value: JSON types.
        is_end: This replica calls ``flush``.
    """
    blobs = exchange.exchange_objects(json.dumps(value).encode(), is_end=is_end)
    return [json.loads(blob) for blob in blobs]


def agree(
    exchange: Exchange, model: list[str], settings: dict[str, Any], private: dict[str, Any]
) -> list[dict[str, Any]]:
    """Compare models and settings of all replicas.

    Args:
        model: One line for each parameter, from ``describe_parameters``.
        settings: Settings that must be equal, as JSON types by name.
        private: Settings that may differ between replicas.

    Returns:
        Every replica's ``private``, in rank order.

    Raises:
        ReplicaMismatch: On every replica, naming the first difference and both values.
    """
    views = gather_json(exchange, {"model": model, "settings": settings, "private": private})
    for replica, view in zip(exchange.members, views, strict=True):
        for name, value in views[0]["settings"].items():
            other = view["settings"].get(name)
            if other != value:
                raise ReplicaMismatch(
                    f"{name} differs between replicas: {value!r} on replica "
                    f"{exchange.members[0]}, {other!r} on replica {replica}"
                )
        if view["model"] != views[0]["model"]:
            raise ReplicaMismatch(
                _model_difference(exchange.members[0], views[0]["model"], replica, view["model"])
            )
    return [view["private"] for view in views]


def _model_difference(first: int, ours: list[str], second: int, theirs: list[str]) -> str:
    if len(ours) != len(theirs):
        has_buffers = any(line.startswith("buffer ") for line in [*ours, *theirs])
        return (
            f"the model differs between replicas: {len(ours)} parameters"
            f"{' and averaged buffers' * has_buffers} on replica {first}, {len(theirs)} on replica "
            f"{second}"
        )
    a, b = next((a, b) for a, b in zip(ours, theirs, strict=True) if a != b)
    return (
        f"the model differs between replicas: [{a}] on replica {first}, [{b}] on replica {second}"
    )


# ---------------------------------------------------------------------------- initial weights


def check_same_weights(exchange: Exchange, tensors: dict[str, Tensor]) -> None:
    """Compare the bytes of the initial weights.

    Raises:
        ReplicaMismatch: Naming the first parameter that differs, and the replicas.
    """
    views = gather_json(exchange, each_digest(list(tensors.values())))
    for index, name in enumerate(tensors):
        odd = [
            r
            for r, view in zip(exchange.members, views, strict=True)
            if view[index] != views[0][index]
        ]
        if odd:
            raise ReplicaMismatch(
                f"initial weights differ: parameter {name!r} on replica {odd[0]} is not that of "
                f'replica {exchange.members[0]}; load the same weights or use init="broadcast"'
            )


# Digest and number of bytes, by name.
Digests = dict[str, list[int]]


def digests_by_name(tensors: Mapping[str, Tensor]) -> Digests:
    """Return the digest and the number of bytes of each tensor."""
    digests = each_digest(list(tensors.values()))
    sizes = [tensor.nbytes for tensor in tensors.values()]
    return {name: [*pair] for name, *pair in zip(tensors, digests, sizes, strict=True)}


def share_unexchanged(
    exchange: Exchange,
    tensors: Mapping[str, Tensor],
    uncopied: Mapping[str, Tensor],
    init: str,
    source_rank: int,
) -> Digests:
    """Make frozen parameters and buffers equal on all replicas: no round exchanges them.

    If they differed, the mean of the replicas' parameters would belong to no single model. Only the
    tensors that differ travel.

    Args:
        tensors: See ``unexchanged_tensors``.
        uncopied: See ``uncopied_tensors``; if these differ, only warn.
        init: If "check", raise for a difference instead of copying.
        source_rank: The rank of the replica that the others copy.

    Returns:
        The digests of ``tensors`` that all replicas have afterwards.

    Raises:
        ReplicaMismatch: On every replica, with the names, if tensors differ and ``init`` is
            "check", if more than 64 MiB differ, or if names or sizes differ.
    """
    own = digests_by_name(tensors)
    views = gather_json(exchange, [own, digests_by_name(uncopied)])
    _share(exchange, tensors, own, [view for view, _ in views], init, source_rank)
    differing = _differing([view for _, view in views])
    if differing:
        warn(
            f"{first_of(differing)} differ between replicas, and are neither exchanged nor copied: "
            "if they are meant to be the same, make them from the same seed or file",
            RuntimeWarning,
        )
    return views[source_rank][0]


def _share(
    exchange: Exchange,
    tensors: Mapping[str, Tensor],
    own: Digests,
    views: Sequence[Mapping[str, Sequence[int]]],
    init: str,
    source_rank: int,
) -> None:
    differing = _differing(views)
    if not differing:
        return
    what = f"frozen parameters or buffers differ between replicas: {first_of(differing)}"
    if any(len({view[n][1] if n in view else None for view in views}) > 1 for n in differing):
        raise ReplicaMismatch(f"{what}, also in their sizes: give all replicas the same model")
    if init == "check":
        raise ReplicaMismatch(f'{what}; load the same ones, or use init="broadcast"')
    num_bytes = sum(own[name][1] for name in differing)
    if num_bytes > _MOST_UNEXCHANGED_BYTES:
        raise ReplicaMismatch(
            f"{what}; {num_bytes / 2**20:.0f} MiB are more than the "
            f"{_MOST_UNEXCHANGED_BYTES >> 20} MiB that are copied: load the same ones on all "
            "replicas, or set the same seed before the model is made"
        )
    exchange.broadcast([tensors[name] for name in differing], source_rank)
    logger.info("%s; replica %d has given them", what, exchange.members[source_rank])


def warn_of_newcomers(exchange: Exchange, own: Digests, buffers: Collection[str]) -> None:
    """Warn of newcomers whose frozen parameters or buffers differ from the members' common ones.

    A collective call. Tensors in which the members themselves differ are not compared. If only one
    member trains, that cannot be seen, so no buffers are compared.

    Args:
        own: The digests of this replica's tensors.
        buffers: Names of buffers among the tensors.
    """
    views = gather_json(exchange, own)
    pairs = list(zip(exchange.members, views, strict=True))
    trained = [view for replica, view in pairs if replica not in exchange.joined]
    own_names = set(_differing(trained)) if len(trained) > 1 else set(buffers)
    for newcomer, view in pairs:
        if newcomer not in exchange.joined or not trained:
            continue
        differing = [n for n in _differing([trained[0], view]) if n not in own_names]
        if differing:
            warn(
                f"replica {newcomer} joins with other values of {first_of(differing)} than the "
                "group has, and they are not exchanged: load the same ones before it joins",
                RuntimeWarning,
            )


def _differing(views: Sequence[Mapping[str, Sequence[int]]]) -> list[str]:
    """Return the names whose digests are not the same in all ``views``."""
    names = sorted({name for view in views for name in view})
    return [name for name in names if any(v.get(name) != views[0].get(name) for v in views)]
