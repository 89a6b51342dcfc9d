"""The cores of the processes of the model: real ones, each state and each step looked at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from diloco_comm.elastic.core import Settings, State, start, step
from diloco_comm.elastic.core.events import Action, Event
from diloco_comm.elastic.views import Member, View

Step = Callable[[State, Event], tuple[State, tuple[Action, ...]]]


# Number of the view, number of its base, and nonces: first that of the proposer.
Key = tuple[int, int, str]


@cache
def key_of(view: View) -> Key:
    """Return what a forming view and the open view that comes of it have in common.

    Within one history number and proposer are enough; an exploration has many.
    """
    return view.number, view.base, view.proposer + "".join(member.nonce for member in view.members)


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
