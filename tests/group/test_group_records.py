"""Records of a group, and the decision about rounds that they carry."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_comm.group.records import (
    MAX_RECORD_BYTES,
    NO_HASH,
    Attempt,
    Key,
    Record,
    cause_of,
    record_hash,
)
from diloco_comm.group.streams import MOST_ROUNDS, Rounds, decide

NONCE = bytes(range(16))


def record(num_members: int = 2, **values: object) -> Record:
    members = tuple(Key(number, number.to_bytes(16, "big")) for number in range(num_members))
    one = Record(1, NO_HASH, b"t" * 16, NO_HASH, Attempt(NONCE, 1), members)
    return replace(one, **values)  # type: ignore[arg-type]


rounds = st.builds(
    lambda first, num, bits: Rounds(first, num, bits & ((1 << num) - 1)),
    st.integers(0, 1 << 40),
    st.integers(0, MOST_ROUNDS),
    st.integers(0, (1 << MOST_ROUNDS) - 1),
)
records = st.builds(
    lambda number, members, decision, source, inner_step, out, is_finished: Record(
        number,
        bytes([number % 256]) * 16,
        b"t" * 16,
        b"f" * 16 if number > 1 else NO_HASH,
        Attempt(NONCE, 1 + number % 1000),
        tuple(Key(one, bytes([one % 256]) * 16) for one in sorted(members)),
        joined=tuple(sorted(members))[:1],
        decision=decision,
        inner_step=inner_step,
        source=source,
        left_out=out,
        evicted=out[:1],
        is_finished=is_finished,
    ),
    st.integers(1, 1 << 40),
    st.sets(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=20),
    st.lists(rounds, max_size=12).map(tuple),
    st.none() | st.integers(0, 0xFFFFFFFF),
    st.integers(-1, 1 << 50),
    st.lists(st.integers(0, 0xFFFFFFFF), max_size=4).map(tuple),
    st.booleans(),
)


@given(records)
@settings(max_examples=150, deadline=None)
def test_a_record_is_read_as_it_was_written(one: Record) -> None:
    content = one.to_bytes()
    assert Record.from_bytes(content) == one and Record.from_bytes(content).to_bytes() == content
    assert one.hash == record_hash(content)


def test_a_member_takes_24_bytes_and_a_thousand_members_fit() -> None:
    assert len(record(101).to_bytes()) - len(record(100).to_bytes()) == 24
    decision = (Rounds(1000, 2, 3), Rounds(1001, 2, 1)) * 512
    full = record(1000, decision=decision, left_out=tuple(range(1000, 2000)))
    assert len(full.to_bytes()) < MAX_RECORD_BYTES
    assert Record.from_bytes(full.to_bytes()) == full


def test_successive_streams_that_are_alike_take_one_entry() -> None:
    alike = record(decision=(Rounds(70_000, 2, 3),) * 60_000)
    assert len(alike.to_bytes()) < len(record().to_bytes()) + 16
    assert Record.from_bytes(alike.to_bytes()) == alike


def test_a_record_that_no_table_would_hold_is_refused_by_its_writer() -> None:
    with pytest.raises(ValueError, match="the record of 3000 members and 0 streams has 72"):
        record(3000).to_bytes()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "the table holds no record of a group: b''"),
        (b'{"version": 2}', "the table holds no record of a group: "),
        (record().to_bytes()[:-1], "the table's record of a group is damaged: "),
        (record().to_bytes() + b"x", "the table's record of a group is damaged: "),
        (record().to_bytes()[:4] + b"\x07\x00" + record().to_bytes()[6:], "has version 7, and"),
    ],
)
def test_a_foreign_damaged_or_newer_record_is_refused_in_one_sentence(
    content: bytes, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Record.from_bytes(content)


@given(records, st.data())
@settings(max_examples=150, deadline=None)
def test_a_record_with_other_bytes_is_another_record_or_none(
    one: Record, data: st.DataObject
) -> None:
    content = bytearray(one.to_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    try:
        other = Record.from_bytes(bytes(content))
    except ValueError:
        return
    assert other != one and other.to_bytes() == bytes(content)


def test_the_hash_of_a_record_follows_each_of_its_values() -> None:
    one = record(decision=(Rounds(0, 2, 3),))
    others = [
        replace(one, number=2, founding=b"f" * 16),
        replace(one, parent=b"p" * 16),
        replace(one, attempt=Attempt(NONCE, 2)),
        replace(one, decision=(Rounds(0, 2, 1),)),
        replace(one, joined=(1,)),
        replace(one, source=0),
        replace(one, is_finished=True),
    ]
    assert len({other.hash for other in (one, *others)}) == 8


def test_the_first_record_has_number_1() -> None:
    assert record().run_id == record().hash
    for number, founding in ((0, NO_HASH), (1, b"f" * 16), (2, NO_HASH)):
        with pytest.raises(ValueError, match="the table's record of a group is damaged"):
            Record.from_bytes(record(number=number, founding=founding).to_bytes())


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"joined": (0, 1)}, "the run begins"),
        ({"left_out": (1,)}, "replicas [1] left"),
        ({"left_out": (1, 3), "joined": (2,)}, "replicas [1, 3] left, replicas [2] join"),
        ({}, "the members meet again"),
    ],
)
def test_a_record_says_why_it_follows(values: dict[str, object], cause: str) -> None:
    number, parent = (1, NO_HASH) if cause == "the run begins" else (2, b"p" * 16)
    assert cause_of(record(number=number, parent=parent, **values)) == cause


# -------------------------------------------------------------------------------- the decision


def test_a_round_counts_if_all_hold_it() -> None:
    assert decide([(Rounds(4, 2, 0b11),), (Rounds(4, 2, 0b01),)]) == (Rounds(4, 2, 0b01),)


def test_a_round_that_one_member_has_not_voted_for_is_void_and_its_position_is_used() -> None:
    (one,) = decide([(Rounds(0, 3, 0b111),), (Rounds(0, 2, 0b11),)])
    assert one == Rounds(0, 3, 0b011) and one.end == 3 and not one.holds(2)


def test_a_void_round_does_not_void_the_round_after_it() -> None:
    assert decide([(Rounds(0, 3, 0b101),), (Rounds(0, 3, 0b111),)]) == (Rounds(0, 3, 0b101),)


def test_members_that_name_rounds_from_other_positions_on_agree_on_the_later_ones() -> None:
    assert decide([(Rounds(2, 4, 0b1111),), (Rounds(4, 2, 0b10),)]) == (Rounds(4, 2, 0b10),)


def test_streams_are_decided_apart() -> None:
    both = decide([(Rounds(0, 1, 1), Rounds(0, 1, 0)), (Rounds(0, 1, 1), Rounds(0, 1, 1))])
    assert both == (Rounds(0, 1, 1), Rounds(0, 1, 0))


def test_a_member_without_state_decides_nothing_and_nobody_at_all_decides_nothing() -> None:
    assert decide([(Rounds(0, 1, 1),), ()]) == (Rounds(0, 1, 1),)
    assert decide([(), ()]) == () and decide([]) == ()


def test_members_that_are_too_far_apart_or_have_other_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="a member is at round 2 of a stream, and the others name"):
        decide([(Rounds(0, 2, 3),), (Rounds(5, 2, 3),)])
    with pytest.raises(ValueError, match=r"members have \[1, 2\] streams"):
        decide([(Rounds(0, 1, 1),), (Rounds(0, 1, 1), Rounds(0, 1, 1))])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 255)), min_size=1))
@settings(max_examples=150, deadline=None)
def test_the_decision_is_the_same_in_any_order_of_members(
    given_rounds: list[tuple[int, int, int]],
) -> None:
    sealed = [(Rounds(f, 4 + n, bits & ((1 << 4 + n) - 1)),) for f, n, bits in given_rounds]
    assert decide(sealed) == decide(sealed[::-1])
    (decided,) = decide(sealed)
    for position in range(decided.first, decided.end):
        assert decided.holds(position) == all(one.holds(position) for (one,) in sealed)


@pytest.mark.parametrize("values", [(0, 65, 0), (0, 2, 4), (-1, 2, 0), (0, 2, -1)])
def test_rounds_that_cannot_be_are_refused(values: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="a stream"):
        Rounds(*values)
