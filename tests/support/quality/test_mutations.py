"""Where a mistake fits into Python, which tests meet it first, and what a report says of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from mutants import HANG, KINDS, Result, Trial, Trials, candidates, draw, results, room_of_tests

SOURCE = '''
"""A module with 1 number that is no code."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    NUMBER = 1


class Sum:
    """A total from 0."""

    def __init__(self, start: "int | 3" = 4) -> None:
        """Begin with 5."""
        self.total = start
        log.info("begins at %d", start + 6)

    def __repr__(self) -> str:
        return "8" if self.total > 9 else ""

    def add(self, values: list[int], other: bool) -> int:
        if not values and other:
            raise ValueError(f"nothing after {self.total + 10}")
        self.total += values[0]
        return sum(values[:self.total])
'''

EXPECTED = {
    ("Sum.__init__", "statement", "self.total = start", "pass"),
    ("Sum.add", "condition", "not values and other", "True"),
    ("Sum.add", "condition", "not values and other", "False"),
    ("Sum.add", "boolean", "and", "or"),
    ("Sum.add", "boolean", "not values", "(values)"),
    ("Sum.add", "statement", 'raise ValueError(f"nothing after {self.total + 10}")', "pass"),
    ("Sum.add", "statement", "self.total += values[0]", "pass"),
    ("Sum.add", "constant", "0", "1"),
    ("Sum.add", "constant", "0", "-1"),
    ("Sum.add", "return value", "return sum(values[:self.total])", "return None"),
    ("Sum.add", "slice", "self.total", "self.total + 1"),
    ("Sum.add", "slice", "self.total", ""),
}


FILE = "package/room/sums.py"


def sources(folder: Path) -> Path:
    (folder / FILE).parent.mkdir(parents=True)
    (folder / FILE).write_text(SOURCE)
    return folder


def test_mistakes_are_in_code_alone(tmp_path: Path) -> None:
    found = candidates(sources(tmp_path), FILE)
    changes = [(m.function, m.kind, m.original, m.mutated) for m in found]
    assert set(changes) == EXPECTED and len(changes) == len(EXPECTED)
    for mutant in found:
        changed, number = mutant.in_text(SOURCE)
        compile(changed, "sums.py", "exec")
        before, after = SOURCE.splitlines(), changed.splitlines()
        assert [n for n in range(len(before)) if before[n] != after[n]] == [number - 1]


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("a < b", "<=", "<"),
        ("a is not b", "is", "is not"),
        ("(a) + (b)", "-", "+"),
        ("a // b", "*", "//"),
    ],
)
def test_operators_are_turned(old: str, new: str, change: str, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(f"def f(a, b):\n    x = {old}\n    return x\n")
    (mutant,) = (m for m in candidates(tmp_path, "one.py") if m.kind != "return value")
    changed, number = mutant.in_text((tmp_path / "one.py").read_text())
    assert number == 2 and f"x = {old.replace(change, new)}\n" in changed


def test_a_line_that_has_gone_is_refused(tmp_path: Path) -> None:
    mutant = candidates(sources(tmp_path), FILE)[0]
    with pytest.raises(ValueError, match=r"0 lines 'self\.total = start', expected one"):
        mutant.in_text(SOURCE.replace("self.total = start", "self.total = int(start)"))
    with pytest.raises(ValueError, match=r"no function Sum\.__init__"):
        mutant.in_text(SOURCE.replace("def __init__", "def begin"))


def test_a_seed_draws_each_kind_once_and_none_that_is_skipped(tmp_path: Path) -> None:
    functions = "".join(
        f"def f{n}(a, b):\n    if a < {n} and b:\n        g.h({n})\n    return a[{n}:] * b\n\n\n"
        for n in range(20)
    )
    (tmp_path / "room").mkdir()
    (tmp_path / "room/many.py").write_text(functions)
    drawn = draw(tmp_path, ("room",), 0, [])
    assert [mutant.kind for mutant in drawn] == list(KINDS)
    assert len({mutant.function for mutant in drawn}) == len(KINDS)
    assert draw(tmp_path, ("room",), 0, []) == drawn != draw(tmp_path, ("room",), 1, [])
    assert drawn[0] not in draw(tmp_path, ("room",), 0, [drawn[0]])


def test_the_tests_of_the_changed_room_come_first() -> None:
    assert room_of_tests("diloco_comm/group/agreement.py") == "tests/group"
    assert room_of_tests("csrc/wire/codes.h") == "tests/ops"


class OneTest(Trials):
    """A file with one test, which fails where the file and the turn say so."""

    def __init__(self, fails: list[bool], failed: str) -> None:
        super().__init__(Path(), "first", None)
        self.fails, self.failed = fails, failed

    def _failure(self, tests: str, mark: str, without: Sequence[str] = ()) -> str:
        is_left_out = self.failed in {*self.unsteady, *without}
        return self.failed if not is_left_out and self.fails.pop(0) else ""


@pytest.mark.parametrize(
    ("fails", "failed", "outcome", "is_unsteady"),
    [
        # With the mutant, with the mutant again, and without.
        ([True, True, False], "a::b", "killed", False),
        ([True, False, False], "a::b", "survived", False),
        ([True, True, True], "a::b", "survived", True),
        ([False], "a::b", "survived", False),
        ([True], HANG, "killed", False),
    ],
)
def test_a_mutant_is_killed_by_a_test_that_fails_with_it_alone(
    fails: list[bool], failed: str, outcome: str, is_unsteady: bool, tmp_path: Path
) -> None:
    trials, trial = OneTest(fails, failed), Trial(0, 1)
    path = tmp_path / "a.py"
    trials._search(trial, path, "a = 1", "a = 2", "tests/rounds", "not nightly")
    assert (trial.outcome, fails) == (outcome, [])
    assert trial.killed_by == (failed if outcome == "killed" else "")
    # Later mutants meet a test again that has failed once by chance.
    assert trials.unsteady == (["a::b"] if is_unsteady else [])


def test_a_report_has_the_outcome_of_each_test(tmp_path: Path) -> None:
    cases = (
        '<testcase classname="t.b" file="t/b.py" name="quick" time="0.5"/>',
        '<testcase classname="t.b.Of" file="lib/c.py" name="method" time="2"/>',
        '<testcase file="t/b.py" name="bad" time="1"><failure/></testcase>',
        '<testcase file="t/b.py" name="no" time="0"><skipped/></testcase>',
    )
    (tmp_path / "first.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    assert results(tmp_path / "first.xml") == {
        "t/b.py::quick": Result("passed", 0.5),
        "t/b.py::Of::method": Result("passed", 2.0),
        "t/b.py::bad": Result("failed", 1.0),
        "t/b.py::no": Result("skipped", 0.0),
    }
