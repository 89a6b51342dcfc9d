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
    """

    number: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]
    reason: str
    seconds: float
    inner_step: int

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


Happening = ViewChanged | Suspected | Waiting | Fenced
