""".ci/house.py finds what breaks a rule of the house; its list of old offenders only shrinks."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE = "class Base:\n    pass\n"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / ".ci" / "house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house = load()


class Tree:
    """A small tree, and the check of this tree."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys
        self.list = root / ".ci" / "house.json"
        self.list.parent.mkdir()
        self.allow({})

    def allow(self, entries: Mapping[str, Mapping[str, int]]) -> None:
        self.list.write_text(json.dumps(entries))

    @property
    def allowed(self) -> dict[str, dict[str, int]]:
        return json.loads(self.list.read_text())

    def write(self, files: Mapping[str, str]) -> None:
        """Write files; a module of the package or of csrc gets enough lines behind its text."""
        for name, text in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            is_module = name.startswith(("diloco_comm/", "csrc/"))
            (self.root / name).write_text(text + "\n" * 150 if is_module else text)

    def cut(self, name: str, lines: int) -> None:
        """Write a file of empty lines."""
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text("\n" * lines)

    def run(self, *options: str) -> tuple[int | str | None, list[str]]:
        """Return the exit status (a text counts as 1) and the lines that were printed."""
        with (
            mock.patch.object(sys, "argv", ["house.py", *options]),
            mock.patch.multiple(house, ROOT=self.root, LIST=self.list),
            pytest.raises(SystemExit) as ended,
        ):
            house.main()
        return ended.value.code, self.capsys.readouterr().out.splitlines()

    def check(self, *options: str) -> list[str]:
        """Return the sentences of the check, which fails where there are any."""
        status, sentences = self.run(*options)
        assert status == (1 if sentences else 0)
        return sentences


@pytest.fixture
def tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tree:
    return Tree(tmp_path, capsys)


@pytest.mark.parametrize(
    "file", ["tests/test_a.py", "benchmarks/a.py", "kernels/a.py", "csrc/a.cu"]
)
def test_a_source_is_not_too_long(tree: Tree, file: str) -> None:
    tree.cut(file, 900)
    assert tree.check() == []
    tree.cut(file, 901)
    (sentence,) = tree.check()
    assert sentence.startswith(f"{file}:901: long: 901 lines, expected at most 900")


@pytest.mark.parametrize("file", ["diloco_comm/a.py", "csrc/wire/a.h"])
def test_a_module_is_not_too_short(tree: Tree, file: str) -> None:
    tree.cut(file, 150)
    assert tree.check() == []
    tree.cut(file, 149)
    (sentence,) = tree.check()
    assert sentence.startswith(f"{file}:1: short: 149 lines, expected at least 150")


def test_sources_that_may_be_short(tree: Tree) -> None:
    for file, lines in {"tests/a.py": 1, "diloco_comm/__init__.py": 1, "csrc/a.cpp": 100}.items():
        tree.cut(file, lines)
    tree.cut("csrc/a.h", 50)
    assert tree.check() == []
    tree.cut("csrc/a.h", 49)
    (sentence,) = tree.check()
    assert sentence.startswith("csrc/a.cpp:1: short: 149 lines")


@pytest.mark.parametrize(
    "child",
    [
        "from .a import Base\nclass Child(Base): pass",
        "from diloco_comm.room import Base as Other\nclass Child(Other): pass",
        "from . import a\nclass Child(a.Base): pass",
        "import diloco_comm.a as module\nclass Child(module.Base[int], dict): pass",
    ],
)
def test_a_base_class_has_not_one_child(tree: Tree, child: str) -> None:
    tree.write({"diloco_comm/a.py": BASE, "diloco_comm/room/__init__.py": "from ..a import Base"})
    assert tree.check() == []
    tree.write({"diloco_comm/b.py": child, "diloco_comm/c.py": child.replace("Child", "Second")})
    assert tree.check() == []
    (tree.root / "diloco_comm" / "c.py").unlink()
    (sentence,) = tree.check()
    assert sentence.startswith("diloco_comm/a.py:1: child: class Base has the only child Child")


@pytest.mark.parametrize(
    "code",
    [
        "from torch.utils.data import Base\nclass Child(Base): pass",
        "class Base(Protocol): pass\nclass Child(Base): pass",
        "class Refused(ValueError): pass\nclass Late(Refused): pass\nclass Gone(Late): pass",
    ],
)
def test_classes_that_may_have_one_child(tree: Tree, code: str) -> None:
    tree.write({"diloco_comm/a.py": BASE, "diloco_comm/b.py": code})
    assert tree.check() == []


