"""The rules 9 to 16 of the agreement of a group: changes of several kinds, on one core or two."""

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
from diloco_comm.group.messages import Why
from diloco_comm.group.records import NO_HASH, NO_RECORD, Attempt, Record
from diloco_comm.group.state import Stage

THREE = record_of(0, 1, 2)
TWO = record_of(0, 1)


# --------------------------------------------------- rule 10: a newcomer with a former number


def test_rule_10_a_newcomer_tells_the_leader_though_the_former_process_may_live() -> None:
    """The leader knows whether the former process of that number has ended."""
    record = replace(THREE, members=(key(0, 1), key(1), key(2)))
    core = Core(0, is_fixed=True)
    core.look(record, members_places(record))
    said = core.tell(st.Demanded((0, 1, 2), may_found=False))
    (sent,) = [one for one in said if isinstance(one, st.Send)]
    assert sent.nonce == nonce_of(1) and isinstance(sent.message, ms.Here)


def test_rule_10_who_waits_no_longer_is_not_asked() -> None:
    leader, core = member(0, TWO, is_fixed=True), member(1, TWO, is_fixed=True)
    said = core.tell(st.Demanded())
    said += core.look(TWO, members_places(TWO))
    here = next(one.message for one in said if isinstance(one, st.Send))
    leader.hear(1, here)
    core.tell(st.GivenUp())
    leader.hear(1, core.only(ms.No))
    leader.tell(st.Demanded())
    leader.look(TWO, members_places(TWO))
    assert leader.all(ms.Prepare) == []
    assert leader.reason == "until replicas [1] call change_group, too"
    leader.hear(1, here)
    assert leader.only(ms.Prepare).members == TWO.members


# ------------------------------------------------------------------ rule 9: planned changes


def with_newcomer(record: Record, number: int, **values: object) -> tuple[st.Place, ...]:
    place = place_of(number, **{"follows": record.number, **values})
    return (*members_places(record), place)


def test_rule_9_a_newcomer_that_follows_leads_to_a_boundary() -> None:
    core = member(0, TWO, with_newcomer(TWO, 2, follows=None))
    assert not core.state.is_pending
    core.look(TWO, with_newcomer(TWO, 2, cut=(nonce_of(1),)))
    assert core.all(st.Pend) == []
    core.look(TWO, with_newcomer(TWO, 2))
    assert core.only(st.Pend) == st.Pend()
    core.look(TWO, with_newcomer(TWO, 2))
    assert core.all(st.Pend) == []


def test_rule_9_with_all_votes_the_lowest_swaps_at_once() -> None:
    core = at_boundary(member(0, TWO, with_newcomer(TWO, 2)))
    new = Record.from_bytes(core.only(st.Swap).new)
    assert (new.numbers, new.joined, new.decision, new.inner_step) == (
        (0, 1, 2), (2,), ONE_VOTE, 12,
    )  # fmt: skip
    assert core.all(ms.Prepare) == []
    swapped(core)
    assert len(core.all(ms.Open)) == 2


def test_rule_9_without_all_votes_all_are_asked() -> None:
    core = at_boundary(member(0, TWO), has_all_votes=False)
    # Nobody seems to come or to go, so the news of the table are waited for.
    core.poll()
    assert core.all(st.Swap) == core.all(ms.Prepare) == []
    core.poll()
    assert core.all(st.Swap) == []
    # Nobody is left out: rounds under way may end before members seal.
    assert core.only(ms.Prepare).is_patient and core.only(st.Seal).is_patient


def test_rule_9_a_newcomer_that_follows_another_record_is_asked_first() -> None:
    core = at_boundary(member(0, TWO, with_newcomer(TWO, 2, follows=NO_RECORD)))
    assert core.all(st.Swap) == [] and len(core.all(ms.Prepare)) == 2


def test_rule_9_a_newcomer_that_is_not_ready_waits_for_the_next_boundary() -> None:
    core = at_boundary(member(0, TWO, with_newcomer(TWO, 2, follows=None)))
    core.poll(2)
    assert Record.from_bytes(core.only(st.Swap).new).numbers == (0, 1)


def put_off(core: Core) -> list[st.PutOff]:
    """Let a group with newcomers not connect, and the members stop; return how they wait."""
    assert core.state.joint is not None
    core.tell(st.Connected(core.state.joint.attempt, error="no route"))
    found = core.all(st.PutOff)
    core.tell(st.Sealed(core.state.number, ONE_VOTE, 12))
    while core.state.proposal is None:
        core.poll()
    return found


