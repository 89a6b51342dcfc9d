"""What happens to the membership, for the user's log and ``on_event``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ViewChanged:
    """This replica trains in another view.

    Attributes:
        number: Of the view.
        members, joined, left: Replicas.
        reason: One sentence.
        seconds: For which this replica did not train because of the change.
        inner_step: From which all members go on.
        copied_bytes: Of state that newcomers were given while all members waited.
    """

    number: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]
    reason: str
    seconds: float
    inner_step: int
    copied_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"view {self.number}: replicas {list(self.members)} train from inner step "
            f"{self.inner_step} ({self.reason}; {self.seconds:.1f} s without training)"
        )


@dataclass(frozen=True)
class Suspected:
    """Replicas of which nothing is heard."""

    replicas: tuple[int, ...]

    def __str__(self) -> str:
        return f"nothing is heard of replicas {list(self.replicas)}"


@dataclass(frozen=True)
class Waiting:
    """This replica waits; ``reason`` is empty when the wait is over."""

    reason: str

    def __str__(self) -> str:
        return f"waiting {self.reason}" if self.reason else "the wait is over"


@dataclass(frozen=True)
class Fenced:
    """The others go on without this replica."""

    reason: str

    def __str__(self) -> str:
        return f"the others go on without this replica: {self.reason}"


@dataclass(frozen=True)
class JoinProgress:
    """This replica copies the state of a group that trains, before it joins.

    Attributes:
        received_bytes: Of outer state and of logged rounds.
        total_bytes: Of the outer state.
        rounds_behind: Rounds by which the copy lags; -1 while parts of the state are missing.
        is_ready: This replica asks to be let in.
    """

    received_bytes: int
    total_bytes: int
    rounds_behind: int
    is_ready: bool

    def __str__(self) -> str:
        what = "ready to join" if self.is_ready else "copying the state before joining"
        behind = "" if self.rounds_behind < 0 else f", {self.rounds_behind} rounds behind"
        return f"{what}: {self.received_bytes} bytes received of {self.total_bytes}{behind}"


Happening = ViewChanged | Suspected | JoinProgress | Waiting | Fenced
