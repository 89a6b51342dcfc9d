"""Counts of parameters as people write them: 7B, 350M, 25e6."""

from __future__ import annotations

import json

import pytest
from cli_helpers import run_cli

from diloco_comm_tools.common.sizes import parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7e9),
        ("1.5T", 1.5e12),
        ("350m", 350e6),
        ("10K", 1e4),
        ("25e6", 25e6),
        ("1.001k", 1001),
    ],
)
def test_counts_are_written_as_people_say_them(text: str, count: float) -> None:
    assert parse_count("--params", text) == count
    ended = run_cli("plan", "--params", text, "--layers", 24, "--step-time", 0.1, "--json")
    assert json.loads(ended.out)["request"]["params"] == count


@pytest.mark.parametrize("text", ["", "B", "7X", "7BB", "seven", "1e3K"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a number such as 25e6, 350M, 7B or 1\.5T"):
        parse_count("--params", text)


@pytest.mark.parametrize("text", ["0", "-1B", "nan", "inf"])
def test_a_count_is_positive(text: str) -> None:
    with pytest.raises(ValueError, match="--params must be a positive number, got"):
        parse_count("--params", text)
