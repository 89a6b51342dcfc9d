"""Schedules of faults are read, made and replayed; the model and the figures are what they say."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.elastic import schedules
from benchmarks.elastic.checks import Life, lost_rounds
from benchmarks.elastic.ledger_replica import Applied, LedgerSettings
from benchmarks.elastic.schedules import Fault, make, parse, to_text
from benchmarks.elastic.storm_report import Figures, Waits, predict, results_of
from benchmarks.elastic.storms import Storm, main, make_parser, read_schedule, run
from benchmarks.support.namespaces import missing_tools
from diloco_comm_tools.demo.crew import (
    DONE,
    FAILED,
    KILLED,
    LEFT_BEHIND,
    Ended,
    Entered,
    Place,
)

QUICK = LedgerSettings(sync_every=4, step_s=0.05, suspect_after_s=3.0, num_elements=1000)


# ---------------------------------------------------------------------------------- schedules


def test_a_schedule_is_read() -> None:
    text = """
        {"time": 1, "fault": "kill", "replica": 2}
        {"time": 2.5, "fault": "return", "replica": 2}

        {"time": 3, "fault": "slow", "replica": 0, "seconds": 4, "mbps": 8}
        {"time": 3, "fault": "registry", "seconds": 2}
        {"time": 4, "fault": "kill", "replica": 0}
    """
    kill, back, slow, registry, last = parse(text, 3)
    assert (kill, back) == (Fault(1, "kill", 2), Fault(2.5, "return", 2))
    assert (slow.end, slow.mbps, registry.replica) == (7, 8, schedules.REGISTRY)
    assert last.replica == 0  # A replica can die in the middle of its fault.


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("kill 3", "line 1 of the schedule: expected a JSON object, got 'kill 3'"),
        ('{"time": 1, "fault": "burn", "replica": 0}', "fault must be one of kill, leave, return"),
        ('{"time": 1, "fault": "kill", "replica": 3}', "replica must be from 0 to 2, got 3"),
        ('{"time": 1, "fault": "kill"}', "replica must be from 0 to 2, got None"),
        ('{"time": -1, "fault": "kill", "replica": 0}', "must be a number at least 0, got -1"),
        ('{"fault": "kill", "replica": 0}', "time of a kill must be a number at least 0, got None"),
        ('{"time": 1, "fault": "stop", "replica": 0}', "seconds of a stop must be a number above"),
        ('{"time": 1, "fault": "kill", "replica": 0, "seconds": 2}', "a kill has no seconds"),
        ('{"time": 1, "fault": "slow", "replica": 0, "seconds": 2}', "mbps of a slow must be"),
        ('{"time": 1, "fault": "kill", "who": 0}', "expected the keys fault, mbps, replica"),
        ('{"time": 1, "fault": "registry", "replica": 0, "seconds": 1}', "has no replica, got 0"),
        (
            '{"time": 1, "fault": "return", "replica": 0}',
            "line 1 of the schedule: replica 0 has not gone at 1 s, got 'return'",
        ),
        (
            '{"time": 2, "fault": "kill", "replica": 0}\n'
            '{"time": 1, "fault": "kill", "replica": 1}',
            "line 2 of the schedule: time 1 is before 2, the last one",
        ),
        (
            '{"time": 1, "fault": "kill", "replica": 0}\n'
            '{"time": 2, "fault": "stop", "replica": 0, "seconds": 1}',
            "line 2 of the schedule: replica 0 has gone at 2 s, got 'stop'",
        ),
        (
            '{"time": 1, "fault": "stop", "replica": 0, "seconds": 5}\n'
            '{"time": 2, "fault": "hold", "replica": 0, "seconds": 1}',
            "line 2 of the schedule: replica 0 is in the stop of line 1 until 6",
        ),
    ],
)
def test_a_bad_schedule_is_one_sentence(lines: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(lines, 3)
    assert sentence in str(caught.value)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("{}")
    parser = make_parser()
    for words in ([str(file)], [str(tmp_path / "none.jsonl")]):
        with pytest.raises(SystemExit) as caught:
            read_schedule(parser, parser.parse_args(words))
        assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert "line 1 of the schedule: fault must be one of" in errors and "none.jsonl" in errors


def test_the_command_makes_a_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "half.jsonl"
    words = ["--make", "half", "--replicas", "4", "--seconds", "10"]
    monkeypatch.setattr(sys, "argv", ["storms", str(file), *words])
    assert main() == 0 and len(parse(file.read_text(), 4)) == 4
    monkeypatch.setattr(sys, "argv", ["storms", str(tmp_path / "none" / "half.jsonl"), *words])
    with pytest.raises(SystemExit):
        main()
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("num_replicas", [8, 32])
@pytest.mark.parametrize("name", schedules.NAMES)
def test_a_schedule_that_was_made_can_be_read(name: str, num_replicas: int) -> None:
    made = make(name, num_replicas, 120.0, 10.0, seed=3)
    found = parse(to_text(made), num_replicas)
    assert [(one.fault, one.replica) for one in found] == [(one.fault, one.replica) for one in made]
    assert [one.time for one in found] == pytest.approx([one.time for one in made], abs=0.01)
    assert make(name, num_replicas, 120.0, 10.0, seed=3) == made
    assert (make(name, num_replicas, 120.0, 10.0, seed=4) == made) == (name == "rolling")


def test_schedules_hold_what_their_names_say() -> None:
    outages = make("outages", 8, 360.0, 10.0, seed=0)
    kills = [one.time for one in outages if one.fault == "kill"]
    assert kills == [10.0 * i for i in range(1, 37)] and len(outages) == 2 * len(kills)
    pauses = [one for one in make("pauses", 8, 360.0, 10.0, seed=0) if one.seconds]
    assert {one.fault for one in pauses} == {"stop", "hold", "evaluation"} and len(pauses) == 3
    assert all(5 <= one.seconds <= 60 for one in pauses)
    half = make("half", 8, 40.0, 10.0, seed=0)
    assert [one.fault for one in half] == ["kill"] * 4 + ["return"] * 4
    rolling = [one.replica for one in make("rolling", 8, 90.0, 10.0, seed=0) if not one.seconds]
    assert sorted(rolling) == sorted([*range(8), *range(8)])
    assert len({one.replica for one in make("flapping", 8, 90.0, 10.0, seed=0)}) == 1


# -------------------------------------------------------------------------------------- model

# A round of 2 s; a death is seen within half a round, so that no exchange fails.
WAITS = Waits(2.0, 8.0, 120.0, notice_s=0.5, report_s=3.0, change_s=0.25, start_s=1.0)


@pytest.mark.parametrize(
    ("schedule", "lost_s"),
    [
        ([], 0.0),
        # Three wait for a change; four later, for the newcomer, which took 1 + 1 s before.
        # The steps of half a round are lost with the dead one: 1 s.
        ([Fault(10, "kill", 3), Fault(20, "return", 3)], 1 + 3 * 0.25 + 2 + 4 * 0.25),
        ([Fault(10, "leave", 3)], 3 * 0.25),
        # A stopped replica is waited for: after the half of a round that the others train on.
        ([Fault(10, "stop", 0, 5.0)], 3 * 4.0),
        # It is given up, and the failed exchange costs its report; then it starts again.
        ([Fault(10, "stop", 0, 12.0)], 3 * (8 + 3 - 1 + 0.25) + 2 + 4 * 0.25),
        ([Fault(10, "hold", 0, 12.0)], 3 * 11.0),
        ([Fault(10, "evaluation", 0, 12.0)], 3 * 11.0),
        # TCP sends at 11, 11.2, 11.6, 12.4 and 14 s.
        ([Fault(10, "cut", 0, 3.0)], 3 * 2.0 + 4 * 1.0),
        # 16 Mbit at 8 Mbit/s: as long as the round.
        ([Fault(10, "slow", 0, 6.0, mbps=8.0)], 4 * 3.0),
        # The change waits for the registry.
        ([Fault(9, "registry", seconds=4), Fault(10, "kill", 3)], 1 + 3 * 2.75),
    ],
)
def test_the_model_adds_up_the_waits(schedule: list[Fault], lost_s: float) -> None:
    found = predict(schedule, replace(WAITS, sent_bits=16e6))
    assert found.lost_s(4, 0.0, 60.0) == pytest.approx(lost_s, abs=0.3)


def test_the_model_waits_for_reports_of_a_dead_member() -> None:
    slow = replace(WAITS, notice_s=1.5)
    found = predict([Fault(10, "kill", 3)], slow)
    assert found.lost_s(4, 0.0, 60.0) == pytest.approx(1 + 3 * 3.25, abs=0.3)
    assert found.useful(4, 60.0) == pytest.approx(1 - 10.75 / (3 * 60 + 10), abs=0.01)


# ------------------------------------------------------------------------------------ figures


def lives_of(*, hashes: str = "same") -> dict[int, Life]:
    """Two replicas take a step a second; replica 1 is killed at 4 s and comes back at 6.5 s."""
    first = Life(0, 0, started=0.0, ended=10.0, how=DONE, outer_hash="end")
    killed = Life(1, 1, started=0.0, ended=4.0, how=KILLED)
    again = Life(1, 2, started=6.5, ended=10.0, how=DONE, outer_hash="end")
    views = [(1, (0, 1), 0.0), (2, (0,), 5.0), (3, (0, 1), 7.0)]
    rounds = [
        # At 2 s two steps of both; at 6 s three of replica 0 alone; at 9 s three and two.
        (2.0, 0, 1, {0: 1.0, 1: 1.0}),
        (6.0, 1, 2, {0: 4.0, 1: 1.0}),
        (9.0, 2, 3, {0: 5.5, 1: 1.0, 2: 1.0}),
    ]
    first.steps = [0.0, 1.0, 2.0, 5.0, 5.5, 6.0, 7.0, 8.0]
    killed.steps = [0.0, 1.0, 2.0, 3.0]
    again.steps = [7.0, 8.0]
    for life, seen in ((first, (1, 2, 3)), (killed, (1,)), (again, (3,))):
        life.entered = [Entered(at, n, who, (), (), 0.0, 0) for n, who, at in views if n in seen]
        life.applied = [
            Applied(at, number, view, 1 if view > 1 else 0, f"same{number}", tuple(own.items()))
            for at, number, view, own in rounds
            if view in seen
        ]
    again.applied = [replace(again.applied[0], num_discarded=0, outer_hash=f"{hashes}2")]
    return {life.process: life for life in (first, killed, again)}


def test_figures_of_a_life_by_hand() -> None:
    figures = Figures(lives_of(), step_s=1.0)
    assert figures.living_s(0.0, 9.0) == 9 + 4 + 2.5
    # The two steps of the killed one after the first round are lost.
    assert figures.kept_s(0.0, 9.0) == 8 + 2 + 2
    assert figures.kept_s(2.0, 4.0) == 1
    # From 2 to 4 s the next round lacks replica 1, which lives.
    assert figures.taking_part(0.0, 9.0) == (pytest.approx((2 + 1 + 2 + 3) / 9), 0.5)
    assert figures.way_back_s(4.0) == 2.0 and figures.way_back_s(6.5) == 2.5
    assert figures.way_back_s(9.0) is None
    assert figures.num_discarded() == 1


def test_a_view_with_a_dead_member_is_no_way_back() -> None:
    lives = lives_of()
    lives[0].entered[1] = replace(lives[0].entered[1], members=(0, 1))
    assert Figures(lives, step_s=1.0).way_back_s(4.0) == 5.0


def test_a_round_that_two_replicas_have_discarded_counts_once() -> None:
    lives = lives_of()
    for process in (0, 2):
        last = lives[process].applied[-1]
        lives[process].applied[-1] = replace(last, num_discarded=last.num_discarded + 1)
    assert Figures(lives, step_s=1.0).num_discarded() == 2


def test_a_pause_is_no_time_in_which_a_replica_could_train() -> None:
    lives = lives_of()
    lives[0].pauses = [(1.0, 3.0)]
    assert Figures(lives, step_s=1.0).living_s(0.0, 4.0) == 2 + 4


def test_lost_outer_steps_are_counted() -> None:
    assert lost_rounds(lives_of().values()) == []
    lives = lives_of(hashes="other")
    assert lost_rounds(lives.values()) == [2]
    lives[0].applied = lives[0].applied[2:]
    assert lost_rounds(lives.values()) == [1, 2]


def test_a_storm_that_never_began_has_figures() -> None:
    crew: Any = IdleCrew()
    storm = Storm(crew, None, None, [Fault(1.0, "kill", 0)], 2, QUICK)  # type: ignore[arg-type]
    storm.failures.append("hang")
    results = results_of(storm)
    assert (results["useful"], results["violations"]) == (0.0, ["hang"])
    assert results["longest_way_back_s"] is None


# --------------------------------------------------------------------------------------- runs


class IdleCrew:
    """A crew whose processes do nothing."""

    def __init__(self) -> None:
        self.replicas: dict[int, Any] = {}
        self.num_started = 0

    def start(self, number: int) -> Any:
        self.num_started += 1
        place = Place(number, self.num_started - 1, "")
        self.replicas[number] = SimpleNamespace(number=number, place=place, started=0.0)
        return self.replicas[number]

    def kill(self, number: int) -> None:
        pass


@pytest.mark.parametrize(
    ("how", "is_killed", "is_started", "is_wrong"),
    [
        (KILLED, True, False, False),
        (LEFT_BEHIND, True, False, False),  # The order came too late.
        (LEFT_BEHIND, False, True, False),
        (KILLED, False, True, True),
        (FAILED, False, True, True),
        (DONE, False, False, False),
    ],
)
def test_a_process_that_ends_is_started_again_like_by_a_launcher(
    how: str, is_killed: bool, is_started: bool, is_wrong: bool
) -> None:
    crew: Any = IdleCrew()
    storm = Storm(crew, None, None, [], 1, QUICK)  # type: ignore[arg-type]
    storm._start(0)
    (first,) = crew.replicas.values()
    if is_killed:
        storm._happen(Fault(0.0, "kill", 0))
    storm._take(first, Ended(1.0, how))
    assert (crew.replicas[0] is not first) == is_started
    assert bool(storm.failures) == is_wrong and storm.lives[0].how == how
    if is_killed:
        first.has_ended = True
        storm._happen(Fault(2.0, "return", 0))
        second = crew.replicas[0]
        storm._take(second, Ended(3.0, LEFT_BEHIND))
        assert second is not first and crew.replicas[0] is not second


def test_a_replica_that_starts_while_it_is_cut_off_could_take_no_steps() -> None:
    cut: list[tuple[int, bool]] = []
    network: Any = SimpleNamespace(cut=lambda *arguments: cut.append(arguments))
    crew: Any = IdleCrew()
    storm = Storm(crew, None, network, [], 1, QUICK)  # type: ignore[arg-type]
    storm._start(0)
    storm._happen(Fault(0.0, "cut", 0, 600.0))
    storm._take(crew.replicas[0], Ended(time.monotonic(), LEFT_BEHIND))
    now = time.monotonic()
    assert cut == [(0, True)] and not any(one.is_well(now) for one in storm.lives.values())
    assert storm.lives[1].is_well(now + 600.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_replica_is_killed_and_returns(tmp_path: Path) -> None:
    schedule = [Fault(1.0, "kill", 1), Fault(3.0, "return", 1)]
    results = results_of(run(schedule, 3, QUICK, tmp_path, tail_s=0.5))
    assert results["violations"] == [] and results["outer_steps_lost"] == 0
    assert results["processes"] == 4 and results["views"] >= 3
    assert 0 < results["useful"] <= 1 and 0 < results["predicted"] < 1
    assert [row["fault"] for row in results["log"]] == ["kill", "return"]
    assert results["longest_way_back_s"] is not None


@pytest.mark.nightly("two minutes; the first tier has a death and a return among three replicas")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_outages(tmp_path: Path) -> None:
    schedule = make("outages", 8, 60.0, 10.0, seed=2)
    results = results_of(run(schedule, 8, LedgerSettings(), tmp_path))
    assert results["violations"] == [] and results["outer_steps_lost"] == 0
    assert results["processes"] >= 14 and results["useful"] > 0.1


@pytest.mark.nightly("a minute; parsing and the model are tested above, cuts in tests/faults")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_kinds_of_faults_happen(tmp_path: Path) -> None:
    schedule = [
        Fault(1.0, "slow", 3, 2.0, mbps=8.0),
        Fault(2.0, "evaluation", 2, 1.0),
        Fault(4.0, "hold", 1, 1.0),
        Fault(6.0, "registry", seconds=1.0),
        Fault(9.0, "leave", 3),
        Fault(12.0, "return", 3),
        Fault(17.0, "stop", 2, 10.0),
    ]
    if not missing_tools("ip", "nft"):
        schedule.append(Fault(40.0, "cut", 1, 15.0))
    storm = run(schedule, 4, QUICK, tmp_path)
    results = results_of(storm)
    assert results["violations"] == [] and results["outer_steps_lost"] == 0
    # The stopped replica was left behind, and has come again.
    assert results["ends"][LEFT_BEHIND] >= 1
    assert {len(one.pauses) for one in storm.lives.values()} >= {1}
