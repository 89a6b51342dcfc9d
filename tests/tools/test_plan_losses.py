"""The loss to expect: each number against the recorded runs, and where it is extrapolated."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

import pytest

from benchmarks.convergence import wires_report
from benchmarks.support.common import RESULTS
from diloco_comm import SGD, Nesterov
from diloco_comm.ops.wire import WIRES
from diloco_comm_tools.plan import estimate as losses
from diloco_comm_tools.plan.request import WIRES_CHOSEN, Request

RECORDED = Request(118e3, 2, 0.1, workers=4, sync_every=10, wire="int4")


def record(name: str) -> Any:
    return json.loads((RESULTS / "convergence" / name).read_text())["results"]


def wires_cell(method: str, sync_every: int) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each wire with 4 replicas and 300 inner steps, at their best rate."""
    runs = wires_report.recorded_runs(record("wires.json"))
    return wires_report.cells(runs)["118k", 4, sync_every, 300 // sync_every, method]


def loss_of(method: str, sync_every: int, wire: str = "fp32") -> float:
    return fmean(run["loss"] for run in wires_cell(method, sync_every)[wire])


def text_rows() -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in record("convergence.json")["table"]["text"]}


def test_longer_rounds() -> None:
    (few, low), (many, high) = losses.LOSS_OF_STEPS
    assert low == 0
    risen = loss_of("blocking", many) - loss_of("blocking", few)
    assert high == pytest.approx(risen, abs=5e-4)


def test_streaming() -> None:
    (short, gained), (long, lost) = losses.LOSS_OF_DELAY
    rows = text_rows()
    # A delay of 2 of 15 steps in sweep.py, and of half a round in wires.py.
    assert (short, long) == (2 / 15, 0.5)
    difference = rows["Streaming"]["loss"] - rows["DiLoCo Nesterov"]["loss"]
    assert gained == pytest.approx(difference, abs=5e-4)
    difference = loss_of("streaming", 10) - loss_of("blocking", 10)
    assert lost == pytest.approx(difference, abs=5e-4)


def test_int4_lost_nothing_wherever_it_was_run() -> None:
    """The reason for which int4 is chosen before int8."""
    assert WIRES_CHOSEN == ("int4", "int8")
    for method in ("blocking", "streaming"):
        assert abs(loss_of(method, 10, "int4") - loss_of(method, 10)) < 0.001
    for rows in record("convergence.json")["table"].values():
        by_name = {row["row"]: row for row in rows}
        for name in ("DiLoCo Nesterov", "Streaming"):
            lost = by_name[f"{name} int4"]["loss"] - by_name[name]["loss"]
            assert lost < by_name[name]["spread"]


def test_outer_learning_rates() -> None:
    blocking = [r for r in record("long-run.json") if r["method"] == "Blocking"]
    for replicas in (2, 4):
        tuned = {
            row["lr"]: tuning
            for row in blocking
            if row["num_replicas"] == replicas and row["momentum"] == 0.9
            for seed, tuning, _ in row["seed, tuning loss, loss"]
            if seed == 0
        }
        assert min(tuned, key=tuned.__getitem__) == losses.NESTEROV_LR
    assert text_rows()["Streaming"]["choice"] == {"lr": losses.NESTEROV_LR}
    cell = wires_cell("blocking", 10)
    rates = {wire: {run["lr"] for run in cell[wire]} for wire in losses.SGD_LR}
    assert rates == {wire: {lr} for wire, lr in losses.SGD_LR.items()}


@pytest.mark.parametrize("wire", WIRES)
def test_each_wire_has_an_outer_optimizer(wire: str) -> None:
    assert losses.outer_of(wire).config()["lr"] > 0


@pytest.mark.parametrize(
    ("wire", "outer"), [("int4", Nesterov(0.4)), ("int2r", Nesterov(0.4)), ("topk64", SGD(2.8))]
)
def test_the_outer_optimizer_of_a_wire(wire: str, outer: object) -> None:
    assert losses.outer_of(wire) == outer


def expected(**changes: Any) -> dict[str, Any]:
    return losses.expected(Request(**{**vars(RECORDED), **changes}))


def test_a_recorded_setting_is_not_extrapolated() -> None:
    terms = {"sync_every": 0.0, "wire": 0.0, "overlap": 0.0}
    assert expected() == {"nats": 0.0, "terms": terms, "extrapolated": []}
    assert expected(sync_every=30)["nats"] == 0.017
    assert expected(wire="sub8")["nats"] == 0.036


def test_the_terms_by_hand() -> None:
    found = expected(method="streaming", fragment_layers=1, delay=5, sync_every=90)
    # 90 is as far above 30 as 30 above 10; 5 of 90 steps are less than 2 of 15.
    assert found["terms"] == {"sync_every": 0.034, "wire": 0.0, "overlap": -0.005}
    assert found["nats"] == pytest.approx(0.029)
    assert found["extrapolated"] == ["H=90 (recorded: 10 and 30)"]
    half = expected(method="streaming", fragment_layers=1, delay=5)
    assert half["terms"]["overlap"] == 0.047 and half["extrapolated"] == []


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"params": 7e9}, "7e+09 parameters (recorded: 118,000 and 428,000 parameters)"),
        ({"workers": 8}, "8 replicas (recorded: 4)"),
        ({"workers": 32, "wire": "sub8"}, "32 replicas (recorded: 16)"),
        ({"sync_every": 5}, "H=5 (recorded: 10 and 30)"),
        (
            {"wire": "sub8", "sync_every": 30},
            "sub8 with H=30 (recorded: 10; longer rounds lose more)",
        ),
        ({"wire": "int8"}, "int8 (recorded: int4, which has fewer bits)"),
        (
            {"method": "streaming", "fragment_layers": 1, "delay": 6},
            "a delay of 6 of 10 steps (recorded: up to 0.5 of H)",
        ),
    ],
)
def test_each_way_beyond_the_records_is_named(changes: dict[str, Any], phrase: str) -> None:
    found = expected(**changes)
    assert found["extrapolated"] == [phrase] and found["nats"] is not None


def test_a_wire_that_was_never_run_has_no_loss() -> None:
    found = expected(wire="e3m0")
    assert found["nats"] is None and found["terms"]["wire"] is None
