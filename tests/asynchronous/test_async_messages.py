"""The message parser: round trips, every limit, and bytes of any kind."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_comm.asynchronous.messages import (
    HEADER,
    MAGIC,
    MAX_BODY,
    MAX_FRAGMENTS,
    MAX_JSON,
    PROTOCOL,
    Kind,
    Message,
    ProtocolError,
    pack,
    parse,
)

HELLO = {"worker": "a", "layout": 5, "sizes": [3, 4]}
PUSH = {"wire": "int8", "block_size": 256, "steps": 3, "seconds": 0.5, "is_start": False}
FUZZ = settings(deadline=None, derandomize=True, max_examples=300)


def header(
    kind: int, number: int = 1, magic: bytes = MAGIC, protocol: int = PROTOCOL, version: int = 0
) -> bytes:
    return HEADER.pack(magic, protocol, kind, number, version, 0, 1, 0)


@pytest.mark.parametrize(
    "message",
    [
        Message(Kind.HELLO, meta=HELLO),
        Message(Kind.PUSH, 7, 9, meta=PUSH),
        Message(Kind.RUN, 7, 0, 3, 4, body=b"\0\1\2"),
        Message(Kind.PULL),
        Message(Kind.GET, 0, 9, 1, 2, count=16),
        Message(Kind.OUTCOME, 7, 9, meta={"staleness": -1, "refusal": "x", "reason": "y"}),
        Message(Kind.DATA, 0, 9, 3, 4, body=b""),
        Message(Kind.REPORT, meta={"status": {"a": [1]}}),
    ],
    ids=lambda message: message.kind.name,
)
def test_round_trip(message: Message) -> None:
    got = parse(pack(message))
    assert bytes(got.body) == bytes(message.body)
    assert got == Message(**{**message.__dict__, "body": got.body})


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([], "one frame or two, got 0"),
        ([b"", b"", b""], "one frame or two, got 3"),
        ([b"short"], "a header has 32 bytes, got 5"),
        ([b"\0" * 32], "not a message of diloco_comm"),
        ([header(1, protocol=9), b"{}"], "protocol version 9 was given, 5 is spoken here"),
        ([header(999)], "no kind of message 999"),
        ([header(Kind.PULL, number=1 << 63)], "too large"),
        ([header(Kind.PULL, version=(1 << 64) - 1)], "too large"),
        ([header(Kind.PULL), b"x"], "PULL has 1 frames, got 2"),
        ([header(Kind.HELLO)], "HELLO has 2 frames, got 1"),
        ([header(Kind.RUN), b"\0" * (MAX_BODY + 1)], "a body has at most"),
        ([header(Kind.HELLO), b" " * (MAX_JSON + 1)], "HELLO has at most"),
        ([header(Kind.HELLO), b"{"], "holds no JSON"),
        ([header(Kind.HELLO), b"\xff\xfe"], "holds no JSON"),
        ([header(Kind.HELLO), b"[" * 60_000], "holds no JSON"),
        ([header(Kind.HELLO), b"9" * 60_000], "holds no JSON|needs the fields"),
        ([header(Kind.HELLO), b"[]"], "needs the fields worker, layout, sizes"),
        ([header(Kind.HELLO), b"{}"], "needs the fields"),
        ([header(Kind.HELLO), json.dumps({**HELLO, "more": 1}).encode()], "needs the fields"),
    ],
)
def test_what_is_not_a_message(frames: list[bytes], sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        parse(frames)


@pytest.mark.parametrize(
    ("kind", "meta", "change"),
    [
        (Kind.HELLO, HELLO, {"worker": ""}),
        (Kind.HELLO, HELLO, {"worker": "x" * 65}),
        (Kind.HELLO, HELLO, {"worker": "a\nb"}),
        (Kind.HELLO, HELLO, {"worker": 5}),
        (Kind.HELLO, HELLO, {"layout": True}),
        (Kind.HELLO, HELLO, {"layout": 1.5}),
        (Kind.HELLO, HELLO, {"sizes": []}),
        (Kind.HELLO, HELLO, {"sizes": [0]}),
        (Kind.HELLO, HELLO, {"sizes": [1] * 5000}),
        (Kind.HELLO, HELLO, {"sizes": [1 << 63]}),
        (Kind.PUSH, PUSH, {"seconds": -1}),
        (Kind.PUSH, PUSH, {"seconds": float("nan")}),
        (Kind.PUSH, PUSH, {"seconds": float("inf")}),
        (Kind.PUSH, PUSH, {"steps": -1}),
        (Kind.PUSH, PUSH, {"wire": "x" * 2000}),
        (Kind.PUSH, PUSH, {"is_start": 1}),
    ],
)
def test_fields_out_of_range(kind: Kind, meta: dict, change: dict) -> None:
    with pytest.raises(ProtocolError, match=f"the field {next(iter(change))} of {kind.name}"):
        parse([header(kind), json.dumps({**meta, **change}).encode()])


@pytest.mark.parametrize(
    ("kind", "meta", "field"), [(Kind.HELLO, HELLO, "sizes"), (Kind.REST, {}, "progress")]
)
def test_a_list_is_as_long_as_its_limit_and_no_longer(kind: Kind, meta: dict, field: str) -> None:
    longest = Message(kind, meta={**meta, field: [1] * MAX_FRAGMENTS})
    assert parse(pack(longest)) == longest
    longer = Message(kind, meta={**meta, field: [1] * (MAX_FRAGMENTS + 1)})
    with pytest.raises(ProtocolError, match=field):
        parse(pack(longer))


@FUZZ
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_are_parsed_or_refused(frames: list[bytes]) -> None:
    try:
        parse(frames)
    except ProtocolError:
        pass


@FUZZ
@given(
    st.sampled_from([int(kind) for kind in Kind]),
    st.integers(0, (1 << 64) - 1),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from([*HELLO, *PUSH, "status", "reason"]), inner, max_size=6
            )
        ),
        max_leaves=12,
    ),
)
def test_any_json_behind_a_good_header(kind: int, number: int, value: object) -> None:
    try:
        message = parse([header(kind, number), json.dumps(value).encode()])
    except ProtocolError:
        return
    assert message.kind == kind and message.number < 1 << 62


@FUZZ
@given(st.integers(0, 31), st.integers(0, 255), st.binary(max_size=40))
def test_one_byte_changed(position: int, byte: int, tail: bytes) -> None:
    for message in (Message(Kind.PUSH, 7, 9, meta=PUSH), Message(Kind.RUN, 1, 2, body=b"ab")):
        frames = [bytearray(bytes(frame)) for frame in pack(message)]
        frames[0][position] = byte
        frames[1] += tail
        try:
            parse(frames)
        except ProtocolError:
            pass
