"""Small mistakes for the sources of the package: where one fits, and how one is put in.

A mutant changes one fragment of one line. ``candidates`` finds all places in a Python file by its
syntax tree; docstrings, annotations, messages and ``__repr__`` have none.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
