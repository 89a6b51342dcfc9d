"""The benchmarks of overlap and of convergence run, and what they compute can be wrong.

No time is asserted. Scripts run once, as a user runs them, at a tiny size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_runs import ROOT, run_benchmark, shows
from workers import Pool

from diloco_comm_tools.common import plots

pytestmark = pytest.mark.usefixtures("forked_programs")


def run_script(name: str, *arguments: object, status: int = 0) -> list[str]:
    done = run_benchmark(name, *arguments)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout.splitlines()


# --------------------------------------------------------------------------------- overlap


def test_overlap_measures_every_variant_and_accounts_for_its_syncs(tmp_path: Path) -> None:
    path = tmp_path / "overlap.json"
    size = ["-g", 2, "--width", 64, "--layers", 1, "--context", 16, "-n", 2, "--sync-every", 3]
    variants = "ddp,blocking:int8,streaming:int4:1:2,eager:int4"
    options = ["--variants", variants, "--gbps", 1, "--rtt-ms", 1, "--json", path]
    lines = run_script("training.overlap", *size, *options)
    assert any(line.startswith("# link: simulated") for line in lines)
    rows = {row["variant"]: row for row in json.loads(path.read_text())["results"]}
    assert list(rows) == ["alone", *variants.split(",")]
    assert rows["alone"]["of_alone"] == 1.0
    for name in variants.split(",")[1:]:
        row = rows[name]
        assert 0.0 <= row["overlap_fraction"] <= 1.0
        assert row["exchange_ms"] > 0 and row["codec_and_wire_cpu_ms"] > 0
    # A blocking exchange is exposed from end to end. What counts as hidden is noise: on a loaded
    # machine that may be much in one run.
    options[1] = "blocking:int8"
    hidden = rows["blocking:int8"]["overlap_fraction"]
    for _ in range(4):
        if hidden < 0.5:
            break
        run_script("training.overlap", *size, *options)
        hidden = json.loads(path.read_text())["results"][1]["overlap_fraction"]
    assert hidden < 0.5
    # Half of the model in each of two fragments, at half of the bits.
    ratio = rows["blocking:int8"]["sent_mb"] / rows["streaming:int4:1:2"]["sent_mb"]
    assert ratio == pytest.approx(4.0, rel=0.15)


def test_overlap_summary_counts_the_wait_at_a_segments_end_as_exposed() -> None:
    from benchmarks.training.overlap import summarize

    alone = [{"seconds": 3.0, "steps": 30.0}]
    segment = {
        "seconds": 4.0,
        "steps": 30.0,
        "num_syncs": 2.0,
        "sent_bytes": 4e6,
        "encode_s": 0.1,
        "outer_step_s": 0.1,
        "other_threads_cpu_s": 0.2,
        "exchange_s": 2.0,
        "exposed_s": 0.3,
        "settle_s": 0.2,
    }
    _, row = summarize({"alone": alone, "x": [segment]}, tokens_per_step=10, crowding=2.0)
    assert row["of_alone"] == pytest.approx(0.75)
    assert row["tokens_per_s"]["median"] == pytest.approx(75.0)
    assert row["overlap_fraction"] == pytest.approx(0.75)
    assert row["exposed_ms"] == pytest.approx(250.0)
    assert row["codec_and_wire_cpu_ms"] == pytest.approx(200.0)
    # Two replicas a core: what one of them computes, both wait for.
    assert row["codec_and_wire"] == pytest.approx(0.2)
    assert row["unexplained"] == pytest.approx(0.25 - 0.2 - 0.125)


def test_variant_is_refused_unless_policy_and_wire_are_given() -> None:
    from benchmarks.training.overlap import Variant, parse_variants

    assert Variant.parse("streaming:int8:5:4") == Variant(
        "streaming:int8:5:4", "streaming", "int8", 5, 4
    )
    assert [v.name for v in parse_variants("eager:int4")] == ["alone", "eager:int4"]
    for text in ("eager", "lazy:int4", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            Variant.parse(text)


def test_sweep_measures_only_what_the_file_of_its_runs_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.exchange import netns
    from benchmarks.training import overlap

    measured: list[int] = []

    def run_cell(cell: argparse.Namespace) -> list[dict[str, Any]]:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(cell.nprocs)
        tokens = {"median": 1.0}
        return [{"variant": v.name, "of_alone": 0.5, "tokens_per_s": tokens} for v in cell.variants]

    monkeypatch.setattr(overlap, "run_cell", run_cell)
    monkeypatch.setattr(netns, "missing", lambda: "not here")
    path, record = tmp_path / "sweep.jsonl", tmp_path / "record.json"
    written = ["--runs", str(path), "--json", str(record)]
    args = overlap.make_parser().parse_args(["--sweep", *written])
    with pytest.raises(KeyboardInterrupt):
        overlap.sweep(args)
    assert len(path.read_text().splitlines()) == 1 + 3
    measured.clear()
    row = {"variant": "eager:int4", "of_alone": 0.9, "tokens_per_s": {"median": 1.0}}
    monkeypatch.setattr(overlap, "run_cell", lambda cell: measured.append(cell.nprocs) or [row])
    args.plot = tmp_path / "sweep.png"
    assert overlap.sweep(args) == 0
    results = json.loads(record.read_text())["results"]
    assert results == [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert len(results) == len(overlap.cells(args))
    assert shows(args.plot, plots.BLUE)
    assert len(measured) == len(overlap.cells(args)) - 3


# --------------------------------------------------------------------------------- torchft


def test_torchft_is_skipped_with_a_sentence_when_it_is_not_there(tmp_path: Path) -> None:
    from benchmarks.against_torchft import peer as torchft_peer

    if torchft_peer.missing() is None:
        pytest.skip("torchft is installed")
    path = tmp_path / "never.json"
    (line,) = run_script("against_torchft.compare", "--json", path, status=77)
    assert line.startswith("# skipped: torchft is not installed: pip install --no-deps")
    assert not path.exists()


@pytest.mark.nightly("3 s; a report of a benchmark")
def test_memory_of_ours_is_measured_without_torchft(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    size = ["--width", 64, "-n", 2, "--sync-every", 8, "--fragments", 4, "--delay", 1]
    options = ["--variants", "diloco_int8", "--memory-only", "--json", path]
    run_script("against_torchft.compare", *size, *options)
    memory = json.loads(path.read_text())["results"]["diloco_int8"]["memory"]
    # Outer parameters and momentum at least.
    assert memory["peak_sizes"] > 2.0
    assert memory["model_bytes"] > 3e6


@pytest.mark.nightly("9 s of a benchmark")
def test_ours_is_measured_beside_the_plain_traffic_of_its_passes(tmp_path: Path) -> None:
    path = tmp_path / "time.json"
    size = ["--width", 64, "-n", 2, "-w", 1, "--sync-every", 8, "--fragments", 4, "--delay", 1]
    options = ["--variants", "plain,diloco_int8", "--time-only", "--json", path]
    lines = run_script("against_torchft.compare", *size, *options)
    results = json.loads(path.read_text())["results"]
    assert list(results) == ["plain", "diloco_int8"]
    assert not any("memory" in result for result in results.values())
    floor, ours = results.values()
    rounds = [a / b for a, b in zip(*(r["samples"]["blocked"] for r in (ours, floor)), strict=True)]
    assert min(rounds) <= ours["over_plain"] <= max(rounds)
    assert any("x as long as the plain traffic of its passes" in line for line in lines)
    # All of what blocks the floor are its two passes; nothing is waited for.
    for blocked, encode, step in zip(
        *(floor["samples"][key] for key in ("blocked", "encode", "outer_step")), strict=True
    ):
        assert 0 < encode and 0 < step and encode + step <= blocked * 2
    assert set(floor["samples"]["exposed"]) == {0.0}


def plain_rounds(rank: int, world: int, steps: int) -> list[list[str]]:
    """What the loops are given at each inner step; and that the last one moved what it should."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.against_torchft.plain_traffic import Traffic

    traffic = Traffic([5000, 3000], sync_every=4, first_sends=[1, 3], delay=1)
    found: list[list[str]] = []
    run = traffic._run

    def note(which: str, buffers: list[torch.Tensor]) -> None:
        found[-1].append(f"{which} {buffers[0].numel()}")
        buffers[-1].copy_(torch.arange(buffers[-1].numel()) % 100 + 1)
        before = [memory.clone() for memory in buffers]
        run(which, buffers)
        if which == "encode":
            assert all(torch.equal(a, b) for a, b in zip(before[:2], buffers[:2], strict=True))
            # Each of the codes is written: few happen to be what they were.
            assert (buffers[2] == before[2]).float().mean() < 0.1
        else:
            outer, momentum, params, codes = buffers
            assert torch.equal(outer, before[0] + codes)
            assert torch.equal(momentum, before[1] + codes)
            assert torch.equal(params, outer)

    traffic._run = note
    for _ in range(steps):
        found.append([])
        traffic.step()
    return found


