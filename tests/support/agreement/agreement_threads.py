"""The training thread of a process, as small as it can be: it votes, hears votes and applies.

Rounds of a stream have absolute positions. A round is applied when all members of the record have
voted for it and all rounds before have ended; what was applied is kept as a hash of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diloco_comm.group.records import Key, Record
from diloco_comm.group.streams import Positions, Rounds

# Rounds of one stream that may be under way.
WINDOW = 2


@dataclass(frozen=True)
class Thread:
    """The training thread of one process.

    Attributes:
        epoch: Hash of the record in which it trains; b"" for none.
        ends: By stream, the position of the round that it votes for next.
        done: By stream, the position up to which everything has ended here.
        history: By stream, a hash of all that was applied.
        recent: (stream, position) of the last applied rounds.
        heard: (stream, position, nonce) of votes of others.
        flagged: (stream, position) of rounds in whose headers somebody asks for a boundary.
        last: The round after which all members stop.
        first_step: Inner step of the checkpoint with which the run began.
    """

    epoch: bytes = b""
    members: tuple[Key, ...] = ()
    ends: tuple[int, ...] = ()
    done: tuple[int, ...] = ()
    history: tuple[int, ...] = ()
    recent: frozenset[tuple[int, int]] = frozenset()
    heard: frozenset[tuple[int, int, bytes]] = frozenset()
    flagged: frozenset[tuple[int, int]] = frozenset()
    has_state: bool = False
    is_pending: bool = False
    is_sealed: bool = False
    last: tuple[int, int] | None = None
    is_told: bool = False
    first_step: int = 0

    @property
    def trains(self) -> bool:
        return bool(self.epoch) and self.has_state and not self.is_sealed

    @property
    def can_vote(self) -> tuple[int, ...]:
        """The streams in which this thread may vote for another round."""
        if not self.trains or self.last is not None:
            return ()
        streams = range(len(self.ends))
        return tuple([s for s in streams if self.ends[s] < self.done[s] + WINDOW])

    def voted(self, stream: int) -> Thread:
        """Return the thread after its next vote in a stream."""
        flagged = self.flagged | {(stream, self.ends[stream])} if self.is_pending else self.flagged
        return replace(self, ends=put(self.ends, stream, self.ends[stream] + 1), flagged=flagged)

    def hears(self, stream: int, position: int, nonce: bytes, is_flagged: bool) -> Thread:
        flagged = self.flagged | {(stream, position)} if is_flagged else self.flagged
        return replace(self, heard=self.heard | {(stream, position, nonce)}, flagged=flagged)

    def can_apply(self, stream: int, nonce: bytes) -> bool:
        """Whether all members have voted for the next round of a stream."""
        position = self.done[stream]
        if not self.trains or position >= self.ends[stream]:
            return False
        others = [key.nonce for key in self.members if key.nonce != nonce]
        return all((stream, position, other) in self.heard for other in others)

    def applied(self, stream: int) -> Thread:
        """Return the thread after it has applied the next round of a stream."""
        position = self.done[stream]
        thread = self._with(stream, position, counts=True)
        if (stream, position) in self.flagged and self.last is None:
            thread = replace(thread, last=(stream, position))
        return thread

    def _with(self, stream: int, position: int, *, counts: bool) -> Thread:
        thread = replace(self, done=put(self.done, stream, position + 1))
        if not counts:
            return thread
        history = hash((self.history[stream], stream, position))
        oldest = position - 2 * WINDOW
        recent = {one for one in self.recent if one[0] != stream or one[1] > oldest}
        return replace(
            thread,
            history=put(self.history, stream, history),
            recent=frozenset(recent | {(stream, position)}),
        )

    @property
    def has_all_votes(self) -> bool:
        """Whether all rounds that this thread has sent have ended, and all count."""
        return self.done == self.ends

    @property
    def positions(self) -> Positions:
        """How far this thread is, as it says when it has sealed."""
        return tuple([self._rounds(stream) for stream in range(len(self.ends))])

    def _rounds(self, stream: int) -> Rounds:
        first = max(0, self.done[stream] - WINDOW)
        bits = sum(
            1 << position - first
            for position in range(first, self.ends[stream])
            if position >= self.done[stream] or (stream, position) in self.recent
        )
        return Rounds(first, self.ends[stream] - first, bits)

    def settled(self, record: Record) -> Thread:
        """Return the thread after it has done what a record decides."""
        thread = self
        for stream, rounds in enumerate(record.decision):
            while thread.done[stream] < rounds.end:
                position = thread.done[stream]
                thread = thread._with(stream, position, counts=rounds.holds(position))
        return thread

    def entered(self, record: Record) -> Thread:
        """Return the thread as it begins to train in a record, with its present state."""
        return Thread(
            epoch=record.hash,
            members=record.members,
            ends=self.done,
            done=self.done,
            history=self.history,
            recent=self.recent,
            has_state=self.has_state,
            first_step=self.first_step,
        )


def put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