def test_rule_9_a_newcomer_with_which_no_group_connects_comes_more_and_more_rarely() -> None:
    record, waits = TWO, []
    core = member(0, TWO, with_newcomer(TWO, 2, follows=NO_RECORD))
    for _ in range(8):
        at_boundary(core)
        assert core.state.proposal.draft.numbers == (0, 1, 2)
        (found,) = put_off(core)
        assert (found.number, found.failure) == (2, "no route")
        waits.append(found.num_polls)
        attempt = core.state.proposal.draft.attempt
        assert core.state.proposal.draft.members == TWO.members
        core.tell(st.Connected(attempt))
        core.hear(1, ms.Sealed(attempt, record.number, ONE_VOTE, 12))
        core.hear(1, ms.Ready(attempt))
        record = Record.from_bytes(core.only(st.Swap).new)
        swapped(core)
        core.look(record, with_newcomer(record, 2, follows=NO_RECORD))
        assert not core.state.is_pending
        core.poll(found.num_polls)
        assert core.state.is_pending
    limit = core.state.settings.suspect_after
    assert waits == [limit << min(number, 6) for number in range(8)]


def test_rule_9_newcomers_that_come_again_come_one_at_a_time_and_after_others() -> None:
    places = (*with_newcomer(TWO, 2, follows=NO_RECORD), place_of(3, follows=NO_RECORD))
    core = at_boundary(member(0, TWO, places))
    assert core.state.proposal.draft.joined == (2, 3)
    put_off(core)
    roster = plans.Roster(core.state)
    assert roster.newcomers == [] and roster.coming == [key(2), key(3)]
    core.poll(core.state.settings.suspect_after)
    assert plans.Roster(core.state).newcomers == [key(2)]
    core.look(TWO, (*places, place_of(4, follows=NO_RECORD)))
    assert plans.Roster(core.state).newcomers == [key(4)]


def test_rule_9_a_short_group_does_not_put_newcomers_off() -> None:
    places = with_newcomer(TWO, 2, follows=NO_RECORD)
    core = at_boundary(member(0, TWO, places, min_replicas=3))
    put_off(core)
    assert core.state.proposal.draft.joined == (2,)


def test_rule_9_a_member_that_came_and_never_connected_is_left_out() -> None:
    record = after(TWO, 0, 1, 2, joined=(2,))
    *members, newcomer = members_places(record)
    places = (*members, replace(newcomer, has_state=False))
    core = sealed(member(0, record, places))
    assert core.state.proposal.draft.members == record.members
    core.tell(st.Connected(core.state.proposal.draft.attempt, error="no route"))
    assert core.only(st.PutOff).number == 2
    core.poll(2)
    assert core.state.proposal.draft.members == TWO.members


def test_rule_9_the_lowest_member_that_the_table_hears_of_asks_for_newcomers() -> None:
    core = member(1, TWO, with_newcomer(TWO, 2))
    assert not core.state.is_pending
    stale = replace(members_places(TWO)[0], is_fresh=False)
    core.look(TWO, (stale, *with_newcomer(TWO, 2)[1:]))
    assert core.state.is_pending


def test_rule_9_of_two_newcomers_with_one_number_one_comes() -> None:
    places = (*with_newcomer(TWO, 2), place_of(2, 1, follows=1))
    core = at_boundary(member(0, TWO, places))
    assert Record.from_bytes(core.only(st.Swap).new).members == (key(0), key(1), key(2))


def test_rule_9_a_member_that_is_evicted_is_left_out_and_ends() -> None:
    core = member(0, TWO)
    core.look(TWO, members_places(TWO), evict=frozenset([1]))
    assert core.only(st.Pend) == st.Pend()
    at_boundary(core)
    new = Record.from_bytes(core.only(st.Swap).new)
    assert (new.numbers, new.evicted) == ((0,), (1,))
    other = at_boundary(member(1, TWO))
    other.look(new)
    assert other.only(st.Drained)


# -------------------------------------------------------------------- rule 10: fixed groups


def fixed(number: int, record: Record = THREE) -> Core:
    return member(number, record, is_fixed=True)


def demand(core: Core, *numbers: int, record: Record | None = THREE) -> list[st.Action]:
    """Let the caller demand a group; the look that this leads to shows the same table."""
    core.tell(st.Demanded(numbers))
    assert core.only(st.Read) == st.Read()
    first = core.said
    core.said = [*first, *core.look(record, core.state.places)]
    return core.said


