"""Count what an outer step of two replicas enters: files, functions, calls, depth.

    python tests/support/quality/outer_step_trace.py [--files]

Counted are Python functions of ``diloco_comm/`` on the training thread, between the call of the
optimizer's step and its return. A comprehension counts as a part of its function, and so does a
generator expression.
``--files`` lists the files in the order of their first call. More files, functions or depth than
``MOST`` are an error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from diloco_comm import DiLoCo, Eager, Streaming
from diloco_comm_tools.common import ranks
from diloco_comm_tools.common.workers import run_workers

PACKAGE = str(Path(sys.modules["diloco_comm"].__file__ or "").parent) + os.sep
SYNC_EVERY = 4
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
# Most files, functions and open calls of the package in an outer step; the numbers may only shrink.
MOST = {
    "Blocking, fp32": (16, 90, 12),
    "Blocking, int8": (16, 90, 12),
    "Streaming, int8": (15, 77, 12),
    "Eager, int8": (18, 106, 12),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "Blocking, fp32": {"wire": "fp32"},
    "Blocking, int8": {"wire": "int8"},
    "Streaming, int8": {"wire": "int8", "overlap": Streaming(delay=1), "fragments": 2},
    "Eager, int8": {"wire": "int8", "overlap": Eager()},
}


class Trace:
    """Record the functions of one package that a call enters on the calling thread.

    Attributes:
        files: Paths in the package, in the order of their first call.
        functions: Code objects.
        num_calls: Number of calls.
        num_changes: Number of calls from one file of the package into another.
        depth: Most calls of the package that were open at a time.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.functions: set[Any] = set()
        self.num_calls = self.num_changes = self.depth = 0
        self._open: list[str] = []

    def run(self, function: Callable[[], object]) -> None:
        sys.setprofile(self._event)
        try:
            function()
        finally:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event not in ("call", "return") or not name.startswith(PACKAGE):
            return
        if frame.f_code.co_name in COMPREHENSIONS:
            return
        if event == "return":
            if self._open:
                self._open.pop()
            return
        path = name[len(PACKAGE) :]
        self.num_changes += bool(self._open) and self._open[-1] != path
        self._open.append(path)
        self.files[path] = None
        self.functions.add(frame.f_code)
        self.num_calls += 1
        self.depth = max(self.depth, len(self._open))


def trace_of(arguments: dict[str, Any]) -> Trace:
    """Train until all is warm; the trace of a step that sends and applies."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Linear(33, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = Trace()
    torch.manual_seed(dist.get_rank())
    with DiLoCo(model, optimizer, sync_every=SYNC_EVERY, **arguments) as diloco:
        for step in range(1, 6 * SYNC_EVERY + 2):
            model(torch.randn(8, 16)).square().mean().backward()
            if step <= 4 * SYNC_EVERY:
                optimizer.step()
                continue
            here = Trace()
            here.run(optimizer.step)
            found = max(found, here, key=lambda trace: len(trace.functions))
            optimizer.zero_grad()
        diloco.flush()
    return found


def look(name: str, trace: Trace, *, with_files: bool = False) -> bool:
    """Print the figures of a trace; whether all are within ``MOST``."""
    found = len(trace.files), len(trace.functions), trace.depth
    print(
        f"{name:<16} {found[0]} files, {found[1]} functions, {trace.num_calls} calls, "
        f"{trace.num_changes} changes of file, depth {trace.depth}"
    )
    is_small = all(now <= most for now, most in zip(found, MOST[name], strict=True))
    if not is_small:
        print(f"    expected at most {MOST[name]} (files, functions, depth)")
    if with_files:
        print("".join(f"    {path}\n" for path in trace.files), end="")
    return is_small


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true", help="list the files of each")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        run_workers([sys.executable, __file__, *sys.argv[1:]], 2, preload=ranks.WITH_OPTIMIZER)
        return 0
    dist.init_process_group("gloo")
    traces = {name: trace_of(arguments) for name, arguments in SETTINGS.items()}
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank:
        return 0
    looks = [look(name, trace, with_files=options.files) for name, trace in traces.items()]
    return int(not all(looks))


if __name__ == "__main__":
    sys.exit(main())
