"""The outcome of each test, read from the JUnit files that pytest writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

# Node ids can be put together from files of this family alone: it has the file of each test.
OPTIONS = ["-o", "junit_family=xunit1", "--junitxml"]


@dataclass(frozen=True)
class Result:
    """One run of a test: "passed", "failed" or "skipped", and its seconds with its fixtures."""

    outcome: str
    seconds: float


def results(path: Path) -> dict[str, Result]:
    """Return the results by node id; empty if pytest ended before it wrote the file."""
    found: dict[str, Result] = {}
    if not path.exists():
        return found
    for case in ElementTree.parse(path).iter("testcase"):
        test = _node_id(case)
        outcome = _outcome({child.tag for child in case})
        if test in found and found[test].outcome == "failed":
            outcome = "failed"  # a test and its teardown are two entries
        found[test] = Result(outcome, float(case.get("time", 0)))
    return found


def _node_id(case: ElementTree.Element) -> str:
    name, file = str(case.get("name")), case.get("file")
    if not file:
        return name  # of a file that cannot be imported
    # A class may inherit the method from another file.
    module, _, last = case.get("classname", "").rpartition(".")
    if last[:1].isupper():
        return f"{module.replace('.', '/')}.py::{last}::{name}"
    return f"{file}::{name}"


def _outcome(tags: set[str]) -> str:
    if tags & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"