def test_rule_10_members_seal_when_all_have_been_told() -> None:
    core = fixed(0)
    demand(core, 0, 1, 2)
    assert (
        core.all(ms.Prepare) == [] and core.reason == "until replicas [1, 2] call change_group, too"
    )
    core.hear(1, ms.Here(1, THREE.hash, (0, 1, 2)))
    assert core.all(st.Seal) == []
    core.hear(2, ms.Here(1, THREE.hash, (0, 1, 2)))
    assert core.only(st.Seal).is_patient and len(core.all(ms.Prepare)) == 2


def test_rule_10_where_somebody_is_left_out_rounds_under_way_go_void() -> None:
    core = fixed(0)
    demand(core, 0, 1)
    core.hear(1, ms.Here(1, THREE.hash, (0, 1)))
    assert not core.only(st.Seal).is_patient and not core.only(ms.Prepare).is_patient


def test_rule_10_the_others_tell_the_lowest_what_they_were_told() -> None:
    core = fixed(1)
    demand(core, 0, 1)
    assert st.Send(nonce_of(0), ms.Here(1, THREE.hash, (0, 1))) in core.said
    assert core.reason == "until replica 0 leads the change"


def test_rule_10_nothing_changes_without_a_demand() -> None:
    core = fixed(1)
    core.hear(0, prepare(THREE, 0, 1, 2))
    assert core.said == []
    core = sealed(fixed(0))
    core.tell(life(2))
    core.poll(20)
    assert core.state.proposal is None


def test_rule_10_callers_that_name_other_members_both_fail() -> None:
    core = fixed(1)
    demand(core, 1, 2)
    core.hear(0, prepare(THREE, 0, 1, 2))
    no = core.only(ms.No)
    assert (no.why, no.demand) == (Why.MEMBERS, (1, 2))
    assert core.only(st.Fail).reason == (
        "replica 1 was told to go on with replicas [1, 2], and replica 0 with replicas [0, 1, 2]: "
        "give the same members to change_group on all of them"
    )
    survivor = fixed(1)
    demand(survivor)
    survivor.hear(0, ms.No(ms.NO_ATTEMPT, Why.MEMBERS, demand=(0, 1)))
    assert survivor.only(st.Fail).reason == (
        "replica 1 was told to go on with all members that live, and replica 0 with replicas "
        "[0, 1]: give the same members to change_group on all of them"
    )
    lowest = fixed(0)
    demand(lowest, 0, 1, 2)
    lowest.hear(1, ms.Here(1, THREE.hash, (0, 1)))
    assert (
        lowest.only(ms.No).why is Why.MEMBERS
        and lowest.only(st.Fail)
        and lowest.state.demand is None
    )


def test_rule_10_a_late_answer_to_a_former_demand_changes_nothing() -> None:
    core = fixed(0)
    demand(core, 0, 2, 0)
    assert core.state.demand == (0, 2)
    core.hear(2, ms.No(ms.NO_ATTEMPT, Why.MEMBERS, demand=(0, 2)))
    assert core.all(st.Fail) == [] and core.state.demand == (0, 2)


@pytest.mark.parametrize("event", ["fails", "gives up"])
def test_rule_10_a_demand_that_ends_ends_the_part_in_its_attempt(event: str) -> None:
    core = fixed(1)
    demand(core, 0, 1)
    core.hear(0, prepare(THREE, 0, 1))
    assert core.only(st.Connect) and core.only(st.Seal)
    if event == "fails":
        core.hear(2, ms.Here(1, THREE.hash, (1, 2)))
        assert core.all(st.Fail) == []
        core.hear(0, ms.No(ms.NO_ATTEMPT, Why.MEMBERS, demand=(0, 1, 2)))
        assert core.only(st.Fail)
    else:
        core.tell(st.GivenUp())
    core.tell(st.Sealed(1, ONE_VOTE, 10))
    assert core.all(st.Send) == []
    # The caller demands again, and the same attempt is still led: this process connects anew.
    demand(core, 0, 1)
    core.hear(0, prepare(THREE, 0, 1))
    assert core.only(st.Connect) and core.only(ms.Sealed).attempt == attempt_of(0)


def test_rule_10_survivors_go_on_with_all_that_live() -> None:
    core = fixed(0)
    core.tell(life(1))
    demand(core)
    core.hear(2, ms.Here(1, THREE.hash))
    assert core.only(ms.Prepare).members == (key(0), key(2))


def test_rule_10_a_caller_that_gives_up_withdraws() -> None:
    core = fixed(0)
    demand(core, 0, 1)
    core.hear(1, ms.Here(1, THREE.hash, (0, 1)))
    core.tell(st.GivenUp())
    assert core.state.proposal is None and core.state.demand is None


