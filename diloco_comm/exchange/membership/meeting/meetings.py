"""One meeting of replicas on a store: which came, whether they agree, and how the meeting ends.

Every participant posts a hello. What a participant says may come later: a replica that still
exchanges stops only when all are here. The lowest participant waits for all of that, draws an epoch
number that was never used, and proposes a plan that quotes every hello. The plan begins when every
participant has accepted it: a hello may lie on the store since its process died, and no participant
may wait for a dead process to connect. A participant renews its hello while it waits, so that the
others know by its beat that it lives.

A meeting has one fate, which is set once, by compare-and-set: its plan begins, or it has failed,
with the same error for all that took part. Before it accepts, a participant tries to reach all the
others, so that a cut between two of them is known before anybody connects.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist

from .... import _C
from ....base import extension
from ....base.errors import LeftBehind, SyncError, difference
from ..plans import Plan, current_group, number_is_taken, propose_plan
from ..stores import decide_once, read_known, swap
from ..verdicts import WAY_BACK
from .attendance import Attendance

BEAT_S = 0.4
# For an answer of a peer's host: a lost packet is sent again after one second.
_REACH_S = 2.0

_log = logging.getLogger(__name__)

# Called with whether all members are here; returns None while it is too early to say anything.
Say = Callable[[bool], dict[str, Any] | None]


def arrive(store: dist.Store, key: str, hello: dict[str, Any]) -> str:
    """Post a hello; return the nonce of the hello that was there before, "" without one."""
    text, held = json.dumps(hello), ""
    while (seen := swap(store, key, held, text)) != text:
        held = seen
    return str(json.loads(held)["nonce"]) if held else ""


def leave(store: dist.Store, key: str, hello: dict[str, Any]) -> None:
    """Take back a hello as it was posted last; that of another process stays."""
    swap(store, key, json.dumps(hello), "")


def open_meeting(store: dist.Store, members: Sequence[int]) -> str:
    """Return the name of the meeting of these members that has no fate yet."""
    names = hashlib.blake2b(json.dumps(list(members)).encode(), digest_size=8).hexdigest()
    key, fresh = f"meeting/{names}", uuid.uuid4().hex
    current = decide_once(store, key, fresh)
    while current != fresh and store.check([f"fate/{current}"]):
        current = swap(store, key, current, fresh)
    return current


def make_room(store: dist.Store, members: Sequence[int]) -> None:
    """Make a key for the hello of each member, so that all can be read in one call."""
    keys = [f"hello/{member}" for member in members]
    if not store.check(keys):
        for key in keys:
            decide_once(store, key, "")


class Meeting:
    """A meeting as one participant sees it, and what this participant does in it.

    Args:
        found: Nonce of the hello that this participant's hello has replaced, "" without one.

    Attributes:
        difference: The first thing that the live participants do not agree on, as a sentence.
        differs_since: When it was first seen, or None.
    """

    def __init__(
        self,
        store: dist.Store,
        members: Sequence[int],
        hello: dict[str, Any],
        say: Say,
        attendance: Attendance,
        found: str = "",
    ) -> None:
        self._say, self._found = say, found
        self._began = time.monotonic()
        self.store, self.members, self.hello = store, members, hello
        self.attendance, self.replica = attendance, attendance.replica
        self.difference = ""
        self.differs_since: float | None = None
        self._next_beat = time.monotonic() + BEAT_S
        self._complete_since: float | None = None
        self._hellos: dict[int, dict[str, Any]] = {}
        self._accepted: dict[str, Any] = {}
        self._reached: frozenset[int] = frozenset()
        self._proposed: dict[int, str] = {}
        self._proposal = ""
        self._known_answers: set[str] = set()
        self._runs_since: float | None = None
        self._next_glance = 0.0
        self._left_since: float | None = None
        self._has_warned = False

    # ------------------------------------------------------------------------- the fate

    def begun_plan(self) -> Plan | None:
        """Accept the plan that quotes the own hello; return the plan once all have accepted it.

        Raises:
            LeftBehind, SyncError: If the meeting has failed, or began without this replica.
        """
        self._accept()
        key = f"fate/{self.hello['meeting']}"
        if not self.store.check([key]):
            return None
        return self._follow(json.loads(self.store.get(key)))

    def _accept(self) -> None:
        # The process whose hello was found here may live, and renews its hello then.
        if self._found and time.monotonic() - self._began < 3 * BEAT_S:
            return
        key = f"plan/{self.hello['nonce']}"
        if not self.store.check([key]):
            return
        plan = json.loads(self.store.get(key))
        if plan["id"] == self._accepted.get("id"):
            return
        self._accepted = plan
        others = {int(r): i["address"] for r, i in plan["infos"].items() if int(r) != self.replica}
        if plan["infos"][str(self.replica)].get("proxied"):
            # A proxy dials, and the link says what the proxy answers: this process does not judge
            # the ways now, nor test them in training.
            reached = {replica: True for replica, address in others.items() if address}
        else:
            # Meanwhile the own hello is not renewed.
            limit = min(_REACH_S, self.attendance.limits.silence / 4)
            answers = zip(others, _C.are_reached(list(others.values()), limit), strict=True)
            # A way that could not be tried is not judged.
            reached = {replica: answer for replica, answer in answers if answer is not None}
            self._reached = frozenset(replica for replica, answer in reached.items() if answer)
        self.store.set(f"accepted/{plan['id']}/{self.replica}", json.dumps(reached))

    def _decide(self, fate: dict[str, Any]) -> None:
        decide_once(self.store, f"fate/{self.hello['meeting']}", json.dumps(fate))

    def _follow(self, fate: dict[str, Any]) -> Plan:
        if "why" not in fate:
            plan = self._accepted
            if plan.get("id") == fate["plan"]:
                infos = {int(r): i for r, i in plan["infos"].items()}
                return Plan(plan["epoch"], infos, plan["id"], self._reached)
            raise LeftBehind(
                f"another process took the place of replica {self.replica} in epoch "
                f"{fate['epoch']}, while this process was silent: end this process, or let it "
                "close this DiLoCo and come as a newcomer with a number of its own, by a new "
                'DiLoCo with init="join"',
                stage="rendezvous",
                went_on_in=fate["epoch"],
            )
        is_silent = self.replica in fate["missing"] and not fate["cuts"]
        kind: type[SyncError] = LeftBehind if is_silent else SyncError
        why = fate["why"]
        if is_silent:
            why += f"; replica {self.replica} {WAY_BACK}"
        error = kind(
            why,
            stage="rendezvous",
            missing=fate["missing"],
            survivors=fate["survivors"],
            cuts=fate["cuts"],
        )
        error.decision = self.hello["meeting"]
        raise error

    def give_up_if_time(self) -> None:
        """Let the meeting fail for all when somebody is not waited for any longer."""
        self._refuse_if_long_left_behind()
        reasons = self.attendance.given_up()
        if not reasons and not self.attendance.is_over:
            return
        self._refuse_if_left_behind(set(reasons))
        by_reason: dict[str, list[int]] = {}
        for replica, reason in reasons.items():
            by_reason.setdefault(reason, []).append(replica)
        text = ", ".join(f"{who} {reason}" for reason, who in by_reason.items())
        why = f"replicas {list(self.members)} were to form a group, but "
        self._decide(self._failure(why + (text or "did not agree on a plan in time"), reasons))

    def _failure(
        self, why: str, missing: Collection[int], cuts: Sequence[Any] = ()
    ) -> dict[str, Any]:
        newcomers = {r for r, hello in self._hellos.items() if (hello["info"] or {}).get("join")}
        survivors = [r for r in self.members if r not in missing and r not in newcomers]
        return {"why": why, "missing": list(missing), "survivors": survivors, "cuts": list(cuts)}

    def _refuse_if_long_left_behind(self) -> None:
        """Raise when another group has begun for some time, and none of its members comes here.

        Members of that group may come all the same: a change that takes this replica back.
        """
        now = self.attendance.time.total
        if now < self._next_glance:
            return
        self._next_glance = now + BEAT_S
        members = self._group_without_this_replica()[1]
        if not members or self.attendance.heard & set(members):
            self._left_since = None
            return
        if self._left_since is None:
            self._left_since = now
        if now - self._left_since >= self.attendance.limits.silence / 3:
            self._refuse_if_left_behind(set(members))

    def _group_without_this_replica(self) -> tuple[int, list[int]]:
        """Return a later epoch that has begun without this replica, and its members; else 0."""
        epoch, members = current_group(self.store)
        is_later = 0 < self.hello["epoch"] < epoch and self.replica not in members
        return (epoch, members) if is_later else (0, [])

    def _refuse_if_left_behind(self, missing: set[int]) -> None:
        epoch, members = self._group_without_this_replica()
        if missing & set(members):
            raise LeftBehind(
                f"the group of replicas {list(members)} went on in epoch {epoch} without replica "
                f"{self.replica}, which {WAY_BACK}",
                stage="rendezvous",
                missing=[self.replica],
                survivors=members,
                went_on_in=epoch,
            )

    # ------------------------------------------------------------------------- the others

    def look(self) -> bool:
        """Read the others' hellos, renew the own one, and lead if this replica is the lowest.

        Returns:
            Whether the next look may soon see more: everybody's hello has just come.
        """
        # Each answer of the store shows that this process has not stood still.
        self.attendance.time.tick()
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self.hello["beat"] += 1
            self.store.set(f"hello/{self.replica}", json.dumps(self.hello))
        self.attendance.time.tick()
        self._hellos = hellos = _read_hellos(self.store, self.members)
        self._keep_place(hellos)
        self.attendance.see({r: (hello["nonce"], hello["beat"]) for r, hello in hellos.items()})
        heard = {*self.attendance.heard, self.replica}
        self.difference = _find_difference({r: h for r, h in hellos.items() if r in heard})
        self.differs_since = None if not self.difference else self.differs_since or now
        is_complete = len(hellos) == len(self.members) and not _find_difference(hellos)
        is_complete = is_complete and len({h["meeting"] for h in hellos.values()}) == 1
        self._complete_since = (self._complete_since or now) if is_complete else None
        if is_complete and self.hello["info"] is None:
            self._speak()
        has_all = all(hello["info"] is not None for hello in hellos.values())
        if is_complete and has_all and self.replica == self.members[0]:
            self._lead(hellos)
        return self._complete_since is not None and now - self._complete_since < BEAT_S

    def _keep_place(self, hellos: dict[int, dict[str, Any]]) -> None:
        """Of two processes with one number, let the first stay and the second go.

        Raises:
            SyncError: If this process is the second one.
        """
        own = hellos.get(self.replica, self.hello)
        if own["nonce"] == self.hello["nonce"]:
            return
        if own["nonce"] == self._found:
            raise number_is_taken(self.replica, own.get("place", ""))
        hellos[self.replica] = json.loads(json.dumps(self.hello))
        self._next_beat = 0.0

    def members_here(self) -> list[int]:
        """Return the others at this meeting that come from a group."""
        heard = self.attendance.heard
        # The hello of another handshake may not say where its sender comes from.
        return [r for r, hello in self._hellos.items() if r in heard and hello.get("is_member")]

    def has_run_long(self, rises: bool) -> bool:
        """Note whether a group's counters rise now; return whether they have for long."""
        now, limits = self.attendance.time.total, self.attendance.limits
        if not rises:
            self._runs_since = None
        elif self._runs_since is None:
            self._runs_since = now
        patience = min(limits.silence, limits.timeout / 2)
        return self._runs_since is not None and now - self._runs_since >= patience

    def warn_once(self, text: str) -> None:
        """Log what may become an error."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s", text)

    def _speak(self) -> None:
        """Say to the others what they wait for, if it is time."""
        self.hello["info"] = self._say(True)
        if self.hello["info"] is not None:
            self.store.set(f"hello/{self.replica}", json.dumps(self.hello))
            self._complete_since = time.monotonic()

    def _lead(self, hellos: dict[int, dict[str, Any]]) -> None:
        """Propose a plan; let it begin when all whose hellos it quotes have accepted it."""
        nonces = {r: hello["nonce"] for r, hello in hellos.items()}
        if nonces != self._proposed:
            self._proposed = nonces
            self._proposal = propose_plan(self.store, hellos)
            return
        # A hello may be that of a dead process: it never accepts, and its successor's is another.
        keys = {r: f"accepted/{self._proposal}/{r}" for r in self.members}
        texts = read_known(self.store, list(keys.values()), self._known_answers)
        answers = {r: texts[key] for r, key in keys.items() if key in texts}
        for replica in answers:
            self.attendance.hear(replica)
        if len(answers) < len(self.members):
            return
        if cuts := _find_cuts({r: json.loads(answer) for r, answer in answers.items()}):
            whole = _C.largest_reaching(list(self.members), cuts)
            why = (
                f"replicas {list(self.members)} cannot form a group: {_C.describe_cuts(cuts)}; "
                f"replicas {whole} can"
            )
            missing = [r for r in self.members if r not in whole]
            self._decide(self._failure(why, missing, cuts))
            return
        self._decide({"plan": self._proposal, "epoch": self._accepted["epoch"]})

    def waiting_for(self, where: str) -> str:
        """Name the members that are waited for, and where; empty when all are here."""
        who = self.attendance.describe()
        return who and f"{who} at {where}"


def _find_cuts(reached: dict[int, dict[str, bool]]) -> list[tuple[int, int]]:
    """Return the pairs of replicas that could not reach each other, in either direction.

    Args:
        reached: Of each replica, whether it reached each other one; a firewall may let connections
            through in one direction alone.
    """
    cuts = []
    for a in sorted(reached):
        for b in sorted(replica for replica in reached if replica > a):
            answers = {reached[a].get(str(b)), reached[b].get(str(a))}
            if False in answers and True not in answers:
                cuts.append((a, b))
    return cuts


def _read_hellos(store: dist.Store, members: Sequence[int]) -> dict[int, dict[str, Any]]:
    # The keys exist, see ``make_room``; hellos are blanked, never deleted.
    texts = store.multi_get([f"hello/{member}" for member in members])
    return {r: json.loads(text) for r, text in zip(members, texts, strict=True) if text}


def _find_version(hellos: dict[int, dict[str, Any]]) -> str:
    """Say which versions speak other handshakes, as one sentence; empty if all speak the same."""
    spoken: dict[str, list[int]] = {}
    numbers = set()
    for replica, hello in sorted(hellos.items()):
        # The first handshake had no numbers, nor the names of versions.
        number = hello["settings"].get(extension.HANDSHAKE_NAME, 1)
        numbers.add(number)
        name = f"{hello.get('version', 'a version before 0.2')} (handshake {number})"
        spoken.setdefault(name, []).append(replica)
    if len(numbers) < 2:
        return ""
    return f"{difference('diloco_comm', spoken)}: install the same version on all replicas"


def _find_difference(hellos: dict[int, dict[str, Any]]) -> str:
    """Name the first thing that is not equal on all, as one sentence; empty if all is equal."""
    if found := _find_version(hellos):
        return found
    names = sorted({name for hello in hellos.values() for name in hello["settings"]})
    # With other collectives there are other settings, too.
    for name in ("members", "collectives", *names):
        values: dict[str, list[int]] = {}
        for replica, hello in sorted(hellos.items()):
            value = hello["members"] if name == "members" else hello["settings"].get(name)
            values.setdefault(json.dumps(value), []).append(replica)
        if len(values) > 1:
            return difference(name, values)
    return ""
