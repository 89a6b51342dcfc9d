"""For which test coverage counts the lines that a process runs.

`make coverage` starts coverage in every process. The test process names the test that runs, and so
do the workers and programs that this test starts. Without coverage these functions do nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

VARIABLE = "PYTEST_CURRENT_TEST"
# Between two writes of a process that a test may kill.
INTERVAL_S = 0.5


def current_test() -> str:
    """Return the node id of the test that pytest runs, or "" between tests."""
    return os.environ.get(VARIABLE, "").rpartition(" ")[0]


def count_for(test: str) -> None:
    """Count the following lines for a test; "" stands for none.

    Lines counted before are then in a file, so that they stay if this process is killed.
    """
    coverage = _coverage()
    if coverage:
        # Programs that this process starts look at the variable.
        os.environ[VARIABLE] = f"{test} (call)"
        coverage.switch_context(test)


def count_until_killed_for(test: str) -> None:
    """Count all lines of this process for a test, and write them twice a second.

    The process must end by a signal or ``os._exit``, as those of multiprocessing do: an interpreter
    that ends would close the file under the thread that writes.
    """
    count_for(test)
    coverage = _coverage()
    if coverage:
        threading.Thread(target=_write_forever, args=(coverage,), daemon=True).start()


def _coverage() -> Any:
    module = sys.modules.get("coverage")
    return module and module.Coverage.current()


def _write_forever(coverage: Any) -> None:
    while True:
        time.sleep(INTERVAL_S)
        coverage.save()
