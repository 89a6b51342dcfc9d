"""Put small mistakes into the package one by one, and look which test notices each.

    python tests/support/quality/mutants.py run --tier first    # tests without the mark nightly
    python tests/support/quality/mutants.py run --tier nightly  # these, then the tests with it
    python tests/support/quality/mutants.py table               # of the results so far
    python tests/support/quality/mutants.py draw                # anew, after the sources changed
    python tests/support/quality/mutants.py run --only 13 --room tests/gpu

The mistakes stand in `mutants.json`. Each is written into a copy of the sources, so that the
processes that tests fork have it too. The tests of the room with the changed line come first. A
mutant that none of them notices meets all tests; with `--room` it meets the tests of one folder
alone. A run that was stopped goes on with the next mutant; a mutant that has survived one folder
alone meets the others when it is named again, or in a run without `--room`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

# --------------------------- The outcome of each test, read from the JUnit files that pytest writes


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


# ------------------------------------------------------------------------------ changes of a source
# Small mistakes for the sources of the package: where one fits, and how one is put in.
# A mutant changes one fragment of one line. ``candidates`` finds all places in a Python file by its
# syntax tree; docstrings, annotations, messages and ``__repr__`` have none.


KINDS = (
    "comparison",
    "arithmetic",
    "boolean",
    "constant",
    "return value",
    "statement",
    "condition",
    "slice",
)
COMPARISONS = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not")},
    **{ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")},
}
ARITHMETIC = {
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*")},
    **{ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*")},
}
# Calls whose arguments are words for people.
MESSAGES = ("debug", "info", "warning", "warn", "error", "exception", "log")


@dataclass(frozen=True)
class Mutant:
    """A mistake in one line.

    Attributes:
        function: Qualified name within the Python file, "" in C++.
        line: The line without the space around it; it occurs once in the function, or C++ file.
        column: Where ``original`` begins in ``line``.
    """

    kind: str
    file: str
    function: str
    line: str
    column: int
    original: str
    mutated: str

    def in_text(self, text: str) -> tuple[str, int]:
        """Return the text with the mistake, and the number of its line from 1."""
        lines = text.splitlines(keepends=True)
        first, last = span(text, self.function) if self.function else (1, len(lines))
        numbers = [n for n in range(first, last + 1) if lines[n - 1].strip() == self.line]
        if len(numbers) != 1:
            raise ValueError(
                f"{self.file}: {self.function or 'the file'} has {len(numbers)} lines "
                f"{self.line!r}, expected one: draw the list of mutants again"
            )
        (number,) = numbers
        old = lines[number - 1]
        start = old.index(self.line) + self.column
        end = start + len(self.original)
        assert old[start:end] == self.original, (old, self)
        lines[number - 1] = old[:start] + self.mutated + old[end:]
        return "".join(lines), number


def span(text: str, function: str) -> tuple[int, int]:
    """Return the first and the last line of a function."""
    for name, node in _functions(ast.parse(text)):
        if name == function:
            assert node.end_lineno is not None
            return node.lineno, node.end_lineno
    raise ValueError(f"there is no function {function}: draw the list of mutants again")


def _functions(
    node: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def candidates(root: Path, file: str) -> list[Mutant]:
    """Return every mistake that fits into a Python file, in the order of its lines."""
    text = (root / file).read_text()
    lines = text.splitlines()
    found = []
    functions = list(_functions(ast.parse(text)))
    names = [name for name, _ in functions]
    for name, function in functions:
        # A property and its setter share a name.
        if name.rpartition(".")[2] in ("__repr__", "__str__") or names.count(name) > 1:
            continue
        body = [line.strip() for line in lines[function.lineno - 1 : function.end_lineno]]
        for kind, number, start, original, mutated in _in_body(function, lines):
            line = lines[number - 1]
            column = start - (len(line) - len(line.lstrip()))
            if body.count(line.strip()) == 1:
                found.append(Mutant(kind, file, name, line.strip(), column, original, mutated))
    return found


# A kind, the line, where the fragment begins in it, the fragment and what it becomes.
_Change = tuple[str, int, int, str, str]


def _in_body(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> list[_Change]:
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return [change for statement in body for change in _of_node(statement, lines)]


def _of_node(node: ast.AST, lines: list[str]) -> Iterator[_Change]:
    """Yield the changes of a node and all nodes in it, except for functions and messages."""
    yield from _changes(node, lines)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr):
        return
    if isinstance(node, ast.Raise | ast.Assert) or _is_message(node):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _of_node(child, lines)


def _is_message(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MESSAGES
    )


def _changes(node: ast.AST, lines: list[str]) -> Iterator[_Change]:
    number, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", -1)
    if isinstance(node, ast.If | ast.IfExp) and node.test.lineno == node.test.end_lineno:
        segment = _segment(node.test, lines)
        for value in ("True", "False"):
            yield "condition", node.test.lineno, _start(node.test), segment, value
    if number != end:
        return
    if isinstance(node, ast.Compare):
        yield from _operator("comparison", node.left, node.ops[0], node.comparators[0], lines)
    elif isinstance(node, ast.BinOp) and not _is_text_or_list(node):
        yield from _operator("arithmetic", node.left, node.op, node.right, lines)
    elif isinstance(node, ast.BoolOp):
        yield from _operator("boolean", node.values[0], node.op, node.values[1], lines)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        operand = _segment(node.operand, lines)
        yield "boolean", number, _start(node), _segment(node, lines), f"({operand})"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        segment = _segment(node, lines)
        yield "constant", number, _start(node), segment, str(node.value + 1)
        yield "constant", number, _start(node), segment, str(node.value - 1)
    elif isinstance(node, ast.Return) and node.value and not _is_none(node.value):
        yield "return value", number, _start(node), _segment(node, lines), "return None"
    elif _may_be_deleted(node):
        yield "statement", number, _start(node), _segment(node, lines), "pass"
    elif isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None:
                segment = _segment(bound, lines)
                yield "slice", number, _start(bound), segment, f"{segment} + 1"
                yield "slice", number, _start(bound), segment, ""


def _operator(
    kind: str, left: ast.expr, operator: ast.AST, right: ast.expr, lines: list[str]
) -> Iterator[_Change]:
    """Change the operator, which stands between its operands beside brackets."""
    booleans = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
    known = {**COMPARISONS, **ARITHMETIC, **booleans}.get(type(operator))
    if known is None or left.end_lineno != right.lineno:
        return
    assert left.end_lineno is not None and left.end_col_offset is not None
    line = lines[right.lineno - 1]
    between = line[left.end_col_offset : right.col_offset]
    old, new = known
    yield kind, right.lineno, left.end_col_offset + between.index(old), old, new


def _is_text_or_list(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _may_be_deleted(node: ast.AST) -> bool:
    """Whether code after the statement still has all its names without the statement."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and not _is_message(node.value)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise)


