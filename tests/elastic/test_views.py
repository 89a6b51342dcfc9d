"""Records of views, and beats."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from diloco_comm.elastic.beats import READY, STAGES, Beat
from diloco_comm.elastic.views import (
    FORMING,
    MAX_RECORD_BYTES,
    OPEN,
    Member,
    View,
    from_bytes,
    opened,
    record_hash,
    to_bytes,
    with_evicted,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_comm.base.extension import VIEW


def member(id: int, nonce: str = "") -> Member:
    return Member(id, nonce or f"nonce{id}", f"10.0.0.{id}:29400", 8, "0123456789abcdef")


def view(*ids: int, number: int = 2) -> View:
    members = tuple(member(id) for id in ids)
    base = tuple(one.key for one in members)
    return View("run", number, "parent", FORMING, members, 1, base, 500, "nonce0", "why")


def test_a_record_is_read_as_it_was_written() -> None:
    one = replace(view(0, 2, 5), joined=(5,), left=(1,), source=0, evicted=(2,))
    assert from_bytes(to_bytes(one), "run") == one
    assert json.loads(to_bytes(one))["version"] == VIEW


def test_members_are_asked_by_id_and_nonce() -> None:
    one = view(0, 2, 5)
    assert one.is_member(2, "nonce2") and not one.is_member(2, "another")
    assert one.lowest.id == 0 and one.rank_of(5) == 2
    with pytest.raises(ValueError, match=r"view 2 has the members \[0, 2, 5\], and no 3"):
        one.rank_of(3)


def test_all_members_open_a_view_with_the_same_record() -> None:
    one = view(0, 1)
    after = opened(one, 1000)
    assert after.phase == OPEN and after.inner_step == 1000
    assert after.parent == record_hash(to_bytes(one)) and after.attempt == one.attempt
    assert one.last_open == (1, one.base_members) and after.last_open == (2, one.keys)


def test_an_open_view_is_asked_to_leave_a_member_out() -> None:
    one = opened(view(0, 1, 2), 0)
    asked = with_evicted(with_evicted(one, 2), 1)
    assert asked.evicted == (1, 2) and asked.attempt == one.attempt and asked.phase == OPEN
    assert asked.parent == record_hash(to_bytes(with_evicted(one, 2)))
    with pytest.raises(ValueError, match="has the members"):
        with_evicted(one, 7)
    with pytest.raises(ValueError, match="view 2 is being formed: evict replica 1 when it is open"):
        with_evicted(view(0, 1), 1)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (b"\xff garbage", "holds no record of a view"),
        (b"[]", "holds no record of a view"),
        (b"{}", "holds no record of a view"),
        (b'{"version": 7}', f"has version 7, and this diloco_comm reads version {VIEW}"),
        (
            b'{"version": %d, "run": "other"}' % VIEW,
            "is of run 'other', and this replica is of run",
        ),
        (b'{"version": %d, "run": "run"}' % VIEW, "record of run 'run' is damaged"),
        (to_bytes(view(0)).replace(b"forming", b"closed."), "record of run 'run' is damaged"),
    ],
)
def test_what_is_no_record_of_this_run_is_refused(record: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_bytes(record, "run")


def test_a_record_that_a_registry_would_not_hold_is_refused() -> None:
    fits = 0
    with pytest.raises(ValueError, match=f"bytes, and a registry holds {MAX_RECORD_BYTES}"):
        for fits in range(1, 1000):
            to_bytes(view(*range(fits)))
    assert fits > 64


# ----------------------------------------------------------------------------------------- beats


def test_a_beat_is_read_as_it_was_written() -> None:
    one = Beat(member(1), 7, READY, 3, 4, 4, True, True, 500, (1, 2), ("a", "b"))
    assert Beat.from_bytes(one.to_bytes()) == one


@given(st.binary(max_size=40))
@settings(max_examples=50, derandomize=True, database=None)
def test_garbage_is_no_beat(text: bytes) -> None:
    assert Beat.from_bytes(text) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("counter", "1"),
        ("stage", "asleep"),
        ("view", None),
        ("member", [1, 2]),
        ("member", ["1", "n", "a", 1, "s"]),
        ("positions", ["1"]),
        ("positions", 3),
        ("unreachable", [1]),
        ("has_state", 1),
        ("version", VIEW - 1),
        ("version", [VIEW]),
        ("another", 1),
    ],
)
def test_a_beat_with_another_content_is_no_beat(name: str, value: object) -> None:
    values = json.loads(Beat(member(1), 7, READY).to_bytes())
    assert Beat.from_bytes(json.dumps(values).encode()) is not None
    assert Beat.from_bytes(json.dumps(values | {name: value}).encode()) is None


def test_a_beat_of_another_version_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    values = json.loads(Beat(member(1), 7, READY).to_bytes())
    for _ in range(2):
        assert Beat.from_bytes(json.dumps(values | {"version": 99}).encode()) is None
    (said,) = caplog.messages
    assert said.startswith("the beat of another replica was refused: protocol version 99 was given")


def test_a_beat_of_too_many_fragments_is_refused() -> None:
    assert set(STAGES) >= {READY}
    with pytest.raises(ValueError, match="it has 900 fragments"):
        Beat(member(1), 7, READY, positions=tuple(range(900))).to_bytes()
