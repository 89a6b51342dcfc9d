"""Connect the members of a new epoch, which begins for all of them or for none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ...base.errors import SyncError
from ..waiting import store_advice
from .line import GROUPS, STREAMS, outcome_key
from .meeting import rendezvous
from .meeting.attendance import OwnTime
from .own_link import Dial
from .plans import Plan
from .stores import decide_once

# Connections between hosts that reach each other take milliseconds.
LIMIT_S = 30.0
# All members begin at the same time and give up by the limit. A member that is silent for so much
# longer has died: a quarter of the limit, within these bounds.
_SLACK_S = (2.0, 5.0)
_POLL_S = (0.001, 0.05)
_FINE = "connected"
# Seconds in which a failed connection of devices is ended before the others learn of it.
_END_S = 5.0


def connect_members(
    store: dist.Store,
    plan: Plan,
    members: Sequence[int],
    replica: int,
    lanes: int,
    limit: float,
    dial: Dial | None = None,
) -> rendezvous.Groups:
    """Connect the groups of a planned epoch.

    Args:
        limit: Seconds for all of them.
        dial: None for groups of gloo.

    Raises:
        SyncError: The same on all members, if one of them did not connect in time.
    """
    rank, size, started = members.index(replica), len(members), time.monotonic()
    groups: rendezvous.Groups = []
    own: SyncError | None = None
    try:
        groups = rendezvous.build_groups(store, dial, plan.epoch, rank, size, lanes, limit)
    except SyncError as error:
        own = error
    _end_together(store, plan, members, replica, GROUPS, own, started, limit)
    return groups


def connect_streams(
    store: dist.Store,
    plan: Plan,
    members: Sequence[int],
    replica: int,
    connect: Callable[[], None],
    limit: float,
) -> None:
    """Connect the devices of the members, where groups over gloo connect their hosts already.

    Args:
        connect: Connects the device of this replica.
        limit: Seconds that ``connect`` takes at most, without the end of what has failed.

    Raises:
        SyncError: The same on all members, if one of them did not connect.
    """
    started = time.monotonic()
    own: Exception | None = None
    try:
        connect()
    except Exception as error:
        own = error
    _end_together(store, plan, members, replica, STREAMS, own, started, limit + _END_S)


def _end_together(
    store: dist.Store,
    plan: Plan,
    members: Sequence[int],
    replica: int,
    what: str,
    own: Exception | None,
    started: float,
    limit: float,
) -> None:
    """Come to one outcome with all members; ``own`` is what has failed on this replica."""
    note = "" if own is None else str(own) or type(own).__name__
    cuts = own.cuts if isinstance(own, SyncError) else ()
    slack = min(max(limit / 4, _SLACK_S[0]), _SLACK_S[1])
    left = limit - min(time.monotonic() - started, limit) + slack
    try:
        outcome = _agree_on_outcome(store, plan, members, replica, what, note, cuts, left)
    except dist.DistError as error:
        raise SyncError(
            f"the store did not answer while replicas {list(members)} connected to each other: "
            f"{error}; {store_advice(error)}",
            stage="connect",
        ) from error
    if outcome["why"]:
        failure = SyncError(
            outcome["why"],
            stage="connect",
            seconds=time.monotonic() - started,
            missing=outcome["missing"],
            survivors=outcome["survivors"],
            cuts=outcome.get("cuts", ()),
        )
        failure.decision = f"epoch {plan.epoch}"
        raise failure from own


def _agree_on_outcome(
    store: dist.Store,
    plan: Plan,
    members: Sequence[int],
    replica: int,
    what: str,
    note: str,
    cuts: Sequence[tuple[int, int]],
    left: float,
) -> dict[str, Any]:
    """Wait until all members have said how connecting went, or are given up.

    Args:
        what: Was connected, GROUPS or STREAMS.
        note: What went wrong on this replica; empty when nothing did.
        cuts: This replica and each member that this replica does not let in.
        left: Seconds for the others to say how connecting went.
    """
    key_of_all = outcome_key(plan.epoch, what)
    keys = [f"{key_of_all}/{member}" for member in members]
    own_key = keys[members.index(replica)]
    if cuts:
        store.set(f"{own_key}/cuts", json.dumps(cuts))
    store.set(own_key, note or _FINE)
    here, pause = OwnTime(), _POLL_S[0]
    while True:
        if store.check([key_of_all]):
            return _decide(store, key_of_all, {})
        if store.check(keys):
            notes = [text.decode() for text in store.multi_get(keys)]
            failures = [text for text in notes if text != _FINE]
            # A member that refuses another member knows the cause. A member that only waited to be
            # dialled knows least of the cause.
            why = min(
                failures,
                key=lambda text: ("allowed keys" not in text, "has not dialled" in text),
                default="",
            )
            outcome = _outcome(plan, members, why, [])
            told = [f"{key}/cuts" for key in keys] if failures else []
            found = [json.loads(store.get(key)) for key in told if store.check([key])]
            outcome["cuts"] = [pair for pairs in found for pair in pairs]
            return _decide(store, key_of_all, outcome)
        here.tick()
        if here.total > left:
            silent = [m for m, key in zip(members, keys, strict=True) if not store.check([key])]
            why = f"replicas {silent} did not connect to the others in epoch {plan.epoch}"
            return _decide(store, key_of_all, _outcome(plan, members, why, silent))
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])


def _outcome(
    plan: Plan, members: Sequence[int], why: str, missing: Sequence[int]
) -> dict[str, Any]:
    stay = [m for m in members if m not in missing and not plan.infos[m].get("join")]
    return {"why": why, "missing": list(missing), "survivors": stay}


def _decide(store: dist.Store, key: str, outcome: dict[str, Any]) -> dict[str, Any]:
    decided = decide_once(store, key, json.dumps(outcome))
    result: dict[str, Any] = json.loads(decided)
    return result
