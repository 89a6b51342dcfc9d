"""benchmarks/asynchronous/syncer: real processes for a second, and how its figures are made."""

from __future__ import annotations

import argparse
import time

import pytest

from benchmarks.asynchronous.syncer import commits, load, merge, processes, steps
from benchmarks.support import common
from diloco_comm.asynchronous.link import read_status

pytestmark = pytest.mark.usefixtures("forked_programs")


def options(**given: object) -> argparse.Namespace:
    known = {"seconds": None, "rounds": None, "elements": None, "step_ms": 5.0}
    return argparse.Namespace(**{**known, **given})


def test_latency_is_from_the_last_report_to_the_last_learner() -> None:
    figures = [
        {"pushes": [(0, 0, 1.0), (0, 1, 5.0)], "commits": [(0, 0, 0.0), (0, 1, 2.5), (0, 2, 5.5)]},
        # This learner skipped version 2.
        {"pushes": [(0, 0, 2.0), (0, 1, 5.0)], "commits": [(0, 1, 2.25), (0, 3, 9.0)]},
    ]
    assert commits.latencies(figures, "commits") == [0.5]


def test_each_turn_of_the_phases_is_compared_with_itself() -> None:
    """A machine that is twice as slow in the second turn does not change the ratio."""
    spans, rows, now = [], [], 0.0
    for slowness in (1.0, 2.0):
        for phase, seconds in zip(steps.PHASES, (1.0, 1.0, 1.05, 1.3, 1.0), strict=True):
            spans.append(steps.Span(phase, now - 0.5, now + 27 * slowness))
            for _ in range(20):
                now += slowness * seconds
                rows.append((now, slowness * seconds, 0.02 if phase == "one slow" else 0.0))
            now = spans[-1].end + 1.0
    found = steps.results_of(common.Report("test", quiet=True), spans, rows, 1.5)
    ratios = [found["phases"][phase]["p99_over_alone"] for phase in steps.PHASES]
    assert ratios == pytest.approx([1.0, 1.0, 1.05, 1.3, 1.0])
    assert [sentence.split(":")[0] for sentence in found["missed"]] == ["one stopped", "one slow"]


def test_a_step_that_blocks_beyond_its_phase_counts() -> None:
    spans, rows, now = [], [], 0.0
    for phase in steps.PHASES:
        spans.append(steps.Span(phase, now - 0.5, now + 100))
        last = [120.0] if phase == "one stopped" else [1.0] * 89
        for seconds in [1.0] * 10 + last:
            rows.append((now + seconds, seconds, 0.0))
            now += seconds
        now = max(now, spans[-1].end) + 1.0
    found = steps.results_of(common.Report("test", quiet=True), spans, rows, 1.0)
    assert [sentence.split(":")[0] for sentence in found["missed"]] == ["one stopped"] * 2
    assert found["phases"]["one stopped"]["p99_over_alone"] > 10
    with pytest.raises(ValueError, match="has begun no step while it trained alone"):
        steps.results_of(common.Report("test", quiet=True), spans, rows[:60], 1.0)


def test_a_merge_and_its_floor() -> None:
    report = common.Report("test", quiet=True)
    found = merge.measure(report, options(elements=600_000, rounds=1))
    assert set(found["shares"]) == set(found["times_s"]) >= {"floor", "mean: merge", "rda: merge"}
    assert found["shares"]["floor"] == 1.0 and found["shares"]["rda: merge"] > 0


@pytest.mark.nightly("4 s; the first tier has such learners of the library")
def test_learners_of_the_benchmark_train_leave_and_come_back() -> None:
    settings = {"fragments": 2, "sync_every": 4, "quorum": 2, "receipt": "carry"}
    with processes.running(2, settings, elements=4096, step_s=0.005) as (server, learners):
        for _ in range(2):
            for learner in learners:
                learner.tell("join")
            before = read_status(server.address, timeout=60.0)["commits"]
            end = time.monotonic() + 60.0
            while read_status(server.address, timeout=60.0)["commits"] < before + 4:
                assert time.monotonic() < end
                time.sleep(0.02)
            assert (
                load.resident_bytes("VmHWM", server.pid) >= load.resident_bytes(pid=server.pid) > 0
            )
            for learner in learners:
                learner.tell("pace", 0.002)
            for learner in reversed(learners):
                learner.tell("leave")
                learner.tell("rest")
        counts = [learner.tell("rest") for learner in learners]
        figures = [learner.figures() for learner in learners]
    assert min(counts) > 0 and all(each["steps"] for each in figures)
    assert all(x > 0 for x in commits.latencies(figures, "commits"))
    assert any(each["pushes"] and each["arrivals"] for each in figures)
    assert all(
        end > 0 and seconds >= 0.002 for each in figures for end, seconds, _ in each["steps"]
    )
