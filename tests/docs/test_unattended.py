"""The commands of docs/tutorials/unattended.md print what the page says, in two namespaces."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import cut_links
import page_runner
import psutil
import pytest

PAGE = page_runner.ROOT / "docs" / "tutorials" / "unattended.md"
# Keys, journal and state folders of the page.
FOLDER = page_runner.ROOT / "unattended"


@pytest.fixture
def folder() -> Iterator[None]:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    yield
    # A launcher that is killed, as when a line is not printed, leaves its worker behind.
    for file in FOLDER.glob("*.pid"):
        with contextlib.suppress(psutil.NoSuchProcess):
            worker = psutil.Process(int(file.read_text()))
            if "examples/unattended.py" in worker.cmdline():
                worker.kill()
    shutil.rmtree(FOLDER)


@pytest.mark.nightly("a minute of processes; test_code_blocks reads the page's commands")
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("folder")
def test_the_page_runs_as_it_says() -> None:
    reason = cut_links.missing()
    if reason:
        pytest.skip(reason)
    _, printed = page_runner.run_on_two_machines(PAGE.read_text(), seconds=90.0)
    lines = {name: {line for line in printed[name] if "hash" in line} for name in "ab"}
    steps = {name: {line.partition(":")[0] for line in lines[name]} for name in "ab"}
    assert steps["a"] & steps["b"]
    assert {line for line in lines["a"] if line.partition(":")[0] in steps["b"]} <= lines["b"]