def importers(tree: Tree) -> list[str]:
    return [sentence for sentence in tree.check() if ": importer: " in sentence]


@pytest.mark.parametrize(
    "imports",
    [
        "from . import part",
        "from .part import name",
        "import diloco_comm.part",
        "def f():\n    from diloco_comm.part import name",
        "from .names import name",
    ],
)
def test_a_small_module_has_not_one_importer(tree: Tree, imports: str) -> None:
    tree.write({"diloco_comm/a.py": "", "diloco_comm/names/__init__.py": "from ..part import name"})
    tree.cut("diloco_comm/part.py", 119)
    assert importers(tree) == []
    tree.write({"diloco_comm/a.py": imports})
    (sentence,) = importers(tree)
    assert sentence.startswith(
        "diloco_comm/part.py:1: importer: 119 lines that only diloco_comm.a imports, expected two"
    )
    tree.cut("diloco_comm/part.py", 120)
    assert importers(tree) == []
    tree.cut("diloco_comm/part.py", 119)
    tree.write({"diloco_comm/b.py": imports})
    assert importers(tree) == []


def test_a_package_may_have_one_importer(tree: Tree) -> None:
    tree.cut("diloco_comm/room/__init__.py", 1)
    tree.write({"diloco_comm/a.py": "from . import room"})
    assert tree.check() == []


def test_a_linked_folder_is_read_once(tree: Tree) -> None:
    tree.write({"diloco_comm/__init__.py": "from . import kernels", "kernels/a.py": "# Theirs."})
    tree.write({"diloco_comm/a.py": "from .kernels import a"})
    (tree.root / "diloco_comm" / "kernels").symlink_to("../kernels")
    (sentence,) = tree.check()
    assert sentence.startswith("kernels/a.py:1: prose: ")


@pytest.mark.parametrize(
    ("file", "text", "line", "found"),
    [
        ("diloco_comm/a.py", "x = 1  # Those of the others.", 1, "Those of"),
        ("tests/a.py", "x = 1\n# The round and that\n# of a peer.", 2, "that of"),
        ("tests/a.py", "x = 1\n# One.\n# Of two.", 3, "Of"),
        ("tests/a.py", '"""One.\n\nTwo.\n"""\n\nx = 1  # Three and\n# Of four', 7, "Of"),
        ("kernels/a.py", '"""One.\n\nTwo, of which\none.\n"""', 3, "of which"),
        ("kernels/a.py", 'def f():\n    """Run.\n\n    Args:\n        n: Of x.\n    """', 5, "Of"),
        ("examples/a.py", 'raise ValueError("the one "\n    f"that {n} sent")', 1, "the one that"),
        ("csrc/a.cpp", "int a;  // Theirs.", 1, "Theirs"),
        ("csrc/a.cpp", "int a;\n/* With which\n   we begin */", 2, "With which"),
        ("csrc/a.cpp", "char a = '\"';  // What is sent.\nchar b = '\"';", 1, "What"),
        ("docs/a.md", "# Page\n\nA line.\n\n* Who waits, waits.", 5, "Who"),
        ("docs/a.md", "* Item.\n\n    It is theirs.", 3, "theirs"),
        ("docs/a.md", "Text.\n\n```\nof\n```\n\nOf a.", 7, "Of"),
        ("docs/a.md", "| a | b |\n|---|---|\n| `a` | Of b. |", 3, "Of"),
        ("README.md", "The loss is\nthat of [fp32](#of-what).", 2, "that of"),
    ],
)
def test_prose_that_hides_its_subject(
    tree: Tree, file: str, text: str, line: int, found: str
) -> None:
    tree.write({file: text})
    (sentence,) = tree.check()
    assert sentence.startswith(f'{file}:{line}: prose: found "{found}", expected the ')


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("diloco_comm/a.py", 'x = {"those of": 1}\n# The words "that of" and ``of which``.'),
        ("tests/a.py", 'assert error == "the wire is not that of the peer"'),
        ("kernels/a.py", '"""Of course. What happens then? All of what they sent, whichever."""'),
        ("csrc/a.cpp", 'const char* a = "theirs";\n// Of<T>: a T of each lane.'),
        (
            "docs/a.md",
            "Text.\n\n    those of\n\n```\nthat of\n```\n\n<!-- of which -->\n`theirs`\n",
        ),
        ("docs/a.md", "## What a page says\n\nText that offers what it has."),
        ("docs/reference/command-line.md", "Of which."),
        ("docs/reference/command-line/plan.md", "Of which."),
        ("CHANGELOG.md", "Of which."),
    ],
)
def test_prose_without_offence(tree: Tree, file: str, text: str) -> None:
    tree.write({file: text})
    assert tree.check() == []


