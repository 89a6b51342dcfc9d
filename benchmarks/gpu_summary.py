"""Print what the parts of a GPU check gave, from the files that it wrote; status 1 if any failed.

python benchmarks/gpu_summary.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# What may fail without the whole: it is reported as unproven.
OPTIONAL = {"nccl_two_ranks"}
# A part that ran into its limit, or into the SIGKILL after it.
TIMED_OUT = {124, 137}


def verdict(part: dict[str, Any]) -> str:
    """Say in a word how a part ended."""
    status = part["status"]
    if status is None:
        return "not run"
    if status == 0:
        return "ok"
    if part["part"] in OPTIONAL:
        return "unproven"
    return "timed out" if status in TIMED_OUT else "failed"


def figures(folder: Path, name: str) -> str:
    """Quote the one line that a part's results file has for the summary."""
    path = folder / f"{name}.json"
    try:
        return str(json.loads(path.read_text()).get("summary", ""))
    except (OSError, ValueError):
        return ""


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python benchmarks/gpu_summary.py OUT", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    try:
        lines = (folder / "parts.jsonl").read_text().splitlines()
    except OSError as error:
        print(f"no parts of a GPU check in {folder}: {error.strerror}", file=sys.stderr)
        return 2
    parts = [json.loads(line) for line in lines]
    print(f"{'part':<16} {'result':<10} {'seconds':>8} {'limit':>6}")
    for part in parts:
        seconds, limit = part.get("seconds", ""), part.get("limit", "")
        note = part.get("reason", "") or figures(folder, part["part"])
        row = f"{part['part']:<16} {verdict(part):<10} {seconds:>8} {limit:>6}  {note}"
        print(row.rstrip())
    bad = [part["part"] for part in parts if verdict(part) not in ("ok", "unproven")]
    print(f"not proven: {', '.join(bad)}" if bad else "all parts passed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
