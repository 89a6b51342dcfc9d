"""What the members have decided about a failure; see ``csrc/exchange/failure/verdict.h``.

The engines put their verdict on the store when an epoch breaks. When the group that follows from it
cannot be formed, because another replica has died meanwhile, that is a further verdict: the newest
one counts.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ... import _C
from ...base.errors import LeftBehind, NonFiniteError, ReplicaMismatch, SyncError
from ..waiting import ANOTHER_STORE, WaitLog, store_advice

if TYPE_CHECKING:
    from ...replica.workers import ReplicaWorkers
    from ..exchange import Exchange

# A store answers in milliseconds; one whose host hangs must not hold us for ever.
STORE_LIMIT_S = 10.0
# How a replica that was left behind may take part again.
WAY_BACK = 'may come back as a newcomer: close this DiLoCo, then make a new one with init="join"'
# What the members of an epoch connect, in this order; each has one outcome for all of them.
GROUPS, STREAMS = "outcome", "streams_outcome"
_LINE_POLL_S = 0.02
_SILENT = ", because the store does not answer"
_LOST = ", because this replica's connection to the store has broken"
_STORE_CURES = {
    "": "",
    _LOST: ", and another store by its argument store=",
    _SILENT: f", or call again; if the store stays silent, {ANOTHER_STORE}",
}


@dataclass(frozen=True)
class Verdict:
    """Who goes on, and who does not."""

    survivors: tuple[int, ...]
    missing: tuple[int, ...]


def decide_once(store: dist.Store, key: str, value: str) -> str:
    """Set a key that is absent; return what it holds then, which never changes again.

    With a store that lacks ``compare_set``, two that decide at the same time may differ.
    """
    return swap(store, key, "", value)


def swap(store: dist.Store, key: str, old: str, new: str) -> str:
    """Set a key that holds ``old``, or is absent where that is ""; return what it holds then."""
    try:
        return str(store.compare_set(key, old, new).decode())
    except RuntimeError as error:
        # A store written in Python says so by an assertion of torch's.
        if "ot implemented" not in str(error):
            raise
    held = store.get(key).decode() if store.check([key]) else ""
    if held == old:
        store.set(key, new)
        held = new
    return str(held)


def bounded(exchange: Exchange) -> dist.Store:
    """Return the exchange's store with calls that end."""
    return _bounded(exchange, exchange.store)


def _bounded(exchange: Exchange, store: dist.Store) -> dist.Store:
    return _C.bounded_store(store, min(exchange.timeout, STORE_LIMIT_S))


def read_known(store: dist.Store, keys: Sequence[str], known: set[str]) -> dict[str, bytes]:
    """Return what those of the keys hold that exist, in few calls however many keys there are.

    Args:
        known: Keys that exist and are never deleted; what is found is added.
    """
    # get() of a key that does not exist would wait for it.
    unknown = [key for key in keys if key not in known]
    if unknown:
        are_all_there = store.check(unknown)
        known.update(key for key in unknown if are_all_there or store.check([key]))
    there = [key for key in keys if key in known]
    return dict(zip(there, store.multi_get(there), strict=True)) if there else {}


def raise_to(store: dist.Store, key: str, new: str, may_follow: Callable[[str], bool]) -> str:
    """Set a key by compare-and-set; what it holds stays where ``may_follow`` says no to it.

    Returns:
        What the key holds then.
    """
    held = store.get(key).decode() if store.check([key]) else ""
    while held != new and (not held or may_follow(held)):
        held = swap(store, key, held, new)
    return held


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
def added(exchange: Exchange, store: dist.Store) -> Iterator[None]:
    """Add to the verdicts that a group could not be formed, when the block raises that."""
    try:
        yield
    except SyncError as error:
        with contextlib.suppress(dist.DistError):
            _append(store, exchange, error)
        raise


def _append(store: dist.Store, exchange: Exchange, error: SyncError) -> None:
    """Add a verdict on an epoch that is at an end, once for all that have decided it together."""
    # Nothing is added where the epoch lives, and all go on in it, or where there was none yet.
    if not error.decision or not exchange.is_dead or not exchange.epoch:
        return
    epoch = exchange.epoch
    survivors = sorted(set(error.survivors) & set(exchange.members))
    missing = sorted(set(exchange.members) - set(survivors))
    _append_text(store, epoch, survivors=survivors, missing=missing, decision=[error.decision])


