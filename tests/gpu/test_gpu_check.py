"""The GPU check's Python, run on the CPU: trace, training, operators, summary, the first call."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import emulated
import pytest
from benchmark_runs import run_benchmark

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Any:
    from benchmarks.gpu import trace_checks as gpu_trace_checks

    return gpu_trace_checks


def event(name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    times = {"ts": begin, "dur": end - begin}
    return {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": tid, **times}


ENCODE = event("diloco_comm::encode fragment=1 round=2", 100, 200, "user_annotation")
STEP = event("diloco_comm::outer_step fragment=1 round=1", 400, 500, "user_annotation")
NAME = "diloco_comm::exchange fragment=1 round=2 us=400 exposed_us=50"
LENGTH = event(NAME, 600, 600, "user_annotation")


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (event("cudaStreamSynchronize", 150, 160, "cuda_runtime"), True),
        (event("cudaEventSynchronize", 499, 900, "cuda_runtime"), True),
        (event("cuCtxSynchronize", 420, 430, "cuda_driver"), True),
        (event("cudaDeviceSynchronize", 250, 260, "cuda_runtime"), False),
        (event("cudaStreamSynchronize", 150, 160, "cuda_runtime", tid=2), False),
        (event("cudaLaunchKernel", 150, 160, "cuda_runtime"), False),
        (event("cudaStreamWaitEvent", 150, 160, "cuda_runtime"), False),
        (event("cudaMalloc", 150, 160, "cuda_runtime"), True),
        (event("cudaMallocAsync", 150, 160, "cuda_runtime"), False),
        (event("cudaLaunchKernel", 150, 1150, "cuda_runtime"), True),
    ],
)
def test_host_waits_in_our_ranges(call: dict[str, Any], found: bool, checks) -> None:
    waits = checks.host_waits_in_ranges([STEP, call, ENCODE])
    assert bool(waits) == found
    if found:
        assert "fragment 1, round" in waits[0] and call["name"] in waits[0]


def test_a_copy_of_memory_that_is_not_page_locked(checks) -> None:
    call = event("cudaMemcpyAsync", 150, 160, "cuda_runtime") | {"args": {"correlation": 7}}
    for kind, number in (("Pageable", 1), ("Pinned", 0)):
        name = f"Memcpy HtoD ({kind} -> Device)"
        copy = event(name, 170, 180, "gpu_memcpy", 9) | {"args": {"correlation": 7}}
        assert len(checks.host_waits_in_ranges([ENCODE, call, copy])) == number


def test_overlap_by_nccl_kernels(checks) -> None:
    events = [
        event("ncclDevKernel_SendRecv", 0, 100, "kernel", 7),
        event("ncclDevKernel_AllGather", 90, 200, "kernel", 7),
        event("gemm", 50, 120, "kernel", 8),
        event("gemm", 110, 130, "kernel", 9),
        event("Memcpy DtoH", 130, 200, "gpu_memcpy", 9),
        event("gemm", 300, 400, "kernel", 8),
    ]
    assert checks.overlap_fraction(events) == pytest.approx(80 / 200)


def test_overlap_by_the_engine_s_times(checks) -> None:
    """Over gloo an exchange is [end of encode, that + its seconds]; here 200 to 600."""
    device = [event("gemm", 250, 450, "kernel", 8), event("gemm", 550, 700, "kernel", 8)]
    assert checks.overlap_fraction([ENCODE, LENGTH, *device]) == pytest.approx(250 / 400)
    # On a CPU operators compute, those in our ranges do not.
    host = [event("aten::mm", 150, 300), event("aten::mul", 410, 450), event("aten::add", 460, 560)]
    share = checks.overlap_fraction([ENCODE, LENGTH, STEP, *host])
    assert share == pytest.approx((100 + 60) / 400)
    assert math.isnan(checks.overlap_fraction([ENCODE]))


@pytest.mark.nightly("6 s; test_profile reads traces that are kept")
def test_a_trace_of_an_overlapped_run(tmp_path: Path) -> None:
    figures, trace = tmp_path / "trace.json", tmp_path / "events.json.gz"
    options = ["--device", "cpu", "--model", "tiny", "-n", "9", "--sync_every", "4"]
    done = run_benchmark("gpu.trace", *options, "--json", str(figures), "--trace", str(trace))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(figures.read_text())
    results = document["results"]
    assert results["host_waits"] == []
    # Four exchanges of each fragment's encode, wait and outer step in nine steps.
    assert results["num_ranges"] >= 10
    assert 0 <= results["overlap_fraction"] <= 1
    assert "overlap" in document["summary"]
    # The same from the file alone: the names of its ranges tell how long the exchanges took.
    again = run_benchmark("gpu.trace", "--read", str(trace))
    assert again.returncode == 0, again.stdout + again.stderr
    read = json.loads(again.stdout)
    assert read["num_ranges"] == results["num_ranges"] and read["host_waits"] == []
    for name in ("overlap_fraction", "hidden_fraction"):
        assert read[name] == results[name]


def test_a_trace_of_one_replica(checks) -> None:
    """It has nothing to hide; with peers, a trace without an exchange proves nothing."""
    from benchmarks.gpu import trace as gpu_trace

    wait = event("diloco_comm::wait fragment=1 round=1", 350, 400, "user_annotation")
    call = event("cudaEventSynchronize", 150, 160, "cuda_runtime")
    for world, more, is_passed in ((1, [], True), (2, [], False), (1, [call], False)):
        figures = gpu_trace.judge([ENCODE, wait, STEP, *more], world)
        assert figures["is_passed"] == is_passed


@pytest.mark.parametrize("more", [[], [event("ncclDevKernel_SendRecv", 250, 640, "kernel", 7)]])
def test_the_bar_of_the_hidden_part(more: list[dict[str, Any]], checks) -> None:
    """The names tell it, over gloo and over NCCL, however long the host was in its wait."""
    from benchmarks.gpu import trace as gpu_trace

    wait = event("diloco_comm::wait fragment=1 round=2", 600, 601, "user_annotation")
    events = [ENCODE, wait, STEP, LENGTH, *more]  # training stood still for 50 of 400 microseconds
    for least, is_passed in ((0.0, True), (87.0, True), (88.0, False)):
        figures = gpu_trace.judge(events, 2, least)
        assert figures["is_passed"] == is_passed and figures["hidden_fraction"] == 0.875
        assert [bar["holds"] for bar in figures["bars"]] == ([is_passed] if least else [])
    # Nothing to hide is not hidden. One replica fails nothing and proves nothing, whatever it took.
    for world, seen in ((2, events[:3]), (1, events[:3]), (1, events)):
        figures = gpu_trace.judge(seen, world, 95.0)
        assert figures["is_passed"] == (world == 1)
        (bar,) = figures["bars"]
        assert bar["value"] is None and not bar["holds"]
        json.dumps(figures, allow_nan=False)


def trained(rank: int, world: int) -> list[dict[str, Any]]:
    from benchmarks.gpu import training as gpu_training

    args = argparse.Namespace(device="cpu", model="tiny", iters=24, warmup_iters=2, sync_every=6)
    return [gpu_training.train(args, rank, world, with_diloco) for with_diloco in (False, True)]


def test_training_with_and_without_exchange(workers, checks) -> None:
    from benchmarks.gpu import training as gpu_training

    results = workers(2).run(trained)
    alone, eager = ([result[i] for result in results] for i in range(2))
    report = gpu_training.report_on(alone, eager)
    assert report["is_passed"] and "Eager int4" in report["summary"]
    assert eager[0]["num_syncs"] >= 12 and eager[0]["sent_bytes"] > 0
    assert "outer_hash" not in alone[0]
    assert eager[0]["last_loss"] < eager[0]["first_loss"]
    for name, value in (("outer_hash", ""), ("is_finite", False)):
        spoiled = [eager[0], {**eager[1], name: value}]
        assert not gpu_training.report_on(alone, spoiled)["is_passed"]


@emulated.needs_library
def test_a_rehearsal_emulates_the_kernels_of_a_gpu() -> None:
    """A program of the check, whose operators are the emulated ones on tensors of the CPU."""
    operators = ["encode", "reduce", "outer_step", "decode"]
    options = ["--impl", "cuda", "--device", "cpu", "--size", "1M"]
    done = run_benchmark("gpu.rehearse", "benchmarks.gpu.profile", *operators, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bytes an element") == len(operators)


def test_operators_for_the_sanitizer(checks, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from benchmarks.gpu import operators as gpu_operators
    from diloco_comm.ops.wire import ELEMENT_WIRES, WIRES

    monkeypatch.setattr(sys, "argv", ["gpu_operators.py", "--device", "cpu"])
    assert gpu_operators.main() == 0
    assert capsys.readouterr().out.count("equal True") == len(ELEMENT_WIRES) + len(WIRES)


@pytest.mark.parametrize(
    ("module", "arguments", "told"),
    [
        *(
            (name, [], "there is no CUDA device")
            for name in (
                "gpu.bounded",
                "gpu.large",
                "gpu.offload",
                "gpu.operators",
                "gpu.nccl_probe",
                "gpu.training",
                "gpu.trace",
            )
        ),
        ("gpu.profile", ["encode"], "there is no CUDA device"),
        ("gpu.trace", ["--device", "cpu", "--backend", "nccl"], "there is no CUDA device"),
        ("gpu.trace", ["--read", "{tmp}/none.json"], "--read expects a trace"),
        ("gpu.trace", ["--read", "{tmp}/text.json"], "--read expects a trace"),
        ("gpu.trace", ["--read", "{tmp}/list.json"], "--read expects a trace"),
        ("gpu.trace", ["--read", "{tmp}/text.json.gz"], "--read expects a trace"),
        ("gpu.trace", ["--replicas", "0"], "expected a number of at least 1, got '0'"),
        ("gpu.trace", ["--replicas", "-1"], "expected a number of at least 1, got '-1'"),
        ("gpu.large", ["--device", "cpu", "--impl", "foo"], "--impl must be of reference"),
        ("operators.kernels_gpu", ["--device", "cpu", "--impl", "foo"], "--impl must be of"),
        ("operators.kernels_gpu", ["-n", "0"], "expected a number of at least 1, got '0'"),
        *(
            ("operators.kernels_gpu", ["--device", "cpu", "--part", part], "--part must be I/N")
            for part in ("0/0", "x", "2/2", "1")
        ),
    ],
)
def test_a_program_that_cannot_run_says_so_in_one_sentence(
    module: str,
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in (("text.json", "text"), ("list.json", "[]"), ("text.json.gz", "text")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = [word.format(tmp=tmp_path) for word in arguments]
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{module}").main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


SAMPLE = """
import pytest