def _start(node: ast.AST) -> int:
    return node.col_offset  # type: ignore[attr-defined]


def _segment(node: ast.AST, lines: list[str]) -> str:
    """Return the source of a node on one line; the sources are ASCII, so bytes are letters."""
    return lines[node.lineno - 1][node.col_offset : node.end_col_offset]  # type: ignore[attr-defined]


def draw(root: Path, rooms: tuple[str, ...], seed: int, skipped: list[Mutant]) -> list[Mutant]:
    """Draw one mutant of each kind from each room, no two of them from one function."""
    drawn: list[Mutant] = []
    for room in rooms:
        files = sorted(path.relative_to(root).as_posix() for path in (root / room).rglob("*.py"))
        everything = [mutant for file in files for mutant in candidates(root, file)]
        for kind in KINDS:
            of_kind = [mutant for mutant in everything if mutant.kind == kind]
            random.Random(f"{seed} {room} {kind}").shuffle(of_kind)
            used = {(mutant.file, mutant.function) for mutant in drawn}
            drawn.append(
                next(
                    mutant
                    for mutant in of_kind
                    if mutant not in skipped and (mutant.file, mutant.function) not in used
                )
            )
    return drawn


# --------------------------------------------------------------------------------------- the trials


ROOT = Path(__file__).resolve().parents[3]
LIST = Path(__file__).with_name("mutants.json")
BUILD = ROOT / "build/mutants"
ROOMS = ("diloco_comm/rounds", "diloco_comm/exchange", "diloco_comm/group")
PROCESSES = "3"
LIMIT_S = 3 * 3600.0
NO_TESTS = 5  # pytest's exit code
ALL = "tests"
# In the place of the test that failed.
HANG, COLLECTION = "no end of the tests", "no start of the tests"


# ------------------------------------------------------------------------------------- the list


def read_list() -> dict[str, Any]:
    return json.loads(LIST.read_text())


def mutant_of(entry: dict[str, Any]) -> Mutant:
    return Mutant(**{name: entry[name] for name in Mutant.__dataclass_fields__})


def all_mutants() -> list[Mutant]:
    listed = read_list()
    return [mutant_of(entry) for entry in listed["python"] + listed["cpp"]]


def room_of_tests(file: str) -> str:
    """Return the folder of tests of a file; the operators' tests compare all C++ of the codec."""
    return f"tests/{Path(file).parts[1]}" if file.endswith(".py") else "tests/ops"


