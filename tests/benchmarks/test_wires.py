"""Losses on every wire: the replicas in one process are the library's; SparseLoCo's scheme."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import run_benchmark
from choice_groups import grouped
from problems import Regression, train_step
from torch import Tensor, nn

from benchmarks.convergence import wire_means, wires, wires_report
from benchmarks.operators import equal_bytes
from diloco_comm import SGD, Blocking, DiLoCo, Eager, Streaming
from diloco_comm.ops import implementations
from diloco_comm.ops.wire import WireFormat

pytestmark = pytest.mark.usefixtures("forked_programs")

SYNC_EVERY, LR, SEED = 4, 0.7, 5
# A fragment's last round is under way when the training ends. After 15 steps, fragments have been
# trained since their last send.
NUM_STEPS = {"blocking": (8,), "streaming": (12, 15), "eager": (12, 15)}
LIBRARY: dict[str, dict[str, Any]] = {
    "blocking": {"overlap": Blocking()},
    "streaming": {"overlap": Streaming(delay=SYNC_EVERY // 2, alpha=0.5), "fragments": 2},
    "eager": {"overlap": Eager()},
}
WIRES = ("fp32", "int4", "int2r", "sub8", "topk64")


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Regression()
    return model, torch.optim.SGD(model.parameters(), lr=0.02)


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def with_the_library(rank: int, world: int, run: wires.Run, num_steps: int) -> list[Tensor]:
    """Return the local parameters after each step, then the outer ones after a flush."""
    model, optimizer = make()
    seen = []
    with DiLoCo(
        model,
        optimizer,
        sync_every=SYNC_EVERY,
        outer=SGD(LR),
        **grouped(
            {
                "wire": run.wire,
                "error_feedback": run.wire in ("int4", "topk64"),
                "seed": SEED,
                **LIBRARY[run.method],
            }
        ),
    ) as diloco:
        for step in range(num_steps):
            train_step(model, optimizer, rank, step)
            seen.append(values(model))
        diloco.flush()
        return [*seen, torch.cat([part.outer for part in diloco.parts if part.outer is not None])]


def in_one_process(_rank: int, _world: int, run: wires.Run, num_steps: int) -> list[list[Tensor]]:
    """Return the same of each replica: after a flush, local parameters are the outer ones."""
    replicas = [make() for _ in range(run.num_replicas)]
    rounds = wires.make_rounds(run, replicas)
    seen = []
    for step in range(num_steps):
        for rank, (model, optimizer) in enumerate(replicas):
            train_step(model, optimizer, rank, step)
        rounds.after_step(step + 1)
        seen.append([values(model) for model, _ in replicas])
    rounds.flush(num_steps)
    seen.append([values(model) for model, _ in replicas])
    return [list(of_replica) for of_replica in zip(*seen, strict=True)]


@pytest.mark.nightly("3 s; the first tier has many replicas in one process")
@pytest.mark.parametrize("method", LIBRARY)
@pytest.mark.parametrize("world", [2, 3])
def test_the_rounds_are_those_of_the_library(world: int, method: str, workers) -> None:
    """Bit by bit, after every step and at the end."""
    for wire, num_steps in product(WIRES, NUM_STEPS[method]):
        compare(wire, world, method, num_steps, workers)


@pytest.mark.parametrize("method", LIBRARY)
def test_many_replicas_are_those_of_the_library(method: str, workers) -> None:
    """Owners encode the mean of five payloads on sub2, but not under Eager."""
    compare("sub2", 5, method, NUM_STEPS[method][-1], workers)


def compare(wire: str, world: int, method: str, num_steps: int, workers) -> None:
    run = wires.Run(wire, SEED, LR, "118k", world, SYNC_EVERY, 0, method)
    (simulated,) = workers(1).run(in_one_process, run, num_steps)
    expected = workers(world).run(with_the_library, run, num_steps)
    for own, library in zip(simulated, expected, strict=True):
        assert len(own) == len(library) == num_steps + 1
        same = [torch.equal(a, b) for a, b in zip(own, library, strict=True)]
        assert all(same), (wire, num_steps, same)


def test_sparse_loco_keeps_the_largest_of_each_chunk() -> None:
    x = torch.randn(128, 192, generator=torch.Generator().manual_seed(1))
    sent, count = wire_means.compress(x)
    assert count == 6 * 64 and int(sent.count_nonzero()) <= count
    for rows, sent_rows in zip(x.split(64), sent.split(64), strict=True):
        for tile, kept in zip(rows.split(64, 1), sent_rows.split(64, 1), strict=True):
            threshold = tile.abs().flatten().topk(64).values[-1]
            assert torch.equal(kept != 0, tile.abs() >= threshold)
    # A table of four: a value and its copies are decoded alike.
    assert len(sent[sent != 0].unique()) <= 4
    assert (sent[sent != 0].sign() == x[sent != 0].sign()).all()


def test_sparse_loco_loses_nothing_but_the_decay() -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(2))
    compression = wire_means.SparseLoCo([x])
    (sent,) = compression.encode([x])
    (again,) = compression.encode([torch.zeros_like(x)])
    rest = compression._residuals[0]
    torch.testing.assert_close(0.95 * (x - sent) - again, rest)
    # Twice 64 values and a table.
    assert compression.sent_bits == 2 * (64 * 14 + 128)


def test_runs_are_made_once_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[wires.Run] = []

    def train(run: wires.Run) -> dict[str, Any]:
        made.append(run)
        loss = 2.0 + abs(run.lr - 1.4) + 0.1 * (run.wire == "sub8") + 0.01 * run.seed
        bits = WireFormat(run.wire).bits_per_element
        return {**vars(run), "bits": bits, "tuning_loss": loss, "loss": loss, "cpu_s": 0.0}

    monkeypatch.setattr(wires, "train", train)
    cell = wires.Cell(rounds=3, wires=("fp32", "sub8"))
    path = tmp_path / "runs" / "wires.jsonl"
    for _ in range(2):
        runs = wires.open_runs(path)
        wires.make(runs, cell)
    # 1, 0.7, 1.4 and 2 are tried for each wire; then 1.4 is trained with three seeds.
    assert len(made) == 2 * (4 + 3)
    lines = list(wires_report.report_lines(runs.rows))
    rows = [line.split() for line in lines if line.startswith(" ")]
    assert [row[:3] for row in rows] == [["fp32", "32", "1.4"], ["sub8", "0.1406", "1.4"]]
    assert rows[1][5] == "+0.1000"
    wires_report.draw(runs.rows, tmp_path / "wires.png")
    assert (tmp_path / "wires.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(TimeoutError):
        wires.make(wires.open_runs(path, 0.0), wires.Cell(rounds=4, wires=("fp32",)))


def test_runs_of_a_file_without_methods_are_blocking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: wires.Run) -> dict[str, Any]:
        assert run.method == "eager"
        losses = {"tuning_loss": 2.5 + run.lr, "loss": 2.5 + run.lr}
        return {**vars(run), "bits": 32.0, **losses, "cpu_s": 0.0}

    monkeypatch.setattr(wires, "train", train)
    path, cell = tmp_path / "wires.jsonl", wires.Cell(rounds=3, wires=("fp32",), seeds=(0,))
    rates, keys = (0.5, 0.7, 1.0, 1.4), {**cell.keys(), "wire": "fp32", "bits": 32.0}
    del keys["method"]
    losses = [{"lr": lr, "tuning_loss": abs(lr - 0.7), "loss": 2.0} for lr in rates]
    old = [{**keys, **loss, "seed": wires.TUNING_SEED} for loss in losses]
    old.append({**keys, "lr": 0.7, "seed": 0, "tuning_loss": 2.0, "loss": 2.0})
    before = "\n".join(["{}", *map(json.dumps, old)]) + "\n"
    path.write_text(before)
    for method in ("blocking", "eager"):
        runs = wires.open_runs(path)
        wires.make(runs, replace(cell, method=method))
    assert path.read_text().startswith(before)
    titles = [line for line in wires_report.report_lines(runs.rows) if "replicas" in line]
    assert titles == [
        "# 118k, 4 replicas, 3 rounds of 10 steps",
        "# Eager, 118k, 4 replicas, 3 rounds of 10 steps",
    ]
    titles = [line for line in wires_report.page_lines(runs.rows) if "replicas" in line]
    assert titles[1].startswith("| Eager, 118,000 parameters, W=4 replicas, 3 rounds of H=10")


def test_one_tiny_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "NUM_WINDOWS", 16)
    for wire, method in ((wires.SPARSE_LOCO, "blocking"), ("topk64", "eager")):
        run = wires.Run(wire, 0, 1.0, "118k", 2, sync_every=2, rounds=2, method=method)
        row = wires.train(run)
        assert row["method"] == method and 4 < row["loss"] < 7 and 0 < row["bits"] < 2
    losses = {
        (inner, wire): wires.train(
            wires.Run(wire, 0, 1.0, f"118k, {inner} 0.01", 2, sync_every=2, rounds=4)
        )["loss"]
        for inner in ("AdamW", "Muon")
        for wire in wires.MULOCO[0].wires
    }
    assert all(3 < loss < 7 for loss in losses.values()) and len(set(losses.values())) == 6
    with pytest.raises(ValueError, match="no method 'eager' with wire 'SparseLoCo'"):
        wires.train(replace(run, wire=wires.SPARSE_LOCO))


def test_a_run_that_diverges_has_a_loss_that_is_no_number() -> None:
    for method in LIBRARY:
        replicas = [make() for _ in range(3)]
        run = wires.Run("int2r", SEED, LR, "118k", 3, SYNC_EVERY, 0, method)
        rounds = wires.make_rounds(run, replicas)
        with torch.no_grad():
            next(replicas[1][0].parameters()).fill_(float("inf"))
        for step in range(2 * SYNC_EVERY):
            rounds.after_step(step + 1)
        rounds.flush(2 * SYNC_EVERY)
        assert all(values(model).isnan().any() for model, _ in replicas)


def recorded(name: str = "wires") -> dict[str, Any]:
    return json.loads((wires.common.RESULTS / "convergence" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["wires", "muloco"])
def test_the_recorded_table_is_that_of_the_recorded_runs(name: str) -> None:
    record = recorded(name)
    rows = wires_report.recorded_runs(record["results"])
    assert record["output"] == list(wires_report.report_lines(rows))
    assert wires_report.condense(rows) == record["results"]


def test_the_tables_of_the_page_are_those_of_the_recorded_runs(tmp_path: Path) -> None:
    rows = wires_report.recorded_runs(recorded()["results"])
    original = wires.common.RESULTS.parents[1] / "docs" / "explanation" / "bits.md"
    page = tmp_path / "bits.md"
    page.write_text(original.read_text())
    wires_report.write_page(rows, page)
    assert page.read_text() == original.read_text()
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no line <!-- tables -->"):
        wires_report.write_page(rows, page)


def test_a_difference_between_implementations_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--elements", "9000", "--slice", "5000", "--wires", "int2r,topk64"]
    words += ["--runs", str(tmp_path / "equal.jsonl"), "--json", str(tmp_path / "equal.json")]
    done = run_benchmark("operators.equal_bytes", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "equal.json").read_text())
    assert record["output"] == done.stdout.splitlines()
    assert [row["elements"] for row in record["results"]] == [9000, 9000]
    assert {"date", "commit", "machine", "versions", "command"} < record.keys()
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("int2r", "9000", "0"),
        ("topk64", "9000", "0"),
    ]
    assert all(int(row[2]) > 0 for row in rows)
    if len(implementations.available_impls("cpu")) < 3:
        pytest.skip("this processor has one implementation alone")
    results = equal_bytes.results

    def changed(x: Tensor, wire: WireFormat, key: int, impl: str) -> Any:
        for name, tensor in results(x, wire, key, impl):
            if (impl, name) == ("avx2", "payload"):
                tensor[40] ^= 1
            yield name, tensor

    monkeypatch.setattr(equal_bytes, "results", changed)
    row = equal_bytes.compare("sub8", 0, 5000)
    assert row["differing_bytes"] == {"avx2 payload": 1}
