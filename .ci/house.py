#!/usr/bin/env python3
"""The rules of the house, which CONTRIBUTING.md explains; ``.ci/house.json`` lists old offenders.

    .ci/house.py                 compare the tree with the list
    .ci/house.py --shrink        remove entries that offend no longer, and lower counts
    .ci/house.py --move OLD NEW  rename the entries of a file or folder that was renamed

A new offender fails, and so does an entry without an offender: the list only becomes shorter.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / ".ci" / "house.json"
PACKAGES = ("diloco_comm", "diloco_comm_tools")
IN_PACKAGES = tuple(f"{package}/" for package in PACKAGES)
CPP = (".h", ".cpp", ".cu", ".cuh")
FOLDERS = (".ci", "benchmarks", "csrc", *PACKAGES, "docs", "examples", "kernels", "tests")
PAGES = ("CONTRIBUTING.md", "README.md")
# The pages of the commands.
GENERATED = "docs/reference/command-line"

LONGEST = 900
SHORTEST = 150
# A module with a single importer may stand alone from this number of lines.
SHORTEST_PART = 120
# A string literal of fewer words is a name or a key, and no message.
SHORTEST_MESSAGE = 4

PHRASES = r"of\s+which|that\s+of|those\s+of|the\s+one\s+that|theirs"
OPENINGS = r"Of(?! course)|What|Who|(?:At|By|For|From|In|On|To|With)\s+(?:what|which|whom)"
# A sentence also begins in a list, in a cell of a table, and after the name of an argument.
BEGIN = r"(?:\A\s*|[.:!?]\s+|\n\s*\n\s*|\n\s*(?:[*-]|\d+\.)\s+|\|\s*)[*_(]*"
PROSE = {
    re.compile(rf"\b({PHRASES})\b", re.IGNORECASE): "the noun itself",
    re.compile(rf"{BEGIN}({OPENINGS})(?=\s)(?![^.!?]*\?)"): "the subject of the sentence first",
}
QUOTED = re.compile(r"``.+?``|`[^`]+`|\"[^\"\n]*\n?[^\"\n]*\"|\]\([^)]*\)|<!--.*?-->", re.DOTALL)
FENCED = re.compile(r"^ *(```+|~~~+).*?^ *\1", re.DOTALL | re.MULTILINE)
PYTHON_TOKEN = re.compile(
    r"(?P<comment>#[^\n]*)|(?:\b[bBfFrRuU]{1,2})?(?P<quote>\"{3}|'{3}|\"|')"
    r"(?P<string>(?:\\.|(?!(?P=quote))[^\\])*)(?P=quote)",
    re.DOTALL,
)
CPP_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<quote>\")(?P<string>(?:\\.|[^\"\\])*)\"|'\\?.'",
    re.DOTALL,
)


class Offence(NamedTuple):
    rule: str
    key: str  # In the list: a file, or file:class.
    line: int
    sentence: str


def read() -> dict[str, str]:
    """Return the texts of all sources and pages by path; a link to a folder is not followed."""
    paths = [ROOT / page for page in PAGES]
    for folder in FOLDERS:
        paths += [Path(at, name) for at, _, names in os.walk(ROOT / folder) for name in names]
    paths = [path for path in paths if path.suffix in (".py", ".md", *CPP) and path.exists()]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(paths)}
    texts = {name: text for name, text in texts.items() if not name.startswith(GENERATED)}
    return texts


def lengths(texts: dict[str, str]) -> Iterator[Offence]:
    """No source has more than 900 lines, no module of the package or of csrc fewer than 150."""
    modules: dict[str, list[str]] = defaultdict(list)
    for file, text in texts.items():
        lines = text.count("\n")
        if lines > LONGEST and not file.endswith(".md"):
            sentence = f"{lines} lines, expected at most {LONGEST}: divide the file"
            yield Offence("long", file, LONGEST + 1, sentence)
        if file.startswith("csrc/") and file.endswith(CPP):
            # A header and the source beside it are one module.
            modules[os.path.splitext(file)[0]].append(file)
        elif file.startswith(IN_PACKAGES) and not file.endswith("/__init__.py"):
            modules[file].append(file)
    for files in modules.values():
        lines = sum(texts[file].count("\n") for file in files)
        if lines < SHORTEST:
            sentence = f"{lines} lines, expected at least {SHORTEST}: merge it with its user"
            yield Offence("short", files[0], 1, sentence)


class Package:
    """The modules of the package, by full name.

    Attributes:
        files: The path of each module.
        facades: The packages that define nothing, and only pass names on.
        bindings: The full name of everything that a module imports, by its name in the module.
        classes: All classes.
    """

    def __init__(self, texts: dict[str, str]) -> None:
        self.files: dict[str, str] = {}
        self.facades: set[str] = set()
        self.bindings: dict[str, dict[str, str]] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        for file, text in texts.items():
            if file.startswith(IN_PACKAGES) and file.endswith(".py"):
                module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                self.files[module] = file
                self._read(module, ast.parse(text))

    def is_package(self, module: str) -> bool:
        return self.files[module].endswith("/__init__.py")

    def _read(self, module: str, tree: ast.Module) -> None:
        above = module.split(".")
        if self.is_package(module):
            above.append("__init__")
            if not any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body):
                self.facades.add(module)
        bindings = self.bindings[module] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.classes[f"{module}.{node.name}"] = node
            elif isinstance(node, ast.Import):
                bindings.update({name.asname or name.name: name.name for name in node.names})
            elif isinstance(node, ast.ImportFrom):
                start = above[: -node.level] if node.level else []
                source = ".".join([*start, *([node.module] if node.module else [])])
                for name in node.names:
                    bindings[name.asname or name.name] = f"{source}.{name.name}"

    def module_of(self, name: str) -> str:
        """Return the longest part of a full name that is a module of the package, or ""."""
        while name and name not in self.files:
            name = name.rpartition(".")[0]
        return name

    def origin(self, name: str) -> str:
        """Return the full name that a thing has where it is defined; follow imported names."""
        module = self.module_of(name)
        head, _, rest = name[len(module) + 1 :].partition(".")
        bound = self.bindings[module].get(head) if module else None
        if bound is None or bound == f"{module}.{head}":
            return name
        return self.origin(f"{bound}.{rest}" if rest else bound)


def only_children(package: Package) -> Iterator[Offence]:
    """No class has exactly one child in the package, but for protocols and exceptions."""

    def bases(name: str) -> Iterator[str]:
        for node in package.classes[name].bases:
            base = ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
            yield package.origin(f"{package.module_of(name)}.{base}")

    def is_exempt(name: str) -> bool:
        if name in package.classes:
            return any(map(is_exempt, bases(name)))
        return name.endswith(("Protocol", "Error", "Exception", "Warning", "KeyboardInterrupt"))

    children = defaultdict(list)
    for child in package.classes:
        for base in bases(child):
            children[base].append(child.rpartition(".")[2])
    for base, names in children.items():
        if base in package.classes and len(names) == 1 and not is_exempt(base):
            node, file = package.classes[base], package.files[package.module_of(base)]
            found = f"class {node.name} has the only child {names[0]}"
            expected = "none or several: merge the two, or let one hold the other"
            key = f"{file}:{node.name}"
            yield Offence("child", key, node.lineno, f"{found}, expected {expected}")


def lone_importers(package: Package, texts: dict[str, str]) -> Iterator[Offence]:
    """No module of fewer than 120 lines is imported by one other module only."""
    importers = defaultdict(set)
    for module, bindings in package.bindings.items():
        for name in () if module in package.facades else bindings.values():
            for source in (package.module_of(name), package.module_of(package.origin(name))):
                importers[source].add(module)
    for module, file in package.files.items():
        users, lines = importers[module], texts[file].count("\n")
        if len(users) == 1 and lines < SHORTEST_PART and not package.is_package(module):
            found = f"{lines} lines that only {users.pop()} imports"
            expected = f"two importers or {SHORTEST_PART} lines: merge the two modules"
            yield Offence("importer", file, 1, f"{found}, expected {expected}")


def source_prose(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of comments, docstrings and, outside the tests, messages.

    Comments alone on successive lines are one text, and so are strings that follow each other.
    """
    found: list[tuple[int, str, str]] = []
    line, end, was_alone = 1, 0, False
    for token in (PYTHON_TOKEN if file.endswith(".py") else CPP_TOKEN).finditer(text):
        gap = text[end : token.start()]
        line += gap.count("\n")
        is_alone = not gap.rpartition("\n")[2].strip() and (end == 0 or "\n" in gap)
        if token["comment"]:
            kind, content, between = "comment", token["comment"].strip("#/*! "), "\n"
            joins = is_alone and was_alone and gap.count("\n") < 2
        else:
            kind = "docstring" if is_alone and len(token["quote"] or "") == 3 else "message"
            content, between = re.sub(r"\{[^{}]*\}", "x", token["string"] or ""), ""
            joins = kind == "message"
        if found and joins and found[-1][1] == kind and not gap.strip():
            found[-1] = (found[-1][0], kind, found[-1][2] + between + content)
        else:
            found.append((line, kind, content))
        line, end, was_alone = line + token[0].count("\n"), token.end(), is_alone
    for first, kind, content in found:
        is_name = file.startswith("tests/") or len(content.split()) < SHORTEST_MESSAGE
        if kind != "message" or not is_name:
            yield first, content