def _append_text(store: dist.Store, epoch: int, **lists: Sequence[int | str]) -> None:
    text = "".join(" ".join([name, *map(str, lists[name])]) + "\n" for name in lists)
    number = 0
    while decide_once(store, _key(epoch, number), text) != text:
        number += 1


def leave_out(
    exchange: Exchange, store: dist.Store, survivors: Sequence[int], new_epoch: int
) -> None:
    """Add to the verdicts that some members are not in the group that is about to begin.

    They may live, and know of no failure: whoever asks later must find that it was left out.

    Args:
        survivors: Members of our epoch that enter the new one.

    Raises:
        SyncError: If the store does not answer.
    """
    left_out = sorted(set(exchange.members) - set(survivors))
    if not left_out:
        return
    epoch = exchange.epoch
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


# ---------------------------------------------------------------------- the group that follows


def claim_line(
    exchange: Exchange,
    store: dist.Store,
    infos: Mapping[int, Mapping[str, Any]],
    new_epoch: int,
    members: Sequence[int],
    patience: float,
) -> None:
    """Make the group that is about to begin the only one that follows from its members' epochs.

    Two lists of members that have nobody in common could else begin both, as two trainings. The
    first one to set the key of the old epoch goes on. A later group replaces an earlier one only
    with one of its members, who has left the earlier one, or where the earlier one never began.

    A member whose last change has failed may be the only one for whom that change failed. So the
    newest group that each member knows of is followed too, and before the older ones: who loses
    that line has claimed nothing.

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
    if exchange.line_name != exchange.name:
        # The workers of a replica go on together: the first claim of one of them is that of all.
        lines = [_bounded(exchange, exchange.store_of(exchange.line_name)), store]
    followed = {info["epoch"] for info in acks} | {info["ack"]["epoch"] for info in acks}
    try:
        for epoch in sorted(followed - {0}, reverse=True):
            for line in lines:
                claim = _Claim(exchange, store, line, _line_key(epoch), survivors)
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
    """To be the group that follows from an epoch.

    Attributes:
        store: Of the exchange, bounded.
        line: The store that has the line's key.
        survivors: Members of the new group that come from an older one.
    """

    exchange: Exchange
    store: dist.Store
    line: dist.Store
    key: str
    survivors: Set[int]

    def make(self, new_epoch: int, members: Sequence[int], patience: float) -> None:
        """Set the key, where no other group has begun that has set it."""
        own = _Claimant(new_epoch, tuple(members), self.exchange.name)

        def may_follow(text: str) -> bool:
            held = _Claimant.read(text)
            if held.epoch >= new_epoch:
                return False
            return bool(self.survivors & set(held.members)) or self._has_begun(held) is False

        begin, log = time.monotonic(), WaitLog()
        while True:
            held = _Claimant.read(raise_to(self.line, self.key, own.text, may_follow))
            if self.exchange.replica in held.members:
                return
            has_begun = self._has_begun(held)
            if has_begun:
                raise _left_behind(self.exchange, list(held.members), held.epoch)
            who = f"replicas {list(held.members)}, who claimed to go on in epoch {held.epoch}"
            if has_begun is False and held.epoch >= new_epoch:
                raise SyncError(
                    f"{who} without replica {self.exchange.replica}, could not connect: call "
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
        """Decide for members that are silent: whoever of them connects later cannot begin."""
        members, store = list(held.members), self._store_of(held)
        why = f"replicas {members} did not connect within {patience:g} s in epoch {held.epoch}"
        outcome = json.dumps({"why": why, "missing": [], "survivors": members})
        for key in self._outcome_keys(held):
            if not store.check([key]):
                decide_once(store, key, outcome)
                return

    def _store_of(self, held: _Claimant) -> dist.Store:
        # Each worker of a replica connects to its peers on its own part of the store.
        if held.name == self.exchange.name:
            return self.store
        return _bounded(self.exchange, self.exchange.store_of(held.name))

    def _outcome_keys(self, held: _Claimant) -> list[str]:
        # One that goes on alone connects to nobody.
        if len(held.members) == 1:
            return []
        kinds = [GROUPS, STREAMS] if self.exchange.collectives == "nccl" else [GROUPS]
        return [outcome_key(held.epoch, kind) for kind in kinds]


def outcome_key(epoch: int, what: str) -> str:
    """Return the key that says how connecting ended, for GROUPS or STREAMS of an epoch."""
    return f"{epoch}/{what}"


def _line_key(epoch: int) -> str:
    return f"{epoch}/board/line"


def announce_next(
    store: dist.Store, epoch: int, new_epoch: int, new_members: Sequence[int]
) -> None:
    """Leave word, for those of an epoch that are not in it, of the newest one that followed."""
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
    exchange: Exchange, members: Iterable[int] | str, workers: ReplicaWorkers | None
) -> list[int]:
    """Return whom ``change_group`` shall go on with; a collective call of the workmates.

    Raises:
        ValueError: For a text other than "survivors", or if nothing has failed.
        LeftBehind: If the others go on without this replica.
        SyncError: If nobody has decided.
    """
    if isinstance(members, str):
        if members != "survivors":
            raise ValueError(f'members must be replicas or "survivors", got {members!r}')
        return _agreed_survivors(exchange, workers)
    numbers = sorted(members) if isinstance(members, Set) else list(members)
    if exchange.replica not in numbers:
        survivors = _survivors_of(exchange)
        if isinstance(survivors, list) and exchange.replica not in survivors:
            raise _left_behind(exchange, survivors)
    return numbers


def _agreed_survivors(exchange: Exchange, workers: ReplicaWorkers | None) -> list[int]:
    own = _survivors_of(exchange)
    views = [own] if workers is None else workers.gather(own)
    known = [set(view) for view in views if isinstance(view, list)]
    if not known:
        reason = next(view for view in views if isinstance(view, str))
        if exchange.is_dead or reason:
            raise SyncError(
                f"who survives epoch {exchange.epoch} of replicas {list(exchange.members)} was "
                f"not decided{reason}: give change_group the members that live"
                + _STORE_CURES[reason],
                stage="rendezvous",
            )
        raise ValueError(
            'change_group("survivors") follows the loss of a replica, but none is known in epoch '
            f"{exchange.epoch} of replicas {list(exchange.members)}: nobody is missing; "
            + _way_on(exchange.last_error)
        )
    survivors = sorted(set.intersection(*known))
    if exchange.replica not in survivors:
        raise _left_behind(exchange, survivors)
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


def _survivors_of(exchange: Exchange) -> list[int] | str:
    """Return who survives, or why that is not known: "" when it was not decided."""
    try:
        store = bounded(exchange)
        following = next_group(store, exchange.epoch)
        verdict = newest(store, exchange.epoch)
    except dist.DistNetworkError:
        return _LOST
    except dist.DistError:
        return _SILENT
    if following is not None and exchange.replica not in following[1]:
        # Whatever was decided before, the others are in another group now.
        return sorted(set(exchange.members) & set(following[1]))
    return "" if verdict is None else list(verdict.survivors)


def _left_behind(
    exchange: Exchange, survivors: list[int], went_on_in: int | None = None
) -> LeftBehind:
    """Make the error of a replica that the others go on without."""
    following = None
    escape = "; if that group is dead, give change_group another store by its argument store="
    if went_on_in is None:
        escape = ""
        with contextlib.suppress(dist.DistError):
            following = next_group(bounded(exchange), exchange.epoch)
    if following is not None:
        went_on_in = following[0]
    when = "goes on" if went_on_in is None else f"went on in epoch {went_on_in}"
    return LeftBehind(
        f"the group of replicas {survivors} {when} without replica {exchange.replica}, which "
        f"{WAY_BACK}{escape}",
        stage="rendezvous",
        missing=sorted(set(exchange.members) - set(survivors)),
        survivors=survivors,
        went_on_in=went_on_in,
    )
