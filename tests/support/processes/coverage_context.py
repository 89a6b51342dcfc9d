"""The test for which coverage counts the lines that a process runs.

`make coverage` starts coverage in every process. The test process names the test that runs, and so
do the workers and programs that this test starts. Without coverage these functions do nothing.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "PYTEST_CURRENT_TEST"


def current_test() -> str:
    """Return the node id of the test that pytest runs, or "" between tests."""
    return os.environ.get(VARIABLE, "").rpartition(" ")[0]


def count_for(test: str) -> None:
    """Count the following lines for a test; "" stands for none.

    Lines counted before are then in a file, so that they stay if this process is killed.
    """
    coverage = sys.modules.get("coverage")
    measured = coverage and coverage.Coverage.current()
    if measured:
        # Programs that this process starts look at the variable.
        os.environ[VARIABLE] = f"{test} (call)"
        measured.switch_context(test)
