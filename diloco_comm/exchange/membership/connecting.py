"""Connect the members of a new epoch; it begins for all of them, or for none."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...base.errors import SyncError
from ..waiting import ANOTHER_STORE
from . import rendezvous
from .attendance import OwnTime
from .meetings import Plan
from .verdicts import decide_once

# Connections between hosts that reach each other take milliseconds.
LIMIT_S = 30.0
# All members begin at the same time and give up by the limit. A member has died if nothing is heard
# of it for so much longer: a quarter of the limit, within these bounds.
_SLACK_S = (2.0, 5.0)
_POLL_S = (0.001, 0.05)
_FINE = "connected"


def connect_members(
    store: dist.Store,
    plan: Plan,
    members: Sequence[int],
    replica: int,
    lanes: int,
    limit: float,
) -> list[dist.ProcessGroupGloo]:
    """Connect the groups of a planned epoch.

    Args:
        limit: Seconds for all of them.

    Raises:
        SyncError: The same on all members, if one of them did not connect in time.
    """
    rank, size, started = members.index(replica), len(members), time.monotonic()
    groups: list[dist.ProcessGroupGloo] = []
    note = ""
    try:
        groups = rendezvous.build_groups(store, plan.epoch, rank, size, lanes, limit)
    except SyncError as error:
        note = str(error)
    slack = min(max(limit / 4, _SLACK_S[0]), _SLACK_S[1])
    left = limit - min(time.monotonic() - started, limit) + slack
    try:
        outcome = _agree_on_outcome(store, plan, members, replica, note, left)
    except dist.DistError as error:
        raise SyncError(
            f"the store did not answer while replicas {list(members)} connected to each other: "
            f"{error}; {ANOTHER_STORE}",
            stage="connect",
        ) from error
    if outcome["why"]:
        failure = SyncError(
            outcome["why"],
            stage="connect",
            seconds=time.monotonic() - started,
            missing=outcome["missing"],
            survivors=outcome["survivors"],
        )
        failure.decision = f"epoch {plan.epoch}"
        raise failure
    return groups


def _agree_on_outcome(
    store: dist.Store, plan: Plan, members: Sequence[int], replica: int, note: str, left: float
) -> dict[str, Any]:
    """Wait until all members have said how connecting went, or are given up.

    Args:
        note: What went wrong here; empty when nothing did.
        left: Seconds for the others to say it.
    """
    keys = [f"{plan.epoch}/connected/{member}" for member in members]
    store.set(keys[members.index(replica)], note or _FINE)
    here, pause = OwnTime(), _POLL_S[0]
    while True:
        if store.check([f"{plan.epoch}/outcome"]):
            return _decide(store, plan, {})
        if store.check(keys):
            notes = [text.decode() for text in store.multi_get(keys)]
            why = next((text for text in notes if text != _FINE), "")
            return _decide(store, plan, _outcome(plan, members, why, []))
        here.tick()
        if here.total > left:
            silent = [m for m, key in zip(members, keys, strict=True) if not store.check([key])]
            why = f"replicas {silent} did not connect to the others in epoch {plan.epoch}"
            return _decide(store, plan, _outcome(plan, members, why, silent))
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])


def _outcome(
    plan: Plan, members: Sequence[int], why: str, missing: Sequence[int]
) -> dict[str, Any]:
    stay = [m for m in members if m not in missing and not plan.infos[m].get("join")]
    return {"why": why, "missing": list(missing), "survivors": stay}


def _decide(store: dist.Store, plan: Plan, outcome: dict[str, Any]) -> dict[str, Any]:
    decided = decide_once(store, f"{plan.epoch}/outcome", json.dumps(outcome))
    result: dict[str, Any] = json.loads(decided)
    return result
