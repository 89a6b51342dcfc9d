"""The rules 1 to 8 of the agreement of a group, by their numbers, on one core or two."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agreement_cores import (
    NO_VOTE,
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
from diloco_comm.group.records import NO_HASH, NO_RECORD, Record
from diloco_comm.group.state import Outcome, Stage
from diloco_comm.group.streams import Rounds

THREE = record_of(0, 1, 2)
TWO = record_of(0, 1)


# ------------------------------------------------------------ rule 1: an unplanned change


def test_rule_1_the_lowest_living_member_asks_all_and_swaps_when_all_have_answered() -> None:
    core = member(0, THREE)
    core.tell(life(2))
    assert core.only(st.Seal) == st.Seal(1)
    asked = core.only(ms.Prepare)
    core.tell(st.Sealed(1, ONE_VOTE, 10))
    assert (asked.base, asked.base_hash, asked.members) == (1, THREE.hash, (key(0), key(1)))
    assert not asked.is_patient and asked.cause == "replicas [2] left"
    core.tell(st.Connected(asked.attempt))
    core.hear(1, ms.Ready(asked.attempt))
    assert (
        core.all(st.Swap) == []
        and core.reason == "until replicas [1] have stopped and are connected"
    )
    core.hear(1, ms.Sealed(asked.attempt, 1, ONE_VOTE, 8))
    swap = core.only(st.Swap)
    new = Record.from_bytes(swap.new)
    assert swap.old == THREE.to_bytes() and new.parent == THREE.hash and new.number == 2
    assert (new.members, new.left_out, new.decision, new.inner_step) == (
        (key(0), key(1)), (2,), ONE_VOTE, 8,
    )  # fmt: skip
    swapped(core)
    assert core.only(st.Enter).record == new and core.only(ms.Open).record == swap.new
    assert core.state.stage is Stage.TRAINING and core.state.number == 2


def test_rule_1_a_ready_alone_and_a_sealed_alone_are_not_enough() -> None:
    for message in (ms.Ready(attempt_of(0)), ms.Sealed(attempt_of(0), 1, ONE_VOTE, 8)):
        core = member(0, THREE)
        assert leads(core, dead=(2,)) == attempt_of(0)
        core.hear(1, message)
        assert core.all(st.Swap) == []


def test_rule_1_a_member_answers_sealed_when_it_has_stopped_and_ready_when_it_is_connected() -> (
    None
):
    core = member(1, THREE)
    core.hear(0, prepare(THREE, 0, 1))
    assert core.only(st.Seal) == st.Seal(1) and core.only(st.Connect).attempt == attempt_of(0)
    core.tell(st.Sealed(1, ONE_VOTE, 8))
    assert core.only(ms.Sealed) == ms.Sealed(attempt_of(0), 1, ONE_VOTE, 8)
    core.tell(st.Connected(attempt_of(0)))
    assert core.only(ms.Ready) == ms.Ready(attempt_of(0))
    new = after(THREE, 0, 1)
    core.hear(0, ms.Open(new.to_bytes()))
    assert core.only(st.Enter).record == new


def test_rule_1_others_wait_for_their_turn_and_tell_the_lowest() -> None:
    core = sealed(member(2, THREE))
    assert core.all(ms.Prepare) == [] and core.state.waits_for == ""
    core = member(2, THREE)
    core.tell(st.Broke(1))
    assert core.only(ms.Here).base == 1
    core.tell(st.Sealed(1, ONE_VOTE, 10))
    core.poll(3)
    assert core.all(ms.Prepare) == []
    core.poll()
    # Twice suspect_after, for two lower members.
    assert {action.nonce for action in core.said if isinstance(action, st.Send)} >= {nonce_of(0)}
    assert core.all(ms.Prepare) != []


def test_rule_1_a_member_that_has_stopped_lets_the_lowest_lead_at_once() -> None:
    core = member(0, THREE)
    core.hear(2, ms.Here(1, THREE.hash))
    assert core.only(st.Seal) == st.Seal(1) and len(core.all(ms.Prepare)) == 2


# -------------------------------------------------------------------- rule 2: the promise


def test_rule_2_who_has_sealed_says_the_same_to_every_attempt_on_its_base() -> None:
    core = sealed(member(2, THREE))
    core.hear(1, prepare(THREE, 1, 2))
    assert core.only(ms.Sealed) == ms.Sealed(attempt_of(1), 1, ONE_VOTE, 10)
    core.hear(0, prepare(THREE, 0, 2, counter=2))
    assert core.only(ms.Sealed) == ms.Sealed(attempt_of(0, 2), 1, ONE_VOTE, 10)
    # A lower process leads: it is answered first, until it is silent.
    core.hear(1, prepare(THREE, 1, 2))
    assert core.all(ms.Sealed) == []
    core.tell(life(suspected=(0,)))
    core.hear(1, prepare(THREE, 1, 2))
    assert core.only(ms.Sealed).attempt == attempt_of(1)


def test_rule_2_what_is_sealed_stays_so_whatever_the_training_thread_says_later() -> None:
    core = sealed(member(2, THREE))
    core.tell(st.Sealed(1, NO_VOTE, 11))
    core.tell(st.Boundary(1, NO_VOTE, 11, True))
    core.hear(0, prepare(THREE, 0, 1, 2))
    assert core.only(ms.Sealed) == ms.Sealed(attempt_of(0), 1, ONE_VOTE, 10)


def test_rule_2_of_two_proposers_the_higher_one_yields() -> None:
    core = member(1, THREE)
    core.tell(st.Life(suspected=frozenset([nonce_of(0)])))
    sealed(core)
    core.poll(10)
    assert core.state.proposal is not None
    core.hear(0, prepare(THREE, 0, 1, 2))
    assert core.state.proposal is None and core.only(ms.Sealed).attempt == attempt_of(0)
    lowest = member(0, THREE)
    leads(lowest, dead=(2,))
    lowest.hear(1, prepare(THREE, 1, 0))
    assert core.all(ms.Prepare) == [] and lowest.all(st.Send) == []


def test_rule_2_a_lost_open_is_said_again_to_who_still_answers_the_attempt() -> None:
    core = ready_to_swap()
    swapped(core)
    core.hear(1, ms.Sealed(attempt_of(0), 1, ONE_VOTE, 8))
    assert Record.from_bytes(core.only(ms.Open).record).attempt == attempt_of(0)


def test_rule_2_who_has_sealed_without_state_does_not_come_to_hold_it_later() -> None:
    core = Core(2)
    core.look(THREE, members_places(THREE))
    assert core.state.stage is Stage.TRAINING and not core.state.has_state
    sealed(core, ())
    core.tell(st.Started(1))
    core.hear(0, prepare(THREE, 0, 2))
    assert not core.state.has_state and core.only(ms.Sealed).positions == ()


# ------------------------------------------------------------------- rule 3: the decision


@pytest.mark.parametrize(("other", "bits"), [(ONE_VOTE, 1), (NO_VOTE, 0)])
def test_rule_3_a_round_counts_if_every_sealed_says_voted(
    other: tuple[Rounds, ...], bits: int
) -> None:
    core = member(0, THREE)
    leads(core, dead=(2,))
    core.hear(1, ms.Sealed(attempt_of(0), 1, other, 8))
    core.hear(1, ms.Ready(attempt_of(0)))
    assert Record.from_bytes(core.only(st.Swap).new).decision == (Rounds(0, 1, bits),)


def test_rule_3_a_member_without_state_decides_nothing_and_is_given_it() -> None:
    core = member(0, THREE)
    leads(core, dead=(2,))
    core.hear(1, ms.Sealed(attempt_of(0), 1, (), 0))
    core.hear(1, ms.Ready(attempt_of(0)))
    new = Record.from_bytes(core.only(st.Swap).new)
    assert (new.decision, new.joined, new.inner_step) == (ONE_VOTE, (1,), 10)


def test_rule_3_a_member_that_cannot_be_repaired_is_left_behind() -> None:
    core = member(0, THREE)
    leads(core, dead=(2,), positions=(Rounds(70, 2, 3),))
    core.hear(1, ms.Sealed(attempt_of(0), 1, ONE_VOTE, 8))
    core.hear(1, ms.Ready(attempt_of(0)))
    assert core.all(st.Swap) == [] and (nonce_of(0), nonce_of(1)) in core.state.cuts
    core = member(0, THREE)
    leads(core, dead=(2,))
    core.hear(1, ms.Sealed(attempt_of(0), 1, (Rounds(70, 2, 3),), 8))
    core.hear(1, ms.Ready(attempt_of(0)))
    assert "a member is at round 1 of a stream" in core.only(st.Fence).reason


# ------------------------------------------------------------------ rule 4: one base at a time


def test_rule_4_a_process_in_a_higher_record_says_so() -> None:
    core = member(1, after(TWO, 0, 1, source=1))
    core.hear(0, prepare(TWO, 0, 1))
    assert core.only(ms.Open).record == core.state.entered and core.all(st.Seal) == []
    core.hear(0, ms.Here(1, TWO.hash))
    assert core.only(ms.Open).record == core.state.entered


def test_rule_4_a_member_that_was_left_out_and_asks_is_told_the_record() -> None:
    core = member(1, after(TWO, 1, source=1))
    core.hear(0, ms.Here(1, TWO.hash))
    assert core.only(ms.Open).record == core.state.entered
    # A newcomer that is no member yet is told nothing.
    core.hear(0, ms.Here(NO_RECORD, NO_HASH), start=1)
    assert core.all(ms.Open) == [] and core.state.stage is Stage.TRAINING


def test_rule_4_who_is_behind_follows_the_answer_without_a_table() -> None:
    new = after(TWO, 0, 1)
    for record, kind in ((new, st.Enter), (after(new, 0, 1), st.Enter), (after(TWO, 1), st.Fence)):
        core = sealed(member(0, TWO))
        core.hear(1, ms.Open(record.to_bytes()))
        assert core.only(kind)


def test_rule_4_a_process_in_a_lower_record_reads_the_table_first() -> None:
    core, new = member(1, TWO), after(TWO, 0, 1)
    core.hear(0, prepare(new, 0, 1))
    assert core.all(st.Seal) == [] and core.only(st.Read) == st.Read()
    # The proposer, too, has the record.
    assert st.Send(nonce_of(0), ms.Here(1, TWO.hash)) in core.said
    core.look(new)
    assert core.only(st.Enter).record == new
    core.hear(0, prepare(new, 0, 1))
    assert core.only(st.Seal) == st.Seal(2)


def test_rule_4_a_process_that_is_no_member_of_the_record_is_fenced() -> None:
    core = member(1, TWO)
    core.look(after(TWO, 0))
    assert core.only(st.Fence).reason == ("view 2 of replicas [0] was opened without this process")


def test_rule_4_a_newcomer_answers_when_it_is_ready_and_enters_first_where_it_is_a_member() -> None:
    core = Core(1)
    core.look(after(TWO, 0), (place_of(0, entered=2, has_state=True),))
    core.hear(0, prepare(after(TWO, 0), 0, 1, joined=(1,)))
    assert core.all(st.Connect) == []
    core.tell(st.JoinerReady())
    core.hear(0, prepare(after(TWO, 0), 0, 1))
    assert core.only(st.Read) == st.Read() and core.all(st.Connect) == []
    core.hear(0, prepare(after(TWO, 0), 0, 1, joined=(1,)))
    assert core.only(st.Connect).attempt == attempt_of(0)


def test_rule_4_a_newcomer_enters_by_reading_the_table_alone() -> None:
    core = Core(1)
    core.look(after(TWO, 0), (place_of(0, entered=2, has_state=True),))
    core.hear(0, ms.Open(TWO.to_bytes()))
    assert core.only(st.Read) == st.Read() and core.state.stage is Stage.NEWCOMER
    core.hear(0, ms.Open(b"no record"))
    assert core.said == []


# ------------------------------------------------------------------------- rule 5: NO


def test_rule_5_without_a_way_to_a_member_the_fewest_are_left_out() -> None:
    core = member(0, THREE)
    core.hear(1, ms.Here(1, THREE.hash))
    core.tell(st.Sealed(1, ONE_VOTE, 10))
    core.hear(1, ms.No(attempt_of(0), Why.CUT, cut=(nonce_of(2),)))
    assert core.state.proposal is None
    # Member 2 may train on: there is a pause of twice suspect_after, and one poll.
    core.poll(4)
    assert core.all(ms.Prepare) == []
    core.poll()
    assert core.only(ms.Prepare).members == (key(0), key(1))


def test_rule_5_a_member_without_a_way_says_to_whom() -> None:
    core = sealed(member(1, THREE))
    core.hear(0, prepare(THREE, 0, 1, 2))
    core.tell(st.Connected(attempt_of(0), cut=(nonce_of(2),)))
    no = core.only(ms.No)
    assert (no.why, no.cut) == (Why.CUT, (nonce_of(2),))


def test_rule_5_a_newcomer_whose_key_a_member_does_not_let_in_is_told_so_and_ends() -> None:
    sentence = "the allowed keys of replica 1 bind the key to replica 5"
    core = sealed(member(1, TWO))
    core.hear(0, prepare(TWO, 0, 1, 2, joined=(2,)))
    core.tell(st.Connected(attempt_of(0), cut=(nonce_of(2),), refusal=sentence))
    no = core.only(ms.No)
    assert (no.why, no.text, no.cut) == (Why.KEY, sentence, (nonce_of(2),))
    leader = member(0, TWO, places=(*members_places(TWO), place_of(2, follows=NO_RECORD)))
    leader.tell(st.Boundary(1, ONE_VOTE, 10, has_all_votes=False))
    asked = leader.all(ms.Prepare)[0]
    assert asked.members == (key(0), key(1), key(2))
    leader.hear(1, ms.No(asked.attempt, Why.KEY, cut=(nonce_of(2),), text=sentence))
    told = [one for one in leader.said if isinstance(one, st.Send)]
    assert [(one.nonce, one.message.why) for one in told] == [(nonce_of(2), Why.KEY)]
    assert leader.state.proposal is None
    newcomer = Core(2)
    newcomer.look(TWO, members_places(TWO))
    newcomer.tell(st.JoinerReady())
    newcomer.hear(0, prepare(TWO, 0, 1, 2, joined=(2,)))
    newcomer.hear(1, no)
    assert newcomer.state.stage is Stage.NEWCOMER
    newcomer.hear(0, no)
    assert newcomer.only(st.Refuse).reason == sentence


def failing(core: Core, error: str = "device 3 is gone") -> None:
    """Let the devices of an attempt not connect."""
    assert core.state.joint is not None
    core.tell(st.Connected(core.state.joint.attempt, error=error))


def test_rule_5_devices_that_fail_end_the_attempt_for_all_and_nobody_is_cut_off() -> None:
    core = sealed(member(1, THREE))
    core.hear(0, prepare(THREE, 0, 1, 2))
    failing(core)
    no = core.only(ms.No)
    assert (no.why, no.text, no.cut) == (Why.FAILED, "device 3 is gone", ())
    assert core.state.joint is None and core.state.cuts == frozenset()
    assert core.reason == "a while; the last attempt failed: device 3 is gone"
    leader = member(0, THREE)
    leader.hear(1, ms.Here(1, THREE.hash))
    leader.tell(st.Sealed(1, ONE_VOTE, 10))
    leader.hear(1, no)
    assert leader.state.proposal is None and leader.state.cuts == frozenset()
    told = [action for action in leader.said if isinstance(action, st.Send)]
    text = "replica 1: device 3 is gone"
    assert {one.nonce for one in told} == {nonce_of(1), nonce_of(2)}
    assert all(one.message == ms.No(attempt_of(0), Why.FAILED, text=text) for one in told)
    assert leader.reason == f"a while; the last attempt failed: {text}"
    third = sealed(member(2, THREE))
    third.hear(0, prepare(THREE, 0, 1, 2))
    third.hear(1, told[0].message)
    assert third.state.joint is not None
    third.hear(0, told[0].message)
    assert third.state.joint is None and third.reason.endswith(text)


def test_rule_5_devices_that_fail_again_and_again_are_tried_more_and_more_rarely() -> None:
    core = member(0, TWO, suspect_after=20)
    core.hear(1, ms.Here(1, TWO.hash))
    core.tell(st.Sealed(1, ONE_VOTE, 10))
    pauses = []
    for _ in range(12):
        failing(core)
        assert core.state.proposal is None
        pauses.append(0)
        while core.state.proposal is None:
            core.poll()
            pauses[-1] += 1
    assert pauses == [2, 4, 8, *[10] * 9]
    attempt = core.state.proposal.draft.attempt
    core.tell(st.Connected(attempt))
    assert core.reason.startswith("until replicas [1] have stopped and are connected; the last")
    core.hear(1, ms.Sealed(attempt, 1, ONE_VOTE, 8))
    core.hear(1, ms.Ready(attempt))
    failing(core, "too late")
    swapped_late = core.state.proposal
    assert swapped_late is not None and swapped_late.is_swapping
    core.hear(1, ms.Open(after(TWO, 0, 1).to_bytes()))
    assert core.reason == "" and core.state.failure == "" and core.state.num_failures == 0


def test_rule_5_a_caller_that_gives_up_reads_no_more_of_the_failure() -> None:
    core = member(0, TWO, is_fixed=True)
    core.tell(st.Demanded((0, 1)))
    core.look(TWO, members_places(TWO))
    core.hear(1, ms.Here(1, TWO.hash, (0, 1)))
    failing(core)
    assert core.reason.endswith("the last attempt failed: device 3 is gone")
    core.tell(st.GivenUp())
    assert core.reason == ""


def test_rule_5_other_settings_end_a_newcomer_with_one_sentence() -> None:
    core = Core(1, digest=b"z" * 16)
    core.look(None)
    core.tell(st.JoinerReady())
    core.hear(0, prepare(None, 0, 1, joined=(0, 1)))
    sentence = "replica 1 cannot join run 'run', as replica 1 has another model or other settings"
    assert core.only(ms.No).why is Why.SETTINGS and core.only(ms.No).text.startswith(sentence)
    assert core.only(st.Refuse).reason.startswith(sentence)
    core = Core(2, digest=b"z" * 16)
    core.look(TWO, members_places(TWO))
    assert core.only(st.Refuse).reason.startswith("replica 2 cannot join run 'run'")
    assert core.only(st.Refuse).other in TWO.members


def test_rule_5_members_that_do_not_answer_are_asked_again() -> None:
    core = member(0, THREE)
    leads(core, dead=(2,))
    core.hear(1, ms.Ready(attempt_of(0)))
    core.poll()
    assert core.only(ms.Prepare).attempt == attempt_of(0)


# ------------------------------------------------------------------------ rule 6: the swap


def ready_to_swap(**settings: object) -> Core:
    core = member(0, THREE, **settings)
    leads(core, dead=(2,))
    core.hear(1, ms.Sealed(attempt_of(0), 1, ONE_VOTE, 8))
    core.hear(1, ms.Ready(attempt_of(0)))
    return core


def test_rule_6_a_refused_swap_leads_to_a_look_and_the_record_of_another() -> None:
    core, new = ready_to_swap(), after(THREE, 1, 0, attempt=attempt_of(1))
    swapped(core, Outcome.REFUSED)
    assert core.only(st.Read) == st.Read() and core.state.proposal is None
    core.look(replace(new, members=(key(0), key(1))))
    assert core.only(st.Enter).record.attempt == attempt_of(1)
    core = ready_to_swap()
    swapped(core, Outcome.REFUSED)
    core.look(after(THREE, 1, attempt=attempt_of(1)))
    assert core.only(st.Fence).reason.endswith("was opened without this process")


def test_rule_6_an_unknown_outcome_is_told_by_the_record_in_the_table() -> None:
    core = ready_to_swap()
    new = core.only(st.Swap).new
    swapped(core, Outcome.UNKNOWN)
    assert core.only(st.Read) == st.Read()
    core.look(Record.from_bytes(new))
    assert core.only(st.Enter).record.to_bytes() == new and core.only(ms.Open).record == new


def test_rule_6_where_the_table_has_its_old_record_another_attempt_is_made_after_a_look() -> None:
    core = ready_to_swap()
    swapped(core, Outcome.UNKNOWN)
    core.poll(5)
    assert core.all(ms.Prepare) == []
    core.look(THREE, members_places(THREE))
    assert core.only(ms.Prepare).attempt == attempt_of(0, 2)


def test_rule_6_a_swap_that_is_done_late_is_followed() -> None:
    core = ready_to_swap()
    new = core.only(st.Swap).new
    swapped(core, Outcome.UNKNOWN)
    core.hear(1, prepare(THREE, 1, 0))
    core.tell(st.Swapped(new, Outcome.DONE))
    assert core.only(st.Enter).record.to_bytes() == new


# ------------------------------------------------------------------------ rule 7: patience


def test_rule_7_half_of_the_base_waits_before_it_goes_on_alone() -> None:
    core = member(0, TWO)
    core.tell(st.Life(suspected=frozenset([nonce_of(1)])))
    sealed(core)
    assert core.reason == "for replicas [1], as they may train on without it"
    core.poll(3)
    assert core.all(ms.Prepare) == [] and core.state.proposal is None
    core.poll()
    assert core.state.proposal is not None


def test_rule_7_members_that_have_certainly_ended_are_not_waited_for() -> None:
    core = member(0, TWO)
    leads(core, dead=(1,))
    assert core.state.proposal is not None


def test_rule_7_a_member_of_which_the_table_hears_is_waited_for() -> None:
    core = member(0, THREE)
    core.tell(st.Life(suspected=frozenset([nonce_of(2)])))
    sealed(core)
    assert core.state.proposal is None and core.reason.startswith("for replicas [2]")
    stale = (*members_places(THREE)[:2], replace(members_places(THREE)[2], is_fresh=False))
    core = member(0, THREE, stale)
    core.tell(st.Life(suspected=frozenset([nonce_of(2)])))
    sealed(core)
    assert core.state.proposal is not None


def test_rule_7_the_largest_group_that_reaches_each_other_goes_on() -> None:
    four = record_of(0, 1, 2, 3)
    places = list(members_places(four))
    places[0] = replace(places[0], cut=(nonce_of(1), nonce_of(2), nonce_of(3)))
    core = sealed(member(1, four, tuple(places)))
    core.poll(4)
    assert core.state.proposal is not None
    assert core.state.proposal.draft.numbers == (1, 2, 3)
    lowest = member(0, four)
    lowest.tell(st.Life(cut=frozenset([nonce_of(1), nonce_of(2), nonce_of(3)])))
    sealed(lowest)
    lowest.poll(7)
    assert lowest.state.proposal is None
    lowest.poll()
    assert lowest.state.proposal is not None
    assert lowest.state.proposal.draft.numbers == (0,)


# ------------------------------------------------------------------------- rule 8: silence


def test_rule_8_a_process_that_hears_nothing_reads_the_table_and_says_again_where_it_is() -> None:
    core = sealed(member(2, THREE))
    core.hear(0, prepare(THREE, 0, 1, 2))
    core.tell(st.Connected(attempt_of(0)))
    core.poll(1)
    assert core.only(st.Read) == st.Read()
    core.poll(1)
    assert st.Send(nonce_of(0), ms.Here(1, THREE.hash)) in core.said
    core.hear(0, prepare(THREE, 0, 1, 2))
    assert core.only(ms.Sealed).attempt == core.only(ms.Ready).attempt == attempt_of(0)


def test_rule_8_when_the_proposer_has_ended_the_next_member_leads() -> None:
    core = sealed(member(1, THREE))
    core.hear(0, prepare(THREE, 0, 1, 2))
    core.tell(life(0))
    assert core.only(ms.Prepare).members == (key(1), key(2))


# ----------------------------------------- guarantees for members and newcomers of an elastic group


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
