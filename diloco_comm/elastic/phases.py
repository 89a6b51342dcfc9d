"""The phases of a replica's training loop in an elastic group, and the table of their transitions.

A *view* is a group of fixed members. When a view ends, the members agree in the next one on a flush
or a send that broke off in the view before, and all of them repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """The work of the training loop; the value names the work in a drawing."""

    JOINING = "joins the group"
    TRAINING = "takes inner steps in a view"
    FLUSHING = "flushes"
    CHANGING = "goes to the next view"
    SENDING_AGAIN = "repeats a send with all members"
    FLUSHING_AGAIN = "repeats a flush with all members"
    FINISHED = "has taken and shared all steps"
    LEFT = "has left the group"


class Event(Enum):
    """The end of a phase; the value describes the end in a drawing."""

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
        phase: The present one.
        before: The phase in which the last view ended.
    """

    def __init__(self) -> None:
        self.phase = self.before = Phase.JOINING

    def take(self, event: Event) -> None:
        """Go to the next phase.

        Raises:
            RuntimeError: The table has no such transition.
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
            # The program may go on to train: then this member was not in a flush.
            self.before = Phase.TRAINING

    @property
    def is_done(self) -> bool:
        """Whether the loop takes no more steps."""
        return not TRANSITIONS[self.phase]

    @property
    def repeats(self) -> bool:
        """Whether something is to be repeated in the present view."""
        return self.phase in (Phase.SENDING_AGAIN, Phase.FLUSHING_AGAIN)


class Report(NamedTuple):
    """One member's account of the view that has ended.

    Attributes:
        was_flushing: The member was in a flush.
        has_unsent: The member holds something that was not shared.
        parts: Indices of the parts that it should have sent at this inner step, and whose rounds
            are lost.
    """

    was_flushing: bool
    has_unsent: bool
    parts: list[int]


class Repetition(NamedTuple):
    """All that broke off when the last view ended, for all members to repeat.

    Attributes:
        is_of_flush: A member was in a flush.
        must_flush: A member was in a flush, and a member has something that was not shared.
        parts: Indices of the parts that are sent again.
    """

    is_of_flush: bool = False
    must_flush: bool = False
    parts: Sequence[int] = ()

    @classmethod
    def agreed(cls, reports: Sequence[Report], *, has_newcomers: bool) -> Repetition:
        """Return the same repetition on all members, from the reports of all of them."""
        flushing, has_unsent, parts = zip(*reports, strict=True)
        is_flush = any(flushing)
        # A newcomer has nothing to send, and takes part from its first whole round on.
        is_alike = not (is_flush or has_newcomers) and _are_alike(parts)
        return cls(is_flush, is_flush and any(has_unsent), parts[0] if is_alike else ())

    @classmethod
    def of_workers(cls, found: Sequence[Repetition]) -> Repetition:
        """Return one repetition for all workers of a replica: a round may break off at some."""
        is_of_flush, must_flush, parts = zip(*found, strict=True)
        return cls(any(is_of_flush), any(must_flush), parts[0] if _are_alike(parts) else ())

    @property
    def event(self) -> Event:
        """The event that begins the view in which this is repeated."""
        if self.must_flush:
            return Event.FLUSH_BROKE_OFF
        return Event.SEND_BROKE_OFF if self.parts else Event.VIEW_BEGUN


def _are_alike(parts: Sequence[Sequence[int]]) -> bool:
    return all(each == parts[0] for each in parts)


def drawing() -> str:
    """Return the table as text: a line for each phase, and one for each way out of it."""
    lines = []
    for phase, ways in TRANSITIONS.items():
        lines.append(f"{phase.name}: {phase.value}")
        lines += [f"    {event.value} -> {to.name}" for event, to in ways.items()]
    return "\n".join(lines) + "\n"
