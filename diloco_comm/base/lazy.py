"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable


def lazy_names(package: str, module: str, *names: str) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package that finds these names in one of its modules.

    Args:
        module: Name of the module, relative to the package, such as ``.server``.
    """

    def find(name: str) -> object:
        if name in names:
            return getattr(importlib.import_module(module, package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
