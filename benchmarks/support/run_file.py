"""A file of runs, one line each: a run that the file holds is not repeated."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from diloco_comm.base.files import whole_file

from . import common
from .tuning import LADDER, choose, next_rate

Row = dict[str, Any]


class RunFile:
    """The runs of a JSON Lines file.

    Args:
        path: The file. Its first line names the machine, the versions and the command; every other
            line is one run.
        command: The command that makes the runs.
        defaults: Values of the runs in the file whose lines lack them; the file stays as it is.

    Attributes:
        about: The first line; empty if there is no run.
        rows: The runs, in the order of the file.
    """

    def __init__(
        self, path: Path, command: str, *, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self.command = path, command
        lines = path.read_text().splitlines() if path.exists() else []
        self.about: Row = json.loads(lines[0]) if lines else {}
        self.rows: list[Row] = [{**(defaults or {}), **json.loads(line)} for line in lines[1:]]

    def find(self, wanted: dict[str, Any]) -> list[Row]:
        """List the runs with these values."""
        return [row for row in self.rows if all(row[key] == wanted[key] for key in wanted)]

    def add(self, row: Row) -> None:
        """Append a run, and have it on disk when this returns."""
        if not self.about:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.about = {**common.about(), "command": self.command}
            self._append(self.about)
        self.rows.append(row)
        self._append(row)

    def write_record(self, path: Path, lines: Iterable[str], results: object) -> None:
        """Print a table's lines, and write the record of all runs: condensed results and lines."""
        output = list(lines)
        print("\n".join(output))
        record = {**self.about, "results": results, "output": output}
        try:
            with whole_file("--json", path) as file:
                file.write_text(common.record_text(record) + "\n")
        except OSError as error:
            sys.exit(str(error))

    def _append(self, row: Row) -> None:
        # One write a line: an interrupt leaves no half a line.
        with open(self.path, "ab", buffering=0) as file:
            file.write((json.dumps(row) + "\n").encode())
            os.fsync(file.fileno())


class Trainings(RunFile):
    """The trainings of a file of runs, each made once.

    Args:
        train: Trains for a run, a dataclass with ``lr`` and ``seed``, and returns its line.
        limit_s: Seconds after which no further training begins.
    """

    def __init__(
        self,
        path: Path,
        command: str,
        train: Callable[[Any], Row],
        *,
        limit_s: float = float("inf"),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path, command, defaults=defaults)
        self._train, self._end = train, time.monotonic() + limit_s
        self.is_complete = True

    def make(self, run: Any) -> None:
        """Train, unless the file holds the run.

        Raises:
            TimeoutError: If the time is up; the runs that were made are in the file.
        """
        if self.find(asdict(run)):
            return
        if time.monotonic() > self._end:
            raise TimeoutError
        row = self._train(run)
        self.add(row)
        print(f"{row['cpu_s']:6.1f} s  {row['loss']:.4f}  {run}", flush=True)

    def tune(
        self, run: Any, start: float, ladder: Sequence[float] = LADDER, loss: str = "loss"
    ) -> float:
        """Try learning rates of a run until the best one is bracketed; return the best."""
        wanted = asdict(run)
        del wanted["lr"]
        while True:
            losses = {row["lr"]: row[loss] for row in self.find(wanted)}
            lr = next_rate(losses, start, ladder)
            if lr is None:
                return choose(losses).lr
            self.make(replace(run, lr=lr))

    @contextmanager
    def in_time(self) -> Iterator[None]:
        """Leave the block where the time is up, and say so."""
        try:
            yield
        except TimeoutError:
            self.is_complete = False
            print("# the time is up: the same command goes on with the missing runs")


def grouped(rows: Iterable[Row], keys: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    """Return the runs of each setting, the values of ``keys``, in the order of the first runs."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [(dict(zip(keys, values, strict=True)), own) for values, own in groups.items()]
