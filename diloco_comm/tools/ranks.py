"""Run a Python program as several ranks, forked from one process that has imported torch.

    python -m diloco_comm.tools.ranks FD WORLD MODULES [-m] PROGRAM ARGUMENTS...

Importing torch takes seconds of a core, for eight ranks on two cores longer than a short
measurement. The ranks are forked before anything runs, so every device is as untouched as in a
fresh process. MODULES, a comma list, are imported for all. If a rank fails, its number and exit
status are written to the file descriptor FD, and the others are killed.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import runpy
import signal
import sys
from pathlib import Path

# What torch loads with the first optimizer takes as long as all the rest of it.
WITH_OPTIMIZER = ("torch._dynamo",)
_ALWAYS = ("torch.distributed.nn", "diloco_comm.tools.measuring")
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Fork the ranks; each goes on as the program, this process waits for them."""
    report, world, modules, *program = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in (*_ALWAYS, *filter(None, modules.split(","))):
        importlib.import_module(name)
    ranks: dict[int, int] = {}
    for rank in range(int(world)):
        pid = os.fork()
        if pid == 0:
            os.close(int(report))
            _become(program, rank)
            return
        ranks[pid] = rank
    os._exit(_wait(ranks, int(report)))


def _become(program: list[str], rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    is_module = program[0] == "-m"
    sys.argv = program[1:] if is_module else program
    # As Python does it: the folder of a script, the current one for a module.
    sys.path[0] = os.getcwd() if is_module else str(Path(program[0]).resolve().parent)
    if is_module:
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


def _wait(ranks: dict[int, int], report: int) -> int:
    """Wait for all, or for the first that fails; the exit status."""
    while ranks:
        pid, status = os.wait()
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code != 0:
            os.write(report, f"{rank} {code}".encode())
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    main()
