"""benchmarks/asynchronous/decoupled.py: one short run, coded commits, and the table's choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.asynchronous.decoupled import CELLS, Run, train
from benchmarks.asynchronous.decoupled_methods import (
    METHODS,
    NAMES,
    CodedFragment,
    seconds_of,
    steps_in_equal_time,
)
from benchmarks.asynchronous.decoupled_report import draw, kept_rows, report_lines
from diloco_comm.asynchronous.decoupled.merges import pieces_of
from diloco_comm.methods.outer import SGD
from diloco_comm.ops import encode
from diloco_comm.ops.wire import WireFormat

TUNING = 1000


def test_a_short_run() -> None:
    torch.set_num_threads(1)
    row = train(Run("K=1, grace, int4 feedback", "34k", "doubling", 4, 12, 0, 0.3))
    assert len(row["points"]) == 9 and row["points"][0]["steps"] == 0
    assert row["loss"] < row["points"][0]["loss"]
    # Learners that never wait take all the steps that fit into the time.
    assert 0.9 < row["goodput"] <= 1.05 and row["seconds"] == pytest.approx(48 / 2.75)
    assert 0 < row["applied"] + row["lost"] <= 1 and 1 <= row["reports"] <= 4
    assert len(row["rho"]) == 3 and row["effective_lr"] > 0.3
    # int4 both ways: about an eighth of fp32.
    num_params = 31_000
    assert row["bytes_down"] < row["updates"] / 3 * 4 * 4 * num_params / 6


def test_time_of_learners_that_wait_for_the_slowest() -> None:
    """Rates of 1, 1, 1/2 and 1/4 are 2.75 steps a second; waiting for the slowest, 1 step."""
    assert seconds_of("doubling", 4, 110) == pytest.approx(160.0)
    assert steps_in_equal_time("doubling", 4, 110) == 40
    assert steps_in_equal_time("none", 4, 110) == 110


def last_error(has_feedback: bool) -> float:
    """Return the largest difference of shared and learners' values after 50 random changes."""
    size, rng = 512, torch.Generator().manual_seed(0)
    start, pieces = torch.zeros(size), pieces_of([(size,)])
    wire = WireFormat("int4")
    fragment = CodedFragment([start], pieces, wire, SGD(0.7), has_feedback=has_feedback)
    layout = fragment.layouts[0]
    form = (size, layout.run_elements, layout.wire.name, layout.wire.block_size)
    for _ in range(50):
        payloads = [torch.zeros(layout.payload_bytes, dtype=torch.uint8) for _ in range(2)]
        for payload in payloads:
            encode(torch.randn(size, generator=rng), [start], payload, 0, *form)
        fragment.merge([[payload] for payload in payloads], [0.3, 0.7])
        (values,) = fragment.copy_values()
        assert torch.equal(values, fragment.copy_values()[0])
    assert fragment.coded_bytes == layout.payload_bytes
    return (values - fragment.values[0]).abs().max().item()


def test_rounding_errors_of_commits() -> None:
    """With feedback the learners lack one rounding error; without, the errors add up."""
    # A change of 0.7 times normal numbers reaches 2.5, so half a step of int4 is below 0.2.
    assert 0 < last_error(True) < 0.25
    assert last_error(False) > 2 * last_error(True)


def row(name: str, lr: float, seed: int, loss: float, speeds: str = "doubling") -> dict[str, Any]:
    points = [{"steps": 64 * i, "updates": i, "seconds": 9.0 * i, "loss": loss} for i in range(3)]
    return {
        "method": name, "model": "34k", "speeds": speeds, "num_learners": 4, "steps": 160,
        "seed": seed, "lr": lr, "loss": loss, "seconds": 1.0, "updates": 9, "points": points,
        "goodput": 1.0, "applied": 0.5, "lost": 0.25, "reports": 2.0, "rho": [0.5, 0.5, 0.5],
        "effective_lr": 1.0, "bytes_up": 1, "bytes_down": 1, "cpu_s": 1.0,
    }  # fmt: skip


def rows_of_a_search() -> list[dict[str, Any]]:
    losses = {0.3: 2.6, 0.7: 2.5, 1.0: 2.7}
    rows = [row(name, lr, TUNING, losses[lr]) for name in ("K=1", "K=1, grace") for lr in losses]
    rows += [row("Streaming", lr, TUNING, losses[lr]) for lr in (0.3, 0.7)]
    for seed in range(2):
        rows += [row("Streaming", 0.7, seed, 2.5), row("K=1", 0.7, seed, 2.6)]
        rows += [row("K=1, grace", 0.7, seed, 2.55), row("K=1, grace", 1.0, seed, 2.0)]
        rows += [row("K=1, grace, int4", 0.7, seed, 2.55)]
    return rows


def test_the_table_has_the_rates_that_the_search_chose() -> None:
    rows = rows_of_a_search()
    kept = kept_rows(rows)
    assert all(each["lr"] == 0.7 and each["seed"] != TUNING for each in kept)
    # A method without a search of its own has the rate of another.
    assert sum(each["method"] == "K=1, grace, int4" for each in kept) == 2
    text = "\n".join(report_lines(rows))
    assert "K=1 without grace is worse than with grace     holds          +0.0500" in text
    assert "+0.1000 (0.0000)" in text
    assert "Streaming                  0.3: 2.6000, 0.7: 2.5000 -> 0.7  ERROR" in text
    # A search at the speeds of a row goes before that at other speeds.
    own = [row("K=1", lr, TUNING, lr, "none") for lr in (0.1, 0.3, 0.7)]
    found = kept_rows([*rows, *own, row("K=1", 0.1, 0, 2.0, "none")])
    assert [each["lr"] for each in found if each["speeds"] == "none"] == [0.1]


def test_the_figure(tmp_path: Path) -> None:
    draw(rows_of_a_search(), tmp_path / "runs.png")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_all_methods_of_the_cells_are_known() -> None:
    assert {name for cell in CELLS for name in cell.methods} <= set(NAMES)
    assert all(method.rate_of in ("", *METHODS) for method in METHODS.values())
