"""What the members have decided about a failure; see ``csrc/exchange/failure/verdict.h``.

The engines put their verdict on the store when an epoch breaks. When the group that follows from it
cannot be formed, because another replica has died meanwhile, that is a further verdict: the newest
one counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from ...base.errors import LeftBehind, NonFiniteError, ReplicaMismatch, SyncError
from ..waiting import ANOTHER_STORE, store_advice
from .member import Member
from .stores import bounded, decide_once, raise_to

# How a replica that was left behind may take part again.
WAY_BACK = 'may come back as a newcomer: close this DiLoCo, then make a new one with init="join"'
_SILENT = ", because the store does not answer"
_LOST = ", because this replica's connection to the store has broken"
_STORE_CURES = {
    "": "",
    _LOST: ", and another store by its argument store=",
    _SILENT: f", or call again; if the store stays silent, {ANOTHER_STORE}",
}


class Workers(Protocol):
    """The workers of this replica."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers; a collective call."""
        ...


@dataclass(frozen=True)
class Verdict:
    """The members of an epoch that go on to the next group, and those that do not.

    A missing member may be dead, or alive and left out.
    """

    survivors: tuple[int, ...]
    missing: tuple[int, ...]


def _key(epoch: int, number: int) -> str:
    return f"{epoch}/board/verdict/{number}"


def newest(store: dist.Store, epoch: int) -> Verdict | None:
    """Return the last verdict on an epoch; None when nothing was decided about it."""
    number, verdict = 0, None
    while store.check([_key(epoch, number)]):
        text = store.get(_key(epoch, number)).decode()
        lists = {words[0]: words[1:] for row in text.splitlines() if (words := row.split())}
        survivors, missing = ([int(word) for word in lists[n]] for n in ("survivors", "missing"))
        verdict = Verdict(tuple(survivors), tuple(missing))
        number += 1
    return verdict


@contextlib.contextmanager
def added(member: Member, store: dist.Store) -> Iterator[None]:
    """Add to the verdicts that a group could not be formed, when the block raises that."""
    try:
        yield
    except SyncError as error:
        with contextlib.suppress(dist.DistError):
            _append(store, member, error)
        raise


def _append(store: dist.Store, member: Member, error: SyncError) -> None:
    """Add a verdict on an epoch that is at an end, once for all that have decided it together."""
    # Nothing is added where the epoch lives, and all go on in it, or where there was none yet.
    if not error.decision or not member.is_dead or not member.epoch:
        return
    epoch = member.epoch
    survivors = sorted(set(error.survivors) & set(member.members))
    missing = sorted(set(member.members) - set(survivors))
    _append_text(store, epoch, survivors=survivors, missing=missing, decision=[error.decision])


def _append_text(store: dist.Store, epoch: int, **lists: Sequence[int | str]) -> None:
    text = "".join(" ".join([name, *map(str, lists[name])]) + "\n" for name in lists)
    number = 0
    while decide_once(store, _key(epoch, number), text) != text:
        number += 1


def leave_out(member: Member, store: dist.Store, survivors: Sequence[int], new_epoch: int) -> None:
    """Add to the verdicts that some members are not in the group that is about to begin.

    Such a member may live, and know of no failure: if it asks later, the verdict must say so.

    Args:
        survivors: Members of the current epoch that enter the new one.

    Raises:
        SyncError: If the store does not answer.
    """
    left_out = sorted(set(member.members) - set(survivors))
    if not left_out:
        return
    epoch = member.epoch
    try:
        verdict = newest(store, epoch)
        if verdict is not None and set(verdict.missing) == set(left_out):
            return
        _append_text(
            store,
            epoch,
            survivors=survivors,
            missing=left_out,
            left_out=left_out,
            decision=[f"epoch {new_epoch}"],
        )
    except dist.DistError as error:
        raise SyncError(
            f"the store did not answer while replicas {left_out} were to be left out of epoch "
            f"{new_epoch}: {error}; {store_advice(error)}",
            stage="rendezvous",
        ) from error


def announce_next(
    store: dist.Store, epoch: int, new_epoch: int, new_members: Sequence[int]
) -> None:
    """Record the newest group that followed an epoch, for members that are not in the group."""
    text = " ".join(map(str, [new_epoch, *new_members]))
    raise_to(store, _next_key(epoch), text, lambda held: int(held.split()[0]) < new_epoch)


