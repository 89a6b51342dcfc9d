"""How a replica of a test of agreement ended: what it saw, and with whom it went on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_replicas import Failure, Replica, Result
from workers import Pool

H = 4
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
