"""The demo's figure: loss over tokens and over wall time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..settings import BASELINE, EAGER, FEDAVG, REFERENCE, SMALL, STREAMING, TINY
from .display import megabytes
from .results import Point, Results, RowResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart; and a marker for print.
STYLES = {
    BASELINE: ("#000000", "-", "o"),
    FEDAVG: ("#E69F00", "-", "s"),
    REFERENCE: ("#0072B2", "-", "^"),
    SMALL: ("#D55E00", "--", "v"),
    TINY: ("#009E73", ":", "D"),
    STREAMING: ("#CC79A7", "-.", "P"),
    EAGER: ("#56B4E9", "--", "X"),
}


def plot_results(results: Results, path: Path) -> None:
    """Write the figure as PNG; needs matplotlib, and no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    over_tokens, over_time = figure.subplots(1, 2, sharey=True)
    scale = results.settings.tokens_per_step / 1e6
    for result in results.rows.values():
        _draw(over_tokens, result, lambda point: point.step * scale, result.row.name)
        sent = f"{result.row.name}, {megabytes(result.sent_bytes)}"
        _draw(over_time, result, lambda point: point.seconds, sent)
    _label(over_tokens, results, "tokens seen by all replicas together (millions)", None)
    _label(over_time, results, "training time (s)", "sent by each replica")
    over_tokens.set_ylabel("loss (nats a byte)")
    settings = results.settings
    over_tokens.set_title("the same tokens")
    over_time.set_title(f"the same clock (link {settings.link})", fontsize="medium")
    figure.suptitle(
        f"{settings.num_replicas} replicas, {settings.num_steps} steps each. DDP communicates at "
        f"every step, the others every {settings.sync_every} steps."
    )
    figure.savefig(path, dpi=130)


def _draw(axes: Axes, result: RowResult, x_of: Callable[[Point], float], label: str) -> None:
    """Draw the validation loss with markers, over the faint training loss."""
    colour, line, marker = STYLES[result.row]
    training, validation = result.training, result.validation
    x = [x_of(point) for point in training]
    axes.plot(x, [point.loss for point in training], color=colour, alpha=0.25, linewidth=1)
    x = [x_of(point) for point in validation]
    losses = [point.loss for point in validation]
    axes.plot(x, losses, line, color=colour, marker=marker, markersize=4, label=label)


def _label(axes: Axes, results: Results, x_label: str, legend_title: str | None) -> None:
    entropy = results.unigram_entropy
    losses = [point.loss for result in results.rows.values() for point in result.validation]
    # The first steps fall steeply for every method; the axis shows where they differ.
    top = min(max(losses), 1.3 * entropy)
    axes.set_ylim(min(losses) - 0.05 * (top - min(losses)), top)
    axes.axhline(entropy, color="0.6", linewidth=1)
    axes.annotate(
        "unigram entropy of the text",
        (1.0, entropy),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        color="0.4",
        fontsize="small",
    )
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title=legend_title, frameon=False, loc="upper right")
