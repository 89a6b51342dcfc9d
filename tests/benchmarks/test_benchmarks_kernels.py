"""benchmarks/operators/kernels_gpu.py on the CPU: cases, table, JSON, and checks that can fail."""

from __future__ import annotations

import json
import time
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
    assert len(rows) == len(table) == len(IMPLS) * (3 * 2 * 3 + 2 + 2 * 3 + 5 + 2 * 3 + 1)
    assert all(row["is_same"] for row in rows)
    for row, line in zip(rows, table, strict=True):
        assert row["share_percent"] > 0 and row["seconds"]["samples"] == 2
        assert line[-1] == "yes" and row["impl"] in line
    with_eager = {
        (row["operator"], row["wire"], row["layout"]) for row in rows if row["eager_ratio"]
    }
    one = [("encode", "int4"), ("reduce of 4", "int4"), ("encode+feedback", "int8")]
    int8 = [(name, "int8") for name in ("encode", "outer_step", "decode", "reduce of 4")]
    assert with_eager == {
        *((*name, "one") for name in one + int8), *((*name, "mixed") for name in int8[:3])
    }  # fmt: skip
    # Two wires in three layouts for three operators, two sums, norms and merge; encode to eager.
    assert len(document["results"]["bars"]) == 2 * 3 * 3 + 2 * 2 + 2 * 3 + 1
    # Nothing is known here of memory, clocks and predictions, which are a GPU's.
    assert {(row["traffic_percent"], row["clocks"], *row["predicted"]) for row in rows} == {
        (None, None)
    }


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
    return known | figures | {"host_us": 20.0, "predicted": {}} | changes


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, [True, True]),
        ({"share_percent": 89.9}, [False, True]),
        ({"share_percent": float("nan")}, [False, True]),
        ({"eager_ratio": 4.9}, [True, False]),
        ({"eager_ratio": None}, [True]),
        ({"compile_ratio": 1.0}, [True, True, True]),
        ({"compile_ratio": 0.99}, [True, True, False]),
        ({"compile_ratio": 1.5, "wire": "int4"}, [True, True]),
        ({"compile_ratio": 1.4, "wire": "int4"}, [True, False]),
        ({"compile_ratio": 1.4, "layout": "mixed"}, [True, False]),
        ({"compile_ratio": 1.4, "wire": "int2r"}, [False]),
        ({"compile_ratio": 0.9, "wire": "int4", "operator": "outer_step"}, [True]),
        ({"is_same": False}, [False, True, True]),
        ({"impl": "triton", "share_percent": 10.0}, []),
        ({"impl": "triton", "is_same": False}, [False]),
        ({"wire": "bf16", "share_percent": 10.0, "eager_ratio": None}, []),
        ({"layout": "odd", "share_percent": 80.1, "eager_ratio": None}, [True]),
        ({"layout": "odd", "share_percent": 79.9, "eager_ratio": None}, [False]),
        ({"operator": "decode", "share_percent": 89.9, "eager_ratio": 2.0}, [False]),
        ({"operator": "encode+feedback", "share_percent": 10.0}, []),
        ({"operator": "encode+feedback", "compile_ratio": 0.99}, [False]),
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
        ({"share_percent": 72.0, "predicted": {"share_percent": 79.0}}, [True, False]),
        # Worse than a tenth below the prediction; predicted to hold.
        ({"share_percent": 71.0, "predicted": {"share_percent": 79.0}}, [False, False]),
        ({"share_percent": 89.0, "predicted": {"share_percent": 93.0}}, [False, False]),
        ({"operator": "outer_step", "compile_ratio": 0.95, "predicted": {"compile_ratio": 0.97}},
         [False, True]),
    ],
)  # fmt: skip
def test_a_miss_that_was_predicted(
    kernels: ModuleType, changes: dict[str, Any], reasons: list[bool]
) -> None:
    defaults = dict.fromkeys(impls.DEFAULT_ON_CUDA, "cuda")
    found = kernels.verdicts([row(**changes)], defaults)
    assert [bool(verdict["predicted"]) for verdict in found] == reasons


