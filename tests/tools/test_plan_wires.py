"""``diloco-comm plan --wire auto`` and ``--wires``: a wire is chosen, and all are compared."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from cli_helpers import run_cli

import diloco_comm
from benchmarks.support.common import RESULTS
from diloco_comm.ops.wire import WIRES, WireFormat
from diloco_comm_tools.plan import estimate as plan_losses
from diloco_comm_tools.plan import estimate as plan_wires
from diloco_comm_tools.plan.request import Request, Setting, as_arguments

SMALL = ["--params", "1e9", "--layers", "24", "--step-time", "0.1"]


def plan_json(*arguments: object) -> dict[str, Any]:
    ended = run_cli("plan", *arguments, "--json")
    assert (ended.status, ended.err) == (0, "")
    return json.loads(ended.out)


AUTO = [
    # A fast link needs nothing below int4; a slow one takes the first that is fast enough.
    (2, 10.0, "int4", "4.062 bits a parameter"),
    (2, 0.12, "int4", "4.062 bits a parameter"),
    (2, 0.02, "int1r", "int2r reaches"),
    (2, 0.005, "sub4", "sub2 reaches"),
    # With many replicas owners encode the mean of sub2 on int1r; of sub4 from nine replicas on.
    (16, 0.03, "sub2", "int1r reaches"),
    (16, 0.025, "sub4", "sub2 reaches"),
    (8, 0.022, "sub8", "sub4 sends no fewer bytes than sub2 with 8 replicas"),
]


@pytest.mark.parametrize(("replicas", "gbps", "wire", "reason"), AUTO)
def test_auto_takes_the_most_precise_wire_that_is_fast_enough(
    replicas: int, gbps: float, wire: str, reason: str, tmp_path: Path
) -> None:
    words = ["--params", 1e9, "--layers", 24, "--step-time", 1, "--sync-every", 500]
    words += ["--replicas", replicas, "--gbps", gbps, "--wire", "auto", "--target", 0.9]
    words += ["--efficiency", 1]
    path = tmp_path / "diloco.json"
    plan = plan_json(*words, "--write", path)
    assert (plan["request"]["wire"], plan["link"]["utilisation"] >= 0.9) == (wire, True)
    assert plan["auto"].startswith(f"{wire}: ") and reason in plan["auto"]
    written = json.loads(path.read_text())
    # Below two bits there is no outer momentum.
    outer = written.pop("outer", None)
    assert (outer == {"name": "SGD", "lr": 1.0}) == (wire not in ("int8", "int4"))
    assert written == {"sync_every": 500, "wire": wire}
    assert ("model of 118,000 parameters" in plan["auto"]) == (wire not in ("int8", "int4"))


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_written_is_what_a_wire_needs(wire: str) -> None:
    """The program and the file make the same DiLoCo, and a wire that needs options has them."""
    made = as_arguments(Setting("diloco", 0, wire, 500, 0, 0.95), 256)
    names: dict[str, Any] = {n: getattr(diloco_comm, n) for n in ("DiLoCo", "SGD", "Wire")}
    model = torch.nn.Linear(2, 2)
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(made["line"], names)
    with names["diloco"] as diloco:
        config = diloco.config()
    with diloco_comm.DiLoCo(model, names["optimizer"], config=made["config"]) as diloco:
        assert diloco.config() == config
    few_bits = WireFormat(wire).bits_per_element < 2
    assert config["outer"]["name"] == ("SGD" if few_bits else "Nesterov")
    assert config["error_feedback"] == wire.startswith("topk")


def test_auto_says_when_no_wire_is_enough(tmp_path: Path) -> None:
    words = [*SMALL, "--gbps", 0.0001, "--wire", "auto"]
    assert "no wire reaches 95%, and sub16 sends the fewest bytes" in plan_json(*words)["auto"]
    ended = run_cli("plan", *words, "--write", tmp_path / "diloco.json")
    assert ended.status == 1 and "reaches --target" in ended.err


@pytest.mark.parametrize(
    ("wire", "written"),
    [
        ("int4", '"int4"'),
        ("int1r", '"int1r"'),
        ("sub16", '"sub16"'),
        ("topk64", 'Wire("topk64", error_feedback=True)'),
    ],
)
def test_a_named_wire_is_kept(wire: str, written: str) -> None:
    plan = plan_json(*SMALL, "--gbps", 1, "--wire", wire)
    assert plan["link"]["chosen_wires"] == [wire]
    assert f"wire={written}" in plan["link"]["chosen"]["line"]
    assert plan["link"]["wires_tried"][:4] == ["fp32", "bf16", "int8", "int4"]
    assert wire in plan["link"]["wires_tried"]


def test_auto_keeps_the_block_size() -> None:
    plan = plan_json(*SMALL, "--gbps", 1000, "--wire", "auto", "--block-size", 64)
    assert plan["bits_per_param"] == 4.25
    assert plan["link"]["chosen"]["config"]["block_size"] == 64


def test_auto_says_which_wire_is_chosen() -> None:
    words = [*SMALL, "--gbps", 0.2, "--wire", "auto", "--target", 0.8]
    link = plan_json(*words)["link"]
    assert link["chosen_wires"] == [link["chosen"]["setting"]["wire"]] == ["sub4"]
    assert (
        "No wire reaches 95% with these settings. Raise --sync-every."
        in run_cli("plan", *SMALL, "--gbps", 0.0001, "--wire", "auto").out
    )
    named = run_cli("plan", *SMALL, "--gbps", 0.0001, "--wire", "sub16").out
    assert "over sub16 that was tried reaches 95%." in named and "--wire auto" not in named


def test_a_share_below_the_target_is_shown_below() -> None:
    assert [plan_wires._below(share, 0.95) for share in (0.5, 0.94954, 0.9499999)] == [
        "50.0%",
        "94.95%",
        "94.99999%",
    ]


def test_the_losses_are_those_that_were_measured() -> None:
    from benchmarks.convergence import wires_report

    record = json.loads((RESULTS / "convergence" / "wires.json").read_text())
    cells = wires_report.cells(wires_report.recorded_runs(record["results"]))
    measured = cells["118k", 4, 10, 30, wires_report.BLOCKING]
    losses = {
        wire: round(fmean(wires_report.over_base(measured, wire)), 3)
        for wire in measured
        if wire in WIRES
    }
    assert losses == plan_losses.LOSS_OVER_FP32
    many = cells["118k", 16, 10, 30, wires_report.BLOCKING]
    request = {wire: Request(1e9, 24, 0.1, workers=16, wire=wire) for wire in many}
    losses = {
        wire: round(fmean(wires_report.over_base(many, wire)), 3)
        for wire in many
        if request[wire].has_owners
    }
    assert losses == plan_losses.LOSS_BY_OWNERS


def test_all_wires_are_compared() -> None:
    ended = run_cli("plan", *SMALL, "--wires", "--replicas", 4)
    table = ended.out.split("All wires")[1]
    assert all(f" {wire} " in table for wire in WIRES)
    rows = {row["wire"]: row for row in plan_json(*SMALL, "--replicas", 4)["wires"]}
    assert rows["int8"]["bits_per_param"] == 1.5 * 8.0625
    assert rows["sub8"]["bits_per_param"] == 3 * 0.140625
