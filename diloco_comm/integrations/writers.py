"""Write the figures of each exchange to TensorBoard, Weights & Biases, or any function::

    log_metrics(diloco, SummaryWriter())         # TensorBoard
    log_metrics(diloco, wandb.init(...))         # Weights & Biases
    log_metrics(diloco, lambda values, step: print(step, values))

This module imports neither of them. A writer has a method ``add_scalar(tag, value, step)`` or
``log(values, step=...)``, or is a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ..rounds.metrics import SyncMetrics
from ..training.diloco import DiLoCo

Write = Callable[[dict[str, float], int], None]
_POSITION = ("round", "fragment", "inner_step")


def log_metrics(diloco: DiLoCo, writer: Any, *, prefix: str = "diloco") -> None:
    """Write the figures of every later exchange, applied or skipped.

    The figures are those of ``SyncMetrics``, in seconds and bytes, without the figures that were
    not measured. A tag is ``<prefix>/<figure>``, with several fragments
    ``<prefix>/<figure>/fragment_<i>``. The step is the inner step at which the result was applied.
    One replica is enough.

    Args:
        writer: A TensorBoard ``SummaryWriter``, a W&B run (or the module ``wandb`` after its
            ``init``), or a function of a dictionary and the step.
        prefix: First part of the tags.

    Raises:
        TypeError: If the writer is of another kind.
    """
    write = _function_of(writer)
    num_fragments = len(diloco.parts)

    def on_sync(metrics: SyncMetrics) -> None:
        suffix = f"/fragment_{metrics.fragment}" if num_fragments > 1 else ""
        values = {f"{prefix}/{name}{suffix}": value for name, value in _figures(metrics).items()}
        write(values, metrics.inner_step)

    diloco.on_sync(on_sync)


class Figures:
    """Means of the figures of all exchanges since the last ``take``.

    Args:
        diloco: Its exchanges give the figures; None gives no figures.
    """

    def __init__(self, diloco: DiLoCo | None = None) -> None:
        self._values: dict[str, list[float]] = {}
        if diloco is not None:
            log_metrics(diloco, self._add)

    def _add(self, values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            self._values.setdefault(tag, []).append(value)

    def take(self) -> dict[str, float]:
        """Return the means by tag, and start anew; empty if there was no exchange."""
        means = {tag: sum(values) / len(values) for tag, values in self._values.items()}
        self._values = {}
        return means


def _figures(metrics: SyncMetrics) -> dict[str, float]:
    found = {field.name: getattr(metrics, field.name) for field in fields(metrics)}
    # A tuple counts by its number of entries.
    values = {k: float(len(v) if isinstance(v, tuple) else v) for k, v in found.items()}
    return {k: v for k, v in values.items() if k not in _POSITION and not math.isnan(v)}


def _function_of(writer: Any) -> Write:
    if hasattr(writer, "add_scalar"):

        def to_tensorboard(values: dict[str, float], step: int) -> None:
            for tag, value in values.items():
                writer.add_scalar(tag, value, step)

        return to_tensorboard
    if hasattr(writer, "log"):
        return lambda values, step: writer.log(values, step=step)
    if callable(writer):
        return writer
    raise TypeError(
        "writer must have add_scalar (TensorBoard) or log (Weights & Biases), or be a function of "
        f"a dictionary and a step, got a {type(writer).__name__}"
    )
