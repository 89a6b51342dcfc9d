"""Run all checks at full depth, part by part: `make nightly`.

Each part is a make target with a log of its own. A part that has passed on these files is not run
again, so a run that was stopped goes on where it was. `--again` runs all parts anew; names of parts
choose some of them. The table stands in build/nightly/summary.txt. Where nvcc is absent, the parts
that compile CUDA are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "nightly"

# The tests that start most processes are parts of their own; one part has all other folders.
FAULTS = ("faults", "elastic")
SERVERS = ("asynchronous", "tools", "benchmarks")
PAGES = ("docs", "integrations", "support")
ROOMS = sorted(
    {file.parts[-2] for file in ROOT.glob("tests/*/test_*.py")} - {*FAULTS, *SERVERS, *PAGES}
)


def tests(folders: Iterable[str]) -> str:
    return f"make test-all TESTS='{' '.join(f'tests/{folder}' for folder in folders)}'"


# Each part with its command. The soaks mostly wait, so they run beside each other.
PARTS = {
    "lint": "make lint docs",
    "cpptest": "make cpptest",
    "cuda-sm90": "make cuda-tests",
    "tests-faults": tests(FAULTS),
    "tests-servers": tests(SERVERS),
    "tests-pages": tests(PAGES),
    "tests-rooms": tests(ROOMS),
    # Five minutes each; the asynchronous one has four stretches.
    "soaks": "make --jobs 3 --output-sync soak-async soak-decoupled soak-elastic SECONDS=300 "
    "ASYNC_SECONDS=75 RESULT=build/nightly/soak.json",
    "chaos": "make chaos SEEDS=10",
    "sanitize": "make sanitize",
    # Where nvcc is, the wheel has CUDA kernels, and every architecture must have each kernel.
    "package": "make package-cuda" if shutil.which("nvcc") else ".ci/package",
    "demo": "make demo ARGS='--out build/nightly/demo'",
    "triton": "make kernels ARGS='--json build/nightly/kernels-triton.json'",
    "cuda": "make cuda",
}


NEED_NVCC = ("cuda-sm90", "cuda")


def state_of_tree() -> str:
    """Return the commit, and a digest of what differs from it and of the installed packages."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            errors="backslashreplace",
        ).stdout

    commit = git("rev-parse", "--short=12", "HEAD").strip()
    changes = git("diff", "HEAD")
    for name in git("ls-files", "-z", "--others", "--exclude-standard").split("\0"):
        file = ROOT / name
        if name and file.is_file():
            changes += name + hashlib.sha256(file.read_bytes()).hexdigest()
    pip = [sys.executable, "-m", "pip", "freeze", "--exclude-editable"]
    packages = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    digest = hashlib.sha256((changes + packages).encode()).hexdigest()[:8]
    return f"{commit}{'+changes' if changes else ''} {digest}"


def run(name: str, command: str) -> dict[str, object]:
    log = FOLDER / f"{name}.log"
    begin = time.monotonic()
    # The variables of the make that runs this, such as ARGS, are not for the parts.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    environment.pop("ARGS", None)
    with log.open("w") as file:
        status = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        ).returncode
    return {"status": status, "seconds": round(time.monotonic() - begin), "log": log.name}


def table(tree: str, outcomes: dict[str, dict[str, object]]) -> str:
    lines = [f"commit {tree}, {os.cpu_count()} processors", f"{'part':<16} {'seconds':>8}  outcome"]
    for name in PARTS:
        outcome = outcomes.get(name, {"status": None, "seconds": 0, "log": None})
        if outcome["status"] == 0:
            text = "passed"
        elif outcome["status"] is None:
            text = "not run" if outcome["log"] is None else "left out: there is no nvcc"
        else:
            text = f"failed, see build/nightly/{outcome['log']}"
        lines.append(f"{name:<16} {outcome['seconds']:>8}  {text}")
    total = sum(int(str(outcome["seconds"])) for outcome in outcomes.values())
    lines.append(f"{'sum':<16} {total:>8}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make nightly", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--again", action="store_true", help="also parts that have passed")
    parser.add_argument("--list", action="store_true", help="show the parts, and run nothing")
    given = parser.parse_args()
    for part in given.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part}; parts are {', '.join(PARTS)}")
    if given.list:
        print("\n".join(f"{name:<16} {command}" for name, command in PARTS.items()))
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    lock = (FOLDER / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("another nightly run is under way in this folder")
    tree, record = state_of_tree(), FOLDER / "record.json"
    kept = json.loads(record.read_text()) if record.exists() else {}
    outcomes = kept["outcomes"] if kept.get("tree") == tree else {}
    for name in given.parts or PARTS:
        if name in NEED_NVCC and shutil.which("nvcc") is None:
            outcomes[name] = {"status": None, "seconds": 0, "log": ""}
            continue
        if not given.again and outcomes.get(name, {}).get("status") == 0:
            print(f"{name}: has passed on {tree}", flush=True)
            continue
        print(f"{name}: {PARTS[name]}", flush=True)
        outcomes[name] = run(name, PARTS[name])
        if state_of_tree() != tree:
            sys.exit(f"{name}: files changed during the run, so no outcome of this part counts")
        record.write_text(json.dumps({"tree": tree, "outcomes": outcomes}, indent=1))
        (FOLDER / "summary.txt").write_text(table(tree, outcomes))
    (FOLDER / "summary.txt").write_text(table(tree, outcomes))
    print(table(tree, outcomes), end="")
    return int(any(outcomes[name]["status"] for name in given.parts or PARTS))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the next run goes on with this part")
