"""Configuration of the documentation site: `make docs` builds it, warnings are errors."""

from __future__ import annotations

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
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
nitpicky = False

html_theme = "furo"
html_title = f"diloco_comm {release}"
html_static_path: list[str] = []