def draw_list(seed: int) -> None:
    """Draw the mutants in Python anew; those in C++ and the reasons to skip one stay."""
    listed = read_list()
    drawn = draw(ROOT, ROOMS, seed, [mutant_of(entry) for entry in listed["skipped"]])
    listed |= {"seed": seed, "python": [asdict(mutant) for mutant in drawn]}
    LIST.write_text(json.dumps(listed, indent=1) + "\n")


# ------------------------------------------------------------------------- the copy of the sources


def copy_sources(tree: Path) -> None:
    """Bring the copy to the state of the sources; it keeps the times of what is equal."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT
    )
    names = [name for name in listed.decode().split("\0") if name]
    names += [path.relative_to(ROOT).as_posix() for path in ROOT.glob("diloco_comm/_C*.so")]
    for folder in ("emulated", "cuda"):
        files = (path for path in (ROOT / "build" / folder).rglob("*") if path.is_file())
        names += [path.relative_to(ROOT).as_posix() for path in files]
    names += [path.relative_to(ROOT).as_posix() for path in ROOT.glob("build/lagging-*.so")]
    for name in names:
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.unlink(missing_ok=True)
            target.symlink_to(os.readlink(source))
        elif source.exists() and not _is_equal(source, target):
            # The time of the copy is now: a build must see that a mistake has gone.
            shutil.copyfile(source, target)


def _is_equal(source: Path, target: Path) -> bool:
    return target.exists() and source.read_bytes() == target.read_bytes()


def write_source(path: Path, text: str) -> None:
    """Write a file of the copy, and forget its bytecode, which is told by second and size."""
    path.write_text(text)
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def build_extension(tree: Path) -> None:
    """Compile the extension of the copy into its package; what is up to date is kept."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    with (BUILD / "build.log").open("w") as log:
        subprocess.check_call(
            [*command, "--build-temp", "build/extension"], cwd=tree, stdout=log, stderr=log
        )


# -------------------------------------------------------------------------------------- one mutant


@dataclass
class Trial:
    """How tests met a mutant.

    Attributes:
        outcome: "killed", "survived", or "not built" for C++ that does not compile.
        killed_by: The test that failed twice with the mutant and passed without, or the tests that
            did not end.
        tier: Tier of that test: "first" or "nightly".
        met: The last folder of tests that the mutant met.
        unsteady: Tests that passed once with the mutant or failed without; these do not count.
    """

    number: int
    line_number: int
    outcome: str = "survived"
    killed_by: str = ""
    tier: str = ""
    met: str = ""
    seconds: float = 0.0
    unsteady: list[str] = field(default_factory=list)


