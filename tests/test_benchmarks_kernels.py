"""benchmarks/kernels_gpu.py on the CPU: cases, table, JSON, and checks that can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from diloco_comm import ops

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
IMPLS = [impl for impl in ops.available_impls() if impl != "reference"][-2:]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kernels_gpu

    return kernels_gpu


def test_every_case_runs_and_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = [sys.executable, str(BENCHMARKS / "kernels_gpu.py"), "--device", "cpu", "-n", "2"]
    command += ["--size", "1M", "--wires", "int8,int4", "--no-compile", "--json", str(path)]
    command += ["--jobs", "1"]
    done = subprocess.run(
        [*command, "--impl", ",".join(IMPLS)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert document["output"] == done.stdout.splitlines()
    assert (document["device"], document["impls"]) == ("cpu", IMPLS)
    rows = document["results"]["rows"]
    table = [line.split() for line in document["output"] if not line.startswith("#")]
    assert len(rows) == len(table) == len(IMPLS) * (3 * 2 * 3 + 2 + 5 + 2)
    assert all(row["is_same"] for row in rows)
    for row, line in zip(rows, table, strict=True):
        assert row["share_percent"] > 0 and row["seconds"]["samples"] == 2
        assert line[-1] == "yes" and row["impl"] in line
    with_eager = {row["operator"] for row in rows if row["eager_ratio"]}
    assert with_eager == {"encode", "decode", "reduce of 4", "outer_step"}
    # Two wires on one tensor and on many, for two operators; and both against eager.
    assert len(document["results"]["bars"]) == 2 * 2 * 2 + 2


@pytest.mark.parametrize("layout", ["one", "mixed", "odd"])
@pytest.mark.parametrize("num_elements", [1 << 18, 1 << 28])
def test_a_fragment_is_split_whole(kernels: ModuleType, layout: str, num_elements: int) -> None:
    import kernels_gpu_cases

    sizes = kernels_gpu_cases.split(num_elements, layout)
    assert sum(sizes) == num_elements and min(sizes) > 0
    assert len(sizes) == (1 if layout == "one" else 300)
    misaligned = sum(sum(sizes[:i]) % 4 != 0 for i in range(len(sizes)))
    assert misaligned > 200 if layout == "odd" else misaligned == 0


def row(**changes: Any) -> dict[str, Any]:
    known = {"operator": "encode", "wire": "int8", "layout": "one", "impl": "cuda"}
    figures = {"share_percent": 95.0, "is_same": True, "eager_ratio": 9.0}
    return known | figures | changes


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, [True, True]),
        ({"share_percent": 89.9}, [False, True]),
        ({"share_percent": float("nan")}, [False, True]),
        ({"eager_ratio": 4.9}, [True, False]),
        ({"eager_ratio": None}, [True]),
        ({"is_same": False}, [False, True, True]),
        ({"impl": "triton", "share_percent": 10.0}, []),
        ({"impl": "triton", "is_same": False}, [False]),
        ({"wire": "bf16", "share_percent": 10.0, "eager_ratio": None}, []),
        ({"layout": "odd", "share_percent": 10.0, "eager_ratio": None}, []),
        ({"operator": "decode", "share_percent": 10.0}, []),
    ],
)
def test_the_bars(kernels: ModuleType, changes: dict[str, Any], holds: list[bool]) -> None:
    found = kernels.verdicts([row(**changes)], "cuda")
    assert [verdict["holds"] for verdict in found] == holds


def test_other_bytes_are_seen(kernels: ModuleType) -> None:
    result = torch.zeros(8)

    def run(impl: str) -> None:
        result.fill_(1.0)
        if impl == "wrong":
            result[5] = 2.0
        if impl == "lazy":
            result.view(torch.uint8)[-1:].fill_(0x5A)

    case = kernels.Case("encode", "int8", "one", run, 9.0, result)
    assert kernels.differing(case, ["right", "right", "wrong", "lazy"]) == ["wrong", "lazy"]


def test_a_missing_device_is_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    command = [sys.executable, str(BENCHMARKS / "kernels_gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "there is no CUDA device; --device cpu" in done.stderr
