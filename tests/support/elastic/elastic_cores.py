"""The cores of the processes of the model: real ones, each state and each step looked at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from diloco_comm.elastic.beats import GONE, Beat
from diloco_comm.elastic.core import Settings, State, beat_of, start, step
from diloco_comm.elastic.core.events import Action, Event, Polled
from diloco_comm.elastic.views import Member, View

Step = Callable[[State, Event], tuple[State, tuple[Action, ...]]]


# Numbers of beats, and whether their counters have risen.
Heard = tuple[tuple[int, bool], ...]
# Nonces of processes that have ended, as their hosts say, and of those that the link hears.
Signs = tuple[tuple[str, ...], tuple[str, ...]]
# Number of the view, number of its base, and nonces: first that of the proposer.
Key = tuple[int, int, str]


def key_of(view: View) -> Key:
    """Return what a forming view and the open view that comes of it have in common.

    Within one history number and proposer are enough; an exploration has many.
    """
    key: Key | None = view.__dict__.get("key")
    if key is None:
        nonces = view.proposer + "".join(member.nonce for member in view.members)
        # It is asked for millions of times.
        key = view.__dict__["key"] = view.number, view.base, nonces
    return key


class Cores:
    """States of the core by number.

    Attributes:
        views: All that were formed, see ``key_of``.
    """

    def __init__(self, settings: Settings, step: Step = step, founding_wait: int = 4) -> None:
        self.settings = settings
        self.founding_wait = founding_wait
        self.views: dict[Key, View] = {}
        self._step = step
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._steps: dict[tuple[int, Event], tuple[int, tuple[Action, ...]]] = {}
        self._polls: dict[tuple[int, bytes, Heard, Signs], tuple[int, tuple[Action, ...]]] = {}
        self._beats: list[Beat] = []
        self._beat_numbers: dict[Beat, int] = {}
        self._beat_of: dict[int, int] = {}
        self._places: dict[Key, tuple[int, ...]] = {}

    def __getitem__(self, number: int) -> State:
        return self._states[number]

    def start(self, id: int, nonce: str) -> int:
        """Begin a process that waits for others before it founds a run."""
        member = Member(id, nonce, f"host{id}:1", 1, "same")
        return self._number(start(replace(self.settings, founding_wait=self.founding_wait), member))

    def with_settings(self, number: int) -> int:
        return self._number(replace(self[number], settings=self.settings))

    def step(self, number: int, event: Event) -> tuple[int, tuple[Action, ...]]:
        known = self._steps.get((number, event))
        if known is None:
            state, actions = self._step(self._states[number], event)
            known = self._steps[number, event] = self._number(state), actions
        return known

    def beat(self, number: int) -> int:
        """Return the number of what a process says of itself, with a counter that is none."""
        found = self._beat_of.get(number)
        if found is None:
            found = self._beat_of[number] = self._keep(beat_of(self[number], 0))
        return found

    def last_beat(self, number: int) -> int:
        """Return the number of what a process says that has ended by itself."""
        return self._keep(replace(beat_of(self[number], 0), stage=GONE))

    def _keep(self, beat: Beat) -> int:
        self._beats.append(beat)
        return self._beat_numbers.setdefault(beat, len(self._beats) - 1)

    def poll(
        self, number: int, record: bytes, beats: Heard, signs: Signs = ((), ())
    ) -> tuple[int, tuple[Action, ...]]:
        """Let a process poll.

        Args:
            beats: Numbers of beats, and whether the counter is another than it was.
            signs: See there.
        """
        key = number, record, beats, signs
        known = self._polls.get(key)
        if known is None:
            counters = {peer.key: peer.counter for peer in self[number].peers}
            heard = []
            for beat_number, is_fresh in beats:
                beat = self._beats[beat_number]
                last = counters.get(beat.member.key, -1)
                counter = (last + 1) % 2 if is_fresh else max(0, last)
                heard.append(replace(beat, counter=counter))
            polled = Polled(record, tuple(heard), False, *signs)
            known = self._polls[key] = self.step(number, polled)
        return known

    def _number(self, state: State) -> int:
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
        return number

    def know(self, view: View) -> None:
        self.views[key_of(view)] = view

    def places(self, view: View, slots: Sequence[Any]) -> tuple[int, ...]:
        """Return the slots of the members of a view."""
        found = self._places.get(key_of(view))
        if found is None:
            keys = [(slot.id, slot.nonce) for slot in slots]
            found = self._places[key_of(view)] = tuple(keys.index(key) for key in view.keys)
        return found

    def is_excused(self, processes: Sequence[Any]) -> bool:
        """Whether a process waits for a dead one, as the registry has lost its memory."""
        waits = [self[one.core].waits_for for one in processes]
        return any("forgotten it" in reason or "more than half" in reason for reason in waits)
