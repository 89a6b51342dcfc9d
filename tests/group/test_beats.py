"""Beats of processes, the ways to their links, and beats that ask a process to leave."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_comm.base.extension import GROUP
from diloco_comm.elastic.registry.protocol import check_beat
from diloco_comm.exchange.membership.follower import Follower
from diloco_comm.exchange.membership.own_link import LinkShare, OwnLink
from diloco_comm.group.beats import (
    CHANGING,
    EVICT,
    FINISHED,
    GONE,
    MAX_BEAT_BYTES,
    PULLING,
    READY,
    STOPPED,
    TRAINING,
    Beat,
    Way,
    evicted,
    eviction_of,
    most_workers,
    name_of,
    stage_of,
)
from diloco_comm.group.records import NO_RECORD, Key
from diloco_comm.group.state import Place, Settings, Stage, State

KEY = Key(3, bytes(range(16)))
ONE = Beat(Place(KEY, b"s" * 16), 7)
STAGES = (PULLING, READY, TRAINING, STOPPED, CHANGING, GONE, FINISHED)

nonces = st.binary(min_size=16, max_size=16)
places = st.builds(
    Place,
    st.builds(Key, st.integers(0, (1 << 31) - 1), nonces),
    nonces,
    entered=st.integers(0, 1 << 40),
    has_state=st.booleans(),
    follows=st.none() | st.integers(0, 1 << 40),
    is_leaving=st.booleans(),
    is_finished=st.booleans(),
    inner_step=st.integers(0, 1 << 50),
    has_checkpoint=st.booleans(),
    cut=st.lists(nonces, max_size=24).map(tuple),
)
beats = st.builds(
    Beat,
    places,
    st.integers(0, 1 << 50),
    st.sampled_from(STAGES),
    st.text(max_size=12),
    st.lists(st.text(max_size=99), max_size=8).map(tuple),
    st.text(max_size=40),
    st.booleans(),
)


@given(beats)
@settings(max_examples=150, deadline=None)
def test_a_beat_is_read_as_it_was_written(one: Beat) -> None:
    text = one.to_bytes()
    assert Beat.from_bytes(text) == one and len(text) <= MAX_BEAT_BYTES
    assert one.key == one.place.key and one.is_gone == (one.stage in (GONE, FINISHED))


def test_the_first_line_stays_while_a_process_trains() -> None:
    def beat(counter: int, phase: str, step: int, stage: str = TRAINING) -> list[bytes]:
        place = replace(ONE.place, inner_step=step)
        return Beat(place, counter, stage, phase).to_bytes().split(b"\n")

    assert beat(1, "steps", 5)[0] == beat(2, "exchange", 6)[0]
    # Checkpoints of newcomers are compared.
    assert beat(1, "", 5, READY)[0] == beat(2, "", 5, READY)[0] != beat(2, "", 6, READY)[0]


@given(beats, st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_beat_is_another_beat_or_none(one: Beat, data: st.DataObject) -> None:
    text = bytearray(one.to_bytes())
    text[data.draw(st.integers(0, len(text) - 1))] ^= data.draw(st.integers(1, 255))
    other = Beat.from_bytes(bytes(text))
    assert other is None or Beat.from_bytes(other.to_bytes()) == other


@given(st.binary(max_size=40))
@settings(max_examples=50, deadline=None)
def test_garbage_is_no_beat(text: bytes) -> None:
    assert Beat.from_bytes(text) is None


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"null", b"[" * 9999, EVICT])
def test_a_foreign_text_is_no_beat(text: bytes) -> None:
    assert Beat.from_bytes(text) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", -1),
        ("number", "3"),
        ("number", 1 << 31),
        ("nonce", "ab" * 15),
        ("nonce", "AB" * 16),
        ("nonce", 3),
        ("settings", "zz" * 16),
        ("counter", "1"),
        ("counter", True),
        ("stage", "asleep"),
        ("stage", ["ready"]),
        ("entered", None),
        ("entered", -2),
        ("follows", "1"),
        ("inner_step", 1 << 62),
        ("cut", ["ab"]),
        ("cut", 3),
        ("ways", [1]),
        ("ways", 3),
        ("store", None),
        ("phase", 0),
        ("has_state", 1),
        ("serves", "yes"),
        ("version", GROUP + 1),
        ("version", [GROUP]),
        ("another", 1),
    ],
)
def test_a_beat_with_another_content_is_no_beat(name: str, value: object) -> None:
    values = json.loads(ONE.to_bytes())
    assert Beat.from_bytes(json.dumps(values).encode()) == ONE
    assert Beat.from_bytes(json.dumps(values | {name: value}).encode()) is None


def test_a_beat_of_another_version_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    values = json.loads(ONE.to_bytes())
    for _ in range(2):
        assert Beat.from_bytes(json.dumps(values | {"version": 99}).encode()) is None
    (said,) = caplog.messages
    assert said.startswith("the beat of another replica was refused: protocol version 99 was given")


def test_a_beat_names_the_ways_of_many_workers_and_not_of_too_many() -> None:
    way = Way("ab" * 16, "192.0.2.255:65535", "cd" * 32, "198.51.100.255:65535").to_text()
    place = replace(ONE.place, cut=(bytes(16),) * 24)
    assert Beat.from_bytes(replace(ONE, place=place, ways=(way,) * 64).to_bytes()) is not None
    with pytest.raises(ValueError, match=r"the beat of replica 3 has .* it names 200 workers"):
        replace(ONE, ways=(way,) * 200).to_bytes()


@pytest.mark.parametrize(
    "way",
    [
        Way("ab" * 16, "192.0.2.255:65535", "", ""),
        Way("ab" * 16, "192.0.2.255:65535", "cd" * 32, ""),
        Way("ab" * 16, "", "cd" * 32, "relay.cluster-a.example.com:29450"),
    ],
    ids=["plain", "keys", "relay"],
)
def test_the_most_workers_of_a_replica_fit_into_any_beat(way: Way) -> None:
    most = most_workers([way.to_text()] * 9)
    ways, number = (way.to_text(),) * most, 1 << 61
    place = Place(
        Key((1 << 31) - 1, bytes(16)),
        bytes(16),
        entered=number,
        follows=number,
        is_finished=False,
        inner_step=number,
        cut=(bytes(16),) * 99,
    )
    for stage in STAGES:
        beat = Beat(place, number, stage, "evaluation", ways, f"tcp://{'x' * 253}:65535")
        assert beat.to_bytes()
    with pytest.raises(ValueError, match="at most 16384 are allowed"):
        replace(ONE, ways=(way.to_text(),) * (most + 40)).to_bytes()


class ManyWorkers:
    """Worker 0 of a replica of so many workers, whose ways are alike."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


