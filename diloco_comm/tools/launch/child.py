"""Become a worker that ends with its launcher: ``child.py LAUNCHER script.py argument...``.

LAUNCHER is the launcher's process number. This script needs the standard library alone, so that
each worker starts without delay.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(launcher: int) -> None:
    """Let the kernel kill this process when its parent ends, however that ends; Linux only."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        sys.exit("the launcher has ended already")


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    # The kernel keeps the wish, and the script runs as if nothing had been before it.
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[2:]])
