"""Compare the bytes of all CPU implementations on up to a billion random elements of each wire.

    python -m benchmarks.operators.equal_bytes --limit-s 200  # repeat until it is done
    python -m benchmarks.operators.equal_bytes --report

The elements of slice n are made from the seed n: Gaussian numbers of many magnitudes, outliers,
zeros, and now and then a value that no wire carries. Every implementation encodes, reduces three
payloads and decodes them; the bytes of the first one are compared with those of the others. Each
slice is one line of --runs, and a slice that is there is not repeated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.support import common
from benchmarks.support.run_file import RunFile, grouped
from diloco_comm import ops
from diloco_comm.ops.wire import ROTATED_WIRES, SPARSE_WIRES, Layout, WireFormat

SLICE = 1 << 24
NUM_ELEMENTS = 1_000_000_000
NUM_RUNS = 3  # a slice is reduced as the shards of three ranks


def elements(seed: int, count: int) -> Tensor:
    """Return fp32 [count] with blocks of all magnitudes, and some values that are bad."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=rng)
    scales = torch.randint(-120, 115, (-(-count // 256),), generator=rng).repeat_interleave(256)
    kinds = torch.randint(0, 8, (-(-count // 256),), generator=rng).repeat_interleave(256)
    x = torch.where(kinds[:count] == 0, torch.ldexp(x, scales[:count]), x * 1e-3)
    x[kinds[:count] == 1] = x[kinds[:count] == 1].bfloat16().float()  # many equal magnitudes
    places = torch.randint(0, count, (count // 64,), generator=rng)
    x[places] = x[places] * 100
    x[places[: count // 512]] = 0.0
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 2.0**120])
    x[places[:8]] = bad.repeat(2)
    return x


def results(x: Tensor, wire: WireFormat, key: int, impl: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what an implementation makes of the elements, by the name of the step."""
    layout = Layout.plan(x.numel(), NUM_RUNS, wire=wire)
    form = (layout.run_elements, wire.name, wire.block_size)
    residual = torch.zeros_like(x) if wire.is_sparse or wire.name == "int2r" else None
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    bad = torch.zeros(1, dtype=torch.int64)
    ops.encode(
        None, [x], payload, 0, x.numel(), *form, rng_key=key,
        residual=residual, new_residual=residual, nonfinite=bad, impl=impl,
    )  # fmt: skip
    yield "payload", payload
    yield "bad", bad
    if residual is not None:
        yield "residual", residual
    if not wire.is_gathered:
        result = torch.zeros(layout.run_bytes, dtype=torch.uint8)
        weights = [1 / NUM_RUNS] * NUM_RUNS
        ops.reduce(payload, result, weights, layout.run_elements, *form, rng_key=key, impl=impl)
        yield "reduced", result
    decoded = torch.zeros_like(x)
    ops.decode([payload, payload], [0.5, 0.25], [decoded], 0, x.numel(), *form, impl=impl)
    yield "decoded", decoded


def compare(wire: str, number: int, count: int) -> dict[str, Any]:
    """Compare one slice; returns a line of the file."""
    begin, form = time.perf_counter(), WireFormat(wire)
    # The reference in plain PyTorch is compared with these in the tests.
    impls = [name for name in ops.available_impls("cpu") if name != "reference"]
    x = elements(number, count)
    first = dict(results(x, form, number, impls[0]))
    differing: dict[str, int] = {}
    for impl in impls[1:]:
        for name, tensor in results(x, form, number, impl):
            mine, other = (t.view(torch.uint8) for t in (first[name], tensor))
            if not torch.equal(mine, other):
                differing[f"{impl} {name}"] = int((mine != other).sum())
    return {
        "wire": wire,
        "slice": number,
        "elements": count,
        "bad": int(first["bad"]),
        "implementations": impls,
        "differing_bytes": differing,
        "seconds": time.perf_counter() - begin,
    }


def condense(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sums for each wire and set of implementations.

    On a processor without AVX-512 fewer implementations are compared.
    """
    named = [{**row, "implementations": " ".join(row["implementations"])} for row in rows]
    found = []
    for setting, own in grouped(named, ("wire", "implementations")):
        sums = {key: sum(row[key] for row in own) for key in ("elements", "bad")}
        differing = sum(sum(row["differing_bytes"].values()) for row in own)
        found.append({**setting, **sums, "differing_bytes": differing})
    return found


def report(results: list[dict[str, Any]]) -> list[str]:
    """Return a line for each row: elements compared, bytes that differ."""
    lines = [f"#{'wire':>9} {'elements':>14} {'bad':>8} {'differing bytes':>16}  implementations"]
    for row in results:
        numbers = f"{row['elements']:>14} {row['bad']:>8} {row['differing_bytes']:>16}"
        lines.append(f" {row['wire']:>9} {numbers}  {row['implementations']}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    record = common.RESULTS / "operators" / "equal-bytes.json"
    common.add_runs(parser, "equal-bytes.jsonl", record)
    add("--elements", type=int, default=NUM_ELEMENTS, help="elements of each wire")
    add("--slice", type=int, default=SLICE, help="elements that are compared at a time")
    add("--wires", default=",".join((*ROTATED_WIRES, *SPARSE_WIRES)), help="comma list")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs, end = RunFile(args.runs, common.module_command()), time.monotonic() + args.limit_s
    # Slice by slice over all wires, so that an interrupt leaves as much of each.
    for number in range(0 if args.report else -(-args.elements // args.slice)):
        count = min(args.slice, args.elements - number * args.slice)
        for wire in args.wires.split(","):
            if time.monotonic() < end and not runs.find({"wire": wire, "slice": number}):
                runs.add(compare(wire, number, count))
    results = condense(runs.rows)
    runs.write_record(args.json, report(results), results)
    return 1 if any(row["differing_bytes"] for row in runs.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
