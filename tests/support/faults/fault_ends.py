"""How a replica of a test of agreement ended: what it saw, and with whom it went on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_replicas import Failure, Replica, Result, Setup
from workers import Pool

from diloco_comm.exchange import waits

H = 4
# Nobody waits for it: each test ends by what it tests, or by its own deadline.
HALF_AN_HOUR = Setup("int8", 1, 4, timeout=1800.0)
Address = tuple[str, int]
Fresh = Callable[..., Pool]


@dataclass
class End:
    """What a replica saw, and where it ended."""

    missing: tuple[int, ...]
    survivors: tuple[int, ...]
    members: tuple[int, ...]
    epoch: int
    result: Result
    errors: list[str]


def end(replica: Replica, failure: Failure, errors: Sequence[str] = ()) -> End:
    diloco = replica.diloco
    ended = End(
        failure.missing,
        failure.details["survivors"],
        diloco.members,
        diloco.epoch,
        replica.result([failure]),
        list(errors),
    )
    diloco.close()
    return ended


def wait_until_stopped(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.005)


def finish(replica: Replica, last_step: int, failures: Sequence[Failure] = ()) -> Result:
    """Train to a step, and close."""
    replica.train_to(last_step)
    result = replica.result(failures)
    replica.diloco.close()
    return result


def listen_to_the_log() -> list[str]:
    """Return the list of this package's messages to come; waiting is logged after a second."""
    waits.FIRST_S = 1.0
    return lines_of_the_log()


def lines_of_the_log() -> list[str]:
    """Return the list of this package's messages to come."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("diloco_comm").addHandler(handler)
    waits.FIRST_S = 1.0
    return lines
