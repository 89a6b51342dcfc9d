"""Take rounds over a link which is slow, but whole, until one fails: none should.

    sudo python -m benchmarks.exchange.long_network --rate 1mbit --queue 2 \\
        --benchmark exchange.steady_rounds -- --seconds 300 -b 4M

Each rank is a replica of a job of its own, and sends fp32. A round of 4 MiB takes 34 s there, which
is longer than the silence after which a replica counts as dead.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.support import common
from diloco_comm import DiLoCo, Link, StorePeers, SyncError


def make_store(rank: int) -> dist.Store:
    """Host a store on rank 0; a collective call."""
    host, port = os.environ["MASTER_ADDR"], torch.zeros(1, dtype=torch.int64)
    store = None
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast(port, 0)
    return store or dist.TCPStore(host, int(port), timeout=timedelta(minutes=10))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-b", "--bytes", type=common.parse_size, default="4M", help="fp32 bytes of the parameters")
    add("--seconds", type=float, default=300.0, help="no round begins later")
    add("--suspect-after", type=float, default=30.0, help="seconds of silence")
    add("--link", default="loopback", help="what the link is, for the report")
    common.add_output(parser)
    args = parser.parse_args()
    if not common.is_worker():
        common.relaunch(2)
        return 0
    rank, world = common.init_workers(timeout_s=3600.0)
    store = make_store(rank)
    model = torch.nn.Linear(args.bytes // 4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    diloco = DiLoCo(
        model,
        optimizer,
        sync_every=1,
        wire="fp32",
        peers=StorePeers(store, replica=rank, members=range(world)),
        link=Link("tcp", suspect_after=args.suspect_after, timeout=3600.0),
    )
    report = common.Report("steady_rounds", quiet=rank != 0, workers=world, link=args.link)
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
    report.print(f"# suspect_after {args.suspect_after:g} s, {args.bytes} bytes a round")
    report.print(f"rounds {len(seconds)}, longest {longest:.1f} s, errors {len(errors)}")
    for error in errors:
        report.print(f"# {error}")
    results = {"rounds": len(seconds), "longest_s": longest, "errors": errors}
    common.finish(report, results, args.json)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
