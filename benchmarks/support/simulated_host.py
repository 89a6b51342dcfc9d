"""A host of a store in memory: what it would have of many replicas, for tests and measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diloco_comm.group.beats import EVICT, TRAINING, Beat, Way, eviction_of, name_of
from diloco_comm.group.records import NO_HASH, Attempt, Key, Record
from diloco_comm.group.state import Place
from diloco_comm.monitor.figures import Figures
from diloco_comm.monitor.status import Snapshot, Text

BEGAN = 1_800_000_000.0


def key_of(number: int, start: int = 0) -> Key:
    """Return the name of a replica's process; each start of the replica has another one."""
    return Key(number, start.to_bytes(8, "big") + number.to_bytes(8, "big"))


def record_of(number: int, numbers: list[int], **values: Any) -> Record:
    members = tuple(key_of(one) for one in numbers)
    attempt = Attempt(members[0].nonce, 1)
    parent = NO_HASH if number == 1 else bytes([number]) * 16
    one = Record(number, parent, b"t" * 16, NO_HASH if number == 1 else b"f" * 16, attempt, members)
    return replace(one, **values)


class SimulatedHost:
    """Keeps the last texts, as ``_C.StoreHost`` does; ``now`` is the clock of all ages.

    Args:
        now: Returns seconds.
    """

    def __init__(self, now: Callable[[], float] = lambda: 0.0) -> None:
        self._now = now
        self.posts: dict[tuple[str, str], tuple[bytes, float]] = {}
        self._beats: dict[tuple[str, str], tuple[bytes, float]] = {}
        self._records: dict[str, bytes] = {}

    def post(self, run: str, key: Key, **figures: Any) -> None:
        text = Figures(key.number, **{"created": BEGAN, **figures}).to_bytes()
        self.posts[run, name_of(key)] = (text, self._now())

    def beat(
        self, run: str, key: Key, stage: str = TRAINING, phase: str = "", **place: Any
    ) -> None:
        way = Way(key.nonce.hex(), f"192.0.2.1:{1000 + key.number}", "", "").to_text()
        beat = Beat(Place(key, b"s" * 16, **{"entered": 1, **place}), 1, stage, phase, (way,))
        self._beats[run, name_of(key)] = (beat.to_bytes(), self._now())

    def ask_to_leave(self, run: str, key: Key) -> None:
        self._beats[run, eviction_of(key)] = (EVICT, self._now())

    def forget(self, run: str, name: str) -> None:
        """Take back the beat with a name."""
        self._beats.pop((run, name))

    def drop(self, run: str) -> None:
        """Forget all of a run, as a host does after a while."""
        for texts in (self.posts, self._beats):
            for name in [name for name in texts if name[0] == run]:
                del texts[name]
        self._records.pop(run, None)

    def swap(self, run: str, record: Record) -> None:
        self._records[run] = record.to_bytes()

    def posted(self) -> list[Text]:
        return [(*name, text, self._now() - at) for name, (text, at) in self.posts.items()]

    def beats(self) -> list[Text]:
        return [(*name, text, self._now() - at) for name, (text, at) in self._beats.items()]

    def records(self) -> dict[str, bytes]:
        return dict(self._records)

    def facts(self) -> dict[str, int]:
        return {"connections": len(self._beats), "requests": 12345, "received_bytes": 1 << 20}

    def snapshot(self) -> Snapshot:
        facts = {f"host_{name}": value for name, value in self.facts().items()}
        return Snapshot(self.posted(), self.beats(), self.records(), facts)
