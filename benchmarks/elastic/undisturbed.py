"""What elastic membership costs while nobody comes or goes: the same rounds with and without.

    python -m benchmarks.elastic.undisturbed -g 2

Two equal transformers of 25 million parameters train in the same processes, one in a fixed group,
one with elastic membership and a registry in a process of its own; their rounds alternate, and the
order changes from round to round. Blocked time is what the training loop waits for in ``step()``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.support import common
from benchmarks.training.outer_step import Replica, run_round
from diloco_comm import DiLoCo, Elastic, Nesterov
from diloco_comm.elastic.registry.server import RegistryServer


class DilocoReplica(Replica):
    """A replica whose ``step`` is called by hand, as bar 16 has it.

    Args:
        membership: None for the fixed group of all processes.
    """

    def __init__(self, args: argparse.Namespace, membership: Elastic | None) -> None:
        super().__init__(args)
        self.diloco = DiLoCo(
            self.model,
            self.optimizer,
            sync_every=args.sync_every,
            outer=Nesterov(lr=0.7, momentum=0.9),
            wire=args.wire,
            peers=membership,
            attach=False,
        )
        self.sync = self.diloco.step  # type: ignore[method-assign]

    def close(self) -> None:
        self.diloco.close()


def _serve(pipe: Connection, folder: Path) -> None:
    server = RegistryServer("tcp://127.0.0.1:0", journal=folder)
    pipe.send(server.address)
    server.serve()


@contextmanager
def registry_of_rank_0() -> Iterator[str]:
    """Start a registry beside rank 0 and tell its address to all ranks."""
    address: list[Any] = [None]
    with tempfile.TemporaryDirectory(prefix="diloco-undisturbed-") as folder:
        process = None
        if dist.get_rank() == 0:
            spawn = multiprocessing.get_context("spawn")
            ours, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(target=_serve, args=(theirs, Path(folder)), daemon=True)
            process.start()
            address = [ours.recv()]
        dist.broadcast_object_list(address)
        try:
            yield address[0]
        finally:
            if process is not None:
                process.kill()
                process.join()


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a round, slowest rank: blocked and processor time, in a fixed group and elastic."""
    with registry_of_rank_0() as registry:
        rank, world = dist.get_rank(), dist.get_world_size()
        membership = Elastic(registry, run="undisturbed", replica=rank, min_replicas=world)
        replicas = {
            "fixed": DilocoReplica(args, None),
            "elastic": DilocoReplica(args, membership),
        }
        names = list(replicas)
        seconds: dict[str, list[float]] = {}
        for i in range(args.warmup_iters + args.iters):
            for name in names if i % 2 else reversed(names):
                blocked, cpu = run_round(replicas[name], args.sync_every)
                if i >= args.warmup_iters:
                    seconds.setdefault(name, []).append(blocked)
                    seconds.setdefault(f"{name}_cpu", []).append(cpu)
        dist.barrier()
        for replica in replicas.values():
            replica.close()
    return {name: common.slowest_of_ranks(times) for name, times in sorted(seconds.items())}


def report_seconds(report: common.Report, seconds: dict[str, list[float]]) -> dict[str, Any]:
    results: dict[str, Any] = {name: common.summary(times) for name, times in seconds.items()}
    report.print(f"#{'':>14} {'median':>9} {'p10':>9} {'p90':>9}   (ms a round)")
    for name, figures in results.items():
        row = [figures[key] * 1e3 for key in ("median", "p10", "p90")]
        report.print(f" {name:>14} {row[0]:9.2f} {row[1]:9.2f} {row[2]:9.2f}")
    for kind, suffix in (("blocked", ""), ("cpu", "_cpu")):
        ratio = common.median_ratio(seconds[f"elastic{suffix}"], seconds[f"fixed{suffix}"])
        results[f"{kind}_ratio"] = ratio
    report.print(f"# elastic blocks {results['blocked_ratio']:.3f} x as long as a fixed group")
    report.print(f"# elastic uses {results['cpu_ratio']:.3f} x its processor time")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-g", "--nprocs", type=int, default=2, help="local processes")
    common.add_rounds(parser)
    parser.add_argument("--wire", default="int8", help="wire format")
    common.add_output(parser)
    args = parser.parse_args()
    if not common.is_worker():
        common.relaunch(args.nprocs)
        return 0
    rank, world = common.init_workers()
    header = {"workers": world, "link": "loopback", "wire": args.wire, "H": args.sync_every}
    report = common.Report("elastic.undisturbed", quiet=rank != 0, **header)
    common.finish(report, report_seconds(report, measure(args)), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
