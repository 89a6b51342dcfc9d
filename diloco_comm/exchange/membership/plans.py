"""The group that runs on a store, and the plan of the next one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...base.errors import SyncError
from .stores import raise_to
from .verdicts import announce_next

_CURRENT = "current"


@dataclass(frozen=True)
class Plan:
    """What all participants agreed on: the epoch, and what each participant said.

    Attributes:
        id: Names this plan, unlike any other one.
        reached: Participants whose address this replica could connect to.
    """

    epoch: int
    infos: dict[int, dict[str, Any]]
    id: str
    reached: frozenset[int] = frozenset()


def own_place() -> str:
    """Return where this process runs, as host:pid."""
    return f"{socket.gethostname()}:{os.getpid()}"


def current_group(store: dist.Store) -> tuple[int, list[int]]:
    """Return the newest epoch that has begun on this store, and its members; 0 and none."""
    if not store.check([_CURRENT]):
        return 0, []
    current = json.loads(store.get(_CURRENT))
    return current["epoch"], current["members"]


def place_of(store: dist.Store, replica: int) -> str:
    """Return where a member of the newest epoch runs, as host:pid; "" where that is not known."""
    return str(json.loads(store.get(_CURRENT))["places"].get(str(replica), ""))


def number_is_taken(replica: int, place: str, epoch: int = 0) -> SyncError:
    """Make the error of a process whose number another process has."""
    where = f", which is in the group of epoch {epoch}" if epoch else ""
    who = f"process {place} (host:pid)" if place else "another process"
    cure = "give each replica a number of its own"
    if place == own_place():
        who = f"this process, {place} (host:pid)"
        cure = "close the DiLoCo of this process first, or give the second one another name"
    return SyncError(
        f"replica number {replica} is already taken by {who}{where}: {cure}",
        stage="rendezvous",
    )


def announce(store: dist.Store, plan: Plan, members: Sequence[int]) -> None:
    """Record an epoch that has begun, for replicas that come later or were left behind."""
    # Nothing depends on this record: an epoch does not fail because the store has just gone.
    with contextlib.suppress(dist.DistError):
        places = {str(r): info["place"] for r, info in sorted(plan.infos.items())}
        current = json.dumps({"epoch": plan.epoch, "members": list(members), "places": places})
        raise_to(store, _CURRENT, current, lambda held: _follows(plan, json.loads(held)))
        for epoch in {info["epoch"] for info in plan.infos.values()} - {0}:
            announce_next(store, epoch, plan.epoch, members)


def _follows(plan: Plan, current: dict[str, Any]) -> bool:
    """Say whether a plan goes on from the current group, or founds a new one."""
    survivors = {replica for replica, info in plan.infos.items() if "ack" in info}
    is_of_it = not survivors or bool(survivors & set(current["members"]))
    return plan.epoch > current["epoch"] and is_of_it


def propose_plan(store: dist.Store, hellos: dict[int, dict[str, Any]]) -> str:
    """Propose the next epoch to all participants that are here; return the proposal's name."""
    # A number is never used twice on one store, and is above all that the participants know: a new
    # store counts from the beginning.
    newest = max(hello["newest"] for hello in hellos.values())
    epoch = store.add("epochs", 1)
    if epoch <= newest:
        epoch = store.add("epochs", newest - epoch + 1)
    name = uuid.uuid4().hex
    infos = {r: hello["info"] for r, hello in hellos.items()}
    for replica, hello in hellos.items():
        infos[replica]["epoch"] = hello["epoch"]
    plan = json.dumps({"id": name, "epoch": epoch, "infos": infos})
    keys = [f"plan/{hello['nonce']}" for hello in hellos.values()]
    store.multi_set(keys, [plan] * len(keys))  # type: ignore[attr-defined]
    return name
