"""Measure a blocking outer step end to end: training with our DiLoCo against plain torch.

    python -m benchmarks.training.outer_step -g 2 --wire int8
    python -m benchmarks.training.outer_step -g 2 --memory

Two equal transformers of 25 million parameters train in the same processes, one under DiLoCo,
one under flat_baseline.py; rounds of H inner steps alternate. Blocked time is what the
training loop waits for at the end of a round. With --memory only ours runs, and the growth of the
peak resident set is divided by the size of the model.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.support import common
from benchmarks.training.flat_baseline import HONEST, FlatDiLoCo, RawParts, honesty

_VOCABULARY, _LAYERS = 12_288, 6


class Transformer(nn.Module):
    """A small language model of 73 tensors; width 512 makes 25.2 M parameters, 101 MB in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        layers = [
            nn.TransformerEncoderLayer(width, 8, 4 * width, **options) for _ in range(_LAYERS)
        ]
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden @ self.embedding.weight.t()

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Replica:
    """One model with its inner optimizer; a subclass says how it synchronises."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = Transformer(args.width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=True)
        self.tokens = torch.Generator().manual_seed(100 + dist.get_rank())

    def inner_step(self) -> None:
        tokens = torch.randint(_VOCABULARY, (1, 17), generator=self.tokens)
        self.optimizer.zero_grad(set_to_none=False)
        self.model.loss(tokens).backward()
        self.optimizer.step()

    def sync(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Leave the group."""


class FlatReplica(Replica):
    """The baseline."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.diloco = FlatDiLoCo(self.model.parameters())
        self.sync = self.diloco.sync  # type: ignore[method-assign]


class DilocoReplica(Replica):
    """Ours; the user calls `step` after each inner step, and the H-th of them synchronises."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.diloco = attach(self.model, self.optimizer, args)
        self.sync = self.diloco.step  # type: ignore[method-assign]

    def close(self) -> None:
        self.diloco.close()


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> Any:
    """Our DiLoCo with the outer optimizer of the baseline; `step` is called by hand."""
    from diloco_comm import DiLoCo, Link, Nesterov

    return DiLoCo(
        model,
        optimizer,
        sync_every=args.sync_every,
        outer=Nesterov(lr=0.7, momentum=0.9),
        wire=args.wire,
        link=Link(lanes=args.lanes),
        impl=args.impl,
        attach=False,
    )


def run_round(replica: Replica, sync_every: int) -> tuple[float, float]:
    """H inner steps and one sync; seconds blocked and CPU seconds of the whole process meanwhile.

    `step` calls that are not due count as blocked too.
    """
    blocked = cpu = 0.0
    for i in range(sync_every):
        replica.inner_step()
        last = i == sync_every - 1
        if last:
            dist.barrier()
        elif isinstance(replica, FlatReplica):
            continue
        begin, cpu_begin = time.perf_counter(), time.process_time()
        replica.sync()
        blocked += time.perf_counter() - begin
        cpu += time.process_time() - cpu_begin
    return blocked, cpu


