"""What a replica of the chaos demo tells the parent process; ``at`` is ``time.monotonic()``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stepped:
    """The replica has taken an inner step; ``loss`` is that of its batch, in nats a byte."""

    at: float
    step: int
    loss: float


@dataclass(frozen=True)
class Entered:
    """The replica has entered a view; see ``ViewChanged``."""

    at: float
    view: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]
    seconds: float
    copied_bytes: int


@dataclass(frozen=True)
class Copying:
    """The replica copies the state before it joins; see ``JoinProgress``."""

    at: float
    received_bytes: int
    total_bytes: int


# How a replica ends.
DONE, LEFT, LEFT_BEHIND, FAILED, KILLED = "done", "left", "left behind", "failed", "killed"


@dataclass(frozen=True)
class Ended:
    """The replica has ended.

    Attributes:
        how: DONE, LEFT, LEFT_BEHIND, FAILED, or KILLED by a signal (said by the parent process).
        detail: The error, or its traceback.
        outer_hash: Of the shared model, after DONE.
    """

    at: float
    how: str
    detail: str = ""
    inner_step: int = 0
    outer_hash: str = ""
    num_parameters: int = 0


Message = Stepped | Entered | Copying | Ended
