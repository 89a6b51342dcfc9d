"""benchmarks/operators/kernels_gpu.py on the CPU: cases, table, JSON, and checks that can fail."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_runs import run_benchmark

from diloco_comm import ops
from diloco_comm.ops import implementations as impls

pytestmark = pytest.mark.usefixtures("forked_programs")

IMPLS = [impl for impl in ops.available_impls() if impl != "reference"][-2:]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from benchmarks.operators import kernels_gpu

    return kernels_gpu


def test_every_case_runs_and_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = ["--device", "cpu", "-n", "2"]
    command += ["--size", "1M", "--wires", "int8,int4", "--no-compile", "--json", str(path)]
    command += ["--jobs", "1"]
    done = run_benchmark("operators.kernels_gpu", *command, "--impl", ",".join(IMPLS))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert document["output"] == done.stdout.splitlines()
    assert (document["device"], document["impls"]) == ("cpu", IMPLS)
    rows = document["results"]["rows"]
    table = [line.split() for line in document["output"] if not line.startswith("#")]
    assert len(rows) == len(table) == len(IMPLS) * (3 * 2 * 3 + 2 + 5 + 2 * 3 + 1)
    assert all(row["is_same"] for row in rows)
    for row, line in zip(rows, table, strict=True):
        assert row["share_percent"] > 0 and row["seconds"]["samples"] == 2
        assert line[-1] == "yes" and row["impl"] in line
    with_eager = {row["operator"] for row in rows if row["eager_ratio"]}
    assert with_eager == {"encode", "decode", "reduce of 4", "outer_step"}
    # Two wires in three layouts for three operators, reduce, norms and merge; two against eager.
    assert len(document["results"]["bars"]) == 2 * 3 * 3 + 2 + 2 * 3 + 2
    assert set(document["faster"]) == set(impls.DEFAULT_ON_CUDA)
    assert set(document["faster"].values()) <= set(IMPLS)


@pytest.mark.parametrize("layout", ["one", "mixed", "odd"])
@pytest.mark.parametrize("num_elements", [1 << 18, 1 << 28])
def test_a_fragment_is_split_whole(kernels: ModuleType, layout: str, num_elements: int) -> None:
    from benchmarks.operators import kernels_gpu_cases

    sizes = kernels_gpu_cases.split(num_elements, layout)
    assert sum(sizes) == num_elements and min(sizes) > 0
    assert len(sizes) == (1 if layout == "one" else 300)


def test_misaligned_tensors_lie_so(kernels: ModuleType) -> None:
    """None begins at a multiple of 16 bytes, no two overlap, and they hold the parameters."""
    from benchmarks.operators import kernels_gpu_cases

    data = kernels_gpu_cases.Data(1 << 20, "cpu")
    assert len(data.odd_params) == 300
    for tensors in (data.odd_params, data.odd_outs):
        assert {tensor.data_ptr() % 16 for tensor in tensors} == {4}
        ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
        begins = [tensor.data_ptr() for tensor in tensors[1:]]
        assert all(end <= begin for end, begin in zip(ends, begins, strict=False))
    assert torch.cat(data.odd_params).equal(data.params)
    cases = [case for case in kernels_gpu_cases.cases(data, ["int8"]) if case.layout == "odd"]
    assert {case.operator for case in cases} == {"encode", "outer_step", "decode", "norms", "merge"}
    assert {tensor.data_ptr() % 16 for tensor in data.tensors("mixed")} == {0}


def row(**changes: Any) -> dict[str, Any]:
    known = {"operator": "encode", "wire": "int8", "layout": "one", "impl": "cuda"}
    figures = {"share_percent": 95.0, "is_same": True, "eager_ratio": 9.0, "compile_ratio": None}
    return known | figures | {"host_us": 20.0} | changes


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, [True, True]),
        ({"share_percent": 89.9}, [False, True]),
        ({"share_percent": float("nan")}, [False, True]),
        ({"eager_ratio": 4.9}, [True, False]),
        ({"eager_ratio": None}, [True]),
        ({"compile_ratio": 1.4}, [True, True, False]),
        ({"is_same": False}, [False, True, True]),
        ({"impl": "triton", "share_percent": 10.0}, []),
        ({"impl": "triton", "is_same": False}, [False]),
        ({"wire": "bf16", "share_percent": 10.0, "eager_ratio": None}, []),
        ({"layout": "odd", "share_percent": 80.1, "eager_ratio": None}, [True]),
        ({"layout": "odd", "share_percent": 79.9, "eager_ratio": None}, [False]),
        ({"operator": "decode", "share_percent": 89.9, "eager_ratio": 2.0}, [False]),
        ({"operator": "encode+feedback", "share_percent": 10.0, "eager_ratio": None}, []),
        ({"operator": "merge", "wire": "", "share_percent": 89.9, "eager_ratio": None}, [False]),
        ({"operator": "norms", "wire": "", "share_percent": 80.1, "eager_ratio": None}, [True]),
        ({"operator": "norms", "wire": "", "impl": "triton", "share_percent": 9}, []),
        # The default of `reduce` is another one here.
        ({"operator": "reduce of 4", "share_percent": 10.0}, []),
        ({"operator": "reduce of 4", "share_percent": 75.1, "impl": "triton"}, [True]),
        ({"operator": "reduce of 4", "share_percent": 74.9, "impl": "triton"}, [False]),
        ({"operator": "outer_step", "layout": "mixed", "eager_ratio": None}, [True, True]),
        (
            {"operator": "outer_step", "layout": "mixed", "eager_ratio": None, "host_us": 301.0},
            [True, False],
        ),
        ({"operator": "outer_step", "layout": "mixed", "eager_ratio": None, "host_us": None},
         [True]),
    ],
)  # fmt: skip
def test_the_bars(kernels: ModuleType, changes: dict[str, Any], holds: list[bool]) -> None:
    defaults = dict.fromkeys(impls.DEFAULT_ON_CUDA, "cuda") | {"reduce": "triton"}
    found = kernels.verdicts([row(**changes)], defaults)
    assert [verdict["holds"] for verdict in found] == holds


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"operator": "outer_step", "eager_ratio": 3.9, "compile_ratio": 1.0}, [False, True, True]),
        ({"operator": "outer_step", "layout": "mixed", "compile_ratio": 1.0, "host_us": None},
         [False, True, False]),
        ({"operator": "reduce of 4", "wire": "int4", "share_percent": 33.0}, [True]),
        # Worse than the reason explains.
        ({"operator": "reduce of 4", "wire": "int4", "share_percent": 10.0}, [False]),
        ({"operator": "decode", "share_percent": 5.0, "eager_ratio": None}, [False]),
        ({"operator": "merge", "eager_ratio": None}, [False]),
    ],
)  # fmt: skip
def test_bars_that_arithmetic_forbids(
    kernels: ModuleType, changes: dict[str, Any], reasons: list[bool]
) -> None:
    defaults = dict.fromkeys(impls.DEFAULT_ON_CUDA, "cuda")
    found = kernels.verdicts([row(**changes)], defaults)
    assert [bool(verdict["predicted"]) for verdict in found] == reasons


def test_the_faster_implementation_of_each_operator(kernels: ModuleType) -> None:
    """By the product of the times: here 2 * 8 against 4 * 3."""
    times = [
        ("encode", "cuda", 2.0), ("encode+feedback", "cuda", 8.0),
        ("encode", "triton", 4.0), ("encode+feedback", "triton", 3.0),
        ("outer_step 3 terms", "cuda", 1.0), ("outer_step 3 terms", "triton", 2.0),
        ("outer_step adam", "cuda", 2.0), ("outer_step adam", "triton", 1.0),
        ("outer_step delayed", "cuda", 1.0), ("reduce of 4", "triton", 1.0),
    ]  # fmt: skip
    rows = [row(operator=name, impl=impl, seconds={"median": s}) for name, impl, s in times]
    assert kernels.faster_ones(rows) == {
        "encode": "triton",
        "outer_step": "cuda",
        "outer_step_adam": "triton",
        "outer_step_delayed": "cuda",
        "reduce": "triton",
    }


def test_the_implementation_that_the_bars_are_about(kernels: ModuleType) -> None:
    """Where the default was not measured, the one that was."""
    assert kernels.default_of("encode", "cpu", ["avx2", "avx512"]) == "avx512"
    if ops.available_impls("cuda"):
        default = impls.default_on_cuda("encode")
        assert kernels.default_of("encode", "cuda", [default, "other"]) == default
        assert kernels.default_of("encode", "cuda", ["other"]) == "other"


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
    done = run_benchmark("operators.kernels_gpu")
    assert done.returncode == 2
    assert "there is no CUDA device; --device cpu" in done.stderr
