"""Show what each outer step cost in TensorBoard, Weights & Biases, or wherever numbers go::

    log_metrics(diloco, SummaryWriter())         # TensorBoard
    log_metrics(diloco, wandb.init(...))         # Weights & Biases
    log_metrics(diloco, lambda values, step: print(step, values))

None of them is imported here: what is asked for is a method ``add_scalar(tag, value, step)`` or
``log(values, step=...)``, or a function.
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
    """Write the figures of every exchange, applied or skipped, from now on.

    Tags are ``<prefix>/<figure>``, with several fragments ``<prefix>/<figure>/fragment_<i>``; the
    figures are those of ``SyncMetrics``, seconds and bytes; the step is the inner step at which
    the result was applied. Figures that were not measured are left out. On one replica is enough.

    Args:
        writer: A TensorBoard ``SummaryWriter``, a W&B run (or the module ``wandb`` after its
            ``init``), or a function of a dictionary and the step.

    Raises:
        TypeError: If the writer is none of these.
    """
    write = _function_of(writer)
    num_fragments = len(diloco.parts)

    def on_sync(metrics: SyncMetrics) -> None:
        suffix = f"/fragment_{metrics.fragment}" if num_fragments > 1 else ""
        values = {f"{prefix}/{name}{suffix}": value for name, value in _figures(metrics).items()}
        write(values, metrics.inner_step)

    diloco.on_sync(on_sync)


class Figures:
    """The means of the figures of all exchanges, until they are taken.

    Args:
        diloco: Whose exchanges; there are no figures without it.
    """

    def __init__(self, diloco: DiLoCo | None = None) -> None:
        self._values: dict[str, list[float]] = {}
        if diloco is not None:
            log_metrics(diloco, self._add)

    def _add(self, values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            self._values.setdefault(tag, []).append(value)

    def take(self) -> dict[str, float]:
        """Return the means by tag, and forget them; empty if nothing was exchanged since."""
        means = {tag: sum(values) / len(values) for tag, values in self._values.items()}
        self._values = {}
        return means


def _figures(metrics: SyncMetrics) -> dict[str, float]:
    found = {field.name: getattr(metrics, field.name) for field in fields(metrics)}
    # Of a list, the number of its entries.
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
