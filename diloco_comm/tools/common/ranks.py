"""Run a Python program as several ranks, forked from one process that has imported torch.

    python -m diloco_comm.tools.common.ranks FD WORLD MODULES [-m] PROGRAM ARGUMENTS...

Importing torch takes seconds of a core, and so does the end of an interpreter that has: for eight
ranks on two cores longer than a short measurement. The ranks are forked before anything runs, so
every device is as untouched as in a fresh process. MODULES, a comma list, are imported for all. If
a rank fails, its number and exit status are written to the file descriptor FD, and the others are
killed.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

# What torch loads with the first optimizer takes as long as all the rest of it.
WITH_OPTIMIZER = ("torch._dynamo",)
_ALWAYS = ("torch.distributed.nn", "diloco_comm.tools.common.measuring")
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Fork the ranks, which run the program, and wait for them; the exit status."""
    report, world, modules, *program = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in (*_ALWAYS, *filter(None, modules.split(","))):
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_run, args=(program, rank, int(report)))
        for rank in range(int(world))
    ]
    for process in ranks:
        process.start()
    failed = _first_that_fails(ranks)
    if failed is not None:
        os.write(int(report), f"{failed} {ranks[failed].exitcode}".encode())
    return int(failed is not None)


def _run(program: list[str], rank: int, report: int) -> None:
    os.close(report)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    is_module = program[0] == "-m"
    sys.argv = program[1:] if is_module else program
    # As Python does it: the folder of a script, the current one for a module.
    sys.path[0] = os.getcwd() if is_module else str(Path(program[0]).resolve().parent)
    if is_module:
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


def _first_that_fails(ranks: list[ForkProcess]) -> int | None:
    """Wait for all, or for the first that fails, and kill the others then."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        for sentinel in wait(list(running)):
            assert isinstance(sentinel, int)
            rank = running.pop(sentinel)
            ranks[rank].join()
            if ranks[rank].exitcode != 0:
                for process in ranks:
                    process.kill()
                return rank
    return None


if __name__ == "__main__":
    # Nothing here needs the end of an interpreter.
    os._exit(main())
