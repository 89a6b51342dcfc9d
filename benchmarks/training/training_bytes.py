"""Count the bytes that training sends: DDP, which communicates every step, against DiLoCo.

    python -m benchmarks.exchange.private_loopback \
        python -m benchmarks.training.training_bytes -g 2 --sync-every 50

The kernel's counter of the network interface is read, so headers, acknowledgements and votes are
in the figure. Start-up (the first broadcast of the weights) is not.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.support import common
from benchmarks.support.interface import transmitted_bytes


def make_model() -> nn.Sequential:
    """1.05 M parameters, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> int:
    """Bytes that all interfaces' counters grew by; the same on every rank with one loopback."""
    dist.barrier()
    before = transmitted_bytes()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 512)).square().mean().backward()
        optimizer.step()
    dist.barrier()
    return transmitted_bytes() - before


def train_ddp(args: argparse.Namespace) -> int:
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return train(model, optimizer, args.sync_every * args.rounds)


def train_diloco(args: argparse.Namespace) -> int:
    from diloco_comm import DiLoCo

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with DiLoCo(model, optimizer, sync_every=args.sync_every, wire=args.wire) as diloco:
        sent = train(model, optimizer, args.sync_every * args.rounds)
        syncs = len(diloco.metrics())
    if syncs != args.rounds:
        raise RuntimeError(f"{syncs} syncs instead of {args.rounds}")
    return sent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-g", "--nprocs", type=int, default=0, help="start this many local processes")
    add("--sync-every", type=int, default=50, help="inner steps a round (H)")
    add("--rounds", type=int, default=1, help="rounds of DiLoCo; DDP takes as many steps")
    add("--wire", default="int8", help="wire format of DiLoCo")
    common.add_output(parser)
    args = parser.parse_args()
    if args.nprocs and not common.is_worker():
        common.relaunch(args.nprocs)
        return 0
    rank, world = common.init_workers()
    header: dict[str, Any] = {"workers": world, "wire": args.wire, "H": args.sync_every}
    report = common.Report("training_bytes", quiet=rank != 0, **header)
    torch.manual_seed(rank)
    results: dict[str, float] = {"ddp": train_ddp(args), "diloco": train_diloco(args)}
    results["ratio"] = results["ddp"] / results["diloco"]
    for name in ("ddp", "diloco"):
        report.print(f" {name:>8} {results[name]:>14.0f} bytes on the interface")
    report.print(f"# DDP sends {results['ratio']:.1f} x the bytes of DiLoCo")
    common.finish(report, results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
