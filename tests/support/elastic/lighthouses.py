"""A lighthouse of torchft in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

SERVER = """
import sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(
    bind="127.0.0.1:0", min_replicas=int(sys.argv[1]), join_timeout_ms=int(sys.argv[2]),
    quorum_tick_ms=10, heartbeat_timeout_ms=3000,
)
print(server.address().rsplit(":", 1)[1], flush=True)
time.sleep(600)
"""


class Lighthouse:
    """A lighthouse that calls a replica dead after three seconds without a heartbeat.

    Args:
        min_replicas: Without so many replicas no quorum is made.
        join_timeout_ms: How long a quorum waits for a replica that lives and has not asked yet.
    """

    def __init__(self, min_replicas: int = 1, join_timeout_ms: int = 60_000) -> None:
        words = [sys.executable, "-c", SERVER, str(min_replicas), str(join_timeout_ms)]
        self._process = subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env=os.environ | {"RUST_LOG": "error"}
        )
        assert self._process.stdout is not None
        self.address = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
