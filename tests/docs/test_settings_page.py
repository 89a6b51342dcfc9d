"""docs/how-to/settings.md shows what ``diloco-comm plan`` prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from cli_helpers import run_cli

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "settings.md").read_text()
ROWS = re.findall(
    r"^\| (\S+), (\d+) layers, (\S+) s \| (\S+) Gbit/s \| (.+) \|$", PAGE, re.MULTILINE
)


def test_the_command_of_the_page_prints_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, printed = re.findall(r"```(?:bash|text)\n(.*?)```", PAGE, re.DOTALL)[:2]
    ended = run_cli(*shlex.split(command)[1:])
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.endswith(printed)
    assert (tmp_path / "diloco.json").exists()


def test_the_table_has_sizes_and_links() -> None:
    assert len(ROWS) == 12


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[3]}")
def test_a_row_of_the_table_is_what_plan_chooses(row: tuple[str, ...]) -> None:
    params, layers, step_time, gbps, line = row
    size = ["--params", params, "--layers", layers, "--step-time", step_time]
    ended = run_cli("plan", *size, "--gbps", gbps, "--rtt-ms", "50")
    chosen = [f"`{line.strip()}`" for line in ended.out.splitlines() if "diloco = " in line]
    assert chosen == ([line] if line.startswith("`") else [])
    assert chosen or line == "none that was tried reaches 95 %"
    assert chosen or "that was tried reaches 95%" in ended.out
