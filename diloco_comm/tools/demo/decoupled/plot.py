"""The figure of the demo of decoupled training; needs matplotlib."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from ...common import plots
from .results import Results

_COLOURS = (plots.BLUE, plots.GREEN, plots.SKY, plots.PURPLE, plots.ORANGE, plots.BLACK)


def plot_results(results: Results, path: Path) -> None:
    """Draw the steps of each learner over time, and how long each step lasted."""
    figure, panels = plots.new_panels(2, 1, 8.0, 3.0)
    above, below = panels[:, 0]
    for index, track in enumerate(results.tracks):
        times = [step.at - results.began for step in track.steps]
        colour, label = _look_of(results, index)
        above.plot(times, range(1, len(times) + 1), color=colour, label=label)
        lasted = [b - a for a, b in pairwise(times)]
        below.plot(times[1:], lasted, ".", color=colour, markersize=3)
        if index == results.demo.killed and times:
            above.plot(times[-1], len(times), "X", color=colour, markersize=9)
    for axes in (above, below):
        axes.axvline(results.killed_at - results.began, color=plots.GREY, linestyle=":")
    above.set_ylabel("inner steps")
    below.set_ylabel("seconds of a step")
    below.set_xlabel("seconds")
    below.set_ylim(bottom=0.0)
    above.set_title("A learner is slow, another is killed: the steps of the others go on")
    plots.legend(above)
    plots.save(figure, path)


def _look_of(results: Results, index: int) -> tuple[str, str]:
    if index == results.demo.killed:
        return plots.VERMILION, f"learner {index}, killed"
    colour = _COLOURS[index % len(_COLOURS)]
    is_slow = index == results.demo.slow
    return colour, f"learner {index}, slow" if is_slow else f"learner {index}"
