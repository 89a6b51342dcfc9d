"""``diloco-comm demo --decoupled``: run it, print its table, write numbers and figure."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ...common.printing import print_whole
from ..report.files import write_files
from .results import Results
from .run import run_learners
from .settings import DecoupledDemo

__all__ = ["run"]


def run(
    demo: DecoupledDemo, out: Path, console: Console | None = None, *, as_json: bool = False
) -> Results:
    """Run the demo, print its table, then write ``decoupled.json`` and ``.png`` to ``out``.

    Args:
        as_json: Print the content of ``decoupled.json``, and all other output to stderr.

    Raises:
        ValueError: If the text is missing or too short.
        ReplicaError: If a learner failed.
        OSError: If a file cannot be written; its text is a sentence.
    """
    console = console or Console(soft_wrap=True, stderr=as_json)
    results = run_learners(demo, lambda text: console.print(text, highlight=False))
    print_whole(console, _table(results))
    for claim in results.claims():
        mark = "[green]yes[/]" if claim.holds else "[red]no [/]"
        console.print(f"{mark} {claim.text}", highlight=False)
    numbers = results.as_json()
    if as_json:
        print(numbers, flush=True)
    write_files(console, out, "decoupled", numbers, lambda path: _draw(results, path))
    return results


def _table(results: Results) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    heads = (
        "learner", "steps", "s a step before", "after the kill", "reports merged", "commits taken",
        "share of DiLoCo", "sent", "received",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="left" if head == "learner" else "right")
    for index, track in enumerate(results.tracks):
        before, after = results.pace_s(index)
        ended = track.ended
        is_killed = index == results.demo.killed
        kind = "killed" if is_killed else "slow" if index == results.demo.slow else ""
        table.add_row(
            f"{index} {kind}".strip(),
            str(len(track.steps)),
            f"{before:.3f}",
            "-" if is_killed else f"{after:.3f}",
            "-" if ended is None else str(ended.merged),
            str(results.versions(index)[1]),
            "-" if ended is None else f"{ended.hook_s / (results.ended_at - results.began):.1%}",
            "-" if ended is None else f"{ended.sent_bytes / 1e6:.2f} MB",
            "-" if ended is None else f"{ended.received_bytes / 1e6:.2f} MB",
        )
    return table


def _draw(results: Results, path: Path) -> None:
    # matplotlib may be missing.
    from .plot import plot_results

    plot_results(results, path)
