"""The package without its C++ extension says what to do; with it, all that the CPU runs."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diloco_comm import ops


@pytest.mark.parametrize("module", ["diloco_comm", "diloco_comm.ops"])
def test_without_the_extension_there_is_one_sentence(module: str) -> None:
    program = (
        "import sys\n"
        "sys.modules['diloco_comm._C'] = None\n"
        "try:\n"
        f"    import {module}\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error, sep='|')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    kind, sentence = done.stdout.rstrip("\n").split("|")
    assert kind == "ImportError"
    assert "\n" not in sentence
    assert sentence.startswith("the C++ extension of diloco_comm is not built for this Python and")
    assert f"torch {torch.__version__}" in sentence and "pip install" in sentence


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(),
    reason="/proc/cpuinfo of an x86-64 machine",
)
def test_the_implementations_are_those_that_the_processor_runs() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split(":")[1].split())
    needed = {
        "scalar": set(),
        "avx2": {"avx2", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    }
    runs = {impl for impl, wanted in needed.items() if wanted <= flags}
    assert set(ops.available_impls()) - {"reference"} == runs


def test_torch_keeps_no_default_group_that_is_made_after_the_import() -> None:
    """A group in a default argument lives until the interpreter's end, and aborts it."""
    program = (
        "import inspect, torch, torch.distributed as dist, diloco_comm\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)\n"
        "from torch.distributed.nn.functional import all_reduce\n"
        "print(inspect.signature(all_reduce).parameters['group'].default)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stdout + done.stderr