def test_rule_10_a_group_that_was_superseded_is_found_at_the_demand() -> None:
    core = fixed(0)
    demand(core, 0, 1, record=after(THREE, 1, 2))
    assert core.only(st.Fence).reason == (
        "the group of replicas [1, 2] went on in epoch 2 without replica 0"
    )


def test_rule_10_in_a_new_store_the_chain_begins_with_the_name_of_the_last_record() -> None:
    core = fixed(0)
    core.tell(st.Demanded((0, 1)))
    core.look(None, members_places(THREE), table=b"u" * 16)
    core.hear(1, ms.Here(1, THREE.hash, (0, 1)))
    core.tell(st.Sealed(1, ONE_VOTE, 10))
    core.tell(st.Connected(attempt_of(0)))
    core.hear(1, ms.Sealed(attempt_of(0), 1, ONE_VOTE, 10))
    core.hear(1, ms.Ready(attempt_of(0)))
    swap = core.only(st.Swap)
    new = Record.from_bytes(swap.new)
    assert (swap.old, new.parent, new.table, new.number) == (b"", THREE.hash, b"u" * 16, 2)
    other = fixed(1)
    demand(other, 0, 1, record=new)
    assert other.only(st.Enter).record == new


def test_rule_10_a_newcomer_at_a_store_that_is_new_to_the_members_tells_their_lowest() -> None:
    core = Core(3, is_fixed=True)
    core.tell(st.Demanded((0, 1, 3), may_found=False))
    core.look(None, (*members_places(TWO), place_of(3, follows=NO_RECORD)), table=b"u" * 16)
    assert core.reason == "until the group of replicas [0, 1, 3] trains"
    assert st.Send(nonce_of(0), ms.Here(NO_RECORD, NO_HASH, (0, 1, 3))) in core.said


def test_rule_10_a_newcomer_waits_for_a_group_that_runs_without_it() -> None:
    core = Core(3, is_fixed=True)
    core.tell(st.Demanded((3,)))
    core.look(TWO, (*members_places(TWO), place_of(3, follows=NO_RECORD)))
    assert 'attaches with init="join"' in core.reason and core.state.proposal is None


def test_rule_10_a_member_leads_before_newcomers_also_where_the_state_is_lost() -> None:
    core = Core(2, is_fixed=True)
    core.look(record_of(1, 2), (place_of(2),))
    core.tell(life(1))
    sealed(core, ())
    core.tell(st.Demanded((0, 2)))
    core.look(record_of(1, 2), (place_of(0, follows=NO_RECORD), place_of(2, entered=1)))
    core.hear(0, ms.Here(NO_RECORD, NO_HASH, (0, 2)))
    assert core.state.proposal is not None
    draft = core.state.proposal.draft
    assert (draft.numbers, draft.joined, draft.source) == ((0, 2), (0, 2), 2)


def test_rule_10_the_first_group_of_a_fixed_run_is_founded_by_its_lowest() -> None:
    core = Core(0, is_fixed=True)
    core.tell(st.Demanded((0, 1)))
    core.look(None, (place_of(0, follows=NO_RECORD), place_of(1, follows=NO_RECORD)))
    assert core.reason == "until replicas [1] call change_group, too"
    core.hear(1, ms.Here(NO_RECORD, NO_HASH, (0, 1)))
    core.tell(st.Connected(attempt_of(0)))
    core.hear(1, ms.Ready(attempt_of(0)))
    new = Record.from_bytes(core.only(st.Swap).new)
    assert (new.number, new.source, new.joined) == (1, 0, (0, 1))


# ------------------------------------------------------------------------ rule 11: founding


def founder(number: int, places: tuple[st.Place, ...], **settings: object) -> Core:
    core = Core(number, **settings)
    core.tell(st.JoinerReady())
    core.look(None, places)
    return core


def test_rule_11_the_lowest_of_enough_newcomers_founds() -> None:
    places = tuple(place_of(number, follows=NO_RECORD) for number in range(2))
    core = founder(0, places, min_replicas=2)
    asked = core.only(ms.Prepare)
    assert (asked.base, asked.base_hash, asked.joined) == (NO_RECORD, NO_HASH, (0, 1))
    core.tell(st.Connected(asked.attempt))
    core.hear(1, ms.Ready(asked.attempt))
    swap = core.only(st.Swap)
    new = Record.from_bytes(swap.new)
    assert (swap.old, new.number, new.parent, new.table) == (b"", 1, NO_HASH, TABLE)
    assert new.source == 0 and new.decision == ()


