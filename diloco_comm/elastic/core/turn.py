"""One step under way: the state as it becomes, and the actions so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..beats import FORMING, GONE, TRAINING
from ..views import View, to_bytes
from .events import (
    Abandon,
    Action,
    Break,
    Drained,
    Enter,
    Fence,
    Form,
    Over,
    Pend,
    Refuse,
    Swap,
    Wait,
)
from .state import State


class Turn:
    """Collects what one event leads to."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.actions: list[Action] = []

    def change(self, **values: Any) -> None:
        self.state = replace(self.state, **values)

    def act(self, action: Action) -> None:
        self.actions.append(action)

    # ------------------------------------------------------------------------- transitions

    def form(self, view: View) -> None:
        """Take part in an attempt."""
        role = "change"
        if self.state.member.id in view.joined:
            role = "broadcast" if set(view.joined) == set(view.ids) else "join"
        self.change(
            stage=FORMING,
            attempt=view,
            has_voted=False,
            is_abandoned=False,
            is_pulling=False,
        )
        self.cut_off(())
        self.act(Form(view, role))

    def enter(self, view: View) -> None:
        """Go from the hook into an open view."""
        self.change(
            stage=TRAINING,
            epoch=view.number,
            view=to_bytes(view),
            has_voted=False,
            is_pending=False,
            is_broken=False,
        )
        self.cut_off(())
        self.act(Enter(view))

    def abandon(self) -> None:
        """Let the attempt under way fail, once."""
        if not self.state.is_abandoned:
            self.change(is_abandoned=True)
            self.act(Abandon(self.state.attempt_number))

    def break_off(self) -> None:
        """Let the round under way fail, once."""
        if not self.state.is_broken:
            self.change(is_broken=True)
            self.act(Break(self.state.epoch))

    def pend(self) -> None:
        """Ask for a boundary, once in a view."""
        if not self.state.is_pending:
            self.change(is_pending=True)
            self.act(Pend())

    def cut_off(self, nonces: Iterable[str], unheard: Iterable[str] = ()) -> None:
        """Note which processes this one cannot reach, and whose connection broke."""
        own = {self.state.member.nonce}
        self.change(
            unreachable=tuple(sorted(set(nonces) - own)),
            unheard=tuple(sorted(set(unheard) - own)),
            num_cut_polls=0,
        )

    def swap(self, new: bytes) -> None:
        if new != self.state.record:
            self.act(Swap(self.state.record, new))

    def propose(self, view: View) -> None:
        self.change(num_waits=0, highest=view.number)
        self.swap(to_bytes(view))

    def wait(self, reason: str) -> None:
        """Note for what this process waits."""
        if reason != self.state.waits_for:
            self.change(waits_for=reason, num_waits=0)
            self.act(Wait(reason))

    # ------------------------------------------------------------------------- ends

    def fence(self, reason: str) -> None:
        if self.state.is_leaving:
            self.drain()
            return
        self.change(stage=GONE)
        self.act(Fence(reason))

    def refuse(self, reason: str) -> None:
        self.change(stage=GONE)
        self.act(Refuse(reason))

    def over(self, reason: str) -> None:
        self.change(stage=GONE)
        self.act(Over(reason))

    def drain(self) -> None:
        self.change(stage=GONE)
        self.act(Drained())
