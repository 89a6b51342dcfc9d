"""``diloco-comm demo``: replicas on this machine learn together over an emulated slow link."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ..common.printing import print_whole
from .report.files import write_files
from .report.results import Results, RowResult, megabytes
from .run import ReplicaError, run_demo
from .settings import BASELINE, Settings

__all__ = ["ReplicaError", "run"]

CAPTION = """\
Loss: nats a byte on held-out text, with the outer parameters, which all
replicas share. Under Eager the replicas differ, and the loss belongs to their
mean; computing the mean is not counted as sent.
DDP: torch's DistributedDataParallel averages the gradients at every step,
through a communication hook over this library's fp32 wire, because the link
emulator throttles only this library's engine.
Exposed: time for which training waited for communication and slower replicas."""


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
    results = run_demo(settings, partial(_print_header, console))
    _print_results(console, results)
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


def _print_results(console: Console, results: Results) -> None:
    """Print the table, the hashes of all replicas, and the claims with their verdicts."""
    console.print()
    print_whole(console, _results_table(results))
    console.print(CAPTION, style="dim", highlight=False)
    console.print()
    print_whole(console, _hash_table(results))
    console.print()
    console.print(_claims_table(results))
    console.print()


def _print_header(console: Console, results: Results) -> None:
    settings = results.settings
    console.print(
        f"[bold]{settings.num_replicas} replicas[/] train a byte-level transformer, "
        f"{settings.num_steps} steps each, on {results.source}",
        highlight=False,
    )
    console.print(
        f"link: {settings.link}   validation text: {results.unigram_entropy:.3f} nats a byte "
        "without context (unigram entropy)",
        style="dim",
        highlight=False,
    )


def _results_table(results: Results) -> Table:
    settings = results.settings
    table = Table(
        title=f"{settings.num_replicas} replicas, {settings.num_steps} steps; link {settings.link}",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("run\n", no_wrap=True)
    for title in (
        "sync\nevery",
        "initial\nloss",
        "final\nloss",
        "sent per\nreplica",
        "fewer\nbytes",
        "wall\n(s)",
        "exposed\n(s)",
        "1000\ntok/s",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    baseline = results.rows[BASELINE]
    for result in results.rows.values():
        is_baseline = result is baseline
        ratio = baseline.sent_bytes / max(1.0, result.sent_bytes)
        table.add_row(
            result.row.name,
            "1" if is_baseline else f"{settings.sync_every}",
            f"{result.initial_loss:.3f}",
            f"{result.final_loss:.3f}",
            megabytes(result.sent_bytes),
            "" if is_baseline else f"{ratio:,.0f}x",
            f"{result.seconds:.1f}",
            f"{result.exposed_s:.1f}",
            f"{_tokens_per_second(result, settings) / 1e3:,.1f}",
        )
    return table


def _hash_table(results: Results) -> Table:
    table = Table(
        title="hash of the shared parameters (SHA-256, first digits)",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("run")
    for replica in range(results.settings.num_replicas):
        table.add_column(f"replica {replica}")
    table.add_column("")
    for result in results.rows.values():
        verdict = "identical" if result.is_identical else "[red]DIFFERENT[/]"
        table.add_row(result.row.name, *(digest[:10] for digest in result.hashes), verdict)
    return table


def _claims_table(results: Results) -> Table:
    table = Table.grid(padding=(0, 1))
    for claim in results.claims():
        table.add_row("[green]yes[/]" if claim.holds else "[bold red]NO[/]", claim.text)
    return table


def _tokens_per_second(result: RowResult, settings: Settings) -> float:
    return result.step * settings.tokens_per_step / result.seconds if result.seconds else 0.0
