"""DiLoCo as a good engineer writes it with torch alone: the baseline of the outer-step benchmark.

    python -m benchmarks.training.flat_baseline -g 2 --size 101M

The script checks its own honesty: one sync takes at most 1.3 times the sum of the three
operations nobody can avoid in plain torch, timed in the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.support import common

HONEST = 1.3


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
    """Move all parameters into one tensor of which they become views."""
    flat = torch.empty(sum(p.numel() for p in parameters))
    begin = 0
    for parameter in parameters:
        view = flat[begin : begin + parameter.numel()].view_as(parameter)
        view.copy_(parameter)
        parameter.data = view
        begin += parameter.numel()
    return flat


class RawParts:
    """The unavoidable parts on buffers of the same size, each a function to be timed."""

    def __init__(self, num_elements: int) -> None:
        self.a, self.b, self.out = (torch.randn(num_elements) for _ in range(3))
        self.gradient = torch.zeros(num_elements)
        self.parameter = nn.Parameter(torch.randn(num_elements))
        self.parameter.grad = torch.randn(num_elements)
        options = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
        self.optimizer = torch.optim.SGD([self.parameter], foreach=True, **options)

    def sub(self) -> None:
        torch.sub(self.a, self.b, out=self.out)

    def all_reduce(self) -> None:
        dist.all_reduce(self.gradient)

    def foreach_sgd(self) -> None:
        self.optimizer.step()


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


def measure(num_elements: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the baseline's sync and of the raw parts, interleaved, slowest rank."""
    parameters = [nn.Parameter(torch.randn(num_elements // 4)) for _ in range(4)]
    baseline = FlatDiLoCo(parameters)
    parts = RawParts(num_elements)
    functions = {
        "sync": baseline.sync,
        "all_reduce": parts.all_reduce,
        "sub": parts.sub,
        "foreach_sgd": parts.foreach_sgd,
    }

    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(rounds + 2):
        for name, function in functions.items():
            dist.barrier()
            begin = time.perf_counter()
            function()
            if i >= 2:
                seconds[name].append(time.perf_counter() - begin)
    return {name: common.slowest_of_ranks(times) for name, times in seconds.items()}


def honesty(seconds: dict[str, list[float]]) -> float:
    """The baseline's time over the sum of its unavoidable parts, median of the rounds."""
    parts = zip(seconds["all_reduce"], seconds["sub"], seconds["foreach_sgd"], strict=True)
    return common.median_ratio(seconds["sync"], [sum(part) for part in parts])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-g", "--nprocs", type=int, default=0, help="start this many local processes")
    add("-n", "--iters", type=int, default=9, help="rounds measured")
    add("-c", "--check", type=int, default=0, help="1: compare with the equations in fp64 first")
    add("--size", type=common.parse_size, default="101M", help="fp32 bytes of the model")
    common.add_output(parser)
    args = parser.parse_args()
    if args.nprocs and not common.is_worker():
        common.relaunch(args.nprocs)
        return 0
    rank, world = common.init_workers()
    report = common.Report("flat_baseline", quiet=rank != 0, workers=world, link="loopback")
    if args.check:
        report.print(f"# out of bounds values: {check(100_003)}")
    seconds = measure(args.size // 4, args.iters)
    results = {name: common.summary(times) for name, times in seconds.items()}
    for name, figures in results.items():
        report.print(f"{name:>12} {figures['median'] * 1e3:9.2f} ms")
    ratio = honesty(seconds)
    report.print(f"# sync over the sum of its parts: {ratio:.2f} (honest up to {HONEST})")
    common.finish(report, results | {"honesty": ratio}, args.json)
    return 0 if ratio <= HONEST else 1


if __name__ == "__main__":
    sys.exit(main())