@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_one(device, number):
    assert number != {broken}
"""


@pytest.mark.nightly("8 s; it runs tests in shares, as the check of a GPU does")
@pytest.mark.fresh_interpreter
def test_shares_of_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every marked test runs once in all; one that fails is shown."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n gpu\n")
    for broken, expected in ((9, "7 passed"), (5, "6 passed, 1 failed")):
        sample = tmp_path / "test_sample.py"
        sample.write_text(SAMPLE.format(broken=broken))
        options = ["--logs", str(tmp_path), "--processes", "2", "--mark", "slow", str(sample)]
        done = run_benchmark("gpu.run_tests", *options)
        assert done.stdout.splitlines()[-1] == expected, done.stdout
        assert done.returncode == int(broken == 5), done.stdout
        assert ("test_one[cuda-5]" in done.stdout) == (broken == 5)
    log = "a.py::test_x PASSED [ 1%]\na.py::test_y[cuda] FAILED [ 2%]\na.py::test_z"
    from benchmarks.gpu import run_tests as gpu_tests

    ended = {"passed": 1, "failed": 1, "ended before its last test": 1}
    assert gpu_tests.outcome(log) == ended
    options += ["--select", "cpu or 3"]
    done = run_benchmark("gpu.run_tests", *options)
    assert done.stdout.splitlines()[-1] == "1 passed", done.stdout
    nothing = run_benchmark(
        "gpu.run_tests", "--logs", str(tmp_path), "--processes", "1", str(sample)
    )
    assert (nothing.returncode, nothing.stdout) == (1, "nothing\n")
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["0.log", "1.log"]


def test_large_fragments_are_compared_with_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A byte that differs in a window is found, and its place is told."""
    from benchmarks.gpu import large
    from diloco_comm import ops

    arguments = [
        "large",
        "--device",
        "cpu",
        "--size",
        "4000003",
        "--wires",
        "topk64",
        "--impl",
        "scalar",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    assert large.main() == 0
    assert capsys.readouterr().out == "   topk64    scalar 4000003 elements: equal\n"
    decode = ops.decode

    def wrong(*args: Any, **kwargs: Any) -> None:
        decode(*args, **kwargs)
        if kwargs.get("impl") == "scalar":
            args[2][0][-1] += 1.0

    monkeypatch.setattr(ops, "decode", wrong)
    assert large.main() == 1
    assert "decoded values of [3145728, 4000003)" in capsys.readouterr().out


def test_the_comparison_of_offload_runs_on_a_cpu() -> None:
    """Nothing is offloaded there."""
    options = ["--device", "cpu", "--size", "1M", "--impl", "scalar"]
    done = run_benchmark("gpu.offload", *options, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " scalar: equal; longest step " in done.stdout


@pytest.mark.parametrize("changed", ["outer", "digests", ""])
def test_offload_that_changes_a_bit_is_told(
    changed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.gpu import offload

    plain = {"digests": [1, 2], "outer": "a", "longest": 0.001, "peak": 0}
    runs = iter([plain, {**plain, "longest": 0.002, **({changed: "b"} if changed else {})}])
    monkeypatch.setattr(offload, "train", lambda *arguments: next(runs))
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(offload.dist, name, lambda *arguments, **options: None)
    monkeypatch.setattr(sys, "argv", ["offload", "--device", "cpu", "--impl", "scalar"])
    monkeypatch.delenv("DILOCO_COMM_IMPL", raising=False)
    assert offload.main() == bool(changed)
    assert ("DIFFERENT" if changed else "equal") in capsys.readouterr().out
    monkeypatch.delenv("DILOCO_COMM_IMPL")
