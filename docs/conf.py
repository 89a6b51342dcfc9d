"""Configuration of the documentation site: `make docs` builds it, warnings are errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from sphinx.application import Sphinx

import diloco_comm

project = "diloco_comm"
author = "the diloco_comm authors"
release = version = diloco_comm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 4
# The methods are explained by their equations; the sources are linked from the reference.
autodoc_member_order = "bysource"
# The package does not depend on torchft, and one module derives a class from a class of torchft.
autodoc_mock_imports = ["torchft"]
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
nitpicky = False

html_theme = "furo"
html_title = f"diloco_comm {release}"
html_static_path: list[str] = []


def write_command_line(app: Sphinx) -> None:
    """Write the page of ``diloco-comm`` and its sub-commands from their ``--help``."""
    command = [sys.executable, "-m", "typer", "diloco_comm.tools.app"]
    command += ["utils", "docs", "--name", "diloco-comm", "--title", "The command line"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # The usage is a form, no command.
    text = text.replace("```console\n$ ", "```text\n")
    # The examples at the end of a help are commands, one in each line.
    text = re.sub(r"^(?=(diloco-comm|torchrun) )", "    ", text, flags=re.MULTILINE)
    page = Path(app.srcdir) / "reference" / "command-line.md"
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_command_line)
