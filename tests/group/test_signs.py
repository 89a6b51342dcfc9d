"""Which processes live, as links and beats tell: two links of this process are two replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from diloco_comm import _C
from diloco_comm.group import signs
from diloco_comm.group.beats import GONE, Beat, Way
from diloco_comm.group.driver import look_s
from diloco_comm.group.records import Key
from diloco_comm.group.signs import Signs
from diloco_comm.group.state import Place

OWN, OTHER, THIRD = (Key(n, bytes([n]) * 16) for n in range(3))
SUSPECT_AFTER_S, BUSY_AFTER_S, PATIENCE_S = 1.5, 3.0, 30.0


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, f"not so within {PATIENCE_S:g} s"
        time.sleep(0.02)


def way_to(link: _C.Link) -> Way:
    return Way(link.nonce, link.address, "", "")


def beat_of(key: Key, link: _C.Link | None, counter: int = 1, entered: int = 1) -> Beat:
    ways = () if link is None else (way_to(link).to_text(),)
    return Beat(Place(key, b"s" * 16, entered=entered), counter, ways=ways)


@pytest.fixture
def links() -> Iterator[tuple[_C.Link, _C.Link]]:
    with (
        closing(_C.Link("127.0.0.1:0", "127.0.0.1:0")) as one,
        closing(_C.Link("127.0.0.1:0", "127.0.0.1:0")) as other,
    ):
        yield one, other


@pytest.fixture
def own(links: tuple[_C.Link, _C.Link]) -> Iterator[Signs]:
    link = links[0]
    found = Signs(OWN.nonce, link, way_to(link), "run", SUSPECT_AFTER_S, BUSY_AFTER_S)
    found.start()
    yield found
    found.close()


def suspected(found: Signs, *base: Key) -> set[bytes]:
    return set(found.judge(base).suspected)


def test_a_beat_that_was_never_seen_to_rise_may_be_that_of_a_dead_process(own: Signs) -> None:
    own.note([beat_of(OWN, None), beat_of(OTHER, None)])
    # A member of the record may be late; another process may have died long ago.
    assert suspected(own, OTHER) == set() and suspected(own) == {OTHER.nonce}
    own.note([beat_of(OTHER, None, counter=2)])
    assert suspected(own) == set() and own.is_fresh(OTHER.nonce)


def test_a_silent_member_is_suspected_by_looks_that_were_answered(own: Signs) -> None:
    own.note([beat_of(OTHER, None)])
    time.sleep(SUSPECT_AFTER_S + 0.1)
    # While the table does not answer, no beat is late.
    assert suspected(own, OTHER) == set()
    own.note([beat_of(OTHER, None)])
    assert suspected(own, OTHER) == {OTHER.nonce} and not own.is_fresh(OTHER.nonce)
    # A standstill of this process is no silence of the other one.
    own.stood_still(SUSPECT_AFTER_S)
    assert suspected(own, OTHER) == set()


def test_a_large_group_looks_less_often() -> None:
    periods = [look_s(number, 0.5, 30.0) for number in (1, 16, 64, 160, 1000)]
    assert periods == [0.5, 0.5, 2.0, 5.0, 5.0]
    assert look_s(1000, 0.5, 6.0) == 2.0 and look_s(1000, 0.5, 0.9) == 0.5


def test_a_member_that_a_round_has_lost_is_late_after_more_than_two_periods(
    own: Signs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "suspect_after_s", 30.0)
    own.note([beat_of(OTHER, None)], 0.5)
    own.lost([OTHER.nonce])
    own.stood_still(-2.2)
    assert suspected(own, OTHER) == {OTHER.nonce}
    own.note([beat_of(OTHER, None)], 5.0)
    assert suspected(own, OTHER) == set()
    own.stood_still(-11.0)
    assert suspected(own, OTHER) == {OTHER.nonce}


def test_a_table_that_begins_empty_ends_nobody(own: Signs) -> None:
    own.note([beat_of(OTHER, None), beat_of(THIRD, None)])
    own.note([beat_of(THIRD, None, counter=2)])
    assert suspected(own, OTHER, THIRD) == set()


def test_a_busy_process_is_heard_on_its_link(
    own: Signs, links: tuple[_C.Link, _C.Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = time.monotonic()
    own.note([beat_of(OTHER, links[1])])
    own.want([OTHER.nonce])
    until(lambda: any(life.is_connected for life in links[0].life()))
    until(lambda: suspected(own) == set())
    while time.monotonic() - begin < BUSY_AFTER_S / 2:
        own.note([beat_of(OTHER, links[1])])
        assert suspected(own, OTHER) == set()
        time.sleep(0.05)
    # Neither a beat nor a part in any round for too long.
    until(lambda: own.note([beat_of(OTHER, links[1])]) or suspected(own, OTHER) == {OTHER.nonce})
    links[1].close()
    until(lambda: OTHER.nonce in own.judge([OTHER]).dead)


def test_a_member_that_keeps_this_process_waiting_is_suspected_though_it_beats(
    own: Signs, links: tuple[_C.Link, _C.Link]
) -> None:
    """Its training thread stands still, and neither its driver nor its link does."""
    counter = 0

    def is_suspected(waited: float, other: Key = OTHER) -> bool:
        nonlocal counter
        counter += 1
        own.note([beat_of(OTHER, links[1], counter)])
        time.sleep(0.02)
        return OTHER.nonce in own.judge([other], waited).suspected

    is_suspected(0.0)
    own.want([OTHER.nonce])
    links[1].reach(own.service, [way_to(links[0]).words])
    until(lambda: any(life.is_connected for life in links[0].life()))
    begin, waited = time.monotonic(), 2 * BUSY_AFTER_S
    while time.monotonic() - begin < BUSY_AFTER_S / 2:
        assert not is_suspected(waited)
    # Nobody waits, or not for long enough; or the process is no member.
    until(lambda: own._lives[OTHER.nonce].still_s > BUSY_AFTER_S or is_suspected(0.0))
    assert not (is_suspected(0.0) or is_suspected(BUSY_AFTER_S / 2) or is_suspected(waited, THIRD))
    assert is_suspected(waited)
    # This process has sealed its rounds, and begins to wait anew.
    assert is_suspected(0.0)
    # A member that waits itself, or moves, is not stuck.
    links[1].set_progress(0, "exchange")
    until(lambda: not is_suspected(waited))
    links[1].set_progress(0, "steps")
    until(lambda: is_suspected(waited))
    links[1].set_progress(1, "steps")
    until(lambda: not is_suspected(waited))


def test_a_newcomer_without_a_way_is_cut_off(own: Signs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "_REACH_AGAIN_S", 0.2)
    away = Way("ab" * 16, "127.0.0.1:9", "", "").to_text()
    beat = replace(beat_of(OTHER, None, entered=0), ways=(away,))
    own.note([beat])
    own.note([replace(beat, counter=2)])
    own.want([OTHER.nonce])
    assert own.judge([]).cut == frozenset()
    until(lambda: own.judge([]).cut == {OTHER.nonce})
    # A member that cannot be reached is a matter of the attempts to connect.
    assert own.judge([OTHER]).cut == frozenset()


def test_a_dead_member_stays_suspected_when_the_table_has_dropped_its_beat(
    own: Signs, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.note([beat_of(OTHER, None), beat_of(THIRD, None)])
    monkeypatch.setattr(own, "suspect_after_s", 0.1)
    monkeypatch.setattr(own, "_busy_after_s", 0.1)
    time.sleep(0.2)
    own.note([])
    assert suspected(own, OTHER) == {OTHER.nonce} and own.counters() == {OTHER.nonce: 1}
    own.note([])
    assert suspected(own, OTHER) == {OTHER.nonce}
    assert suspected(own) == set() and own.counters() == {}


def test_the_last_words_of_processes_are_forgotten_with_their_beats(
    own: Signs, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.note([beat_of(OTHER, None), beat_of(THIRD, None)])
    for key in (OTHER, THIRD):
        own.has_left(key.nonce, 7)
    # The table has dropped both, and one of them is a member of the record.
    monkeypatch.setattr(own, "suspect_after_s", 0.0)
    monkeypatch.setattr(own, "_busy_after_s", 0.0)
    own.note([])
    assert own.judge([OTHER]).dead == {OTHER.nonce} and own.left() == {OTHER.nonce: 7}
    own.judge([])
    assert own.left() == {}


def test_the_last_word_of_a_process_is_believed(own: Signs) -> None:
    own.note([beat_of(OTHER, None)])
    assert own.judge([OTHER]).dead == frozenset()
    own.note([replace(beat_of(OTHER, None), stage=GONE)])
    assert own.judge([OTHER]).dead == {OTHER.nonce}