def next_group(store: dist.Store, epoch: int) -> tuple[int, list[int]] | None:
    """Return the epoch that followed another, and its members; None if none has begun."""
    if not store.check([_next_key(epoch)]):
        return None
    number, *members = map(int, store.get(_next_key(epoch)).split())
    return number, members


def _next_key(epoch: int) -> str:
    return f"{epoch}/board/next"


# ------------------------------------------------------------------- change_group("survivors")


def chosen_members(
    member: Member, members: Iterable[int] | str, workers: Workers | None
) -> list[int]:
    """Return the members with which ``change_group`` goes on; a collective call of the workers.

    Raises:
        ValueError: For a text other than "survivors", or if nothing has failed.
        LeftBehind: If the others go on without this replica.
        SyncError: If nobody has decided.
    """
    if isinstance(members, str):
        if members != "survivors":
            raise ValueError(f'members must be replicas or "survivors", got {members!r}')
        return _agreed_survivors(member, workers)
    numbers = sorted(members) if isinstance(members, Set) else list(members)
    if member.replica not in numbers:
        survivors = _survivors_of(member)
        if isinstance(survivors, list) and member.replica not in survivors:
            raise left_behind(member, survivors)
    return numbers


def _agreed_survivors(member: Member, workers: Workers | None) -> list[int]:
    own = _survivors_of(member)
    views = [own] if workers is None else workers.gather(own)
    known = [set(view) for view in views if isinstance(view, list)]
    if not known:
        reason = next(view for view in views if isinstance(view, str))
        if member.is_dead or reason:
            raise SyncError(
                f"who survives epoch {member.epoch} of replicas {list(member.members)} was "
                f"not decided{reason}: give change_group the members that live"
                + _STORE_CURES[reason],
                stage="rendezvous",
            )
        raise ValueError(
            'change_group("survivors") follows the loss of a replica, but none is known in epoch '
            f"{member.epoch} of replicas {list(member.members)}: nobody is missing; "
            + _way_on(member.last_error)
        )
    survivors = sorted(set.intersection(*known))
    if member.replica not in survivors:
        raise left_behind(member, survivors)
    return survivors


def _way_on(last: SyncError | None) -> str:
    """Say what to do, after an exchange that failed or without one, where nobody is missing."""
    if last is None:
        return "train on without change_group, or give change_group the members themselves"
    kind = type(last).__name__
    cure = "train on without change_group"
    if isinstance(last, ReplicaMismatch):
        cure = "make that equal on all replicas, and train on without change_group"
    elif isinstance(last, NonFiniteError):
        cure += ", or give change_group the members whose values are good"
    return f"the last exchange ended with {kind} ({last}): {cure}"


def _survivors_of(member: Member) -> list[int] | str:
    """Return the survivors, or why they are not known: "" when that was not decided."""
    try:
        store = bounded(member)
        following = next_group(store, member.epoch)
        verdict = newest(store, member.epoch)
    except dist.DistNetworkError:
        return _LOST
    except dist.DistError:
        return _SILENT
    if following is not None and member.replica not in following[1]:
        # Whatever was decided before, the others are in another group now.
        return sorted(set(member.members) & set(following[1]))
    return "" if verdict is None else list(verdict.survivors)


def left_behind(member: Member, survivors: list[int], went_on_in: int | None = None) -> LeftBehind:
    """Make the error of a replica without which the others go on."""
    following = None
    escape = "; if that group is dead, give change_group another store by its argument store="
    if went_on_in is None:
        escape = ""
        with contextlib.suppress(dist.DistError):
            following = next_group(bounded(member), member.epoch)
    if following is not None:
        went_on_in = following[0]
    when = "goes on" if went_on_in is None else f"went on in epoch {went_on_in}"
    return LeftBehind(
        f"the group of replicas {survivors} {when} without replica {member.replica}, which "
        f"{WAY_BACK}{escape}",
        stage="rendezvous",
        missing=sorted(set(member.members) - set(survivors)),
        survivors=survivors,
        went_on_in=went_on_in,
    )
