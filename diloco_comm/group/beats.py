"""Beats: the text about itself that a living process writes into the table again and again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from ..base.checks import logger_of
from ..base.extension import GROUP as VERSION
from ..base.extension import RefusedVersions, refusal
from .records import Key
from .state import Place, Stage, State

MAX_BEAT_BYTES = 1 << 14
# A beat names at most so many processes that its process cannot reach: it has no room for more.
_MOST_CUT = 24
# The longest address of a store, in bytes.
_LONGEST_STORE = 300
_EVICT = "evict."
# Fields that may change with each beat of a process that trains: they are in the second line of the
# beat's text.
_MOVING = ("counter", "phase", "inner_step")
# The text of a beat that asks a process to leave.
EVICT = b"evict"
_refused = RefusedVersions(logger_of(__name__), "the beat of another replica")

# The stages that a beat names. A newcomer that copies the outer state before it can be let in:
PULLING = "pulling"
# A newcomer that waits to be let in.
READY = "ready"
# A member of a record that trains.
TRAINING = "training"
# A member that has stopped at a boundary, as all members of its record do.
STOPPED = "stopped"
# A member that stops, or has stopped, for good in its record, and waits for the next record.
CHANGING = "changing"
# A process that has left; FINISHED: because it has taken all steps.
GONE = "gone"
FINISHED = "finished"
_STAGES = {
    Stage.TRAINING: TRAINING,
    Stage.STOPPED: STOPPED,
    Stage.SEALING: CHANGING,
    Stage.SEALED: CHANGING,
    Stage.GONE: GONE,
}


@dataclass(frozen=True)
class Beat:
    """One beat.

    Attributes:
        place: Where the process stands in the agreement.
        counter: How many beats this process has made.
        stage: One of the stages above.
        phase: The present work of its training loop, such as "steps", "exchange" or a name from
            ``DiLoCo.doing``.
        ways: The addresses of the links of all workers of the replica, each as the text of a
            ``Way``. The first is the link of the process that beats.
        store: ``tcp://host:port`` of the store that this process uses; "" for none.
        serves: Whether other processes can copy the outer state over its link.
    """

    place: Place
    counter: int
    stage: str = READY
    phase: str = ""
    ways: tuple[str, ...] = ()
    store: str = ""
    serves: bool = False

    @property
    def key(self) -> Key:
        return self.place.key

    @property
    def is_gone(self) -> bool:
        return self.stage in (GONE, FINISHED)

    def to_bytes(self) -> bytes:
        """Return the text of this beat.

        The text has two lines. While a process trains, often only the second one changes from beat
        to beat, and readers may get an older second line.

        Raises:
            ValueError: If the text is longer than ``MAX_BEAT_BYTES``.
        """
        place = replace(self.place, cut=self.place.cut[:_MOST_CUT])
        values = {**_written(place), **{name: getattr(self, name) for name in _OWN}}
        moving = {name: values.pop(name) for name in _MOVING}
        if self.stage != TRAINING:
            values["inner_step"] = moving.pop("inner_step")
        lasting = json.dumps({"version": VERSION, **values}, sort_keys=True)
        text = f"{lasting[:-1]},\n{json.dumps(moving, sort_keys=True)[1:]}".encode()
        if len(text) > MAX_BEAT_BYTES:
            raise ValueError(
                f"the beat of replica {self.key.number} has {len(text)} bytes, at most "
                f"{MAX_BEAT_BYTES} are allowed: it names {len(self.ways)} workers"
            )
        return text

    @classmethod
    def from_bytes(cls, text: bytes) -> Beat | None:
        """Return the beat that the text holds; None for any other text.

        A beat of another version is logged, once.
        """
        try:
            values = json.loads(text)
            version = values.pop("version")
            if version != VERSION or type(version) is not int:
                _refused.log(version, ValueError(refusal(version, VERSION)))
                return None
            own = {name: values.pop(name) for name in _OWN}
            beat = cls(_read(values), **{**own, "ways": tuple(own["ways"])})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return beat if _is_sound(beat) else None


def most_workers(ways: Sequence[str]) -> int:
    """Return how many workers a replica may have: its beat names an address of each.

    Args:
        ways: Texts of some workers' addresses; all others are taken as long as the longest one.
    """
    most = (1 << 62) - 1
    place = Place(
        Key((1 << 31) - 1, bytes(16)),
        bytes(16),
        entered=most,
        follows=most,
        inner_step=most,
        cut=(bytes(16),) * _MOST_CUT,
    )
    rest = Beat(place, most, TRAINING, "x" * 16, store="x" * _LONGEST_STORE)
    longest = max(len(json.dumps(way)) for way in ways)
    return (MAX_BEAT_BYTES - len(rest.to_bytes())) // (longest + len(", "))


def name_of(key: Key) -> str:
    """Return the name under which a process beats."""
    return f"{key.number}.{key.nonce.hex()}"


def eviction_of(key: Key) -> str:
    """Return the name of a beat that asks a process to leave its group, for good."""
    return _EVICT + name_of(key)


def evicted(names: Mapping[str, bytes]) -> frozenset[str]:
    """Return the names of the processes that somebody has asked to leave."""
    return frozenset(name.removeprefix(_EVICT) for name in names if name.startswith(_EVICT))


def stage_of(state: State) -> str:
    """Return the stage that a process names in its beats."""
    if state.stage is Stage.NEWCOMER:
        return PULLING if state.follows is None else READY
    return FINISHED if state.is_finished else _STAGES[state.stage]


@dataclass(frozen=True)
class Way:
    """The address at which other processes reach the link of a process; a beat has it as text.

    Attributes:
        nonce: The link's name, 32 hexadecimal digits.
        address: "host:port", or "" where nobody can dial the process.
        key: The public key as 64 hexadecimal digits, or "".
        relay: "host:port" of the relay where the process waits, or "".
    """

    nonce: str
    address: str
    key: str
    relay: str

    def to_text(self) -> str:
        return " ".join([self.nonce, self.address or "-", self.key or "-", self.relay or "-"])

    @classmethod
    @lru_cache(maxsize=1024)
    def from_text(cls, text: str) -> Way | None:
        """Return the address that a text of a beat holds; None if the text is no address."""
        words = ["" if word == "-" else word for word in text.split(" ")]
        is_sound = text.isascii() and len(words) == 4 and _is_hex(words[0], 32)
        return cls(*words) if is_sound and (not words[2] or _is_hex(words[2], 64)) else None

    @property
    def words(self) -> tuple[str, str, str, str]:
        """The arguments with which ``_C.Link.reach`` connects to the process."""
        return self.nonce, self.address, self.key, self.relay


def _is_hex(text: str, length: int) -> bool:
    return re.fullmatch(f"[0-9a-f]{{{length}}}", text) is not None


# ------------------------------------------------------------------------------------- JSON

_OWN = tuple(one.name for one in fields(Beat) if one.name != "place")


def _written(place: Place) -> dict[str, Any]:
    values = asdict(place)
    del values["key"], values["is_fresh"]
    hexed = {"settings": place.settings.hex(), "cut": [nonce.hex() for nonce in place.cut]}
    return {**values, **hexed, "number": place.key.number, "nonce": place.key.nonce.hex()}


def _read(values: dict[str, Any]) -> Place:
    key = Key(values.pop("number"), _nonce(values.pop("nonce")))
    settings, cut = _nonce(values.pop("settings")), values.pop("cut")[:_MOST_CUT]
    return Place(key, settings, cut=tuple(map(_nonce, cut)), **values)


def _nonce(text: str) -> bytes:
    """Return the 16 bytes of a name.

    Raises:
        ValueError: If the text is no such name.
    """
    if not _is_hex(text, 32):
        raise ValueError
    return bytes.fromhex(text)


def _is_sound(beat: Beat) -> bool:
    place = beat.place
    follows = 0 if place.follows is None else place.follows
    numbers = (place.key.number, beat.counter, place.entered, follows, place.inner_step)
    flags = (place.has_state, place.is_leaving, place.is_finished, place.has_checkpoint)
    return (
        all(type(one) is int and -1 <= one < 1 << 62 for one in numbers)
        and 0 <= place.key.number < 1 << 31
        and all(type(one) is bool for one in (*flags, beat.serves))
        and all(type(one) is str for one in (beat.stage, beat.phase, beat.store, *beat.ways))
        and beat.stage in {PULLING, READY, FINISHED, *_STAGES.values()}
    )
