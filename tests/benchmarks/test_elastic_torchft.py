"""The comparison with torchft under churn: what it makes of the replicas' logs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmark_runs import run_benchmark

from benchmarks.against_torchft import elastic_report
from benchmarks.against_torchft.elastic import Process, Side

Line = tuple[float, str] | tuple[float, str, dict[str, float]]


def process(folder: Path, replica: int, started: float, lines: Sequence[Line]) -> Process:
    """A process that has ended and left a log; its last line is torn."""
    log = folder / f"{len(list(folder.iterdir()))}.jsonl"
    rows = [
        {"at": line[0], "kind": line[1], **(line[2] if len(line) > 2 else {})} for line in lines
    ]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"at": 9')
    return Process(replica, started, None, log)  # type: ignore[arg-type]


def steps(begin: float, number: int) -> list[Line]:
    return [(begin + 0.1 * i, "step") for i in range(number)]


def test_steps_of_rounds_that_failed_are_not_kept(tmp_path: Path) -> None:
    lines = [*steps(0.0, 4), (0.5, "commit"), *steps(1.0, 4), (1.5, "discarded")]
    lines += [*steps(2.0, 4), (2.5, "healed"), *steps(3.0, 4), (3.5, "commit"), *steps(4.0, 2)]
    kept = elastic_report.kept_steps(process(tmp_path, 0, 0.0, lines))
    assert kept == [at for at, kind, *_ in [*steps(0.0, 4), *steps(3.0, 4)]]


def test_steps_stay_with_a_replica_until_a_round_counts(tmp_path: Path) -> None:
    lines = [*steps(0.0, 3), (0.5, "view"), *steps(1.0, 2), (1.5, "commit")]
    assert len(elastic_report.kept_steps(process(tmp_path, 0, 0.0, lines))) == 5


def test_figures_count_from_the_logs(tmp_path: Path) -> None:
    args = argparse.Namespace(calm=10.0, limit=60.0)
    side = Side("diloco", args, tmp_path)
    begins: list[Line] = [(0.0, "begins", {"parameters": 7})]
    # Ten steps and a commit in each second of half a minute, but for the second after the kill.
    rounds = [
        line
        for second in range(30)
        if second != 12
        for line in [*steps(second + 0.05, 10), (second + 0.99, "commit")]
    ]
    end: list[Line] = [(30.5, "end", {"loss": 2.0})]
    side.processes = [
        process(tmp_path, replica, 0.0, [*begins, *rounds, *end]) for replica in (0, 1)
    ]
    side.processes.append(process(tmp_path, 2, 0.0, [*begins, *[r for r in rounds if r[0] < 12]]))
    late = [line for line in rounds if line[0] >= 15]
    joins: list[Line] = [(14.0, "joining", {"received": 56})]
    side.processes.append(process(tmp_path, 2, 13.0, [*begins, *joins, *late, *end]))
    side.events = [(0.0, "begin", -1), (12.0, "kill", 2), (13.0, "start", 2)]
    side.events += [(20.0, "coordinator down", -1), (25.0, "coordinator up", -1), (30.0, "end", -1)]
    figures = elastic_report.figures_of(side, args)
    assert figures["steps_a_second"] == 30.0
    assert figures["goodput"] == pytest.approx((12 * 30 + 2 * 20 + 15 * 30) / 900, abs=1e-4)
    assert figures["fault_to_commit_s"] == [1.99]
    assert figures["start_to_commit_s"] == [2.99]
    assert figures["join_bytes"] == 56 and figures["final_loss"] == 2.0
    assert figures["coordinator"]["commits_while_away"] == 3 * 5
    assert figures["coordinator"]["return_to_commit_s"] == pytest.approx(0.99)
    assert figures["coordinator"]["longest_gap_s"] == pytest.approx(1.0)


@pytest.mark.nightly("8 s; a word of a benchmark's command line")
def test_another_side_is_misuse() -> None:
    ended = run_benchmark("against_torchft.elastic", "--sides", "torchft,other", "--json", "")
    assert ended.returncode == 2 and "not other" in ended.stderr