class Trials:
    """Run tests in the copy of the sources."""

    def __init__(self, tree: Path, tier: str, room: str | None) -> None:
        self.tree = tree
        self.marks = ["not nightly"] if tier == "first" else ["not nightly", "nightly"]
        self.room = room
        # Tests that fail in the copy without a mutant.
        self.unsteady: list[str] = []

    def meet(self, number: int, mutant: Mutant) -> Trial:
        """Run tests with the mutant until one fails that passes without; the copy is as before."""
        path = self.tree / mutant.file
        text = path.read_text()
        changed, line_number = mutant.in_text(text)
        trial = Trial(number, line_number)
        begin = time.monotonic()
        folder = self.room or room_of_tests(mutant.file)
        try:
            for mark in self.marks:
                for tests in (folder,) if self.room is not None else (folder, ALL):
                    if trial.outcome == "survived":
                        self._search(trial, path, text, changed, tests, mark)
        except subprocess.CalledProcessError:
            trial.outcome = "not built"
        finally:
            write_source(path, text)
        trial.seconds = round(time.monotonic() - begin, 1)
        return trial

    def _search(
        self, trial: Trial, path: Path, text: str, changed: str, tests: str, mark: str
    ) -> None:
        """Look for a test of a folder that kills the mutant."""
        trial.met = tests
        self._become(path, changed)
        while failed := self._failure(tests, mark, trial.unsteady):
            alone = tests if failed == COLLECTION else failed
            # A test may fail because the machine is busy.
            fails_again = failed == HANG or self._failure(alone, mark)
            self._become(path, text)
            fails_without = failed != HANG and self._failure(alone, mark)
            if fails_again and not fails_without:
                trial.outcome, trial.killed_by = "killed", failed
                trial.tier = "first" if mark == "not nightly" else "nightly"
                return
            if failed == COLLECTION or failed in trial.unsteady:
                raise RuntimeError(f"{failed}, with and without a mutant: {BUILD}/pytest.log")
            trial.unsteady.append(failed)
            if fails_without:
                self.unsteady.append(failed)
            self._become(path, changed)

    def _become(self, path: Path, text: str) -> None:
        write_source(path, text)
        if path.suffix != ".py":
            build_extension(self.tree)

    def _failure(self, tests: str, mark: str, without: Sequence[str] = ()) -> str:
        """Return the first test that fails, or "" if all pass.

        Args:
            without: Tests that do not run, beside those that fail without a mutant.
        """
        report = BUILD / "results.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", tests, "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", mark, "-n", PROCESSES, "--dist", "loadfile", "--no-loadscope-reorder"]
        command += [*OPTIONS, str(report)]
        command += [word for test in {*self.unsteady, *without} for word in ("--deselect", test)]
        try:
            code = self._run(command)
        except subprocess.TimeoutExpired:
            return HANG
        failed = [test for test, result in results(report).items() if result.outcome == "failed"]
        if code in (0, NO_TESTS):
            return ""
        return failed[0] if failed and "::" in failed[0] else COLLECTION

    def _run(self, command: list[str]) -> int:
        environment = os.environ | {"PYTHONPATH": str(self.tree)}
        with (BUILD / "pytest.log").open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                return process.wait(LIMIT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# ----------------------------------------------------------------------------------------- results


def run(tier: str, only: Sequence[int], room: str | None) -> None:
    """Let tests meet the mutants that have no result, and survivors that have not met all tests.

    Args:
        only: Numbers of mutants; empty for all.
        room: Folder of the only tests, "" for the room of the changed line; None for all tests.
    """
    for mutant in all_mutants():
        mutant.in_text((ROOT / mutant.file).read_text())  # raises for a list that is out of date
    BUILD.mkdir(parents=True, exist_ok=True)
    tree = BUILD / "tree"
    copy_sources(tree)
    trials = Trials(tree, tier, room)
    file = results_of(tier)
    # Named mutants, and all in a run without `room`, are not done before they have met all tests.
    is_whole = bool(only) or room is None
    done = {trial.number for trial in read_results(file) if is_done(trial) or not is_whole}
    for number, mutant in enumerate(all_mutants()):
        if number in done or (only and number not in only):
            continue
        trial = trials.meet(number, mutant)
        with file.open("a") as stream:
            stream.write(json.dumps(asdict(trial)) + "\n")
        print(row(trial, mutant), flush=True)
    file.with_suffix(".txt").write_text(table(read_results(file)))


def is_done(trial: Trial) -> bool:
    return trial.outcome != "survived" or trial.met == ALL


def results_of(tier: str) -> Path:
    """Return the file of a tier's results; another list of mutants has another file."""
    digest = hashlib.sha256(LIST.read_bytes()).hexdigest()[:8]
    return BUILD / f"results-{digest}-{tier}.jsonl"


def read_results(file: Path) -> list[Trial]:
    lines = file.read_text().splitlines() if file.exists() else []
    trials = [Trial(**json.loads(line)) for line in lines]
    return list({trial.number: trial for trial in trials}.values())  # the last of each number


def table(trials: Sequence[Trial]) -> str:
    mutants = all_mutants()
    rows = [row(trial, mutants[trial.number]) for trial in sorted(trials, key=_number)]
    killed = sum(trial.outcome == "killed" for trial in trials)
    first = sum(trial.tier == "first" for trial in trials)
    return "\n".join(
        [*rows, f"{killed} of {len(trials)} killed, {first} of them by the first tier", ""]
    )


def _number(trial: Trial) -> int:
    return trial.number


def row(trial: Trial, mutant: Mutant) -> str:
    change = f"{mutant.original} -> {mutant.mutated or 'nothing'}"
    return (
        f"{trial.number:2} {trial.outcome:9} {trial.tier:8} {trial.seconds:7.1f} s  "
        f"{mutant.kind}: {change} in {mutant.file}:{trial.line_number} "
        f"({trial.met or 'none'}: {trial.killed_by or 'none'})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run tests against the mutants")
    running.add_argument("--tier", choices=("first", "nightly"), default="first")
    running.add_argument("--only", type=int, nargs="*", default=(), help="numbers of mutants")
    running.add_argument(
        "--room",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="meet only the tests of the changed line's room, or of a folder such as tests/gpu",
    )
    showing = commands.add_parser("table", help="print the results so far")
    showing.add_argument("--tier", choices=("first", "nightly"), default="first")
    drawing = commands.add_parser("draw", help="draw the mutants in Python anew")
    drawing.add_argument("--seed", type=int, default=0)
    commands.add_parser("show", help="print the mutants")
    options = parser.parse_args()
    if options.command == "run":
        run(options.tier, options.only, options.room)
    elif options.command == "table":
        print(table(read_results(results_of(options.tier))))
    elif options.command == "draw":
        draw_list(options.seed)
    else:
        for number, mutant in enumerate(all_mutants()):
            _, line = mutant.in_text((ROOT / mutant.file).read_text())
            print(row(Trial(number, line, outcome=""), mutant))


if __name__ == "__main__":
    main()
