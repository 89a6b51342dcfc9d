"""One core, and a registry whose record and beats a test writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diloco_comm.elastic.beats import PULLING, READY, TRAINING, Beat
from diloco_comm.elastic.core import Settings, State, beat_of, start, step
from diloco_comm.elastic.core.events import (
    Action,
    Form,
    Polled,
    Swap,
    Wait,
)
from diloco_comm.elastic.views import (
    FORMING,
    NO_VIEW,
    OPEN,
    Member,
    View,
    from_bytes,
    to_bytes,
)

SUSPECT_AFTER = 2


def member(id: int, nonce: str = "", settings: str = "same") -> Member:
    return Member(id, nonce or f"n{id}", f"host{id}:1", 1, settings)


def view(*ids: int, number: int = 4, inner_step: int = 100) -> View:
    """Return an open view."""
    members = tuple(member(id) for id in ids)
    return View("run", number, "", OPEN, members, NO_VIEW, (), inner_step, "n0")


def training(id: int, of: View, **options: Any) -> State:
    """Return a process that trains in a view."""
    settings = Settings("run", suspect_after=SUSPECT_AFTER, **options)
    forming = replace(of, phase=FORMING)
    return replace(
        start(settings, member(id)),
        stage=TRAINING,
        epoch=of.number,
        view=to_bytes(of),
        record=to_bytes(of),
        attempt=forming,
        has_state=True,
        highest=of.number,
    )


def beat(id: int, stage: str, of: View | None = None, **values: Any) -> Beat:
    number = NO_VIEW if of is None else of.number
    who = values.pop("member", member(id))
    has_state = stage not in (READY, PULLING)
    return Beat(who, 0, stage, number, number, has_state=has_state, **values)


class Process:
    """A process that polls a registry whose beats the test writes."""

    def __init__(self, state: State, record: bytes = b"") -> None:
        self.state = state
        self.record = record or state.record
        self._counter = 0

    def tell(self, event: Any) -> list[Action]:
        self.state, actions = step(self.state, event)
        return list(actions)

    def poll(
        self,
        *beats: Beat,
        silent: tuple[Beat, ...] = (),
        is_late: bool = False,
        ended: tuple[str, ...] = (),
        linked: tuple[str, ...] = (),
    ) -> list[Any]:
        """Poll twice, so that ``beats`` are heard, and return all actions."""
        actions: list[Action] = []
        for _ in range(2):
            self._counter += 1
            heard = [replace(one, counter=self._counter) for one in beats]
            own = beat_of(self.state, self._counter)
            polled = Polled(self.record, (own, *heard, *silent), is_late, ended, linked)
            actions += self.tell(polled)
            if any(isinstance(one, (Swap, Form)) for one in actions):
                break
        return actions

    def polls(self, number: int, *beats: Beat, **options: Any) -> list[Any]:
        return [one for _ in range(number) for one in self.poll(*beats, **options)]


def proposal(actions: list[Any]) -> View:
    """Return the one view that is proposed."""
    (swap,) = [one for one in actions if isinstance(one, Swap)]
    return from_bytes(swap.new, "run")


def reasons(actions: list[Any]) -> list[str]:
    return [one.reason for one in actions if isinstance(one, Wait)]


def attempt(*ids: int) -> View:
    base = view(0, 1)
    members = tuple(member(id) for id in ids)
    return View("run", 5, "", FORMING, members, 4, base.keys, 100, "n0")
