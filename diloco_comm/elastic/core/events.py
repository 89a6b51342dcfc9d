"""What happens to the core, and what it asks for.

The driver turns what it sees into events, one at a time, and carries out the actions of each before
the next event. Events come from two threads of the process: the one that beats and polls the
registry, and the training thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..beats import Beat
from ..views import View

# ------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Polled:
    """This process has published its beat and then read the record and all beats.

    Attributes:
        record: b"" if there is none.
        beats: The last beat of every process, this one among them.
        is_late: This process stood still since its last poll: beats may be old for that reason.
        ended: Nonces of silent processes whose hosts refuse: they have ended, which may be wrong.
        heard: Nonces of processes that this one hears over its link, whatever their beats.
    """

    record: bytes
    beats: tuple[Beat, ...]
    is_late: bool = False
    ended: tuple[str, ...] = ()
    heard: tuple[str, ...] = ()


@dataclass(frozen=True)
class Swapped:
    """The registry has answered a swap; ``ok`` is None if it did not answer."""

    old: bytes
    new: bytes
    ok: bool | None


@dataclass(frozen=True)
class Broke:
    """A round has failed, and the training thread has stopped.

    Attributes:
        number: Of the open view.
        missing: Ids of members that this process cannot reach though they may live.
        unheard: Ids of members that seem to have died.
    """

    number: int
    missing: tuple[int, ...] = ()
    unheard: tuple[int, ...] = ()


@dataclass(frozen=True)
class Boundary:
    """The training thread has stopped after a round in whose headers somebody had asked for it.

    All members have the same headers, so all of them stop after this round.
    """

    number: int


@dataclass(frozen=True)
class Formed:
    """All members of a forming view have met, said what they have, connected and voted.

    The training thread waits in its hook and has applied nothing yet.

    Attributes:
        inner_step: On which the members have agreed.
    """

    number: int
    inner_step: int


@dataclass(frozen=True)
class Failed:
    """An attempt has failed, before the hook or in it; what fails after the hook is ``Broke``.

    Attributes:
        missing: Ids of members that this process could not reach though they may live.
        unheard: Ids of members that seem to have died.
        has_voted: This process has agreed to enter, so that others may have formed.
    """

    number: int
    missing: tuple[int, ...] = ()
    has_voted: bool = True
    unheard: tuple[int, ...] = ()


@dataclass(frozen=True)
class Started:
    """The training thread holds the state of the open view, and trains."""

    number: int


@dataclass(frozen=True)
class Pulled:
    """This process, a newcomer, has copied what it can copy beside training: let it in."""


@dataclass(frozen=True)
class Leave:
    """This process is to leave at the next boundary."""


@dataclass(frozen=True)
class Finished:
    """This process takes no more steps.

    Attributes:
        has_all_steps: All steps of the run are taken and shared, and the record is to say so.
    """

    has_all_steps: bool = False


Event = Polled | Swapped | Broke | Boundary | Formed | Failed | Started | Pulled | Leave | Finished


# ------------------------------------------------------------------------------------ actions


@dataclass(frozen=True)
class Swap:
    """Ask the registry to put ``new`` where ``old`` is; its answer is the event ``Swapped``."""

    old: bytes
    new: bytes


@dataclass(frozen=True)
class Form:
    """Let the training thread take part in an attempt.

    Attributes:
        role: "change": ``change_group`` with the members of the view; "join": take the state of a
            member that has it; "broadcast": take the state of ``view.source``.
    """

    view: View
    role: str


@dataclass(frozen=True)
class Enter:
    """The view is open: let the hook return, settle and train."""

    view: View


@dataclass(frozen=True)
class Abandon:
    """Let the attempt of this number fail, in its hook or before it; ``Failed`` follows."""

    number: int


@dataclass(frozen=True)
class Pend:
    """Ask for a boundary in the headers of all rounds of this view from now on.

    The training thread may not have left the hook yet.
    """


@dataclass(frozen=True)
class Break:
    """Another member has stopped in this view: let the round under way fail; ``Broke`` follows.

    The training thread may not have left the hook yet: then it enters, and fails at once.
    """

    number: int


@dataclass(frozen=True)
class Fence:
    """The others go on without this process: stop for good, and come again with a new nonce."""

    reason: str


@dataclass(frozen=True)
class Refuse:
    """This process cannot take part as it is, now or later."""

    reason: str


@dataclass(frozen=True)
class Over:
    """The run had ended before this process came."""

    reason: str


@dataclass(frozen=True)
class Drained:
    """This process has left."""


@dataclass(frozen=True)
class Suspect:
    """Members of which nothing was heard for ``suspect_after`` polls."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """For what this process waits; "" when it waits no longer."""

    reason: str


Action = (
    Swap | Form | Enter | Abandon | Pend | Break | Fence | Refuse | Over | Drained | Suspect | Wait
)
