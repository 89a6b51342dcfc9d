"""Measure the link of a single port: against gloo, how long it takes to connect, and its rounds.

    python -m benchmarks.exchange.one_port against-gloo -g 2 --wire fp32,int8 -b 4M,64M
    sudo python -m benchmarks.exchange.netns --rate 32mbit --round-trip 80 \\
        --benchmark exchange.one_port -- times
    sudo python -m benchmarks.exchange.netns --rate 1mbit --round-trip 80 --queue 2 \\
        --benchmark exchange.one_port -- rounds --seconds 300 -b 4M

``against-gloo`` has an all-reduce over the link and over gloo in the same processes. Both have an
exchange of their own, and take turns: of each round the seconds on the slowest rank count, and the
seconds of the processor on all threads of all ranks. fp32 sends the most bytes, so there the two
ways differ most. Two exchanges over gloo that take turns show the noise (--noise).

``times`` lets two ranks begin each connection at the same moment, and the slower one counts. Rank 0
breaks the connections, and both ranks have seen that before they connect again. A small message
that goes to and fro while both ranks send bulk shows how long a vote waits behind payloads.

``rounds`` takes rounds over a link that is slow, but whole, until one fails: none should. Each of
two ranks is a replica of a job of its own, and sends fp32. A round of 4 MiB takes 34 s at 1 Mbit/s,
which is longer than the silence after which a replica counts as dead.
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
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support import common
from diloco_comm import DiLoCo, Link, StorePeers, SyncError
from diloco_comm.base.service.keys import LinkKeys, allow, make_pairs, remove
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.membership.own_link import Dial, OwnLink
from diloco_comm_tools.bench.exchange import Sampler
from diloco_comm_tools.bench.methods import DilocoAllReduce, source_of

T = TypeVar("T")

_BLOCK = 256
# Seconds until all ranks begin, and the most for which a rank waits.
_SOON_S, _LIMIT_S = 0.5, 60.0
_POLL_S = 0.002
_SMALL = 64
# Trips of a small message; the first ones find no bulk yet, and in the last one the bulk may end.
_TRIPS, _FIRST_TRIPS = 13, 2


def make_store(rank: int) -> dist.Store:
    """Host a store on rank 0; a collective call."""
    host, port = os.environ["MASTER_ADDR"], torch.zeros(1, dtype=torch.int64)
    store = None
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast(port, 0)
    return store or dist.TCPStore(host, int(port), timeout=timedelta(minutes=10))


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


# ---------------------------------------------------------------------- against gloo


class Counted(DilocoAllReduce):
    """An all-reduce whose seconds of the processor are counted, on all threads of this rank."""

    def __init__(self, exchange: Exchange, wire: str) -> None:
        super().__init__(exchange, wire, _BLOCK, torch.float32)
        self.seconds: list[float] = []

    def run(self) -> None:
        begin = time.process_time()
        super().run()
        self.seconds.append(time.process_time() - begin)

    def total_seconds(self, iters: int) -> list[float]:
        """Return the seconds of the processor of the last rounds, summed over the ranks."""
        total: Tensor = torch.tensor(self.seconds[-iters:], dtype=torch.float64)
        dist.all_reduce(total)
        return [float(one) for one in total]


def figures(tcp: list[float], gloo: list[float], sent: int) -> dict[str, Any]:
    """Summaries, the rate in GB/s that each rank sends at, and how the two compare in a round."""
    return {
        "tcp": common.summary(tcp),
        "gloo": common.summary(gloo),
        "tcp_gb_per_s": sent / common.summary(tcp)["median"] / 1e9,
        "rate_against_gloo": common.median_ratio(gloo, tcp),
    }


def measure(
    exchanges: list[Exchange], wire: str, num_bytes: int, repeats: int, iters: int
) -> dict[str, Any]:
    """Measure one size; a collective call."""
    methods = [Counted(exchange, wire) for exchange in exchanges]
    for method in methods:
        method.prepare(num_bytes // 4)
    source = source_of(dist.get_rank(), num_bytes // 4, torch.float32)
    gloo, tcp = Sampler().interleaved(methods, source, repeats, iters, 3)
    layout = methods[0].buffers.layout
    sent = layout.payload_bytes * (2 if dist.get_world_size() > 2 else 1)
    used = [method.total_seconds(iters * repeats) for method in methods]
    return {
        **figures(tcp, gloo, sent),
        "processor_against_gloo": common.median_ratio(used[1], used[0]),
        "processor_s_per_gb": sum(used[1]) / len(used[1]) / (sent * dist.get_world_size()) * 1e9,
    }


def against_gloo(args: argparse.Namespace, report: common.Report) -> dict[str, Any]:
    """Measure all wires and sizes, and print the table."""
    kinds = ("gloo", "gloo" if args.noise else "tcp")
    stack = ExitStack()
    keys = (
        stack.enter_context(folder_of_keys(dist.get_rank(), dist.get_world_size()))
        if args.keys
        else None
    )
    exchanges = [
        Exchange.from_group(
            None,
            lanes=args.lanes,
            timeout=120.0,
            collectives=kind,
            link_keys=keys if kind == "tcp" else None,
        )
        for kind in kinds
    ]
    report.print("#")
    report.print(
        f"#{'wire':>9} {'bytes':>11} {'gloo':>9} {kinds[1]:>9} {'rate':>7} {'CPU':>7}  (ms)"
        f" {'Mbit/s':>9}"
    )
    results = {}
    for wire in args.wire.split(","):
        for num_bytes in args.bytes or [1 << 20, 64 << 20]:
            found = measure(exchanges, wire, num_bytes, args.repeats, args.iters)
            results[f"{wire} {num_bytes}"] = found
            ms = " ".join(f"{1e3 * found[name]['median']:9.2f}" for name in ("gloo", "tcp"))
            ratios = f"{found['rate_against_gloo']:7.3f} {found['processor_against_gloo']:7.3f}"
            ratios += f"        {8e3 * found['tcp_gb_per_s']:8.1f}"
            report.print(f" {wire:>9} {num_bytes:>11} {ms} {ratios}")
    for exchange in exchanges:
        exchange.close()
    stack.close()
    return results


# ---------------------------------------------------------------------- times


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


def times(args: argparse.Namespace, report: common.Report) -> dict[str, Any]:
    """Take all times, and print the table."""
    rank = dist.get_rank()
    with folder_of_keys(rank, 2) as keys:
        found = {
            "without keys": connections(rank, None, args.samples),
            "with keys": connections(rank, keys, args.samples),
            "training": of_training(rank, args.samples),
            "urgent": urgent(rank, (args.bytes or [16 << 20])[0]),
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
    return results


# ---------------------------------------------------------------------- rounds


def rounds(args: argparse.Namespace, report: common.Report) -> dict[str, Any]:
    """Take rounds, and print how many there were."""
    rank, world, num_bytes = dist.get_rank(), dist.get_world_size(), (args.bytes or [4 << 20])[0]
    store = make_store(rank)
    model = torch.nn.Linear(num_bytes // 4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    diloco = DiLoCo(
        model,
        optimizer,
        sync_every=1,
        wire="fp32",
        peers=StorePeers(store, replica=rank, members=range(world)),
        link=Link("tcp", suspect_after=args.suspect_after, timeout=3600.0),
    )
    errors: list[str] = []
    seconds: list[float] = []
    end = time.monotonic() + args.seconds
    while not errors:
        # Rank 0 says whether one more round begins.
        if rank == 0:
            store.set(f"round/{len(seconds)}", "go" if time.monotonic() < end else "end")
        if store.get(f"round/{len(seconds)}") == b"end":
            break
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
        begin = time.monotonic()
        try:
            optimizer.step()
            seconds.append(time.monotonic() - begin)
        except SyncError as error:
            errors.append(f"rank {rank}: {error}")
            # The other rank may have applied the round, and asks for the next one.
            store.set(f"round/{len(seconds) + 1}", "end")
    diloco.close()
    told: list[list[str]] = [[] for _ in range(world)]
    dist.all_gather_object(told, errors)
    errors = [error for each in told for error in each]
    longest = max(seconds, default=0.0)
    report.print(f"# suspect_after {args.suspect_after:g} s, {num_bytes} bytes a round")
    report.print(f"rounds {len(seconds)}, longest {longest:.1f} s, errors {len(errors)}")
    for error in errors:
        report.print(f"# {error}")
    return {"rounds": len(seconds), "longest_s": longest, "errors": errors}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    measures = {"against-gloo": against_gloo, "times": times, "rounds": rounds}
    add("what", choices=list(measures))
    sizes = "comma list of fp32 bytes, of bytes of bulk, or of bytes of the parameters"
    add("-b", "--bytes", type=lambda t: [common.parse_size(n) for n in t.split(",")], help=sizes)
    add("-g", "--nprocs", type=int, default=2, help="local processes, against-gloo")
    add("-n", "--iters", type=int, default=15, help="samples, against-gloo")
    add("-r", "--repeats", type=int, default=4, help="rounds in a sample, against-gloo")
    add("--samples", type=int, default=5, help="of each connection, times")
    add("--seconds", type=float, default=300.0, help="no round begins later, rounds")
    add("--suspect-after", type=float, default=30.0, help="seconds of silence, rounds")
    add("--wire", default="fp32,int8", help="comma list of wire formats, against-gloo")
    add("--lanes", type=int, default=1, help="lanes of both, against-gloo")
    add("--link", default="loopback", help="what the link is, for the report")
    add("--keys", action="store_true", help="the link has keys, against-gloo")
    add("--noise", action="store_true", help="gloo in the place of the link, against-gloo")
    common.add_output(parser)
    args = parser.parse_args()
    timeout_s = 3600.0 if args.what == "rounds" else 120.0
    report = common.join_group(
        f"one_port {args.what}", args.nprocs, timeout_s=timeout_s, link=args.link
    )
    if report is None:
        return 0
    results = measures[args.what](args, report)
    common.finish(report, results, args.json)
    return int(bool(results.get("errors")))


if __name__ == "__main__":
    sys.exit(main())