def test_a_replica_of_too_many_workers_is_refused_when_it_is_made() -> None:
    share = LinkShare(OwnLink("127.0.0.1:0", None, None), "name")
    workers: Any = ManyWorkers(1000)
    said = r"this replica has 1000 workers, and at most 2\d\d are possible: its beat names the link"
    with pytest.raises(ValueError, match=said):
        Follower(workers, share, "name", uses_store=False)
    share.end()


def test_a_process_that_reaches_few_names_the_first_of_the_others() -> None:
    cut = tuple(bytes([number]) * 16 for number in range(100))
    written = Beat.from_bytes(replace(ONE, place=replace(ONE.place, cut=cut)).to_bytes())
    assert written is not None and written.place.cut == cut[:24]


def test_the_freshness_of_a_place_is_not_written() -> None:
    stale = replace(ONE, place=replace(ONE.place, is_fresh=False))
    assert stale.to_bytes() == ONE.to_bytes()


# ---------------------------------------------------------------------------------- evictions


def test_an_eviction_names_one_process() -> None:
    again = Key(KEY.number, bytes(16))
    names = {name_of(KEY): ONE.to_bytes(), name_of(again): b"", eviction_of(KEY): EVICT}
    assert evicted(names) == {name_of(KEY)} and name_of(KEY) != name_of(again)
    assert evicted({}) == frozenset()


@given(st.integers(0, 0xFFFFFFFF), nonces)
@settings(max_examples=20, deadline=None)
def test_a_registry_takes_the_names(number: int, nonce: bytes) -> None:
    key = Key(number, nonce)
    assert evicted({name_of(key): b""}) == frozenset()
    for name in (name_of(key), eviction_of(key)):
        check_beat(name, EVICT)


# ----------------------------------------------------------------------------- ways and stages


@pytest.mark.parametrize(
    "way",
    [
        Way("ab" * 16, "", "", ""),
        Way("ab" * 16, "host:1", "", "relay:2"),
        Way("ab" * 16, "[::1]:1", "cd" * 32, ""),
    ],
)
def test_a_way_is_read_as_it_was_written(way: Way) -> None:
    assert Way.from_text(way.to_text()) == way
    assert way.words == (way.nonce, way.address, way.key, way.relay)


@pytest.mark.parametrize(
    "text", ["", "a b c d", "ab" * 16, "ab" * 16 + " - - - -", "ab" * 16 + " - cd -", "é - - -"]
)
def test_another_text_is_no_way(text: str) -> None:
    assert Way.from_text(text) is None


def test_each_stage_of_a_process_has_a_word() -> None:
    state = State(Settings("run", bytes(16)), KEY)
    assert stage_of(state) == PULLING
    assert stage_of(replace(state, follows=NO_RECORD)) == READY
    words = [stage_of(replace(state, stage=one)) for one in Stage if one is not Stage.NEWCOMER]
    assert words == [TRAINING, STOPPED, CHANGING, CHANGING, GONE]
    assert stage_of(replace(state, stage=Stage.GONE, is_finished=True)) == FINISHED
