"""Measure how long the link of a single port takes to connect, and how long votes wait for bulk.

    sudo python -m benchmarks.exchange.long_network --rate 32mbit --round-trip 80 \\
        --benchmark exchange.link_times

Two ranks begin each connection at the same moment, and the slower one counts. Rank 0 breaks the
connections, and both ranks have seen that before they connect again. A small message that goes to
and fro while both ranks send bulk shows how long a vote waits behind payloads.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from benchmarks.exchange.steady_rounds import make_store
from benchmarks.support import common
from diloco_comm import DiLoCo, Link, StorePeers
from diloco_comm.base.service.keys import LinkKeys, allow, make_pairs, remove
from diloco_comm.exchange.membership.own_link import Dial, OwnLink

T = TypeVar("T")

# Seconds until all ranks begin, and the most for which a rank waits.
_SOON_S, _LIMIT_S = 0.5, 60.0
_POLL_S = 0.002
_SMALL = 64
# Trips of a small message; the first ones find no bulk yet, and in the last one the bulk may end.
_TRIPS, _FIRST_TRIPS = 13, 2


def together() -> None:
    """Return at the same moment on all ranks, which are processes of one machine."""
    # One rank may have closed more slowly what it has measured before.
    dist.barrier()
    begin = torch.tensor([time.monotonic() + _SOON_S], dtype=torch.float64)
    dist.broadcast(begin, 0)
    left = begin.item() - time.monotonic()
    if left < 0:
        raise RuntimeError(f"this rank has heard of the beginning {-left:.1f} s too late")
    time.sleep(left)


def slowest(call: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of a call on the slowest rank, and its result; a collective call."""
    together()
    begin = time.monotonic()
    result = call()
    return common.slowest_of_ranks([time.monotonic() - begin])[0], result


def wait_until_closed(own: OwnLink) -> None:
    end = time.monotonic() + _LIMIT_S
    while own.counters()["open"] > 0:
        if time.monotonic() > end:
            raise TimeoutError(f"the connections have not ended within {_LIMIT_S:g} s")
        time.sleep(_POLL_S)


class Pair:
    """The links of both ranks; a context manager.

    Args:
        keys: The folder of this rank's keys; None without keys.
    """

    def __init__(self, rank: int, keys: Path | None) -> None:
        self.rank = rank
        self.own = OwnLink(None, None, None if keys is None else LinkKeys.read(keys))
        self.ways: list[dict[str, str]] = [{}, {}]
        dist.all_gather_object(self.ways, self.own.ways())
        self.groups: list[Any] = []

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.groups = []
        if error is None:
            dist.barrier()
        self.own.close()

    def connect(self, token: str) -> None:
        dial = Dial(self.own, token, [0, 1], self.ways)
        self.groups = dial.groups(self.rank, 1, _LIMIT_S, "the groups")

    def cut(self) -> None:
        """End the connections, as rank 0 sees them."""
        ports = {int(way["address"].rpartition(":")[2]) for way in self.ways}
        for connection in psutil.Process().net_connections("tcp") if self.rank == 0 else ():
            ends = {end.port for end in (connection.laddr, connection.raddr) if end}
            if connection.status == psutil.CONN_ESTABLISHED and ends & ports:
                with socket.socket(fileno=os.dup(connection.fd)) as one:
                    one.shutdown(socket.SHUT_RDWR)
        wait_until_closed(self.own)


@contextlib.contextmanager
def folder_of_keys(rank: int, world: int) -> Iterator[Path]:
    """Make keys for all ranks, which let each other in; a collective call."""
    with tempfile.TemporaryDirectory(prefix="diloco-keys-") as place:
        root = [place]
        dist.broadcast_object_list(root)
        folders = [Path(root[0]) / str(number) for number in range(world)]
        if rank == 0:
            for number, folder in enumerate(folders):
                make_pairs(folder, [f"r{number}"])
            public = [folder / f"r{number}.key" for number, folder in enumerate(folders)]
            for number, folder in enumerate(folders):
                allow(folder, [*public[:number], *public[number + 1 :]])
        dist.barrier()
        yield folders[rank]
        dist.barrier()


def connections(rank: int, keys: Path | None, samples: int) -> dict[str, list[float]]:
    """Return the seconds of a first connection, of a further group, and of a reconnection."""
    found: dict[str, list[float]] = {"first": [], "further group": [], "reconnect": []}
    for _ in range(samples):
        with Pair(rank, keys) as pair:
            found["first"].append(slowest(partial(pair.connect, "1"))[0])
            found["further group"].append(slowest(partial(pair.connect, "2"))[0])
            pair.cut()
            found["reconnect"].append(slowest(partial(pair.connect, "3"))[0])
    return found


