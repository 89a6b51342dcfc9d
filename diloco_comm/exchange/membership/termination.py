"""Decide what becomes of the rounds that a change of the group has broken off.

Every replica that goes on from the last group, a *survivor*, first seals: it stops its old
exchanges for good and then says, in its ``Ack``, how far it is with each round. An ack is a
promise: in all epochs so far this replica will never vote again, and never hear a vote again.
``decide`` is a function of the acks alone, so that all survivors come to the same end:

* some survivor has no vote in a round, or has seen a bad vote: the round is discarded;
* else the round is committed, also when none of the survivors has applied it.

No round that any replica, alive or dead, has applied is lost. A replica that applied a round had
the votes of all members, so all survivors had voted; and a replica votes only when it holds the
whole result. No discarded round is applied later: a replica that seals without a vote never gives
that vote, and after a bad vote no replica can have all votes and all of them good.

A survivor may have taken part in a change that failed half-way, and others may have entered the
group of that change meanwhile, with that decision. A group is entered only when all its members
have connected, and each of them notes it before (``Ack.epoch``): so the newest group that a
survivor knows of counts, and its members alone decide. Another replica may come back only if it
holds what they have. One line of groups is taken for granted: two parts of a group that each go on
alone have no common end, and are refused when they meet.

This module knows neither tensors nor stores; ``regroup`` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...base.errors import named
from ..round import Standing

_HELD = ("voted", "agreed", "applied")
_DONE = ("agreed", "applied")


@dataclass(frozen=True)
class Progress:
    """How far a replica is with one fragment.

    Attributes:
        last: The last applied round, -1 for none. Rounds before it that ``rounds`` does not name
            are applied.
        rounds: The latest rounds by number: all that are voted or agreed on, and as many ended
            rounds as another replica may still hold.
    """

    last: int
    rounds: Mapping[int, Standing] = field(default_factory=dict)

    @property
    def resolved(self) -> int:
        """The round up to which everything has ended here."""
        held = [n for n, one in self.rounds.items() if one.state in ("voted", "agreed")]
        return min(held) - 1 if held else max([self.last, *self.rounds])

    def standing(self, number: int) -> Standing | None:
        """Return how far a round is; None: no vote. Epoch -1: applied, it is not known where."""
        if number in self.rounds:
            return self.rounds[number]
        return Standing("applied", -1) if number <= self.last else None


@dataclass(frozen=True)
class Ack:
    """How far a survivor is with its rounds; it gives and takes no more votes in these epochs.

    Attributes:
        epoch, members: The newest group that this replica has agreed to enter.
        applied_epoch: The newest epoch whose rounds its outer parameters hold, 0 for none.
        fragments: The progress of each fragment, by index. All survivors name the same fragments.
    """

    epoch: int
    members: tuple[int, ...]
    applied_epoch: int
    fragments: Mapping[int, Progress]


@dataclass(frozen=True)
class Commit:
    """A round that counts, and the survivors that must still apply it."""

    fragment: int
    round: int
    lacking: tuple[int, ...]


@dataclass(frozen=True)
class Refusal:
    """Why these replicas cannot go on together; ``missing`` stand in the way."""

    message: str
    missing: tuple[int, ...] = ()
    fragment: int = -1
    round: int = -1
    stage: str = "rendezvous"


@dataclass(frozen=True)
class Decision:
    """What all survivors do with the rounds of their former group.

    Attributes:
        commits: Rounds that count and that somebody has not applied, by fragment and number.
        discards: (fragment, round) that somebody holds and that never was.
        last: The last applied round of each fragment once the commits are applied.
        lineage: The newest epoch whose rounds are applied then.
        refusal: None, or why nothing was decided.
    """

    commits: tuple[Commit, ...] = ()
    discards: tuple[tuple[int, int], ...] = ()
    last: Mapping[int, int] = field(default_factory=dict)
    lineage: int = 0
    refusal: Refusal | None = None

    @property
    def changes_rounds(self) -> bool:
        """Whether some survivor holds a round that is not applied everywhere."""
        return bool(self.commits or self.discards)


class _Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def decide(acks: Mapping[int, Ack], most: int = 1) -> Decision:
    """Decide what counts, from the acks of all survivors.

    Args:
        acks: By replica; newcomers have none.
        most: Rounds of one fragment that may be under way at a time.
    """
    if not acks:
        return Decision()
    newest = max(acks.values(), key=lambda ack: ack.epoch)
    electors = sorted(acks.keys() & set(newest.members))
    fragments = sorted({fragment for ack in acks.values() for fragment in ack.fragments})
    commits: list[Commit] = []
    discards: list[tuple[int, int]] = []
    last: dict[int, int] = {}
    epochs = {replica: ack.applied_epoch for replica, ack in acks.items()}
    try:
        for fragment in fragments:
            one = _Fragment(fragment, acks, electors, most, epochs)
            one.decide()
            commits += one.commits
            discards += [(fragment, number) for number in one.discards]
            last[fragment] = one.last
        lineage = max(epochs[replica] for replica in electors)
        _refuse_other_lines(epochs, lineage)
    except _Refused as refused:
        return Decision(refusal=refused.refusal)
    return Decision(tuple(commits), tuple(discards), last, lineage)


def _refuse_other_lines(epochs: Mapping[int, int], lineage: int) -> None:
    """Refuse replicas that hold as many rounds as the electors, but other rounds.

    With one line of groups there is no such replica. Where two parts of a group have gone on, each
    alone, both may have a round of one number, and acks do not name all rounds. But an epoch has
    one group, and all members enter it with the same rounds: so replicas that are at the same
    round, and hold no round of a newer epoch, hold the same rounds.
    """
    others = sorted(replica for replica, epoch in epochs.items() if epoch != lineage)
    if others:
        text = (
            f"{named(others)} went on apart from the others, who have applied rounds of epoch "
            f"{lineage} last: let {'it' if len(others) == 1 else 'them'} join anew"
        )
        raise _Refused(Refusal(text, tuple(others)))


class _Fragment:
    """Decides which rounds of one fragment count, and which are discarded.

    Args:
        electors: The survivors whose state counts.
        most: Rounds of a fragment that may be under way at a time.

    Attributes:
        epochs: By replica, the newest epoch whose rounds that replica will hold. All fragments
            share this mapping; each adds the rounds that it commits.
    """

    def __init__(
        self,
        fragment: int,
        acks: Mapping[int, Ack],
        electors: Sequence[int],
        most: int,
        epochs: dict[int, int],
    ) -> None:
        lacking = [r for r, ack in sorted(acks.items()) if fragment not in ack.fragments]
        if lacking:
            text = f"replicas {lacking} gave no last round of fragment {fragment}"
            raise _Refused(Refusal(text, tuple(lacking), fragment))
        self.fragment, self.most = fragment, most
        self.views = {r: ack.fragments[fragment] for r, ack in sorted(acks.items())}
        self.electors, self.epochs = electors, epochs
        self.commits: list[Commit] = []
        self.discards: list[int] = []
        self.last = max(self.views[r].last for r in electors)

    def decide(self) -> None:
        self._refuse_far()
        first = min(view.resolved for view in self.views.values()) + 1
        top = max(max([view.last, *view.rounds]) for view in self.views.values())
        for number in range(first, top + 1):
            self._decide_round(number)
        self._refuse_unequal()

    def _decide_round(self, number: int) -> None:
        standings = {r: view.standing(number) for r, view in self.views.items()}
        known = [one for r in self.electors if (one := standings[r]) is not None]
        # Rounds of several epochs may have one number: the newest of them is meant.
        epoch = max([one.epoch for one in known if one.state in _HELD], default=-1)
        holds = {
            r: one is not None and one.state in _HELD and one.epoch in (epoch, -1)
            for r, one in standings.items()
        }
        is_done = any(one.state in _DONE for one in known)
        # The vote of a dead replica that no survivor has heard may have been a bad one. The round
        # counts all the same: what is not finite is encoded as zero, with its block where blocks
        # share a scale, so that the result is finite, and it is equal on all survivors.
        # Rounds of a fragment count in their order: after a gap there is nothing to go on from.
        is_open = bool(self.discards) or not all(holds[r] for r in self.electors)
        if is_open and not is_done:
            states = [one.state for one in standings.values() if one is not None]
            self.discards += [number] if {"voted", "agreed"} & set(states) else []
            return
        self._refuse_lacking(number, [r for r, is_held in holds.items() if not is_held])
        lacking = [r for r, one in standings.items() if one is not None and one.state != "applied"]
        if lacking:
            self.commits.append(Commit(self.fragment, number, tuple(lacking)))
            self.epochs.update({r: max(self.epochs[r], epoch) for r in lacking})
        self.last = max(self.last, number)

    def _refuse_far(self) -> None:
        """Name all replicas that are too far behind at once, not one after another."""
        far = {r: v.last for r, v in self.views.items() if v.resolved < self.last - self.most - 1}
        if far:
            self._refuse_behind(far)

    def _refuse_lacking(self, number: int, lacking: Sequence[int]) -> None:
        far = {r: self.views[r].last for r in lacking}
        far = {r: last for r, last in far.items() if last < self.last - self.most}
        if far:
            self._refuse_behind(far)
        if not lacking:
            return
        lacks, has, it = ("lacks", "has", "it") if len(lacking) == 1 else ("lack", "have", "them")
        text = (
            f"{named(lacking)} {lacks} round {number} of fragment {self.fragment}, which others "
            f"have applied, and {has} not voted for it: let {it} join anew"
        )
        raise _Refused(Refusal(text, tuple(lacking), self.fragment, number, "repair"))

    def _refuse_behind(self, far: Mapping[int, int]) -> None:
        text = (
            f"fragment {self.fragment}: the group is at round {self.last}, but "
            + ", ".join(f"replica {r} at {number}" for r, number in sorted(far.items()))
            + f"; at most {self.most} missing can be repaired: let it join anew"
        )
        raise _Refused(Refusal(text, tuple(sorted(far)), self.fragment, self.last))

    def _refuse_unequal(self) -> None:
        """Refuse replicas that would end at another round, whatever the acks left out."""
        applied = {r: view.last for r, view in self.views.items()}
        for commit in self.commits:
            for replica in commit.lacking:
                applied[replica] = max(applied[replica], commit.round)
        self._refuse_lacking(self.last, [r for r, last in applied.items() if last < self.last])
        # An agreed round may be applied at any time, whatever is decided here.
        for replica, view in self.views.items():
            agreed = [n for n, one in view.rounds.items() if one.state == "agreed"]
            applied[replica] = max([applied[replica], *agreed])
        ahead = [r for r, last in applied.items() if last > self.last]
        if ahead:
            it = "it" if len(ahead) == 1 else "them"
            text = (
                f"{named(ahead)} applied a round of fragment {self.fragment} beyond round "
                f"{self.last}, where the group is: let {it} join anew"
            )
            raise _Refused(Refusal(text, tuple(ahead), self.fragment, self.last))
