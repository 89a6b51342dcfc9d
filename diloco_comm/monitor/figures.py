"""Figures: numbers about a replica that it sends to the host of its store, for people and metrics.

A replica sends a message with its figures at most once in ``PERIOD_S`` seconds. The host keeps the
last message of each process; other replicas never get it. ``FiguresOf`` collects the figures of a
``DiLoCo`` on the thread that asks the table.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import weakref
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from .. import __version__
from ..group.table import POST_S

if TYPE_CHECKING:
    from ..elastic.events import ElasticTotals
    from ..group.driver import Driver
    from ..rounds.metrics import Recorder

PERIOD_S = POST_S
MAX_BYTES = 2048
SCHEMA = 1
# Figures name at most so many replicas for which a replica waits.
MOST_NAMED = 8
_MOST = 1 << 62
# A counter is plausible up to ``MOST_PER_S`` for each second of the process's age. The age is taken
# as a year at most, plus a day, as clocks differ.
_YEAR_S, _DAY_S = 365 * 86400.0, 86400.0
MOST_PER_S = {
    **dict.fromkeys(("rounds", "skipped", "discarded"), 1e3),
    **dict.fromkeys(("sent_bytes", "received_bytes"), 1e11),
    **dict.fromkeys(("waits_s", "exchange_s", "waited_s", "changing_s"), 1e3),
    "retransmits": 1e8,
}
_LONGEST = 64


@dataclass(frozen=True)
class Figures:
    """The figures of one replica.

    Counters begin at 0 when the process constructs ``DiLoCo``, at ``created``. In a replica with
    several workers, worker 0 speaks: its bytes and seconds leave out the other workers.

    Attributes:
        replica: Number of the replica.
        group_size: Members of the group that this replica is in; 0 outside a group.
        view: Number of that group, which rises with each change.
        phase: The present work of the training loop, such as "steps" or "exchange", see
            ``DiLoCo.doing``.
        waits_for: Numbers of the replicas for which this replica waits, at most ``MOST_NAMED``; ()
            if they are not known, and with ``Elastic`` in the first two seconds of a wait.
        waits_s: Seconds since this wait began; 0 without one.
        inner_step: Inner steps of the training.
        created: Unix time in seconds at which the counters began.
        rounds: Rounds of one fragment that were applied.
        skipped: Rounds that were voted down.
        discarded: Rounds that count for no replica, because a member was lost.
        sent_bytes, received_bytes: Payload and control bytes of the rounds.
        exchange_s: Seconds from the first byte sent to the last one received, over all rounds.
        waited_s: Seconds for which the training loop only waited for results.
        changing_s: Seconds without training because of changes of the group; NaN without
            ``Elastic``.
        hidden: Share of ``exchange_s`` during which the training loop went on, 0 to 1.
        goodput: Share of the time since the first group that changes left for training; NaN without
            ``Elastic``.
        round_trip_s: Smoothed round trip to the slowest member, as TCP measures it; NaN if unknown.
        rate: Bytes per second that this replica has sent in the last round; NaN if unknown.
        retransmits: Segments that TCP has sent again to other replicas.
        norm: L2 norm of the last pseudo-gradient; NaN unless measured.
        version: The version of this package.
    """

    replica: int
    group_size: int = 0
    view: int = 0
    phase: str = ""
    waits_for: tuple[int, ...] = ()
    waits_s: float = 0.0
    inner_step: int = 0
    created: float = 0.0
    rounds: int = 0
    skipped: int = 0
    discarded: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    exchange_s: float = 0.0
    waited_s: float = 0.0
    changing_s: float = math.nan
    hidden: float = 0.0
    goodput: float = math.nan
    round_trip_s: float = math.nan
    rate: float = math.nan
    retransmits: int = 0
    norm: float = math.nan
    version: str = ""

    def to_bytes(self) -> bytes:
        """Return the message, at most ``MAX_BYTES`` long.

        It leaves out unsound values: NaN, infinity, negative numbers, integers of ``2**62`` and
        above. But an infinite norm, of a replica that diverges, is sent as the largest float.
        """
        norm = min(self.norm, sys.float_info.max)
        waits_for = list(self.waits_for[:MOST_NAMED])
        values = _sound({**asdict(self), "waits_for": waits_for, "norm": norm})
        return json.dumps({"schema": SCHEMA, **values}).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Figures | None:
        """Return the figures of a message; None for any other text, or another schema.

        Unsound values are ignored, as if they were left out.
        """
        try:
            values = json.loads(text) if len(text) <= MAX_BYTES else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict) or values.pop("schema", None) != SCHEMA:
            return None
        if not values.keys() <= _KINDS.keys() or "replica" not in (values := _sound(values)):
            return None
        return cls(**{**values, "waits_for": tuple(values.get("waits_for", ()))})

    def is_plausible(self, now: float) -> bool:
        """Whether a process may have counted so much since ``created``, see ``MOST_PER_S``.

        Args:
            now: Unix time in seconds.
        """
        age_s = min(max(now - self.created, 0.0), _YEAR_S) + _DAY_S
        return not any(getattr(self, name) > most * age_s for name, most in MOST_PER_S.items())


_KINDS = {one.name: one.type for one in fields(Figures)}


def _sound(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _is_sound(_KINDS[name], value)}


def _is_sound(kind: Any, value: object) -> bool:
    if kind == "int":
        return type(value) is int and 0 <= value < _MOST
    if kind == "float":
        if type(value) is bool or not isinstance(value, int | float):
            return False
        return 0 <= value <= sys.float_info.max
    if kind == "str":
        is_text = isinstance(value, str) and len(value) <= _LONGEST
        return is_text and re.fullmatch(r"[\x20-\x7e]*", str(value)) is not None
    numbers = value if isinstance(value, list) and len(value) <= MOST_NAMED else [None]
    return all(_is_sound("int", one) for one in numbers)


class Trained(Protocol):
    """The attributes of a ``DiLoCo`` that its figures need."""

    inner_step: int
    _recorder: Recorder

    def elastic_totals(self) -> ElasticTotals: ...


class FiguresOf:
    """A function for ``Driver.figures``: it returns the message of one ``DiLoCo``.

    It returns b"" once the ``DiLoCo`` is gone.

    The training thread goes on during a call. So a call waits for nothing and reads no device, and
    may see a round that is only partly counted.
    """

    def __init__(self, diloco: Trained) -> None:
        # The thread of the table must not keep the object alive, nor callbacks that refer to it.
        self._diloco, self._created = weakref.ref(diloco), time.time()

    def __call__(self, driver: Driver) -> bytes:
        diloco = self._diloco()
        return b"" if diloco is None else self.read(diloco, driver).to_bytes()

    def read(self, diloco: Trained, driver: Driver) -> Figures:
        """Return the figures as they are now."""
        totals, latest = diloco._recorder.totals, diloco._recorder.latest
        last = latest[-1] if latest else None
        record = driver.state.record
        try:
            changes = diloco.elastic_totals()
        except RuntimeError:
            changes = None  # a fixed group, or before this replica has joined
        tcp = driver.signs.link.counters()
        waits_s, waits_for = driver.wait()
        return Figures(
            replica=driver.state.key.number,
            group_size=0 if record is None else len(record.members),
            view=0 if record is None else record.number,
            phase=driver.phase,
            waits_for=waits_for,
            waits_s=waits_s,
            # A ``DiLoCo`` under construction has no inner step yet.
            inner_step=max(0, getattr(diloco, "inner_step", driver.inner_step)),
            created=self._created,
            rounds=totals.num_syncs - totals.num_skipped,
            skipped=totals.num_skipped,
            discarded=0 if changes is None else changes.rounds_discarded,
            sent_bytes=totals.sent_bytes,
            received_bytes=totals.received_bytes,
            exchange_s=totals.exchange_s,
            waited_s=totals.exposed_s,
            changing_s=math.nan if changes is None else changes.forming_s,
            hidden=totals.overlap_fraction,
            goodput=math.nan if changes is None else changes.goodput,
            round_trip_s=tcp["rtt_us"] / 1e6 if tcp["rtt_us"] else math.nan,
            rate=last.sent_bytes / last.exchange_s
            if last and last.sent_bytes and last.exchange_s
            else math.nan,
            retransmits=tcp["retransmits"],
            norm=math.nan if last is None else last.pseudo_gradient_norm,
            version=__version__,
        )
