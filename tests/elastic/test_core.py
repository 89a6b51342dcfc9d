"""Single decisions of the core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_comm.elastic.beats import BROKEN, FINISHED, READY, STOPPED, TRAINING, Beat
from diloco_comm.elastic.core import Settings, State, beat_of, start, step
from diloco_comm.elastic.core.events import (
    Abandon,
    Action,
    Boundary,
    Break,
    Broke,
    Drained,
    Enter,
    Failed,
    Fence,
    Finished,
    Form,
    Formed,
    Leave,
    Pend,
    Polled,
    Refuse,
    Started,
    Suspect,
    Swap,
    Swapped,
    Wait,
)
from diloco_comm.elastic.core.reach import is_majority, largest_group
from diloco_comm.elastic.views import (
    FORMING,
    NO_VIEW,
    OPEN,
    Member,
    View,
    from_bytes,
    opened,
    to_bytes,
    with_evicted,
)

SUSPECT_AFTER = 2


def member(id: int, nonce: str = "", settings: str = "same") -> Member:
    return Member(id, nonce or f"n{id}", f"host{id}:1", 1, settings)


def view(*ids: int, number: int = 4, inner_step: int = 100) -> View:
    """Return an open view."""
    members = tuple(member(id) for id in ids)
    return View("run", number, "", OPEN, members, NO_VIEW, (), inner_step, "n0")


def training(id: int, of: View, **options: Any) -> State:
    """Return a process that trains in a view."""
    settings = Settings("run", suspect_after=SUSPECT_AFTER, **options)
    forming = replace(of, phase=FORMING)
    return replace(
        start(settings, member(id)),
        stage=TRAINING,
        epoch=of.number,
        view=to_bytes(of),
        record=to_bytes(of),
        attempt=forming,
        has_state=True,
        highest=of.number,
    )


def beat(id: int, stage: str, of: View | None = None, **values: Any) -> Beat:
    number = NO_VIEW if of is None else of.number
    who = values.pop("member", member(id))
    has_state = stage != READY
    return Beat(who, 0, stage, number, number, has_state=has_state, **values)


class Process:
    """A process that polls a registry whose beats the test writes."""

    def __init__(self, state: State, record: bytes = b"") -> None:
        self.state = state
        self.record = record or state.record
        self._counter = 0

    def tell(self, event: Any) -> list[Action]:
        self.state, actions = step(self.state, event)
        return list(actions)

    def poll(self, *beats: Beat, silent: tuple[Beat, ...] = (), is_late: bool = False) -> list[Any]:
        """Poll twice, so that ``beats`` are heard, and return all actions."""
        actions: list[Action] = []
        for _ in range(2):
            self._counter += 1
            heard = [replace(one, counter=self._counter) for one in beats]
            own = beat_of(self.state, self._counter)
            polled = Polled(self.record, (own, *heard, *silent), is_late)
            actions += self.tell(polled)
            if any(isinstance(one, (Swap, Form)) for one in actions):
                break
        return actions

    def polls(self, number: int, *beats: Beat, **options: Any) -> list[Any]:
        return [one for _ in range(number) for one in self.poll(*beats, **options)]


def proposal(actions: list[Any]) -> View:
    """Return the one view that is proposed."""
    (swap,) = [one for one in actions if isinstance(one, Swap)]
    return from_bytes(swap.new, "run")


def reasons(actions: list[Any]) -> list[str]:
    return [one.reason for one in actions if isinstance(one, Wait)]


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


def attempt(*ids: int) -> View:
    base = view(0, 1)
    members = tuple(member(id) for id in ids)
    return View("run", 5, "", FORMING, members, 4, base.keys, 100, "n0")


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


# --------------------------------------------------------------------------------- planned


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
    if reason:
        assert reasons(actions)[-1].startswith(reason)
        assert not [a for a in actions if isinstance(a, Swap)]
    else:
        after = proposal(actions)
        assert after.ids == (id, 5) and after.base == 4 and after.left == (0, 1)
        assert after.source == (id if values else 2)


def test_a_process_with_other_settings_is_refused() -> None:
    record = to_bytes(view(0, 1))
    process = Process(start(Settings("run"), member(2, settings="other")), record)
    (refuse,) = process.poll()
    assert isinstance(refuse, Refuse)
    assert "replica 2 has 1 workers and settings other" in refuse.reason


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


def test_a_majority_is_more_than_half_or_half_with_the_lowest() -> None:
    assert is_majority([0, 1, 7], [0, 1, 2, 3]) and not is_majority([2, 3, 7], [0, 1, 2, 3])
    assert is_majority([2, 3], [0, 2, 3]) and not is_majority([], [0])
