"""The phases of a replica's training loop in an elastic group, and the table of their transitions.

A *view* is a group of fixed members. If a flush or a send has failed because a view ended, the
members agree on this in the next view, and all of them repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """The work of the training loop; the value describes it in ``drawing``."""

    JOINING = "joins the group"
    TRAINING = "takes inner steps in a view"
    FLUSHING = "flushes"
    CHANGING = "goes to the next view"
    SENDING_AGAIN = "repeats a send with all members"
    FLUSHING_AGAIN = "repeats a flush with all members"
    FINISHED = "has taken and shared all steps"
    LEFT = "has left the group"


class Event(Enum):
    """The reason why a phase ends; the value describes it in ``drawing``."""

    VIEW_BEGUN = "a view has begun, and nothing is to be repeated"
    SEND_BROKE_OFF = "a view has begun, and a send is to be repeated"
    FLUSH_BROKE_OFF = "a view has begun, and a flush is to be repeated"
    FLUSH_CALLED = "the program calls flush, or all steps are taken"
    ENDED = "the send or flush has ended, or has raised an error of its own"
    VIEW_ENDED = "the view has ended"
    ALL_SHARED = "all steps of the run are taken and shared"
    ASKED_TO_LEAVE = "the group goes on without this replica"


_BEGINS = {
    Event.VIEW_BEGUN: Phase.TRAINING,
    Event.SEND_BROKE_OFF: Phase.SENDING_AGAIN,
    Event.FLUSH_BROKE_OFF: Phase.FLUSHING_AGAIN,
}
_WORKS = {Event.ENDED: Phase.TRAINING, Event.VIEW_ENDED: Phase.CHANGING}
# A Ctrl-C in a repetition changes no phase: the next call of the program repeats it. After a Ctrl-C
# on the way to the next view, the next step or flush finds that the view has ended.
TRANSITIONS: dict[Phase, dict[Event, Phase]] = {
    Phase.JOINING: _BEGINS,
    Phase.TRAINING: {
        Event.FLUSH_CALLED: Phase.FLUSHING,
        Event.VIEW_ENDED: Phase.CHANGING,
        Event.ALL_SHARED: Phase.FINISHED,
    },
    Phase.FLUSHING: _WORKS,
    Phase.CHANGING: {
        **_BEGINS,
        Event.ASKED_TO_LEAVE: Phase.LEFT,
        Event.VIEW_ENDED: Phase.CHANGING,
        Event.FLUSH_CALLED: Phase.FLUSHING,
    },
    Phase.SENDING_AGAIN: _WORKS,
    Phase.FLUSHING_AGAIN: _WORKS,
    Phase.FINISHED: {},
    Phase.LEFT: {},
}
FLUSHES = (Phase.FLUSHING, Phase.FLUSHING_AGAIN)


class Loop:
    """The phase of one training loop.

    Attributes:
        phase: The present phase.
        before: The phase of this loop when the last view ended.
    """

    def __init__(self) -> None:
        self.phase = self.before = Phase.JOINING

    def take(self, event: Event) -> None:
        """Go to the phase that follows the present one after ``event``.

        Raises:
            RuntimeError: If ``TRANSITIONS`` has no phase for this event.
        """
        to = TRANSITIONS[self.phase].get(event)
        if to is None:
            raise RuntimeError(f"a loop that {self.phase.value} cannot meet: {event.value}")
        if event is Event.VIEW_ENDED and self.phase is not Phase.CHANGING:
            self.before = self.phase
        self.phase = to

    def leave_flush(self) -> None:
        """Note that the program's flush has returned, or has raised an error."""
        if self.phase is Phase.FLUSHING:
            self.take(Event.ENDED)
        elif self.phase is Phase.CHANGING:
            # The view ended during the flush, which has returned with an error. The program may go
            # on to train, so this member does not ask for a repetition of the flush.
            self.before = Phase.TRAINING

    @property
    def is_done(self) -> bool:
        """Whether the loop takes no more steps."""
        return not TRANSITIONS[self.phase]

    @property
    def repeats(self) -> bool:
        """Whether this view repeats a send or a flush that failed in the view before."""
        return self.phase in (Phase.SENDING_AGAIN, Phase.FLUSHING_AGAIN)


class Report(NamedTuple):
    """One member's report when a view has ended.

    Attributes:
        was_flushing: The member was in a flush.
        has_unsent: The member has trained since its last send.
        parts: Indices of the fragments that were due at this inner step, and whose rounds failed.
    """

    was_flushing: bool
    has_unsent: bool
    parts: list[int]


class Repetition(NamedTuple):
    """The flush or the sends that failed when the last view ended, for all members to repeat.

    Attributes:
        is_of_flush: A member was in a flush.
        must_flush: A member was in a flush, and some member has trained since its last send.
        parts: Indices of the fragments that are sent again.
    """

    is_of_flush: bool = False
    must_flush: bool = False
    parts: Sequence[int] = ()

    @classmethod
    def agreed(cls, reports: Sequence[Report], *, has_newcomers: bool) -> Repetition:
        """Return the repetition that follows from the reports of all members, equal on all."""
        flushing, has_unsent, parts = zip(*reports, strict=True)
        is_flush = any(flushing)
        # No send is repeated with a newcomer, which has nothing to send before its first round.
        is_alike = not (is_flush or has_newcomers) and _are_alike(parts)
        return cls(is_flush, is_flush and any(has_unsent), parts[0] if is_alike else ())

    @classmethod
    def of_workers(cls, found: Sequence[Repetition]) -> Repetition:
        """Return one repetition for all workers of a replica, as a round may fail at some only."""
        is_of_flush, must_flush, parts = zip(*found, strict=True)
        return cls(any(is_of_flush), any(must_flush), parts[0] if _are_alike(parts) else ())

    @property
    def event(self) -> Event:
        """The event with which the next view begins."""
        if self.must_flush:
            return Event.FLUSH_BROKE_OFF
        return Event.SEND_BROKE_OFF if self.parts else Event.VIEW_BEGUN


def _are_alike(parts: Sequence[Sequence[int]]) -> bool:
    return all(each == parts[0] for each in parts)


def drawing() -> str:
    """Return ``TRANSITIONS`` as text: a line for each phase, and one for each event there."""
    lines = []
    for phase, ways in TRANSITIONS.items():
        lines.append(f"{phase.name}: {phase.value}")
        lines += [f"    {event.value} -> {to.name}" for event, to in ways.items()]
    return "\n".join(lines) + "\n"
