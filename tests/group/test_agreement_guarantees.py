"""Guarantees of the agreement for members and newcomers of an elastic group, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agreement_cores import (
    ONE_VOTE,
    TABLE,
    Core,
    after,
    at_boundary,
    attempt_of,
    key,
    leads,
    life,
    member,
    members_places,
    place_of,
    prepare,
    record_of,
    sealed,
    swapped,
)
from agreement_world import nonce_of

from diloco_comm.group import messages as ms
from diloco_comm.group import plans
from diloco_comm.group import state as st
from diloco_comm.group.records import NO_RECORD, Record
from diloco_comm.group.state import Stage

THREE = record_of(0, 1, 2)
TWO = record_of(0, 1)
SUSPECT_AFTER = Core(0).state.settings.suspect_after


def drafted(core: Core) -> Record:
    assert core.state.proposal is not None, core.reason
    return core.state.proposal.draft


# ------------------------------------------------------------------------------ unplanned changes


def test_fewer_than_the_least_number_wait_for_a_newcomer_and_take_it_at_once() -> None:
    core = member(0, TWO, min_replicas=2)
    core.tell(life(1))
    core.tell(st.Sealed(1, ONE_VOTE, 10))
    core.poll(9)
    assert core.state.proposal is None
    assert core.reason == "until at least 2 replicas are here: replicas [0] are"
    core.look(TWO, (*members_places(TWO), place_of(1, 1, follows=1)))
    draft = drafted(core)
    assert draft.members == (key(0), key(1, 1)) and (draft.joined, draft.left_out) == ((1,), ())


def test_a_member_that_has_taken_its_last_step_is_not_waited_for_and_counts() -> None:
    last = replace(members_places(TWO)[1], is_finished=True)
    core = member(0, TWO, (members_places(TWO)[0], last), min_replicas=2)
    sealed(core)
    assert drafted(core).numbers == (0,)


def test_a_sign_of_life_takes_a_suspicion_back() -> None:
    core = member(0, THREE)
    core.tell(life(suspected=(2,)))
    sealed(core)
    core.tell(life())
    core.poll(3 * SUSPECT_AFTER)
    assert drafted(core).numbers == (0, 1, 2)


def test_a_silent_member_alone_stops_no_training() -> None:
    core = member(0, THREE)
    core.tell(life(suspected=(2,)))
    core.poll(3 * SUSPECT_AFTER)
    assert core.state.stage is Stage.TRAINING and core.all(st.Seal) == []
    # A death does, at once.
    core.tell(life(2))
    assert core.only(st.Seal) == st.Seal(1)


def test_a_member_that_missed_a_record_enters_it_where_it_reads_the_table() -> None:
    core = sealed(member(1, TWO))
    assert core.look(after(TWO, 0, 1), members_places(TWO)) is not None
    assert core.only(st.Enter).record.number == 2 and core.state.stage is Stage.TRAINING


def test_a_pair_that_could_not_be_reached_is_tried_again_after_a_while() -> None:
    core = sealed(member(1, THREE))
    core.hear(0, prepare(THREE, 0, 1, 2))
    core.tell(st.Connected(attempt_of(0), cut=(nonce_of(2),)))
    assert (nonce_of(1), nonce_of(2)) in core.state.cuts
    assert st.place_of(core.state, 10).cut == (nonce_of(2),)
    core.poll(3 * SUSPECT_AFTER - 1)
    assert core.state.cuts
    core.poll()
    assert not core.state.cuts and st.place_of(core.state, 10).cut == ()


# ------------------------------------------------------------------------------ those who come


def test_a_newcomer_that_copies_the_state_founds_nothing() -> None:
    core = Core(0)
    core.look(None)
    core.poll(20)
    assert core.state.proposal is None
    assert core.reason == "until this replica has copied the outer state, if its group has one"
    core.tell(st.JoinerReady())
    assert drafted(core).numbers == (0,)


def test_a_newcomer_waits_while_the_process_before_it_lives() -> None:
    core = member(0, TWO)
    again = (*members_places(TWO), place_of(1, 1, follows=1))
    core.look(TWO, again)
    assert not core.state.is_pending
    at_boundary(core)
    core.poll(2)
    assert Record.from_bytes(core.only(st.Swap).new).members == TWO.members


def test_a_newcomer_takes_the_place_of_a_process_that_has_ended() -> None:
    core = member(0, THREE)
    core.tell(life(1))
    core.tell(st.Sealed(1, ONE_VOTE, 10))
    leader = drafted(core)
    assert (leader.numbers, leader.left_out) == ((0, 2), (1,))
    core.tell(st.Connected(attempt_of(0)))
    core.hear(2, ms.Sealed(attempt_of(0), 1, ONE_VOTE, 10))
    core.hear(2, ms.Ready(attempt_of(0)))
    new = Record.from_bytes(core.only(st.Swap).new)
    swapped(core)
    core.look(new, (*members_places(new), place_of(1, 1, follows=2)))
    assert core.state.is_pending
    at_boundary(core)
    joined = Record.from_bytes(core.only(st.Swap).new)
    assert joined.members == (key(0), key(1, 1), key(2)) and joined.joined == (1,)


def test_so_many_join_as_the_record_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST_MEMBERS", 40)
    core = member(0, record_of(0))
    newcomers = tuple(place_of(number, follows=1) for number in range(1, 60))
    core.look(record_of(0), (*members_places(record_of(0)), *newcomers))
    at_boundary(core)
    assert Record.from_bytes(core.only(st.Swap).new).joined == tuple(range(1, 40))


def test_founders_take_the_state_of_one_of_them_before_they_have_it() -> None:
    core = Core(1)
    core.look(record_of(0, 1), (place_of(0), place_of(1)))
    entered = core.only(st.Enter).record
    assert entered.source == 0 and core.state.stage is Stage.TRAINING and not core.state.has_state
    core.tell(st.Started(NO_RECORD))
    assert not core.state.has_state
    core.tell(st.Started(entered.number))
    assert core.state.has_state and st.place_of(core.state, 0).has_state


# ------------------------------------------------------------------------------ after all have died

DEAD = after(TWO, 0, 1, inner_step=50)


def returned(number: int, inner_step: int) -> st.Place:
    return place_of(number, 1, follows=NO_RECORD, inner_step=inner_step, has_checkpoint=True)


def revived(number: int, *others: st.Place, inner_step: int = 50, **settings: object) -> Core:
    """Return a newcomer with a checkpoint that finds the record of members that have died."""
    core = Core(number, **settings)
    own = key(number, 1)
    core.state = replace(core.state, key=own, inner_step=inner_step, has_checkpoint=True)
    core.tell(st.JoinerReady())
    core.look(DEAD, (returned(number, inner_step), *others))
    return core


def test_a_newer_checkpoint_that_comes_a_little_later_counts() -> None:
    core = revived(0)
    assert core.reason == "for replicas [1], as one of them may have a newer checkpoint"
    core.poll()
    core.look(DEAD, (returned(0, 50), returned(1, 54)))
    core.poll(2 * SUSPECT_AFTER)
    draft = drafted(core)
    assert (draft.numbers, draft.source, draft.inner_step) == ((0, 1), 1, 54)


def test_nobody_begins_anew_beside_one_in_a_later_record_than_the_tables() -> None:
    """The table has its journal of an earlier time: the record names members that are dead."""
    core = revived(0, place_of(7, entered=9, has_state=True))
    core.poll(20)
    assert core.state.proposal is None
    assert core.reason == "until replicas [7] tell the registry of the view that they are in"


def test_with_rollback_a_run_that_has_ended_begins_anew() -> None:
    last = after(TWO, 0, 1, inner_step=90, is_finished=True)
    core = Core(5, allows_rollback=True)
    core.tell(st.JoinerReady())
    core.look(last, (place_of(5, follows=NO_RECORD),))
    core.poll(SUSPECT_AFTER)
    draft = drafted(core)
    assert (draft.numbers, draft.joined, draft.number) == ((5,), (5,), last.number + 1)
    assert not draft.is_finished and draft.left_out == (0, 1) and draft.table == TABLE


def test_a_member_of_a_run_that_has_ended_is_told_of_no_end() -> None:
    core = member(1, TWO)
    core.look(after(TWO, 0, 1, is_finished=True), members_places(TWO))
    assert core.all(st.Over) == core.all(st.Fence) == []


def test_a_newcomer_that_the_members_cannot_reach_stops_nobody_and_is_told() -> None:
    core = Core(2)
    core.tell(st.JoinerReady())
    core.tell(st.Life(cut=frozenset([nonce_of(1)])))
    core.look(TWO, members_places(TWO))
    assert core.reason == "until the members let this replica in: it has no way to replicas [1]"
    assert leads(member(0, TWO), dead=(1,)) == attempt_of(0)
