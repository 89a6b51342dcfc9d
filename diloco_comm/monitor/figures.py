"""The figures that each replica sends to the host of its store, for people and for metrics.

A replica sends them in a message of its own, at most one in ``PERIOD_S`` seconds. The host keeps
the last message of each process, and no other replica reads them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

PERIOD_S = 5.0
MAX_BYTES = 2048
SCHEMA = 1
# Replicas for which another one waits, at most so many are named.
MOST_NAMED = 8
_MOST = 1 << 62
_LONGEST = 64


@dataclass(frozen=True)
class Figures:
    """The figures of one replica.

    Counters begin at 0 when the process constructs ``DiLoCo``, at ``created``.

    Attributes:
        replica: Number of the replica.
        group_size: Members of the group that this replica is in; 0 outside a group.
        view: Number of that group, which rises with each change.
        phase: The work of the training loop, see ``DiLoCo.doing``.
        waits_for: Numbers of the replicas for which this replica waits, at most ``MOST_NAMED``.
        waits_s: Seconds since this wait began; 0 without one.
        inner_step: Inner steps of the training.
        created: Unix time in seconds at which the counters began.
        rounds: Rounds of one fragment that were applied.
        skipped: Rounds that were voted down.
        discarded: Rounds that count for no replica, because a member was lost.
        sent_bytes, received_bytes: Of these rounds.
        exchange_s: From the first byte sent to the last one received, over all rounds.
        waited_s: The training loop waited for results, doing nothing else.
        changing_s: Without training because of changes of the group.
        hidden: Part of ``exchange_s`` during which the training loop went on, 0 to 1.
        goodput: Part of the time since the first group in which changes did not stop the training.
        round_trip_s: Smoothed round trip to the slowest member, as TCP measures it; NaN if unknown.
        rate: Bytes per second of the last round; NaN if unknown.
        retransmits: Segments that TCP has sent again, over the open connections.
        norm: L2 norm of the last pseudo-gradient; NaN unless measured.
        version: Of this package.
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
    changing_s: float = 0.0
    hidden: float = 0.0
    goodput: float = 0.0
    round_trip_s: float = math.nan
    rate: float = math.nan
    retransmits: int = 0
    norm: float = math.nan
    version: str = ""

    def to_bytes(self) -> bytes:
        """Return the message, at most ``MAX_BYTES`` long; a value that is no number is left out."""
        values = {"schema": SCHEMA, **asdict(self), "waits_for": self.waits_for[:MOST_NAMED]}
        return json.dumps({k: v for k, v in values.items() if v == v}).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Figures | None:
        """Return the figures of a message; None for any other text, or another schema."""
        try:
            values = json.loads(text) if len(text) <= MAX_BYTES else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict) or values.pop("schema", None) != SCHEMA:
            return None
        known = {one.name: one.type for one in fields(cls)}
        if not values.keys() <= known.keys() or "replica" not in values:
            return None
        if not all(_is_sound(known[name], value) for name, value in values.items()):
            return None
        return cls(**{**values, "waits_for": tuple(values.get("waits_for", ()))})


def _is_sound(kind: Any, value: object) -> bool:
    if kind == "int":
        return type(value) is int and 0 <= value < _MOST
    if kind == "float":
        return type(value) in (int, float) and math.isfinite(value) and 0 <= value < _MOST
    if kind == "str":
        is_text = isinstance(value, str) and len(value) <= _LONGEST
        return is_text and re.fullmatch(r"[\x20-\x7e]*", str(value)) is not None
    numbers = value if isinstance(value, list) and len(value) <= MOST_NAMED else [None]
    return all(_is_sound("int", one) for one in numbers)
