"""``diloco-comm plan --failures``: the published goodput, the user's numbers, refusals."""

from __future__ import annotations

import json

import pytest
from cli_helpers import check_documented, run_cli

from diloco_comm.tools.plan.failures import PUBLISHED, YEAR_S, compare, goodput


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
    report = json.loads(run_cli("plan", "--failures", *own, "--json").out)
    assert report["failures"]["goodput"] == goodput(20_000, 3, 300.0, 0.5)
    learners = [entry["learners"] for entry in report["failures"]["by_learners"]]
    assert learners == [1, 2, 3, 4, 8, 16]
    check_documented(report["failures"], "reference/plan.md")
    shown = run_cli("plan", "--failures", *own).out
    assert "20,000 chips, 0.5 failures of a chip a year, 300 s lost at a failure" in shown
    assert f"{report['failures']['goodput']:.1%}" in shown


def test_failures_of_the_table_are_printed() -> None:
    shown = run_cli("plan", "--failures").out
    assert "72/73" in shown and "30 numbers" in shown and "rigid" in shown
    entries = json.loads(run_cli("plan", "--failures", "--json").out)["published_failures"]
    assert entries == compare()
    check_documented([*entries[0], "published_failures"], "reference/plan.md")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--chips", "8"], "--chips needs --failures"),
        (
            ["--failures", "--chips", "9", "--params", "1B", "--layers", "9"],
            "--failures does not take --params, --layers: leave out those options",
        ),
        (
            ["--failures", "--replicas", "4", "--json"],
            "--replicas needs --chips: without it the paper's table is shown",
        ),
        (["--failures", "--chips", "1"], "got 2 learners and 1 chips"),
        (["--failures", "--chips", "9", "--lost-seconds", "-1"], "--lost-seconds must be a number"),
        (
            ["--failures", "--chips", "9", "--failures-per-year", "nan"],
            "--failures-per-year must be a number of at least 0, got nan",
        ),
    ],
)
def test_failures_misuse(arguments: list[str], sentence: str) -> None:
    ended = run_cli("plan", *arguments)
    assert ended.status == 2 and sentence in ended.err
