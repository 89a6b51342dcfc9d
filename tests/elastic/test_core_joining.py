"""Single decisions of the core: who comes, who leaves, and who founds a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diloco_comm.elastic.beats import (
    BROKEN,
    FINISHED,
    PULLING,
    READY,
    STOPPED,
    TRAINING,
    Beat,
)
from diloco_comm.elastic.core import Settings, beat_of, start
from diloco_comm.elastic.core.events import (
    Boundary,
    Broke,
    Drained,
    Enter,
    Failed,
    Finished,
    Form,
    Formed,
    Leave,
    Over,
    Pend,
    Pulled,
    Refuse,
    Started,
    Swap,
    Swapped,
)
from diloco_comm.elastic.views import (
    MAX_RECORD_BYTES,
    NO_VIEW,
    View,
    encoded_bytes,
    finished,
    opened,
    to_bytes,
    with_evicted,
)
from elastic_process import (
    SUSPECT_AFTER,
    Process,
    attempt,
    beat,
    member,
    proposal,
    reasons,
    training,
    view,
)

# --------------------------------------------------------------------------------- planned


def test_a_newcomer_that_copies_the_state_is_not_let_in_yet() -> None:
    one = view(0, 1)
    process = Process(training(0, one))
    newcomer = beat(2, PULLING)
    assert Pend() not in process.poll(beat(1, TRAINING, one), newcomer)
    assert Pend() in process.poll(beat(1, TRAINING, one), replace(newcomer, stage=READY))


def test_a_newcomer_that_copies_the_state_founds_nothing() -> None:
    process = Process(start(Settings("run"), member(0), is_pulling=True))
    for _ in range(5):
        assert not [one for one in process.poll() if isinstance(one, Swap)]
    assert beat_of(process.state, 1).stage == PULLING
    process.tell(Pulled())
    assert beat_of(process.state, 1).stage == READY
    assert proposal(process.poll()).ids == (0,)


def test_the_last_member_gives_its_state_to_one_that_copies_it_before_it_leaves() -> None:
    one = view(0)
    process = Process(training(0, one))
    process.poll(beat(2, PULLING))
    process.tell(Leave())
    process.tell(Boundary(4))
    after = proposal(process.poll(beat(2, PULLING)))
    assert after.joined == (2,)
    other = Process(start(Settings("run"), member(2), is_pulling=True), to_bytes(after))
    assert other.poll() == [Form(after, "join")]
    other.tell(Failed(after.number))
    assert beat_of(other.state, 1).stage == READY


def test_a_newcomer_is_let_in_at_a_boundary() -> None:
    one = view(0, 1)
    process = Process(training(0, one))
    newcomer = beat(2, READY)
    assert Pend() in process.poll(beat(1, TRAINING, one), newcomer)
    process.tell(Boundary(4))
    after = proposal(process.poll(beat(1, STOPPED, one), newcomer))
    assert after.ids == (0, 1, 2) and after.joined == (2,)
    other = Process(start(Settings("run"), member(2)), to_bytes(after))
    assert other.poll() == [Form(after, "join")]


def test_who_cannot_reach_the_largest_group_goes_on_alone_when_that_group_does_nothing() -> None:
    one = view(0, 1, 2, 3)
    process = Process(training(3, one))
    process.tell(Broke(one.number, missing=(0, 1, 2)))
    others = [beat(id, BROKEN, one, unreachable=("n3",)) for id in range(3)]
    assert not [action for action in process.polls(2, *others) if isinstance(action, Swap)]
    assert proposal(process.polls(SUSPECT_AFTER, *others)).ids == (3,)


def test_so_many_join_that_the_registry_holds_this_record_and_the_next() -> None:
    process = Process(training(0, view(0)))
    # Lengths as in a run: a nonce has 32 digits.
    names = [member(id, nonce=f"{id:032x}") for id in range(1, 200)]
    newcomers = [beat(name.id, READY, member=name) for name in names]
    assert Pend() in process.poll(*newcomers)
    process.tell(Boundary(4))
    after = proposal(process.poll(*newcomers))
    assert after.joined == tuple(range(1, len(after.members)))

    def following(those: View) -> View:
        return replace(those, number=9, base=those.number, base_members=those.keys)

    assert encoded_bytes(following(after)) <= MAX_RECORD_BYTES
    some_more = names[len(after.joined) :][:3]
    larger = replace(after, members=(*after.members, *some_more))
    assert encoded_bytes(following(larger)) > MAX_RECORD_BYTES


def test_a_newcomer_that_cannot_reach_a_member_stops_nobody() -> None:
    one = view(0, 1)
    process = Process(training(0, one))
    mate = beat(1, TRAINING, one)
    assert Pend() not in process.polls(3, mate, beat(2, READY, unreachable=("n1",)))
    assert Pend() in process.poll(mate, beat(2, READY))


def test_what_could_not_be_reached_is_tried_again_after_a_while() -> None:
    process = Process(start(Settings("run", suspect_after=SUSPECT_AFTER), member(2)))
    after = replace(attempt(0, 1, 2), joined=(2,))
    process.record = to_bytes(after)
    process.poll()
    process.tell(Failed(5, missing=(1,)))
    assert process.state.unreachable == ("n1",)
    for number in range(1, 3 * SUSPECT_AFTER):
        # Whatever happens meanwhile.
        process.record = to_bytes(view(0, 1, number=5 + number))
        process.poll()
    assert process.state.unreachable == ()


def test_a_newcomer_names_as_many_replicas_out_of_reach_as_a_beat_holds() -> None:
    # Lengths as in a run.
    place = "tcp://[2001:db8:1234:5678:9abc:def0:1234:5678]:65535"
    own = replace(member(0, nonce=f"{0:032x}", settings=f"{0:032x}"), address=place)
    process = Process(start(Settings("run", suspect_after=SUSPECT_AFTER), own))
    missing = tuple(range(1, 60))
    others = tuple(member(id, nonce=f"{id:032x}") for id in missing)
    after = replace(attempt(0), members=(own, *others), base_members=(), joined=(0,))
    process.record = to_bytes(after)
    process.poll()
    process.tell(Failed(5, missing=missing))
    assert len(process.state.unreachable) == len(missing)
    positions = tuple(range(1_000_000, 1_000_032))
    link = f"{'a' * 32} {place[6:]} {'b' * 64} {place[6:]}"
    told = replace(beat_of(process.state, 1, 0, positions), link=link, serves=True, phase="copying")
    assert Beat.from_bytes(told.to_bytes()) == told
    assert set(told.unreachable) < set(process.state.unreachable) and len(told.unreachable) >= 20


def test_a_newcomer_waits_while_the_process_before_it_lives() -> None:
    one = view(0, 1)
    process = Process(training(0, one))
    again = beat(1, READY, member=member(1, "again"))
    assert Pend() not in process.polls(3, beat(1, TRAINING, one), again)
    assert Pend() in process.polls(3, again, silent=(beat(1, TRAINING, one),))


def test_who_is_asked_to_leave_does_so_at_a_boundary() -> None:
    one = view(0, 1)
    leaver, stayer = Process(training(1, one)), Process(training(0, one))
    assert leaver.tell(Leave()) == [Pend()]
    said = beat_of(leaver.state, 0)
    assert said.is_leaving and Pend() in stayer.poll(said)
    for process in (leaver, stayer):
        process.tell(Boundary(4))
    said = beat_of(leaver.state, 0)
    assert proposal(stayer.poll(said)).ids == (0,)
    assert Drained() in leaver.poll(beat(0, STOPPED, one))


def test_the_last_that_has_the_state_gives_it_away_before_it_leaves() -> None:
    one = view(0)
    process = Process(training(0, one))
    process.poll(beat(1, READY))
    process.tell(Leave())
    process.tell(Boundary(4))
    assert proposal(process.poll(beat(1, READY))).ids == (0, 1)


def test_a_member_that_is_evicted_leaves() -> None:
    one = view(0, 1)
    asked = to_bytes(with_evicted(one, 1))
    evicted, stayer = Process(training(1, one), asked), Process(training(0, one), asked)
    for process in (evicted, stayer):
        assert Pend() in process.poll(beat(1 - process.state.member.id, TRAINING, one))
        process.tell(Boundary(4))
    after = proposal(stayer.poll(beat(1, STOPPED, one)))
    assert after.ids == (0,)
    assert Drained() in evicted.poll(beat(0, STOPPED, one))


def test_who_has_taken_all_steps_is_not_waited_for() -> None:
    one = view(0, 1)
    process = Process(training(0, one, min_replicas=2))
    process.tell(Broke(4))
    assert proposal(process.poll(beat(1, FINISHED, one))).ids == (0,)
    assert process.tell(Finished()) == [Drained()]


# --------------------------------------------------------------------------------- founding


def founder(id: int, record: bytes = b"", **options: Any) -> Process:
    settings = Settings("run", suspect_after=SUSPECT_AFTER, **options)
    return Process(start(settings, member(id, f"new{id}")), record)


def newcomer(id: int, **values: Any) -> Beat:
    return beat(id, READY, member=member(id, f"new{id}"), **values)


def test_a_run_is_founded_by_all_that_come_in_time() -> None:
    process = founder(0, min_replicas=2, founding_wait=3)
    assert reasons(process.poll()) == ["until at least 2 replicas are here: replicas [0] are"]
    assert not [a for a in process.poll(newcomer(1)) if isinstance(a, Swap)]
    after = proposal(
        process.poll(newcomer(1), newcomer(2)) + process.poll(newcomer(1), newcomer(2))
    )
    assert after.ids == after.joined == (0, 1, 2) and after.base == NO_VIEW and after.source == 0


def test_nobody_founds_a_run_beside_one_of_which_the_registry_knows_nothing() -> None:
    actions = founder(0).polls(9, beat(7, TRAINING, view(7)))
    assert not [a for a in actions if isinstance(a, Swap)]
    assert reasons(actions)[-1].startswith("until replica 7 tells the registry of the view")


@pytest.mark.parametrize(
    ("id", "values", "options", "reason"),
    [
        (
            2,
            {"positions": (3,), "inner_step": 900},
            {},
            "until one of replicas [0, 1] starts again",
        ),
        (1, {}, {}, "until a replica brings a checkpoint of inner step 100 or later"),
        (1, {"positions": (3,), "inner_step": 99}, {}, "until a replica brings a checkpoint"),
        (1, {"positions": (3,), "inner_step": 100}, {}, ""),
        (2, {}, {"allows_rollback": True}, ""),
    ],
)
def test_a_run_whose_members_have_all_died_is_founded_anew_from_a_checkpoint(
    id: int, values: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    process = founder(5, to_bytes(view(0, 1)), **options)
    actions: list[Any] = []
    for _ in range(8):
        actions += process.poll(newcomer(id, **values))
        if any(isinstance(a, Swap) for a in actions):
            break
    waits_for_the_rest = "a while for replicas [0], as one of them may have a newer checkpoint"
    assert (waits_for_the_rest in reasons(actions)) == (values.get("inner_step") == 100)
    if reason:
        assert reasons(actions)[-1].startswith(reason)
        assert not [a for a in actions if isinstance(a, Swap)]
    else:
        after = proposal(actions)
        assert after.ids == (id, 5) and after.base == 4 and after.left == (0, 1)
        assert after.source == (id if values else 2)


def test_a_newer_checkpoint_that_comes_a_little_later_counts() -> None:
    process = founder(0, to_bytes(view(0, 1)), founding_wait=2 * SUSPECT_AFTER)
    older, newer = ({"positions": (3,), "inner_step": step} for step in (100, 104))
    actions: list[Any] = []
    while not reasons(actions) or "a while for replicas [1]" not in reasons(actions)[-1]:
        actions = process.poll(newcomer(2, **older))
    while not any(isinstance(one, Swap) for one in actions):
        actions = process.poll(newcomer(2, **older), newcomer(1, **newer))
    assert proposal(actions).source == 1


def test_nobody_begins_anew_beside_one_in_a_later_view_than_the_record() -> None:
    """The registry has its journal of an earlier time: the record names members that are dead."""
    process = founder(5, to_bytes(view(0, 1)))
    saved, elsewhere = newcomer(1, positions=(3,), inner_step=900), replace(view(7), number=9)
    actions: list[Any] = []
    for _ in range(9):
        actions += process.poll(saved, beat(7, TRAINING, elsewhere))
    assert not [a for a in actions if isinstance(a, Swap)]
    assert reasons(actions)[-1].startswith("until replica 7 tells the registry of the view")


def test_the_record_says_that_all_steps_are_taken() -> None:
    one = view(0, 1)
    process = Process(training(0, one))
    record = to_bytes(finished(one))
    assert process.tell(Finished(has_all_steps=True)) == [Swap(to_bytes(one), record), Drained()]
    assert founder(5, record).poll()[0] == Over(
        "run 'run' has ended: replicas [0, 1] have taken all their steps; to train on, give the "
        "run another name, or rollback=True"
    )
    # Nobody who trained is told so, and who may begin anew does.
    assert not [a for a in Process(training(1, one), record).poll() if isinstance(a, Over)]
    again = founder(5, record, allows_rollback=True)
    actions: list[Any] = []
    while not any(isinstance(one, Swap) for one in actions):
        actions += again.poll()
    anew = proposal(actions)
    assert anew.ids == (5,) and anew.base == 4 and not anew.is_finished


def test_a_process_with_other_settings_is_refused() -> None:
    record = to_bytes(view(0, 1))
    process = Process(start(Settings("run"), member(2, settings="other")), record)
    (refuse,) = process.poll()
    assert isinstance(refuse, Refuse)
    assert "replica 2 has another model or other settings" in refuse.reason


def test_founders_take_the_state_of_one_of_them_and_train() -> None:
    process = founder(0)
    after = proposal(process.poll())
    process.record = to_bytes(after)
    assert process.poll() == [Form(after, "broadcast")]
    (swap,) = process.tell(Formed(after.number, 0))
    assert process.tell(Swapped(swap.old, swap.new, True)) == [Enter(opened(after, 0))]
    assert not process.state.has_state
    process.tell(Started(after.number))
    assert process.state.has_state