def test_rule_11_too_few_wait() -> None:
    core = founder(0, (place_of(0, follows=NO_RECORD), place_of(1)), min_replicas=2)
    assert core.reason == "until at least 2 replicas are here: replicas [0] are"


def test_rule_11_the_best_checkpoint_is_the_source() -> None:
    places = (
        place_of(0, follows=NO_RECORD, inner_step=9, has_checkpoint=False),
        place_of(1, follows=NO_RECORD, inner_step=5, has_checkpoint=True),
        place_of(2, follows=NO_RECORD, inner_step=7, has_checkpoint=True),
        place_of(3, follows=NO_RECORD, inner_step=7, has_checkpoint=True),
    )
    core = founder(0, places)
    assert core.state.proposal is not None
    assert (core.state.proposal.draft.source, core.state.proposal.draft.inner_step) == (2, 7)


def test_rule_11_nobody_founds_while_a_place_says_that_somebody_is_in_a_record() -> None:
    places = (place_of(0, follows=NO_RECORD), place_of(1, entered=3, has_state=True))
    core = founder(0, places)
    assert core.reason == "until replicas [1] tell the registry of the view that they are in"
    core.poll(20)
    assert core.state.proposal is None


def test_rule_11_founders_wait_for_more_to_come() -> None:
    core = founder(0, (place_of(0, follows=NO_RECORD),), founding_wait=3)
    core.poll(2)
    assert core.state.proposal is None
    core.poll()
    assert core.state.proposal is not None


# ------------------------------------------------------------------------ rule 12: all died

DEAD = after(TWO, 0, 1, inner_step=50)


def revived(places: tuple[st.Place, ...], record: Record = DEAD, **settings: object) -> Core:
    number = places[0].key.number
    core = Core(number, **settings)
    own = places[0]
    checkpoint = {"inner_step": own.inner_step, "has_checkpoint": own.has_checkpoint}
    core.state = replace(core.state, key=own.key, **checkpoint)
    core.tell(st.JoinerReady())
    core.look(record, places)
    return core


def test_rule_12_newcomers_with_a_late_checkpoint_go_on_when_all_have_died() -> None:
    core = revived((place_of(1, 1, follows=NO_RECORD, inner_step=60, has_checkpoint=True),))
    assert core.reason == "for replicas [0], as one of them may have a newer checkpoint"
    core.poll(3)
    assert core.state.proposal is not None
    draft = core.state.proposal.draft
    assert (draft.number, draft.parent, draft.source, draft.inner_step) == (3, DEAD.hash, 1, 60)


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (
            (place_of(1, 1, follows=NO_RECORD, inner_step=49, has_checkpoint=True),),
            "until a replica brings a checkpoint of inner step 50 or later, as no process of",
        ),
        (
            (place_of(5, follows=NO_RECORD, inner_step=60, has_checkpoint=True),),
            "until one of replicas [0, 1] starts again, as none of them is heard of",
        ),
        (
            (place_of(1, 1, follows=NO_RECORD), place_of(0, entered=2, has_state=True)),
            "until the members let this replica in",
        ),
        (
            (place_of(1, 1, follows=NO_RECORD), place_of(1, entered=2, has_state=True)),
            "until the other process with replica number 1 has gone; if it is to train on",
        ),
    ],
)
def test_rule_12_else_newcomers_wait_and_say_for_what(
    places: tuple[st.Place, ...], reason: str
) -> None:
    core = revived(places)
    assert core.reason.startswith(reason)
    core.poll(30)
    assert core.state.proposal is None


def test_rule_12_a_run_with_rollback_needs_no_checkpoint() -> None:
    core = revived((place_of(1, 1, follows=NO_RECORD),), allows_rollback=True)
    core.poll(3)
    assert core.state.proposal is not None


def test_rule_12_members_of_the_first_record_may_have_trained() -> None:
    core = revived((place_of(1, 1, follows=NO_RECORD),), replace(DEAD, inner_step=0))
    core.poll(3)
    assert core.state.proposal is None
    assert core.reason.startswith("until a replica brings a checkpoint of inner step 0 or later")
    begun = place_of(1, 1, follows=NO_RECORD, has_checkpoint=True)
    core = revived((begun,), replace(DEAD, inner_step=0))
    core.poll(3)
    assert core.state.proposal is not None


