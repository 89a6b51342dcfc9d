"""Which other processes live, by this process's own polls: no two clocks are compared.

A suspicion may be wrong. It only decides for whom this process waits; who trains with whom is
decided in the registry.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..beats import FINISHED, GONE, Beat
from ..views import Key
from .events import Polled
from .state import Peer, Settings, State


def look(state: State, polled: Polled) -> tuple[Peer, ...]:
    """Return the peers as they are after a poll."""
    counters = {beat.member.key: beat.counter for beat in polled.beats}
    known = {peer.key: peer for peer in state.peers}
    view = state.recorded
    keys = set(counters)
    if view is not None:
        keys |= {*view.keys, *view.base_members}
    keys.discard(state.key)
    limit = max(state.settings.suspect_after, state.settings.busy_after)
    return tuple(sorted(_look(known.get(k), k, counters.get(k, -1), polled, limit) for k in keys))


def _look(peer: Peer | None, key: Key, counter: int, polled: Polled, limit: int) -> Peer:
    if peer is None:
        return Peer(key, counter)
    if counter not in (peer.counter, -1):
        # A beat where there was none has come since the last poll.
        return Peer(key, counter, 0, True)
    # Where this process stood still, a counter that did not rise says nothing.
    silent = peer.silent_polls + (not polled.is_late)
    is_busy = key[1] in polled.heard
    is_ended = key[1] in polled.ended and not is_busy
    return Peer(key, peer.counter, min(silent, limit), peer.is_heard, is_ended, is_busy)


def is_dead(peer: Peer, state: State) -> bool:
    """Whether a process beats no more, and its host says that it has ended."""
    limit = state.settings.ended_after
    return peer.is_ended and 0 < limit <= peer.silent_polls


def _is_suspected(peer: Peer, settings: Settings) -> bool:
    """Whether a process has not beaten for too long: busy ones have more time."""
    limit = settings.suspect_after
    if peer.is_busy:
        limit = max(limit, settings.busy_after)
    return peer.silent_polls >= limit


def newly_suspected(state: State, peers: tuple[Peer, ...]) -> tuple[int, ...]:
    """Return the ids of members of the recorded view that are suspected since ``peers`` is so."""
    view = state.recorded
    members = set() if view is None else {*view.keys, *view.base_members}
    now, before = _suspected(state, peers), _suspected(state, state.peers)
    return tuple(sorted({id for id, nonce in (now - before) & members}))


def silent_members(state: State) -> tuple[int, ...]:
    """Return the ids of members of the recorded view that are suspected."""
    view, silent = state.recorded, _suspected(state, state.peers)
    return () if view is None else tuple(id for id, nonce in view.keys if (id, nonce) in silent)


def _suspected(state: State, peers: Iterable[Peer]) -> set[Key]:
    settings = state.settings
    return {p.key for p in peers if _is_suspected(p, settings) or is_dead(p, state)}


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
        self._settings, self._unheard = state.settings, state.unheard
        self._dead = {peer.key for peer in state.peers if is_dead(peer, state)}

    def has_died(self, key: Key) -> bool:
        """Whether a process has ended without a word; see ``is_dead``."""
        beat = self.beats.get(key)
        has_ended = beat is not None and beat.stage in (GONE, FINISHED)
        return key in self._dead and not has_ended

    def may_live(self, key: Key) -> bool:
        """Whether a process is neither suspected nor gone, though it may never have been heard."""
        if key == self._own:
            return True
        peer, beat = self._peers.get(key), self.beats.get(key)
        has_ended = beat is not None and beat.stage in (GONE, FINISHED)
        if peer is None or has_ended or key in self._dead:
            return False
        if key[1] in self._unheard and not peer.is_busy:
            # That its connection broke says the same: two signs make a short wait enough.
            limit = self._settings.unheard_after
            if 0 < limit <= peer.silent_polls:
                return False
        return not _is_suspected(peer, self._settings)

    def lives(self, key: Key) -> bool:
        """Whether a process was heard lately."""
        is_heard = key == self._own or (key in self.beats and self._peers[key].is_heard)
        return self.may_live(key) and is_heard

    def alive(self) -> list[Beat]:
        return [beat for key, beat in sorted(self.beats.items()) if self.lives(key)]
