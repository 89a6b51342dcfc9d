"""Coverage counts what workers and forked programs run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from coverage import CoverageData
from support_paths import FOLDERS, ROOT

COUNTED = """
def in_worker(rank, world):
    return rank


def in_program():
    print("run")
"""
SCRIPT = f"""
import os, sys
sys.path[:0] = {FOLDERS!r}
import counted
from workers import Crew
from zygote import Job, Zygote

zygote = Zygote()
crew = Crew(zygote)
crew.pool(1, init_group=False).run(counted.in_worker)
program = "import sys; sys.path.insert(0, sys.argv[1]); import counted; counted.in_program()"
job = Job(zygote, program, os.path.dirname(counted.__file__))
print(*job.finish())
crew.close()
"""


@pytest.mark.nightly("15 s; `make coverage` alone uses it")
def test_lines_of_workers_and_programs_are_counted(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--rcfile", str(ROOT / "pyproject.toml"), "--data-file", "data", "--source", "."]
    command = [sys.executable, "-m", "coverage", "run", *options, "script.py"]
    # The outer coverage, if these tests run under one, would count this interpreter too.
    variables = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    ended = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=110
    )
    assert (ended.returncode, ended.stdout) == (0, "0 run\n\n"), ended.stderr
    lines: set[int] = set()
    for file in tmp_path.glob("data.*"):
        data = CoverageData(str(file))
        data.read()
        lines.update(data.lines(str((tmp_path / "counted.py").resolve())) or ())
    assert {3, 7} <= lines
