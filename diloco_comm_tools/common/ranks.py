"""Run a Python program as several ranks, forked from one process that has imported torch.

    python -m diloco_comm_tools.common.ranks FD WORLD MODULES [-m] PROGRAM ARGUMENTS...

Importing torch takes seconds of a core, and so does ending an interpreter that has imported torch.
For eight ranks on two cores the imports take longer than a short measurement. The ranks are forked
before the program runs, so every device is as untouched as in a fresh process. MODULES is a comma
list of modules to import before the fork. If a rank fails, this process writes the rank's number
and exit status to the file descriptor FD and kills the other ranks.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from .workers import die_with_launcher

# Modules that torch imports with the first optimizer: they take as long as the rest of torch.
WITH_OPTIMIZER = ("torch._dynamo",)
_ALWAYS = (
    "torch.distributed.nn",
    "diloco_comm.training.presets",
    "diloco_comm_tools.common.reports",
)


def main() -> int:
    """Fork the ranks, which run the program, wait for them, and return the exit status."""
    report, world, modules, *program = sys.argv[1:]
    die_with_launcher()
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
    # As Python sets it: the folder of a script, or the current folder for a module.
    sys.path[0] = os.getcwd() if is_module else str(Path(program[0]).resolve().parent)
    if is_module:
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


def _first_that_fails(ranks: list[ForkProcess]) -> int | None:
    """Wait until all ranks end; after the first failure kill the others and return its rank."""
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
    # No exit handler is needed, and ending the interpreter takes seconds.
    os._exit(main())
