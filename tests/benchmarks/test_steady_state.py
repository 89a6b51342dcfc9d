"""A sync in steady state allocates nothing large and touches no fresh page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import ROOT, run_benchmark


@pytest.mark.nightly("20 s each; test_ops_torch counts what an operator allocates")
@pytest.mark.parametrize(("world", "wires"), [(2, "fp32,int8"), (3, "int4")])
def test_no_allocation_and_no_page_fault(wires: str, world: int, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    options = ["-g", str(world), "--wire", wires, "-w", "15", "-n", "20", "--json", str(path)]
    done = run_benchmark("training.steady_state", *options, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, dict[str, Any]] = json.loads(path.read_text())["results"]
    assert list(results) == wires.split(",")
    for counts in results.values():
        assert counts["large_allocations"]["max"] == 0, done.stdout
        faults = counts["caller_faults"]["mean"] + counts["engine_faults"]["mean"]
        assert faults <= 1, done.stdout


@pytest.mark.nightly("goes with the other test of this file")
def test_the_counter_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.training import steady_state

    library = steady_state.build_counter(str(tmp_path))
    program = (
        "import torch\n"
        "from benchmarks.training import steady_state\n"
        "counts = steady_state.Counts()\n"
        "kept = torch.zeros(1 << 20)\n"
        "once = counts.measure(lambda: torch.ones(1 << 20))\n"
        "none = counts.measure(lambda: kept.add_(1))\n"
        "print(once['large_allocations'], once['caller_faults'], none['large_allocations'])\n"
    )
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    changes = {"LD_PRELOAD": library, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **changes}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    allocations, faults, none = map(int, done.stdout.split())
    assert (allocations, none) == (1, 0), done.stdout
    # 4 MiB are touched for the first time: one fault a page, or one for many where huge pages are.
    assert 1 <= faults <= 2 * (4 << 20) // os.sysconf("SC_PAGE_SIZE"), done.stdout