def emptied(code: re.Match[str]) -> str:
    return "x" + "\n" * code[0].count("\n")


def page_prose(_: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield a page without its code, which is fenced or, outside lists, indented."""
    lines = FENCED.sub(emptied, text).split("\n")
    in_list = False
    for index, line in enumerate(lines):
        if line[:1].strip():
            in_list = re.match(r"[*-] |\d+\. ", line) is not None
        elif line.startswith("    ") and not in_list and not lines[index - 1].strip():
            lines[index] = ""
    yield 1, "\n".join(lines)


def prose(texts: dict[str, str]) -> Iterator[Offence]:
    """No comment, docstring, message or page has words that hide the subject of a sentence."""
    for file, text in texts.items():
        parts = page_prose if file.endswith(".md") else source_prose
        for first, content in parts(file, text):
            plain = QUOTED.sub(emptied, content)
            for words, expected in PROSE.items():
                for match in words.finditer(plain):
                    line = first + plain.count("\n", 0, match.start(1))
                    found = " ".join(match[1].split())
                    yield Offence("prose", file, line, f'found "{found}", expected {expected}')


def offences() -> list[Offence]:
    package = Package(texts := read())
    structure = [*only_children(package), *lone_importers(package, texts)]
    return sorted([*lengths(texts), *structure, *prose(texts)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(",")[0])
    parser.add_argument("--shrink", action="store_true", help="remove what offends no longer")
    parser.add_argument("--move", nargs=2, metavar=("OLD", "NEW"), help="rename entries")
    options = parser.parse_args()
    found = offences()
    counts = Counter((offence.rule, offence.key) for offence in found)
    listed: Counter[tuple[str, str]] = Counter()
    for rule, entries in json.loads(LIST.read_text()).items():
        listed.update({(rule, key): number for key, number in entries.items()})
    if options.move:
        old, new = (name.rstrip("/") for name in options.move)
        if (ROOT / old).exists() or not (ROOT / new).exists():
            sys.exit(f"--move OLD NEW follows a renaming: {old} must be gone, {new} must exist")
        for rule, key in list(listed):
            number = listed.pop((rule, key))
            listed[rule, re.sub(rf"^{re.escape(old)}(?=[:/]|$)", new, key)] += number
    if options.shrink:
        listed &= counts
    if options.move or options.shrink:
        rules: dict[str, dict[str, int]] = defaultdict(dict)
        for (rule, key), number in listed.items():
            rules[rule][key] = number
        LIST.write_text(json.dumps(rules, indent=1, sort_keys=True) + "\n")
    for offence in found:
        place = offence.rule, offence.key
        if counts[place] > listed[place]:
            where = f"{offence.key.partition(':')[0]}:{offence.line}: {offence.rule}"
            print(f"{where}: {offence.sentence} ({listed[place]} listed, {counts[place]} found)")
    for (rule, key), number in sorted((listed - counts).items()):
        gone = f"{number} of {listed[rule, key]} listed offences are gone"
        mend = "run `.ci/house.py --shrink`, or --move for a renamed file"
        print(f"{key}: {rule}: {gone}, remove them from the list: {mend}")
    sys.exit(listed != counts)


if __name__ == "__main__":
    main()
