"""One name for each quantity: the table of the glossary, and the names that are used no more."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pages import PAGES, ROOT

import diloco_comm
from diloco_comm import asynchronous

# Names of 0.1 and before; ``plan`` called gamma and tau otherwise than ``serve``.
RETIRED = re.compile(
    r"overlap[_-]steps=|--overlap-steps|--tau\b|\btau=|--on-nonfinite|QuorumRule\(.*grace="
)


def names() -> Iterator[tuple[str, str]]:
    """Yield what the table of the glossary has before and within the parentheses of a name."""
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    table = text.split("## Names and symbols\n", 1)[1]
    for line in table.splitlines():
        for name in re.findall(r"`([^`]+)`", line):
            owner, argument = re.fullmatch(
                r"(\w+(?: \w+)?)(?:\(| --)([\w-]+)(?:=\))?", name
            ).groups()  # type: ignore[union-attr]
            yield owner, argument.replace("-", "_")


def called(owner: str) -> Callable[..., Any]:
    if owner.startswith(("plan", "serve")):
        command, _, below = owner.partition(" ")
        module = importlib.import_module(f"diloco_comm_tools.{command}.command")
        return getattr(module, below or command)
    return getattr(diloco_comm, owner, None) or getattr(asynchronous, owner)


def test_the_names_of_the_glossary_exist() -> None:
    pytest.importorskip("typer")
    found = list(names())
    missing = [
        f"{owner} {argument}"
        for owner, argument in found
        if argument not in inspect.signature(called(owner)).parameters
    ]
    assert missing == [] and len(found) > 40


def test_retired_names_do_not_occur() -> None:
    sources = ROOT.glob("diloco_comm*/**/*.py")
    # The page of the commands is generated from the sources, and may be of older ones.
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*PAGES, *sources, *(ROOT / "benchmarks").rglob("*.py")]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if RETIRED.search(line) and path.name != "CHANGELOG.md" and "command-line" not in str(path)
    ]
    assert found == []
