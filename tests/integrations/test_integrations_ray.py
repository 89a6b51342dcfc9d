"""The section on Ray Train: two workers of a TorchTrainer end with the same model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import ROOT, START, blocks_of
from trainers import needs


@needs("ray")
@pytest.mark.fresh_interpreter
@pytest.mark.timeout(300)
@pytest.mark.nightly("Ray is not among the packages that the tests install")
def test_torch_trainer(tmp_path: Path) -> None:
    page = blocks_of(ROOT / "docs/how-to/other-trainers.md")
    [block] = [block for block in page if "from ray" in block.code]
    others = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", START + block.setup + block.code]
    subprocess.run(program, cwd=tmp_path, env=os.environ | others, check=True, timeout=240)
    first, second = (
        torch.load(next((tmp_path / "checkpoints").rglob(f"replica-{rank}.pt")))
        for rank in range(2)
    )
    assert first["diloco"]["inner_step"] == 8
    for name, value in first["model"].items():
        assert torch.equal(value, second["model"][name])
