"""The store of a process group, as the place where the exchanges of its ranks meet."""

from __future__ import annotations

import time
import uuid

import torch
import torch.distributed as dist

from .names import Names

_POLL_S = 0.001
# Seconds of a group's first broadcast for which a replica looks at the names of the others.
_NAMES_S = 60.0


def store_of_group(
    group: dist.ProcessGroup | None, name: str = "default"
) -> tuple[dist.Store, int, int]:
    """Return the store of a group under a prefix that its ranks agree on, own rank, and size.

    A collective call: rank 0 draws the prefix and broadcasts it through the group. With a name the
    prefix needs no agreement, and no order of the calls: calls of one name meet.
    """
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("no group was given and torch.distributed is not initialised")
    if group == dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        raise ValueError("this process is not a member of the group")
    rank, size = group.rank(), group.size()
    if name != "default":
        return board_of_group(group), rank, size
    token = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
    if size > 1:
        kinds = [kind.type for kind in group._device_types]
        on_device = token.to("cpu" if "cpu" in kinds else kinds[0])
        work = group.broadcast([on_device], _broadcast_options())
        names = Names(board_of_group(group), rank, range(size), name)
        # The work of a group written in Python may never say that it is completed.
        until = time.monotonic() + _NAMES_S
        while not work.is_completed() and time.monotonic() < until:
            names.look()
            time.sleep(_POLL_S)
        work.wait()
        token = on_device.cpu()
    prefix = f"diloco_comm/{bytes(token.tolist()).hex()}"
    return dist.PrefixStore(prefix, _group_store(group)), rank, size


def board_of_group(group: dist.ProcessGroup | None) -> dist.Store:
    """Return the part of a group's store that has its named exchanges, and who waits at them."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    return dist.PrefixStore("diloco_comm/named", _group_store(group))


def _broadcast_options() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def _group_store(group: dist.ProcessGroup) -> dist.Store:
    known = dist.distributed_c10d._world.pg_map.get(group)
    if known is not None:
        return known[1]
    return group.get_group_store()
