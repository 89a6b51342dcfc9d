"""Print what the steps of a GPU check gave, from the files that it wrote; status 1 if one failed.

python -m benchmarks.gpu.summary FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# What may fail without the whole, and what is then said: the steps after it go another way.
OPTIONAL = {"nccl_ranks": "unproven", "ncu": "unproven"}
# A step that ran into its limit, or into the SIGKILL after it.
TIMED_OUT = {124, 137}
# Rows of the table of kernels that a summary shows.
SHOWN = ("encode", "outer_step", "decode", "reduce of 4", "merge", "norms")


def verdict(step: dict[str, Any]) -> str:
    """Say in a word how a step ended."""
    status = step["status"]
    if status == 0:
        return "ok"
    if step["step"] in OPTIONAL:
        return OPTIONAL[step["step"]]
    if status is None:
        return "not run"
    return "timed out" if status in TIMED_OUT else "failed"


def document(folder: Path, name: str) -> dict[str, Any]:
    """Read a step's results file; nothing if it has none, or half of one."""
    try:
        found = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def results(folder: Path, name: str) -> dict[str, Any]:
    found = document(folder, name).get("results")
    return found if isinstance(found, dict) else {}


def bars(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the bars of a step; the value of a bar that nothing was measured for is None."""
    return results(folder, name).get("bars") or []


def missed_bars(folder: Path, name: str, *, as_predicted: bool) -> list[str]:
    """Describe the figures of a step that miss their bars, with or without a prediction of that."""
    return [
        f"{bar['name']}: {bar['value']:.1f}, must be {bar['is']} {bar['must']:g}"
        + (f" ({reason})" if reason else "")
        for bar in bars(folder, name)
        if bar["value"] is not None
        and not bar["holds"]
        and bool(reason := bar.get("predicted", "")) == as_predicted
    ]


def print_kernels(folder: Path, name: str, note: str) -> None:
    """Print the shares of the copy, int8 alone: a line for each operator and implementation.

    Args:
        note: The mark behind each figure; "" if a GPU gave the figures.
    """
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in results(folder, name).get("rows") or []:
        if row["operator"] in SHOWN and row["wire"] in ("", "int8"):
            host = "" if row["host_us"] is None else f" ({row['host_us']:.0f} us)"
            cell = f"{row['share_percent']:.0f} %{host}{note}"
            cells.setdefault((row["operator"], row["impl"]), {})[row["layout"]] = cell
    if not cells:
        return
    print(f"\n{name}: share of the copy's bandwidth, int8 (time of the host)")
    print(f"{'':<22}{'one tensor':>18}{'300 tensors':>18}{'300 misaligned':>18}")
    for (operator, impl), shares in cells.items():
        row = "".join(f"{shares.get(layout, '-'):>18}" for layout in ("one", "mixed", "odd"))
        print(f"{operator:<13}{impl:<9}{row}")


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m benchmarks.gpu.summary FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    try:
        lines = (folder / "steps.jsonl").read_text().splitlines()
    except OSError as error:
        print(f"no steps of a GPU check in {folder}: {error.strerror}", file=sys.stderr)
        return 2
    steps = [json.loads(line) for line in lines]
    is_rehearsal = any(step.get("is_rehearsal") for step in steps)
    if is_rehearsal:
        print("A rehearsal without a GPU: kernels are emulated or interpreted, no bar is judged.\n")
    print(f"{'part':<5}{'step':<16} {'result':<10} {'seconds':>8} {'limit':>6}")
    for step in steps:
        text = step["reason"] or document(folder, step["step"]).get("summary", "")
        row = f"{step['part']:<5}{step['step']:<16} {verdict(step):<10}"
        print(f"{row} {step['seconds']:>8} {step['limit']:>6}  {text}".rstrip())
    for name in ("bars", "kernels"):
        print_kernels(folder, name, " emulated" if is_rehearsal else "")
    judged = [] if is_rehearsal else [step["step"] for step in steps]
    for name in judged:
        for bar in missed_bars(folder, name, as_predicted=True):
            print(f"\nmissed by {name}, as predicted: {bar}", end="")
    missed = {name: missed_bars(folder, name, as_predicted=False) for name in judged}
    for name, texts in missed.items():
        print("".join(f"\nmissed by {name}: {text}" for text in texts), end="")
    unproven = [step["step"] for step in steps if verdict(step) == "unproven"]
    unproven += [
        f"{bar['name']} of {name}"
        for name in judged
        for bar in bars(folder, name)
        if bar["value"] is None
    ]
    good = {"ok", *OPTIONAL.values()}
    bad = [step["step"] for step in steps if verdict(step) not in good]
    bad += [f"bars of {name}" for name, texts in missed.items() if texts and name not in bad]
    good_end = "every step passed" + ("" if is_rehearsal else ", every bar holds")
    if unproven:
        print(f"\nunproven: {', '.join(unproven)}", end="")
        good_end = "no step failed"
    print(f"\nnot proven: {', '.join(bad)}" if bad else f"\n{good_end}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