def test_a_kernel_without_a_record_is_predicted_from_its_neighbour(kernels: ModuleType) -> None:
    """A kernel that is as it was keeps its share; the bound of the memory is never passed."""
    from benchmarks.operators import kernels_gpu_cases as known
    from benchmarks.operators import kernels_gpu_predicted as model

    records = model.recorded()
    timed = known.cases(known.Data(1 << 20, "cpu"), ["int8", "int4", "int2r", "topk64"])
    found = {case.key: model.predict(case, "H200", records) for case in timed}
    kept = ("outer_step", "int8", "mixed")
    assert found[kept]["share_percent"] == records["H200"][kept]["share_percent"]
    assert all(0 < row["traffic_percent"] <= 100 for row in found.values())
    shares = [found[f"reduce of {name}", "int8", "one"]["share_percent"]
              for name in ("4 weighted", "3", "4", "8")]  # fmt: skip
    assert shares == sorted(shares)
    with_bars = [
        key for key in known.plain_twins(known.Data(1 << 20, "cpu"), False) if key in found
    ]
    assert set(known.MORE_PASSES) <= set(with_bars)
    assert all("compile_ratio" in found[key] for key in with_bars)
    slower = model.predict(timed[0], "H100", {**records, "H100": {}})
    assert slower["traffic_percent"] >= found["encode", "int8", "one"]["traffic_percent"]


def test_plain_operators_decode_what_they_encode(kernels: ModuleType) -> None:
    """To the precision of the wire: a comparison with other work would be none."""
    from benchmarks.operators import plain_operators as plain

    outer, params = torch.randn(2, 1 << 14, generator=torch.Generator().manual_seed(3))
    x = outer - params
    rotation = torch.linalg.qr(torch.randn(256, 256, generator=torch.Generator().manual_seed(4))).Q
    decoded = {
        0.01: plain.decode(*plain.encode(outer, params)),
        0.2: plain.decode(*plain.encode(outer, params, None, 4), 4),
        0.5: plain.decode_rotated(*plain.encode_rotated(outer, params, rotation), rotation),
    }
    for error, values in decoded.items():
        assert (values.flatten() - x).norm() < error * x.norm()
    codes, scale, rest = plain.encode(outer, params, torch.ones_like(x))
    assert torch.allclose(plain.decode(codes, scale) + rest, (x + 1).view(-1, 256))
    mean = plain.decode(*plain.reduce(*plain.encode(outer, params), num_runs=2))
    assert (mean.flatten() - x.view(2, -1).mean(0)).abs().max() < 0.05
    indices, is_negative, _ = plain.encode_sparse(outer, params)
    kept = x.view(-1, 4096).gather(1, indices.long())
    assert kept.abs().min() > x.abs().median() and (kept < 0).equal(is_negative)


@pytest.mark.parametrize(
    ("reads", "updates", "writes", "size"),
    [((4, 4), (), (1.01,), 9), ((1.0,), (4, 4), (4,), 21), ((4,), (), (), 4)],
)
def test_a_kernel_that_only_moves_reads_and_writes_what_an_operator_does(
    reads: tuple, updates: tuple, writes: tuple, size: int
) -> None:
    """By Triton's interpreter, as in all tests; int32 words that no xor leaves as they are."""
    from benchmarks.operators import traffic

    device = "cuda" if torch.cuda.is_available() else "cpu"
    pool = torch.randint(1, 1 << 30, (20 << 12,), dtype=torch.int32, device=device)
    before = pool.clone()
    move, moved = traffic.mover(pool, 1 << 14, reads, updates, writes)
    assert moved == size << 14
    move()
    written = sum(map(round, (*updates, *writes))) << 12
    assert 0.99 * written <= int((pool != before).sum()) <= written
    # The first program's first row has a word of each row that the program reads.
    word, begin = torch.zeros_like(pool[:512]), 0
    for array in map(round, (*reads, *updates)):
        for row in before[begin : begin + 512 * array].split(512):
            word ^= row
        begin += array << 12
    assert not writes or pool[begin : begin + 512].equal(word)


def test_clocks_are_asked_for_while_the_device_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu.facts import CLOCKS, clocks

    program, calls = tmp_path / "nvidia-smi", []
    program.write_text("#!/bin/sh\nsleep 0.2\necho '1980 MHz, 3201 MHz, 640.5 W, 61, 0x4'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = clocks(lambda: calls.append(time.sleep(0.01)))
    assert found == dict(zip(CLOCKS, ["1980 MHz", "3201 MHz", "640.5 W", "61", "0x4"], strict=True))
    assert calls
    program.unlink()
    assert clocks() is None


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

    case = kernels.Case("encode", "int8", "one", run, result, (4, 4), (1,))
    assert kernels.differing(case, ["right", "right", "wrong", "lazy"]) == ["wrong", "lazy"]


def test_a_missing_device_is_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = run_benchmark("operators.kernels_gpu")
    assert done.returncode == 2
    assert "there is no CUDA device; --device cpu" in done.stderr
