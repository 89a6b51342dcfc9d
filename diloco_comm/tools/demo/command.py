"""``diloco-comm demo``: replicas on this machine learn together over an emulated slow link."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from .report.display import open_display, print_results
from .report.files import write_files
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
    write_files(console, out, "demo", numbers, lambda path: _draw(results, path))
    return results


def _draw(results: Results, path: Path) -> None:
    # matplotlib may be missing.
    from .report.plot import plot_results

    plot_results(results, path)
