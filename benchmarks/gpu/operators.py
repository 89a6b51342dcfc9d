"""Run every operator once on odd sizes, for compute-sanitizer to watch; compare the bytes.

python -m benchmarks.gpu.operators [--device cpu]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.support import common
from diloco_comm import ops
from diloco_comm.ops.wire import ELEMENT_WIRES, WIRES, Layout, WireFormat

SIZES = ((33, 65), (7,), (0,), (1000,), (1,))


def run(device: torch.device, wire: str, stochastic: bool) -> list[Tensor]:
    """One chunk of a fragment of mixed dtypes through all operators; what they wrote."""
    generator = torch.Generator().manual_seed(1)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    params = [
        torch.randn(size, generator=generator).to(dtypes[i % 3]).to(device)
        for i, size in enumerate(SIZES)
    ]
    count = sum(p.numel() for p in params)
    outer = torch.randn(count, generator=generator).to(device)
    momentum, second = torch.zeros_like(outer), torch.zeros_like(outer)
    layout = Layout.plan(count, 3, 2, WireFormat(wire, 64 if wire in ELEMENT_WIRES else None))
    form: Any = (layout.run_elements, wire, layout.wire.block_size)
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8, device=device)
    bad = torch.zeros(1, dtype=torch.int64, device=device)
    residual, lost = torch.zeros_like(outer), torch.zeros_like(outer)
    ops.encode(
        outer,
        params,
        payload,
        0,
        count,
        *form,
        stochastic=stochastic,
        rng_key=5,
        residual=residual,
        new_residual=lost,
        nonfinite=bad,
    )
    result = torch.zeros(layout.run_bytes, dtype=torch.uint8, device=device)
    length = layout.run_elements
    runs = payload[: 3 * layout.run_bytes]
    ops.reduce(runs, result, [0.5, 0.25, 0.25], length, *form, stochastic=stochastic, nonfinite=bad)
    decoded = torch.zeros_like(outer)
    ops.decode([payload], [1.0], [decoded], 0, count, *form)
    verdict = torch.zeros(1, dtype=torch.int64, device=device)
    ends: Any = (params, [payload, payload], [0.5, 0.25], 0, count, *form)
    ops.outer_step(outer, momentum, *ends, "nesterov", 0.7, mu=0.9, alpha=0.5, verdict=verdict)
    ops.outer_step_adam(outer, momentum, second, *ends, 0.1, 0.9, 0.95, 0.1, 1, verdict=verdict)
    pending = torch.ones_like(outer)
    arrival: Any = (outer, momentum, pending, *ends[1:])
    for last in (False, True):
        ops.outer_step_delayed(
            *arrival, 0.7, mu=0.9, ahead=0.6, behind=0.3, last=last, verdict=verdict
        )
    ops.merge(outer, params, 0.25)
    squared = torch.zeros(2, dtype=torch.float64, device=device)
    ops.norms(outer, params, squared)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for data in (outer, outer[1:], payload[3:], *params):
        ops.digest(data, sums)
    written = [payload, result, decoded, outer, momentum, second, pending, lost, bad, sums, *params]
    return [tensor.cpu() for tensor in written]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    args = parser.parse_args()
    common.check_device(parser, args.device)
    device = torch.device(args.device)
    num_wrong = 0
    for wire in WIRES:
        for stochastic in (False, True) if wire in ELEMENT_WIRES else (False,):
            given = run(device, wire, stochastic)
            expected = run(torch.device("cpu"), wire, stochastic)
            same = all(
                torch.equal(a.contiguous().view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
                for a, b in zip(given, expected, strict=True)
            )
            num_wrong += not same
            print(f"{wire:>9} {'stochastic' if stochastic else 'nearest':>10} equal {same}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
