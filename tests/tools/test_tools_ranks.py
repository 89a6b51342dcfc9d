"""Local ranks of a measurement, fresh or forked: their environment, and their end."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_comm_tools.common import workers
from diloco_comm_tools.common.workers import WorkerError, run_workers

SCRIPT = """
import json, os, sys, time
folder = sys.argv[1]
rank = os.environ["RANK"]
modules = [name for name in ("torch", "json.tool") if name in sys.modules]
facts = [os.getpid(), sys.argv, sys.path[0], __name__, os.environ["WORLD_SIZE"], modules]
open(f"{folder}/{rank}.part", "w").write(json.dumps(facts))
os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.json")
while rank == "0" or not os.path.exists(f"{folder}/0.json"):
    time.sleep(0.01)
sys.exit(3)
"""


def facts(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"{rank}.json").read_text())


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("preload", "loaded"), [(None, []), (["json.tool"], ["torch", "json.tool"])]
)
def test_one_that_fails_is_named_and_the_others_are_killed(
    preload: list[str] | None, loaded: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path), "a word"]
    with pytest.raises(WorkerError, match="worker 1 ended with status 3") as caught:
        run_workers(command, 2, preload=preload, timeout_s=60)
    assert caught.value.status == 3
    wait_until_gone(facts(tmp_path, 0)[0])
    for rank in range(2):
        pid, *seen = facts(tmp_path, rank)
        assert pid != os.getpid()
        assert seen == [command[1:], str(tmp_path), "__main__", "2", loaded]


def test_ranks_of_a_module_that_are_late_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "late.py").write_text(SCRIPT.replace("sys.exit(3)", "time.sleep(100)"))
    words = [sys.executable, "-m", "late", str(tmp_path)]
    # An hour is over as soon as the rank has begun.
    begun = tmp_path / "0.json"
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: 3600.0 * begun.exists())
    monkeypatch.setattr(workers, "time", clock)
    with pytest.raises(WorkerError, match="did not end in time") as caught:
        run_workers(words, 1, preload=(), timeout_s=3000)
    assert caught.value.status is None
    pid, arguments, folder, *_ = facts(tmp_path, 0)
    assert (arguments[1:], folder) == (words[3:], str(tmp_path))
    wait_until_gone(pid)
