"""Run the tests that need a GPU in several processes at once, each with every n-th of them.

    python -m benchmarks.gpu.run_tests --logs FOLDER --processes 8 tests/ops/*.py

Most of the time goes into compiling Triton's kernels, one after the other in each process. Ends
with status 1 when a test failed, or none ran; the logs tell which. Each process has this file as a
plugin of pytest, which takes its share.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

NO_TESTS = 5  # pytest's status when it found none


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", metavar="I/N", help="run every N-th test, from the I-th on (from 0)"
    )


@pytest.hookimpl(trylast=True)  # of what the marker leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, number = map(int, config.option.share.split("/"))
    items[:] = items[first::number]


def start(number: int, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start one process with its share of the tests."""
    command = [sys.executable, "-m", "pytest", "-v", "--durations=5", "-m", args.mark]
    command += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.run_tests"]
    command += ["-k", args.select] if args.select else []
    command += ["--share", f"{number}/{args.processes}", *args.files]
    # As many threads for each as there are cores would only wait for one another.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with (args.logs / f"{number}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def outcome(log: str) -> Counter[str]:
    """Read the numbers of the last line, such as ``3 passed, 1 skipped in 2.5s``.

    Of a process that was ended before, count the tests that had an outcome.
    """
    last = log.strip().splitlines()[-1:] or [""]
    if found := re.findall(r"(\d+) ([a-z]+)", last[0]):
        return Counter({word: int(n) for n, word in found})
    words = re.findall(r"::\S+.* (PASSED|FAILED|SKIPPED|ERROR)\b", log)
    return Counter(word.lower() for word in words) + Counter(["ended before its last test"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="test files")
    add("--logs", type=Path, required=True, help="folder for a log of each process")
    add("--processes", type=int, default=8)
    add("--select", default="", metavar="EXPR", help="pytest's -k")
    add("--mark", default="gpu", help="marker of the tests (default: gpu)")
    add("--rehearse", action="store_true", help="the same tests without a GPU, on its stand-ins")
    args = parser.parse_args(arguments)
    if args.rehearse:
        args.mark, args.processes = "not gpu and not nightly", os.cpu_count() or 1
    args.logs.mkdir(parents=True, exist_ok=True)
    # ``timeout`` ends the whole process group: the tests end, and this process tells what they did.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    running = [start(number, args) for number in range(args.processes)]
    total: Counter[str] = Counter()
    is_good = True
    for number, process in enumerate(running):
        status = process.wait()
        log = (args.logs / f"{number}.log").read_text(errors="replace")
        total += outcome(log)
        if status not in (0, NO_TESTS):
            is_good = False
            print(log)
    print(
        ", ".join(f"{n} {word}" for word, n in total.items() if word != "deselected") or "nothing"
    )
    return 0 if is_good and total["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
