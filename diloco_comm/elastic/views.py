"""Views: who trains together, as one record in the registry.

The views of a run are a chain. Each record names the record before it by its hash, and the registry
changes the record by compare-and-set only: so there is one chain, whatever anybody believes of
anybody. A *forming* view is an attempt of its members to begin; an *open* view has begun. The open
view before an attempt is its *base*.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from ..base.extension import VIEW as VERSION

MAX_RECORD_BYTES = 8192
FORMING, OPEN = "forming", "open"
NO_VIEW = -1

# Id and nonce: names one process. A replica that starts again has another nonce.
Key = tuple[int, str]


@dataclass(frozen=True, order=True)
class Member:
    """A process that is a replica, or one worker that speaks for its replica.

    Attributes:
        id: Of the replica; stays when the process starts again.
        nonce: Of the process.
        address: "tcp://host:port" of the store at which others find this process: its own store, or
            one that all members share.
        workers: Of the replica.
        settings: Hash of what must be equal on all members.
    """

    id: int
    nonce: str
    address: str
    workers: int
    settings: str

    @property
    def key(self) -> Key:
        return self.id, self.nonce


@dataclass(frozen=True)
class View:
    """Those who train together, or try to.

    Attributes:
        run: Name of the training run.
        number: Higher with every attempt.
        parent: Hash of the record before this one; "" for the first.
        phase: FORMING or OPEN.
        members: By id.
        base: Number of the last open view before this one, NO_VIEW for none.
        base_members: Id and nonce of the members of that view.
        inner_step: On which the members agreed when the last view was opened: this one if it is
            open, else the base.
        proposer: Nonce of the process that proposed it.
        reason: For people.
        joined: Ids of members that bring no state of this run's last open view.
        left: Ids of base members whose process is no member.
        source: Id of the member whose state all others take; NO_VIEW if the base's state goes on.
        evicted: Ids of members that are to be left out at the next boundary.
        is_finished: The members have taken all steps of the run.
    """

    run: str
    number: int
    parent: str
    phase: str
    members: tuple[Member, ...]
    base: int
    base_members: tuple[Key, ...]
    inner_step: int
    proposer: str
    reason: str = ""
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    source: int = NO_VIEW
    evicted: tuple[int, ...] = ()
    is_finished: bool = False

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple([member.key for member in self.members])

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple([member.id for member in self.members])

    @property
    def attempt(self) -> tuple[int, str]:
        """What a forming view and the open view that comes of it have in common, and no other."""
        return self.number, self.proposer

    @property
    def lowest(self) -> Member:
        """The member at whose store the members meet."""
        return self.members[0]

    @property
    def last_open(self) -> tuple[int, tuple[Key, ...]]:
        """Number and members of the last open view: of this one, or of its base."""
        return (self.number, self.keys) if self.phase == OPEN else (self.base, self.base_members)

    def is_member(self, id: int, nonce: str) -> bool:
        return (id, nonce) in self.keys

    def rank_of(self, id: int) -> int:
        """Return the place of a member among the members.

        Raises:
            ValueError: If there is no member of this id.
        """
        if id not in self.ids:
            raise ValueError(f"view {self.number} has the members {list(self.ids)}, and no {id}")
        return self.ids.index(id)


def opened(view: View, inner_step: int) -> View:
    """Return the open view that a forming one becomes: the same, whichever member opens it."""
    parent = record_hash(to_bytes(view))
    return replace(view, phase=OPEN, parent=parent, inner_step=inner_step, evicted=())


def with_evicted(view: View, id: int) -> View:
    """Return the record that asks the members of an open view to leave one out.

    Swap it in where the record of ``view`` is. The members act upon it at their next boundary, and
    the process that is left out ends as if it had been asked to leave.

    Raises:
        ValueError: If the view is not open, or has no member of this id.
    """
    view.rank_of(id)
    if view.phase != OPEN:
        raise ValueError(f"view {view.number} is being formed: evict replica {id} when it is open")
    evicted = tuple(sorted({*view.evicted, id}))
    return replace(view, parent=record_hash(to_bytes(view)), evicted=evicted)


def finished(view: View) -> View:
    """Return the record that says that the members of an open view have taken all steps."""
    return replace(view, parent=record_hash(to_bytes(view)), is_finished=True)


# ------------------------------------------------------------------------------------ records


def record_hash(record: bytes) -> str:
    """Return the name of a record, 32 hexadecimal digits."""
    return hashlib.blake2b(record, digest_size=16).hexdigest()


def encoded_bytes(view: View) -> int:
    """Return the length of the record of a view, also of one that is too long."""
    return len(_encoded(view))


def _encoded(view: View) -> bytes:
    values = {one.name: getattr(view, one.name) for one in fields(View)}
    values["members"] = [_listed(member) for member in view.members]
    return _dumps({"version": VERSION, **values})


@lru_cache(maxsize=4096)
def to_bytes(view: View) -> bytes:
    """Return the record of a view: equal bytes for equal views.

    Raises:
        ValueError: If a registry would not hold it.
    """
    record = _encoded(view)
    if len(record) > MAX_RECORD_BYTES:
        raise ValueError(
            f"the record of a view with {len(view.members)} members has {len(record)} bytes, and a "
            f"registry holds {MAX_RECORD_BYTES}: let fewer replicas train, or shorten addresses"
        )
    return record


@lru_cache(maxsize=4096)
def from_bytes(record: bytes, run: str) -> View:
    """Return the view that a record holds.

    Args:
        run: Whose record it must be.

    Raises:
        ValueError: If it is the record of another run or another version, or no record.
    """
    try:
        values = json.loads(record)
        version = values.pop("version")
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ValueError(f"the registry holds no record of a view: {_start(record)}") from None
    if version != VERSION:
        raise ValueError(
            f"the registry's record has version {version}, and this diloco_comm reads version "
            f"{VERSION}: let all replicas run the same version of diloco_comm"
        )
    if values.get("run") != run:
        raise ValueError(
            f"the registry's record is of run {values.get('run')!r}, and this replica is of run "
            f"{run!r}: give both the same run, or each run its own record"
        )
    try:
        return _view(values)
    except (TypeError, KeyError, ValueError):
        raise ValueError(
            f"the registry's record of run {run!r} is damaged: {_start(record)}"
        ) from None


def _view(values: Mapping[str, Any]) -> View:
    members = tuple([Member(*one) for one in values["members"]])
    lists = {name: tuple(values[name]) for name in ("joined", "left", "evicted")}
    base_members = tuple([(int(id), str(nonce)) for id, nonce in values["base_members"]])
    if values["phase"] not in (FORMING, OPEN) or not members:
        raise ValueError
    return View(**{**values, **lists, "members": members, "base_members": base_members})


def _listed(member: Member) -> list[Any]:
    return [getattr(member, one.name) for one in fields(Member)]


def _dumps(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _start(record: bytes) -> str:
    return repr(record[:40]) + ("..." if len(record) > 40 else "")
