"""Messages of a group: the bytes, and what hostile or damaged bytes lead to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco_comm.group import messages as ms
from diloco_comm.group.messages import (
    MAX_MESSAGE_BYTES,
    NO_ATTEMPT,
    Why,
    decode,
    difference,
    encode,
    other_settings,
)
from diloco_comm.group.records import MAX_RECORD_BYTES, NO_HASH, NO_RECORD, Attempt, Key
from diloco_comm.group.streams import Rounds

ATTEMPT = Attempt(bytes(range(16)), 7)
KEYS = (Key(0, b"a" * 16), Key(3, b"b" * 16))

numbers = st.lists(st.integers(0, 0xFFFFFFFF), max_size=5).map(tuple)
nonces = st.lists(st.binary(min_size=16, max_size=16), max_size=5).map(tuple)
positions = st.lists(
    st.builds(lambda f, n, b: Rounds(f, n, b % (1 << n)), st.integers(0, 99), st.integers(0, 9),
              st.integers(0, 999)),
    max_size=5,
).map(tuple)  # fmt: skip
messages = st.one_of(
    st.builds(ms.Here, st.integers(1, 99), st.just(b"h" * 16), numbers, nonces),
    st.builds(ms.Here, st.just(NO_RECORD), st.just(NO_HASH), numbers, nonces),
    st.builds(
        ms.Prepare, st.just(ATTEMPT), st.integers(1, 99), st.just(b"h" * 16), st.just(KEYS),
        st.sampled_from([(), (3,), (0, 3)]), st.binary(min_size=16, max_size=16),
        st.binary(min_size=16, max_size=16), st.booleans(), st.text(max_size=99),
    ),
    st.builds(ms.Sealed, st.just(ATTEMPT), st.integers(0, 99), positions, st.integers(0, 99)),
    st.builds(ms.Ready, st.just(ATTEMPT)),
    st.builds(ms.No, st.sampled_from([ATTEMPT, NO_ATTEMPT]), st.sampled_from(list(Why)), nonces,
              numbers, st.text(max_size=99)),
    st.builds(ms.Open, st.binary(max_size=99)),
)  # fmt: skip


@given(messages)
@settings(max_examples=300, deadline=None)
def test_a_message_is_read_as_it_was_written(message: ms.Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
@example(b"")
@example(bytes([ms.VERSION]))
@example(bytes([ms.VERSION, 5, 0x80]))
@example(bytes([ms.VERSION, 3]) + b"\xff" * 190)
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_message_or_one_value_error_of_one_sentence(content: bytes) -> None:
    try:
        message = decode(content)
    except ValueError as error:
        assert type(error) is ValueError and str(error).startswith("a message of the group ")
        assert "\n" not in str(error) and len(str(error)) < 300
    else:
        assert decode(encode(message)) == message


@given(messages, st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_message_leads_to_no_other_error(
    message: ms.Message, data: st.DataObject
) -> None:
    content = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    for damaged in (bytes(content), bytes(content[:cut]), bytes(content) + b"\0"):
        try:
            decode(damaged)
        except ValueError as error:
            assert type(error) is ValueError


def test_few_bytes_cannot_name_many_streams_of_many_positions() -> None:
    # Each entry of eight bytes would stand for the most streams.
    entry = bytes([0xFF, 0xFF, 0x03, 0, 1, 1])
    hostile = bytes([ms.VERSION, 2]) + bytes(20) + b"\0\0\x7f" + entry * 127
    with pytest.raises(ValueError, match="a message of the group is damaged"):
        decode(hostile)


def test_a_message_of_another_version_is_named_as_such() -> None:
    content = bytes([ms.VERSION + 1]) + encode(ms.Ready(ATTEMPT))[1:]
    with pytest.raises(ValueError, match="has version 2, and this diloco_comm reads version 1"):
        decode(content)


def test_a_prepare_of_a_thousand_members_is_24_bytes_a_member() -> None:
    keys = tuple(Key(number, number.to_bytes(16, "big")) for number in range(1000))
    prepare = ms.Prepare(ATTEMPT, 5, b"h" * 16, keys, (), b"s" * 16, b"t" * 16)
    assert 24_000 < len(encode(prepare)) < 24_100 and decode(encode(prepare)) == prepare


def test_the_longest_record_fits_into_an_open_and_no_longer_one() -> None:
    longest = ms.Open(bytes(MAX_RECORD_BYTES))
    assert decode(encode(longest)) == longest
    with pytest.raises(ValueError, match=f"at most {MAX_MESSAGE_BYTES} are allowed"):
        encode(ms.Open(bytes(MAX_MESSAGE_BYTES)))


def test_a_long_text_is_cut_between_characters() -> None:
    no = ms.No(ATTEMPT, Why.SETTINGS, text="é" * 1000)
    decoded = decode(encode(no))
    assert isinstance(decoded, ms.No) and decoded.text == "é" * 512


def test_members_of_a_prepare_stand_in_the_order_of_their_numbers() -> None:
    turned = ms.Prepare(ATTEMPT, 5, b"h" * 16, KEYS[::-1], (), b"s" * 16, b"t" * 16)
    with pytest.raises(ValueError, match="damaged"):
        decode(encode(turned))


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ({"a": 1}, {"a": 1}, ""),
        ({"a": 1}, {"a": 2}, "a is 1 here and 2 there"),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "a.b[1] is 2 here and 3 there"),
        ({"a": [1]}, {"a": [1, "x"]}, 'a[1] is nothing here and "x" there'),
        ({}, {"a": None}, "a is nothing here and null there"),
    ],
)
def test_a_difference_is_named(here: Any, there: Any, said: str) -> None:
    assert difference(here, there) == said


def test_the_sentence_for_other_settings_names_the_setting_and_both_values() -> None:
    here, there = '{"model": {"layers": 4}}', '{"model": {"layers": 2}}'
    assert other_settings("run", 2, 0, here, there) == (
        "replica 2 cannot join run 'run', as model.layers is 4 on replica 2 and 2 on replica 0: "
        "start replica 2 with the model, settings and number of workers of the members"
    )
    deep = f'{{"model": {"[" * 100_000}{"]" * 100_000}}}'
    for unknown in ("", "{", here, deep):
        assert "replica 2 has another model or other settings than replica 0" in (
            other_settings("run", 2, 0, here, unknown)
        )
