"""Start programs: commands that end, servers that say where they listen, and torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support_paths import FOLDERS

CLI = [sys.executable, "-m", "diloco_comm_tools.cli"]
# Behind `python`, and before the number of processes and a script.
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

# Before each script: `tell(...)` hands over plain values, `said(call)` is what a call raised.
_PROLOGUE = f"""
import json, os, sys
sys.path[:0] = {FOLDERS!r}
RANK = int(os.environ["RANK"])

def tell(**values):
    path = f"told-{{RANK}}"
    told = json.load(open(path)) if os.path.exists(path) else {{}}
    json.dump(told | values, open(path, "w"))

def said(call):
    try:
        call()
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
    return ""
"""


def run_command(
    command: Sequence[object], *, timeout: float = 110, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; what it printed and its status."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, **options)


def run_python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script, ``-c text`` or ``-m module``; the options are those of ``run_command``."""
    return run_command([sys.executable, *words], **options)


@contextmanager
def running(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a command whose standard output is a pipe; it is killed at the end of the block."""
    options = {"stdout": subprocess.PIPE, **options}
    process = subprocess.Popen([str(word) for word in command], text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def serving_command(
    command: Sequence[object], **options: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; yield it, and the first line that it prints: where it listens."""
    with running(command, **options) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()


def torchrun(script: str, folder: Path, num_processes: int = 2) -> list[dict[str, Any]]:
    """Run the script by torchrun in the folder; returns what each process has told, by rank."""
    (folder / "script.py").write_text(_PROLOGUE + script)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ended = run_python(*LAUNCHER, num_processes, "script.py", cwd=folder, env=environment)
    assert ended.returncode == 0, ended.stderr
    return [json.loads((folder / f"told-{rank}").read_text()) for rank in range(num_processes)]
