"""Measure a blocking outer step end to end: what a training loop waits for, and memory.

    python -m benchmarks.training.outer_step -g 2 --wire int8
    python -m benchmarks.training.outer_step -g 2 --elastic
    python -m benchmarks.training.outer_step -g 2 --memory

Two equal transformers of 25 million parameters train in the same processes, one under DiLoCo, and
one under DiLoCo as a good engineer writes it with torch alone (``FlatDiLoCo``); rounds of H inner
steps alternate. Blocked time is what the training loop waits for at the end of a round. The
baseline's honesty is checked: one sync takes at most 1.3 times the sum of the three operations
nobody can avoid in plain torch, timed in the same run. With --elastic, DiLoCo in a fixed group
alternates with DiLoCo under elastic membership, whose registry is a process of its own, while
nobody comes or goes. With --memory only ours runs, and the growth of the peak resident set is
divided by the size of the model.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.support import common

HONEST = 1.3
_VOCABULARY, _LAYERS = 12_288, 6


class FlatDiLoCo:
    """Blocking DiLoCo over one gloo all_reduce in fp32; every state is one flat buffer.

    The parameters become views of one flat tensor, as DDP buckets and ZeRO do it, so that the
    pseudo-gradient is one subtraction and the write-back one copy. The outer optimizer is torch's
    own Nesterov SGD over the flat outer parameters.

    Args:
        parameters: fp32 parameters of the model; their storage is replaced.
        lr: Learning rate of the outer optimizer.
        momentum: Its Nesterov momentum.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        self.local = _flatten(list(parameters))
        self.outer = nn.Parameter(self.local.clone())
        self.outer.grad = torch.zeros_like(self.outer)
        options = {"lr": lr, "momentum": momentum, "nesterov": True}
        self.optimizer = torch.optim.SGD([self.outer], fused=True, **options)
        self.world = dist.get_world_size()

    @torch.no_grad()
    def sync(self) -> None:
        """Average the pseudo-gradients, take the outer step, write the parameters."""
        gradient = self.outer.grad
        assert gradient is not None
        torch.sub(self.outer, self.local, out=gradient)
        dist.all_reduce(gradient)
        gradient.div_(self.world)
        self.optimizer.step()
        self.local.copy_(self.outer)


@torch.no_grad()
def _flatten(parameters: list[nn.Parameter]) -> Tensor:
    """Move all parameters into one tensor, whose views they become."""
    flat = torch.empty(sum(p.numel() for p in parameters))
    begin = 0
    for parameter in parameters:
        view = flat[begin : begin + parameter.numel()].view_as(parameter)
        view.copy_(parameter)
        parameter.data = view
        begin += parameter.numel()
    return flat


def raw_parts(num_elements: int) -> dict[str, Callable[[], object]]:
    """Return the unavoidable parts of a sync, on buffers of the same size."""
    a, b, out = (torch.randn(num_elements) for _ in range(3))
    gradient = torch.zeros(num_elements)
    parameter = nn.Parameter(torch.randn(num_elements))
    parameter.grad = torch.randn(num_elements)
    options = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    optimizer = torch.optim.SGD([parameter], foreach=True, **options)
    return {
        "all_reduce": lambda: dist.all_reduce(gradient),
        "sub": lambda: torch.sub(a, b, out=out),
        "foreach_sgd": optimizer.step,
    }


def honesty(seconds: dict[str, list[float]]) -> float:
    """The baseline's time over the sum of its unavoidable parts, median of the rounds."""
    parts = zip(seconds["all_reduce"], seconds["sub"], seconds["foreach_sgd"], strict=True)
    return common.median_ratio(seconds["flat"], [sum(part) for part in parts])


