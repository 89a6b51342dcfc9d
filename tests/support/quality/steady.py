"""Run the tests with the most processes again and again, on a quiet and on a busy machine.

    python tests/support/quality/steady.py --times 5 --busy 2

`steady.txt` names the tests. They run one after the other: five times, then five times beside two
processes that only count. A failure in any run is an error; `build/steady` has the logs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from junit_results import OPTIONS, results

ROOT = Path(__file__).resolve().parents[3]
LIST = Path(__file__).with_name("steady.txt")
BUILD = ROOT / "build/steady"


@contextlib.contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Keep so many processors busy."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_once(tests: Sequence[str], name: str) -> dict[str, str]:
    """Return what became of each test; "failed" if the run ended before the test."""
    report, log = BUILD / f"{name}.xml", BUILD / f"{name}.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        subprocess.run(
            [*command, *OPTIONS, str(report)], cwd=ROOT, env=environment, stdout=file, stderr=file
        )
    found = results(report)
    if not found:
        sys.exit(f"no test ran; {log} ends with:\n{log.read_text()[-2000:]}")
    return {test: found[test].outcome if test in found else "failed" for test in tests}


def table(tests: Sequence[str], counts: dict[str, Counter[tuple[str, str]]]) -> str:
    """Return passes and failures of each test, for each kind of run."""
    rows = [f"{'':100}" + "".join(f"{f'{kind}: passed failed':>24}" for kind in counts)]
    for test in tests:
        numbers = "".join(
            f"{of_kind[test, 'passed']:17}{of_kind[test, 'failed']:7}"
            for of_kind in counts.values()
        )
        rows.append(f"{test:100}{numbers}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5, help="runs of each kind")
    parser.add_argument("--busy", type=int, default=2, help="processes that only count; 0: none")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    tests = LIST.read_text().splitlines()
    loops = {"quiet": 0, "busy": options.busy} if options.busy else {"quiet": 0}
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for kind, number in loops.items():
        counts[kind] = Counter()
        for time in range(1, options.times + 1):
            with busy_loops(number):
                counts[kind].update(run_once(tests, f"{kind}-{time}").items())
            failed = sum(counts[kind][test, "failed"] for test in tests)
            print(f"{kind} run {time} of {options.times}: {failed} failures so far", flush=True)
    print(table(tests, counts))
    absent = [t for t in tests if not all(of_kind[t, "passed"] for of_kind in counts.values())]
    for test in absent:
        print(f"{test} has not passed once: it is skipped here, or has another name")
    return int(any(of_kind[test, "failed"] for of_kind in counts.values() for test in tests))


if __name__ == "__main__":
    sys.exit(main())