def removals(rank: int, keys: Path, samples: int) -> list[float]:
    """Return the seconds after which the connections of a removed key have ended."""
    found = []
    for number in range(samples):
        with Pair(rank, keys) as pair:
            pair.connect("1")
            # The folder is looked at once a second: the removals are spread over that second.
            time.sleep(number / samples)

            def end(own: OwnLink = pair.own) -> None:
                if rank == 0:
                    remove(keys, "r1")
                wait_until_closed(own)

            found.append(slowest(end)[0])
        if rank == 0:
            allow(keys, [keys.parent / "1" / "r1.key"])
        dist.barrier()
    return found


def urgent(rank: int, num_bytes: int) -> dict[str, list[float]]:
    """Return the seconds of a small message to the other rank and back, alone and beside bulk."""
    found: dict[str, list[float]] = {}
    with Pair(rank, None) as pair:
        pair.connect("1")
        small, bulk = pair.groups
        own, theirs = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
        for name in ("alone", "beside bulk"):
            together()
            works: list[Any] = []
            if name == "beside bulk":
                works = [bulk.recv([theirs], 1 - rank, 0), bulk.send([own], 1 - rank, 0)]
            found[name] = _trips(small, rank, works)
            for work in works:
                work.wait()
    return found


def _trips(group: Any, rank: int, works: list[Any]) -> list[float]:
    """Send a small message to and fro until enough trips are made, or a work has ended."""
    word = torch.zeros(_SMALL, dtype=torch.uint8)
    found: list[float] = []
    while word[0] == 0:
        if rank == 0:
            is_last = len(found) + 1 == _TRIPS or any(work.is_completed() for work in works)
            word[0] = int(is_last)
        begin = time.monotonic()
        for step in [group.send, group.recv] if rank == 0 else [group.recv, group.send]:
            step([word], 1 - rank, 0).wait()
        found.append(time.monotonic() - begin)
    if len(found) <= _FIRST_TRIPS + 1:
        raise RuntimeError("the bulk has arrived too soon: give more --bytes")
    return found[_FIRST_TRIPS:-1]


def of_training(rank: int, samples: int) -> dict[str, list[float]]:
    """Return the seconds of ``DiLoCo`` and of ``change_group``: agreement, and connections."""
    found: dict[str, list[float]] = {"DiLoCo": [], "change_group": []}
    store = make_store(rank)
    for number in range(samples):
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        peers = StorePeers(store, replica=rank, members=[0, 1], name=str(number))
        make = partial(DiLoCo, model, optimizer, sync_every=1, peers=peers, link=Link("tcp"))
        seconds, diloco = slowest(make)
        with contextlib.closing(diloco):
            found["DiLoCo"].append(seconds)
            found["change_group"].append(slowest(partial(diloco.change_group, [0, 1]))[0])
            dist.barrier()
    # Rank 0 hosts the store.
    dist.barrier()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-n", "--samples", type=int, default=5, help="of each connection")
    add("-b", "--bytes", type=common.parse_size, default="16M", help="of bulk in each direction")
    add("--link", default="loopback", help="what the link is, for the report")
    common.add_output(parser)
    args = parser.parse_args()
    if not common.is_worker():
        common.relaunch(2)
        return 0
    rank, world = common.init_workers()
    report = common.Report("link_times", quiet=rank != 0, workers=world, link=args.link)
    with folder_of_keys(rank, world) as keys:
        found = {
            "without keys": connections(rank, None, args.samples),
            "with keys": connections(rank, keys, args.samples),
            "training": of_training(rank, args.samples),
            "urgent": urgent(rank, args.bytes),
            "key": {"removed": removals(rank, keys, args.samples)},
        }
    results = {
        kind: {name: common.summary(seconds) for name, seconds in rows.items()}
        for kind, rows in found.items()
    }
    report.print(f"#{'':>13} {'':>14} {'median':>8} {'longest':>8}  (s)")
    for kind, rows in found.items():
        for name, seconds in rows.items():
            median, longest = statistics.median(seconds), max(seconds)
            report.print(f" {kind:>13} {name:>14} {median:8.3f} {longest:8.3f}")
    common.finish(report, results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
