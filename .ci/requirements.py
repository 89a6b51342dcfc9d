"""Print the development requirements: the [cli], [plot] and [dev] extras of pyproject.toml."""

from __future__ import annotations

import pathlib

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

extras = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
names = [name for key in ("cli", "plot", "dev") for name in extras[key]]
print(*(name for name in names if not name.startswith("diloco_comm")))
