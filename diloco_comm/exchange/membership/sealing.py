"""What a replica says to the others when the group changes: how far it is with each round.

The replica seals its epoch before, so that this is final. ``termination`` decides by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...base.errors import SyncError
from ..round import Standing
from .member import Member
from .plans import own_place
from .termination import Ack, Progress

# The last applied round of every fragment, or what returns that once the exchanges have ended.
LastRounds = Mapping[int, int] | Callable[[], Mapping[int, int]]


class Newcomer:
    """What a replica says that was in no group before; ``joins``: it comes to an old group."""

    def __init__(self, member: Member, joins: bool) -> None:
        self._member, self._joins = member, joins

    def __call__(self, all_are_here: bool) -> dict[str, Any]:
        return {**_way_to(self._member), "join": self._joins, "place": own_place()}


class Survivor:
    """What a replica that goes on says; ``rendezvous`` asks again and again until it answers.

    While its epoch lives, the replica answers when all members of the new group are here: until
    then other replicas may need its votes. If no member is left out, the replica lets its last
    exchanges end before, so that their rounds count; else the replica tells the members that are
    left out. Then the replica seals, and its answer is a promise.

    Args:
        members: Of the new group.
    """

    def __init__(self, member: Member, members: Sequence[int], last_rounds: LastRounds) -> None:
        self._member, self._members, self._last_rounds = member, members, last_rounds

    def __call__(self, all_are_here: bool) -> dict[str, Any] | None:
        member = self._member
        is_whole = set(member.members) <= set(self._members)
        if not member.is_dead:
            if not all_are_here or (is_whole and not member.is_idle):
                return None
        # Where nobody is left out, an earlier attempt's word is taken back.
        member.engine.announce([] if is_whole else self._members)
        seal(member)
        last = self._last_rounds() if callable(self._last_rounds) else self._last_rounds
        ack = to_json(ack_of(member, last))
        return {
            **_way_to(member),
            "ack": ack,
            "inner_step": member.inner_step,
            "place": own_place(),
        }


def _way_to(member: Member) -> dict[str, str]:
    """Say how the others reach a member."""
    return {"address": member.address} if member.tcp is None else member.tcp.ways()


def seal(member: Member) -> None:
    """End what is under way for good: no vote leaves this replica or is heard any more. Idempotent.

    Raises:
        SyncError: If this replica's own device or engine does not come to an end.
    """
    try:
        member.seal()
    except RuntimeError as error:
        raise SyncError(str(error), stage="seal") from error


def ack_of(member: Member, last_rounds: Mapping[int, int]) -> Ack:
    """Say how far a replica is that has sealed.

    Args:
        last_rounds: The last applied round of every fragment.
    """
    rounds: dict[int, dict[int, Standing]] = {fragment: {} for fragment in last_rounds}
    applied_epoch = member.lineage
    for buffers in member.all_buffers:
        for (fragment, number), standing in buffers.standings().items():
            rounds.setdefault(fragment, {})[number] = standing
        applied_epoch = max(applied_epoch, buffers.applied_epoch)
    fragments = {f: Progress(last, rounds[f]) for f, last in last_rounds.items()}
    epoch, members = member.newest_group
    return Ack(epoch, tuple(members), applied_epoch, fragments)


def to_json(ack: Ack) -> dict[str, Any]:
    """Return an ack as JSON's types."""
    return {
        "epoch": ack.epoch,
        "members": ack.members,
        "applied_epoch": ack.applied_epoch,
        "fragments": [
            [fragment, one.last, [[n, s.state, s.epoch] for n, s in sorted(one.rounds.items())]]
            for fragment, one in sorted(ack.fragments.items())
        ],
    }


def from_json(value: Mapping[str, Any]) -> Ack:
    """Return the ack of which ``to_json`` has made ``value``."""
    fragments = {
        fragment: Progress(last, {n: Standing(state, epoch) for n, state, epoch in rounds})
        for fragment, last, rounds in value["fragments"]
    }
    return Ack(value["epoch"], tuple(value["members"]), value["applied_epoch"], fragments)
