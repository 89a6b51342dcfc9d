"""``diloco-comm bench``: the commands measure; docs/reference/bench.md has their JSON."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import help_examples, run_cli
from workers import Crew, Pool
from zygote import Zygote

from diloco_comm import DiLoCo
from diloco_comm.ops.wire import WIRES, Layout, WireFormat
from diloco_comm_tools.bench import exchange as bench_exchange
from diloco_comm_tools.bench import methods
from diloco_comm_tools.bench import outer_step as bench_outer_step
from diloco_comm_tools.bench import tune as bench_tune
from diloco_comm_tools.common import reports, workers

pytestmark = pytest.mark.usefixtures("forked_programs")

DOCS = Path(__file__).resolve().parents[2] / "docs"
TOP = {"date", "commit", "machine", "versions", "command", "results", "output"}


@pytest.fixture(scope="module")
def ranks(zygote: Zygote) -> Iterator[Callable[[int], Pool]]:
    """Forked processes that a test gives a command line, as a launcher would."""
    crew = Crew(zygote)
    yield lambda world: crew.pool(world, init_group=False)
    crew.close()


def run_rank(
    rank: int, world: int, port: int, words: list[str], launcher: str
) -> tuple[int | None, str]:
    """Run the command as one rank of torchrun or srun; return the status and the output."""
    import contextlib
    import io

    from diloco_comm_tools.app import app

    variables = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    if launcher == "srun":
        variables = {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(world),
            "SLURM_LOCALID": str(rank),
            "SLURM_STEP_ID": "0",
        }
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    before = dict(os.environ)
    os.environ |= variables
    sys.argv = ["diloco-comm", "bench", *words]
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = app(["bench", *words], standalone_mode=False)
    finally:
        os.environ.clear()
        os.environ |= before
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return status, out.getvalue()


# -------------------------------------------------------------------------------------- exchange


def check_document(path: Path, output: str, what: str) -> dict[str, Any]:
    document = json.loads(path.read_text())
    assert document.keys() >= TOP
    assert document["output"] == output.splitlines()
    assert document["command"].startswith(f"diloco-comm bench {what}")
    assert {"torch", "python", "diloco_comm"} <= document["versions"].keys()
    return document


def keys_documented(what: str) -> set[str]:
    """The names in the table of docs/reference/bench.md below the heading of a command."""
    text = (DOCS / "reference" / "bench.md").read_text().split(f"### JSON of `{what}`", 1)[1]
    table = text.split("\n\n", 2)[1]
    return {
        name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }


def test_a_rank_without_the_others_is_one_sentence(fresh_workers: Callable[..., Pool]) -> None:
    # The names of torch's groups count on in a process where a group was not made.
    pool = fresh_workers(1, init_group=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["exchange", "-b", "64K", "-e", "64K"]
        port = taken.getsockname()[1]
        ((status, output),) = pool.run(run_rank, port, words, "torchrun")
    assert status == 1
    (line,) = output.splitlines()
    assert line.startswith("diloco-comm: rank 0 of 1 did not get through to the others: ")


@pytest.mark.nightly("4 s; they differ in the launcher", but=["2-torchrun"])
@pytest.mark.parametrize(("world", "launcher"), [(2, "torchrun"), (4, "srun")])
def test_exchange(world: int, launcher: str, ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    pool, path = ranks(world), tmp_path / "results.json"
    words = ["exchange", "-b", "64K", "-e", "128K", "-n", "2", "-w", "1", "-c", "1"]
    wires = ["int8", "int4", "int2r", "sub8", "topk64"]
    words += ["--wire", ",".join(wires), "--json", str(path), "--min-gb-per-s", "1e-9"]
    words += ["--link", "tcp"] if world == 2 else []
    results = pool.run(run_rank, workers.free_port(), words, launcher)
    assert [status for status, _ in results] == [None] * world
    output = results[0][1]
    assert all(not text for _, text in results[1:])
    document = check_document(path, output, "exchange")
    assert (document["workers"], document["over"]) == (world, "tcp" if world == 2 else "gloo")
    rows = document["results"]
    assert [(row["size"], row["wire"]) for row in rows] == [
        (size, wire) for size in (65536, 131072) for wire in ("fp32", *wires)
    ]
    for row in rows:
        assert row.keys() == keys_documented("exchange") - row["in_place"].keys() - {
            "p10",
            "p50",
            "p90",
            "samples",
        }
        figures = row["in_place"]
        assert figures["nwrong"] == 0 and row["identical"]
        gigabytes = row["size"] / 1e9
        assert figures["alg_bw"] == pytest.approx(gigabytes / (figures["time"] / 1e6))
        factor = 2 * (world - 1) / world
        assert figures["bus_bw"] == pytest.approx(figures["alg_bw"] * factor)
        (reference,) = (r for r in rows if (r["size"], r["wire"]) == (row["size"], "fp32"))
        ratio = reference["in_place"]["time"] / figures["time"]
        assert row["vs_reference"] == pytest.approx(ratio)
        assert row["time_us"]["p10"] <= row["time_us"]["p50"] <= row["time_us"]["p90"]


def test_too_low_a_bandwidth_sets_the_status(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["exchange", "-g", "2", "-b", "64K", "-e", "64K", "-n", "1", "-w", "0"]
    # The former name, with a note, is the same option.
    ended = run_cli("bench", *words, "--min-gbps", "1e6", "--emulate-link", "1,1")
    assert ended.status == 1
    out, err = capfd.readouterr()
    assert re.fullmatch(
        r"diloco-comm: --min-gbps is deprecated: its name is --min-gb-per-s, as its unit\n"
        r"diloco-comm: below --min-gb-per-s 1e\+06: int8 has \d\.\d{3} GB/s\n",
        err,
    )
    assert "link: simulated" in out and "1,1" in out


MISUSES = [
    (["exchange"], "the measurement needs several processes"),
    (["exchange", "-g", "2", "-b", "1Q"], "a size is a number like 4096, 64K, 1M or 1G, got '1Q'"),
    (["exchange", "-b", "4M", "-e", "1M"], "--maxbytes must be at least 4194304 (--minbytes), got"),
    (["exchange", "-g", "2", "-b", "2M", "-e", "1M"], "--maxbytes must be at least 2097152"),
    (["exchange", "-g", "2", "--wire", "int3"], "--wire must be of fp32"),
    (["exchange", "-g", "2", "-d", "double"], "--datatype must be one of float"),
    (["exchange", "-g", "2", "--emulate-link", "fast"], "--emulate-link must be GBPS"),
    (["exchange", "-g", "2", "--backend", "mpi"], "--backend must be one of gloo"),
    (["exchange", "-g", "2", "-f", "1"], "--stepfactor must be at least 2"),
    (["exchange", "-g", "2", "--link", "udp"], "--link must be gloo or tcp, got 'udp'"),
    (["tune", "-g", "2", "--link", "nccl"], "--link must be gloo or tcp, got 'nccl'"),
    (
        ["exchange", "-g", "2", "--link", "tcp", "--backend", "diloco"],
        "--link tcp needs --backend gloo, got --backend diloco",
    ),
    (["ops", "--size", "1G", "-n", "3"], "bench ops is python -m benchmarks.operators.roofline"),
    (["outer-step", "-g", "2", "--policy", "fast"], "--policy must be one of blocking"),
    (["outer-step", "-g", "2", "--fragments", "99"], "--fragments must be at most --layers 12"),
    (["tune", "-g", "2", "--lanes", "x"], "--lanes must be numbers"),
    (["tune", "-g", "2", "--budget", "-1"], "--budget must be a positive number of seconds"),
    (["tune", "-g", "2", "-o", "/nowhere/c.json"], "--out must be in a folder that exists"),
]


@pytest.mark.parametrize(("words", "sentence"), MISUSES)
def test_misuse_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from diloco_comm_tools.app import app

    assert app(["bench", *words], standalone_mode=False) == 2
    said = capsys.readouterr().err
    assert said.startswith("diloco-comm: ") and sentence in said
    assert len(said.splitlines()) == 1


SHORTER = {
    "exchange": ["-b", "64K", "-e", "64K", "-n", "1", "-w", "0"],
    "outer-step": ["--params", "1e4", "--layers", "4", "--step-time", "0.001", "-n", "1"],
    "tune": ["-b", "64K", "-n", "3"],
}


@pytest.mark.nightly(
    "6 s; the first tier has a tune of its own",
    but=[
        "diloco-comm bench outer-step -g 2 --params 25e6 --policy eager --emulate-link 1,10",
        "diloco-comm bench exchange -g 2 -b 1M -e 64M -c 1 --wire int8,int4",
        "torchrun --nproc-per-node 2 -m diloco_comm_tools.cli bench exchange -b 64M -e 64M",
    ],
)
@pytest.mark.parametrize(
    "line", [line for lines in help_examples("bench").values() for line in lines]
)
def test_examples_of_the_help_run(
    line: str,
    ranks: Callable[[int], Pool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The words of an example, with further options that make the run short."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    launcher, words = line.split(" bench ")
    command, *options = shlex.split(words)
    words = [command, *options, *SHORTER[command]]
    if launcher == "diloco-comm":
        ended = run_cli("bench", *words)
        torch.set_num_threads(threads)
        assert (ended.status, ended.err) == (0, "")
        output = ended.out + capfd.readouterr().out
    else:
        assert re.fullmatch(r"torchrun --nproc-per-node 2 -m diloco_comm_tools\.cli", launcher)
        (status, output), _ = ranks(2).run(run_rank, workers.free_port(), words, "torchrun")
        assert not status
    assert output.startswith(f"# {command}: diloco_comm")
    assert any(not row.startswith("#") for row in output.splitlines())
    if "--out" in options:
        config = json.loads((tmp_path / options[options.index("--out") + 1]).read_text())
        assert config.keys() == {"wire", "lanes", "chunk_bytes", "block_size"}


# ---------------------------------------------------------------------------------- outer-step


def test_outer_step(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    pool, path = ranks(2), tmp_path / "outer.json"
    words = ["outer-step", "--params", "1e4", "--layers", "4", "--step-time", "0.001", "-n", "2"]
    words += ["--sync-every", "4", "--fragments", "2", "--policy", "streaming"]
    words += ["--link", "tcp", "--json", str(path)]
    (_, output), _ = pool.run(run_rank, workers.free_port(), words, "torchrun")
    result = check_document(path, output, "outer-step")["results"]
    assert result["over"] == "tcp"
    inner = {"median", "p10", "p90", "samples"}
    assert result.keys() == keys_documented("outer-step") - inner
    assert result["params"] == 10_000 and result["bytes"] == 40_000
    # int8 in both directions of the two phases; headers and votes come on top.
    assert 10_000 < result["sent_bytes"] < 14_000
    parts = sum(result[f"{name}_us"]["median"] for name in ("encode", "exposed", "outer_step"))
    assert 0 < parts < 2 * result["blocked_us"]["median"]
    assert 0 < result["utilisation"] < 1


# ------------------------------------------------------------------------------------------ tune


@pytest.mark.parametrize("link", ["gloo", "tcp"])
def test_tune_writes_a_config_that_diloco_reads(
    link: str, ranks: Callable[[int], Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, path, config = ranks(2), tmp_path / "tune.json", tmp_path / "config.json"
    words = ["tune", "-b", "256K", "-n", "3", "--lanes", "1,2", "--emulate-link", "0.2,5"]
    words += ["-o", str(config), "--json", str(path)]
    words += ["--link", link] if link != "gloo" else []
    (_, output), _ = pool.run(run_rank, workers.free_port(), words, "torchrun")
    document = check_document(path, output, "tune")
    assert document["over"] == link
    chosen = document["config"]
    assert json.loads(config.read_text()) == {**chosen, "block_size": 256}
    for row in document["results"]:
        assert row.keys() == keys_documented("tune")
    default = document["results"][0]
    for row in document["results"]:
        assert row["vs_default"] == pytest.approx(default["time"] / row["time"])
    assert (default["lanes"], default["chunk_bytes"]) == (1, None)
    # The chosen setting is the default, or was faster when both were timed in turns.
    assert (
        document["speedup"] == 1.0
        or document["speedup"] >= 1.02
        or chosen == {key: default[key] for key in chosen}
    )
    monkeypatch.setenv("DILOCO_COMM_CONFIG", str(config))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=3) as diloco:
        used = diloco.config()
    assert {key: used[key] for key in chosen} == chosen


def choice(wire: str, seconds: float) -> dict[str, Any]:
    return {"config": {"wire": wire}, "seconds": seconds}


def test_tune_ranks_every_wire_and_gives_sparse_ones_error_feedback() -> None:
    assert set(bench_tune._by_precision(WIRES)) == set(WIRES)
    assert bench_tune._by_precision(("sub8", "int2r", "int4")) == ["int4", "int2r", "sub8"]
    config = bench_tune.Candidate("topk64").config()
    assert config["error_feedback"] is True
    assert "error_feedback" not in bench_tune.Candidate("sub8").config()


def test_a_mean_is_compared_with_the_reference_of_its_own_round() -> None:
    sources = [methods.source_of(rank, 5000, torch.float32) for rank in range(3)]
    layout = Layout.plan(5000, 3, wire=WireFormat("int2r"))
    first, second = (methods.defined_mean(sources, layout, round) for round in (0, 1))
    assert not torch.equal(first, second)
    assert methods.relative_l2(first, methods.exact_mean(3, 5000, torch.float32)) < 0.6


def test_a_budget_chooses_the_most_precise_wire_that_fits() -> None:
    found = [choice("fp32", 4.0), choice("int8", 1.1), choice("int4", 0.6)]
    for budget, wire in ((5.0, "fp32"), (2.0, "int8"), (1.0, "int4"), (0.1, "int4")):
        settings = bench_tune.Settings(wires=("int4", "int8", "fp32"), budget_s=budget)
        assert bench_tune._by_precision(settings.wires) == ["fp32", "int8", "int4"]
        assert bench_tune._fitting(found, settings)["config"]["wire"] == wire
    settings = bench_tune.Settings(wires=("int8", "fp32"))
    assert bench_tune._fitting(found, settings)["config"]["wire"] == "int8"


@pytest.mark.parametrize(
    ("times", "expected"), [((4.0, 3.0), 1), ((4.0, 3.99), 0), ((4.0, 5.0), 0)]
)
def test_a_candidate_must_beat_the_default(
    times: tuple[float, float], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the interleaved measurement counts; a setting that was fast before may lose."""
    settings = bench_tune.Settings(chunks=(None, 1 << 20), lanes=(1,))

    class Bench:
        def __init__(self) -> None:
            self.settings = settings

        def measure(self, candidates: list[bench_tune.Candidate], iters: int) -> list[list[float]]:
            by_chunk = {None: times[0], 1 << 20: times[1] if iters > 2 else 0.1}
            return [[by_chunk[candidate.chunk_bytes]] * 3 for candidate in candidates]

    monkeypatch.setattr(reports, "machine", lambda: {k: 0 for k in MACHINE})
    report = reports.Report("tune", quiet=True)
    chosen = bench_tune._choose(report, Bench(), "int8")  # type: ignore[arg-type]
    assert chosen["config"]["chunk_bytes"] == (None, 1 << 20)[expected]


MACHINE = ("cpu", "cores", "memory_gib", "isa", "kernel", "tcp")


def test_a_record_names_the_commit_and_the_script_of_the_checkout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    git = ["git", "-C", str(DOCS.parent), "rev-parse", "--short=12", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("this is no checkout")
    assert reports.commit().removesuffix("-dirty") == head.stdout.strip()
    monkeypatch.setattr(sys, "argv", [str(DOCS.parent / "examples" / "ddp.py"), "--steps", "3"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert reports.command_line() == "python examples/ddp.py --steps 3"


def test_links() -> None:
    assert bench_exchange.parse_link("0.5,10") == (0.5, 10.0)
    assert bench_exchange.parse_link("") is None
    assert "0.5,10" in bench_exchange.describe_link((0.5, 10.0))
    assert bench_outer_step.Settings(policy="co2").overlap().clip == 1.0
