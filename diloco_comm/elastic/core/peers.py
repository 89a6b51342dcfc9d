"""Which other processes live, by this process's own polls: no two clocks are compared.

A suspicion may be wrong. It only decides for whom this process waits; who trains with whom is
decided in the registry.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..beats import FINISHED, GONE, Beat
from ..views import Key
from .state import Peer, State


def look(state: State, beats: Iterable[Beat], is_late: bool) -> tuple[Peer, ...]:
    """Return the peers as they are after a poll.

    Args:
        is_late: This process stood still: a counter that did not rise says nothing.
    """
    counters = {beat.member.key: beat.counter for beat in beats}
    known = {peer.key: peer for peer in state.peers}
    view = state.recorded
    keys = set(counters)
    if view is not None:
        keys |= {*view.keys, *view.base_members}
    keys.discard(state.key)
    limit = state.settings.suspect_after
    return tuple(sorted(_look(known.get(k), k, counters.get(k, -1), is_late, limit) for k in keys))


def _look(peer: Peer | None, key: Key, counter: int, is_late: bool, limit: int) -> Peer:
    if peer is None:
        return Peer(key, counter)
    if counter not in (peer.counter, -1):
        # A beat where there was none has come since the last poll.
        return Peer(key, counter, 0, True)
    silent = peer.silent_polls + (not is_late)
    return Peer(key, peer.counter, min(silent, limit), peer.is_heard)


def newly_suspected(state: State, peers: tuple[Peer, ...]) -> tuple[int, ...]:
    """Return the ids of members of the recorded view that are suspected since ``peers`` is so."""
    view, limit = state.recorded, state.settings.suspect_after
    members = set() if view is None else {*view.keys, *view.base_members}
    before = {peer.key for peer in state.peers if peer.silent_polls >= limit}
    now = {peer.key for peer in peers if peer.silent_polls >= limit}
    return tuple(sorted({id for id, nonce in (now - before) & members}))


class Roster:
    """All processes as one poll shows them.

    Attributes:
        beats: The last of each process; the own one is as it is now.
    """

    def __init__(self, state: State, own: Beat, beats: Iterable[Beat]) -> None:
        self.beats: dict[Key, Beat] = {beat.member.key: beat for beat in beats}
        self.beats[state.key] = own
        self._own = state.key
        self._peers = {peer.key: peer for peer in state.peers}
        self._limit = state.settings.suspect_after
        self._unheard, self._unheard_limit = state.unheard, state.settings.unheard_after

    def may_live(self, key: Key) -> bool:
        """Whether a process is neither suspected nor gone, though it may never have been heard."""
        if key == self._own:
            return True
        peer, beat = self._peers.get(key), self.beats.get(key)
        has_ended = beat is not None and beat.stage in (GONE, FINISHED)
        limit = self._limit
        if key[1] in self._unheard and self._unheard_limit:
            # That its connection broke says the same: two signs make a short wait enough.
            limit = min(limit, self._unheard_limit)
        return peer is not None and peer.silent_polls < limit and not has_ended

    def lives(self, key: Key) -> bool:
        """Whether a process was heard lately."""
        is_heard = key == self._own or (key in self.beats and self._peers[key].is_heard)
        return self.may_live(key) and is_heard

    def alive(self) -> list[Beat]:
        return [beat for key, beat in sorted(self.beats.items()) if self.lives(key)]
