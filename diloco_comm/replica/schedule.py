"""The schedule: at which inner step each fragment is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.checks import MOST_INT32, integer


@dataclass(frozen=True)
class Schedule:
    """At which inner step each fragment is sent.

    Attributes:
        sync_every: Inner steps between two sends of the same fragment (H).
        offsets: 1-based inner step of each fragment's first send, in its first or second round.
    """

    sync_every: int
    offsets: tuple[int, ...]

    @classmethod
    def plan(
        cls, sync_every: int, num_fragments: int, offsets: Sequence[int] | None = None
    ) -> Schedule:
        """Check the numbers; offsets default to floor(H*(p+1)/P), at least 1.

        Raises:
            ValueError: If ``sync_every`` is below 1 or an offset is outside 1..2*sync_every.
            TypeError: If ``offsets`` is no list.
        """
        sync_every = integer("sync_every", sync_every, 1, most=MOST_INT32)
        if offsets is not None:
            offsets = inner_steps(offsets)
        else:
            offsets = [max(1, sync_every * (p + 1) // num_fragments) for p in range(num_fragments)]
        if len(offsets) != num_fragments or any(not 1 <= t <= 2 * sync_every for t in offsets):
            raise ValueError(
                f"offsets must be {num_fragments} inner steps between 1 and 2*sync_every="
                f"{2 * sync_every}, got {list(offsets)}"
            )
        return cls(sync_every, tuple(offsets))

    def due(self, inner_step: int) -> list[int]:
        """Return the fragments that are sent after ``inner_step`` (1-based), lowest first."""
        return [
            index
            for index, offset in enumerate(self.offsets)
            if inner_step >= offset and (inner_step - offset) % self.sync_every == 0
        ]


def inner_steps(offsets: Any) -> list[int]:
    """Return offsets as a list of int.

    Raises:
        TypeError: If they are no list.
        ValueError: If one of them is no integer.
    """
    if isinstance(offsets, (str, bytes)) or not isinstance(offsets, Iterable):
        raise TypeError(f"offsets must be a list of inner steps, got {offsets!r}")
    return [integer("each of offsets", offset) for offset in offsets]
