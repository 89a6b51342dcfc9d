"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package that finds names in modules of the package.

    Args:
        modules: The names, with spaces between them, by their module, which is relative to the
            package, such as ``.server``. The names of "." are modules themselves.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == ".":
            return importlib.import_module(f".{name}", package)
        found = getattr(importlib.import_module(homes[name], package), name)
        setattr(sys.modules[package], name, found)
        return found

    return find
