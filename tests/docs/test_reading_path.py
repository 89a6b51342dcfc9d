"""The size of an outer step, and of the sources that a reader must trust for one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "developers" / "way-of-a-parameter.md"


def test_an_outer_step_stays_small() -> None:
    file = ROOT / "tests" / "support" / "quality" / "reading_path.py"
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = re.findall(r"^ *[0-9]+ ((?:diloco_comm|csrc)/\S+)$", done.stdout, re.MULTILINE)
    told = re.findall(r"^\d+\. `((?:diloco_comm|csrc)/\S+)`", PAGE.read_text(), re.MULTILINE)
    assert told == listed, "the page must list these files in this order:\n" + done.stdout
