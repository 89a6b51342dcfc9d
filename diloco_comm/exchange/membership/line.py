"""The line of groups: which group follows from an epoch, where two could.

A group claims to follow from the epochs of its members before it connects; see ``claim_line``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...base.errors import SyncError
from ..waiting import WaitLog, store_advice
from .member import Member
from .stores import bounded_by, decide_once, raise_to
from .verdicts import left_behind

# What the members of an epoch connect, in this order; each has one outcome for all of them.
GROUPS, STREAMS = "outcome", "streams_outcome"
_LINE_POLL_S = 0.02


def claim_line(
    member: Member,
    store: dist.Store,
    infos: Mapping[int, Mapping[str, Any]],
    new_epoch: int,
    members: Sequence[int],
    patience: float,
) -> None:
    """Make the group that is about to begin the only one that follows from its members' epochs.

    Without a claim, two groups that have no member in common could both begin, as two trainings.
    The first group to set the key of the old epoch goes on. A later group replaces an earlier one
    only if one of its members has left the earlier group, or if the earlier group never began.

    A change of the group that has failed for one member may have succeeded for the others. So the
    newest group that each member knows of is claimed too, and before the older ones: a group that
    loses this first claim has claimed nothing.

    Args:
        infos: What the members have said at the meeting.
        patience: Seconds in which a group that has the line connects, or is given up.

    Raises:
        LeftBehind: If other members of this replica's epoch go on without this replica.
        SyncError: If the store does not answer, or a later group has failed meanwhile.
    """
    acks = [info for info in infos.values() if "ack" in info]
    survivors = {replica for replica, info in infos.items() if "ack" in info}
    lines = [store]
    if member.line_name != member.name:
        # The workers of a replica go on together: the first claim of one of them is that of all.
        lines = [bounded_by(member, member.store_of(member.line_name)), store]
    followed = {info["epoch"] for info in acks} | {info["ack"]["epoch"] for info in acks}
    try:
        for epoch in sorted(followed - {0}, reverse=True):
            for line in lines:
                claim = _Claim(member, store, line, _line_key(epoch), survivors)
                claim.make(new_epoch, members, patience)
    except dist.DistError as error:
        raise SyncError(
            f"the store did not answer while replicas {list(members)} were to go on in epoch "
            f"{new_epoch}: {error}; {store_advice(error)}",
            stage="rendezvous",
        ) from error


@dataclass(frozen=True)
class _Claimant:
    """A group that goes on, and the name of the exchange that has claimed it."""

    epoch: int
    members: tuple[int, ...]
    name: str

    @classmethod
    def read(cls, text: str) -> _Claimant:
        epoch, members, name = json.loads(text)
        return cls(epoch, tuple(members), name)

    @property
    def text(self) -> str:
        return json.dumps([self.epoch, self.members, self.name])


@dataclass(frozen=True)
class _Claim:
    """A claim to be the group that follows from an epoch.

    Attributes:
        store: Of the exchange, bounded.
        line: The store that has the line's key.
        survivors: Members of the new group that come from an older one.
    """

    member: Member
    store: dist.Store
    line: dist.Store
    key: str
    survivors: Set[int]

    def make(self, new_epoch: int, members: Sequence[int], patience: float) -> None:
        """Set the key, where no other group has begun that has set it."""
        own = _Claimant(new_epoch, tuple(members), self.member.name)

        def may_follow(text: str) -> bool:
            held = _Claimant.read(text)
            if held.epoch >= new_epoch:
                return False
            return bool(self.survivors & set(held.members)) or self._has_begun(held) is False

        begin, log = time.monotonic(), WaitLog()
        while True:
            held = _Claimant.read(raise_to(self.line, self.key, own.text, may_follow))
            if self.member.replica in held.members:
                return
            has_begun = self._has_begun(held)
            if has_begun:
                raise left_behind(self.member, list(held.members), held.epoch)
            who = f"replicas {list(held.members)}, who claimed to go on in epoch {held.epoch}"
            if has_begun is False and held.epoch >= new_epoch:
                raise SyncError(
                    f"{who} without replica {self.member.replica}, could not connect: call "
                    "change_group again",
                    stage="rendezvous",
                )
            if has_begun is None and time.monotonic() - begin > patience:
                self._give_up(held, patience)
            log.tick(lambda who=who: f"{who}, to connect")  # type: ignore[misc]
            time.sleep(_LINE_POLL_S)

    def _has_begun(self, held: _Claimant) -> bool | None:
        """Return whether a group's members have connected; None while they may yet."""
        store = self._store_of(held)
        for key in self._outcome_keys(held):
            if not store.check([key]):
                return None
            if json.loads(store.get(key))["why"]:
                return False
        return True

    def _give_up(self, held: _Claimant, patience: float) -> None:
        """Decide for members that are silent: a member that connects later cannot begin."""
        members, store = list(held.members), self._store_of(held)
        why = f"replicas {members} did not connect within {patience:g} s in epoch {held.epoch}"
        outcome = json.dumps({"why": why, "missing": [], "survivors": members})
        for key in self._outcome_keys(held):
            if not store.check([key]):
                decide_once(store, key, outcome)
                return

    def _store_of(self, held: _Claimant) -> dist.Store:
        # Each worker of a replica connects to its peers on its own part of the store.
        if held.name == self.member.name:
            return self.store
        return bounded_by(self.member, self.member.store_of(held.name))

    def _outcome_keys(self, held: _Claimant) -> list[str]:
        # A replica that goes on alone connects to no other.
        if len(held.members) == 1:
            return []
        kinds = [GROUPS, STREAMS] if self.member.collectives == "nccl" else [GROUPS]
        return [outcome_key(held.epoch, kind) for kind in kinds]


def outcome_key(epoch: int, what: str) -> str:
    """Return the key that says how connecting ended, for GROUPS or STREAMS of an epoch."""
    return f"{epoch}/{what}"


def _line_key(epoch: int) -> str:
    return f"{epoch}/board/line"
