"""``diloco-comm demo``: replicas on this machine learn together over an emulated slow link."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rich.console import Console

from .demo_display import open_display, print_results
from .demo_results import Results
from .demo_run import ReplicaError, run_demo
from .demo_settings import Settings

__all__ = ["ReplicaError", "run"]


def run(
    settings: Settings, out: Path, console: Console | None = None, *, as_json: bool = False
) -> Results:
    """Run the demo, print its table, and write ``demo.png`` and ``demo.json`` to ``out``.

    Args:
        as_json: Print what ``demo.json`` holds, and all else to stderr.

    Raises:
        ValueError: If the text is missing or too short.
        ReplicaError: If a replica failed.
    """
    console = console or Console(soft_wrap=True, stderr=as_json)
    results = run_demo(settings, open_display(console))
    out.mkdir(parents=True, exist_ok=True)
    print_results(console, results)
    _write_plot(console, results, out / "demo.png")
    numbers = results.as_json()
    (out / "demo.json").write_text(numbers + "\n")
    console.print(f"numbers: {out / 'demo.json'}", highlight=False)
    console.print(f"[dim]{results.total_seconds:.0f} s in all[/]", highlight=False)
    if as_json:
        print(numbers)
    return results


def _write_plot(console: Console, results: Results, path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print("plot:    none; for one, pip install 'diloco_comm\\[plot]'")
        return
    from .demo_plot import plot_results

    plot_results(results, path)
    console.print(f"plot:    {path}", highlight=False)
