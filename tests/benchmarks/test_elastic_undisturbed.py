"""The cost of elastic membership without changes: both groups train, and ratios come out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_runs import run_benchmark


@pytest.mark.nightly("15 s of a benchmark, whose parts have tests")
@pytest.mark.usefixtures("forked_programs")
def test_fixed_and_elastic_rounds_alternate(tmp_path: Path) -> None:
    path = tmp_path / "undisturbed.json"
    words = ["-g", "2", "-n", "3", "-w", "1", "--width", "32", "--sync-every", "2"]
    done = run_benchmark("training.outer_step", "--elastic", *words, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())["results"]
    assert results["blocked_ratio"] > 0 and results["cpu_ratio"] > 0
    assert 0 < results["elastic"]["median"] and 0 < results["fixed"]["median"]