def test_a_listed_offender_passes_until_there_are_more(tree: Tree) -> None:
    tree.allow({"prose": {"docs/a.md": 1}})
    tree.write({"docs/a.md": "It is theirs.\n"})
    assert tree.check() == []
    tree.write({"docs/a.md": "\nIt is theirs.\nSo it is theirs.\n"})
    first, second = tree.check()
    assert first.startswith("docs/a.md:2: prose: ") and second.startswith("docs/a.md:3: prose: ")
    assert first.endswith("(1 listed, 2 found)")


def test_an_entry_that_offends_no_longer_is_removed(tree: Tree) -> None:
    tree.allow({"prose": {"docs/a.md": 2, "docs/gone.md": 1}, "long": {"tests/a.py": 1}})
    tree.write({"docs/a.md": "It is theirs.\n", "tests/a.py": "\n" * 901})
    lowered, removed = tree.check()
    assert lowered.startswith("docs/a.md: prose: 1 of 2 listed offences are gone")
    assert removed.startswith("docs/gone.md: prose: 1 of 1 listed offences are gone")
    assert "remove them from the list: run `.ci/house.py --shrink`" in removed
    assert tree.check("--shrink") == []
    assert tree.allowed == {"prose": {"docs/a.md": 1}, "long": {"tests/a.py": 1}}


def test_shrinking_adds_nothing(tree: Tree) -> None:
    tree.allow({"prose": {"docs/a.md": 1}})
    tree.write({"docs/a.md": "Theirs, theirs.\n", "docs/b.md": "It is theirs.\n"})
    assert len(tree.check("--shrink")) == 3
    assert tree.allowed == {"prose": {"docs/a.md": 1}}


def test_the_entries_of_a_renamed_file_move(tree: Tree) -> None:
    child = "from .a import Base\nclass Child(Base): 'It is theirs.'\n# That of it."
    entries = {"child": {"diloco_comm/a.py:Base": 1}, "prose": {"diloco_comm/b.py": 1}}
    tree.write({"diloco_comm/a.py": BASE, "diloco_comm/b.py": child})
    tree.allow(entries)
    assert tree.check() == []
    folder = tree.root / "diloco_comm"
    (folder / "room").mkdir()
    shutil.move(folder / "a.py", folder / "room" / "a.py")
    (folder / "b.py").write_text((folder / "b.py").read_text().replace(".a", ".room.a"))
    assert len(tree.check()) == 2
    assert tree.check("--move", "diloco_comm/a.py", "diloco_comm/room/a.py") == []
    assert tree.allowed == {**entries, "child": {"diloco_comm/room/a.py:Base": 1}}


def test_the_entries_of_a_renamed_folder_move_and_add_up(tree: Tree) -> None:
    tree.allow({"prose": {"docs/old/a.md": 1, "docs/older.md": 1, "docs/new/a.md": 1}})
    tree.write({"docs/new/a.md": "Theirs, theirs.\n", "docs/older.md": "It is theirs.\n"})
    assert tree.check("--move", "docs/old/", "docs/new") == []
    assert tree.allowed == {"prose": {"docs/new/a.md": 2, "docs/older.md": 1}}


@pytest.mark.parametrize(("old", "new"), [("docs/a.md", "docs/b.md"), ("docs/c.md", "docs/d.md")])
def test_no_entry_moves_without_a_renaming(tree: Tree, old: str, new: str) -> None:
    tree.allow({"prose": {"docs/a.md": 1, "docs/c.md": 1}})
    tree.write({"docs/a.md": "It is theirs.\n", "docs/b.md": "It is theirs.\n"})
    status, _ = tree.run("--move", old, new)
    assert f"{old} must be gone, {new} must exist" in str(status)
    assert tree.allowed == {"prose": {"docs/a.md": 1, "docs/c.md": 1}}
