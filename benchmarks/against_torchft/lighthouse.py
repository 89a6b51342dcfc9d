"""Host torchft's lighthouse until the process is killed; print its address.

python -m benchmarks.against_torchft.lighthouse PORT SUSPECT_MS
"""

from __future__ import annotations

import sys
import time

from diloco_comm_tools.common.workers import die_with_launcher

# How long the lighthouse waits for a live replica that has not asked for the quorum yet: the
# default of its command. With less, a replica that is a moment late is given the state anew.
_JOIN_TIMEOUT_MS = 60_000


def main() -> None:
    from torchft.coordination import LighthouseServer

    die_with_launcher()
    server = LighthouseServer(
        bind=f"127.0.0.1:{sys.argv[1]}",
        min_replicas=2,
        join_timeout_ms=_JOIN_TIMEOUT_MS,
        # The default tick of 100 ms is a good part of a short round.
        quorum_tick_ms=10,
        heartbeat_timeout_ms=int(sys.argv[2]),
    )
    print(server.address(), flush=True)
    while True:
        time.sleep(60.0)


if __name__ == "__main__":
    main()
