"""``diloco-comm profile``: real runs recorded and reported, examples, JSON, sentences."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import check_documented, check_misuse, check_schema, examples, run_cli
from commands import CLI, LAUNCHER, run_command, run_python
from problems import Regression, train_step
from trace_files import GEMM, NCCL, Nsys, event, kernel, launch, write_kineto
from workers import Pool

from diloco_comm import DiLoCo, Streaming
from diloco_comm.asynchronous import AsyncDiLoCo, DecoupledDiLoCo
from diloco_comm.backend import DilocoProcessGroup
from diloco_comm.base import recording
from diloco_comm.base.recording import Recorder
from diloco_comm_tools.profile import command as profile_command

PART: dict[str, Any] = {
    "communication_us": float,
    "overlapped_us": float,
    "exposed_us": float,
    "overlap": (float, None),
}
SCHEMA: dict[str, Any] = {
    "schema": int,
    "slowest_rank": (int, None),
    "ranks": [
        {
            "rank": int,
            "file": str,
            "device": str,
            "span_us": float,
            "computation_us": float,
            **PART,
            "ours": PART,
            "inner": PART,
            "phases": {...: {"count": int, "total_us": float, "max_us": float}},
        }
    ],
}
KERNELS = [launch(0, 1), kernel(NCCL, 5, 20, 7, 1), launch(1, 2), kernel(GEMM, 15, 20, 20, 2)]


def report_json(*paths: Path) -> dict[str, Any]:
    ended = run_cli("profile", "report", *paths, "--json")
    assert (ended.status, ended.err) == (0, "")
    return json.loads(ended.out)


# ------------------------------------------------------------------------ real runs


def train_recorded(rank: int, world: int, folder: str) -> list[tuple[int, float]]:
    """Train with a recorder; return (round, exchange in us) of the rounds received meanwhile."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(Path(folder), skip=2, steps=6)
    hook = recorder.attach()
    try:
        with DiLoCo(model, optimizer, sync_every=2, overlap=Streaming(1, 0.5)) as diloco:
            for step in range(12):
                train_step(model, optimizer, rank, step)
                torch.distributed.barrier()
    finally:
        hook.remove()
        recorder.stop()
    return [(m.round, 1e6 * m.exchange_s) for m in diloco.metrics()]


def test_recorded_run_reports_its_own_metrics(
    workers: Callable[[int], Pool], tmp_path: Path
) -> None:
    metrics = workers(2).run(train_recorded, str(tmp_path))
    paths = [tmp_path / f"rank{rank}.json.gz" for rank in (0, 1)]
    report = report_json(*paths)
    check_schema(report, SCHEMA)
    for rank, own in zip(report["ranks"], metrics, strict=True):
        # The recorder counts a step when it hears of it: after 2 to 8, in front of DiLoCo's hook
        # or behind it.
        exchange = rank["phases"]["exchange"]
        assert exchange["count"] == rank["phases"]["wait"]["count"] == 3
        sums = [sum(us for _, us in own[i : i + 3]) for i in range(len(own) - 2)]
        assert min(abs(exchange["total_us"] - total) for total in sums) <= 3
        assert rank["device"] == "cpu"
        assert 0 < rank["ours"]["communication_us"] <= 1.01 * exchange["total_us"]
        # The barriers are the trainer's.
        assert rank["inner"]["communication_us"] > 0
        assert rank["computation_us"] > 0


