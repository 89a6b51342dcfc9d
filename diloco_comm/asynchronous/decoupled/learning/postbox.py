"""What the training thread and the courier's thread leave for each other, under one lock."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from ....ops.wire import Layout
from ...model.shared import layout_of
from ...worker.link import ServerLost
from ..fragment_round import Report
from ..pieces import Piece
from ..settings import FP32, DecoupledSettings


@dataclass(frozen=True)
class Arrival:
    """A version of a fragment that has arrived.

    Attributes:
        merged: Number of this learner's last report that was merged; 0 if none.
        values: fp32 [num_elements] for each piece: the values, or what to add to the version
            before.
        is_difference: ``values`` are to be added.
        is_reset: The version does not follow the learner's: take it as it is.
        seq: Highest number of this learner's reports that the server has seen, with a reset.
    """

    fragment: int
    version: int
    merged: int
    values: list[Tensor] = field(repr=False)
    is_difference: bool
    is_reset: bool
    seq: int


@dataclass
class Outgoing:
    """A report until its merge.

    Attributes:
        is_taken: The server has all of it.
        asked_at: When the server was last told of the report.
    """

    report: Report
    payloads: list[Tensor] = field(repr=False)
    is_taken: bool = False
    asked_at: float = 0.0


@dataclass
class PartBox:
    """What the courier knows of a fragment.

    Attributes:
        layouts: Of a report.
        told: Version, last merged report, and whether the difference is coded.
        have: Version that the training thread has or can take; -1 for none.
        arrival: What the training thread can take.
    """

    first: int
    layouts: list[Layout]
    whole: list[Layout]
    down: list[Layout]
    told: tuple[int, int, bool] | None = None
    have: int = -1
    arrival: Arrival | None = None
    called: int = -1
    seq: int = 0
    outgoing: Outgoing | None = None


class Postbox:
    """The training thread's side of a courier.

    Args:
        settings: The settings of the run.
        pieces: The pieces of the syncer's fragments.
    """

    def __init__(self, settings: DecoupledSettings, pieces: list[list[Piece]]) -> None:
        firsts = accumulate(map(len, pieces), initial=0)
        self._parts = [
            PartBox(
                first,
                [layout_of(piece.num_elements, settings.up) for piece in each],
                [layout_of(piece.num_elements, FP32) for piece in each],
                [layout_of(piece.num_elements, settings.down) for piece in each],
            )
            for first, each in zip(firsts, pieces, strict=False)
        ]
        # Fragments with a report that the server may not have, and those to fetch, in order.
        self._offered: dict[int, None] = {}
        self._fetchable: dict[int, None] = {}
        self._lock = threading.Condition()
        self._refused: list[tuple[int, int, str]] = []
        self._steps, self._step_s = 0, 0.0
        # While training rests: by fragment, the version from which there is progress, or -1.
        self._rest: list[int] | None = None
        self._token = self._noted = 0
        self._error: BaseException | None = None
        self._is_over = False
        self._bell, self._ringer = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ringer, False)

    def stepped(self, steps: int, seconds: float) -> None:
        """Note the inner steps taken, and the seconds of the last one."""
        with self._lock:
            self._steps, self._step_s, self._rest = steps, seconds, None
        self.ring()

    def report(self, fragment: int, report: Report, payloads: list[Tensor]) -> None:
        """Leave a report with the courier; the caller calls ``ring`` afterwards."""
        with self._lock:
            self._parts[fragment].outgoing = Outgoing(report, payloads)
            self._offered[fragment] = None

    def arrivals(self) -> list[Arrival]:
        """Return the versions that have arrived; at most one for each fragment."""
        with self._lock:
            return [part.arrival for part in self._parts if part.arrival is not None]

    def taken(self, arrival: Arrival) -> None:
        """Note that the training thread has a version, so that the next one may be fetched.

        The caller calls ``ring`` afterwards.
        """
        with self._lock:
            part = self._parts[arrival.fragment]
            # The courier may have brought another version since, of another run.
            if part.arrival is arrival:
                part.arrival = None
                self._fetchable[arrival.fragment] = None

    def refusals(self) -> list[tuple[int, int, str]]:
        """Return and forget the refused reports: fragment, number, reason."""
        with self._lock:
            refused, self._refused = self._refused, []
            return refused

    def calls(self) -> list[tuple[int, int]]:
        """Return the calls: fragment and version."""
        with self._lock:
            return [(p, part.called) for p, part in enumerate(self._parts) if part.called >= 0]

    def answered(self, fragment: int, version: int) -> None:
        """Forget a call."""
        with self._lock:
            if self._parts[fragment].called == version:
                self._parts[fragment].called = -1

    def note(self) -> int:
        """Ask the server to confirm that it counts all steps; return the number to look for."""
        with self._lock:
            self._token += 1
            token = self._token
        self.ring()
        return token

    def rest(self, progress: list[int]) -> int:
        """Tell the server that training rests, as ``note`` does; the next step ends the rest.

        Args:
            progress: As in ``Syncer.rest``.
        """
        with self._lock:
            self._rest = progress
        return self.note()

    @property
    def is_complete(self) -> bool:
        """Every fragment has a version here."""
        with self._lock:
            return all(part.have >= 0 for part in self._parts)

    def is_noted(self, token: int) -> bool:
        """Whether the server has answered ``note``."""
        with self._lock:
            return self._noted >= token

    def is_settled_after(self, token: int) -> bool:
        """Whether the server has answered ``note``, and no version is on its way from it."""
        with self._lock:
            return self._noted >= token and all(
                part.arrival is None and part.told is not None and part.told[0] == part.have
                for part in self._parts
            )

    def wait(self, seconds: float) -> None:
        """Wait until something arrives."""
        with self._lock:
            self._lock.wait(seconds)

    def raise_error(self) -> None:
        """Raise what went wrong in the courier's thread; a lost server is raised once."""
        with self._lock:
            error = self._error
            if isinstance(error, ServerLost):
                self._error = None
        if error is not None:
            raise error

    def ring(self) -> None:
        """Wake the courier, which then looks at all that was left.

        The courier's thread gets the GIL with this call, and may keep the GIL for 5 ms: so one call
        comes after all reports and versions of an inner step.
        """
        if not self._is_over:
            with suppress(BlockingIOError):
                os.write(self._ringer, b"!")

    def _fail(self, error: BaseException) -> None:
        """Leave an error for the training thread."""
        with self._lock:
            self._error = error
            self._lock.notify_all()
