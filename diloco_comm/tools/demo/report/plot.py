"""The demo's figure: loss over tokens and over wall time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...common import plots
from ..settings import BASELINE, EAGER, FEDAVG, REFERENCE, SMALL, STREAMING, TINY
from .results import Point, Results, RowResult, megabytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A colour, and for print a line and a marker.
STYLES = {
    BASELINE: (plots.BLACK, "-", "o"),
    FEDAVG: (plots.ORANGE, "-", "s"),
    REFERENCE: (plots.BLUE, "-", "^"),
    SMALL: (plots.VERMILION, "--", "v"),
    TINY: (plots.GREEN, ":", "D"),
    STREAMING: (plots.PURPLE, "-.", "P"),
    EAGER: (plots.SKY, "--", "X"),
}


def plot_results(results: Results, path: Path) -> None:
    """Write the figure as PNG; needs matplotlib, and no display."""
    figure, panels = plots.new_panels(1, 2, 5.75, 5, sharey=True)
    over_tokens, over_time = panels[0]
    settings = results.settings
    scale = settings.tokens_per_step / 1e6
    for result in results.rows.values():
        _draw(over_tokens, result, lambda point: point.step * scale, result.row.name)
        sent = f"{result.row.name}, {megabytes(result.sent_bytes)}"
        _draw(over_time, result, lambda point: point.seconds, sent)
    _label(over_tokens, results, "tokens seen by all replicas together (millions)", None)
    _label(over_time, results, "training time (s)", "sent by each replica")
    over_tokens.set_ylabel("loss (nats a byte)")
    over_tokens.set_title("the same tokens; lines: training, markers: validation")
    over_time.set_title(f"the same clock (link {settings.link})", fontsize="medium")
    figure.suptitle(
        f"{settings.num_replicas} replicas, {settings.num_steps} steps each. DDP communicates at "
        f"every step, the others every {settings.sync_every} steps."
    )
    plots.save(figure, path)


def _draw(axes: Axes, result: RowResult, x_of: Callable[[Point], float], label: str) -> None:
    """Draw the training loss as a line, and the validation loss of the shared model as markers.

    There is one validation a round, which is too few for a curve where a run has few rounds.
    """
    colour, line, marker = STYLES[result.row]
    training, validation = result.training, result.validation[1:]
    x = [x_of(point) for point in training]
    axes.plot(x, [point.loss for point in training], line, color=colour, linewidth=1.2)
    x = [x_of(point) for point in validation]
    losses = [point.loss for point in validation]
    axes.plot(x, losses, color=colour, linestyle="none", marker=marker, markersize=6)
    axes.plot([], [], line, color=colour, marker=marker, markersize=6, label=label)


def _label(axes: Axes, results: Results, x_label: str, legend_title: str | None) -> None:
    entropy = results.unigram_entropy
    plots.show_range(axes, [entropy, *_shown_losses(results)])
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
    plots.legend(axes, title=legend_title, loc="upper right")


def _shown_losses(results: Results) -> Iterator[float]:
    """Yield the losses that the axis must show: all but those of the steep first steps.

    The first steps fall alike under every method; the methods differ afterwards.
    """
    first = min(results.settings.num_steps // 4, results.settings.sync_every)
    for result in results.rows.values():
        for point in (*result.training, *result.validation):
            if point.step >= first:
                yield point.loss
