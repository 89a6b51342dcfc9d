"""Write the figures of each exchange to TensorBoard, Weights & Biases, or any function::

    log_metrics(diloco, SummaryWriter())         # TensorBoard
    log_metrics(diloco, wandb.init(...))         # Weights & Biases
    log_metrics(diloco, lambda values, step: print(step, values))

This module imports neither package. A writer has a method ``add_scalar(tag, value, step)`` or
``log(values, step=...)``, or is a function.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, get_args

from ..base.checks import class_of
from ..rounds.metrics import SyncMetrics
from ..training.diloco import DiLoCo

Write = Callable[[dict[str, float], int], None]
Choice = Literal["main", "all"]
FIGURES = get_args(Choice)
_POSITION = ("round", "fragment", "inner_step")


def log_metrics(diloco: DiLoCo, writer: Any, *, prefix: str = "diloco") -> None:
    """Write the figures of every later exchange, applied or skipped.

    The figures are those of ``SyncMetrics``, in seconds and bytes, without the figures that were
    not measured. A tag is ``<prefix>/<figure>``, with several fragments
    ``<prefix>/<figure>/fragment_<i>``. The step is the inner step at which the result was applied.
    W&B drops values at a step below its own step, which counts the program's calls: there the
    figures join the open row, and ``<prefix>/inner_step`` is their axis. The figures of one replica
    are enough.

    Args:
        writer: A TensorBoard ``SummaryWriter``, a W&B run (or the module ``wandb`` after its
            ``init``), or a function of a dictionary and the step.
        prefix: First part of the tags.

    Raises:
        TypeError: If the writer is of another kind.
    """
    write = _function_of(writer, prefix)
    num_fragments = len(diloco.parts)

    def on_sync(metrics: SyncMetrics) -> None:
        suffix = f"/fragment_{metrics.fragment}" if num_fragments > 1 else ""
        values = {f"{prefix}/{name}{suffix}": value for name, value in _figures(metrics).items()}
        write(values, metrics.inner_step)

    diloco.on_sync(on_sync)


class Figures:
    """The figures of all exchanges since the last ``take``.

    Args:
        diloco: Its exchanges give the figures; None gives no figures.
        choice: "main" for four figures, "all" for the means of the figures of ``log_metrics`` too.
    """

    def __init__(self, diloco: DiLoCo | None = None, choice: Choice = "main") -> None:
        self._since: list[SyncMetrics] = []
        self._values: dict[str, list[float]] = {}
        # The drift of each fragment in its last round; together they give the whole model's drift.
        self._norms: dict[int, float] = {}
        if diloco is not None:
            diloco.on_sync(self._since.append)
            # The trainer's own log has these figures, so DiLoCo logs its progress at DEBUG only.
            diloco._progress.level = logging.DEBUG
            if choice == "all":
                log_metrics(diloco, self._add)

    def _add(self, values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            self._values.setdefault(tag, []).append(value)

    def take(self) -> dict[str, float]:
        """Return the figures by tag, and start anew; empty if there was no exchange.

        The four: megabytes sent, seconds waited, the share of the exchange that was hidden, and
        the drift, which is the L2 distance between the local and the outer parameters when they
        were sent. The drift is missing with ``norms=False``.
        """
        if not self._since:
            return {}
        waited = sum(one.exposed_s for one in self._since)
        values = {tag: sum(found) / len(found) for tag, found in self._values.items()}
        values["diloco/sent_mb"] = sum(one.sent_bytes for one in self._since) / 1e6
        values["diloco/waited_s"] = waited
        exchange_s = sum(one.exchange_s for one in self._since)
        hidden_s = sum(one.hidden_s for one in self._since)
        values["diloco/hidden_share"] = hidden_s / exchange_s if exchange_s > 0 else 0.0
        norms = {one.fragment: one.pseudo_gradient_norm for one in self._since}
        self._norms |= {fragment: norm for fragment, norm in norms.items() if math.isfinite(norm)}
        if self._norms:
            values["diloco/drift"] = math.hypot(*self._norms.values())
        self._since.clear()
        self._values = {}
        return values


def _figures(metrics: SyncMetrics) -> dict[str, float]:
    found = {field.name: getattr(metrics, field.name) for field in fields(metrics)}
    # A tuple counts by its number of entries.
    values = {k: float(len(v) if isinstance(v, tuple) else v) for k, v in found.items()}
    return {k: v for k, v in values.items() if k not in _POSITION and not math.isnan(v)}


def _function_of(writer: Any, prefix: str) -> Write:
    if hasattr(writer, "add_scalar"):

        def to_tensorboard(values: dict[str, float], step: int) -> None:
            for tag, value in values.items():
                writer.add_scalar(tag, value, step)

        return to_tensorboard
    if hasattr(writer, "define_metric"):
        return _to_wandb(writer, prefix)
    if hasattr(writer, "log"):
        return lambda values, step: writer.log(values, step=step)
    if callable(writer):
        return writer
    raise TypeError(
        "writer must have add_scalar (TensorBoard) or log (Weights & Biases), or be a function of "
        f"a dictionary and a step, got {class_of(writer)}"
    )


def _to_wandb(run: Any, prefix: str) -> Write:
    """Write into W&B's open row, so that its step stays the program's.

    If several exchanges fall into one row, the row has the means of their figures. A program that
    logs nothing itself gets a row for each exchange.
    """
    axis = f"{prefix}/inner_step"
    run.define_metric(f"{prefix}/*", step_metric=axis)
    written: dict[str, list[float]] = {}
    row, program_logs = -1, False

    def write(values: dict[str, float], step: int) -> None:
        nonlocal row, program_logs
        # The module wandb, which is a writer too, has its run as ``wandb.run``.
        own = getattr(run, "run", run)
        if own.step != row:
            program_logs |= row >= 0
            written.clear()
        elif not program_logs and not written.keys().isdisjoint(values):
            run.log({}, commit=True)
            written.clear()
        row = own.step
        for tag, value in values.items():
            written.setdefault(tag, []).append(value)
        means = {tag: sum(written[tag]) / len(written[tag]) for tag in values}
        run.log({**means, axis: step}, commit=False)

    return write
