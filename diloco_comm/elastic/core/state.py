"""What a process knows and where it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..beats import BROKEN, FORMED, FORMING, PULLING, READY, STOPPED, TRAINING, Beat
from ..views import NO_VIEW, Key, Member, View, from_bytes

IN_ATTEMPT = (FORMING, FORMED)
# More would not fit into a beat.
MAX_UNREACHABLE = 24
IN_VIEW = (TRAINING, STOPPED, BROKEN)


@dataclass(frozen=True)
class Settings:
    """What the user has chosen; equal on all members except for ``allows_rollback``.

    Attributes:
        run: Name of the training run.
        min_replicas: Fewer do not train.
        suspect_after: Polls in which a peer's counter must stand still for it to be suspected.
        unheard_after: The same for a peer whose connection broke; 0: no difference.
        ended_after: The same for a peer whose host says that it has ended; 0: no difference.
        busy_after: The same for a peer that the link hears; a longer ``suspect_after`` counts.
        founding_wait: Polls for which the founders wait for more to come.
        is_durable: The registry keeps its record when it ends. If not, a view needs more than half
            of its base, or exactly half with the lowest of them.
        allows_rollback: This process may found the run anew where all members have died.
    """

    run: str
    min_replicas: int = 1
    suspect_after: int = 20
    unheard_after: int = 0
    ended_after: int = 0
    busy_after: int = 0
    founding_wait: int = 0
    is_durable: bool = True
    allows_rollback: bool = False

    def __post_init__(self) -> None:
        for name, least in (("min_replicas", 1), ("suspect_after", 1), ("founding_wait", 0)):
            given = getattr(self, name)
            if given < least:
                raise ValueError(f"{name} must be at least {least}, got {given}")


@dataclass(frozen=True, order=True)
class Peer:
    """What is known of another process.

    Attributes:
        counter: Of its last beat; -1 if there is none.
        silent_polls: In which the counter stood still, up to a limit.
        is_heard: The counter was seen to rise: an old beat may be that of a dead process.
        is_ended: Its host said so at the last poll, in which the counter stood still.
        is_busy: The link heard it at the last poll, in which the counter stood still.
    """

    key: Key
    counter: int
    silent_polls: int = 0
    is_heard: bool = False
    is_ended: bool = False
    is_busy: bool = False


@dataclass(frozen=True)
class State:
    """Of one process.

    Attributes:
        stage: See ``beats``.
        epoch: Number of the open view that this process belongs to, NO_VIEW for none.
        view: The record of that view; b"" if this process has not seen it.
        attempt: The last forming view that it has taken part in.
        agreed_step: Inner step that was agreed on there.
        has_voted: It may have voted there, and does not know whether that view was opened.
        is_abandoned: The attempt under way is to fail.
        has_state: It holds the state of a view that it was in.
        is_pulling: It copies the outer state before it is ready to be let in.
        is_pending: It has asked for a boundary.
        is_broken: It has asked the training thread to stop.
        unreachable: Nonces of processes that it could not reach.
        unheard: Nonces of processes whose connection broke.
        num_cut_polls: Polls since then.
        record: The last that it has seen.
        highest: Number that was seen anywhere.
        num_waits: Polls since it waits for the same thing, up to a limit.
        waits_for: The last reason; "" for none.
        peers: By key.
    """

    settings: Settings
    member: Member
    stage: str = READY
    epoch: int = NO_VIEW
    view: bytes = b""
    attempt: View | None = None
    agreed_step: int = 0
    has_voted: bool = False
    is_abandoned: bool = False
    has_state: bool = False
    is_leaving: bool = False
    is_pulling: bool = False
    is_pending: bool = False
    is_broken: bool = False
    unreachable: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()
    num_cut_polls: int = 0
    record: bytes = b""
    highest: int = 0
    num_waits: int = 0
    waits_for: str = ""
    peers: tuple[Peer, ...] = ()

    @property
    def key(self) -> Key:
        return self.member.key

    @property
    def attempt_number(self) -> int:
        return NO_VIEW if self.attempt is None else self.attempt.number

    @property
    def recorded(self) -> View | None:
        """The view that the last record holds; None if there was no record."""
        return from_bytes(self.record, self.settings.run) if self.record else None

    @property
    def is_outside(self) -> bool:
        """Whether this process is ready, and others train that have not let it in."""
        number, members = (NO_VIEW, ()) if self.recorded is None else self.recorded.last_open
        is_ready = self.stage == READY and not self.is_pulling
        return is_ready and number != NO_VIEW and self.key not in members

    def has_tried(self, view: View) -> bool:
        return self.attempt is not None and self.attempt.attempt == view.attempt


def start(settings: Settings, member: Member, *, is_pulling: bool = False) -> State:
    """Return the state of a process that has just begun, with or without a checkpoint.

    Args:
        is_pulling: It waits for the event ``Pulled`` before it is ready.
    """
    return State(settings, member, is_pulling=is_pulling)


def beat_of(
    state: State, counter: int, inner_step: int = 0, positions: tuple[int, ...] = ()
) -> Beat:
    """Return what a process says of itself now.

    Args:
        counter: Higher than in all its beats before.
        inner_step: That it has reached, or that of its checkpoint.
        positions: See ``Beat``.
    """
    return Beat(
        state.member,
        counter,
        PULLING if state.stage == READY and state.is_pulling else state.stage,
        view=state.epoch,
        attempt=state.attempt_number,
        voted=state.attempt_number if state.has_voted else NO_VIEW,
        has_state=state.has_state,
        is_leaving=state.is_leaving,
        inner_step=inner_step,
        positions=positions,
        unreachable=state.unreachable[:MAX_UNREACHABLE],
    )


def own_beat(state: State, beats: tuple[Beat, ...]) -> Beat:
    """Return this process's beat as it would be now."""
    published = next((beat for beat in beats if beat.member.key == state.key), None)
    if published is None:
        return beat_of(state, 0)
    now = beat_of(state, published.counter, published.inner_step, published.positions)
    return replace(published, **{name: getattr(now, name) for name in _OF_STATE})


_OF_STATE = ("stage", "view", "attempt", "voted", "has_state", "is_leaving", "unreachable")
