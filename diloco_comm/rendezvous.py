"""Agree through a store on who takes part in the next epoch, and build its groups.

Every participant posts a hello; the lowest one waits for all, draws an epoch number that was never
used, and publishes a plan that quotes every hello. A hello is removed once it served or was given
up, so what lies on the store always belongs to somebody who waits.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .errors import ReplicaMismatch, SyncError

# A participant that retries with other members first removes its old hello; a difference that
# outlasts this is a real one.
_MISMATCH_PATIENCE_S = 3.0
_POLL_S = (0.002, 0.05)


@dataclass(frozen=True)
class Plan:
    """What all participants agreed on: the epoch, and what each of them had to say."""

    epoch: int
    infos: dict[int, dict[str, Any]]


def agree(
    store: dist.Store,
    replica: int,
    members: Sequence[int],
    *,
    epoch: int,
    settings: dict[str, Any],
    info: dict[str, Any],
    timeout: float,
) -> Plan:
    """Meet all ``members`` and return the same plan to each of them.

    Args:
        store: Under a prefix of this exchange.
        replica: Our id, one of ``members``.
        members: Sorted ids of the replicas of the next epoch.
        epoch: Our current epoch; the next one is above everybody's.
        settings: Must be equal on all participants.
        info: Handed to the others as it is.
        timeout: Seconds to wait for them.

    Raises:
        ReplicaMismatch: If somebody expects other members or has other settings.
        SyncError: If somebody did not come in time, or the store does not answer.
    """
    hello = {
        "nonce": uuid.uuid4().hex,
        "members": list(members),
        "settings": settings,
        "epoch": epoch,
        "info": info,
    }
    key = f"hello/{replica}"
    started = time.monotonic()
    try:
        store.set(key, json.dumps(hello))
        try:
            return _wait_for_plan(store, replica, members, hello, started + timeout)
        finally:
            with contextlib.suppress(Exception):
                store.set(key, "")
    except SyncError as error:
        error.seconds = time.monotonic() - started
        raise
    except dist.DistError as error:
        raise SyncError(
            f"the store did not answer while replicas {list(members)} were to form a group: "
            f"{error}",
            stage="rendezvous",
            seconds=time.monotonic() - started,
        ) from error


def _wait_for_plan(
    store: dist.Store,
    replica: int,
    members: Sequence[int],
    hello: dict[str, Any],
    deadline: float,
) -> Plan:
    differs_since: float | None = None
    pause = _POLL_S[0]
    plan_key = f"plan/{hello['nonce']}"
    while True:
        if store.check([plan_key]):
            plan = json.loads(store.get(plan_key))
            return Plan(plan["epoch"], {int(r): i for r, i in plan["infos"].items()})
        hellos = _read_hellos(store, members)
        difference = _find_difference(hellos)
        now = time.monotonic()
        differs_since = None if not difference else differs_since or now
        if differs_since is not None and now - differs_since > _MISMATCH_PATIENCE_S:
            # Our hello stays until the others have seen the difference as long as we have.
            time.sleep(4 * _POLL_S[1])
            raise ReplicaMismatch(difference, stage="rendezvous")
        if replica == members[0] and not difference and len(hellos) == len(members):
            _publish_plan(store, hellos)
            continue
        if now > deadline:
            missing = sorted(set(members) - hellos.keys())
            raise SyncError(
                f"replicas {list(members)} were to form a group, but "
                + (f"{missing} did not come" if missing else "no plan was published"),
                stage="rendezvous",
                missing=missing,
            )
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])


def _read_hellos(store: dist.Store, members: Sequence[int]) -> dict[int, dict[str, Any]]:
    hellos = {}
    for member in members:
        key = f"hello/{member}"
        # Hellos are blanked, never deleted: get() would wait for a key that went after the check.
        text = store.get(key) if store.check([key]) else b""
        if text:
            hellos[member] = json.loads(text)
    return hellos


def _find_difference(hellos: dict[int, dict[str, Any]]) -> str:
    """Name the first thing that is not equal on all, as one sentence; empty if all is equal."""
    names = ["members", *sorted({name for h in hellos.values() for name in h["settings"]})]
    for name in names:
        values: dict[str, list[int]] = {}
        for replica, hello in sorted(hellos.items()):
            value = hello["members"] if name == "members" else hello["settings"].get(name)
            values.setdefault(json.dumps(value), []).append(replica)
        if len(values) > 1:
            return f"{name} differs between replicas: " + "; ".join(
                f"{value} on {'replica' if len(who) == 1 else 'replicas'} "
                + ", ".join(map(str, who))
                for value, who in values.items()
            )
    return ""


def _publish_plan(store: dist.Store, hellos: dict[int, dict[str, Any]]) -> None:
    # The counter makes the number new even when an earlier attempt got stuck half-way.
    attempt = store.add("attempts", 1)
    epoch = max(hello["epoch"] for hello in hellos.values()) + attempt
    plan = json.dumps({"epoch": epoch, "infos": {r: h["info"] for r, h in hellos.items()}})
    for hello in hellos.values():
        store.set(f"plan/{hello['nonce']}", plan)


def build_groups(
    store: dist.Store, epoch: int, rank: int, size: int, lanes: int, timeout: float
) -> list[dist.ProcessGroupGloo]:
    """Connect the control group and ``lanes`` data groups of an epoch, named by number.

    gloo binds to GLOO_SOCKET_IFNAME, else to the host's address, else to loopback.

    Raises:
        SyncError: If a peer did not connect in time.
    """
    limit = timedelta(seconds=timeout)
    groups = []
    started = time.monotonic()
    for lane in range(lanes + 1):
        prefix = dist.PrefixStore(f"{epoch}/{lane}", store)
        try:
            groups.append(dist.ProcessGroupGloo(prefix, rank, size, limit))
        except RuntimeError as error:
            raise SyncError(
                f"the groups of epoch {epoch} could not be connected: {error}",
                stage="connect",
                seconds=time.monotonic() - started,
            ) from error
    return groups
