"""Messages between server and workers: fixed headers, small JSON, raw bytes; nothing is unpickled.

A message is one frame or two. The first is a header of 32 bytes, little endian:

    magic "DCAS", protocol u16, kind u16, number u64, version u64, fragment u16, count u16, run u32

Some kinds have a second frame. It is either JSON of at most ``MAX_JSON`` bytes, an object with the
keys of ``_FIELDS`` and perhaps keys of ``_OPTIONAL``, or the bytes of consecutive runs of a
fragment, at most ``MAX_BODY``.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ..base import extension
from ..base.extension import ASYNCHRONOUS as PROTOCOL

MAGIC = b"DCAS"
HEADER = struct.Struct("<4sHHQQHHI")
MAX_JSON = 1 << 16
MAX_NAME = 64
MAX_FRAGMENTS = 4096
# The most places in shared memory that a worker's first message names.
MAX_PLACES = 64
# The most updates in one answer, so that their JSON stays far below ``MAX_JSON``.
MAX_UPDATES = 64
# Bytes of the longest run: RUN_ELEMENTS of fp32.
MAX_BODY = 1 << 20
# Bytes of runs that one request may ask for.
MAX_BATCH = 3 * MAX_BODY
# ``number`` of a REFUSED if the worker's name is the reason.
NAME_TAKEN = 1
# Refusals that use up no sequence number: the next update has the same number.
UNCOUNTED = ("out of order", "from the future")
# Numbers below this bound survive JSON and arithmetic in 64 bits.
MAX_NUMBER = 1 << 62


class Kind(IntEnum):
    """The kinds of messages. In the comments, "I" is the sender, and "you" the receiver.

    ``number`` is the sequence number of an update unless the comment says something else. "JSON"
    and "bytes" name the second frame, if there is one.
    """

    # From a worker.
    # JSON: the worker's name and model. ``number`` tells workers of one name apart. Fragment 1:
    # the server may ask for another name. The answer repeats ``run``.
    HELLO = 1
    # JSON: my round is done, ask for the update. Fragment 1: I hold all buffers of this version.
    PUSH = 2
    RUN = 3  # bytes: runs of the update
    PULL = 4  # tell me the version to train from, I fetch its parameters
    GET = 5  # send me ``count`` runs of this version
    DONE = 6  # I have all runs of this version; confirm that the version was kept
    LEAVE = 7
    STATUS = 8
    # Tell me the version to train from; I hold all buffers of this version and want the later
    # updates (number 1), or I want all buffers (number 0).
    FOLLOW = 9
    GET_UPDATE = 10  # send me ``count`` runs of the update that made version ``number``
    # From a learner of decoupled training. In messages about runs, ``fragment`` is the number of a
    # piece, counted through all fragments; in others, the number of the fragment.
    SETTINGS = 11  # tell me the settings that all learners share
    # JSON: the learner's name and model. ``number`` tells learners of one name apart; ``version``:
    # inner steps taken. Fragment and ``run``: as in HELLO.
    JOIN = 12
    # I have taken ``number`` inner steps; the last one took ``version`` microseconds. An answer
    # with the same ``run`` is wanted if ``run`` is not 0.
    STEP = 13
    OFFER = 14  # JSON: I have report ``number`` on a fragment, measured from ``version``
    START = 15  # I have parameters to start from, ask for their runs
    # JSON: as STEP, but I take no more steps for now. ``progress``, by fragment: the version from
    # which I have training that is not merged; -1 for none.
    REST = 16
    # From the server.
    # JSON: you take part. Fragment 1: another worker of your name came since, and may have sent
    # updates. ``history`` is a random number of this server process; ``began`` is the version that
    # it has restored, -1 for none.
    WELCOME = 32
    WANT = 33  # send me ``count`` runs of the update
    OUTCOME = 34  # JSON: the update was applied or refused
    READY = 35  # JSON: train from this version, ask for its parameters
    DATA = 36  # bytes: runs of the version
    GONE = 37  # this version is not kept any more, ask for another
    UNKNOWN = 38  # I do not know you, say HELLO first
    REFUSED = 39  # JSON: one sentence; number ``NAME_TAKEN``: a live worker has your name
    REPORT = 40  # JSON: the status
    WAIT = 41  # I have your message, the answer comes later
    STATE = 42  # JSON: train from this version, ask for all of its buffers
    UPDATES = 43  # JSON: train from this version, ask for the updates that lead to it
    KEPT = 44  # the version was kept until you had all of it
    # To a learner of decoupled training.
    SET = 48  # JSON: the settings that all learners share
    ADMITTED = 49  # JSON: you take part
    CALL = 50  # report on a fragment, from ``version``
    # A fragment has this new version. ``number`` is your last merged report, 0 if none. With count
    # 1 you may GET the encoded difference to the version before, as number 1.
    COMMIT = 51
    NOTED = 52  # the answer to STEP ``run``
    VERDICT = 53  # JSON: report ``number`` on a fragment was taken, or refused


@dataclass(frozen=True)
class Message:
    """One parsed message.

    Attributes:
        meta: The checked JSON object; empty for the kinds without JSON.
        body: The bytes of runs; empty for the kinds without runs.
        count: Number of runs that the sender asks for.
    """

    kind: Kind
    number: int = 0
    version: int = 0
    fragment: int = 0
    run: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    body: bytes | memoryview = b""
    count: int = 1


class ProtocolError(ValueError):
    """Bytes that are not a message of this protocol; the text is one sentence.

    Attributes:
        protocol: The version of the protocol, if the bytes are a message of another version.
    """

    protocol: int | None = None


Check = Callable[[Any], bool]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 1024


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_NAME and value.isprintable()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_NUMBER


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_count_or_none(value: object) -> bool:
    """Return whether a value is a count, or -1 for none."""
    return value == -1 or _is_count(value)


def _list_of(is_valid: Check, most: int, least: int = 0) -> Check:
    """Return a check: whether a value is a list of ``least`` to ``most`` valid values."""
    return lambda value: (
        isinstance(value, list) and least <= len(value) <= most and all(map(is_valid, value))
    )


_is_sizes = _list_of(lambda value: _is_count(value) and value != 0, MAX_FRAGMENTS, least=1)
_is_counts = _list_of(_is_count, MAX_FRAGMENTS)
_is_counts_or_none = _list_of(_is_count_or_none, MAX_FRAGMENTS)
_is_digests = _list_of(_is_count, 2, least=2)
_is_places = _list_of(_is_name, MAX_PLACES)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_rule(value: object) -> bool:
    """Return whether a value has the arguments of ``FusedState``, by name."""
    return (
        isinstance(value, dict)
        and value.keys() == {"period", "mu", "direct", "ahead", "behind", "between", "follows"}
        and _is_count(value["period"])
        and value["period"] >= 1
        and _is_flag(value["follows"])
        and (value["mu"] is None or _is_number(value["mu"]))
        and all(_is_number(value[name]) for name in ("direct", "ahead", "behind", "between"))
    )


def _is_update(value: object) -> bool:
    """Return whether a value is a list [wire, block size, weight, learning rate] of an update."""
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(check(field) for check, field in zip(_OF_UPDATE, value, strict=True))
    )


_OF_UPDATE = (_is_text, _is_count, _is_number, _is_number)
_is_updates = _list_of(_is_update, MAX_UPDATES)


_FIELDS: dict[Kind, dict[str, Check]] = {
    Kind.HELLO: {"worker": _is_name, "layout": _is_count, "sizes": _is_sizes},
    Kind.PUSH: {
        "wire": _is_text,
        "block_size": _is_count,
        "steps": _is_count,
        "seconds": _is_seconds,
        "is_start": _is_flag,
    },
    Kind.WELCOME: {
        "needs_start": _is_flag,
        "rule": _is_object,
        "sync_every": _is_count,
        "history": _is_count,
        "began": _is_count_or_none,
    },
    Kind.OUTCOME: {"staleness": _is_count_or_none, "refusal": _is_text, "reason": _is_text},
    Kind.READY: {"steps": _is_count},
    Kind.STATE: {"steps": _is_count, "lr": _is_number, "rule": _is_rule},
    Kind.UPDATES: {"steps": _is_count, "lr": _is_number, "updates": _is_updates},
    Kind.REFUSED: {"reason": _is_text},
    Kind.JOIN: {
        "worker": _is_name,
        "layout": _is_count,
        "settings": _is_count,
        "total": _is_count,
        "sizes": _is_sizes,
        "pieces": _is_sizes,
        "alone": _is_counts,
    },
    Kind.OFFER: {"steps": _is_count, "tokens": _is_count},
    Kind.REST: {"progress": _is_counts_or_none},
    Kind.SET: {"settings": _is_object},
    Kind.ADMITTED: {
        "needs_start": _is_flag,
        "history": _is_count,
        "run": _is_count,
        "seqs": _is_counts,
    },
    Kind.VERDICT: {"refusal": _is_text},
    Kind.REPORT: {"status": _is_object},
}
# Optional fields of a worker's first message. ``unexchanged``: digests of its frozen parameters and
# of its persistent buffers. If they differ from the first worker's, the worker is refused; with
# ``warns``, or if only buffers differ, it gets a warning. ``memory``: names of the shared memory in
# which its parameters lie.
_BESIDE: dict[str, Check] = {"unexchanged": _is_digests, "warns": _is_flag, "memory": _is_places}
_OPTIONAL: dict[Kind, dict[str, Check]] = {
    Kind.HELLO: _BESIDE,
    Kind.JOIN: _BESIDE,
    Kind.WELCOME: {"warning": _is_text},
    Kind.ADMITTED: {"warning": _is_text},
}
_WITH_BODY = (Kind.RUN, Kind.DATA)


def pack(message: Message, protocol: int = PROTOCOL) -> list[bytes | memoryview]:
    """Return the frames of a message.

    Args:
        protocol: The version in the header; another one than ours for a refusal that a peer of
            another version reads.
    """
    header = HEADER.pack(
        MAGIC,
        protocol,
        message.kind,
        message.number,
        message.version,
        message.fragment,
        message.count,
        message.run,
    )
    if message.kind in _WITH_BODY:
        return [header, message.body]
    if message.kind in _FIELDS:
        return [header, json.dumps(message.meta, separators=(",", ":")).encode()]
    return [header]


def parse(frames: Sequence[Any]) -> Message:
    """Turn frames (bytes or buffers) into a message; a body is a view of its frame.

    Raises:
        ProtocolError: If the frames are no message; any bytes are allowed as input.
    """
    if not 1 <= len(frames) <= 2:
        raise ProtocolError(f"a message has one frame or two, got {len(frames)}")
    views = [memoryview(frame).cast("B") for frame in frames]
    if views[0].nbytes != HEADER.size:
        raise ProtocolError(f"a header has {HEADER.size} bytes, got {views[0].nbytes}")
    magic, protocol, of_kind, number, version, fragment, count, run = HEADER.unpack(views[0])
    if magic != MAGIC:
        raise ProtocolError("this is not a message of diloco_comm")
    if protocol != PROTOCOL:
        error = ProtocolError(extension.refusal(protocol, PROTOCOL))
        error.protocol = protocol
        raise error
    try:
        kind = Kind(of_kind)
    except ValueError:
        raise ProtocolError(f"there is no kind of message {of_kind}") from None
    if number >= MAX_NUMBER or version >= MAX_NUMBER:
        raise ProtocolError("a number in the header is too large")
    expected = 2 if kind in _WITH_BODY or kind in _FIELDS else 1
    if len(views) != expected:
        raise ProtocolError(f"{kind.name} has {expected} frames, got {len(views)}")
    if kind in _WITH_BODY:
        if views[1].nbytes > MAX_BODY:
            raise ProtocolError(f"a body has at most {MAX_BODY} bytes, got {views[1].nbytes}")
        return Message(kind, number, version, fragment, run, {}, views[1], count)
    meta = _parse_meta(kind, views[1]) if kind in _FIELDS else {}
    return Message(kind, number, version, fragment, run, meta, count=count)


def _parse_meta(kind: Kind, view: memoryview) -> dict[str, Any]:
    if view.nbytes > MAX_JSON:
        raise ProtocolError(f"{kind.name} has at most {MAX_JSON} bytes, got {view.nbytes}")
    try:
        meta = json.loads(bytes(view))
    except (ValueError, RecursionError):
        raise ProtocolError(f"{kind.name} holds no JSON") from None
    wanted, optional = _FIELDS[kind], _OPTIONAL.get(kind, {})
    if not isinstance(meta, dict) or meta.keys() - optional.keys() != wanted.keys():
        raise ProtocolError(f"{kind.name} needs the fields {', '.join(wanted)}")
    for name, is_valid in {**wanted, **optional}.items():
        if name in meta and not is_valid(meta[name]):
            raise ProtocolError(f"the field {name} of {kind.name} is out of its range")
    return meta
