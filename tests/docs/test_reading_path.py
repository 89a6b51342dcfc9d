"""The size of an outer step, and of the sources that a reader must trust for one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "developers" / "way-of-a-parameter.md"


@pytest.mark.parametrize("script", ["outer_step_trace", "reading_path"])
def test_an_outer_step_stays_small(script: str) -> None:
    file = ROOT / "tests" / "support" / "quality" / f"{script}.py"
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    if script == "reading_path":
        listed = re.findall(r"^ *[0-9]+ ((?:diloco_comm|csrc)/\S+)$", done.stdout, re.MULTILINE)
        told = re.findall(r"^\d+\. `((?:diloco_comm|csrc)/\S+)`", PAGE.read_text(), re.MULTILINE)
        assert told == listed, "the page must list these files in this order:\n" + done.stdout
