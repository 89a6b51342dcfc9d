"""Become a worker that ends with its launcher: ``child.py LAUNCHER REPLICA script.py argument...``.

LAUNCHER is the launcher's process number. REPLICA is a JSON object of environment variables that
concern the replica, and win over torchrun's. This script needs the standard library alone, so
that each worker starts without delay.
"""

import ctypes
import json
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


def take_rank(replica: dict[str, str]) -> None:
    """Take the rank among the workers of all nodes, where torchrun has given one of this node."""
    os.environ.update(replica)
    node, num_nodes, local, num_local = (
        int(os.environ[name])
        for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    for name in ("RANK", "ROLE_RANK"):
        os.environ[name] = str(node * num_local + local)
    for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE"):
        os.environ[name] = str(num_nodes * num_local)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    take_rank(json.loads(sys.argv[2]))
    # The request to end with the launcher survives exec, and the script starts in a clean process.
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[3:]])
