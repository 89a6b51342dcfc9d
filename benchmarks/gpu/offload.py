"""Keep outer state in page-locked host memory at a real size: the bits, the time and the memory.

    python -m benchmarks.gpu.offload [--device cuda] [--size 2G] [--impl cuda,triton]

One replica takes the same steps with its outer state on the device and with ``offload="cpu"``.
Status 1 if a bit of its parameters or of its outer model differs.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support import common
from diloco_comm import DiLoCo, Nesterov
from diloco_comm.ops.digests import digest_of

NUM_TENSORS = 16
SYNC_EVERY = 4
NUM_STEPS = 3 * SYNC_EVERY
UNITS = (("longest", 1e3), ("peak", 2.0**-30))  # of the figures that are printed


def train(device: torch.device, num_elements: int, offload: str | None) -> dict[str, Any]:
    """Take the steps; digests, the longest step in seconds, and bytes on the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rng = torch.Generator(device).manual_seed(1)
    size = num_elements // NUM_TENSORS - 3  # so that tensors begin anywhere in a run
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.randn(size, generator=rng, device=device))
        for _ in range(NUM_TENSORS)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    options: dict[str, Any] = {"sync_every": SYNC_EVERY, "wire": "int8", "offload": offload}
    seconds = []
    with DiLoCo(model, optimizer, outer=Nesterov(lr=0.7, momentum=0.9), **options) as diloco:
        for step in range(NUM_STEPS):
            for parameter in model:
                parameter.grad = parameter.detach() * (1.0 + step)
            synchronize(device)
            begin = time.perf_counter()
            optimizer.step()
            synchronize(device)
            seconds.append(time.perf_counter() - begin)
            optimizer.zero_grad(set_to_none=True)
        diloco.flush()
        digests = [digest_of([parameter.detach()]) for parameter in model]
        outer = diloco.outer_hash()
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"digests": digests, "outer": outer, "longest": max(seconds[SYNC_EVERY:]), "peak": peak}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda", help="cuda (default) or cpu, where nothing is offloaded")
    add("--size", type=common.parse_size, default=2 << 30, help="bytes of fp32 parameters (2G)")
    add("--impl", default="", help="comma list (default: all that run there)")
    args = parser.parse_args()
    common.check_device(parser, args.device)
    device = torch.device(args.device)
    impls = common.parse_impls(parser, args.impl, args.device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    is_good = True
    for impl in impls:
        os.environ["DILOCO_COMM_IMPL"] = impl
        offload = "cpu" if device.type == "cuda" else None
        plain, offloaded = (train(device, args.size // 4, where) for where in (None, offload))
        is_same = all(plain[name] == offloaded[name] for name in ("digests", "outer"))
        is_good &= is_same
        ms, gib = ([run[key] * by for run in (plain, offloaded)] for key, by in UNITS)
        figures = f"longest step {ms[0]:.1f} ms, offloaded {ms[1]:.1f} ms; "
        figures += f"most memory {gib[0]:.2f} GiB, offloaded {gib[1]:.2f} GiB"
        print(f"{impl:>7}: {'equal' if is_same else 'DIFFERENT'}; {figures}", flush=True)
    dist.destroy_process_group()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
