"""Measure what the hooks of DiLoCo add to an optimizer's step that sends nothing.

    python tests/support/quality/hook_time.py [--tensors 300] [--blocks 20]

One replica alone; blocks of steps with and without DiLoCo take turns. The steps themselves do
nothing, so that a busy machine delays little: the figures are without the misses of a cache that
training has filled. Printed are the median and the quartiles, over the pairs of blocks, of the
difference of their median steps.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from diloco_comm import DiLoCo

# The state of one parameter.
STATES = {
    "SGD": lambda param: {},
    "momentum": lambda param: {"momentum_buffer": torch.zeros_like(param)},
    "Adam": lambda param: {"step": torch.zeros(()), "exp_avg": torch.zeros_like(param)},
}


class Still(torch.optim.Optimizer):
    """An optimizer whose step does nothing."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass


def median_step(optimizer: torch.optim.Optimizer, num_steps: int) -> float:
    """Return the median time of a step in seconds."""
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def added(name: str, checks: str, options: argparse.Namespace) -> list[float]:
    """Return the quartiles of the added time in microseconds."""
    model = torch.nn.ParameterList(torch.randn(8) for _ in range(options.tensors))
    optimizer = Still(model.parameters(), {})
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
        state: dict[str, Tensor] = STATES[name](param)
        if state:
            optimizer.state[param] = state
    differences = []
    for _ in range(options.blocks):
        attached = DiLoCo(model, optimizer, sync_every=10**6, peers="alone", checks=checks)
        with attached:
            median_step(optimizer, 5)
            with_hooks = median_step(optimizer, options.steps)
        differences.append(1e6 * (with_hooks - median_step(optimizer, options.steps)))
    return statistics.quantiles(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    for name in STATES:
        for checks in ("raise", "off"):
            low, middle, high = (f"{one:6.1f}" for one in added(name, checks, options))
            print(f"{name:<9} checks={checks:<6} {middle} us ({low} to {high})", flush=True)


if __name__ == "__main__":
    main()
