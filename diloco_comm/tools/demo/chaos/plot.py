"""The figure of a chaos demo: loss, membership and tokens a second over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common import plots
from .messages import DONE, LEFT_BEHIND
from .record import STARTING, STOPPED, TRAINING, WAITING, Band, Record, Track
from .results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE, plots.SKY)
_RED = plots.VERMILION
# Seconds over which a point of a curve is a mean.
_SPAN_S = 2.0
_LABELS = {
    "kill": "killed",
    "registry down": "registry\nkilled",
    "registry up": "and back",
    "join": "started",
    "stop": "stopped",
    "resume": "wakes up",
}
_HEIGHT = 0.62


def plot_results(results: Results, path: Path) -> None:
    """Write the figure; needs matplotlib, and no display."""
    record = results.record
    figure = plots.new_figure(10.5, 7.6)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=[3, 3.2, 1.8])
    loss, bands, rate = panels
    for axes in panels:
        plots.tidy(axes, "x" if axes is bands else "both")
        _mark_events(axes, results)
    _draw_loss(loss, results)
    _draw_bands(bands, record)
    _draw_rate(rate, results)
    rate.set_xlabel("seconds since the first view")
    rate.set_xlim(0.0, record.duration)
    figure.suptitle(
        "Replicas are killed, stopped and started while they train "
        f"({record.num_parameters / 1e6:.2f} million parameters, wire {results.settings.wire})"
    )
    plots.save(figure, path)


def _mark_events(axes: Axes, results: Results) -> None:
    for event in results.record.events:
        if event.kind in _LABELS:
            axes.axvline(event.at, color="0.55", linewidth=0.9, linestyle=":")


def _draw_loss(axes: Axes, results: Results) -> None:
    record = results.record
    for track in record.tracks:
        points = [(at, loss) for at, _, loss in track.steps if at > 0]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, ",", color=COLOURS[track.number], alpha=0.8)
    x, y = zip(*record.mean_loss(_SPAN_S, 0.25), strict=True)
    axes.plot(x, y, color=plots.BLACK, linewidth=1.6, label="mean of all replicas")
    axes.axhline(results.unigram_entropy, color="0.6", linewidth=1)
    axes.annotate(
        "unigram entropy of the text",
        (1.0, results.unigram_entropy),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        color="0.4",
        fontsize="small",
    )
    axes.set_ylabel("training loss\n(nats a byte)")
    plots.legend(axes, loc="upper right")
    height = axes.get_ylim()[1]
    for event in record.events:
        if event.kind in _LABELS:
            who = f"replica {event.replica}\n" if event.replica >= 0 else ""
            axes.annotate(
                f"{who}{_LABELS[event.kind]}",
                (event.at, height),
                xytext=(3, -2),
                textcoords="offset points",
                va="top",
                fontsize="small",
                color="0.25",
            )


def _draw_bands(axes: Axes, record: Record) -> None:
    numbers = sorted({track.number for track in record.tracks})
    for track in record.tracks:
        for band in record.bands(track):
            _draw_band(axes, track.number, band)
        _draw_end(axes, track)
    _draw_registry(axes, record, row=len(numbers))
    axes.set_yticks([*numbers, len(numbers)], [*[f"replica {n}" for n in numbers], "registry"])
    axes.invert_yaxis()
    axes.set_ylabel("membership")
    for what in (TRAINING, WAITING, STARTING, STOPPED):
        axes.barh([0], [0], **_style(what, "0.4"), label=what)
    axes.legend(
        frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 0.99), fontsize="small"
    )


def _style(what: str, colour: str) -> dict[str, Any]:
    styles: dict[str, dict[str, Any]] = {
        TRAINING: {"color": colour},
        WAITING: {"color": colour, "alpha": 0.3},
        STARTING: {"facecolor": "white", "edgecolor": colour, "hatch": "////", "linewidth": 0.6},
        STOPPED: {"facecolor": "0.93", "edgecolor": _RED, "hatch": "xx", "linewidth": 0.6},
    }
    return styles[what]


def _draw_band(axes: Axes, number: int, band: Band) -> None:
    begin = max(0.0, band.begin)
    if band.end > begin:
        style = _style(band.what, COLOURS[number])
        axes.barh([number], [band.end - begin], left=begin, height=_HEIGHT, **style)


def _draw_end(axes: Axes, track: Track) -> None:
    if track.ended is not None and track.how != DONE:
        is_left_behind = track.how == LEFT_BEHIND
        marker = "4" if is_left_behind else "x"
        axes.plot([track.ended], [track.number], marker, color=_RED, markersize=9, mew=2)


def _draw_registry(axes: Axes, record: Record, row: int) -> None:
    begin = 0.0
    for event in record.events:
        if event.kind == "registry down":
            axes.barh([row], [event.at - begin], left=begin, height=_HEIGHT, color="0.6")
            axes.plot([event.at], [row], "x", color=_RED, markersize=9, mew=2)
        elif event.kind == "registry up":
            begin = event.at
    axes.barh([row], [record.duration - begin], left=begin, height=_HEIGHT, color="0.6")


def _draw_rate(axes: Axes, results: Results) -> None:
    points = results.record.rate(results.settings.tokens_per_step, 1.0)
    x, y = zip(*points, strict=True)
    axes.fill_between(x, y, step="mid", color=plots.GREY, alpha=0.35)
    axes.step(x, y, where="mid", color=plots.BLACK, linewidth=1.2)
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("tokens a second,\nall replicas")
