"""``diloco-comm demo``: replicas on this machine learn together over an emulated slow link."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rich.console import Console

from ..common import outputs
from .report.display import open_display, print_results
from .report.results import Results
from .run import ReplicaError, run_demo
from .settings import Settings

__all__ = ["ReplicaError", "run"]


def run(
    settings: Settings, out: Path, console: Console | None = None, *, as_json: bool = False
) -> Results:
    """Run the demo, print its table, then write ``demo.json`` and ``demo.png`` to ``out``.

    Args:
        as_json: Print the content of ``demo.json``, and all other output to stderr.

    Raises:
        ValueError: If the text is missing or too short.
        ReplicaError: If a replica failed.
        OSError: If a file cannot be written; its text is a sentence.
    """
    console = console or Console(soft_wrap=True, stderr=as_json)
    results = run_demo(settings, open_display(console))
    print_results(console, results)
    console.print(f"[dim]{results.total_seconds:.0f} s in all[/]", highlight=False)
    numbers = results.as_json()
    if as_json:
        print(numbers, flush=True)
    # If the first file cannot be written, the second is still written.
    try:
        _write_numbers(console, numbers, out / "demo.json")
    finally:
        _write_plot(console, results, out / "demo.png")
    return results


def _write_numbers(console: Console, numbers: str, path: Path) -> None:
    with outputs.writing("--out", path):
        path.write_text(numbers + "\n")
    console.print(f"numbers: {path}", highlight=False)


def _write_plot(console: Console, results: Results, path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print("plot:    none; for one, pip install 'diloco_comm\\[plot]'")
        return
    from .report.plot import plot_results

    with outputs.writing("--out", path):
        plot_results(results, path)
    console.print(f"plot:    {path}", highlight=False)
