"""``diloco-comm plan failures``: the published goodput, the user's numbers, refusals."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
import torch
from cli_helpers import check_documented, run_cli

from diloco_comm import Elastic
from diloco_comm_tools.plan.failures import PUBLISHED, YEAR_S, compare, goodput


def test_failures_of_the_published_table() -> None:
    """Thirty cells from two constants, each within five points."""
    entries = compare()
    assert len(entries) == 30 and len({row.lost_s for row in PUBLISHED}) == 2
    assert max(abs(e["percent"] - e["published_percent"]) for e in entries) < 5


def test_failures_by_hand() -> None:
    """A chip that fails once a day, and a day lost each time: half of the time."""
    assert goodput(1, 1, 86400.0, YEAR_S / 86400) == pytest.approx(0.5)
    assert goodput(8000, 8, 22.0) == goodput(1000, 1, 22.0)
    assert goodput(10, 1, 0.0) == 1.0


def test_failures_of_own_numbers() -> None:
    own = ["--chips", "20K", "--replicas", 3, "--lost-seconds", 300, "--failures-per-year", 0.5]
    report = json.loads(run_cli("plan", "failures", *own, "--json").out)
    assert report["failures"]["goodput"] == goodput(20_000, 3, 300.0, 0.5)
    learners = [entry["learners"] for entry in report["failures"]["by_learners"]]
    assert learners == [1, 2, 3, 4, 8, 16]
    check_documented(report["failures"], "reference/plan.md")
    shown = run_cli("plan", "failures", *own).out
    assert "20,000 chips, 0.5 failures of a chip a year, 300 s lost at a failure" in shown
    assert f"{report['failures']['goodput']:.1%}" in shown


def test_failures_of_the_table_are_printed() -> None:
    shown = run_cli("plan", "failures").out
    assert "72/73" in shown and "30 numbers" in shown and "rigid" in shown
    entries = json.loads(run_cli("plan", "failures", "--json").out)["published_failures"]
    assert entries == compare()
    check_documented([*entries[0], "published_failures"], "reference/plan.md")


MODEL = "--params 1e9 --layers 24 --step-time 1 --gbps 1 --efficiency 0.5".split()


def test_failures_with_a_model_and_a_link() -> None:
    """8 GB of outer parameters and momentum on half a Gbit/s: 128 s beside the 22 of a restart."""
    own = ["failures", "--chips", "20000", "--replicas", "4", *MODEL]
    report = json.loads(run_cli("plan", *own, "--json").out)["failures"]
    link = report["link"]
    assert (link["state_bytes"], link["copy_s"]) == (8e9, pytest.approx(128.0))
    assert report["lost_s"] == pytest.approx(150.0)
    assert report["goodput"] == goodput(20_000, 4, 150.0)
    assert link["trained"] == pytest.approx(link["utilisation"] * report["goodput"])
    check_documented(link, "reference/plan.md")
    ended = run_cli("plan", *own)
    assert "128 s of these are the 8 GB of outer parameters and momentum on 1 Gbit/s" in ended.out
    names: dict[str, Any] = {"model": torch.nn.Linear(2, 2), "optimizer": None}
    lines = [text.strip() for text in ended.out.splitlines()]
    imported, line = (text for text in lines if text.startswith(("from ", "diloco = ")))
    exec(imported, names)
    # The line is right but for the placeholder of the registry.
    made = mock.Mock()
    names |= {"DiLoCo": made}
    exec(line, names)
    peers = made.call_args.kwargs["peers"]
    assert isinstance(peers, Elastic) and peers.registry == "tcp://HOST:29400"


def test_failures_on_a_link_that_is_too_slow() -> None:
    own = ["failures", "--chips", "64", *MODEL, "--gbps", "0.001"]
    assert "No setting that was tried reaches --target on this link" in run_cli("plan", *own).out
    link = json.loads(run_cli("plan", *own, "--json").out)["failures"]["link"]
    assert link["program"] is None and link["trained"] is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--chips", "8"], "No such option: --chips"),
        (
            ["failures", "--chips", "9", "--bits", "4", "--quorum", "9"],
            "No such option: --bits",
        ),
        (
            ["failures", "--chips", "9", "--params", "1B", "--layers", "9"],
            "--step-time is missing: the seconds of an inner step without communication",
        ),
        (["failures", "--chips", "9", "--gbps", "1"], "--params and --layers missing"),
        (
            ["failures", "--chips", "9", *"--params 1B --layers 9 --step-time 1".split()],
            "failures of a model need --gbps: the bandwidth of the link of a replica",
        ),
        (
            ["failures", *"--params 1B --layers 9 --step-time 1 --gbps 1".split()],
            "--params, --step-time, --layers, --gbps needs --chips",
        ),
        (
            ["failures", "--replicas", "4", "--json"],
            "--replicas needs --chips: without it the paper's table is shown",
        ),
        (["failures", "--chips", "1"], "got 2 learners and 1 chips"),
        (["failures", "--chips", "9", "--lost-seconds", "-1"], "--lost-seconds must be a number"),
        (
            ["failures", "--chips", "9", "--failures-per-year", "nan"],
            "--failures-per-year must be a number of at least 0, got nan",
        ),
    ],
)
def test_failures_misuse(arguments: list[str], sentence: str) -> None:
    ended = run_cli("plan", *arguments)
    assert ended.status == 2 and sentence in ended.err
