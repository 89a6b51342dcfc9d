"""Triton's kernels compiled for GPUs that are not there: no spills, no stack, IEEE arithmetic.

`make kernels` compiles every specialisation; here a selection of them. Triton keeps what it has
compiled in a cache of its own, by the text of the kernels.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from commands import run_python

pytest.importorskip("triton", reason="needs Triton")


@pytest.mark.nightly("two minutes for options of each operator", but=["each-kernel"])
@pytest.mark.slow
@pytest.mark.parametrize("selection", ["each-kernel", "representative"])
@pytest.mark.timeout(900)
def test_kernels_compile_for_every_target_without_spills(selection: str, tmp_path: Path) -> None:
    """In a process of its own: here Triton interprets. The output has the registers of each."""
    script = Path(__file__).parents[1] / "support" / "devices" / "triton_specialisations.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    table = tmp_path / "table.json"
    done = run_python(script, "--select", selection, "--json", table, timeout=890, env=environment)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == f"{len(lines) - 1} kernels compiled, 0 at fault"
    rows = json.loads(table.read_text())["results"]
    assert sum(row["count"] for row in rows) == len(lines) - 1
    for target in ("sm_80", "sm_90", "gfx942"):
        compiled = {line.split()[3] for line in lines if line.startswith(target)}
        assert compiled == {
            "encode_kernel",
            "reduce_kernel",
            "step_kernel",
            "delayed_kernel",
            "decode_kernel",
            "merge_kernel",
            "norms_kernel",
            "digest_kernel",
            "sum_partials_kernel",
        }
