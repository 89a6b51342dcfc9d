"""The folder of records: few and small files, in one format; a page quotes each of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmark_runs import BENCHMARKS, RESULTS, ROOT

from diloco_comm_tools.common.reports import record_text

FILES = sorted(path for path in RESULTS.rglob("*") if path.is_file())
RECORDS = [path for path in FILES if path.suffix == ".json"]
# Printed output that pages show.
TEXTS = {"demo.txt", "tools.txt"}


def name_of(path: Path) -> str:
    return str(path.relative_to(RESULTS))


def test_the_files_are_few_and_small() -> None:
    assert len(FILES) <= 60
    assert sum(path.stat().st_size for path in FILES) <= 750_000


@pytest.mark.parametrize("path", RECORDS, ids=name_of)
def test_a_record_names_its_command_and_its_machine(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["command"] and record["results"] and "cores" in record["machine"]
    starts = ("python ", "diloco-comm ", "make ", "benchmarks/gpu_check.sh ")
    assert any(word in record["command"] for word in starts)


def test_a_row_has_a_line() -> None:
    rows = [{"name": "n" * 70, "value": 0.1 + 0.2, "missing": None}, {"name": "m" * 150}]
    samples = [number / 7 for number in range(40)]
    document = {"results": rows, "samples": samples, "nested": {"rows": rows}, "loss": math.inf}
    text = record_text(document)
    assert json.loads(text) == document and len(text.splitlines()) == 14


def test_all_other_files_are_figures_of_records_and_printed_texts() -> None:
    others = set(FILES) - set(RECORDS)
    figures = {path for path in others if path.suffix == ".png"}
    assert {path.name for path in others - figures} == TEXTS
    assert {path.with_suffix(".json") for path in figures} <= set(RECORDS)


def sources() -> Iterator[str]:
    yield (ROOT / "README.md").read_text()
    for folder, ending in ((ROOT / "docs", "*.md"), (BENCHMARKS, "*.py")):
        for path in sorted(folder.rglob(ending)):
            yield path.read_text()


def test_each_file_is_named_by_a_page_or_by_its_benchmark() -> None:
    text = "\n".join(sources())
    assert [name_of(path) for path in FILES if path.name not in text] == []


def test_each_figure_is_shown_by_a_page() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    shown = [path for path in FILES if path.suffix == ".png"]
    assert shown
    assert [name_of(path) for path in shown if f"results/{name_of(path)})" not in text] == []
