"""Measure the rate of copies of the state to a replica that joins, and what they cost the rounds.

    sudo python -m benchmarks.elastic.state_copies --rate 100 --duty 0.5

Two donors and a newcomer have a network namespace each, whose link has a rate in both directions.
The donors exchange rounds over their links without an end. In every second window the newcomer
copies their state, in the way of a replica that joins. The windows without copies are the ground
to compare with.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.exchange.netns import Network, missing
from benchmarks.support import common
from benchmarks.support.common import benchmark_command, stoppable
from benchmarks.support.namespaces import address
from diloco_comm import _C, WireFormat
from diloco_comm.elastic.transfer.newcomer import Newcomer
from diloco_comm.group.beats import Way
from diloco_comm.methods.outer import Nesterov
from diloco_comm.replica.fragments import make_fragments, trainable_parameters
from diloco_comm.rounds import history
from diloco_comm.rounds.part import SyncedFragment
from diloco_comm.rounds.round_log import Standing, state_tensors

DONORS, SERVICE = 2, "state"


def make_parts(num_elements: int) -> list[SyncedFragment]:
    """Return one fragment with the momentum of Nesterov: 8 bytes an element."""
    model = nn.Linear(num_elements, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fragments = make_fragments(model, trainable_parameters(model, [optimizer]), 1)
    wire = WireFormat("fp32")
    parts = [SyncedFragment(one, Nesterov(), wire, False, carries=False) for one in fragments]
    for part in parts:
        part.read_local()
        history.begin(part, is_shared=True)
    return parts


class Windows:
    """The time in windows; copies travel in every second one."""

    def __init__(self, begin: float, seconds: float, count: int) -> None:
        self._begin, self._seconds, self.count = begin, seconds, count

    def at(self, now: float) -> int:
        return int((now - self._begin) // self._seconds)

    @property
    def now(self) -> int:
        return self.at(time.monotonic())


def give(args: argparse.Namespace, rank: int, link: Any, ways: list[Any], windows: Windows) -> Any:
    """Exchange rounds with the other donor; return the seconds of each, by kind of window."""
    source = _C.StateSource([state_tensors(part) for part in args.parts])
    source.open([Standing.of(part).numbers() for part in args.parts])
    link.serve(SERVICE, source)
    groups = link.groups("rounds", rank, ways[:DONORS], 1, 60.0)
    sent = torch.zeros(args.round_bytes, dtype=torch.uint8)
    received = torch.zeros_like(sent)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    pause_s, tag = 0.0, 0
    while windows.now < windows.count:
        begin, tag = time.monotonic(), tag + 1
        works = [groups[0].recv([received], 1 - rank, tag), groups[0].send([sent], 1 - rank, tag)]
        for work in works:
            work.wait()
        end = time.monotonic()
        window = windows.at(begin)
        if window == windows.at(end) and window > 0:
            seconds["with" if window % 2 else "without"].append(end - begin)
        if not pause_s:
            pause_s = (end - begin) * (1 / args.duty - 1)
        time.sleep(pause_s)
    source.close()
    return seconds


def take(args: argparse.Namespace, link: Any, ways: list[Any], windows: Windows) -> Any:
    """Copy in every second window; return the bytes a second of each."""
    donors = {f"{rank}": Way(*ways[rank]) for rank in range(DONORS)}
    rates = []
    while (window := windows.now) < windows.count:
        if window % 2 == 0:
            time.sleep(0.01)
            continue
        limit = args.join_bandwidth or None
        newcomer = Newcomer(link, SERVICE, args.parts, lambda: donors, limit)
        begin = time.monotonic()
        while windows.now == window:
            newcomer.turn(0.02)
        rates.append(newcomer.received_bytes / (time.monotonic() - begin))
        newcomer.close()
    return rates


def worker(args: argparse.Namespace) -> None:
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(address(0), 29501, is_master=rank == 0, timeout=timedelta(seconds=60))
    args.parts = make_parts(args.elements)
    link = _C.Link(f"{address(rank)}:0", f"{address(rank)}:0")
    store.set(f"way{rank}", f"{link.nonce} {link.address}")
    ways = [(*store.get(f"way{r}").decode().split(), "", "") for r in range(DONORS + 1)]
    if rank == 0:
        store.set("begin", str(time.monotonic() + 1.0))
    windows = Windows(float(store.get("begin")), args.window, args.windows)
    done = (
        give(args, rank, link, ways, windows) if rank < DONORS else take(args, link, ways, windows)
    )
    if rank > 0:
        store.set(f"done{rank}", repr(done))
        store.wait(["printed"])
    else:
        report(args, done, [eval(store.get(f"done{r}")) for r in range(1, DONORS + 1)])
        store.set("printed", "")
        time.sleep(0.5)
    link.close()


def report(args: argparse.Namespace, own: Any, others: list[Any]) -> None:
    """Print and save the figures."""
    rounds = {kind: own[kind] + others[0][kind] for kind in own}
    means = {kind: statistics.fmean(seconds) for kind, seconds in rounds.items()}
    rates = others[-1]
    found = {
        "rounds": {kind: len(seconds) for kind, seconds in rounds.items()},
        "round_s": means,
        "slowdown": means["with"] / means["without"] - 1,
        "copied_bytes_per_s": statistics.median(rates),
    }
    kept = common.Report("state copies", link=args.link)
    kept.print(
        f"duty {args.duty:g}, join_bandwidth {args.join_bandwidth or 'none'}: "
        f"round {1e3 * means['without']:.1f} ms, with copies {1e3 * means['with']:.1f} ms "
        f"({100 * found['slowdown']:+.1f} %), copies {found['copied_bytes_per_s'] / 1e6:.2f} MB/s"
    )
    common.save(kept, args.json, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rate", type=float, default=100.0, help="Mbit/s of each link")
    add("--duty", type=float, default=0.5, help="part of the time in which rounds send")
    add("--join-bandwidth", type=float, default=0.0, help="bytes a second; 0: no limit")
    add("--round-bytes", type=int, default=4 << 20, help="bytes of a round")
    add("--elements", type=int, default=1 << 24, help="parameters")
    add("--window", type=float, default=8.0, help="seconds of a window")
    add("--windows", type=int, default=9, help="windows; the first one does not count")
    add("--link", default="", help=argparse.SUPPRESS)
    add("--drain", default="", help=argparse.SUPPRESS)
    common.add_output(parser)
    args = parser.parse_args()
    if args.link:
        worker(args)
        return 0
    if reason := missing():
        print(f"# skipped: {reason}")
        return 0
    with stoppable(), Network(DONORS + 1, args.rate) as network:
        network.run(benchmark_command("elastic.state_copies", *sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
