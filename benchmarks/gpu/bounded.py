"""Say what a ``reduce`` on the side stream costs the training, with and without a bound.

    python -m benchmarks.gpu.bounded [--size 1G] [--impl cuda] [--json FILE]

A matrix product in bf16 stands for the training, and a copy of memory for kernels that memory
bounds. A row of such kernels is timed alone, and while another stream sums four int8 payloads
several times: in a grid that fills the device, and in one of ``side_blocks`` thread blocks, as an
exchange over NCCL bounds the grid. The three take turns in each sample. The cost is how much longer
the row takes for each sum, which ends before the row does. Beside the cost stands the time of a sum
that is alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch

from benchmarks.operators.kernels_gpu_cases import NUM_RUNS, Data
from benchmarks.support import common
from diloco_comm import ops
from diloco_comm.exchange.nccl.streams import side_blocks

MATRIX = 8192
NUM_SUMS = 16
# A row lasts at least five times as long as the sums, however slow these are beside the row.
NUM_CALLS = {"matrix product": 60, "copy": 160}
PAUSE_CYCLES = 40_000_000  # about 20 ms, in which the host enqueues all of a sample
WARMUP = 2
Work = Callable[[], object]


def milliseconds(row: Work, num_calls: int, add_up: Work | None) -> float:
    """Time a row of kernels, while another stream adds up payloads if it is given how.

    Raises:
        RuntimeError: If the sums lasted longer than the row.
    """
    side = torch.cuda.Stream()
    begin, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    torch.cuda._sleep(PAUSE_CYCLES)
    side.wait_stream(torch.cuda.current_stream())
    begin.record()
    if add_up is not None:
        with torch.cuda.stream(side):
            for _ in range(NUM_SUMS):
                add_up()
            last.record()
    for _ in range(num_calls):
        row()
    end.record()
    torch.cuda.synchronize()
    if add_up is not None and last.elapsed_time(end) < 0:
        raise RuntimeError("the sums lasted longer than the kernels that are timed")
    return begin.elapsed_time(end)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", type=common.parse_size, default=common.parse_size("1G"), help="fp32 bytes")
    add("--impl", default="cuda", help="implementation of reduce")
    add("-n", "--samples", type=common.parse_count, default=12)
    common.add_output(parser)
    args = parser.parse_args()
    common.check_device(parser, "cuda")
    common.parse_impls(parser, args.impl, "cuda")
    bound = side_blocks(torch.device("cuda", 0))
    report = common.Report(
        "gpu_bounded", device=torch.cuda.get_device_name(), size=args.size, max_blocks=bound
    )
    data = Data(args.size, "cuda")
    layout = data.layouts["int8"]
    form = (layout.run_elements, *data.form("int8"))

    def reducer(max_blocks: int) -> Work:
        target, weights = data.scratch[: layout.run_bytes], [1 / NUM_RUNS] * NUM_RUNS
        more = {"max_blocks": max_blocks, "impl": args.impl}
        return lambda: ops.reduce(data.payloads["int8"], target, weights, *form, **more)

    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty_like(a)
    rows: dict[str, Work] = {
        "matrix product": lambda: torch.mm(a, b, out=product),
        "copy": lambda: data.rest.copy_(data.outer),
    }
    sums = {"full": reducer(0), "bounded": reducer(bound)}
    costs: dict[tuple[str, str], list[float]] = {}
    own: dict[str, list[float]] = {}
    for sample in range(WARMUP + args.samples):
        for kind, add_up in sums.items():
            alone = milliseconds(add_up, NUM_SUMS, None) / NUM_SUMS
            if sample >= WARMUP:
                own.setdefault(kind, []).append(alone)
        for name, row in rows.items():
            plain = milliseconds(row, NUM_CALLS[name], None)
            for kind, add_up in sums.items():
                more = milliseconds(row, NUM_CALLS[name], add_up) - plain
                if sample >= WARMUP:
                    costs.setdefault((name, kind), []).append(more / NUM_SUMS)
    table = [
        {
            "row": name,
            "grid": kind,
            "cost_us": 1e3 * statistics.median(found),
            "cost_us_p10_p90": [1e3 * common.percentile(found, p) for p in (10, 90)],
            "alone_us": 1e3 * statistics.median(own[kind]),
        }
        for (name, kind), found in costs.items()
    ]
    for line in table:
        report.print(
            f"{line['row']:>16} {line['grid']:>8}: {line['cost_us']:7.0f} us a sum, "
            f"which takes {line['alone_us']:.0f} us alone"
        )
    common.save(report, args.json, {"rows": table})
    return 0


if __name__ == "__main__":
    sys.exit(main())
