"""Pages are short, and the page of the Python interface has the public names and no others."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pages import ROOT

import diloco_comm
from diloco_comm import asynchronous, ops

DOCS = ROOT / "docs"
MOST_WORDS = 6000
# Longer pages, with the reason. The list only becomes shorter.
LONGER: dict[str, str] = {}
# Generated from the sources at each build, so a page may be of older ones.
GENERATED = "reference/command-line"

# The modules whose names the pages use. A name of another module is no public name.
PUBLIC_MODULES = {
    *("diloco_comm", "diloco_comm.ops", "diloco_comm.wire", "diloco_comm.backend"),
    *("diloco_comm.asynchronous", "diloco_comm.elastic.registry"),
    # The arguments and results of public classes.
    "diloco_comm.asynchronous.rules",
    "diloco_comm.asynchronous.decoupled.settings",
    "diloco_comm.asynchronous.decoupled.attached",
    *(
        f"diloco_comm.integrations.{name}"
        for name in ("accelerate", "ddp_hook", "huggingface", "launch", "lightning")
    ),
    *(f"diloco_comm.integrations.{name}" for name in ("torchft", "torchtitan", "writers")),
}


def num_words() -> dict[str, int]:
    pages = {page.relative_to(DOCS).as_posix(): page for page in DOCS.rglob("*.md")}
    return {
        name: len(page.read_text().split())
        for name, page in pages.items()
        if not name.startswith(GENERATED)
    }


def test_pages_are_short() -> None:
    """A page that needs more words is cut, or split by its subjects."""
    longer = {name: words for name, words in num_words().items() if words > MOST_WORDS}
    assert longer.keys() == LONGER.keys(), longer
    assert all(LONGER.values())


def configuration() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_command_has_a_page() -> None:
    usage = "**Usage**:\n\n```console\n$ {} [OPTIONS]\n```\n"
    text = "# The command line\n\n" + usage.format("diloco-comm")
    text += "\n**Commands**:\n\n* `keys`: Make keys.\n* `store`: Host a store.\n\n"
    text += "## `diloco-comm keys`\n\n" + usage.format("diloco-comm keys")
    text += "\n### `diloco-comm keys make`\n\nMake one.\n\n## `diloco-comm store`\n\nHost it.\n"
    text += "\ndiloco-comm store --listen h:1\n"
    pages = configuration().command_pages(text)
    assert list(pages) == ["command-line.md", "command-line/keys.md", "command-line/store.md"]
    first, keys, store = pages.values()
    assert "* [`keys`](command-line/keys.md): Make keys." in first
    assert first.endswith("command-line/keys\ncommand-line/store\n```\n")
    assert keys.startswith("# `diloco-comm keys`\n") and "\n## `diloco-comm keys make`\n" in keys
    assert "```text\ndiloco-comm" in keys.replace("    diloco", "diloco")
    assert store.endswith("\n    diloco-comm store --listen h:1\n")


@pytest.mark.nightly("the help of the commands is read in a process of its own")
def test_the_pages_of_the_commands_are_short() -> None:
    pytest.importorskip("typer")
    pages = configuration().command_pages(configuration().read_help())
    assert len(pages) > 10
    assert {name for name, text in pages.items() if len(text.split()) > MOST_WORDS} == set()


@pytest.mark.nightly("a site of one page takes seconds; .ci/run builds the whole site")
def test_a_page_of_the_site_can_be_copied_and_found(tmp_path: Path) -> None:
    pytest.importorskip("sphinx_copybutton")
    (tmp_path / "reference").mkdir()
    (tmp_path / "index.md").write_text(
        "# Stores\n\nGive --listen and 'keys'.\n\n```bash\ndiloco-comm store\n```\n"
    )
    command = [sys.executable, "-m", "sphinx", "-q", "-c", str(DOCS), str(tmp_path)]
    subprocess.run([*command, str(tmp_path / "site")], check=True)
    page = (tmp_path / "site" / "index.html").read_text()
    assert 'content="Stores: Give --listen and &#x27;keys&#x27;." />' in page
    assert "<p>Give --listen and 'keys'.</p>" in page
    for file in ("copybutton.js", "figures.css"):
        assert file in page and (tmp_path / "site" / "_static" / file).exists()


def documented() -> Iterator[str]:
    """Yield the names that docs/reference/python.md shows; a module stands for its names."""
    text = (DOCS / "reference" / "python.md").read_text()
    for kind, name in re.findall(r"^\.\. auto(\w+):: (\S+)$", text, re.MULTILINE):
        if kind == "module":
            module = importlib.import_module(name)
            yield from (f"{name}.{found}" for found in getattr(module, "__all__", ["__name__"]))
        else:
            yield name


def test_the_python_page_has_the_public_names_alone() -> None:
    found = list(documented())
    assert {name.rpartition(".")[0] for name in found} <= PUBLIC_MODULES
    expected = {
        f"{module.__name__}.{name}"
        for module in (diloco_comm, asynchronous, ops)
        for name in module.__all__
    }
    assert expected - set(found) == set()
    shown = re.findall(r":members: (.*)", (DOCS / "reference" / "python.md").read_text())
    members = {name for line in shown for name in line.split(", ")}
    assert {name for name in members if name.startswith("_")} == {"__call__"}
