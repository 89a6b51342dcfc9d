"""The size of the project: lines of code, and mechanisms that are to stand there once.

A line of code is one that holds more than blanks, a comment or a docstring. A mechanism is counted
by the source that no further one could do without:

* a table with compare-and-set, by the method ``swap`` of its client and of the interface;
* a protocol of our own, by the constant with which its first message begins;
* a place that listens, by the call that opens the socket;
* a system of keys, by the call that makes a pair of keys.

    python tests/support/quality/counts.py
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("diloco_comm", "diloco_comm_tools", "csrc", "kernels")
# Pattern of a line of the source, and the most lines that may have it.
MECHANISMS = {
    "tables": (r"    def swap\(self, old: bytes, new: bytes\)", 4),
    "protocols": (
        r"MAGIC = b|MAGIC, VERSION = b|constexpr std::array<uint8_t, 8> kGreeting|"
        r"constexpr char kProtocol",
        4,
    ),
    "places that listen": (
        r"socket\.create_server\(|self\.socket\.bind\(|socket\.bind\(f|"
        r"Descriptor fd\(\[&\] \{ return listen_at\(address\); \}\)",
        4,
    ),
    "systems of keys": (r"zmq\.curve_keypair\(\)|seed = secrets\.token_hex\(32\)", 2),
}
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_python(text: str) -> int:
    """Count the lines that hold code."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            code.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(code)


def lines_of_cpp(text: str) -> int:
    """Count the lines that hold code."""
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    return sum(bool(line.partition("//")[0].strip()) for line in text.split("\n"))


def main() -> int:
    """Print the counts; fail where there are more mechanisms than may be."""
    sources = {
        path: path.read_text(encoding="utf-8")
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*"))
        if path.suffix in (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh")
        and "kernels" not in path.relative_to(ROOT / room).parts[:1]
    }
    lines: Counter[str] = Counter()
    for path, text in sources.items():
        count = lines_of_python if path.suffix in (".py", ".pyi") else lines_of_cpp
        *folders, _ = path.relative_to(ROOT).parts
        lines.update({"/".join(folders[: depth + 1]): count(text) for depth in range(2)})
    print(f"{sum(lines[room] for room in ROOMS):,} lines of code")
    for room in ROOMS:
        below = [f"{name} {lines[name]:,}" for name in sorted(lines) if name.startswith(f"{room}/")]
        print(
            f"{room} {lines[room]:,}: {', '.join(below)}".removesuffix(": ").replace(
                f" {room}/", " "
            )
        )
    is_over = False
    for name, (pattern, most) in MECHANISMS.items():
        places = [
            f"{path.relative_to(ROOT)}:{number}"
            for path, text in sources.items()
            for number, line in enumerate(text.split("\n"), 1)
            if re.search(pattern, line)
        ]
        print(f"{len(places)} {name}, at most {most}: {', '.join(places)}")
        is_over |= len(places) > most
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