def test_rule_12_a_newcomer_gives_up_when_the_table_goes_on() -> None:
    core = revived((place_of(1, 1, follows=NO_RECORD, inner_step=60, has_checkpoint=True),))
    core.poll(3)
    assert core.state.proposal is not None
    core.look(after(DEAD, 0))
    assert core.state.proposal is None
    core.tell(st.Connected(Attempt(nonce_of(1, 1), 1)))
    assert core.all(st.Swap) == []


def test_rule_12_a_record_with_a_source_is_entered_from_any_lower_one() -> None:
    core = member(0, TWO)
    core.look(after(DEAD, 0, 1, source=1, joined=(0, 1)))
    assert core.only(st.Enter).record.source == 1 and not core.state.has_state


def test_rule_12_a_member_that_may_hold_the_state_is_not_left_out_by_one_without() -> None:
    core = Core(1)
    core.look(TWO, (place_of(0), place_of(1)))
    assert core.state.stage is Stage.TRAINING and not core.state.has_state
    core.tell(st.Life(suspected=frozenset([nonce_of(0)])))
    sealed(core, ())
    core.poll(30)
    # Member 0 is the source of the record, whether or not it has entered it yet.
    assert core.state.proposal is None
    assert core.reason == "until replicas [0] answer, which may have the state"


def test_rule_12_a_member_leads_before_newcomers_where_the_state_is_lost() -> None:
    core = Core(2)
    core.look(record_of(1, 2), (place_of(0, follows=1), place_of(2)))
    core.tell(life(1))
    sealed(core, ())
    core.poll(2)
    assert core.state.proposal is not None
    assert core.state.proposal.draft.numbers == (0, 2)
    newcomer = Core(0)
    newcomer.tell(st.JoinerReady())
    newcomer.look(record_of(1, 2), (place_of(0, follows=1), place_of(2, entered=1)))
    newcomer.poll(30)
    assert newcomer.reason == "until the members let this replica in"


def test_rule_12_members_that_never_had_the_state_begin_together() -> None:
    places = tuple(place_of(number, entered=1) for number in range(3))
    lower, higher = Core(1), Core(2)
    for core in (lower, higher):
        core.look(THREE, places)
        core.tell(life(0))
        core.tell(st.Sealed(1, (), 0))
    lower.poll(2)
    higher.hear(1, lower.only(ms.Prepare))
    assert higher.only(st.Connect) and higher.only(ms.Sealed).positions == ()


def test_rule_12_a_newcomer_enters_a_record_after_a_member_of_the_base() -> None:
    new = after(TWO, 0, 1, 2, joined=(2,))
    places = (*members_places(TWO), place_of(2, follows=1))
    core = Core(2)
    core.look(TWO, places)
    core.tell(st.JoinerReady(1))
    core.look(new, places)
    assert core.all(st.Enter) == []
    assert core.reason == "until a member of the group has entered view 2"
    core.hear(0, ms.Open(new.to_bytes()))
    assert core.only(st.Read) == st.Read() and core.all(st.Enter) == []
    core.look(new, places)
    assert core.only(st.Enter).record == new
    # Nobody lives who could say so.
    core = Core(2)
    core.look(TWO, places)
    core.look(new, tuple(replace(place, is_fresh=False) for place in places[:2]))
    assert core.only(st.Enter).record == new


def test_rule_12_who_holds_the_state_takes_no_other_state_for_it() -> None:
    core = sealed(member(1, TWO))
    core.hear(0, prepare(TWO, 0, 1, joined=(0, 1)))
    assert core.all(st.Send) == core.all(st.Connect) == []


# ------------------------------------------------------------- rule 13: a table that forgets

OTHER = b"u" * 16


def forgotten(number: int, record: Record, **settings: object) -> Core:
    core = member(number, record, **settings)
    core.look(None, members_places(record), table=OTHER)
    assert core.all(st.Swap) == [] and core.state.stage is Stage.TRAINING
    return core


def test_rule_13_a_table_that_forgot_takes_the_next_record_with_the_sealed_of_all() -> None:
    core = sealed(forgotten(0, TWO))
    asked = core.state.proposal
    assert asked is not None and asked.draft.numbers == (0, 1)
    core.tell(st.Connected(attempt_of(0)))
    core.hear(1, ms.Sealed(attempt_of(0), 1, ONE_VOTE, 8))
    core.hear(1, ms.Ready(attempt_of(0)))
    swap = core.only(st.Swap)
    new = Record.from_bytes(swap.new)
    assert (swap.old, new.table, new.parent, new.run_id) == (b"", OTHER, TWO.hash, TWO.hash)


