"""The benchmarks of plan and profile: what they compute can be wrong. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import RESULTS


def test_synthetic_trace_is_one(tmp_path: Path) -> None:
    from benchmarks.training import profile_speed
    from diloco_comm_tools.profile.report import make_report, read_traces

    path = tmp_path / "rank0.json"
    num_events = profile_speed.write_trace(path, 300_000)
    document = json.loads(path.read_text())
    assert len(document["traceEvents"]) == num_events
    assert path.stat().st_size == pytest.approx(300_000, rel=1.0)
    (rank,) = make_report(read_traces([path]))["ranks"]
    assert rank["device"] == "gpu" and 0 < rank["overlap"] < 1


def document_of(step_ms: float, rows: dict[str, float]) -> dict[str, Any]:
    results: list[dict[str, Any]] = [
        {"variant": "alone", "of_alone": 1.0, "step_ms": {"median": step_ms}}
    ]
    results += [{"variant": name, "of_alone": share} for name, share in rows.items()]
    return {"parameters": 8e6, "workers": 2, "H": 10, "results": results}


def test_predictions_stand_beside_what_was_measured() -> None:
    from benchmarks.training import plan_against_measured

    # 8 million parameters of 4.0625 bits: 0.325 s at 0.1 Gbit/s, and three messages of 25 ms.
    exchange_s = 8e6 * 4.0625 / 0.1e9 + 3 * 0.025
    expected = 1.0 / (1.0 + exchange_s)
    document = document_of(100.0, {"blocking:int4": expected / 1.05, "eager:int4": 1.0})
    blocking, eager = plan_against_measured.compare(document, 0.1, 50.0)
    assert blocking["predicted"] == pytest.approx(expected)
    assert blocking["error"] == pytest.approx(0.05)
    assert (eager["predicted"], eager["error"]) == (1.0, 0.0)


def test_recorded_predictions_are_within_an_eighth() -> None:
    """What docs/measurements/plan-results.md quotes."""
    path = RESULTS / "training/plan-against-measured.json"
    rows = json.loads(path.read_text())["results"]
    assert len({row["gbps"] for row in rows}) >= 4
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
        assert abs(row["error"]) < 0.125