def compare(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a round, slowest rank: blocked and CPU time of both, and torch's raw parts."""
    replicas: dict[str, Replica] = {"diloco": DilocoReplica(args), "flat": FlatReplica(args)}
    parts = RawParts(sum(p.numel() for p in replicas["flat"].model.parameters()))
    names = ("all_reduce", "sub", "foreach_sgd")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in replicas:
        seconds[name] = []
        seconds[f"{name}_cpu"] = []
    for i in range(args.warmup_iters + args.iters):
        times: dict[str, float] = {}
        for name, replica in replicas.items():
            times[name], times[f"{name}_cpu"] = run_round(replica, args.sync_every)
        for name in names:
            dist.barrier()
            begin = time.perf_counter()
            getattr(parts, name)()
            times[name] = time.perf_counter() - begin
        if i >= args.warmup_iters:
            for name, once in times.items():
                seconds[name].append(once)
    replicas["diloco"].close()
    return {name: common.slowest_of_ranks(times) for name, times in seconds.items()}


def report_comparison(report: common.Report, seconds: dict[str, list[float]]) -> dict[str, Any]:
    results: dict[str, Any] = {name: common.summary(times) for name, times in seconds.items()}
    report.print("#")
    report.print(f"#{'':>20} {'median':>9} {'p10':>9} {'p90':>9}   (ms a round)")
    for name, figures in results.items():
        row = [figures[key] * 1e3 for key in ("median", "p10", "p90")]
        report.print(f" {name:>20} {row[0]:9.2f} {row[1]:9.2f} {row[2]:9.2f}")
    results["blocked_ratio"] = common.median_ratio(seconds["flat"], seconds["diloco"])
    results["cpu_ratio"] = common.median_ratio(seconds["flat_cpu"], seconds["diloco_cpu"])
    results["honesty"] = honesty(seconds | {"sync": seconds["flat"]})
    report.print(f"# flat baseline blocks {results['blocked_ratio']:.2f} x as long as ours")
    report.print(f"# flat baseline uses {results['cpu_ratio']:.2f} x our CPU time")
    bound = f"(honest up to {HONEST})"
    report.print(f"# flat baseline over the sum of its parts: {results['honesty']:.2f} {bound}")
    return results


def measure_memory(args: argparse.Namespace) -> dict[str, float]:
    """Growth of the resident set by DiLoCo; see ``memory_growth``."""
    replica = Replica(args)
    steps = args.sync_every * (args.warmup_iters + args.iters)
    return memory_growth(
        replica.model, lambda: attach(replica.model, replica.optimizer, args), steps
    )


def memory_growth(model: nn.Module, open_method: Callable[[], Any], steps: int) -> dict[str, float]:
    """Growth of the resident set by a method, in sizes of the model, largest rank.

    The model and its gradients exist before; the inner steps in between change the parameters in
    place and allocate nothing, so that all growth is the method's and its group's.

    Args:
        open_method: Attaches the method; its ``step()`` ends each inner step, ``close()`` the run.
    """
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    model_bytes = sum(p.numel() * p.element_size() for p in parameters)
    dist.all_reduce(torch.zeros(1 << 20))
    gc.collect()
    # Writing 5 sets the peak back to the present resident set.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    method = open_method()
    for _ in range(steps):
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.999)
        method.step()
    growth = [resident_bytes() - before, resident_bytes(peak=True) - before]
    method.close()
    now, peak = (size / model_bytes for size in common.slowest_of_ranks(growth))
    return {"model_bytes": model_bytes, "resident_sizes": now, "peak_sizes": peak}


def resident_bytes(peak: bool = False) -> int:
    name = "VmHWM" if peak else "VmRSS"
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match.group(1)) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-g", "--nprocs", type=int, default=0, help="start this many local processes")
    common.add_rounds(parser)
    add("--wire", default="int8", help="wire format of ours; the baseline sends fp32")
    add("--lanes", type=int, default=1, help="process groups used in parallel")
    add("--impl", default="", help="force an implementation")
    add("--memory", action="store_true", help="measure memory instead of time")
    add("--link", default="loopback", help="what the link is, for the header")
    add("--drain", type=int, default=0, help="ignored: rounds are longer than a shaper's bucket")
    common.add_output(parser)
    args = parser.parse_args()
    if args.nprocs and not common.is_worker():
        common.relaunch(args.nprocs)
        return 0
    rank, world = common.init_workers()
    header = {"workers": world, "link": args.link, "wire": args.wire, "H": args.sync_every}
    report = common.Report("outer_step", quiet=rank != 0, **header)
    if args.memory:
        results: dict[str, Any] = measure_memory(args)
        report.print(f"# model {results['model_bytes'] / 1e6:.1f} MB")
        report.print(f"# extra memory: {results['peak_sizes']:.2f} model sizes at peak,")
        report.print(f"#               {results['resident_sizes']:.2f} between rounds")
    else:
        results = report_comparison(report, compare(args))
    common.finish(report, results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