def test_rule_13_without_one_member_the_others_wait_and_say_why() -> None:
    core = forgotten(0, THREE)
    core.tell(life(2))
    core.tell(st.Sealed(1, ONE_VOTE, 10))
    core.poll(30)
    assert core.state.proposal is None and core.reason == (
        "until replicas [2] answer, as the registry has lost its memory and they may have gone on; "
        "to begin anew, start all replicas again"
    )


def test_rule_13_a_planned_change_asks_all_and_leavers_come_along() -> None:
    places = (members_places(TWO)[0], replace(members_places(TWO)[1], is_leaving=True))
    core = member(0, TWO)
    core.look(None, places, table=OTHER)
    at_boundary(core)
    core.poll(2)
    assert core.all(st.Swap) == [] and core.only(ms.Prepare).members == (key(0), key(1))


def test_rule_13_an_attempt_that_was_begun_before_the_table_forgot_is_given_up() -> None:
    core = member(0, THREE)
    leads(core, dead=(2,))
    core.look(None, members_places(THREE), table=OTHER)
    assert core.state.proposal is None
    core.hear(1, ms.Sealed(attempt_of(0), 1, ONE_VOTE, 8))
    core.hear(1, ms.Ready(attempt_of(0)))
    assert core.all(st.Swap) == []


def test_rule_13_an_answer_of_the_table_as_it_was_says_nothing() -> None:
    core = member(0, THREE)
    leads(core, dead=(2,))
    core.hear(1, ms.Sealed(attempt_of(0), 1, ONE_VOTE, 8))
    core.hear(1, ms.Ready(attempt_of(0)))
    new = core.only(st.Swap).new
    core.look(None, members_places(THREE), table=OTHER)
    core.tell(st.Swapped(new, st.Outcome.DONE))
    assert core.all(st.Enter) == [] and core.only(st.Read) == st.Read()


def test_rule_13_a_member_that_waits_asks_a_process_that_is_ahead() -> None:
    core = member(1, TWO)
    core.tell(life(0))
    core.tell(st.Sealed(1, ONE_VOTE, 8))
    core.look(None, (place_of(2, entered=2, has_state=True),), table=OTHER)
    core.poll(3)
    assert st.Send(nonce_of(2), ms.Here(1, TWO.hash)) in core.said
    core.hear(2, ms.Open(after(TWO, 2).to_bytes()))
    assert core.only(st.Fence)


@pytest.mark.parametrize(
    ("is_fixed", "table", "record"), [(False, "registry", "view"), (True, "store", "epoch")]
)
def test_rule_13_a_durable_table_that_knows_less_is_waited_for(
    is_fixed: bool, table: str, record: str
) -> None:
    core = sealed(member(1, THREE, is_fixed=is_fixed))
    core.look(None)
    core.poll(30)
    assert (
        core.all(st.Swap) == []
        and core.state.proposal is None
        and core.reason
        == f"until the {table} has its record again: it knew {record} 1, and now it knows less"
    )


def test_rule_13_an_older_record_of_the_run_is_an_error_and_is_waited_for() -> None:
    core = member(0, TWO)
    core.look(after(TWO, 0, 1))
    sealed(core)
    core.look(TWO, table=OTHER)
    core.poll(30)
    assert core.state.proposal is None and core.reason.endswith("and now it knows less")


def test_rule_13_a_record_of_another_founding_is_not_followed() -> None:
    core = member(1, TWO)
    core.look(after(record_of(0, 1, 2), 0, 1), table=OTHER)
    assert core.only(st.Fence).reason == (
        "the table holds view 2 of replicas [0, 1], which does not follow from view 1 of replicas "
        "[0, 1]"
    )
    core = member(1, TWO)
    core.hear(0, ms.Open(after(record_of(0, 1, 2), 0, 1).to_bytes()))
    assert core.said == []


def test_rule_13_another_record_of_its_own_number_fences() -> None:
    core = member(1, TWO)
    core.look(after(TWO, 0, 1))
    core.look(after(TWO, 0, 1, inner_step=5), table=OTHER)
    assert core.only(st.Fence).reason == "view 2 was opened anew without this process"


# ------------------------------------------------------------------------ rule 14: finished


def test_rule_14_a_member_that_has_taken_all_steps_says_so_in_the_record() -> None:
    core = member(0, TWO)
    core.tell(st.Finished(True, ONE_VOTE, 90))
    swap = core.only(st.Swap)
    last = Record.from_bytes(swap.new)
    assert swap.old == TWO.to_bytes() and last.is_finished and last.members == TWO.members
    assert last.decision == ONE_VOTE and core.only(st.Drained)


