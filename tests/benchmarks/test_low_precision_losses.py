"""The losses with bf16 parameters: one short training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_runs import run_benchmark

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.mark.nightly("8 s; the rule of bf16 parameters has tests of its own in the first tier")
def test_one_seed_is_measured(tmp_path: Path) -> None:
    arguments = ["--seeds", "0", "--lrs", "1e-3", "--rounds", "2", "--still", "2"]
    done = run_benchmark("convergence.low_precision", *arguments, "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "r.json").read_text())["results"]
    for kind in ("plain", "DiLoCo", "still"):
        assert 2 < row[f"{kind} fp32"] < 5
        assert row[f"{kind} cost"] == row[f"{kind} bf16"] - row[f"{kind} fp32"]
        assert 0 < abs(row[f"{kind} cost"]) < 0.2
