"""Storms of many seeds, each in a process of its own, in one table: ``make chaos``.

    python -m benchmarks.elastic.seeds build/chaos --seeds 60

Seed s has from 2 to 8 replicas, 2 + s modulo 7, and a schedule that is drawn from it. The folder
gets the schedule, the output and the figures of each seed, and the logs of all processes of a seed
that has failed. The exit status is 1 if a seed has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.elastic import schedules
from benchmarks.support import common

_LEAST, _MOST = 2, 8
# Two processors follow the replicas of one storm at its pace.
_PROCESSORS = 2
# As `make soak-elastic`: some pauses are longer than a replica is waited for, others are not.
_OPTIONS = ("--suspect-after", "5", "--step", "0.05", "--sync-every", "4")
_HEAD = " seed  W  lost discarded rounds views scrapes   back  faults"
# Width of the columns by the names of their figures.
_COLUMNS = {
    "outer_steps_lost": 5,
    "rounds_discarded": 9,
    "rounds": 6,
    "views": 5,
    "scrapes": 7,
}


class Outcome(NamedTuple):
    """The end of a seed.

    Attributes:
        results: As ``storm_report.results_of``; {} if the storm has none.
    """

    seed: int
    num_replicas: int
    status: int
    results: Mapping[str, Any]

    @property
    def violations(self) -> list[str]:
        without = f"the storm has ended with status {self.status}, and without figures"
        return list(self.results["violations"]) if self.results else [without]

    @property
    def has_failed(self) -> bool:
        return bool(self.status or self.violations or self.results["outer_steps_lost"])

    @property
    def row(self) -> str:
        found = {name: self.results.get(name, "-") for name in _COLUMNS}
        back = self.results.get("longest_way_back_s")
        found["back"] = "never" if back is None else f"{back:.1f}"
        cells = [f"{found[name]:>{width}}" for name, width in {**_COLUMNS, "back": 6}.items()]
        faults = sorted(self.results.get("faults", {}).items())
        drawn = ", ".join(f"{count} {kind}" for kind, count in faults)
        return f"{self.seed:>5} {self.num_replicas:>2} {' '.join(cells)}  {drawn or 'none'}"


def num_replicas_of(seed: int) -> int:
    return _LEAST + seed % (_MOST - _LEAST + 1)


def run(seed: int, args: argparse.Namespace) -> Outcome:
    """Run the storm of a seed in a process of its own."""
    stem: Path = args.folder / f"{args.schedule}-{args.link}-{seed}"
    schedule, log, figures, logs = (
        stem.with_suffix(suffix) for suffix in (".jsonl", ".log", ".json", ".logs")
    )
    num_replicas = num_replicas_of(seed)
    made = schedules.make(args.schedule, num_replicas, args.seconds, args.every, seed)
    schedule.write_text(schedules.to_text(made))
    shutil.rmtree(logs, ignore_errors=True)
    figures.unlink(missing_ok=True)
    words = ["-m", "benchmarks.elastic.storms", str(schedule), "--replicas", str(num_replicas)]
    words += ["--link", args.link, "--json", str(figures), "--logs", str(logs), *_OPTIONS]
    with log.open("w") as file:
        command = [sys.executable, *words]
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    results = json.loads(figures.read_text())["results"] if figures.exists() else {}
    outcome = Outcome(seed, num_replicas, status, results)
    if not outcome.has_failed:
        shutil.rmtree(logs)
    return outcome


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="for the files of all seeds")
    add("--first", type=int, default=0, help="the first seed")
    add("--seeds", type=common.parse_count, default=60, help="number of seeds")
    add("--seconds", type=float, default=60.0, help="time of the last fault of a seed")
    add("--every", type=float, default=4.0, help="seconds between two faults")
    add("--schedule", choices=schedules.NAMES, default="chaos", help="see storms --make")
    add("--link", choices=("tcp", "gloo", "relay"), default="tcp", help="see storms")
    beside = max(1, (os.cpu_count() or 1) // _PROCESSORS)
    add("--beside", type=common.parse_count, default=beside, help="seeds that run side by side")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    print(f"# {args.seconds:g} s each, link {args.link}; back: longest way back in seconds")
    print(_HEAD, flush=True)
    seeds = range(args.first, args.first + args.seeds)
    failed = []
    with common.stoppable(), ThreadPoolExecutor(args.beside) as pool:
        try:
            for outcome in pool.map(partial(run, args=args), seeds):
                lines = [f"      VIOLATED {violation}" for violation in outcome.violations]
                print("\n".join([outcome.row, *lines]), flush=True)
                failed += [outcome.seed] if outcome.has_failed else []
        except BaseException:
            # The storms under way have heard of a Ctrl-C, too.
            pool.shutdown(cancel_futures=True)
            raise
    print(f"# {len(seeds)} seeds, failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
