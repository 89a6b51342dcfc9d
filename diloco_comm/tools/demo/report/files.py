"""The files of a demo: its numbers as JSON, and its figure."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ....base.files import whole_file


def write_files(
    console: Console, out: Path, name: str, numbers: str, draw: Callable[[Path], None]
) -> None:
    """Write ``NAME.json`` and, where matplotlib is installed, ``NAME.png`` into a folder.

    If the first file cannot be written, the second is still written.

    Raises:
        OSError: If a file cannot be written; its text is a sentence.
    """
    try:
        path = out / f"{name}.json"
        with whole_file("--out", path) as file:
            file.write_text(numbers + "\n")
        console.print(f"numbers: {path}", highlight=False)
    finally:
        _write_plot(console, out / f"{name}.png", draw)


def _write_plot(console: Console, path: Path, draw: Callable[[Path], None]) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print("plot:    none; for one, pip install 'diloco_comm\\[plot]'")
        return
    with whole_file("--out", path) as file:
        draw(file)
    console.print(f"plot:    {path}", highlight=False)
