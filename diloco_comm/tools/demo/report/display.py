"""The demo's output: a live table on a terminal, plain lines elsewhere, then the results."""

from __future__ import annotations

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...common.printing import print_whole
from ..settings import BASELINE, ROWS, Row, Settings
from .results import Results, RowResult

CAPTION = """\
Loss: nats a byte on held-out text, with the outer parameters, which all
replicas share. Under Eager the replicas differ, and the loss is that of their
mean; computing the mean is not counted as sent.
DDP: torch's DistributedDataParallel averages the gradients at every step,
through a communication hook over this library's fp32 wire, because the link
emulator throttles only this library's engine.
Exposed: time for which training waited for communication and slower replicas."""
BAR_WIDTH = 10


def open_display(console: Console) -> LiveDisplay | PlainDisplay:
    """Return the display that suits the console: live on a terminal, lines in a log."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class LiveDisplay:
    """A table that is redrawn while the replicas train."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._results: Results | None = None

    def start(self, results: Results) -> None:
        _print_header(self._console, results)
        self._results = results
        self._live.start()
        self._live.update(Text("starting the replicas", style="dim"))

    def update(self, result: RowResult) -> None:
        assert self._results is not None
        self._live.update(_progress_table(self._results))

    def finish(self) -> None:
        self._live.stop()


class PlainDisplay:
    """One line for each validation, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_printed: dict[Row, int] = {}

    def start(self, results: Results) -> None:
        _print_header(self._console, results)
        self._settings = results.settings

    def update(self, result: RowResult) -> None:
        printed = self._num_printed.get(result.row, 0)
        for point in result.validation[printed:]:
            rate = _tokens_per_second(result, self._settings)
            self._console.print(
                f"{result.row.name:<14} step {point.step:>4}/{self._settings.num_steps}  "
                f"validation {point.loss:.3f}  {rate:>7,.0f} tokens/s  "
                f"sent {megabytes(result.sent_bytes):>9}  exposed {result.exposed_s:>5.1f} s  "
                f"{point.seconds:>5.1f} s",
                highlight=False,
            )
        self._num_printed[result.row] = len(result.validation)

    def finish(self) -> None:
        pass


def print_results(console: Console, results: Results) -> None:
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


def _progress_table(results: Results) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("run", no_wrap=True, min_width=14)
    table.add_column("", width=BAR_WIDTH)
    for title in ("step", "train", "valid", "tok/s", "sent", "exposed", "time"):
        table.add_column(title, justify="right", no_wrap=True, min_width=6)
    for row in ROWS:
        result = results.rows.get(row)
        if result is None:
            table.add_row(Text(row.name, style="dim"))
        else:
            table.add_row(*_progress_cells(result, results.settings))
    return table


def _progress_cells(result: RowResult, settings: Settings) -> list[RenderableType]:
    style = "" if result.is_finished else "bold"
    cells = (
        f"{result.step}/{settings.num_steps}",
        f"{result.training[-1].loss:.3f}" if result.training else "",
        f"{result.final_loss:.3f}" if result.validation else "",
        f"{_tokens_per_second(result, settings):,.0f}",
        megabytes(result.sent_bytes),
        f"{result.exposed_s:.1f} s",
        f"{result.seconds:.1f} s",
    )
    bar = ProgressBar(total=settings.num_steps, completed=result.step, width=BAR_WIDTH)
    return [Text(result.row.name, style=style), bar, *(Text(cell, style=style) for cell in cells)]


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


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.{0 if num_bytes >= 1e8 else 1}f} MB"
