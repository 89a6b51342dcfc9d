"""Load the C++ extension, or say in one sentence why this Python and torch cannot load it.

torch's C++ interface changes between its minor versions, so the extension runs only with the minor
version of torch that it was built for. Under another version it does not load, or it loads and
misreads torch's objects.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import re
import sys
from pathlib import Path

import torch

_NAME = "diloco_comm._C"
# module.cpp writes this text into the extension, followed by the version.
_MARK = b"diloco_comm is built for torch "
_COMMAND, _COMMAND_MODULE = "diloco-comm", "diloco_comm.tools.cli"


def load() -> None:
    """Import the extension, which registers ``torch.ops.diloco_comm.*``.

    Raises:
        ImportError: If the extension is missing, built for another torch, or cannot be loaded.
    """
    built_for = _built_for()
    if built_for is not None and built_for != minor_version(torch.__version__):
        raise ImportError(
            f"the C++ extension of diloco_comm is built for torch {built_for}, and this is torch "
            f"{torch.__version__}: install torch {built_for} (`pip install 'torch=={built_for}.*'`)"
            ", or build the extension for this one (`pip install --no-build-isolation "
            "--force-reinstall --no-deps .` in its sources)"
        )
    try:
        importlib.import_module(_NAME)
    except ImportError as error:
        raise ImportError(
            "the C++ extension of diloco_comm is not built for this Python and torch "
            f"(torch {torch.__version__}): run `pip install --no-build-isolation .` in its sources "
            f"({error})"
        ) from error


def end_command(error: ImportError) -> None:
    """End the command ``diloco-comm`` with the message of ``load``; do nothing in other programs.

    The command's own module is in this package and runs after the package is imported, too late to
    catch the error.
    """
    program = sys.argv[0] if sys.argv else ""
    # ``python -m`` names the program "-m" until the module is found.
    is_module = program == "-m" and _COMMAND_MODULE in sys.orig_argv
    if is_module or Path(program).stem == _COMMAND:
        sys.exit(f"{_COMMAND}: {error}")


def minor_version(version: str) -> str:
    """Return "2.13" for "2.13.0+cpu" and "2.13.0a0+git1234"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _built_for() -> str | None:
    """Read the minor version of torch from the extension's file; None if the file has none."""
    spec = importlib.util.find_spec(_NAME)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    with open(spec.origin, "rb") as file:
        try:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            # The file is empty: loading the extension gives a better error.
            return None
        with content:
            begin = content.find(_MARK) + len(_MARK)
            found = re.match(rb"\d+\.\d+", content[begin : begin + 16])
            return None if found is None else found[0].decode()