def test_plain_traffic_is_that_of_the_schedule(workers: Callable[[int], Pool]) -> None:
    """Whole units of 1024 elements; sent at steps 1 and 3 of every 4, applied one step later."""
    first, second = workers(2).run(plain_rounds, 9)
    encode, step = ["encode 4096"], ["outer_step 4096"]
    other = ["encode 2048"], ["outer_step 2048"]
    assert first == second == [encode, step, *other, encode, step, *other, encode]


@pytest.mark.parametrize("delay", [0, 1])
def test_plain_traffic_is_due_when_ours_sends_and_applies(delay: int) -> None:
    from benchmarks.against_torchft.compare import first_sends

    args = argparse.Namespace(sync_every=8, fragments=4, delay=delay)
    assert first_sends(args) == [2 - delay, 4 - delay, 6 - delay, 8 - delay]


@pytest.mark.parametrize("num_fragments", [1, 3, 4])
def test_both_sides_cut_the_model_alike(num_fragments: int) -> None:
    from benchmarks.against_torchft.compare import fragment_modules, fragment_patterns
    from benchmarks.training.outer_step import Transformer
    from diloco_comm.replica.fragments import make_fragments, trainable_parameters

    model = Transformer(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = trainable_parameters(model, [optimizer])
    ours = make_fragments(model, named, fragment_patterns(num_fragments))
    theirs = fragment_modules(model, num_fragments)
    assert len(ours) == len(theirs) == num_fragments
    for fragment, module in zip(ours, theirs, strict=True):
        assert {id(p) for p in fragment.params} == {id(p) for p in module.parameters()}


# ----------------------------------------------------------------------------- convergence


@pytest.mark.nightly("16 s of a benchmark")
def test_convergence_tunes_before_it_trains_and_repeats_nothing(tmp_path: Path) -> None:
    from benchmarks.convergence.sweep import Run
    from benchmarks.convergence.tasks import SMOKE

    runs, path = tmp_path / "runs.jsonl", tmp_path / "table.json"
    rows = "DDP,FedAvg,CO2 clip,Streaming int4 feedback"
    # One run is there; another is there with other settings, and is repeated.
    size = asdict(SMOKE["digits"])
    done = {"choice": {}, "size": size, "loss": 123.0, "accuracy": 0.0, "sent_bytes": 1}
    lines = [json.dumps({"command": "a test"})]
    for seed, changed in ((0, {}), (1, {"size": {**size, "num_steps": 9}})):
        run = Run("digits", "train", "FedAvg", seed)
        lines.append(json.dumps({**asdict(run), **done, **changed}))
    runs.write_text("\n".join(lines) + "\n")
    options = ["-g", 2, "--smoke", "--rows", rows, "--seeds", "0,1", "--runs", runs]
    plot = tmp_path / "table.png"
    written = ["--json", path, "--plot", plot]
    lines = run_script("convergence.sweep", "--tasks", "digits", *options, *written)
    assert shows(plot, plots.BLUE, plots.GREY)
    tuned = [line for line in lines if "kind='tune'" in line]
    trained = [line for line in lines if "kind='train'" in line]
    # Streaming, CO2 and the clip have three candidates each.
    assert len(tuned) == 9 and len(trained) == 7
    assert max(map(lines.index, tuned)) < min(map(lines.index, trained))
    assert not any("row='FedAvg', seed=0" in line for line in trained)
    results = json.loads(path.read_text())["results"]
    assert len(results["tuned"]) == 9 and {row["task"] for row in results["tuned"]} == {"digits"}
    table = results["table"]["digits"]
    assert {row["row"] for row in table} == set(rows.split(","))
    assert [row["loss"] for row in table] == sorted(row["loss"] for row in table)
    (fedavg,) = (row["losses"] for row in table if row["row"] == "FedAvg")
    assert fedavg[0] == 123.0 and fedavg[1] < 10.0


def test_tuned_choice_is_the_best_candidate_and_never_one_that_diverged() -> None:
    from benchmarks.convergence.methods import FAMILIES, ROW_OF, ROWS, tuning_row
    from benchmarks.convergence.sweep import Run, Tuned

    tuned = Tuned()
    for candidate, loss in enumerate([float("nan"), 2.0, 3.0]):
        tuned.add(Run("text", "tune", "CO2", 0, "co2", candidate), loss)
    assert tuned.choice(Run("text", "train", "CO2", 0)) == FAMILIES["co2"][1]
    trial = Run("text", "tune", "CO2 clip", 0, "clip", 2)
    assert tuned.choice(trial) == FAMILIES["co2"][1] | FAMILIES["clip"][2]
    for family in FAMILIES:
        assert tuning_row(family).families[-1] == family
    assert len(ROW_OF) == len(ROWS)


def test_every_row_of_convergence_is_a_method_that_exists() -> None:
    from benchmarks.convergence.methods import ROWS

    made = [row.arguments({"lr": 0.5, "clip": 0.1}) for row in ROWS]
    policies = {type(arguments["overlap"]).__name__ for arguments in made}
    assert policies == {"Blocking", "Streaming", "Delayed", "Eager", "CO2"}
    assert {type(arguments["outer"]).__name__ for arguments in made} == {
        *("SGD", "HeavyBall", "Nesterov", "Adam")
    }
