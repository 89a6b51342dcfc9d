"""Single decisions of the core: failures, attempts, and a registry that forgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diloco_comm.elastic.beats import BROKEN, READY, TRAINING
from diloco_comm.elastic.core import Settings, State, beat_of
from diloco_comm.elastic.core.events import (
    Abandon,
    Break,
    Broke,
    Enter,
    Failed,
    Fence,
    Form,
    Formed,
    Suspect,
    Swap,
    Swapped,
)
from diloco_comm.elastic.core.reach import largest_group
from diloco_comm.elastic.views import (
    View,
    opened,
    to_bytes,
)
from elastic_process import (
    Process,
    attempt,
    beat,
    member,
    proposal,
    reasons,
    training,
    view,
)

# --------------------------------------------------------------------------------- unplanned


def test_the_lowest_survivor_proposes_at_once_who_goes_on() -> None:
    one = view(0, 1, 2)
    process = Process(training(0, one))
    process.tell(Broke(4))
    waits = process.poll(beat(1, BROKEN, one), beat(2, TRAINING, one))
    assert reasons(waits)[-1] == "until replicas [2] have stopped in view 4"
    after = proposal(process.poll(beat(1, BROKEN, one), beat(2, BROKEN, one)))
    assert after.ids == (0, 1, 2) and after.number == 5 and after.base == 4 and after.joined == ()


def test_a_silent_member_is_waited_for_until_it_is_suspected() -> None:
    one = view(0, 1, 2)
    process = Process(training(0, one))
    both = beat(1, BROKEN, one), beat(2, TRAINING, one)
    process.poll(*both)
    process.tell(Broke(4))
    old = replace(both[1], counter=2)
    late = process.polls(5, both[0], silent=(old,), is_late=True)
    assert not [a for a in late if isinstance(a, (Swap, Suspect))]
    actions = process.poll(both[0], silent=(old,))
    assert Suspect((2,)) in actions
    after = proposal(actions)
    assert after.ids == (0, 1) and after.left == (2,) and after.reason == "replicas [2] left"


def test_a_member_that_has_ended_is_left_out_before_it_is_suspected() -> None:
    one = view(0, 1, 2)
    process = Process(replace_settings(training(0, one), suspect_after=20, ended_after=2))
    mates = beat(1, TRAINING, one), beat(2, TRAINING, one)
    process.poll(*mates)
    silent = (replace(mates[1], counter=2),)
    assert process.polls(3, mates[0], silent=silent) == []
    actions = process.poll(mates[0], silent=silent, ended=("n2",))
    assert Break(4) in actions and Suspect((2,)) in actions
    process.tell(Broke(4))
    assert proposal(process.poll(beat(1, BROKEN, one), silent=silent, ended=("n2",))).ids == (0, 1)


def test_a_beat_proves_a_host_wrong() -> None:
    one = view(0, 1)
    process = Process(replace_settings(training(0, one), suspect_after=20, ended_after=2))
    mate = beat(1, TRAINING, one)
    process.poll(mate)
    # Heard in the first of the two polls, and silent in the second one.
    process.poll(silent=(replace(mate, counter=2),), ended=("n1",))
    assert process.poll(mate) == []
    assert not process.state.peers[0].is_ended
    assert process.polls(2, silent=(replace(mate, counter=6),)) == []


def test_a_host_takes_its_sign_back() -> None:
    one = view(0, 1, 2)
    process = Process(replace_settings(training(0, one), suspect_after=20, ended_after=2))
    mates = beat(1, TRAINING, one), beat(2, TRAINING, one)
    process.poll(*mates)
    silent = (replace(mates[1], counter=2),)
    assert Break(4) in process.polls(2, mates[0], silent=silent, ended=("n2",))
    process.tell(Broke(4))
    # The process that was taken for dead is waited for again.
    after = process.polls(2, beat(1, BROKEN, one), silent=silent)
    assert not [one for one in after if isinstance(one, Swap)]


def test_a_late_poll_tells_nothing_of_one_that_has_ended() -> None:
    one = view(0, 1)
    process = Process(replace_settings(training(0, one), suspect_after=20, ended_after=2))
    mate = beat(1, TRAINING, one)
    process.poll(mate)
    silent = (replace(mate, counter=2),)
    assert process.polls(4, silent=silent, ended=("n1",), is_late=True) == []


def test_a_member_that_the_link_hears_has_more_time() -> None:
    one = view(0, 1, 2)
    process = Process(replace_settings(training(0, one), busy_after=20))
    mates = beat(1, TRAINING, one), beat(2, TRAINING, one)
    process.poll(*mates)
    silent = (replace(mates[1], counter=2),)
    # Twice the usual limit of two polls, and more.
    assert process.polls(5, mates[0], silent=silent, linked=("n2",)) == []
    process.tell(Broke(4, unheard=(2,)))
    waits = process.polls(1, beat(1, BROKEN, one), silent=silent, linked=("n2",))
    assert not [one for one in waits if isinstance(one, Swap)]
    # Once the link is silent, too, the usual limit counts at once.
    assert proposal(process.poll(beat(1, BROKEN, one), silent=silent)).ids == (0, 1)


def test_a_member_that_only_the_link_hears_is_left_out_in_the_end() -> None:
    one = view(0, 1, 2)
    process = Process(replace_settings(training(0, one), busy_after=12, ended_after=1))
    mates = beat(1, TRAINING, one), beat(2, TRAINING, one)
    process.poll(*mates)
    silent = (replace(mates[1], counter=2),)
    # A host may refuse connections of a process that lives.
    signs = {"linked": ("n2",), "ended": ("n2",)}
    assert process.polls(5, mates[0], silent=silent, **signs) == []
    assert Suspect((2,)) in process.poll(mates[0], silent=silent, **signs)
    # A beat of that process takes all back.
    process.poll(*mates)
    assert process.state.peers[1].silent_polls == 0 and not process.state.peers[1].is_busy


def replace_settings(state: State, **options: Any) -> State:
    return replace(state, settings=replace(state.settings, **options))


def test_the_others_wait_before_they_propose_instead() -> None:
    one = view(0, 1)
    process = Process(training(1, one))
    process.tell(Broke(4))
    beats = (beat(0, BROKEN, one),)
    assert not [a for a in process.poll(*beats) if isinstance(a, Swap)]
    assert proposal(process.poll(*beats)).proposer == "n1"


def test_fewer_than_the_least_number_wait_for_a_newcomer() -> None:
    one = view(0, 1)
    process = Process(training(0, one, min_replicas=2))
    process.tell(Broke(4))
    actions = process.polls(4)
    assert reasons(actions)[-1] == "until at least 2 replicas are here: replicas [0] are"
    after = proposal(process.poll(beat(1, READY, member=member(1, "again"))))
    assert after.keys == ((0, "n0"), (1, "again")) and after.joined == after.left == (1,)


@pytest.mark.parametrize(("id", "is_enough"), [(0, True), (1, False)])
def test_half_of_a_base_needs_its_lowest_where_the_registry_forgets(
    id: int, is_enough: bool
) -> None:
    process = Process(training(id, view(0, 1), is_durable=False))
    process.tell(Broke(4))
    actions = process.polls(6)
    assert any(isinstance(a, Swap) for a in actions) == is_enough
    if not is_enough:
        assert reasons(actions)[-1].startswith("until more than half of replicas [0, 1] are here")


def test_members_that_cannot_reach_each_other_part() -> None:
    one = view(0, 1, 2)
    process = Process(training(0, one))
    process.tell(Broke(4, missing=(2,)))
    assert process.state.unreachable == ("n2",)
    after = proposal(process.poll(beat(1, BROKEN, one), beat(2, BROKEN, one)))
    assert after.ids == (0, 1)


# --------------------------------------------------------------------------------- attempts


def formed(state: State, after: View) -> Process:
    process = Process(state)
    process.tell(Broke(4))
    process.record = to_bytes(after)
    assert process.poll() == [Form(after, "change")]
    return process


def test_a_view_is_opened_and_then_entered() -> None:
    after = attempt(0, 1)
    process = formed(training(0, view(0, 1)), after)
    (swap,) = process.tell(Formed(5, 200))
    assert swap == Swap(to_bytes(after), to_bytes(opened(after, 200)))
    assert process.tell(Swapped(swap.old, swap.new, None)) == []
    process.record = swap.new
    assert process.poll()[0] == Enter(opened(after, 200))
    assert process.state.stage == TRAINING and process.state.epoch == 5


def test_an_attempt_is_abandoned_for_the_next() -> None:
    after = attempt(0, 1)
    process = formed(training(0, view(0, 1)), after)
    process.tell(Formed(5, 200))
    following = replace(after, number=6)
    process.record = to_bytes(following)
    assert process.poll()[0] == Abandon(5)
    assert process.tell(Failed(5)) == [Form(following, "change")]


def test_who_has_formed_enters_a_view_that_is_already_followed() -> None:
    after = attempt(0, 1)
    process = formed(training(0, view(0, 1)), after)
    process.tell(Formed(5, 200))
    following = replace(attempt(0, 1), number=6, base=5)
    process.record = to_bytes(following)
    assert process.poll()[:2] == [Enter(opened(after, 200)), Break(5)]


def test_who_missed_the_opening_is_a_member_that_has_stopped() -> None:
    after = attempt(0, 1)
    process = formed(training(0, view(0, 1)), after)
    process.tell(Failed(5, missing=(1,)))
    process.record = to_bytes(opened(after, 200))
    process.poll(beat(1, TRAINING, opened(after, 200)))
    assert process.state.stage == BROKEN and process.state.epoch == 5
    other = Process(training(1, opened(after, 200)))
    assert Break(5) in other.poll(beat_of(process.state, 1))


def test_who_is_left_out_is_fenced_when_the_view_is_open() -> None:
    process = Process(training(1, view(0, 1)))
    process.record = to_bytes(attempt(0))
    assert process.poll() == [Break(4)]
    process.record = to_bytes(opened(attempt(0), 200))
    assert process.poll()[-1] == Fence("view 5 of replicas [0] was opened without this process")


# --------------------------------------------------------------------------------- the registry


def test_a_registry_that_forgets_is_told_again() -> None:
    one = view(0, 1)
    process = Process(training(1, one, is_durable=False))
    process.record = b""
    assert process.poll(beat(0, TRAINING, one)) == [Swap(b"", to_bytes(one))]


def test_a_durable_registry_that_knows_less_is_not_believed() -> None:
    process = Process(training(1, view(0, 1)))
    process.record = to_bytes(view(0, number=3))
    assert reasons(process.poll()) == [
        "until the registry has its record again: it knew view 4, and now it knows less"
    ]


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="min_replicas must be at least 1, got 0"):
        Settings("run", min_replicas=0)


# --------------------------------------------------------------------------------- sets


@pytest.mark.parametrize(
    ("cuts", "largest"),
    [
        ({}, [0, 1, 2, 3]),
        ({0: (1,)}, [0, 2, 3]),
        ({1: (0,), 2: (0,)}, [1, 2, 3]),
        ({0: (2, 3), 1: (2, 3)}, [0, 1]),
        ({0: (1, 2, 3), 1: (2, 3), 2: (3,)}, [0]),
    ],
)
def test_the_largest_group_reaches_each_other(
    cuts: dict[int, tuple[int, ...]], largest: list[int]
) -> None:
    beats = [
        beat(id, BROKEN, unreachable=tuple(f"n{other}" for other in cuts.get(id, ())))
        for id in range(4)
    ]
    assert [one.member.id for one in largest_group(beats)] == largest


def test_two_halves_of_many_are_parted_in_no_time() -> None:
    halves = [tuple(f"n{other}" for other in range(32, 64)) if id < 32 else () for id in range(64)]
    beats = [beat(id, BROKEN, unreachable=cuts) for id, cuts in enumerate(halves)]
    assert [one.member.id for one in largest_group(beats)] == list(range(32))