def test_rule_14_who_ends_early_or_after_another_says_nothing_in_the_record() -> None:
    core = member(0, TWO)
    core.tell(st.Finished())
    assert core.all(st.Swap) == [] and core.only(st.Drained) and core.state.is_finished
    core = member(0, TWO)
    core.look(after(TWO, 0, 1, is_finished=True))
    assert core.all(st.Swap) == [] and core.only(st.Drained) and core.state.is_finished


def test_rule_14_a_newcomer_of_a_finished_run_ends_with_a_sentence() -> None:
    last = after(TWO, 0, 1, is_finished=True)
    core = Core(1)
    core.look(last)
    assert core.only(st.Enter).record == last
    core = Core(2)
    core.look(last)
    assert core.only(st.Over).reason == (
        "run 'run' has ended: replicas [0, 1] have taken all their steps; to train on, give the "
        "run another name, or rollback=True"
    )
    again = Core(2, allows_rollback=True)
    again.look(last)
    assert again.all(st.Over) == []


# ------------------------------------------------------------------------- rule 15: leaving


def test_rule_15_a_leaver_asks_for_a_boundary_and_ends_when_the_others_go_on() -> None:
    core = member(1, TWO)
    core.tell(st.Leave())
    assert core.only(st.Pend) == st.Pend()
    at_boundary(core)
    assert core.reason == "until replicas [0] go on" and core.state.proposal is None
    core.look(after(TWO, 0))
    assert core.only(st.Drained)


def test_rule_15_the_others_leave_a_leaver_out() -> None:
    places = (members_places(TWO)[0], replace(members_places(TWO)[1], is_leaving=True))
    core = member(0, TWO, places)
    assert core.state.is_pending
    at_boundary(core)
    assert Record.from_bytes(core.only(st.Swap).new).numbers == (0,)


def test_rule_15_the_last_with_state_stays_until_a_newcomer_has_it() -> None:
    one = record_of(0)
    coming = (*members_places(one), place_of(1))
    core = member(0, one, coming)
    core.tell(st.Leave())
    at_boundary(core)
    assert core.reason == "until replicas [1] have copied the state"
    core.look(one, with_newcomer(one, 1))
    assert Record.from_bytes(core.only(st.Swap).new).numbers == (0, 1)


def test_rule_15_without_others_a_leaver_ends() -> None:
    core = member(0, record_of(0))
    core.tell(st.Leave())
    at_boundary(core)
    assert core.only(st.Drained)
    newcomer = Core(2)
    newcomer.look(TWO, members_places(TWO))
    newcomer.tell(st.Leave())
    assert newcomer.only(st.Drained)


# ------------------------------------------------------------------------ rule 16: old frames


def test_rule_16_frames_of_a_process_that_has_ended_are_dropped() -> None:
    core = member(1, THREE)
    core.tell(life(0))
    core.hear(0, prepare(THREE, 0, 1, 2))
    assert core.all(st.Send) == core.all(st.Connect) == []


def test_rule_16_answers_to_a_former_attempt_change_nothing() -> None:
    core = member(0, THREE)
    leads(core, dead=(2,))
    before = core.state.proposal
    core.hear(1, ms.Sealed(attempt_of(0, 9), 1, ONE_VOTE, 8))
    core.hear(1, ms.Ready(attempt_of(0, 9)))
    core.hear(1, ms.No(attempt_of(0, 9), Why.CUT, cut=(nonce_of(0),)))
    assert core.state.proposal == before


def test_rule_16_a_prepare_in_the_name_of_another_is_dropped() -> None:
    core = member(1, THREE)
    for sender, asked in ((2, (0, 1, 2)), (0, (0, 2))):
        core.hear(sender, prepare(THREE, *asked))
        assert core.said == []


def test_rule_16_events_of_a_former_record_or_attempt_of_the_training_thread_are_dropped() -> None:
    core = sealed(member(1, THREE))
    core.hear(0, prepare(THREE, 0, 1, 2))
    core.look(after(THREE, 0, 1, 2))
    state = core.state
    for event in (
        st.Sealed(1, ONE_VOTE, 8),
        st.Broke(1),
        st.Boundary(1, ONE_VOTE, 8, True),
        st.Connected(attempt_of(0)),
    ):
        core.tell(event)
    assert core.state == state


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="min_replicas must be at least 1, got 0"):
        Core(0, min_replicas=0)
