"""Storms of many seeds: a row for each, the logs of those that have failed, and the exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.elastic import schedules, seeds

RESULTS: dict[str, Any] = {
    "outer_steps_lost": 0,
    "rounds_discarded": 3,
    "rounds": 91,
    "views": 12,
    "scrapes": 40,
    "longest_way_back_s": 8.25,
    "faults": {"kill": 4, "return": 4, "stop": 2},
    "violations": [],
}


@pytest.fixture
def storms(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, dict[str, Any] | None]]:
    """Return the status and the figures that the storm of each seed is to have."""
    chosen: dict[int, tuple[int, dict[str, Any] | None]] = {}

    def run(command: Sequence[str], **_: Any) -> Any:
        schedule = Path(command[3])
        words = dict(zip(command[4::2], command[5::2], strict=True))
        seed = int(schedule.stem.rpartition("-")[2])
        assert int(words["--replicas"]) == seeds.num_replicas_of(seed)
        assert len(schedules.parse(schedule.read_text(), int(words["--replicas"]))) > 3
        Path(words["--logs"]).mkdir()
        status, results = chosen.get(seed, (0, RESULTS))
        if results is not None:
            Path(words["--json"]).write_text(json.dumps({"results": results}))
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(seeds.subprocess, "run", run)
    return chosen


def run_seeds(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["seeds", str(folder), *words])
    return seeds.main()


def test_each_seed_has_a_row(
    tmp_path: Path,
    storms: dict[int, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_seeds(tmp_path, monkeypatch, "--seeds", "7", "--beside", "3") == 0
    rows = capsys.readouterr().out.splitlines()
    found = [row.split()[:8] for row in rows[2:-1]]
    assert found == [[str(s), str(2 + s), "0", "3", "91", "12", "40", "8.2"] for s in range(7)]
    assert rows[2].endswith("4 kill, 4 return, 2 stop") and rows[-1] == "# 7 seeds, failed: none"
    assert not list(tmp_path.glob("*.logs"))


@pytest.mark.parametrize(
    ("status", "change", "text"),
    [
        (1, {"violations": ["I3: view 4 follows 2"]}, "VIOLATED I3: view 4 follows 2"),
        (0, {"outer_steps_lost": 1}, "   12  7     1         3     91"),
        (-9, None, "VIOLATED the storm has ended with status -9, and without figures"),
    ],
)
def test_a_seed_that_has_failed_keeps_its_logs(
    status: int,
    change: dict[str, Any] | None,
    text: str,
    tmp_path: Path,
    storms: dict[int, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    storms[12] = status, None if change is None else {**RESULTS, **change}
    assert run_seeds(tmp_path, monkeypatch, "--first", "11", "--seeds", "2") == 1
    output = capsys.readouterr().out
    assert output.endswith("# 2 seeds, failed: [12]\n")
    assert [one.name for one in tmp_path.glob("*.logs")] == ["chaos-tcp-12.logs"]
    assert text in output
