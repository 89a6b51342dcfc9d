"""Round trips of a change of an elastic group: the slope, the steps, and a run over namespaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_runs import run_benchmark

from benchmarks.elastic.round_trips import (
    MOST_ROUND_TRIPS,
    Changes,
    Step,
    last_times,
    results_of,
)
from benchmarks.exchange import netns


def change(begin: float, delay: float) -> list[Step]:
    names = ["is told Broke", "does Prepare", "hears Ready", "hears Ready", "does Swap"]
    found = [Step(begin + delay * i, name) for i, name in enumerate(names)]
    return [*found, Step(begin + delay * 5, "does Enter"), Step(begin + 90.0, "hears Ready")]


def test_the_slope_is_the_number_of_round_trips() -> None:
    short = Changes([0.03, 0.02, 0.9], 0.0, [*change(10.0, 0.002), *change(200.0, 0.002)])
    long = Changes([0.3, 0.31, 0.29], 0.5, [*change(10.0, 0.03), *change(200.0, 0.03)])
    found = results_of(short, long, (4.0, 60.0))
    assert found["round_trips"] == pytest.approx((0.3 - 0.03) / 0.056)
    assert found["opened"] == 0.5
    # The last of two answers counts, and what follows the record does not.
    assert found["steps"]["hears Ready"] == [0.09, 1.5]
    assert list(found["steps"])[-1] == "does Enter"


def test_a_step_of_few_changes_is_left_out() -> None:
    steps = [*change(0.0, 0.01), Step(99.0, "is told Broke"), Step(99.5, "hears Here")]
    steps += [Step(200.0, "is told Broke"), Step(200.1, "does Enter")]
    assert last_times(steps).keys() == {"is told Broke", "does Enter"}


@pytest.mark.nightly("40 s of changes over namespaces; the slope has tests")
@pytest.mark.fresh_interpreter
@pytest.mark.timeout(600)
def test_a_change_takes_few_round_trips(tmp_path: Path) -> None:
    if reason := netns.missing_tun():
        pytest.skip(reason)
    path = tmp_path / "trips.json"
    # Delays so long that a machine under load changes the slope little.
    words = ["--replicas", "2", "--changes", "3", "--short", "50", "--long", "300"]
    done = run_benchmark("elastic.round_trips", *words, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["results"]["replicas 2"]
    assert found["opened"] == 0.0 and 2.0 < found["round_trips"] <= MOST_ROUND_TRIPS
