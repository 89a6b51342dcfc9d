"""Decoupled training: what learners feel, and how fast the syncer is.

    python -m benchmarks.asynchronous.syncer steps      # p99 of a learner's step beside others
    python -m benchmarks.asynchronous.syncer commits    # from the last report to the COMMIT
    python -m benchmarks.asynchronous.syncer merge      # 8 reports of 25 million parameters
    python -m benchmarks.asynchronous.syncer messages   # small fragments: messages a second
    python -m benchmarks.asynchronous.syncer memory     # resident memory with a journal

Learners and syncer are processes of their own. In ``steps`` and ``commits`` an inner step is a
sleep of fixed length, so that the learners of one small machine do not compete for its cores.
docs/measurements/decoupled-results.md explains the figures. With ``--check`` the exit status is 1
if a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.asynchronous.syncer import commits, load, merge, processes, steps
from benchmarks.support import common

MEASURES = {
    "steps": steps.measure,
    "commits": commits.measure,
    "merge": merge.measure,
    "messages": load.measure_messages,
    "memory": load.measure_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*MEASURES, *processes.ROLES])
    parser.add_argument("--seconds", type=float, help="of each phase, or of the whole measurement")
    parser.add_argument("--rounds", type=int, help="turns of all phases, or merges measured")
    parser.add_argument("--elements", type=int, help="of the model")
    parser.add_argument("--step-ms", type=float, default=20.0, help="length of an inner step")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="of journals, in commits"
    )
    parser.add_argument("--check", action="store_true", help="end with 1 if a bound is missed")
    parser.add_argument("--given", default="{}", help=argparse.SUPPRESS)
    common.add_output(parser)
    options = parser.parse_args()
    if options.what in processes.ROLES:
        processes.ROLES[options.what](options.given)
        return
    path = options.json or common.RESULTS / "asynchronous" / f"decoupled-{options.what}.json"
    common.check_default(parser, "--json", path)
    report = common.Report(f"decoupled training, {options.what}")
    results = MEASURES[options.what](report, options)
    for sentence in results["missed"]:
        report.print(f"# missed: {sentence}")
    common.save(report, path, results)
    if options.check and results["missed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
