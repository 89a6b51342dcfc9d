"""``diloco-comm demo --chaos``: run the script, print what it cost, write numbers and figure."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from ..data import load_corpus
from ..report.files import write_files
from .display import open_display, print_results
from .results import Results
from .script import run_script
from .settings import ChaosSettings

__all__ = ["run"]


def run(
    settings: ChaosSettings, out: Path, console: Console | None = None, *, as_json: bool = False
) -> Results:
    """Run the chaos demo, print its table, then write ``chaos.json`` and ``chaos.png`` to ``out``.

    Args:
        as_json: Print the content of ``chaos.json``, and all other output to stderr.

    Raises:
        ValueError: If the text is missing or too short.
        ReplicaError: If a replica failed, or an event did not have its effect.
        OSError: If a file cannot be written; its text is a sentence.
    """
    console = console or Console(soft_wrap=True, stderr=as_json)
    began = time.perf_counter()
    corpus = load_corpus(settings.data, settings.num_shards)
    record = run_script(settings, open_display(console, settings))
    seconds = time.perf_counter() - began
    results = Results(settings, record, corpus.source, corpus.unigram_entropy, seconds)
    print_results(console, results)
    console.print(f"[dim]{seconds:.0f} s in all[/]", highlight=False)
    numbers = results.as_json()
    if as_json:
        print(numbers, flush=True)
    write_files(console, out, "chaos", numbers, lambda path: _draw(results, path))
    return results


def _draw(results: Results, path: Path) -> None:
    # matplotlib may be missing.
    from .plot import plot_results

    plot_results(results, path)
