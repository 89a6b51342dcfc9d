"""The state of runs: who is slow, silent, cut off or awaited, from successive snapshots."""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.simulated_host import BEGAN, SimulatedHost, key_of, record_of
from diloco_comm.group.beats import CHANGING, PULLING, TRAINING, Beat, eviction_of, name_of
from diloco_comm.group.records import Key
from diloco_comm.group.state import Place
from diloco_comm.monitor import openmetrics
from diloco_comm.monitor.figures import Figures
from diloco_comm.monitor.report import status
from diloco_comm.monitor.status import (
    COUNTERS,
    MAX_EVENTS,
    MAX_POINTS,
    MAX_PROCESSES,
    Snapshot,
    State,
    advance,
)


class World:
    """Three replicas of an elastic run that train at 10 steps a second; the clock is the test's."""

    def __init__(self, numbers: tuple[int, ...] = (0, 1, 2), *, elastic: bool = True) -> None:
        self.now = BEGAN
        self.host = SimulatedHost(lambda: self.now)
        self.state = State(BEGAN, BEGAN)
        self.speeds = dict.fromkeys(numbers, 10.0)
        self.steps, self.idle = dict.fromkeys(numbers, 0.0), dict.fromkeys(numbers, 0.0)
        self.silent: set[int] = set()
        self.figures: dict[int, dict[str, Any]] = {}
        self.places: dict[int, dict[str, Any]] = {}
        self.elastic, self.stage = elastic, TRAINING
        if elastic:
            self.host.swap("r", record_of(1, list(numbers)))

    def go(self, seconds: float) -> dict[str, Any]:
        """Let seconds pass, with messages of all each five seconds, and return the status."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 5.0, end)
            for number in self.speeds.keys() - self.silent:
                self.say(number)
            self.state = advance(self.state, self.host.snapshot(), self.now)
        return self.report()

    def say(self, number: int) -> None:
        step = int(self.speeds[number] * (self.now - BEGAN))
        values = {"inner_step": step, "view": 1, "rounds": step // 100, "phase": "steps"}
        values |= self.figures.get(number, {})
        self.host.post("r", key_of(number), **values)
        if self.elastic:
            self.host.beat("r", key_of(number), self.stage, **self.places.get(number, {}))

    def report(self) -> dict[str, Any]:
        report = json.loads(json.dumps(status(self.state, "1"), allow_nan=False))
        (run,) = report["runs"]
        return run

    def row(self, number: int) -> dict[str, Any]:
        return next(row for row in self.report()["members"] if row["id"] == number)

    def events(self) -> list[str]:
        """The texts, the oldest first."""
        return [event["text"] for event in reversed(self.report()["events"])]


@pytest.mark.parametrize("elastic", [True, False])
def test_a_calm_run_has_no_alert(elastic: bool) -> None:
    world = World(elastic=elastic)
    run = world.go(60)
    assert run["alerts"] == []
    assert [row["id"] for row in run["members"]] == [0, 1, 2]
    assert all(row["speed"] == pytest.approx(10) for row in run["members"])
    assert world.events() == (["view 1: the run begins"] if elastic else [])
    assert (run["rounds"], run["rounds_over_time"][-1][1]) == (6, 6)
    assert (run["view"] is None) is not elastic


@pytest.mark.parametrize("elastic", [True, False])
def test_a_stopped_replica_is_silent_and_awaited(elastic: bool) -> None:
    world = World(elastic=elastic)
    world.go(30)
    world.silent = {2}
    world.figures = {one: {"waits_for": (2,), "waits_s": 7.0} for one in (0, 1)}
    run = world.go(20)
    assert world.row(2)["marks"] == ["awaited", "silent"]
    assert run["alerts"] == [
        "replica 2: silent for 20 s",
        "replica 2: the others wait for replica 2, since 7 s",
    ]
    assert world.row(0)["words"] == ["waits for 2, since 7 s"]
    assert set(world.events()[-2:]) == {"replica 2 is silent", "others wait for replica 2"}
    world.silent, world.figures = set(), {}
    assert world.go(5)["alerts"] == []
    assert set(world.events()[-2:]) == {
        "replica 2 is heard again", "nobody waits for replica 2 any more",
    }  # fmt: skip


def test_a_wait_is_over_where_a_newer_beat_says_so() -> None:
    world = World()
    world.go(10)
    world.figures[0] = {"waits_for": (1,), "waits_s": 7.0, "phase": "exchange"}
    world.go(5)
    assert world.row(0)["words"] == ["waits for 1, since 7 s"]
    world.silent = {0}
    world.host.beat("r", key_of(0), phase="steps")
    world.go(5)
    assert world.row(0)["words"] == ["waits for 1, since 12 s"]
    world.now += 1.0
    world.host.beat("r", key_of(0), phase="steps")
    world.state = advance(world.state, world.host.snapshot(), world.now)
    assert (world.row(0)["words"], world.row(1)["awaited_by"]) == ([], [])


def test_a_slow_replica_is_slow_without_the_waits_of_the_others() -> None:
    """All make the same number of steps in the long run: the fast ones wait."""
    world = World()
    world.speeds = dict.fromkeys(world.speeds, 5.0)
    for _ in range(12):
        waited = (world.now + 5 - BEGAN) / 2
        world.figures = {one: {"waited_s": waited} for one in (0, 1)}
        world.go(5)
    assert [world.row(one)["speed"] for one in range(3)] == pytest.approx([10, 10, 5])
    assert world.row(2)["words"] == ["slow: 5 inner steps per second, 50% of the median"]
    assert world.events()[-1] == "replica 2 is slow"
    # Two thirds of the median do not begin, and do not end, the condition.
    world.speeds[2] = 6.7
    world.speeds |= {0: 10.0, 1: 10.0}
    world.figures = {}
    world.go(80)
    assert world.row(2)["marks"] == ["slow"]
    assert world.row(2)["speed"] == pytest.approx(6.7, rel=0.02)
    world.speeds[2] = 9.0
    world.go(80)
    assert world.events()[-1] == "replica 2 is slow no more"


@pytest.mark.parametrize("step_s", [1.0, 7.0, 12.0])
def test_equal_replicas_are_never_slow(step_s: float) -> None:
    """Their steps and their posts fall on different moments."""
    world = World()
    world.speeds = {0: 1 / step_s, 1: 1.02 / step_s, 2: 0.98 / step_s}
    for second in range(150):
        world.silent = {one for one in range(3) if (second - 2 * one) % 5}
        world.go(1)
    assert not [text for text in world.events() if "slow" in text]


@pytest.mark.parametrize("seconds", [7, 20, 45])
def test_an_evaluation_is_no_slowness(seconds: int) -> None:
    """Replica 0 alone evaluates, twice; its steps stand still meanwhile."""
    world = World()
    world.speeds[0] = 0.0
    step = 0
    for second in range(200):
        evaluates = second % 90 >= 90 - seconds
        step += 0 if evaluates else 10
        world.figures[0] = {"inner_step": step, "phase": "evaluation" if evaluates else "steps"}
        world.silent = {one for one in range(3) if (second - one) % 5}
        world.go(1)
    assert not [text for text in world.events() if "slow" in text]


def test_a_replica_that_waits_for_long_is_not_slow() -> None:
    """Its group is fixed, and the other one lives, and takes longer for its steps."""
    world = World((0, 1, 2), elastic=False)
    world.speeds = {0: 10.0, 1: 10.0, 2: 2.0}
    world.go(30)
    step = world.row(0)["inner_step"]
    for second in range(5, 151, 5):
        waits = {"inner_step": step, "waits_for": (2,), "waits_s": float(second)}
        world.figures = {0: waits, 1: waits}
        world.go(5)
        assert "slow" not in world.row(0)["marks"] + world.row(1)["marks"]
    assert world.row(2)["marks"] == ["awaited", "slow"]
    world.figures = {one: {"inner_step": step + 50, "waited_s": 150.0} for one in (0, 1)}
    world.go(5)
    assert world.row(0)["speed"] == pytest.approx(10)


def test_the_median_is_one_of_replicas_that_are_heard() -> None:
    world = World((0, 1, 2))
    world.speeds = {0: 10.0, 1: 10.0, 2: 3.0}
    world.go(60)
    assert world.row(2)["marks"] == ["slow"]
    world.silent = {0}
    world.places = {1: {"is_leaving": True}}
    world.go(10)
    world.host.beat("r", key_of(1), "gone")
    world.silent = {0, 1}
    world.go(15)
    assert world.row(2)["marks"] == []


@pytest.mark.parametrize("elastic", [True, False])
def test_rounds_are_those_of_the_replica_with_the_most(elastic: bool) -> None:
    """Three replicas take part in the same rounds, and post at different moments."""
    world = World(elastic=elastic)
    for second in range(1, 101):
        world.silent = {one for one in range(3) if (second - one) % 5}
        world.go(1)
    assert world.report()["rounds"] == 10
    # Replica 2 starts again, with counters that begin anew, as another process or as the same one.
    for start, created in ((1, BEGAN + 100), (1, BEGAN + 150)):
        world.silent = {2}
        for second in range(50):
            again = {"created": created, "rounds": second // 10, "inner_step": 1000 + 10 * second}
            world.host.post("r", key_of(2, start), **again)
            world.go(1)
    assert world.report()["rounds"] == 20
    # And all of them start again.
    world.silent = {0, 1, 2}
    if elastic:
        members = tuple(key_of(one, 2) for one in range(3))
        world.host.swap("r", record_of(2, [0, 1, 2], members=members))
    for second in range(1, 101):
        for one in range(3):
            again = {"created": BEGAN + 200, "rounds": second // 10}
            world.host.post("r", key_of(one, 2), **again)
        world.go(1)
    assert world.report()["rounds"] == 30


def test_a_change_of_the_group_is_no_slowness() -> None:
    """A wait of 20 s, a change of 40 s, and a new view; each replica posts at another moment."""
    world = World()
    world.go(60)
    for second in range(1, 100):
        is_over, waited = second > 60, float(second if second <= 20 else second - 20)
        world.stage = CHANGING if 20 < second <= 60 else TRAINING
        for one in range(3):
            world.places[one] = {"entered": 1 + is_over}
            world.figures[one] = {
                "view": 1 + is_over,
                "inner_step": 600 + 10 * max(second - 60, 0),
                "changing_s": 40.0 * is_over,
                "waits_s": 0.0 if is_over else waited,
            }
            world.host.beat("r", key_of(one), world.stage, **world.places[one])
        if second == 61:
            world.host.swap("r", record_of(2, [0, 1, 2]))
        world.silent = {one for one in range(3) if (second - 2 * one) % 5}
        world.go(1)
        assert world.row(0)["speed"] == pytest.approx(10)
    assert not [text for text in world.events() if "slow" in text]


def test_a_wait_in_a_new_view_is_no_slowness() -> None:
    world = World()
    world.go(30)
    for seconds in range(1, 20, 5):
        waits = {"view": 2, "inner_step": 300, "waits_for": (2,), "waits_s": float(seconds)}
        world.figures = {0: waits, 1: waits}
        world.go(5)
        assert world.row(0)["marks"] == world.row(1)["marks"] == []
    assert world.row(0)["speed"] == pytest.approx(10)


def test_where_all_wait_for_each_other_none_is_to_blame() -> None:
    world = World()
    for one in range(3):
        others = tuple({0, 1, 2} - {one})
        world.figures[one] = {"waits_for": others, "waits_s": 30.0}
    world.go(10)
    assert all(world.row(one)["marks"] == [] for one in range(3))
    assert world.row(2)["words"] == ["waits for 0, 1, since 30 s"]


def test_a_replica_that_is_cut_off_names_the_others() -> None:
    world = World((0, 1, 2, 3))
    world.go(10)
    world.places[2] = {"cut": (key_of(1).nonce, key_of(3).nonce, b"x" * 16)}
    world.go(5)
    assert world.row(2)["words"] == ["cut off from 1, 3"]
    assert world.events()[-1] == "replica 2 is cut off from 1, 3"


def test_the_replica_that_more_others_miss_is_cut_off_and_no_healthy_one() -> None:
    """The healthy side says so first."""
    world = World()
    world.go(10)
    world.places = {one: {"cut": (key_of(1).nonce,)} for one in (0, 2)}
    assert world.go(5)["alerts"] == ["replica 1: cut off from 0, 2"]
    assert world.row(0)["words"] == ["cannot reach replica 1"]
    assert (world.row(0)["cut_from"], world.row(0)["cannot_reach"]) == ([], [1])
    world.places = {}
    assert world.go(5)["alerts"] == []
    assert world.events()[1:] == [
        "replica 1 is cut off from 0, 2", "replica 1 reaches all of the others again",
    ]  # fmt: skip


def test_the_end_of_a_cut_is_that_the_replica_is_left_out() -> None:
    world = World()
    world.go(10)
    world.places = {one: {"cut": (key_of(1).nonce,)} for one in (0, 2)}
    world.go(5)
    world.places = {}
    world.host.swap("r", record_of(2, [0, 2], left_out=(1,)))
    world.go(5)
    assert world.events()[1:] == [
        "replica 1 is cut off from 0, 2",
        "view 2: replica 1 is left out, cut off from 0, 2",
    ]


def test_a_view_tells_a_replica_that_left_from_one_that_was_killed() -> None:
    world = World((0, 1, 2, 3, 4))
    world.go(10)
    # Replica 1 is killed, 2 leaves, the program of 3 ends, and somebody asks 4 to leave.
    world.silent = {1}
    world.places = {2: {"is_leaving": True}}
    world.go(15)
    world.silent = {1, 2, 3, 4}
    world.host.beat("r", key_of(3), "gone")
    world.host.ask_to_leave("r", key_of(4))
    world.host.swap("r", record_of(2, [0], left_out=(1, 2, 3, 4)))
    world.go(5)
    cause = (
        "replica 1 is left out after 20 s of silence, replica 2 left by itself, "
        "replica 3 left by itself, replica 4 left when asked"
    )
    assert world.report()["view"]["cause"] == cause
    assert world.events()[1:] == [
        "replica 1 is silent", f"view 2: {cause}", "replica 3 has ended",
    ]  # fmt: skip
    # A replica that is lost stays an alarm.
    assert world.report()["alerts"] == ["replica 1: silent for 20 s", "replica 1: is no member"]
    world.host.swap("r", record_of(3, [0, 1], joined=(1,)))
    world.go(5)
    assert world.events()[4:] == ["view 3: replicas [1] join"]


def test_a_replica_that_was_asked_to_leave_is_told_without_its_eviction() -> None:
    """The registry has dropped the request by then, or the record alone names the replica."""
    for record_names_it in (True, False):
        world = World()
        world.host.ask_to_leave("r", key_of(1))
        world.go(10)
        world.host.forget("r", eviction_of(key_of(1)))
        if record_names_it:
            world.go(5)
        evicted = (1,) * record_names_it
        world.host.swap("r", record_of(2, [0, 2], left_out=(1,), evicted=evicted))
        world.go(5)
        assert world.events()[-1] == "view 2: replica 1 left when asked"


@pytest.mark.parametrize("end", ["killed", "gone", "finished"])
def test_a_replica_that_was_cut_off_and_has_ended_reaches_nobody_again(end: str) -> None:
    world = World()
    world.go(10)
    world.places = {one: {"cut": (key_of(1).nonce,)} for one in (0, 2)}
    world.go(5)
    world.silent = {1}
    if end == "gone":
        world.host.beat("r", key_of(1), "gone")
    elif end == "finished":
        world.host.swap("r", record_of(2, [0, 1, 2], is_finished=True))
    run = world.go(20)
    assert not [text for text in world.events() if "others again" in text]
    if end == "finished":
        assert run["alerts"] == []
        assert all(row["cut_from"] == row["cannot_reach"] == [] for row in run["members"])


@pytest.mark.parametrize("who", ["pair", "three", "restart"])
def test_a_cut_has_no_end_where_nobody_is_heard(who: str) -> None:
    world = World((0, 1) if who == "pair" else (0, 1, 2))
    world.go(10)
    others = {"pair": (1,), "three": (1, 2), "restart": (0, 2)}[who]
    one = 1 if who == "restart" else 0
    world.places = {one: {"cut": tuple(key_of(number).nonce for number in others)}}
    world.go(5)
    world.silent = {1} if who == "restart" else set(others)
    for _ in range(5):
        if who == "restart":
            world.host.post("r", key_of(1, 1), created=world.now)
            world.host.beat("r", key_of(1, 1), PULLING, entered=0)
        world.go(5)
    assert not [text for text in world.events() if "others again" in text]


def test_a_newcomer_hides_no_alarm_of_the_member_whose_number_it_has() -> None:
    world = World()
    world.go(10)
    world.silent = {2}
    for second in range(0, 30, 5):
        world.host.post("r", key_of(2, 1), created=BEGAN + 10)
        world.host.beat("r", key_of(2, 1), PULLING, entered=0)
        world.figures = {one: {"waits_for": (2,), "waits_s": second + 5.0} for one in (0, 1)}
        run = world.go(5)
    assert "replica 2: silent for 30 s" in run["alerts"]
    assert [row["marks"] for row in run["members"][2:]] == [["awaited", "silent"], []]
    assert {"replica 2 is silent", "others wait for replica 2"} <= set(world.events())


def test_processes_that_are_no_members_are_no_measure() -> None:
    world = World()
    for second in range(0, 60, 5):
        for number in range(50, 54):
            world.host.post("r", Key(number, bytes(16)), inner_step=100 * second, rounds=10**6)
        run = world.go(5)
    assert run["alerts"] == []
    assert run["rounds"] < 100


def test_a_pause_of_some_seconds_is_no_slowness() -> None:
    world = World()
    world.speeds[0] = 0.0
    for second in range(1, 300):
        step = sum(10 for one in range(second) if not 50 <= one % 100 < 60)
        world.figures[0] = {"inner_step": step}
        world.silent = {one for one in range(3) if (second - one) % 5}
        world.go(1)
    assert not [text for text in world.events() if "slow" in text]


def test_the_end_of_a_measure_is_no_end_of_slowness() -> None:
    world = World()
    world.speeds = {0: 10.0, 1: 10.0, 2: 3.0}
    world.go(60)
    world.silent = {0, 1}
    world.go(20)
    assert not [text for text in world.events() if "no more" in text]


def test_a_member_that_beats_and_is_left_out_was_not_silent() -> None:
    world = World()
    world.go(30)
    world.host.swap("r", record_of(2, [0, 2], left_out=(1,)))
    world.go(5)
    assert world.events()[-1] == "view 2: replica 1 is left out, though its beats come"


def test_a_replica_that_was_cut_off_and_asked_to_leave_has_left() -> None:
    world = World()
    world.go(10)
    world.places = {one: {"cut": (key_of(1).nonce,)} for one in (0, 2)}
    world.go(5)
    world.host.swap("r", record_of(2, [0, 2], left_out=(1,), evicted=(1,)))
    world.silent = {1}
    run = world.go(30)
    assert "view 2: replica 1 left when asked" in world.events()
    assert run["alerts"] == []


def test_a_silence_goes_on_where_the_host_has_dropped_the_messages() -> None:
    world = World()
    world.now += 36000.0
    world.go(10)
    world.silent = {0, 1, 2}
    world.go(100)
    world.host.drop("r")
    world.host.swap("r", record_of(1, [0, 1, 2]))
    world.go(5)
    assert [row["silent_s"] for row in world.report()["members"]] == [105.0] * 3


def test_a_newcomer_that_reaches_no_member_is_the_one_that_is_cut_off() -> None:
    world = World()
    world.go(10)
    nonces = tuple(key_of(one).nonce for one in range(3))
    for cuts in ({}, {0: {"cut": (key_of(7).nonce,)}}):
        world.places = cuts
        world.host.post("r", key_of(7))
        world.host.beat("r", key_of(7), PULLING, entered=0, cut=nonces)
        run = world.go(5)
        assert world.row(7)["cut_from"] == [0, 1, 2]
        assert [row["cut_from"] + row["cannot_reach"] for row in run["members"][:3]] == [[]] * 3


@pytest.mark.parametrize("beats", [True, False])
def test_a_stranger_with_the_nonce_of_a_member_hides_nothing(beats: bool) -> None:
    world = World()
    world.go(10)
    stranger = Key(99, key_of(1).nonce)
    world.places = {one: {"cut": (key_of(1).nonce,)} for one in (0, 2)}
    for _ in range(2):
        world.host.post("r", stranger)
        if beats:
            world.host.beat("r", stranger, PULLING, entered=0)
        world.go(5)
    assert world.row(1)["words"] == ["cut off from 0, 2"]


def test_a_beat_names_no_more_than_a_process_would() -> None:
    beat = Beat(Place(key_of(0), b"s" * 16, cut=(b"x" * 16,) * 24), 1)
    text = beat.to_bytes()
    longer = text.replace(b'"cut": [', b'"cut": [' + f'"{"0" * 32}", '.encode() * 400)
    read = Beat.from_bytes(longer)
    assert read is not None and len(read.place.cut) == 24
    assert Beat.from_bytes(text) == beat


def test_of_two_replicas_none_is_the_one_that_is_cut_off() -> None:
    world = World((0, 1))
    world.go(10)
    world.places = {0: {"cut": (key_of(1).nonce,)}}
    both = "cut off: 0, 1 cannot reach each other"
    assert world.go(5)["alerts"] == [f"replica 0: {both}", f"replica 1: {both}"]
    # A process that says nothing may have ended.
    world.silent = {1}
    assert world.go(15)["alerts"] == ["replica 1: silent for 15 s"]


def test_two_sites_that_are_split_reach_the_replicas_of_their_own_site() -> None:
    world = World((0, 1, 2, 3))
    world.go(10)
    world.places = {one: {"cut": (key_of(2).nonce, key_of(3).nonce)} for one in (0, 1)}
    assert world.go(5)["alerts"] == [
        *[f"replica {one}: cut off from 2, 3" for one in (0, 1)],
        *[f"replica {one}: cut off from 0, 1" for one in (2, 3)],
    ]


def test_replicas_that_wait_for_each_other_in_one_exchange_are_cut_off() -> None:
    """Replica 1 is cut from 0 and 2, and each replica posts at a moment of its own."""
    world = World()
    world.go(30)
    missed = {0: (1,), 1: (0, 2), 2: (1,)}
    for second in range(1, 17):
        exchange = {"phase": "exchange", "inner_step": 300, "rounds": 3, "waits_s": float(second)}
        world.figures = {
            one: {**exchange, "waits_for": missed[one] * (second >= 2)} for one in missed
        }
        world.silent = {one for one in range(3) if (second - one) % 5}
        world.go(1)
        assert not world.row(0)["marks"] and not world.row(2)["marks"]
    assert world.row(1)["marks"] == ["cut off"]
    # A wait that begins anew, as the round has failed, names nobody at first.
    world.silent = set()
    world.figures = {one: {**exchange, "waits_s": 1.0} for one in missed}
    assert world.go(1)["alerts"] == ["replica 1: cut off from 0, 2"]
    world.figures = {}
    world.go(5)
    assert [text for text in world.events() if "view" not in text] == [
        "replica 1 is cut off from 0", "replica 1 reaches all of the others again",
    ]  # fmt: skip


def test_a_replica_that_comes_back_is_a_newcomer_beside_the_member() -> None:
    world = World()
    world.go(10)
    world.silent = {2}
    again = key_of(2, start=1)
    world.go(20)
    world.host.post("r", again, created=BEGAN + 25)
    world.host.beat("r", again, PULLING, entered=0)
    run = world.go(1)
    rows = [(row["id"], row["is_member"], row["stage"]) for row in run["members"]]
    assert rows[2:] == [(2, True, "training"), (2, False, "pulling")]
    assert run["members"][3]["words"] == ["is no member"]
    assert "replica 2 has started again" in world.events()
    record = record_of(2, [0, 1, 2], joined=(2,))
    world.host.swap("r", record_of(2, [0, 1], left_out=(2,)))
    world.go(1)
    assert world.events()[-1] == "view 2: replica 2 is left out after 22 s of silence"
    members = (*record.members[:2], again)
    world.host.swap("r", record_of(3, [0, 1], joined=(2,), members=members))
    run = world.go(1)
    assert world.events()[-1] == "view 3: replicas [2] join"
    assert run["view"]["members"] == [0, 1, 2]
    assert world.state.runs["r"].changes == 2


def test_events_and_points_have_bounds() -> None:
    world = World((0, 1))
    for _ in range(MAX_EVENTS):
        world.silent = {1}
        world.go(20)
        world.silent = set()
        world.go(5)
    run = world.state.runs["r"]
    assert len(run.events) == MAX_EVENTS
    world.go(2000)
    run = world.state.runs["r"]
    assert MAX_POINTS / 2 <= len(run.points) <= MAX_POINTS
    assert run.points[0][0] <= BEGAN + 5 and run.step_s > 5


def test_a_replica_that_goes_is_an_event() -> None:
    """The post of one that ends is taken back, and the post of one that was killed is dropped."""
    world = World(elastic=False)
    world.go(10)
    world.host.posts.pop(("r", name_of(key_of(1))))
    world.silent = {1}
    world.go(5)
    assert world.events() == ["replica 1 is there no more"]
    world = World()
    world.go(10)
    world.host.beat("r", key_of(1), "gone")
    world.silent = {1}
    world.go(5)
    assert world.events()[1:] == ["replica 1 has ended"]


def test_a_run_whose_last_post_is_taken_back_has_ended_for_a_minute() -> None:
    world = World((0, 1), elastic=False)
    world.figures = {0: {"waits_for": (1,), "waits_s": 9.0}}
    world.go(30)
    world.host.posts.clear()
    world.silent = {0, 1}
    run = world.go(20)
    assert run["has_ended"] and run["alerts"] == []
    assert world.events() == ["the run has ended"]
    assert [row["stage"] for row in run["members"]] == ["ended", "ended"]
    assert (run["rounds"], run["members"][1]["figures"]["rounds"]) == (3, 3)
    world.silent = {1}
    assert not world.go(5)["has_ended"]
    world.host.posts.clear()
    world.silent = {0, 1}
    assert world.go(55)["has_ended"]
    world.now += 10
    assert advance(world.state, world.host.snapshot(), world.now).runs == {}


@pytest.mark.parametrize("elastic", [True, False])
def test_a_run_that_was_killed_has_not_ended(elastic: bool) -> None:
    world = World(elastic=elastic)
    world.go(10)
    world.silent = {0, 1, 2}
    world.go(0 if elastic else 15)
    world.host.drop("r")
    assert world.go(5)["has_ended"]
    assert world.events()[-1] == "nothing is heard of the run any more"
    if elastic:
        world.silent = set()
        world.host.swap("r", record_of(2, [0, 1, 2], is_finished=True))
        world.go(5)
        world.silent = {0, 1, 2}
        world.host.drop("r")
        world.go(5)
        assert world.events()[-1] == "the run has ended"


def test_a_run_that_has_ended_makes_room_for_others() -> None:
    world = World((0, 1), elastic=False)
    world.go(10)
    world.host.posts.clear()
    for number in range(MAX_PROCESSES - 1):
        world.host.post("new", key_of(number))
    assert advance(world.state, world.host.snapshot(), world.now).runs.keys() == {"new"}


@pytest.mark.parametrize(
    "values", [{"rounds": 3 * 10**15}, {"sent_bytes": (1 << 62) - 1}, {"waited_s": 1e12}]
)
def test_a_post_that_claims_more_than_its_age_allows_is_left_out(values: dict[str, Any]) -> None:
    world = World()
    for created in (0.0, BEGAN, BEGAN * 2):
        world.figures[0] = {**values, "created": created}
        world.go(5)
        assert world.row(0)["figures"] is None
    # The other replicas have one round.
    assert world.report()["rounds"] == 1
    world.figures[0] = {"rounds": 10**6, "sent_bytes": 1 << 52, "created": BEGAN - 86400.0}
    world.go(5)
    assert world.row(0)["figures"]["sent_bytes"] == 1 << 52


def test_no_training_is_so_fast_that_honest_replicas_are_slow() -> None:
    world = World()
    for step in (1 << 40, 1 << 50, 1 << 60):
        world.figures = {one: {"inner_step": step} for one in (1, 2)}
        world.go(15)
    assert [row["speed"] for row in world.report()["members"]] == [10.0, None, None]
    assert world.report()["alerts"] == []


def test_a_silent_replica_has_no_speed() -> None:
    world = World()
    world.go(30)
    world.silent = {1}
    world.go(15)
    assert [row["speed"] for row in world.report()["members"]] == [10.0, None, 10.0]
    metrics = openmetrics.render(world.state, "1")
    speed = 'diloco_inner_steps_per_second{run="r",replica="%d"} '
    assert speed % 0 in metrics and speed % 1 not in metrics


def test_a_run_that_begins_again_has_counters_of_its_own() -> None:
    world = World()
    world.go(10)
    world.host.swap("r", record_of(3, [0, 1, 2]))
    world.go(5)
    changes = re.compile(r'(diloco_view_changes_\w+){run="r"} ([0-9.e+]+)')
    first = dict(changes.findall(openmetrics.render(world.state, "1")))
    world.host.drop("r")
    world.silent = {0, 1, 2}
    for _ in range(15):
        world.now += 5
        world.state = advance(world.state, world.host.snapshot(), world.now)
    assert world.state.runs == {}
    world.silent = set()
    world.host.swap("r", record_of(1, [0, 1, 2]))
    world.go(10)
    again = dict(changes.findall(openmetrics.render(world.state, "1")))
    assert float(first["diloco_view_changes_total"]) > float(again["diloco_view_changes_total"])
    created = "diloco_view_changes_created"
    assert float(first[created]) < float(again[created])


def test_names_and_phases_that_turn_the_text_around_are_shown_as_escapes() -> None:
    host = SimulatedHost()
    names = [
        "run\u202eB",
        "run\\u202eB",
        "two\u2028lines",
        "läuft-1",
        "a\u3164",
        "a\u115f",
        "a\ufe0f",
    ]
    for name in names:
        host.swap(name, record_of(1, [0]))
        host.post(name, key_of(0))
        host.beat(name, key_of(0), phase="steps\u2066\n")
    report = status(advance(State(BEGAN, BEGAN), host.snapshot(), BEGAN), "1")
    shown = {run["run"]: run["members"][0] for run in report["runs"]}
    assert shown.keys() == {
        r"run\u202eB", r"run\\u202eB", r"two\u2028lines", "läuft-1",
        r"a\u3164", r"a\u115f", r"a\ufe0f",
    }  # fmt: skip
    assert all(row["is_member"] and row["figures"] for row in shown.values())
    assert {row["phase"] for row in shown.values()} == {r"steps\u2066\n"}


def test_a_member_that_was_never_heard_is_silent_since_the_host_began() -> None:
    world = World()
    world.silent = {2}
    assert world.go(10)["alerts"] == []
    assert world.go(10)["alerts"] == ["replica 2: silent for 20 s"]
    assert world.row(2)["silent_s"] == 20


def test_an_end_is_no_silence() -> None:
    world = World()
    world.go(10)
    world.host.swap("r", record_of(2, [0, 1, 2], is_finished=True))
    world.silent = {0, 1, 2}
    assert world.go(300)["alerts"] == []
    assert world.events()[-1] == "all steps of the run are taken"


def test_an_unreadable_record_leaves_the_last_view() -> None:
    world = World()
    world.go(5)
    snapshot = world.host.snapshot()._replace(records={"r": b"DCgr\x09\x00 of another version"})
    state = advance(world.state, snapshot, world.now + 1)
    assert state.runs["r"].seen.view == record_of(1, [0, 1, 2])


# ----------------------------------------------------------------------------- hostile texts

NUMBERS = st.integers(0, 3)
ODD = st.sampled_from([0, 1, 7, 1 << 30, (1 << 62) - 1])


@st.composite
def figures(draw: st.DrawFn) -> bytes:
    values = {name: draw(ODD) for name in (*COUNTERS, "inner_step", "view", "retransmits")}
    waits = tuple(draw(st.lists(NUMBERS, max_size=8)))
    one = Figures(
        draw(NUMBERS), waits_for=waits, waits_s=float(draw(ODD)), created=float(draw(NUMBERS)),
        phase=draw(st.sampled_from(["", "steps", "<b>"])), norm=math.nan,
        **values,
    )  # fmt: skip
    return one.to_bytes()


@functools.lru_cache(256)
def _beat(number: int, step: int, cut: tuple[int, ...], stage: str) -> bytes:
    host = SimulatedHost()
    nonces = tuple(key_of(one).nonce for one in cut)
    host.beat("r", key_of(number), stage, "\ud800<i>" * 9, inner_step=step, cut=nonces)
    return host.beats()[0][2]


beats = st.builds(
    _beat,
    NUMBERS,
    ODD,
    st.lists(NUMBERS, max_size=3).map(tuple),
    st.sampled_from(["gone", "training"]),
)
members = st.builds(lambda key: f"{key.number}.{key.nonce.hex()}", st.builds(key_of, NUMBERS))
names = members | st.text(max_size=8) | members.map("evict.".__add__)
runs = st.sampled_from(["a", 'b"\\\n', "\u2028<script>"])
ages = st.sampled_from([0.0, 1.0, 13.0, 700.0, -1.0])
records = st.builds(
    lambda number, members: record_of(number, sorted(members)).to_bytes(),
    st.integers(1, 5),
    st.sets(NUMBERS, min_size=1),
)
snapshots = st.builds(
    Snapshot,
    st.lists(st.tuples(runs, names, figures() | st.binary(max_size=40), ages), max_size=8),
    st.lists(st.tuples(runs, names, beats | st.binary(max_size=40), ages), max_size=8),
    st.dictionaries(runs, records | st.binary(max_size=40), max_size=3),
    st.just({}),
    st.none(),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(snapshots, min_size=1, max_size=4))
def test_any_texts_give_a_state_that_json_can_hold(found: list[Snapshot]) -> None:
    state = State(BEGAN, BEGAN)
    for second, snapshot in enumerate(found):
        before, state = state, advance(state, snapshot, BEGAN + 5 * second)
        assert state == advance(before, snapshot, BEGAN + 5 * second)
        report = json.loads(json.dumps(status(state, "1"), allow_nan=False))
        assert report["num_runs"] == len(state.runs) == len(report["runs"])
        for name, run in state.runs.items():
            assert len(run.events) <= MAX_EVENTS and run.rounds >= 0
            old = before.runs.get(name)
            for number, process in run.replicas.items():
                assert process.key.number == number
                former = old and old.replicas.get(number)
                if former and former.figures and process.figures and former.key == process.key:
                    _check_counters(former.figures, process.figures)


def _check_counters(before: Figures, after: Figures) -> None:
    """A counter falls only where the counters of the process have begun anew."""
    if before.created == after.created:
        assert all(getattr(before, name) <= getattr(after, name) for name in COUNTERS)


def test_a_newcomer_that_waits_blames_nobody_and_takes_no_members_place() -> None:
    world = World()
    world.go(30)
    waits = {"waits_for": (0, 1), "waits_s": 9.0}
    for _ in range(3):
        for number, start in ((3, 0), (1, 1)):
            world.host.post("r", key_of(number, start), **waits)
            world.host.beat("r", key_of(number, start), PULLING, entered=0)
        world.go(5)
    assert world.report()["alerts"] == []
    assert not [text for text in world.events() if "wait" in text or "again" in text]
    assert world.state.runs["r"].replicas[1].key == key_of(1)


def test_waits_of_a_moment_in_each_round_are_no_news() -> None:
    world = World()
    for _ in range(6):
        world.figures = {one: {"waits_for": (2,), "waits_s": 3.0} for one in (0, 1)}
        for _ in range(5):
            world.silent = {0, 1, 2}
            world.go(1)
        world.silent = set()
        world.go(5)
    assert not [text for text in world.events() if "wait" in text]


def test_a_replica_is_not_awaited_before_it_has_spoken_since() -> None:
    """Its own message may say that it waits, too."""
    world = World()
    world.go(30)
    world.figures = {1: {"waits_for": (0,), "waits_s": 5.0}}
    world.silent = {0, 2}
    world.go(4)
    assert world.row(0)["awaited_by"] == [1] and world.row(0)["marks"] == []
    world.silent, world.figures[0] = {2}, {"waits_s": 6.0}
    world.go(1)
    assert world.row(0)["marks"] == []
    world.figures = {1: {"waits_for": (0,), "waits_s": 11.0}}
    world.go(1)
    assert world.row(0)["marks"] == ["awaited"]


def test_a_replica_that_the_others_left_out_stays_until_the_host_drops_it() -> None:
    world = World()
    world.go(30)
    world.silent = {2}
    world.host.swap("r", record_of(2, [0, 1]))
    world.go(120)
    assert world.row(2)["words"] == ["silent for 120 s", "is no member"]
    assert world.state.runs["r"].replicas[2].silent_s == 120