def profile_run(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    options = ["--out", "traces", "--skip", "3", "--steps", "40", "--json", "--"]
    return run_command([*CLI, "profile", "run", *options, *command], cwd=tmp_path)


REPLICAS = """
import torch
from diloco_comm import DiLoCo, Link
from diloco_comm.integrations.launch import replica_per_process
replicas = replica_per_process()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with DiLoCo(model, optimizer, sync_every=3, link=Link(timeout=60), **replicas):
    for step in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
print("trained")
"""


@pytest.mark.nightly("23 s; test_recorded_run_reports_its_own_metrics records two ranks")
def test_replicas_of_their_own_write_a_trace_each(tmp_path: Path) -> None:
    """Each process of torchrun believes to be alone when it writes its trace.

    The program ends before the last step to record. Standard output has the JSON alone.
    """
    (tmp_path / "train.py").write_text(REPLICAS)
    command = [sys.executable, *LAUNCHER, "2", "train.py"]
    ended = profile_run(tmp_path, *command)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["command"] == command
    # The lines of the two processes may be mixed.
    assert ended.stderr.count("trained") == 2
    assert "diloco-comm profile report traces" in ended.stderr
    names = [Path(path).name for path in json.loads(ended.stdout)["traces"]]
    assert names == ["rank0.json.gz", "rank1.json.gz"]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == names


class Asked(Exception):
    """Stands for the start of a recording."""


MADE: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer], object]] = {
    "DiLoCo": lambda model, inner: DiLoCo(model, inner, sync_every=2, peers="alone"),
    "AsyncDiLoCo": lambda model, inner: AsyncDiLoCo(model, inner, server="tcp://127.0.0.1:1"),
    "DecoupledDiLoCo": lambda model, inner: DecoupledDiLoCo(
        model, inner, server="tcp://127.0.0.1:1"
    ),
    "backend": lambda model, inner: DilocoProcessGroup(
        torch.distributed.HashStore(), 0, 1, timedelta(seconds=60)
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_what_trains_asks_for_a_recording(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_if_asked() -> None:
        raise Asked

    monkeypatch.setattr(recording, "start_if_asked", start_if_asked)
    model = torch.nn.Linear(4, 4)
    with pytest.raises(Asked):
        MADE[name](model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_import_starts_no_recording(tmp_path: Path) -> None:
    text = "import diloco_comm, torch\n"
    text += "from torch.optim.optimizer import _global_optimizer_post_hooks as hooks\n"
    text += "print(len(hooks), torch.autograd.profiler._is_profiler_enabled)"
    variables = {"DILOCO_COMM_PROFILE": str(tmp_path / "traces"), "DILOCO_COMM_PROFILE_SKIP": "1"}
    ended = run_python("-c", text, env={**os.environ, **variables})
    assert (ended.returncode, ended.stdout) == (0, "0 False\n"), ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_run_without_a_trace_fails(tmp_path: Path) -> None:
    ended = run_cli("profile", "run", "--out", tmp_path, "--", "true")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith("diloco-comm: no trace was written")


def test_run_ends_with_the_status_of_the_program() -> None:
    assert run_cli("profile", "run", "--", sys.executable, "-c", "exit(7)").status == 7
    kill = "import os; os.kill(os.getpid(), 9)"
    assert run_cli("profile", "run", "--", sys.executable, "-c", kill).status == 137


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "torchrun --nproc-per-node 4 train.py --lr 1",
            "torchrun --nproc-per-node 4 --no-python {nsys} '--output=t/rank%q{{RANK}}' "
            "python train.py --lr 1",
        ),
        (
            "torchrun --nnodes=2 -m pkg.train -m x",
            "torchrun --nnodes=2 --no-python {nsys} '--output=t/rank%q{{RANK}}' "
            "python -m pkg.train -m x",
        ),
        (
            "torchrun --no-python ./train.sh a",
            "torchrun --no-python {nsys} '--output=t/rank%q{{RANK}}' ./train.sh a",
        ),
        ("python train.py", "{nsys} --output=t/rank0 python train.py"),
    ],
)
def test_nsys_line_wraps_every_rank(
    command: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    ended = run_cli("profile", "run", "--out", "t", "--nsys", "--", *command.split())
    nsys = "nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --export=sqlite"
    assert (ended.status, ended.out) == (0, line.format(nsys=nsys) + "\n")
    printed = run_cli("profile", "run", "--out", "t", "--nsys", "--json", "--", *command.split())
    assert json.loads(printed.out) == {"schema": 1, "command": shlex.split(ended.out)}


def test_nsys_line_within_slurm_names_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")
    ended = run_cli("profile", "run", "--nsys", "--", "python", "train.py")
    assert "--output=traces/rank%q{SLURM_PROCID}" in ended.out


# ------------------------------------------------------------------------ examples and schema


@pytest.mark.parametrize("arguments", examples(profile_command.REPORT_EXAMPLES), ids=" ".join)
def test_examples_of_report_run(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("traces").mkdir()
    for rank in (0, 1):
        if not any(word.endswith(".sqlite") for word in arguments):
            write_kineto(Path(f"traces/rank{rank}.json.gz"), KERNELS, rank)
            continue
        nsys = Nsys(Path(f"traces/rank{rank}.sqlite"))
        nsys.add_kernel(NCCL, 5_000, 25_000)
        nsys.add_kernel(GEMM, 15_000, 35_000)
        nsys.close()
    ended = run_cli(*arguments)
    assert (ended.status, ended.err) == (0, "")
    if "--json" in arguments:
        report = json.loads(ended.out)
        check_schema(report, SCHEMA)
        assert report["ranks"][0]["overlap"] == 0.5
    else:
        assert "50.00 %" in ended.out
    if "--plot" in arguments:
        assert Path("timeline.png").read_bytes().startswith(b"\x89PNG")


def test_report_of_a_folder_is_in_the_order_of_ranks(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        write_kineto(tmp_path / f"rank{rank}.json", KERNELS, None)
    write_kineto(tmp_path / "rank1.json.gz", KERNELS, None)
    nsys = Nsys(tmp_path / "rank3.sqlite")
    nsys.add_kernel(NCCL, 5_000, 25_000)
    nsys.close()
    # Other files, and traces in subfolders, are ignored.
    (tmp_path / "rank4.txt").write_text("")
    (tmp_path / "rank5.nsys-rep").write_text("")
    (tmp_path / "older").mkdir()
    write_kineto(tmp_path / "older/rank6.json", KERNELS, 6)
    ranks = report_json(tmp_path)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3, 10]
    names = ["rank0.json", "rank1.json.gz", "rank2.json", "rank3.sqlite", "rank10.json"]
    assert [rank["file"] for rank in ranks] == [str(tmp_path / name) for name in names]


def test_traces_of_a_folder_that_name_no_rank_keep_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.json", "a.json"):
        write_kineto(tmp_path / name, KERNELS, None)
    found = [(rank["rank"], Path(rank["file"]).name) for rank in report_json(tmp_path)["ranks"]]
    assert found == [(0, "a.json"), (1, "b.json")]


def test_a_folder_of_reports_that_are_not_exported_is_one_sentence(tmp_path: Path) -> None:
    check_misuse(run_cli("profile", "report", tmp_path), f"there is no trace in {tmp_path}")
    (tmp_path / "rank0.nsys-rep").write_text("")
    check_misuse(run_cli("profile", "report", tmp_path), "nsys export --type sqlite rank0.nsys-rep")


@pytest.mark.parametrize("hours", [0, 20], ids=["short", "long"])
@pytest.mark.parametrize("columns", [40, 80])
def test_no_label_is_cut(
    hours: int, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    long_us = 3.6e9 * hours + 20
    stage = event("diloco_comm::outer_step fragment=0 round=3", "user_annotation", 0, long_us)
    events = [*KERNELS, launch(2, 3), kernel(NCCL, 50, long_us, 7, 3), stage]
    ended = run_cli("profile", "report", write_kineto(tmp_path / "rank0.json", events, 0))
    assert ended.status == 0 and "\u2026" not in ended.out
    for title in ("communication", "overlapped", "exposed", "computation", "longest", "in all"):
        assert ended.out.count(title) == 1
    for label in ("diloco_comm", "outer_step", f"{(long_us + 20) / 1e3:,.3f}"):
        assert label in ended.out
    # The report of a run of minutes fits into a usual terminal.
    widest = max(map(len, ended.out.splitlines()))
    assert hours or widest <= 80


@pytest.mark.parametrize("arguments", examples(profile_command.RUN_EXAMPLES), ids=" ".join)
def test_examples_of_run_are_understood(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The examples' programs do not exist here, so a stand-in takes the place of their start."""
    started: list[list[str]] = []

    def run(
        command: list[str], env: dict[str, str], stdout: int | None
    ) -> subprocess.CompletedProcess[bytes]:
        assert stdout is None
        assert env["DILOCO_COMM_PROFILE"].endswith("/traces")
        assert env["DILOCO_COMM_PROFILE_STEPS"] == ("40" if "--steps" in arguments else "20")
        started.append(command)
        return subprocess.CompletedProcess(command, 5)

    monkeypatch.setattr(profile_command.subprocess, "run", run)
    # torchrun lies beside this Python, which may not be on the path.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    ended = run_cli(*arguments)
    if "--nsys" in arguments:
        assert (ended.status, started) == (0, [])
    else:
        assert (ended.status, started) == (5, [arguments[arguments.index("--") + 1 :]])


def test_documented_keys_are_those_of_the_json() -> None:
    keys = [*SCHEMA, *SCHEMA["ranks"][0], *PART, "count", "total_us", "max_us"]
    check_documented(keys, "how-to/profile.md")


# ------------------------------------------------------------------------ sentences


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.json", b"", "is empty"),
        ("a.json", b"[1, 2]", "is no Kineto trace: it is not a JSON object"),
        ("a.json", b"{}", "is no Kineto trace: it has no traceEvents"),
        ("a.json", b'{"traceEvents": 3}', "is no Kineto trace: it has no traceEvents"),
        ("a.json", b'{"traceEvents": [', "is truncated"),
        ("a.json", b'{"traceEvents": [{}]', "is truncated"),
        ("a.json", b'{"traceEvents": [\xff', "is truncated"),
        ("a.json", b"\x7fELF\x00\x01", "is no Kineto trace"),
        ("a.json", b'{"traceEvents": [{"ts": "x", "dur": 1, "cat": "k"}]}', "none of Kineto's"),
        ("a.json.gz", gzip.compress(b"{}", mtime=0), "has no traceEvents"),
        ("a.json.gz", gzip.compress(b'{"traceEvents": []}' * 99, mtime=0)[:-9], "is truncated"),
        ("a.json.gz", b"\x1f\x8bnothing", "is truncated or no gzip file"),
        ("a.sqlite", b"SQLite format 3\0" + b"\xff" * 200, "no SQLite file"),
        ("a.nsys-rep", b"x", "nsys export --type sqlite"),
    ],
)
def test_wrong_files_are_one_sentence(
    tmp_path: Path, name: str, content: bytes, named: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    check_misuse(run_cli("profile", "report", path), str(path), named)


def test_foreign_database_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE x (y)")
    check_misuse(run_cli("profile", "report", path), "is no Nsight Systems export")
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE StringIds (id, value)")
    check_misuse(run_cli("profile", "report", path), "neither CUDA kernels nor NVTX ranges")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["report"], "Missing argument"),
        (["report", "/no/such.json"], "cannot read /no/such.json: No such file"),
        (["report", "/dev"], "there is no trace in /dev: *.json, *.json.gz, *.sqlite"),
        (["run", "--skip", 0, "--", "true"], "--skip must be at least 1, got 0"),
        (["run", "--steps", 0, "--", "true"], "--steps must be at least 1, got 0"),
        (["run", "--", "/no/such/program"], "there is no program '/no/such/program'"),
        (["run", "--nsys", "--", "torchrun", "--no-such-option"], "arguments of torchrun"),
    ],
)
def test_impossible_requests_are_one_sentence(arguments: list[object], named: str) -> None:
    check_misuse(run_cli("profile", *arguments), named)


def test_plot_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "a.json", KERNELS)
    ended = run_cli("profile", "report", path, "--plot", path / "x.png")
    check_misuse(ended, "cannot write --plot")
