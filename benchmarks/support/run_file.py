"""A file of runs, one line each: a run that the file holds is not repeated."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import common


class RunFile:
    """The runs of a JSON Lines file.

    Args:
        path: The file. Its first line names the machine, the versions and the command; every other
            line is one run.
        command: The command that makes the runs.
        defaults: Values of the runs in the file whose lines lack them; the file stays as it is.

    Attributes:
        rows: The runs, in the order of the file.
    """

    def __init__(
        self, path: Path, command: str, *, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self.command = path, command
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        self.rows: list[dict[str, Any]] = [
            {**(defaults or {}), **json.loads(line)} for line in lines
        ]

    def find(self, wanted: dict[str, Any]) -> list[dict[str, Any]]:
        """List the runs with these values."""
        return [row for row in self.rows if all(row[key] == wanted[key] for key in wanted)]

    def add(self, row: dict[str, Any]) -> None:
        """Append a run, and have it on disk when this returns."""
        if not self.path.exists():
            about = {"machine": common.machine(), "versions": common.versions()}
            self._append({**about, "command": self.command})
        self.rows.append(row)
        self._append(row)

    def write_report(
        self, lines: Iterable[str], draw: Callable[[list[dict[str, Any]], Path], None]
    ) -> None:
        """Print a table's lines, write them beside the file as .txt, and draw the runs as .png."""
        table = "\n".join(lines)
        print(table)
        self.path.with_suffix(".txt").write_text(table + "\n")
        draw(self.rows, self.path.with_suffix(".png"))

    def _append(self, row: dict[str, Any]) -> None:
        # One write a line: an interrupt leaves no half a line.
        with open(self.path, "ab", buffering=0) as file:
            file.write((json.dumps(row) + "\n").encode())
            os.fsync(file.fileno())
