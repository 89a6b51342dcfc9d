"""How every figure of the project looks; needs matplotlib, and no display."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
_DPI = 100
# Colours of a saved PNG: enough for a figure's few colours, and the shades at the lines' edges.
_COLOURS = 64


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_panels(
    rows: int, columns: int, width: float, height: float, *, sharey: bool = False
) -> tuple[Figure, Any]:
    """Return a figure and its axes, an array [rows, columns]; the size is a panel's, in inches."""
    figure = new_figure(columns * width, rows * height)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    for axes in panels.flat:
        tidy(axes)
    return figure, panels


def tidy(axes: Axes, grid: str | None = "both") -> None:
    """Draw a faint grid along ``grid`` ("x", "y", "both"), and no frame above and at the right."""
    if grid is not None:
        axes.grid(axis=grid, alpha=0.25)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(axes: Axes, **options: Any) -> None:
    """Add a legend without a frame."""
    axes.legend(frameon=False, **options)


def level(axes: Axes, value: float, text: str) -> None:
    """Draw a thin horizontal line with a text at its right end."""
    axes.axhline(value, color="0.6", linewidth=1)
    axes.annotate(
        text,
        (1.0, value),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        color="0.4",
        fontsize="small",
    )


def show_range(axes: Axes, values: Iterable[float], share: float = 0.05) -> None:
    """Let the vertical axis show these values, with a margin of ``share`` of their span."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return
    low, high = min(finite), max(finite)
    margin = share * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low - margin, high + margin)


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the format of the file's ending; a PNG has a palette, and is small."""
    if path.suffix.lower() != ".png":
        figure.savefig(path, dpi=_DPI)
        return
    from PIL import Image

    with io.BytesIO() as buffer:
        figure.savefig(buffer, dpi=_DPI)
        buffer.seek(0)
        # The default method keeps frequent colours alone, and would drop the colours of thin lines.
        method = Image.Quantize.FASTOCTREE
        Image.open(buffer).convert("RGB").quantize(_COLOURS, method).save(path, optimize=True)
