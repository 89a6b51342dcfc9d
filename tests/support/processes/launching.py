"""Run a script under torchrun, each process of which tells the test what it has found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support_paths import FOLDERS

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


def torchrun(script: str, folder: Path, num_processes: int = 2) -> list[dict[str, Any]]:
    """Run the script by torchrun in the folder; returns what each process has told, by rank."""
    (folder / "script.py").write_text(_PROLOGUE + script)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*launcher, "--nproc-per-node", str(num_processes), "script.py"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=folder,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads((folder / f"told-{rank}").read_text()) for rank in range(num_processes)]
