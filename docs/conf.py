"""Configuration of the documentation site: `make docs` builds it, warnings are errors."""

from __future__ import annotations

import html
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes

import diloco_comm

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "diloco_comm"
author = "the diloco_comm authors"
release = version = diloco_comm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
# Two hyphens begin an option, and a quotation is often code: both are copied.
smartquotes = False
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 4
# The methods are explained by their equations; the sources are linked from the reference.
autodoc_member_order = "bysource"
# The package does not depend on torchft, and one module derives a class from a class of torchft.
autodoc_mock_imports = ["torchft"]
autodoc_typehints = "description"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
nitpicky = False

html_theme = "furo"
html_title = f"diloco_comm {release}"
html_static_path = ["_static/figures.css"]
html_css_files = ["figures.css"]


def write_command_line(app: Sphinx) -> None:
    """Write the pages of ``diloco-comm`` and its commands from their ``--help``."""
    folder = Path(app.srcdir) / "reference"
    pages = command_pages(read_help())
    (folder / "command-line").mkdir(exist_ok=True)
    for page in (folder / "command-line").glob("*.md"):
        if f"command-line/{page.name}" not in pages:
            page.unlink()
    for name, text in pages.items():
        page = folder / name
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def read_help() -> str:
    """Return the ``--help`` of all commands, as one page."""
    command = [sys.executable, "-m", "typer", "diloco_comm_tools.app"]
    command += ["utils", "docs", "--name", "diloco-comm", "--title", "The command line"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def command_pages(text: str) -> dict[str, str]:
    """Return the pages by name: a list of the commands, and a page for each of them."""
    # The usage is a form, no command.
    text = text.replace("```console\n$ ", "```text\n")
    # The examples at the end of a help are commands, one in each line.
    text = re.sub(r"^(?=(diloco-comm|torchrun) )", "    ", text, flags=re.MULTILINE)
    first, *sections = re.split(r"^## `diloco-comm (\S+)`\n", text, flags=re.MULTILINE)
    pages = {}
    for name, section in zip(sections[::2], sections[1::2], strict=True):
        section = re.sub(r"^##(?=#+ `)", "#", section, flags=re.MULTILINE)
        pages[f"command-line/{name}.md"] = f"# `diloco-comm {name}`\n{section}"
    first = re.sub(r"^\* `([a-z]+)`:", r"* [`\1`](command-line/\1.md):", first, flags=re.MULTILINE)
    entries = "\n".join(page.removesuffix(".md") for page in pages)
    listed = f"{first.rstrip()}\n\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"
    return {"command-line.md": listed} | pages


def describe(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Give a page its title and the begin of its first paragraph as its description."""
    if tree and (paragraph := tree.next_node(nodes.paragraph)):
        text = f"{tree.next_node(nodes.title).astext()}: {paragraph.astext()}"
        text = html.escape(textwrap.shorten(text, 200, placeholder=" ..."))
        context["metatags"] += f'<meta name="description" content="{text}" />'


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_command_line)
    app.connect("html-page-context", describe)
