"""List the sources that a reader must trust for one blocking round, and fail when they grow.

    python tests/support/quality/reading_path.py

The Python functions are those that a blocking fp32 step of two replicas enters, in files in the
order of their first call, with the lines of each. The C++ files of the engine, the transport and
the scalar operators follow as a whole. Output: the figures of ``outer_step_trace``, which may not
grow either, one line for each file of the path, and the sum.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

import torch.distributed as dist
from outer_step_trace import PACKAGE, SETTINGS, Trace, look, trace_of

from diloco_comm_tools.common import ranks
from diloco_comm_tools.common.workers import run_workers

ROOT = Path(__file__).resolve().parents[3]
MOST_LINES = 3000
ENGINE = (
    "csrc/exchange/engine/engine_submit.cpp",
    "csrc/exchange/engine/session.cpp",
    "csrc/exchange/engine/session_control.cpp",
    "csrc/exchange/engine/operator_calls.cpp",
    "csrc/exchange/transport/message.cpp",
    "csrc/exchange/transport/transport.cpp",
    "csrc/exchange/transport/emulated_link.cpp",
    "csrc/codec/scalar/kernels.cpp",
)


def lines_of_files(trace: Trace) -> dict[str, int]:
    """Return the lines of the functions that were entered, by file."""
    lines = dict.fromkeys(trace.files, 0)
    for code in trace.functions:
        # A comprehension is a part of the function around it.
        if not code.co_name.startswith("<"):
            lines[code.co_filename[len(PACKAGE) :]] += len(inspect.getsourcelines(code)[0])
    return {f"diloco_comm/{path}": number for path, number in lines.items()}


def main() -> int:
    if "RANK" not in os.environ:
        run_workers([sys.executable, __file__], 2, preload=ranks.WITH_OPTIMIZER)
        return 0
    dist.init_process_group("gloo")
    traces = {name: trace_of(arguments) for name, arguments in SETTINGS.items()}
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank:
        return 0
    looks = [look(name, trace) for name, trace in traces.items()]
    lines = lines_of_files(traces["Blocking, fp32"])
    lines |= {path: len((ROOT / path).read_text().splitlines()) for path in ENGINE}
    for path, number in lines.items():
        print(f"{number:6} {path}")
    total = sum(lines.values())
    print(f"{total:6} lines, at most {MOST_LINES}", flush=True)
    return int(total > MOST_LINES or not all(looks))


if __name__ == "__main__":
    sys.exit(main())