def check(num_elements: int) -> int:
    """Elements in which three syncs differ from DiLoCo's equations computed in fp64."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    sizes = (num_elements // 3, num_elements - num_elements // 3)
    parameters = [nn.Parameter(torch.randn(n, generator=generator)) for n in sizes]
    baseline = FlatDiLoCo(parameters, lr=0.7, momentum=0.9)
    outer = torch.cat([p.detach() for p in parameters]).double()
    momentum = torch.zeros_like(outer)
    for _ in range(3):
        steps = torch.randn(world, num_elements, generator=generator)
        for parameter, step in zip(parameters, steps[rank].split(sizes), strict=True):
            parameter.data += step
        baseline.sync()
        gradient = -steps.double().mean(0)
        momentum = 0.9 * momentum + gradient
        outer -= 0.7 * (gradient + 0.9 * momentum)
    result = torch.cat([p.detach() for p in parameters]).double()
    # Some twenty fp32 roundings of values of magnitude below 64.
    return int(((result - outer).abs() > 20 * 64 * 2.0**-24).sum())


# ------------------------------------------------------------------------------------ training


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
    """One model with its inner optimizer.

    Attributes:
        sync: The call of a user after an inner step, or after the last one of a round.
        syncs_each_step: Whether that is after each inner step.
    """

    syncs_each_step = True

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = Transformer(args.width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=True)
        self.tokens = torch.Generator().manual_seed(100 + dist.get_rank())
        self.sync: Callable[[], object] = lambda: None
        self.close: Callable[[], object] = lambda: None

    def inner_step(self) -> None:
        tokens = torch.randint(_VOCABULARY, (1, 17), generator=self.tokens)
        self.optimizer.zero_grad(set_to_none=False)
        self.model.loss(tokens).backward()
        self.optimizer.step()


def flat_replica(args: argparse.Namespace) -> Replica:
    """Return a replica under the baseline."""
    replica = Replica(args)
    replica.sync, replica.syncs_each_step = FlatDiLoCo(replica.model.parameters()).sync, False
    return replica


def diloco_replica(args: argparse.Namespace, **options: Any) -> Replica:
    """Return a replica under ours."""
    replica = Replica(args)
    diloco = attach(replica.model, replica.optimizer, args, **options)
    replica.sync, replica.close = diloco.step, diloco.close
    return replica


def attach(
    model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, **options: Any
) -> Any:
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
        **options,
    )


def run_round(replica: Replica, sync_every: int) -> tuple[float, float]:
    """H inner steps and one sync; seconds blocked and CPU seconds of the whole process meanwhile.

    `step` calls that are not due count as blocked too.
    """
    blocked = cpu = 0.0
    for i in range(sync_every):
        replica.inner_step()
        if i == sync_every - 1:
            dist.barrier()
        elif not replica.syncs_each_step:
            continue
        begin, cpu_begin = time.perf_counter(), time.process_time()
        replica.sync()
        blocked += time.perf_counter() - begin
        cpu += time.process_time() - cpu_begin
    return blocked, cpu


def in_turns(
    args: argparse.Namespace,
    replicas: Mapping[str, Replica],
    parts: Mapping[str, Callable[[], object]],
) -> dict[str, list[float]]:
    """Seconds a round, slowest rank: blocked and CPU time of all replicas, and of the parts.

    The order of the replicas changes from round to round.
    """
    seconds: dict[str, list[float]] = {}
    for i in range(args.warmup_iters + args.iters):
        times: dict[str, float] = {}
        for name in replicas if i % 2 else reversed(replicas):
            times[name], times[f"{name}_cpu"] = run_round(replicas[name], args.sync_every)
        for name, part in parts.items():
            dist.barrier()
            begin = time.perf_counter()
            part()
            times[name] = time.perf_counter() - begin
        if i >= args.warmup_iters:
            for name in sorted(times):
                seconds.setdefault(name, []).append(times[name])
    dist.barrier()
    for replica in replicas.values():
        replica.close()
    return {name: common.slowest_of_ranks(times) for name, times in seconds.items()}


def compare(
    args: argparse.Namespace, report: common.Report, slow: str, fast: str
) -> dict[str, Any]:
    """Let two replicas train in turns, and print the table."""
    with registry_of_rank_0() if args.elastic else nullcontext() as peers:
        if args.elastic:
            replicas = {fast: diloco_replica(args), slow: diloco_replica(args, peers=peers)}
            parts = {}
        else:
            replicas = {fast: diloco_replica(args), slow: flat_replica(args)}
            parts = raw_parts(sum(p.numel() for p in replicas[slow].model.parameters()))
        seconds = in_turns(args, replicas, parts)
    results: dict[str, Any] = {name: common.summary(times) for name, times in seconds.items()}
    report.print("#")
    report.print(f"#{'':>20} {'median':>9} {'p10':>9} {'p90':>9}   (ms a round)")
    for name, figures in results.items():
        row = [figures[key] * 1e3 for key in ("median", "p10", "p90")]
        report.print(f" {name:>20} {row[0]:9.2f} {row[1]:9.2f} {row[2]:9.2f}")
    for kind, suffix in (("blocked", ""), ("cpu", "_cpu")):
        ratio = common.median_ratio(seconds[f"{slow}{suffix}"], seconds[f"{fast}{suffix}"])
        results[f"{kind}_ratio"] = ratio
    report.print(f"# {slow} blocks {results['blocked_ratio']:.3f} x as long as {fast}")
    report.print(f"# {slow} uses {results['cpu_ratio']:.3f} x its CPU time")
    if parts:
        results["honesty"] = honesty(seconds)
        bound = f"(honest up to {HONEST})"
        report.print(f"# flat over the sum of its parts: {results['honesty']:.2f} {bound}")
    return results


# ------------------------------------------------------------------------- elastic membership


def _serve(pipe: Connection, folder: Path) -> None:
    from diloco_comm.elastic.registry.server import RegistryServer

    server = RegistryServer("tcp://127.0.0.1:0", journal=folder)
    pipe.send(server.address)
    server.serve()


@contextmanager
def registry_of_rank_0() -> Iterator[Any]:
    """Start a registry beside rank 0; yield what each rank gives to DiLoCo as its peers."""
    from diloco_comm import Elastic

    rank, world = dist.get_rank(), dist.get_world_size()
    address: list[Any] = [None]
    with tempfile.TemporaryDirectory(prefix="diloco-undisturbed-") as folder:
        process = None
        if rank == 0:
            spawn = multiprocessing.get_context("spawn")
            ours, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(target=_serve, args=(theirs, Path(folder)), daemon=True)
            process.start()
            address = [ours.recv()]
        dist.broadcast_object_list(address)
        try:
            yield Elastic(address[0], run="undisturbed", replica=rank, min_replicas=world)
        finally:
            if process is not None:
                process.kill()
                process.join()


# -------------------------------------------------------------------------------------- memory


def measure_memory(args: argparse.Namespace, report: common.Report) -> dict[str, float]:
    """Growth of the resident set by DiLoCo; see ``memory_growth``."""
    replica = Replica(args)
    steps = args.sync_every * (args.warmup_iters + args.iters)
    results = memory_growth(
        replica.model, lambda: attach(replica.model, replica.optimizer, args), steps
    )
    report.print(f"# model {results['model_bytes'] / 1e6:.1f} MB")
    report.print(f"# extra memory: {results['peak_sizes']:.2f} model sizes at peak,")
    report.print(f"#               {results['resident_sizes']:.2f} between rounds")
    return results


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
    growth = [resident_bytes() - before, resident_bytes("VmHWM") - before]
    method.close()
    now, peak = (size / model_bytes for size in common.slowest_of_ranks(growth))
    return {"model_bytes": model_bytes, "resident_sizes": now, "peak_sizes": peak}


def resident_bytes(name: str = "VmRSS", pid: int | str = "self") -> int:
    """Return a line of /proc/PID/status in bytes: VmRSS, or VmHWM for the peak."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match.group(1)) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-g", "--nprocs", type=int, default=0, help="start this many local processes")
    common.add_rounds(parser)
    add("-c", "--check", type=int, default=0, help="1: compare the baseline with the equations")
    add("--wire", default="int8", help="wire format of ours; the baseline sends fp32")
    add("--lanes", type=int, default=1, help="process groups used in parallel")
    add("--impl", default="", help="force an implementation")
    add("--elastic", action="store_true", help="elastic membership against a fixed group")
    add("--memory", action="store_true", help="measure memory instead of time")
    add("--link", default="loopback", help="what the link is, for the header")
    add("--drain", type=int, default=0, help="ignored: rounds are longer than a shaper's bucket")
    common.add_output(parser)
    args = parser.parse_args()
    header = {"link": args.link, "wire": args.wire, "H": args.sync_every}
    report = common.join_group("outer_step", args.nprocs, **header)
    if report is None:
        return 0
    if args.check:
        report.print(f"# out of bounds values: {check(100_003)}")
    if args.memory:
        results: dict[str, Any] = measure_memory(args, report)
    else:
        pair = ("elastic", "fixed") if args.elastic else ("flat", "diloco")
        results = compare(args, report, *pair)
    common.finish(report, results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
