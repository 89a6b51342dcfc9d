"""Agree through a store on who takes part in the next epoch, and build its groups.

Every participant posts a hello; the lowest one waits for all, draws an epoch number that was never
used, and proposes a plan that quotes every hello. The plan begins when everybody has accepted it: a
hello may lie on the store since its process died, and nobody must wait for that one to connect. A
participant renews its hello while it waits, so that the others can tell a live one by its beat.
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
_BEAT_S = 0.4


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
        "beat": 0,
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
    meeting = _Meeting(store, replica, members, hello)
    pause = _POLL_S[0]
    while True:
        plan = meeting.accepted_plan()
        if plan is not None:
            return plan
        has_news = meeting.look()
        now = time.monotonic()
        if meeting.differs_since is not None and now - meeting.differs_since > _MISMATCH_PATIENCE_S:
            # Our hello stays until the others have seen the difference as long as we have.
            time.sleep(_BEAT_S + 4 * _POLL_S[1])
            raise ReplicaMismatch(meeting.difference, stage="rendezvous")
        if now > deadline:
            missing = sorted(set(members) - meeting.alive - {replica})
            raise SyncError(
                f"replicas {list(members)} were to form a group, but "
                + (f"{missing} did not come" if missing else "did not agree on a plan in time"),
                stage="rendezvous",
                missing=missing,
            )
        pause = _POLL_S[0] if has_news else min(2 * pause, _POLL_S[1])
        time.sleep(pause)


class _Meeting:
    """What one participant has seen of the others, and done about it.

    Attributes:
        alive: Replicas whose hello was seen to beat, or that accepted a plan.
        difference: The first thing that those alive do not agree on, as a sentence.
        differs_since: When it was first seen, or None.
    """

    def __init__(
        self, store: dist.Store, replica: int, members: Sequence[int], hello: dict[str, Any]
    ) -> None:
        self.store, self.replica, self.members, self.hello = store, replica, members, hello
        self.alive: set[int] = set()
        self.difference = ""
        self.differs_since: float | None = None
        self._first_seen: dict[int, tuple[str, int]] = {}
        self._next_beat = time.monotonic() + _BEAT_S
        self._complete_since: float | None = None
        self._accepted = ""
        self._proposed: dict[int, str] = {}
        self._proposal = ""

    def accepted_plan(self) -> Plan | None:
        """Accept the plan that quotes our hello; return it once everybody has accepted it."""
        key = f"plan/{self.hello['nonce']}"
        if not self.store.check([key]):
            return None
        plan = json.loads(self.store.get(key))
        if plan["id"] != self._accepted:
            self._accepted = plan["id"]
            self.store.set(f"accepted/{plan['id']}/{self.replica}", "")
        if not self.store.check([f"go/{plan['id']}"]):
            return None
        return Plan(plan["epoch"], {int(r): i for r, i in plan["infos"].items()})

    def look(self) -> bool:
        """Read the others' hellos, renew ours, lead if we are the lowest.

        Returns:
            Whether the next look may soon see more: everybody's hello has just come.
        """
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_S
            self.hello["beat"] += 1
            self.store.set(f"hello/{self.replica}", json.dumps(self.hello))
        hellos = _read_hellos(self.store, self.members)
        for replica, hello in hellos.items():
            seen = hello["nonce"], hello["beat"]
            first = self._first_seen.setdefault(replica, seen)
            if first[0] != seen[0]:
                self._first_seen[replica] = seen
                self.alive.discard(replica)
            elif first != seen:
                self.alive.add(replica)
        self.alive &= hellos.keys()
        alive = {r: h for r, h in hellos.items() if r in self.alive or r == self.replica}
        self.difference = _find_difference(alive)
        self.differs_since = None if not self.difference else self.differs_since or now
        is_complete = len(hellos) == len(self.members) and not _find_difference(hellos)
        self._complete_since = (self._complete_since or now) if is_complete else None
        if is_complete and self.replica == self.members[0]:
            self._lead(hellos)
        return self._complete_since is not None and now - self._complete_since < _BEAT_S

    def _lead(self, hellos: dict[int, dict[str, Any]]) -> None:
        """Propose a plan; let it begin when all whose hellos it quotes have accepted it."""
        nonces = {r: hello["nonce"] for r, hello in hellos.items()}
        if nonces != self._proposed:
            self._proposed = nonces
            self._proposal = _propose_plan(self.store, hellos)
            return
        # A hello may be that of a dead process: it never accepts, and its successor's is another.
        keys = [f"accepted/{self._proposal}/{r}" for r in self.members]
        self.alive |= {
            r for r, key in zip(self.members, keys, strict=True) if self.store.check([key])
        }
        if self.alive.issuperset(self.members):
            self.store.set(f"go/{self._proposal}", "")


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


def _propose_plan(store: dist.Store, hellos: dict[int, dict[str, Any]]) -> str:
    """Tell everybody whose hello is here what the next epoch is; return the proposal's name."""
    # Never twice on one store, whoever used it before, and above everybody's: a new store counts
    # from the beginning.
    newest = max(hello["epoch"] for hello in hellos.values())
    epoch = store.add("epochs", 1)
    if epoch <= newest:
        epoch = store.add("epochs", newest - epoch + 1)
    name = uuid.uuid4().hex
    infos = {r: hello["info"] for r, hello in hellos.items()}
    plan = json.dumps({"id": name, "epoch": epoch, "infos": infos})
    for hello in hellos.values():
        store.set(f"plan/{hello['nonce']}", plan)
    return name


def build_groups(
    store: dist.Store, epoch: int, rank: int, size: int, lanes: int, timeout: float
) -> list[dist.ProcessGroupGloo]:
    """Connect the groups of an epoch, two for each lane, named by number.

    Raises:
        SyncError: If a peer did not connect in time.
    """
    name = f"the groups of epoch {epoch}"
    prefixes = [dist.PrefixStore(f"{epoch}/{number}", store) for number in range(2 * lanes)]
    return [connect(prefix, rank, size, timeout, name) for prefix in prefixes]


def connect(
    store: dist.Store, rank: int, size: int, timeout: float, name: str
) -> dist.ProcessGroupGloo:
    """Connect a gloo group of our own.

    gloo binds to GLOO_SOCKET_IFNAME, else to the host's address, else to loopback.

    Args:
        store: Under a prefix of this group.
        timeout: Seconds, to connect and of each collective.
        name: For the error.

    Raises:
        SyncError: If a peer did not connect in time.
    """
    started = time.monotonic()
    try:
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    except RuntimeError as error:
        raise SyncError(
            f"{name} could not be connected: {error}",
            stage="connect",
            seconds=time.monotonic() - started,
        ) from error
