"""Run operators on fragments of more than 2^31 elements, and compare windows with the CPU.

    python -m benchmarks.gpu.large [--device cuda] [--size 2200M] [--impl cuda,triton]

A signed index of 32 bits shows only there. Run are encode, decode, the outer step with Nesterov,
merge, norms and digest, on one aligned fp32 tensor, and reduce in a bounded grid. The windows are
the runs of a payload: the first, the ones around element 2^31, and the last. Their bytes must be
the CPU's, which computes the same windows and touches no other memory. Status 1 if a byte differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.support import common
from diloco_comm import ops
from diloco_comm.ops.wire import Layout, WireFormat

WIRES = ("int8", "int4", "int2r", "topk64")
RUN_ELEMENTS = 1 << 20
EDGE = 1 << 31  # the first element that a signed index of 32 bits cannot name


def windows(layout: Layout, edge: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last run, and those on both sides of an element."""
    run, last = edge // layout.run_elements, layout.num_runs - 1
    for i in sorted({0, max(run - 1, 0), min(run, last), last}):
        yield layout.run_range(i)


def on_host(tensor: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Return a CPU tensor of the same size with the given spans; the rest is never touched."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    for begin, end in spans:
        copy[begin:end] = tensor[begin:end].cpu()
    return copy


def differing(what: str, given: Tensor, expected: Tensor, spans: list[tuple[int, int]]) -> list:
    """Name the spans of two flat tensors whose bytes differ."""
    return [
        f"{what} of [{begin}, {end})"
        for begin, end in spans
        if not torch.equal(
            given[begin:end].cpu().view(torch.uint8), expected[begin:end].view(torch.uint8)
        )
    ]


def compare(device: str, num_elements: int, wire: str, impl: str, edge: int) -> list[str]:
    """Run one wire's operators on the device and on the CPU; what differs in the windows."""
    form = WireFormat(wire)
    layout = Layout(num_elements, -(-num_elements // RUN_ELEMENTS), RUN_ELEMENTS, form)
    numbers: Any = (layout.run_elements, wire, form.block_size)
    rng = torch.Generator(device).manual_seed(1)
    outer = torch.randn(num_elements, generator=rng, device=device)
    params = outer + 1e-3
    params.mul_(1.0 + 2.0**-10)
    momentum = torch.full_like(outer, 2.0**-8)
    spans = list(windows(layout, edge))
    hosts = [on_host(tensor, spans) for tensor in (outer, params, momentum)]
    size = layout.run_bytes
    runs = [
        (begin // RUN_ELEMENTS * size, begin // RUN_ELEMENTS * size + size) for begin, _ in spans
    ]
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8, device=device)
    options = {"stochastic": form.has_element_codes, "rng_key": 5}
    ops.encode(outer, [params], payload, 0, num_elements, *numbers, impl=impl, **options)
    host_payload = torch.zeros(payload.shape, dtype=torch.uint8)
    for begin, end in spans:
        ops.encode(hosts[0], [hosts[1]], host_payload, begin, end, *numbers, **options)
    wrong = differing("payload", payload, host_payload, runs)
    values = torch.zeros_like(outer)
    ops.decode([payload], [1.0], [values], 0, num_elements, *numbers, impl=impl)
    host_values = torch.empty(num_elements)
    for begin, end in spans:
        ops.decode([host_payload], [1.0], [host_values], begin, end, *numbers)
    wrong += differing("decoded values", values, host_values, spans)
    del values
    step: Any = ("nesterov", 0.7)
    more = {"mu": 0.9, "alpha": 0.5}
    ends: Any = ([1.0], 0, num_elements, *numbers)
    ops.outer_step(outer, momentum, [params], [payload], *ends, *step, impl=impl, **more)
    for begin, end in spans:
        ends = ([1.0], begin, end, *numbers)
        ops.outer_step(hosts[0], hosts[2], [hosts[1]], [host_payload], *ends, *step, **more)
    for what, given, expected in zip(
        ("outer", "params", "momentum"), (outer, params, momentum), hosts, strict=True
    ):
        wrong += differing(what, given, expected, spans)
    return wrong + compare_plain(outer, params, hosts, spans, impl)


def compare_plain(
    outer: Tensor, params: Tensor, hosts: list[Tensor], spans: list[tuple[int, int]], impl: str
) -> list[str]:
    """Run merge, norms and digest, which know no wire; what differs."""
    ops.merge(outer, [params], 0.25, impl=impl)
    wrong = []
    for begin, end in spans:
        ops.merge(hosts[0][begin:end], [hosts[1][begin:end]], 0.25)
    wrong += differing("merged params", params, hosts[1], spans)
    squared = torch.zeros(2, dtype=torch.float64, device=outer.device)
    ops.norms(outer, [params], squared, impl=impl)
    exact = sum(
        (a.double() - b.double()).square().sum().item()
        for a, b in zip(outer.split(1 << 26), params.split(1 << 26), strict=True)
    )
    if not abs(squared[0].item() - exact) <= 1e-9 * exact:
        wrong.append(f"norm: {squared[0].item()!r}, and {exact!r} in float64")
    sums = torch.zeros(2, dtype=torch.int64, device=outer.device)
    parts = torch.zeros_like(sums)
    ops.digest(params, sums, impl=impl)
    half = params.numel() // 4 * 2  # whole words of 64 bits
    ops.digest(params[:half], parts, impl=impl)
    ops.digest(params[half:], parts, half // 2, impl=impl)
    if not torch.equal(sums, parts):
        wrong.append("digest: the sums of two halves are not the sums of the whole")
    return wrong + compare_bounded(outer, impl)


def compare_bounded(values: Tensor, impl: str) -> list[str]:
    """Sum two runs in a grid as large as the work and in a bounded one; the outputs that differ.

    The runs are so large that each warp of the CUDA kernel takes several tiles at a time.
    """
    count = min(values.numel() // 4096 * 2048, 1 << 25)
    form: Any = (count, "int8", 256)
    size = WireFormat("int8").run_bytes(count)
    received = torch.zeros(2 * size, dtype=torch.uint8, device=values.device)
    for i in range(2):
        part = values[i * count : (i + 1) * count].clone()
        part[count // 3] = float("nan")
        ops.encode(None, [part], received[i * size :][:size], 0, count, *form, impl=impl)
    outputs = []
    for max_blocks in (0, 99):
        result = torch.zeros_like(received[:size])
        residual = torch.full((count,), 1e-3, device=values.device)
        bad = torch.zeros(1, dtype=torch.int64, device=values.device)
        ops.reduce(
            received, result, [0.5, 0.5], count, *form, residual=residual, new_residual=residual,
            nonfinite=bad, max_blocks=max_blocks, impl=impl,
        )  # fmt: skip
        outputs.append((result, residual.view(torch.int32), bad))
    names = ("result", "residual", "number of bad elements")
    return [
        f"{name} of a bounded reduce"
        for name, a, b in zip(names, *outputs, strict=True)
        if not torch.equal(a, b)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda", help="cuda (default) or cpu")
    add("--size", type=common.parse_size, default=0, help="elements (default: 2^31 and 70 million)")
    add("--wires", default=",".join(WIRES))
    add("--impl", default="", help="comma list (default: all that run there)")
    args = parser.parse_args()
    common.check_device(parser, args.device)
    impls = common.parse_impls(parser, args.impl, args.device)
    count = args.size or EDGE + 70_000_001
    num_wrong = 0
    for wire in args.wires.split(","):
        for impl in impls:
            wrong = compare(args.device, count, wire, impl, min(EDGE, count // 2))
            num_wrong += len(wrong)
            print(
                f"{wire:>9} {impl:>9} {count} elements: {', '.join(wrong) or 'equal'}", flush=True
            )
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
