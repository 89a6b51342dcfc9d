"""Compare the coverage of the first tier with the coverage of all tests, room by room.

python tests/support/quality/coverage_tiers.py     # after `make coverage`
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coverage import Coverage

FOLDER = Path("build/coverage")
# How many points of branch coverage the first tier may lack.
LIMIT = 2.0


@dataclass
class Counts:
    """How many lines and branches there are, and how many of them tests have run."""

    lines: int = 0
    run_lines: int = 0
    branches: int = 0
    run_branches: int = 0

    def add(self, summary: dict[str, Any]) -> None:
        self.lines += summary["num_statements"]
        self.run_lines += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.run_branches += summary["covered_branches"]

    @property
    def line_share(self) -> float:
        return 100 * self.run_lines / max(1, self.lines)

    @property
    def branch_share(self) -> float:
        return 100 * self.run_branches / max(1, self.branches)


def by_room(data_file: Path) -> dict[str, Counts]:
    """Return the counts of each room of the package, and of all under "total"."""
    coverage = Coverage(data_file=str(data_file))
    coverage.load()
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        coverage.json_report(outfile=report.name)
        files = json.loads(Path(report.name).read_text())["files"]
    rooms: dict[str, Counts] = defaultdict(Counts)
    for file, found in files.items():
        room = Path(file).parts[1] if len(Path(file).parts) > 2 else "modules at the top"
        for name in (room, "total"):
            rooms[name].add(found["summary"])
    return dict(rooms)


def table(first: dict[str, Counts], every: dict[str, Counts]) -> str:
    heads = ("first tier", "all tests")
    rows = [
        f"{'':20}{'lines %':>22}{'branches %':>24}",
        f"{'':20}" + "".join(f"{head:>12}" for head in (*heads, *heads)),
    ]
    for room in sorted(every, key=lambda room: (room == "total", room)):
        both = (first.get(room, Counts()), every[room])
        shares = [counts.line_share for counts in both]
        shares += [counts.branch_share for counts in both]
        rows.append(f"{room:20}" + "".join(f"{share:12.1f}" for share in shares))
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--first", type=Path, default=FOLDER / "first.sqlite", help="data of this tier"
    )
    parser.add_argument("--all", type=Path, default=FOLDER / "all.sqlite", help="data of all tests")
    options = parser.parse_args()
    first, every = by_room(options.first), by_room(options.all)
    print(table(first, every))
    missing = every["total"].branch_share - first["total"].branch_share
    print(f"The first tier lacks {missing:.2f} points of branch coverage; {LIMIT} are allowed.")
    return int(missing > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
